"""A simulated user, which is not trained, and an agent with a calculator."""

from rollouts.recipes.environments.user.task import errands, play

__all__ = ["errands", "play"]
