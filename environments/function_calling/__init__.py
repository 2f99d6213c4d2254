"""Function calling on tasks of the Berkeley leaderboard."""

from rollouts.recipes.environments.function_calling.task import FunctionCalling, call_reward, load_calls
from rollouts.recipes.environments.function_calling.turns import CallsInTurns, load_turns, turns_reward

__all__ = ["CallsInTurns", "FunctionCalling", "call_reward", "load_calls", "load_turns", "turns_reward"]
