"""Stored runs: the folder, the journal, and what reads, checks and rewrites them."""
