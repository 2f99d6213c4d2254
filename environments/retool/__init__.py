"""ReTool: mathematics with Python as a tool."""

from rollouts.recipes.environments.retool.tags import STOP, CodeTagsEnvironment
from rollouts.recipes.environments.retool.task import RetoolEnvironment, load_maths

__all__ = ["STOP", "CodeTagsEnvironment", "RetoolEnvironment", "load_maths"]
