"""Guests that spend the data: a small GRPO trainer and the loop that learns with it. They import the package only."""
