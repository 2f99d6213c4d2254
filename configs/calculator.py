"""Calculator agents: several turns, four tools, a reward for the exact final sentence.

rollouts run calculator --out runs/calculator
"""

from itertools import islice
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.training import Sample


def exact_answer_reward(sample: Sample) -> float:
    """1 if the last message is the reply ``The answer is N.`` with the right N, else 0."""
    last = sample.messages[-1] if sample.messages else {}
    return float(last.get("role") == "assistant" and last.get("content") == f"The answer is {sample.label}.")


@recipe_defaults(temperature=1.0, max_new_tokens=128)
def recipe(
    endpoint: Endpoint,
    *,
    max_turns: int = 6,
    prompts: int = 400,
    two_step_share: float = 0.5,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Generated problems in one or two steps; groups whose rewards do not differ are dropped."""
    return agent_recipe(
        "calculator",
        endpoint,
        CalculatorEnvironment,
        islice(calculator_prompts(seed, two_step_share=two_step_share), prompts),
        reward_fn=exact_answer_reward,
        max_turns=max_turns,
        seed=seed,
        **options,
    )
