"""Several environments in one run: calculator, countdown and guess, in proportion.

rollouts run mixed --out runs/mixed --set 'weights={"calculator": 2, "countdown": 1, "guess": 1}'
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.environments.mixed import MixedEnvironment
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.recipes.environments.countdown import Countdown, countdown_prompts, countdown_reward
from rollouts.recipes.environments.guess import GuessEnvironment, guess_prompts, guess_reward
from rollouts.training.mixing import MixedReward, mixed_prompts

ENVIRONMENTS = {"calculator": CalculatorEnvironment, "countdown": Countdown, "guess": GuessEnvironment}
PROMPTS: dict[str, Callable[[int], Iterator[Prompt]]] = {
    "calculator": calculator_prompts,
    "countdown": countdown_prompts,
    "guess": guess_prompts,
}
REWARDS = {"calculator": exact_answer_reward, "countdown": countdown_reward, "guess": guess_reward}


@recipe_defaults(max_new_tokens=256)
def recipe(
    endpoint: Endpoint,
    *,
    weights: dict[str, float] | None = None,
    prompts: int = 2000,
    max_turns: int = 8,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Each batch has the environments' prompts by weight, and metrics for each environment."""
    weights = dict.fromkeys(ENVIRONMENTS, 1.0) if weights is None else weights
    unknown = weights.keys() - ENVIRONMENTS.keys()
    if unknown:
        raise ConfigError.of("option weights", sorted(unknown), f"names among {sorted(ENVIRONMENTS)}")
    parts = {name: (weight, islice(PROMPTS[name](seed), prompts)) for name, weight in weights.items()}
    return agent_recipe(
        "mixed",
        endpoint,
        partial(MixedEnvironment, {name: ENVIRONMENTS[name] for name in weights}),
        mixed_prompts(parts, prompts, seed=seed),
        shuffled=False,
        reward_fn=MixedReward(REWARDS),
        max_turns=max_turns,
        seed=seed,
        **options,
    )
