"""Conformance of a server: what a run relies on, asked point by point of a running server."""
