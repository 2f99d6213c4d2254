"""What runs untrusted code in a process of its own: launcher, supervisor, child, and the system calls that they use."""
