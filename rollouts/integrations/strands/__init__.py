"""Strands agents as environments."""

from rollouts.integrations.strands.environment import PromptedModel, StrandsEnvironment

__all__ = ["PromptedModel", "StrandsEnvironment"]
