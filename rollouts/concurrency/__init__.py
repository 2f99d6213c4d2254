"""Deadlines, cancellation, and the boundary that runs user code."""
