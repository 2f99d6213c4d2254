"""Calculator agents for training: smaller batches than calculator, every group kept, and problems by kind.

scripts/learn
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, Unpack

import attrs

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.configs.calculator import exact_answer_reward

HELD_OUT_PAIRS = ("+*", "*-", "-+")
"""Operators of two steps that no training problem has."""

KINDS: dict[str, dict[str, Any]] = {
    "trained": {
        "two_step_share": 0.34,
        "numbers": (1, 59),
        "pairs": [a + b for a in "+-*" for b in "+-*" if a + b not in HELD_OUT_PAIRS],
    },
    "one_step_60_99": {"two_step_share": 0.0, "numbers": (60, 99)},
    "unseen_pairs_60_99": {"two_step_share": 1.0, "numbers": (60, 99), "pairs": HELD_OUT_PAIRS},
}
"""Problems to train on, and two kinds that are only evaluated on: none of their numbers or pairs is trained on."""
_HOPELESS_SHARE, _LONG_STEPS = 0.6, 6
"""Of the kinds ``unequal`` and ``mislabelled``: the share of problems that no rollout solves. In the first they have
more steps than an episode has turns; in the second, where they cost as many tokens as the others, a wrong label."""
_FAR = 1_000_000
"""Added to the answer of a mislabelled problem: no guess is right by chance."""


def _problems(kind: str, seed: int) -> Iterator[Prompt]:
    """Yield problems of a kind without end."""
    if kind in KINDS:
        yield from calculator_prompts(seed, **KINDS[kind])
    rng = random.Random(seed)
    for prompt in calculator_prompts(seed, **KINDS["trained"]):
        if kind == "mislabelled":
            hopeless = rng.random() < _HOPELESS_SHARE
            yield _labelled(prompt, str(int(prompt.label) + _FAR)) if hopeless else prompt
            continue
        while rng.random() < _HOPELESS_SHARE:
            yield _long_problem(rng)
        yield prompt


def _labelled(prompt: Prompt, label: str) -> Prompt:
    """The same problem with another answer."""
    return attrs.evolve(prompt, label=label, metadata={**prompt.metadata, "ground_truth": label})


def _long_problem(rng: random.Random) -> Prompt:
    answer = rng.randint(10, 59)
    text = str(answer)
    for _ in range(_LONG_STEPS):
        operator, other = rng.choice("+-"), rng.randint(10, 59)
        text = f"({text} {operator} {other})"
        answer = answer + other if operator == "+" else answer - other
    return Prompt(f"What is {text[1:-1]}?", label=str(answer), metadata={"ground_truth": str(answer)})


@recipe_defaults(batch_size=16, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    kind: Literal["trained", "one_step_60_99", "unseen_pairs_60_99", "unequal", "mislabelled"] = "trained",
    max_turns: int = 4,
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Groups without spread stay in the batch, so that its mean reward is the policy's. The trainer skips them."""
    return agent_recipe(
        "calculator_grpo",
        endpoint,
        CalculatorEnvironment,
        islice(_problems(kind, seed), prompts),
        reward_fn=exact_answer_reward,
        max_turns=max_turns,
        seed=seed,
        **options,
    )
