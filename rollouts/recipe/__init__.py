"""Recipes: a run as a function of an endpoint, and the files that contain one."""

from rollouts.recipe.recipe import (
    OPTION_DEFAULTS,
    AllOptions,
    Recipe,
    RecipeOptions,
    agent_recipe,
    assembled_recipe,
    check_environment,
    check_recipe,
    named_options,
    preflight,
    recipe_defaults,
)

__all__ = [
    "OPTION_DEFAULTS",
    "AllOptions",
    "Recipe",
    "RecipeOptions",
    "agent_recipe",
    "assembled_recipe",
    "check_environment",
    "check_recipe",
    "named_options",
    "preflight",
    "recipe_defaults",
]
