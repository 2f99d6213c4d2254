"""Inference endpoints: tokens in, tokens out, over HTTP."""
