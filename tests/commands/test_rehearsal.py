"""The rehearsal refuses a recipe that cannot work, spends nothing, and refuses no recipe that may work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from rollouts.commands.rehearsal import rehearse
from rollouts.dtypes import Endpoint, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult
from rollouts.errors import ConfigError, GenerateFailure, RewardFailure
from rollouts.recipe import Recipe, agent_recipe
from rollouts.rewards.remote import RemoteReward
from rollouts.training import DataBuffer, Sample


async def zero(sample: Sample) -> float:
    return 0.0


def recipe_of(environment_cls: Any = CalculatorEnvironment, **fields: Any) -> Recipe:
    """A recipe with three prompts; no server is at its endpoint."""
    config = {name: fields.pop(name) for name in ("filter_fn", "group_rm") if name in fields}
    recipe = agent_recipe(
        "toy",
        Endpoint(base_url="http://127.0.0.1:9", model=str(DEMO_MODEL)),
        environment_cls,
        ["1 + 2?", "2 + 2?", "3 + 2?"],
        **{"reward_fn": zero, "n_samples_per_prompt": 3, **fields},
    )
    return attrs.evolve(recipe, config=attrs.evolve(recipe.config, **config))


class Down(CalculatorEnvironment):
    """A world that does not start."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        raise ConnectionError("the world is down")


class Silent(CalculatorEnvironment):
    """A world that answers nothing."""

    async def step(self, reply: Message) -> StepResult:
        return None  # type: ignore[return-value]


def no_label(sample: Sample) -> float:
    raise KeyError("label")


def one_for_all(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def no_bool(samples: Sequence[Sample]) -> Any:
    return None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"environment_cls": Down}, "EnvironmentFailure: Down.start raised ConnectionError: the world is down"),
        ({"environment_cls": Silent}, "EnvironmentFailure: Silent.step: got None; expected a StepResult"),
        ({"reward_fn": no_label}, "RewardFailure: reward no_label raised KeyError: 'label'"),
        ({"reward_fn": lambda sample: "good"}, "got 'good'; expected a finite number"),
        ({"reward_fn": one_for_all, "group_rm": True}, "returned 1 rewards for 3 samples"),
        ({"filter_fn": no_bool}, "FilterFailure: filter no_bool: got None; expected True or False"),
        ({"reward_fn": RemoteReward("http://127.0.0.1:9", attempts=1)}, "remote reward at http://127.0.0.1:9"),
    ],
    ids=["start", "step", "reward", "text", "group", "filter", "judge"],
)
async def test_what_cannot_work_is_refused_before_work(fields: dict[str, Any], words: str) -> None:
    """The error is that of the samples; no prompt was taken."""
    recipe = recipe_of(**fields)
    before = repr(recipe.data_buffer)
    with pytest.raises(GenerateFailure, match="3 of 3 rehearsals with random replies failed alike") as caught:
        await rehearse(recipe)
    assert words in str(caught.value)
    assert "--no-rehearsal" in str(caught.value)
    assert repr(recipe.data_buffer) == before


async def test_a_sound_recipe_is_played_once() -> None:
    """One episode, one reward, one filter for a whole group; nothing is taken from the data, and no server is asked."""
    scored: list[Sample] = []
    groups: list[int] = []

    def score(sample: Sample) -> float:
        scored.append(sample)
        return 1.0

    def keep(samples: Sequence[Sample]) -> bool:
        groups.append(len(samples))
        assert [sample.index for sample in samples] == [0, 1, 2]
        return False

    recipe = recipe_of(reward_fn=score, filter_fn=keep)
    before = repr(recipe.data_buffer)
    await rehearse(recipe)
    assert len(scored) == 1
    assert groups == [3]
    assert repr(recipe.data_buffer) == before


@pytest.mark.parametrize("group_rm", [False, True])
async def test_20_a_label_that_one_prompt_lacks_is_found(group_rm: bool) -> None:
    """N20: the prompt is named before work, if the reward needs its label; a reward that needs none accepts it."""

    def needs_it(sample: Sample) -> float:
        if sample.label is None:
            raise RewardFailure("label: got None; expected text, or several texts")
        return 1.0

    def needs_all(samples: Sequence[Sample]) -> list[float]:
        return [needs_it(sample) for sample in samples]

    rows = [{"prompt": "1 + 2?", "label": "3"}, {"prompt": "2 + 2?", "label": None}, {"prompt": "4?", "label": "4"}]
    recipe = recipe_of(reward_fn=needs_all if group_rm else needs_it, group_rm=group_rm)
    recipe = attrs.evolve(recipe, data_buffer=DataBuffer(rows))
    with pytest.raises(ConfigError, match=r"prompts\[1\]\.label: got None, as 1 of 3 prompts; .* expected text"):
        await rehearse(recipe)
    await rehearse(attrs.evolve(recipe, config=attrs.evolve(recipe.config, reward_fn=zero, group_rm=False)))


async def test_tools_are_called() -> None:
    """Random replies are written in the notation of the template."""
    called: list[str] = []

    class World(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            called.extend(call.name for call in reply.tool_calls)
            return await super().step(reply)

    await rehearse(recipe_of(World))
    assert called


async def test_a_tool_that_fails_on_random_arguments_is_no_reason() -> None:
    """An episode without calls goes well."""

    class World(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            if reply.tool_calls:
                raise FileNotFoundError(reply.tool_calls[0].name)
            return StepResult(done=True)

    await rehearse(recipe_of(World))


async def test_different_failures_are_no_reason() -> None:
    """One bad prompt of three, or an unlucky reply, is data."""

    class World(CalculatorEnvironment):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            if prompt.prompt == "1 + 2?":
                raise ValueError("this prompt is bad")
            return await super().start(prompt)

    await rehearse(recipe_of(World))


async def test_a_config_error_of_the_loop_is_raised_as_it_is() -> None:
    """A dialect that does not exist, for example."""
    with pytest.raises(ConfigError, match="dialect"):
        await rehearse(recipe_of(dialect="nonsense"))


async def test_another_generate_function_is_not_rehearsed() -> None:
    """It may need its server."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        raise AssertionError("called")

    recipe = recipe_of()
    for function in (generate, functools.partial(generate)):
        await rehearse(attrs.evolve(recipe, config=attrs.evolve(recipe.config, generate_fn=function)))
