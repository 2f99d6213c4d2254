"""Predict how soon a batch fills, from stored runs or a latency shape."""
