"""Rollouts in other processes, on this machine or on many: their groups are shared out, everything else stays one."""

from rollouts.distributed.dispatch import Dispatcher
from rollouts.distributed.processes import in_processes
from rollouts.distributed.worker import RecipeConfig

__all__ = ["Dispatcher", "RecipeConfig", "in_processes"]
