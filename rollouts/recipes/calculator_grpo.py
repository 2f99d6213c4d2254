"""Calculator agents for training: smaller batches than calculator, and every group kept.

scripts/learn
"""

import attrs

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe
from rollouts.recipes.calculator import recipe as calculator


def recipe(
    endpoint: Endpoint,
    *,
    batch_size: int = 16,
    n_samples_per_prompt: int = 8,
    over_sampling_factor: float = 1.0,
    max_new_tokens: int = 64,
    max_turns: int = 4,
    prompts: int = 4000,
    two_step_share: float = 0.5,
    seed: int = 0,
) -> Recipe:
    """Groups without spread stay in the batch, so that its mean reward is the policy's. The trainer skips them."""
    recipe = calculator(
        endpoint,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        over_sampling_factor=over_sampling_factor,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        prompts=prompts,
        two_step_share=two_step_share,
        seed=seed,
    )
    return attrs.evolve(recipe, name="calculator_grpo", config=attrs.evolve(recipe.config, filter_fn=None))
