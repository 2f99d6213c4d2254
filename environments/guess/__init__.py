"""Guess a number: a game with a state, and a reward for every step."""

from rollouts.recipes.environments.guess.task import GuessEnvironment, guess_prompts, guess_reward

__all__ = ["GuessEnvironment", "guess_prompts", "guess_reward"]
