"""Countdown: combine given numbers to a target, using each once."""

from rollouts.recipes.environments.countdown.task import Countdown, countdown_prompts, countdown_reward, load_countdown

__all__ = ["Countdown", "countdown_prompts", "countdown_reward", "load_countdown"]
