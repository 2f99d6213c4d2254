"""Count shapes in generated images, with a tool that zooms."""

from rollouts.recipes.environments.visual.task import VisualEnvironment, visual_prompts

__all__ = ["VisualEnvironment", "visual_prompts"]
