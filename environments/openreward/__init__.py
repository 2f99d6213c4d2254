"""OpenReward's training kit on exact tokens: its configuration, tasks, rewards and trajectories."""

from rollouts.recipes.environments.openreward.config import EnvironmentSettings, KitSettings, load_settings
from rollouts.recipes.environments.openreward.export import Trajectories, events_of
from rollouts.recipes.environments.openreward.rewards import group_reward, own_reward, reward
from rollouts.recipes.environments.openreward.rollout import KitEnvironment, generate
from rollouts.recipes.environments.openreward.tasks import prepare_tasks

__all__ = [
    "EnvironmentSettings",
    "KitEnvironment",
    "KitSettings",
    "Trajectories",
    "events_of",
    "generate",
    "group_reward",
    "load_settings",
    "own_reward",
    "prepare_tasks",
    "reward",
]
