"""Conformance of a running server: the behaviour that a run relies on, asked point by point."""
