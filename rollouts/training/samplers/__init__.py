"""Samplers: they choose the prompt of each group, for ``DataBuffer(prompts, sampler=…)``."""

from rollouts.training.samplers.base import Sampler
from rollouts.training.samplers.levels import LevelSampler
from rollouts.training.samplers.pass_rate import PassRateSampler
from rollouts.training.samplers.pools import PoolSampler

__all__ = ["LevelSampler", "PassRateSampler", "PoolSampler", "Sampler"]
