"""Environments of other packages, one file each, which imports its package when an episode starts.

Invariant: an adapter changes no text of the model and none of the environment; what it cannot carry is refused by name.
"""
