"""Kuhn poker between two seats: the rules, the play, and exact values and gradients of the game."""

from rollouts.recipes.environments.kuhn.task import kuhn_deals, play

__all__ = ["kuhn_deals", "play"]
