"""TRL's hooks without TRL: what is refused before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.trl import RolloutFunc
from rollouts.training import Prompt, RolloutConfig, Sample


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    return [Sample() for _ in prompts]


def test_variables_of_the_template_belong_to_the_generate_function() -> None:
    """TRL renders no prompt here, so its ``chat_template_kwargs`` would have no effect."""
    trainer = SimpleNamespace(chat_template_kwargs={"enable_thinking": False})
    with RolloutFunc(RolloutConfig(batch_size=1, generate_fn=generate), [Prompt("Hi")]) as rollout_func:
        with pytest.raises(
            ConfigError, match=r"GRPOConfig.chat_template_kwargs: got .*; expected none: .*template_kwargs"
        ):
            rollout_func(["Hi"], trainer)
