"""User functions that try to end a run or to write something false into a batch; each costs its own group only.

| finding | test |
|---|---|
| H7 | ``test_hardening_07_what_identifies_a_sample_is_not_changed`` |
| H9 | ``test_hardening_09_base_exceptions_cost_one_group`` |
| H10 | ``test_hardening_10_errors_of_the_package_raised_by_user_code_cost_one_group`` |
| H12 | ``test_hardening_12_one_inconsistent_reply_costs_one_rollout`` |
| H13 | ``test_hardening_13_...``: cycles and depth, a filter that sets NaN, ``current_task().cancel()`` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import anyio
import attrs
import msgspec
import numpy as np
import pytest

from rollouts.base.storable import to_json
from rollouts.dtypes import Endpoint, Image, ImageSpan, Message, Prompt, StopReason, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult
from rollouts.errors import ConfigError, GenerateFailure, TokenMismatchError
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.replies import Fault
from rollouts.testing.server import StubServer
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Group,
    RolloutConfig,
    Sample,
    generate_rollout_batch,
)
from rollouts.training.failed_samples import pack_lossy
from rollouts.training.rollout_attempt import attempt
from rollouts.training.sample_validator import pack_or_fail
from tests.stored_runs import some_sample

BAD = 0
"""Index of the group that a hostile function is hostile to."""


class Outcome(BaseException):
    """As those of pytest and of Rust panics: no ``Exception``."""

    def __str__(self) -> str:
        raise KeyError("not printable")


class Unreadable:
    """Neither iterated, compared nor printed."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not equal")

    __hash__ = None  # type: ignore[assignment]
    __iter__ = __len__ = __repr__ = __bool__ = __float__ = __eq__  # type: ignore[assignment]


async def settled(**functions: Any) -> list[Group]:
    """Fill one batch of three groups of two rollouts; return all settled groups."""
    groups: list[Group] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        return [some_sample(prompt, prompt.index or 0) for prompt in prompts]

    config = RolloutConfig(
        **{
            "batch_size": 3,
            "over_sampling_factor": 1.0,  # the batch is full only after the bad group has settled
            "n_samples_per_prompt": 2,
            "generate_fn": generate,
            "reward_fn": reward,
            "max_attempts": 1,
            **functions,
        }
    )
    buffer = DataBuffer([Prompt(f"question {number}", label=["a", "b"]) for number in range(8)])
    async with AsyncRolloutManager(config, buffer, on_group=groups.append) as manager:
        batch = await manager.generate_batch()
        numbers = [sample.group_index for sample in batch]
        assert [numbers.count(number) for number in set(numbers) - {BAD}] == [2, 2, 2]
        assert BAD not in numbers
        assert manager.accounting.failed == 1
    return groups


async def failure_of(**functions: Any) -> str:
    """The kind and the message of the one failed group."""
    (bad,) = [group for group in await settled(**functions) if group.outcome == "failed"]
    assert bad.group_index == BAD
    assert all(sample.group_index == BAD and sample.index in (0, 1) for sample in bad.samples)
    assert bad.reason in {
        f"{sample.failure.kind}: {sample.failure.message}" for sample in bad.samples if sample.failure
    }
    return bad.reason


async def reward(sample: Sample) -> float:
    return 1.0


def in_reward(act: Callable[[Sample], Any], *, whole: bool = False) -> dict[str, Any]:
    """A reward function that acts on the samples of the bad group."""

    async def hostile(given: Any) -> Any:
        for sample in given if whole else [given]:
            if sample.group_index == BAD:
                act(sample)
        return [1.0] * len(given) if whole else 1.0

    return {"reward_fn": hostile, "group_rm": whole}


def in_filter(act: Callable[[Sample], Any]) -> dict[str, Any]:
    """A filter that acts on the samples of the bad group."""

    async def hostile(samples: Sequence[Sample]) -> bool:
        for sample in samples:
            if sample.group_index == BAD:
                act(sample)
        return True

    return {"filter_fn": hostile}


