"""ReTool: mathematics with Python as a tool."""

from rollouts.recipes.environments.retool.task import RetoolEnvironment, load_maths

__all__ = ["RetoolEnvironment", "load_maths"]
