"""Rollouts in other processes, on this machine or on many: their groups are shared out, everything else stays one."""

from rollouts.distributed.dispatch import Dispatcher
from rollouts.distributed.player import RecipeConfig
from rollouts.distributed.workers import in_processes

__all__ = ["Dispatcher", "RecipeConfig", "in_processes"]