def in_generation(act: Callable[[], Any]) -> dict[str, Any]:
    """A generate function that acts in the bad group."""

    async def hostile(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == BAD:
            act()
        await anyio.lowlevel.checkpoint()
        return [some_sample(prompt, prompt.index or 0) for prompt in prompts]

    return {"generate_fn": hostile}


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


def renamed(sample: Sample) -> list[VersionSpan]:
    """The versions of a sample under another name."""
    return [VersionSpan("other", span.start, span.stop) for span in sample.versions]


def span() -> ImageSpan:
    """An image over the first two ids."""
    return ImageSpan(Image(b"\x89PNG\r\n\x1a\n" + bytes(16) + b"\x08\x02"), 0, 2)


PLACES: dict[str, tuple[Callable[[Callable[..., Any]], dict[str, Any]], str]] = {
    "reward": (in_reward, "RewardFailure: reward hostile"),
    "group reward": (partial(in_reward, whole=True), "RewardFailure: group reward hostile"),
    "filter": (in_filter, "FilterFailure: filter hostile"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: setattr(sample, "group_index", 1), "Sample.group_index: got 1; expected 0, unchanged"),
        (lambda sample: setattr(sample, "index", 9), "Sample.index: got 9; expected 0, unchanged"),
        (lambda sample: setattr(sample, "rollout_id", None), "Sample.rollout_id: got None; expected 0, unchanged"),
        (lambda sample: setattr(sample, "parent", 5), "Sample.parent: got 5; expected None, unchanged"),
        (lambda sample: setattr(sample, "shared", 7), "Sample.shared: got 7; expected 0, unchanged"),
        (lambda sample: setattr(sample, "prompt", "x"), "Sample.prompt: got 'x'; expected 'question 0', unchanged"),
        (lambda sample: setattr(sample, "label", "x"), "Sample.label: got 'x'; expected ['a', 'b'], unchanged"),
        (lambda sample: sample.label.append("c"), "Sample.label: got ['a', 'b', 'c']; expected ['a', 'b'], unchanged"),
        (lambda sample: setattr(sample, "completions", []), "Sample.completions: got 0 that it changed"),
        (lambda sample: setattr(sample, "versions", []), "Sample.versions: got values that it changed"),
        (lambda sample: setattr(sample, "versions", renamed(sample)), "Sample.versions: got values that it changed"),
        (lambda sample: setattr(sample, "images", (span(),)), "Sample.images: got values that it changed"),
    ],
    ids=[
        "group_index",
        "index",
        "rollout_id",
        "parent",
        "shared",
        "prompt",
        "label",
        "label in place",
        "completions",
        "no versions",
        "versions",
        "images",
    ],
)
async def test_hardening_07_what_identifies_a_sample_is_not_changed(place: str, change: Any, message: str) -> None:
    """H7: a reward or filter that edits identity fails its group by name; the stored samples keep theirs."""
    hostile, who = PLACES[place]
    (bad,) = [group for group in await settled(**hostile(change)) if group.outcome == "failed"]
    assert bad.reason.startswith(f"{who}: {message}")
    assert all((one.prompt, one.label, one.group_index) == ("question 0", ["a", "b"], BAD) for one in bad.samples)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("label", "x", "['a', 'b'], as in the data"),
        ("group_index", 7, "a new Sample for rollout 0 of group 0"),
        ("index", 7, "a new Sample for rollout 0"),
    ],
)
async def test_hardening_07_a_generate_function_writes_no_field_of_the_data(
    field: str, value: Any, expected: str
) -> None:
    """H7: the rollout fails and names function and field; the stored samples have the fields of the data."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        samples = [some_sample(prompt, prompt.index or 0) for prompt in prompts]
        if prompts[0].index == 0:
            setattr(samples[0], field, value)
        return samples

    (bad,) = [group for group in await settled(generate_fn=generate) if group.outcome == "failed"]
    got = f"GenerateFailure: generate_fn generate: Sample.{field}: got {value!r}; expected {expected}"
    assert bad.reason == got
    assert all((one.prompt, one.label, one.group_index) == ("question 0", ["a", "b"], BAD) for one in bad.samples)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("column", "value"), [("tokens", 7), ("loss_mask", 1), ("rollout_log_probs", -9.0)], ids=lambda value: str(value)
)
async def test_hardening_07_no_column_of_the_replies_is_changed(place: str, column: str, value: Any) -> None:
    """H7: also by values of the same number, of a prompt token too; the failed group is stored with the true ones."""
    hostile, who = PLACES[place]
    before: list[list[float]] = []

    def act(sample: Sample) -> None:
        before.append(list(getattr(sample, column)))
        setattr(sample, column, [value, *getattr(sample, column)[1:]])

    (bad,) = [group for group in await settled(**hostile(act)) if group.outcome == "failed"]
    assert bad.reason == f"{who}: Sample.{column}: got values that it changed; expected those of the replies"
    assert [list(getattr(sample, column)) for sample in bad.samples][: len(before)] == before


async def test_hardening_07_a_prompt_without_a_reply_stays_masked() -> None:
    """H7: an episode whose prompt does not fit has no reply; no reward makes its tokens trainable."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        return [some_sample(prompt, 0, turns=0) for prompt in prompts]

    hostile = in_reward(lambda sample: setattr(sample, "loss_mask", [1] * len(sample)))
    assert "Sample.loss_mask: got values that it changed" in await failure_of(generate_fn=generate, **hostile)


