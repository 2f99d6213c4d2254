"""Several environments in one run: calculator, countdown and guess, in proportion.

rollouts run mixed --out runs/mixed --set 'weights={"calculator": 2, "countdown": 1, "guess": 1}'
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Literal

from rollouts.dtypes import Endpoint, OnRewrite, Prompt
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.environments.mixed import MixedEnvironment
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, agent_recipe
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


def recipe(
    endpoint: Endpoint,
    *,
    weights: dict[str, float] | None = None,
    prompts: int = 2000,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 256,
    max_turns: int = 8,
    keep: Literal["spread", "all"] = "spread",
    history: OnRewrite = "append",
    batches: int = 1,
    seed: int = 0,
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
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
    )
