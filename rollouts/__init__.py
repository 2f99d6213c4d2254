"""rollouts: turn an inference endpoint and an environment class into training data that can be trusted."""

__version__ = "0.1.0"