@pytest.mark.parametrize("place", [*PLACES, "generation"])
@pytest.mark.parametrize(
    "error",
    [pytest.skip.Exception("later"), Outcome(), BaseExceptionGroup("g", [Outcome(), OSError()]), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
async def test_hardening_09_base_exceptions_cost_one_group(place: str, error: BaseException) -> None:
    """H9: outcomes of pytest, panics of Rust libraries and groups of them are failures, printable or not."""
    hostile, who = PLACES.get(place, (lambda act: in_generation(act), "GenerateFailure: generate_fn hostile"))
    reason = await failure_of(**hostile(raising(error)))
    assert reason.startswith(f"{who} raised {type(error).__name__}: ")
    assert f"{__file__}:" in reason, "the line that raised"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [ConfigError, TokenMismatchError])
async def test_hardening_10_errors_of_the_package_raised_by_user_code_cost_one_group(place: str, kind: Any) -> None:
    """H10: a ConfigError or a forged broken law of a reward or filter is its failure, not the end of the run."""
    hostile, who = PLACES[place]
    assert (await failure_of(**hostile(raising(kind("forged"))))).startswith(f"{who} raised {kind.__name__}: forged (")


async def test_hardening_10_a_status_that_does_not_exist_costs_one_group() -> None:
    """H10: ``sample.status = "banana"`` raises a ConfigError inside the reward."""
    reason = await failure_of(**in_reward(lambda sample: setattr(sample, "status", "banana")))
    assert reason.startswith("RewardFailure: reward hostile raised ConfigError: Sample.status: got 'banana'")


@pytest.mark.parametrize("fault", ["wrong_count", "wrong_ids"])
async def test_hardening_12_one_inconsistent_reply_costs_one_rollout(fault: Fault) -> None:
    """H12: a wrong number of prompt ids, or logprobs of other ids, is the server's fault and fails one attempt."""
    renderer = renderer_for(str(DEMO_MODEL))
    async with StubServer(faults=[fault]) as server:
        endpoint = Endpoint(base_url=server.url, model=str(DEMO_MODEL), max_retries=0)
        async with SGLangPolicy(endpoint, backoff=lambda failures: 0.0) as policy:
            config = RolloutConfig(
                batch_size=2,
                n_samples_per_prompt=2,
                over_sampling_factor=1.0,
                generate_fn=partial(
                    generate_rollout_batch,
                    environment_cls=CalculatorEnvironment,
                    endpoint=endpoint,
                    tokenizer=renderer,
                    policy=policy,
                    max_turns=1,
                ),
                reward_fn=reward,
            )
            async with AsyncRolloutManager(config, DataBuffer(["a", "b", "c"])) as manager:
                batch = await manager.generate_batch()
            assert manager.failures.lost == {"endpoint": 1}
            assert manager.accounting.failed == 0
    assert sorted(sample.metrics["attempts"] for sample in batch) == [1, 1, 1, 2]


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = [value, value]
    return value


def deep() -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"in": value}
    return value


@pytest.mark.parametrize("field", ["messages", "metadata", "label"])
@pytest.mark.parametrize("value", [cyclic, deep])
@pytest.mark.parametrize("place", PLACES)
async def test_hardening_13_what_cannot_be_stored_costs_one_group(place: str, field: str, value: Any) -> None:
    """H13: values nested in themselves, or without end, are refused by name before an encoder meets them."""
    hostile, who = PLACES[place]

    def act(sample: Sample) -> None:
        setattr(sample, field, [value()] if field == "messages" else value())

    reason = await failure_of(**hostile(act))
    if field == "label":
        assert reason.startswith(f"{who}: Sample.label: got ")
        return
    who = who.replace(": ", ": after ", 1)
    assert reason == f"{who}: Sample.{field}: nested deeper than 100 levels, or in itself"


