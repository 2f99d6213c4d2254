"""The rehearsal refuses a recipe that cannot work, spends nothing, and refuses no recipe that may work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import anyio
import attrs
import pytest

from rollouts.commands.rehearsal import rehearse
from rollouts.commands.tool_calls import check_tools
from rollouts.dtypes import Endpoint, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult, ToolEnvironment, tool
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
        (
            {"reward_fn": RemoteReward("http://127.0.0.1:9", attempts=1, outage_seconds=0)},
            "remote reward at http://127.0.0.1:9",
        ),
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


async def test_a_reward_server_that_is_away_is_refused_before_work() -> None:
    """A run waits for it; its URL may be wrong, so that a rehearsal does not."""
    recipe = recipe_of(reward_fn=RemoteReward("http://127.0.0.1:9", attempts=1))
    with (
        anyio.fail_after(20),
        pytest.raises(GenerateFailure, match=r"waits: no answer from http://127.0.0.1:9. No pro"),
    ):
        await rehearse(recipe)


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


async def test_a_tool_that_fails_on_some_arguments_is_no_reason() -> None:
    """One sound call of three is enough; a ValueError and an ArithmeticError are answers."""
    tried: list[float] = []

    class World(ToolEnvironment):
        @tool
        def root(self, a: int) -> str:
            """Take the root of a."""
            tried.append(a)
            if len(tried) < 3:
                raise FileNotFoundError(f"no root of {a}")
            return str(a)

        @tool
        def share(self, a: int) -> str:
            """Divide by zero."""
            return str(a // 0)

    await check_tools(World, [Prompt("1 + 2?")], None)
    assert len(tried) == 3


async def test_a_tool_that_fails_in_each_call_is_refused() -> None:
    """With the error, its line, and what a tool may raise; the episodes without calls go well."""

    class World(ToolEnvironment):
        @tool
        def look(self, at: str) -> str:
            """Look."""
            raise KeyError(at)

    with pytest.raises(GenerateFailure, match=r"3 of 3 calls of the tool look, .* raised KeyError: ") as caught:
        await rehearse(recipe_of(World))
    assert "test_rehearsal.py:" in str(caught.value)
    assert "A ValueError is an answer that the model reads" in str(caught.value)


async def test_methods_without_the_mark_of_a_tool_are_refused() -> None:
    """An environment without tools but with public methods: the mark was forgotten, and the model would see nothing."""

    class World(ToolEnvironment):
        def look(self, at: str) -> str:
            """Look."""
            return at

        def _find(self) -> None: ...

    class Question(ToolEnvironment):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            return [Message("user", self.question(prompt))]

        def question(self, prompt: Prompt) -> str:
            return "1 + 2?"

    class Host(World):
        async def answer(self, reply: Message) -> StepResult:
            return StepResult(done=True)

    with pytest.raises(ConfigError, match=r"World\.tools: got 'none'; expected @tool before .*: look$"):
        await rehearse(recipe_of(World))
    await rehearse(recipe_of(Question))
    await rehearse(recipe_of(Host))


async def test_an_environment_that_starts_with_some_prompts_is_tested_with_those() -> None:
    """A prompt whose environment does not start says nothing about the tools."""

    class World(ToolEnvironment):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            if prompt.prompt == "1 + 2?":
                raise ValueError("this prompt is bad")
            return await super().start(prompt)

        @tool
        def look(self) -> str:
            return "x"

    with pytest.raises(ConfigError, match=r"World\.look: got 'no docstring'; expected a docstring"):
        await rehearse(recipe_of(World))


def misspelled(sample: Sample) -> float:
    return sample.metrics.get("tool_erors", 0) + sample.metrics.get("tool_calls", 0)


def refused(sample: Sample) -> float:
    return sample.metrics["tool_erors"]


def in_a_filter(samples: Sequence[Sample]) -> bool:
    return "tol_calls" not in samples[0].metrics


@pytest.mark.parametrize(
    ("fields", "name", "near"),
    [({"reward_fn": misspelled}, "tool_erors", "tool_errors"), ({"filter_fn": in_a_filter}, "tol_calls", "tool_calls")],
    ids=["reward", "filter"],
)
async def test_a_metric_that_nothing_counts_is_doubted(fields: dict[str, Any], name: str, near: str) -> None:
    """A name that a reward or a filter reads with a default, with the nearest names; the run starts."""
    doubts = [doubt for doubt in await rehearse(recipe_of(**fields)) if doubt.startswith("sample.metrics")]
    assert len(doubts) == 1
    assert doubts[0].startswith(f"sample.metrics[{name!r}] is read (did you mean {near}")


class Asks(CalculatorEnvironment):
    """A world that asks about what it is given."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return [*await super().start(prompt), Message("user", "Is that right?")]


class Own(CalculatorEnvironment):
    """A world that keeps what it is given to itself."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return [Message("user", "Guess.")]


@pytest.mark.parametrize(("world", "answered", "rendered"), [(CalculatorEnvironment, 1, 1), (Asks, 0, 1), (Own, 0, 0)])
async def test_a_prompt_is_doubted_only_as_the_model_sees_it(world: Any, answered: int, rendered: int) -> None:
    """An environment may put a question behind an answer, or show the model another text than the prompt's."""
    chat = [Message("user", "1 + 1?"), Message("assistant", "3")]
    for prompt, count in ((chat, answered), ("<|im_start|>user\n1 + 1?<|im_end|>\n", rendered)):
        recipe = attrs.evolve(recipe_of(world, batch_size=1), data_buffer=DataBuffer([prompt]))
        assert [doubt.partition(":")[0] for doubt in await rehearse(recipe)] == ["prompts[0]"] * count


@pytest.mark.parametrize(
    ("begun", "label", "doubted"), [("Let me think", "2", 0), ("So it is 2.", "2", 1), ("2", None, 1)]
)
async def test_the_begin_of_a_reply_is_not_doubted(begun: str, label: str | None, doubted: int) -> None:
    """A reply continues it; a prompt that ends with the answer, or with some text and no label, is doubted."""
    prompt = Prompt([Message("user", "1 + 1?"), Message("assistant", begun)], label=label)
    assert len(await rehearse(attrs.evolve(recipe_of(batch_size=1), data_buffer=DataBuffer([prompt])))) == doubted


async def test_a_prompt_of_metadata_alone_has_no_last_message() -> None:
    """Its environment begins the conversation."""
    recipe = recipe_of(Own, batch_size=1)
    assert await rehearse(attrs.evolve(recipe, data_buffer=DataBuffer([Prompt([], metadata={"x": 1})]))) == []


@pytest.mark.parametrize("declared", [False, True])
async def test_what_rollouts_share_on_purpose_is_not_doubted(declared: bool) -> None:
    """``ClassVar`` says so; without it, the line names both ways."""

    class World(CalculatorEnvironment):
        seen: ClassVar[list[str]] = []

        async def start(self, prompt: Prompt) -> Sequence[Message]:
            self.seen.append("x")
            return await super().start(prompt)

    if not declared:
        del World.__annotations__["seen"]
    doubts = await rehearse(recipe_of(World, batch_size=1))
    assert [doubt.partition(":")[0] for doubt in doubts] == ([] if declared else ["World.seen"])


async def test_a_metric_that_is_needed_and_missing_is_refused() -> None:
    """The error has the nearest names, and all."""
    with pytest.raises(GenerateFailure, match=r"sample\.metrics has no 'tool_erors' .did you mean tool_errors"):
        await rehearse(recipe_of(reward_fn=refused))


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
