"""Calculator agents: several turns, four tools, a reward for the exact final sentence.

rollouts run configs/calculator.py --out runs/calculator
"""

from functools import partial
from itertools import islice

import attrs

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe
from rollouts.training import DataBuffer, RolloutConfig, Sample, check_reward_nonzero_std, generate_rollout_batch


def exact_answer_reward(sample: Sample) -> float:
    """1 if the last thing the model said is ``The answer is N.`` with the right N, else 0."""
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
    seed: int = 0,
) -> Recipe:
    """Generated problems in one or two steps; groups whose rewards do not differ are dropped."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    endpoint = attrs.evolve(endpoint, sampling=sampling)
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=CalculatorEnvironment,
        endpoint=endpoint,
        tokenizer=endpoint.model,
        max_turns=max_turns,
    )
    problems = islice(calculator_prompts(seed, two_step_share=two_step_share), prompts)
    return Recipe(
        name="calculator",
        config=RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_factor=over_sampling_factor,
            generate_fn=generate_fn,
            reward_fn=exact_answer_reward,
            filter_fn=check_reward_nonzero_std,
        ),
        data_buffer=DataBuffer(problems, seed=seed, epochs=epochs),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=CalculatorEnvironment,
        batches=batches,
        seed=seed,
    )