@pytest.mark.parametrize("value", [float("nan"), "1.0", float("inf")])
async def test_hardening_13_a_filter_that_sets_a_reward_costs_one_group(value: Any) -> None:
    """H13: a reward that is not a finite number after the filter is the filter's failure."""
    reason = await failure_of(**in_filter(lambda sample: setattr(sample, "reward", value)))
    assert reason == f"FilterFailure: after filter hostile: Sample.reward: got {value!r}; expected a finite number"


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("reward", float("nan"), None),
        ("label", cyclic, "a"),
        ("metadata", lambda: {"fit": 1, "unfit": cyclic()}, {"fit": 1}),
        ("metrics", lambda: {"fit": 1.0, "unfit": float("nan")}, {"fit": 1.0}),
        ("messages", lambda: [cyclic()], []),
        ("tools", b"[]", None),
        ("parent", "0", None),
        ("shared", -1, 0),
    ],
)
def test_a_failed_sample_loses_only_what_cannot_be_stored(field: str, value: Any, stored: Any) -> None:
    """Its label is that of its group, and what says why it failed stays."""
    prompt = Prompt("What?", label="a", metadata={"row": 1}, group_index=0, index=0)
    expected, bad = (some_sample(prompt, 1).pack() for _ in range(2))
    expected.reward = bad.reward = 1.0
    setattr(bad, field, value() if callable(value) else value)
    assert pack_lossy([bad], prompt) == [bad]
    setattr(expected, field, stored)
    assert to_json(bad.to_dict()) == to_json(expected.to_dict())


@pytest.mark.parametrize(
    "value", [Decimal("0.5"), Fraction(1, 2), np.float32(0.5), True], ids=lambda value: repr(value)
)
async def test_numbers_of_user_code_are_floats_in_a_batch(value: Any) -> None:
    """A filter may set any kind of number; JSON would store some kinds as text, and no mean mixes them with floats."""

    def act(sample: Sample) -> None:
        sample.reward, sample.step_rewards = value, [value, 1]
        sample.metrics["part"] = Fraction(1, 2)

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        return [some_sample(prompt, prompt.index or 0) for prompt in prompts]

    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=2, generate_fn=generate, reward_fn=reward, **in_filter(act)
    )
    async with AsyncRolloutManager(config, DataBuffer(["a", "b", "c"])) as manager:
        batch = await manager.generate_batch()
    for sample in batch[:2]:
        numbers = [sample.reward, *sample.step_rewards, sample.metrics["part"]]
        assert numbers == [float(value), float(value), 1.0, 0.5]
        assert {type(number) for number in numbers} == {float}
        assert Sample.from_dict(msgspec.json.decode(to_json(sample.to_dict()))) == sample


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("metrics", {"m": float("nan"), "fit": 1.0}, {"fit": 1.0}),
        ("label", "another", "b"),
        ("index", 9, 0),
        ("stop_reason", StopReason.FORKED, None),
        ("parent", 7, None),
    ],
)
async def test_a_sample_that_fails_its_check_keeps_what_was_sampled(
    branches: int, field: str, value: Any, stored: Any
) -> None:
    """Its tokens count as those of a lost rollout; its fields of the data are those of the request, and it can be read.

    Where the branches do not fit together, each is kept by itself.
    """
    request = Prompt("why?", label="b", group_index=0, index=0)
    expected = [some_sample(request, number).pack() for number in range(branches)]

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        samples = [some_sample(prompts[0], number) for number in range(branches)]
        for number, sample in enumerate(samples):
            sample.conversation = number
        setattr(samples[-1], field, value)
        return samples

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, max_attempts=1, generate_fn=generate)
    samples = await attempt(config, request)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert [sample.sampled_tokens for sample in samples] == [sample.sampled_tokens for sample in expected]
    assert getattr(samples[-1], field) == stored
    for sample in samples:
        assert sample.failure is not None
        assert sample.failure.cause == "generate"
        assert (sample.prompt, sample.label, sample.index, sample.rollout_id) == ("why?", "b", 0, 0)
        assert Sample.from_dict(msgspec.json.decode(to_json(sample.to_dict()))) == sample


VERSION = VersionSpan("v", 0, 1)
"""A value that can be hashed, and is written as a map."""

