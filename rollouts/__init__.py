"""rollouts: an inference endpoint and an environment class in, training data that can be trusted out."""

__version__ = "0.1.0"
