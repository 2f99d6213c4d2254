"""Rollouts in worker processes, on one machine or many: groups are distributed; manager and journal stay here."""

from rollouts.distributed.dispatch import Dispatcher
from rollouts.distributed.processes import in_processes
from rollouts.distributed.worker import RecipeConfig

__all__ = ["Dispatcher", "RecipeConfig", "in_processes"]