FIELDS = (
    "prompt", "messages", "completions", "versions", "images", "named_images", "stop_reason", "failure", "history",
    "times", "metadata", "metrics", "step_rewards", "response",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [5, Unreadable()], ids=["5", "unreadable"])
async def test_a_field_of_a_wrong_type_costs_one_group(place: str, field: str, value: Any) -> None:
    """It is named, and what is stored of the group can be encoded and read again."""
    hostile, who = PLACES[place]
    groups = await settled(**hostile(lambda sample: setattr(sample, field, value)))
    (bad,) = [group for group in groups if group.outcome == "failed"]
    assert bad.reason.startswith(who.partition(":")[0])
    assert f"Sample.{field}: got" in bad.reason
    for sample in bad.samples:
        assert Sample.from_dict(msgspec.json.decode(to_json(sample.to_dict()))) == sample


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: setattr(sample, "step_rewards", [1e39]), "Sample.step_rewards: got 1e+39"),
        (lambda sample: sample.metrics.update(score=-1e300), "Sample.metrics['score']: got -1e+300"),
        (lambda sample: sample.metadata.update(x=[{VERSION: 1}]), "Sample.metadata, a key: got VersionSpan("),
        (lambda sample: sample.metadata.update({(1, VERSION): 1}), "Sample.metadata, a key: got (1, VersionSpan("),
    ],
    ids=["step_rewards", "metrics", "key", "key in a tuple"],
)
async def test_values_that_cannot_be_stored_cost_one_group(place: str, change: Any, message: str) -> None:
    """1e39 is infinite in a trainer's float32, means overflow for 1e308, and no decoder reads a map as a key."""
    hostile, who = PLACES[place]
    assert (await failure_of(**hostile(change))).startswith(f"{who.replace(': ', ': after ', 1)}: {message}")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_that_fit_are_stored_as_they_are(sign: int) -> None:
    """A float32 of a trainer, and a count of 53 bits; a larger count is a float, as JSON's readers take it."""
    sample = some_sample(Prompt("?", group_index=0, index=0), 0)
    largest, count = sign * float(np.finfo(np.float32).max), sign * (2**53 - 1)
    sample.reward, sample.metrics = largest, {"count": count, "more": count + sign}
    pack_or_fail([sample], GenerateFailure, "test")
    assert (sample.reward, sample.metrics["count"]) == (largest, count)
    assert [type(sample.metrics[name]) for name in ("count", "more")] == [int, float]


async def test_a_reward_that_fits_no_column_costs_one_group() -> None:
    """It would be infinite in a trainer's tensor."""

    async def huge(sample: Sample) -> float:
        return 1e39 if sample.group_index == BAD else 1.0

    assert "Sample.reward: got 1e+39; expected" in await failure_of(reward_fn=huge)


async def test_a_rollout_changes_no_prompt_of_another() -> None:
    """Lists and dicts in label and metadata are the rollout's own, in each attempt and each epoch."""
    seen: list[Any] = []
    failed: set[int | None] = set()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        await anyio.lowlevel.checkpoint()
        seen.append(([*prompt.label], [*prompt.metadata["todo"]["left"]]))
        prompt.label.append("?")
        prompt.metadata["todo"]["left"].pop()
        if prompt.index not in failed:
            failed.add(prompt.index)
            raise OSError("broken world")
        return [some_sample(attrs.evolve(prompt, label=["1"]), 0)]

    async def spoils(sample: Sample) -> float:
        sample.metadata["todo"]["left"].clear()
        return 1.0

    rows = [{"prompt": "a", "label": ["1"], "metadata": {"todo": {"left": [1, 2]}}}]
    config = RolloutConfig(
        batch_size=2, over_sampling_factor=1.0, n_samples_per_prompt=2, generate_fn=generate, reward_fn=spoils
    )
    async with AsyncRolloutManager(config, DataBuffer(rows, epochs=2)) as manager:
        await manager.generate_batch()
    assert seen == [(["1"], [1, 2])] * 8
    assert rows == [{"prompt": "a", "label": ["1"], "metadata": {"todo": {"left": [1, 2]}}}]


