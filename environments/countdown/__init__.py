"""Countdown: make a number out of others, each used once."""

from environments.countdown.task import Countdown, countdown_prompts, countdown_reward, load_countdown

__all__ = ["Countdown", "countdown_prompts", "countdown_reward", "load_countdown"]
