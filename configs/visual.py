"""Count coloured shapes in generated images, with a tool that zooms.

rollouts run visual --out runs/visual
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.visual import VisualEnvironment, visual_prompts
from rollouts.rewards import numeric_match


@recipe_defaults(max_new_tokens=512)
def recipe(
    endpoint: Endpoint,
    *,
    prompts: int = 500,
    size: int = 240,
    shapes: int = 12,
    max_turns: int = 4,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Generated scenes; needs a vision model, and the extra ``images``."""
    return agent_recipe(
        "visual",
        endpoint,
        VisualEnvironment,
        islice(visual_prompts(seed, size=size, shapes=shapes), prompts),
        reward_fn=numeric_match,
        max_turns=max_turns,
        seed=seed,
        images=True,
        **options,
    )
