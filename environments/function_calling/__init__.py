"""Function calling: the right call with the right arguments, on tasks of the Berkeley leaderboard."""

from environments.function_calling.task import FunctionCalling, call_reward, load_calls

__all__ = ["FunctionCalling", "call_reward", "load_calls"]