def cancel_own_task(*_: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("hostile", [in_reward, partial(in_reward, whole=True), in_filter, in_generation])
async def test_hardening_13_cancelling_its_own_task_costs_one_group(hostile: Any) -> None:
    """H13: ``current_task().cancel()`` ends the attempt, in whichever function; the run continues."""
    reason = await failure_of(**hostile(cancel_own_task))
    assert "expected no cancel() of current_task()" in reason


class World(CalculatorEnvironment):
    """An environment that is hostile in the bad group."""

    act: Callable[[World, str], Any]

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.bad = prompt.group_index == BAD
        await self._act("start")
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        await self._act("step")
        return await super().step(reply)

    async def close(self) -> None:
        await self._act("close")

    async def _act(self, where: str) -> None:
        if self.bad:
            await type(self).act(self, where)


async def opens_a_task_group(world: Any, where: str) -> None:
    if where == "start":
        world.group = anyio.create_task_group()
        await world.group.__aenter__()
        world.group.start_soon(anyio.sleep_forever)
    if where == "close":
        world.group.cancel_scope.cancel()
        await world.group.__aexit__(None, None, None)


async def opens_a_timeout(world: Any, where: str) -> None:
    if where == "start":
        world.limit = anyio.fail_after(60)
        world.limit.__enter__()
    if where == "close":
        world.limit.__exit__(None, None, None)


async def builds_a_wrong_message(world: Any, where: str) -> None:
    if where == "step":
        Message("critic", "wrong")  # type: ignore[arg-type]


async def forges_a_law(world: Any, where: str) -> None:
    if where == "step":
        raise TokenMismatchError("forged")


async def cancels_its_task(world: Any, where: str) -> None:
    if where == "step":
        cancel_own_task()


async def skips(world: Any, where: str) -> None:
    if where == "step":
        pytest.skip("later")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            opens_a_task_group, "World.start returned with a cancel scope or a task group open", id="H11-group"
        ),
        pytest.param(
            opens_a_timeout, "World.start returned with a cancel scope or a task group open", id="H11-timeout"
        ),
        pytest.param(
            builds_a_wrong_message, "World.step raised ConfigError: Message.role: got 'critic'", id="H10-role"
        ),
        pytest.param(forges_a_law, "World.step raised TokenMismatchError: forged", id="H10-law"),
        pytest.param(cancels_its_task, "the task of the rollout was cancelled", id="H13-cancel"),
        pytest.param(skips, "World.step raised Skipped: later", id="H9-skip"),
    ],
)
async def test_hardening_11_a_hostile_environment_costs_one_group(act: Any, message: str) -> None:
    """H9, H10, H11, H13 in an environment: scopes left open, package errors, cancellations, BaseExceptions."""
    renderer = renderer_for(str(DEMO_MODEL))
    hostile = type("World", (World,), {"act": act})
    reply = renderer.encode("The answer is 3.<|im_end|>")
    generate = partial(
        generate_rollout_batch,
        environment_cls=hostile,
        endpoint=Endpoint(),
        tokenizer=renderer,
        policy=ScriptedPolicy(lambda _: reply),
    )
    reason = await failure_of(generate_fn=generate)
    assert message in reason
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"


@pytest.mark.parametrize("whole", [False, True])
async def test_a_rollout_whose_last_branch_forks_costs_one_group(whole: bool) -> None:
    """No branch follows it whose reward it could have: the group would get none, or that of the next rollout."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        sample = some_sample(prompts[0], 0)
        if prompts[0].index == BAD:
            sample.stop_reason = StopReason.FORKED
        return [sample]

    async def whole_group(samples: Sequence[Sample]) -> list[float]:
        return [1.0] * len(samples)

    functions = {"reward_fn": whole_group, "group_rm": True} if whole else {}
    reason = await failure_of(generate_fn=generate, **functions)
    assert reason.startswith("GenerateFailure: generate_fn generate: got <Sample group 0 · index 0")
    assert reason.endswith("as the last branch, which ended in a fork; expected the branch that continues")


@pytest.mark.parametrize("branches", [1, 2])
async def test_a_parent_that_is_not_a_conversation_of_the_rollout_costs_one_group(branches: int) -> None:
    """No sample would train the tokens that the branch shares."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        samples = [some_sample(prompts[0], number) for number in range(branches)]
        for number, sample in enumerate(samples):
            sample.conversation = number
        samples[-1].parent, samples[-1].shared = 7, 1
        return samples

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, max_attempts=1, generate_fn=generate)
    (sample, *_) = await attempt(config, Prompt("why?", group_index=0, index=0))
    assert sample.failure is not None
    assert sample.failure.message.endswith(
        "Sample.parent: got 7; expected another conversation of its seat in the rollout"
    )
