"""What toys say and tests expect."""

LONG = "".join(f"{number:>9}" for number in range(2000))
"""Longer than a piece of a stream, with spaces at the edges of pieces."""
