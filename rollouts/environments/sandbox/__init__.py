"""What runs untrusted code in a process of its own: launcher, warden, cell, and the kernel's words for them."""
