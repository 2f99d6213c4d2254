"""Calculator agents: several turns, four tools, a reward for the exact final sentence.

rollouts run calculator --out runs/calculator
"""

from itertools import islice

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, agent_recipe
from rollouts.training import Sample


def exact_answer_reward(sample: Sample) -> float:
    """1 if the last message is the reply ``The answer is N.`` with the right N, else 0."""
    last = sample.messages[-1] if sample.messages else {}
    return float(last.get("role") == "assistant" and last.get("content") == f"The answer is {sample.label}.")


def recipe(
    endpoint: Endpoint,
    *,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    over_sampling_factor: float = 1.5,
    temperature: float = 1.0,
    max_new_tokens: int = 128,
    max_turns: int = 6,
    prompts: int = 400,
    two_step_share: float = 0.5,
    epochs: int | None = None,
    batches: int = 1,
    history: OnRewrite = "append",
    seed: int = 0,
) -> Recipe:
    """Generated problems in one or two steps; groups whose rewards do not differ are dropped."""
    return agent_recipe(
        "calculator",
        endpoint,
        CalculatorEnvironment,
        islice(calculator_prompts(seed, two_step_share=two_step_share), prompts),
        reward_fn=exact_answer_reward,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        over_sampling_factor=over_sampling_factor,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        history=history,
        epochs=epochs,
        batches=batches,
        seed=seed,
    )
