"""Count coloured shapes in generated images, with a tool that zooms.

rollouts run visual --out runs/visual
"""

from itertools import islice
from typing import Literal

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.visual import VisualEnvironment, visual_prompts
from rollouts.rewards import numeric_match


def recipe(
    endpoint: Endpoint,
    *,
    prompts: int = 500,
    size: int = 240,
    shapes: int = 12,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 512,
    max_turns: int = 4,
    keep: Literal["spread", "all"] = "spread",
    history: OnRewrite = "append",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Generated scenes; needs a vision model, and the extra ``images``."""
    return agent_recipe(
        "visual",
        endpoint,
        VisualEnvironment,
        islice(visual_prompts(seed, size=size, shapes=shapes), prompts),
        reward_fn=numeric_match,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
        images=True,
    )
