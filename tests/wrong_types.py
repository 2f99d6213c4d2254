"""Mistakes of users that a type checker finds: mypy fails on an ignored error that is none, and so does pyright.

Nothing runs this module. ``tests/integration/test_type_checkers.py`` runs pyright on it; the gate runs mypy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.recipe import agent_recipe
from rollouts.training import RolloutConfig, Sample, generate_rollout_batch

endpoint = Endpoint(model="m", base_url="http://127.0.0.1:1")
agents = partial(generate_rollout_batch, environment_cls=CalculatorEnvironment, endpoint=endpoint, tokenizer="m")


def says_yes(samples: Sequence[Sample]) -> str:
    return "yes"


RolloutConfig(batch_size=3, batch_sizes=3, generate_fn=agents)  # type: ignore[call-arg]
RolloutConfig(batch_size="3", generate_fn=agents)  # type: ignore[arg-type]
RolloutConfig(batch_size=3, generate_fn=agents, filter_fn=says_yes)  # type: ignore[arg-type]
SamplingParams(temprature=1.0)  # type: ignore[call-arg]
print(Sample(prompt="a").loss_masks)  # type: ignore[attr-defined]
Endpoint(provider="openai", model="m", base_url="http://127.0.0.1:1")  # type: ignore[arg-type]
agent_recipe("x", endpoint, CalculatorEnvironment, ["a"], batchsize=3)  # type: ignore[call-arg]
partial(generate_rollout_batch, environment_cls=3, endpoint=endpoint, tokenizer="m")  # type: ignore[arg-type]
