"""The law book of the group scheduler: laws 4 (accounting), 5 (groups), 6 (a bad rollout is data) and 7 (deadlines).

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.

The tests do not rely on the manager's own accounting: a :class:`World` provides the user's functions, draws the outcome
of each rollout from a seed and counts on its own; a :class:`Till` is a data buffer that records which groups go out and
come back. Time is counted in scheduling points, except in tests of deadlines.

Sections: 1 groups · 2 rewards before filters · 3 accounting · 4 bad rollouts are data · 5 broken laws are crashes ·
6 deadlines · 7 cancellation and reuse · 8 exhausted data · 9 no bias to short rollouts · 10 call signatures ·
11 random interleavings.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import attrs
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.concurrency.boundary import waits
from rollouts.concurrency.cancellation import left_behind
from rollouts.errors import (
    ConfigError,
    DataExhausted,
    EndpointUnavailable,
    FilterFailure,
    GenerateFailure,
    TokenMismatchError,
)
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Group,
    Prompt,
    RolloutConfig,
    Sample,
    Status,
    check_reward_nonzero_std,
)

# -- 0. the world that the manager is put into ---------------------------------------------------------------------


class Till(DataBuffer):
    """A data buffer that records every group index that goes out and comes back."""

    def __init__(self, prompts: Iterable[Any], **options: Any) -> None:
        super().__init__(prompts, **options)
        self.out: Counter[int] = Counter()
        self.back: Counter[int] = Counter()
        self.texts: dict[int, str] = {}

    def get_prompts(self, count: int) -> list[Prompt]:
        prompts = super().get_prompts(count)
        for prompt in prompts:
            assert prompt.group_index is not None
            self.out[prompt.group_index] += 1
            assert self.texts.setdefault(prompt.group_index, str(prompt.prompt)) == prompt.prompt
        return prompts

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        prompts = list(prompts)
        super().put_back(prompts)
        for prompt in prompts:
            assert prompt.group_index is not None
            self.back[prompt.group_index] += 1


def questions(count: int) -> list[str]:
    return [f"question {number}" for number in range(count)]


def sample_for(request: Prompt, *, length: int = 2, **fields: Any) -> Sample:
    """A sound sample: one prompt token that identifies its rollout, then ``length`` sampled ones."""
    assert request.index is not None
    return Sample(
        prompt=request.prompt,
        response=f"answer of {request.index}",
        **{
            "tokens": [request.index, *range(length)],
            "loss_mask": [0] + [1] * length,
            "rollout_log_probs": [0.0] + [-0.5] * length,
            "status": Status.COMPLETED,
            "label": request.label,
            **fields,
        },
    )


async def points(count: int) -> None:
    """Yield to other tasks ``count`` times."""
    for _ in range(count):
        await checkpoint()


async def answer_at_once(prompts: Sequence[Prompt]) -> list[Sample]:
    """The simplest generate function: one sound sample with a reward."""
    return [sample_for(prompt, reward=1.0) for prompt in prompts]


def rollouts_of(samples: Sequence[Sample]) -> list[int]:
    """The numbers of the rollouts in ``samples``, forks counted once, in order of appearance."""
    numbers = [sample.index for sample in samples]
    assert all(number is not None for number in numbers)
    return list(dict.fromkeys(number for number in numbers if number is not None))


def check_batch(samples: Sequence[Sample], config: RolloutConfig, texts: dict[int, str]) -> list[int]:
    """Check law 5 for one batch, and return its group indices."""
    n = config.n_samples_per_prompt
    places = [(sample.group_index, sample.index) for sample in samples]
    assert places == sorted(places), "by group index, then index"
    groups = list(dict.fromkeys(sample.group_index for sample in samples))
    assert len(groups) == config.batch_size, "exactly as many groups as asked for"
    for group in groups:
        assert group is not None
        members = [sample for sample in samples if sample.group_index == group]
        assert rollouts_of(members) == list(range(group * n, group * n + n)), "exactly the n rollouts of the group"
        assert {sample.prompt for sample in members} == {texts[group]}, "all of one prompt"
        for sample in members:
            assert sample.tokens[0] == sample.index, "the tokens are those of the rollout that the sample names"
            assert sample.rollout_id == sample.index, "branches of one rollout share its number"
            assert isinstance(sample.reward, float)
            assert np.isfinite(sample.reward)
            assert sample.status not in (Status.FAILED, Status.ABORTED)
            assert len(sample.tokens) == len(sample.loss_mask) == len(sample.rollout_log_probs)
    assert len({id(sample) for sample in samples}) == len(samples), "no sample twice"
    return [group for group in groups if group is not None]


class Odd:
    """Like the result of a torch comparison: neither a bool nor a NumPy bool, with ``item()``."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def item(self) -> bool:
        return self.value


class NoWords(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Any:
    raise error


def exceptions_of_guests() -> list[BaseException]:
    """Exceptions of users' functions. Each fails its rollout, and none fails the run."""
    return [
        ValueError("bad value"),
        KeyError("answer"),
        AssertionError(),
        TimeoutError("judge"),
        RuntimeError("generator raised StopIteration"),
        OSError(104, "reset by peer"),
        MemoryError(),
        RecursionError("deep"),
        SystemExit(3),
        StopAsyncIteration(),
        EndpointUnavailable("no server"),
        NoWords(),
        ExceptionGroup("several", [ValueError("one"), ExceptionGroup("more", [OSError("two")])]),
        BaseExceptionGroup("a child left", [SystemExit(1), ValueError("one")]),
        asyncio.CancelledError("an inner task was cancelled from outside"),
    ]


BROKEN_RETURNS: dict[str, Callable[[Prompt], Any]] = {
    "None": lambda request: None,
    "an empty list": lambda request: [],
    "a sample without its list": lambda request: sample_for(request),
    "a list with None": lambda request: [None],
    "a sample and a string": lambda request: [sample_for(request), "oops"],
    "a dict": lambda request: {"samples": [sample_for(request)]},
    "a string": lambda request: "the answer is 8",
    "a generator": lambda request: (sample_for(request) for _ in range(1)),
    "a failed sample": lambda request: [sample_for(request, status=Status.FAILED)],
    "an aborted sample": lambda request: [sample_for(request, status="aborted")],
    "a fork with a failed branch": lambda request: [sample_for(request), sample_for(request, status="failed")],
    "a mask that was cut after the fact": lambda request: [_cut(sample_for(request))],
    "a mask of halves": lambda request: [sample_for(request, loss_mask=[0, 0.5, 1])],
    "a token id that is no number": lambda request: [sample_for(request, tokens=["a", "b", "c"])],
    "a token id too large": lambda request: [sample_for(request, tokens=[0, 1, 2**40])],
    "the same sample twice": lambda request: [sample_for(request)] * 2,
}
BROKEN_REWARDS: list[Any] = [None, float("nan"), float("inf"), "1.0", "great", [1.0], {}, 10**400, object(), 1j]
ODD_ANSWERS: list[Any] = [True, np.True_, np.array(True), Odd(True)]
NO_ANSWERS: list[Any] = [None, 1, "yes", np.array([True, False]), Odd(None), [True], 0.7]  # type: ignore[arg-type]


def _cut(sample: Sample) -> Sample:
    sample.loss_mask.pop()
    return sample


@attrs.frozen
class Scene:
    """Parameters of one random run: sizes, probabilities and interruptions."""

    seed: int
    batch_size: int
    n: int
    factor: float
    attempts: int
    prompts: int
    epochs: int | None
    batches: int
    trouble: float
    """Probability that a rollout is lost for good."""
    flaky: float
    rejects: float
    """Probability that the filter drops a group, and that it returns an invalid result."""
    whole: bool
    """Score the group with one call."""
    threads: bool
    """The user's reward and filter are plain functions."""
    context: bool
    cut: float
    """Probability that a batch is cancelled, or the manager closed before it."""
    longest: int
    """Scheduling points of the longest rollout."""


class World:
    """The user's functions of one scene. The seed alone determines the outcome of each rollout and group."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.calls: Counter[int] = Counter()
        self.done: set[int] = set()
        self.settled: list[Group] = []
        self.violations: list[str] = []
        self.manager: AsyncRolloutManager | None = None

    def rng(self, *what: object) -> random.Random:
        return random.Random(f"{self.scene.seed}/{what}")

    # what is fated

    def fate_of_rollout(self, index: int) -> str:
        draw = self.rng("rollout", index).random()
        for name, chance in (
            ("broken", self.scene.trouble / 3),
            ("raises", self.scene.trouble / 3),
            ("unscored", 0 if self.scene.whole else self.scene.trouble / 3),
            ("flaky", self.scene.flaky if self.scene.attempts > 1 else 0),
            ("fork", 0.1),
        ):
            if draw < chance:
                return name
            draw -= chance
        return "sound"

    def fate_of_group(self, group_index: int) -> str:
        n = self.scene.n
        fates = {self.fate_of_rollout(index) for index in range(group_index * n, group_index * n + n)}
        if fates & {"broken", "raises", "unscored"} or (self.scene.whole and self.whole_is_broken(group_index)):
            return "failed"
        return {"yes": "kept", "no": "dropped", "odd": "failed", "raises": "failed"}[self.verdict(group_index)]

    def whole_is_broken(self, group_index: int) -> bool:
        return self.rng("whole", group_index).random() < self.scene.trouble / 3

    def verdict(self, group_index: int) -> str:
        draw = self.rng("verdict", group_index).random()
        if draw < self.scene.rejects:
            return "no"
        if draw < 1.5 * self.scene.rejects:
            return "odd"
        return "raises" if draw < 2 * self.scene.rejects else "yes"

    # the user's functions

    def look(self) -> None:
        """Check law 4, which holds at every moment."""
        assert self.manager is not None
        try:
            self.manager.accounting.check()
        except TokenMismatchError as error:
            self.violations.append(str(error))
        counts = self.manager.accounting
        if any(count < 0 for count in attrs.astuple(counts)):
            self.violations.append(f"a negative count: {counts!r}")
        in_work = counts.in_flight + counts.ready
        if in_work > self.manager.config.groups_in_work:
            self.violations.append(f"{in_work} groups in work: {counts}")

    async def generate(self, prompts: Sequence[Prompt]) -> Any:
        self.look()
        (request,) = prompts
        assert request.index is not None
        assert request.group_index is not None
        if request.index // self.scene.n != request.group_index:
            self.violations.append(f"rollout {request.index} asked for group {request.group_index}")
        if request.index in self.done:
            self.violations.append(f"rollout {request.index} was finished and is generated again")
        self.calls[request.index] += 1
        rng = self.rng("pace", request.index, self.calls[request.index])
        await points(int(self.scene.longest * rng.random() ** 3))
        fate = self.fate_of_rollout(request.index)
        if fate == "broken" or (fate == "flaky" and self.calls[request.index] % 2 and rng.random() < 0.5):
            return BROKEN_RETURNS[rng.choice(list(BROKEN_RETURNS))](request)
        if fate == "raises" or (fate == "flaky" and self.calls[request.index] % 2):
            raise rng.choice(exceptions_of_guests())
        branches = rng.randint(2, 3) if fate == "fork" else 1
        if self.scene.whole:
            self.done.add(request.index)
        return [sample_for(request, length=rng.randint(1, 5)) for _ in range(branches)]

    async def reward(self, sample: Sample) -> Any:
        await points(self.rng("judge", sample.index).randint(0, 3))
        assert sample.index is not None
        value = self.plain_reward(sample)
        if self.fate_of_rollout(sample.index) in ("sound", "flaky"):
            self.done.add(sample.index)
        return value

    def plain_reward(self, sample: Sample) -> Any:
        assert sample.index is not None
        rng = self.rng("reward", sample.index)
        if self.fate_of_rollout(sample.index) == "unscored":
            errors = exceptions_of_guests()
            errors = errors[:-1]  # a thread is not notified of its cancellation
            return rng.choice(BROKEN_REWARDS) if rng.random() < 0.7 else _raise(rng.choice(errors))
        return rng.choice([0, 1, True, 0.25, np.float32(0.5)])

    def whole_reward(self, samples: list[Sample]) -> Any:
        group_index = samples[0].group_index
        assert group_index is not None
        if self.whole_is_broken(group_index):
            rng = self.rng("break", group_index)
            return rng.choice([None, 1.0, [1.0] * (len(samples) + 1), [rng.choice(BROKEN_REWARDS)] * len(samples)])
        return [float(number % 2) for number in range(len(samples))]

    async def awaited_whole_reward(self, samples: list[Sample]) -> Any:
        await points(2)
        return self.whole_reward(samples)

    def filter(self, samples: list[Sample]) -> Any:
        group_index = samples[0].group_index
        assert group_index is not None
        n = self.scene.n
        if rollouts_of(samples) != list(range(group_index * n, group_index * n + n)):
            self.violations.append(f"the filter saw {samples}")
        if not all(isinstance(sample.reward, float) and np.isfinite(sample.reward) for sample in samples):
            self.violations.append(f"the filter ran before the rewards of {samples}")
        rng = self.rng("answer", group_index)
        verdict = self.verdict(group_index)
        if verdict == "raises":
            raise rng.choice(exceptions_of_guests()[:-1])
        return {"no": False, "odd": rng.choice(NO_ANSWERS), "yes": rng.choice(ODD_ANSWERS)}[verdict]

    async def awaited_filter(self, samples: list[Sample]) -> Any:
        await points(1)
        return self.filter(samples)

    # the run

    def config(self, **changes: Any) -> RolloutConfig:
        scene = self.scene
        one = self.plain_reward if scene.threads else self.reward
        whole = self.whole_reward if scene.threads else self.awaited_whole_reward
        return RolloutConfig(
            **{
                "batch_size": scene.batch_size,
                "n_samples_per_prompt": scene.n,
                "over_sampling_factor": scene.factor,
                "generate_fn": self.generate,
                "reward_fn": whole if scene.whole else one,
                "group_rm": scene.whole,
                "filter_fn": self.filter if scene.threads else self.awaited_filter,
                "max_attempts": scene.attempts,
                "patience": 40,
                **changes,
            }
        )

    def verify(self, batches: Sequence[Sequence[Sample]], till: Till) -> None:
        """Check everything that must hold after a run."""
        manager = self.manager
        assert manager is not None
        assert not self.violations, self.violations
        counts = manager.accounting
        counts.check()
        in_batches = [group for batch in batches for group in check_batch(batch, manager.config, till.texts)]
        ready = [group.group_index for group in manager.ready_groups]
        ended = {outcome: [g.group_index for g in self.settled if g.outcome == outcome] for outcome in OUTCOMES}

        assert counts.taken == till.out.total()
        assert counts.returned == till.back.total()
        assert counts.in_batch == len(in_batches)
        assert counts.dropped == len(ended["dropped"])
        assert counts.failed == len(ended["failed"])
        assert counts.ready == len(ready)
        assert counts.in_flight == 0, "a closed manager has nothing in flight"

        left = [group for group in till.out if till.out[group] == till.back[group]]
        places = [*in_batches, *ready, *ended["dropped"], *ended["failed"], *left]
        assert sorted(places) == sorted(till.out), "every group taken is in exactly one place"
        assert sorted(ended["kept"]) == sorted([*in_batches, *ready])
        assert max(till.out.values(), default=0) - 1 <= max(till.back.values(), default=0)
        for group in self.settled:
            assert group.outcome == self.fate_of_group(group.group_index), group
            assert [s.index for s in group.samples] == sorted(s.index for s in group.samples if s.index is not None)
        assert [group for group, _ in Counter(places).items()] == list(dict.fromkeys(places))
        assert not waits(), "there are no waits left"


OUTCOMES = ("kept", "dropped", "failed")


async def play(scene: Scene, **changes: Any) -> tuple[World, Till, list[list[Sample]]]:
    """Run a scene to its end, with its interruptions, and check everything."""
    world = World(scene)
    till = Till(questions(scene.prompts), seed=scene.seed, epochs=scene.epochs)

    async def on_group(group: Group) -> None:
        world.settled.append(group)

    on_settled = world.settled.append if scene.threads else on_group  # a sync function runs in a thread
    manager = AsyncRolloutManager(world.config(**changes), till, on_group=on_settled)
    world.manager = manager
    batches: list[list[Sample]] = []

    async def one_batch(cut_after: int | None) -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                if cut_after is not None:
                    tasks.start_soon(cut, scope, cut_after)
                try:
                    batches.append(await manager.generate_batch())
                except (DataExhausted, FilterFailure, GenerateFailure):
                    world.look()
            tasks.cancel_scope.cancel()

    async def cut(scope: anyio.CancelScope, after: int) -> None:
        await points(after)
        scope.cancel()

    async with AsyncExitStack() as stack:
        if scene.context:
            await stack.enter_async_context(manager)
        for number in range(scene.batches):
            rng = world.rng("cut", number)
            if scene.context and rng.random() < scene.cut / 2:
                await stack.aclose()
                assert manager.accounting.in_flight == 0
                await stack.enter_async_context(manager)
            await one_batch(rng.randint(0, 3 * scene.longest + 20) if rng.random() < scene.cut else None)
            await points(rng.randint(0, 5))
    world.verify(batches, till)
    return world, till, batches


def scenes(**fixed: Any) -> st.SearchStrategy[Scene]:
    chances: dict[str, Any] = {
        "seed": st.integers(0, 2**32),
        "batch_size": st.integers(1, 4),
        "n": st.integers(1, 4),
        "factor": st.sampled_from([1, 1.5, 2, 3.7]),
        "attempts": st.integers(1, 3),
        "prompts": st.integers(1, 12),
        "epochs": st.sampled_from([None, None, 1, 2]),
        "batches": st.integers(1, 4),
        "trouble": st.sampled_from([0, 0.05, 0.3, 1.0]),
        "flaky": st.sampled_from([0, 0.3]),
        "rejects": st.sampled_from([0, 0.2, 0.5]),
        "whole": st.booleans(),
        "threads": st.booleans(),
        "context": st.booleans(),
        "cut": st.sampled_from([0, 0.5, 1.0]),
        "longest": st.sampled_from([0, 5, 30]),
    }
    return st.builds(Scene, **{**chances, **{name: st.just(value) for name, value in fixed.items()}})


PLAIN = Scene(
    seed=0,
    batch_size=4,
    n=3,
    factor=2,
    attempts=2,
    prompts=50,
    epochs=None,
    batches=3,
    trouble=0,
    flaky=0,
    rejects=0,
    whole=False,
    threads=False,
    context=True,
    cut=0,
    longest=20,
)

many = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def manager_of(generate_fn: Any, prompts: int | DataBuffer = 50, **options: Any) -> AsyncRolloutManager:
    """A manager with small sizes by default."""
    on_group = options.pop("on_group", None)
    buffer = prompts if isinstance(prompts, DataBuffer) else DataBuffer(questions(prompts))
    sizes = {"batch_size": 3, "n_samples_per_prompt": 2, "over_sampling_factor": 2, "patience": 20}
    return AsyncRolloutManager(
        RolloutConfig(**{**sizes, "generate_fn": generate_fn, **options}), buffer, on_group=on_group
    )


def only_bad_in_group_zero(bad: Callable[[Prompt], Any]) -> Callable[[Sequence[Prompt]], Any]:
    """A generate function that fails for group 0 only."""

    async def generate(prompts: Sequence[Prompt]) -> Any:
        await checkpoint()
        (request,) = prompts
        return bad(request) if request.group_index == 0 else [sample_for(request, reward=1.0)]

    return generate


async def slow_first(prompts: Sequence[Prompt]) -> list[Sample]:
    """Later rollouts finish earlier."""
    (request,) = prompts
    assert request.index is not None
    await points(max(0, 60 - 3 * request.index))
    return [sample_for(request, reward=1.0)]


async def never(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.sleep_forever()
    return []


def failed_groups(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.outcome == "failed"]


# -- 1. groups --------------------------------------------------------------------------------------------------------


async def test_a_filter_sees_the_rollouts_of_one_prompt() -> None:
    """1.1 Groups are formed by prompt, never by order of arrival (the original: 12 of 12 groups were mixed)."""
    scene = attrs.evolve(PLAIN, batch_size=8, n=4, longest=50, batches=2)
    seen: list[list[Sample]] = []

    def note(samples: list[Sample]) -> bool:
        seen.append(list(samples))
        return True

    await play(scene, filter_fn=note)
    assert len(seen) >= 16
    for samples in seen:
        assert len({sample.prompt for sample in samples}) == 1
        assert len(rollouts_of(samples)) == 4


async def test_a_batch_holds_whole_groups_only() -> None:
    """1.2 Selection takes groups, not samples (the original left 10 of 11 prompts with a part of their rollouts)."""
    _, till, batches = await play(attrs.evolve(PLAIN, batch_size=5, n=4, longest=60))
    for batch in batches:
        sizes = Counter(group for group, _ in {(sample.group_index, sample.index) for sample in batch})
        assert set(sizes.values()) == {4}
    assert len(batches) == 3
    assert till.out.total() >= 15


@pytest.mark.parametrize("context", [True, False])
async def test_a_group_index_is_never_given_to_two_prompts(context: bool) -> None:
    """1.3 Across refills, batches and epochs (the original's second batch had 6 of 11 ids with several prompts)."""
    scene = attrs.evolve(PLAIN, prompts=5, batches=6, context=context, longest=10, rejects=0.3)
    _, till, batches = await play(scene)
    of_batches = [group for batch in batches for group in {sample.group_index for sample in batch}]
    assert len(of_batches) == len(set(of_batches)) == 24
    assert set(till.out) == set(range(max(till.out) + 1)), "no number is skipped"


async def test_order_is_that_of_the_prompts_not_of_arrival() -> None:
    """1.4 A batch is ordered by group index, then index, though the last started finishes first."""
    async with manager_of(slow_first, over_sampling_factor=1) as manager:
        batch = await manager.generate_batch()
    assert [(sample.group_index, sample.index) for sample in batch] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


async def test_a_fork_is_one_rollout_of_its_group() -> None:
    """1.5 A rollout may return several samples; they stay together and share its rollout id."""

    async def fork(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.index is not None
        return [sample_for(request, length=1 + part, reward=1.0) for part in range(1 + request.index % 3)]

    batch = await manager_of(fork, n_samples_per_prompt=3).generate_batch()
    assert [sample.rollout_id for sample in batch] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8, 8, 8]
    assert [len(sample) for sample in batch[3:6]] == [2, 3, 4], "branches in the order they were given"


async def test_a_group_of_one() -> None:
    """1.6 One rollout a prompt is a group too."""
    batch = await manager_of(answer_at_once, n_samples_per_prompt=1, reward_fn=lambda sample: 0.5).generate_batch()
    assert len(batch) == 3
    assert all(sample.index == sample.group_index for sample in batch)


async def test_one_sample_object_is_one_rollout() -> None:
    """1.7 A generate function that returns the same sample twice has failed."""
    shared: list[Sample] = []

    async def cached(prompts: Sequence[Prompt]) -> list[Sample]:
        shared.extend([sample_for(prompts[0], reward=1.0)] if not shared else [])
        return shared

    manager = manager_of(cached, patience=4)
    with pytest.raises(GenerateFailure, match="expected a new Sample for rollout"):
        await manager.generate_batch()
    assert manager.accounting.in_batch == 0


# -- 2. rewards before filters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
async def test_the_filter_runs_after_every_reward(whole: bool) -> None:
    """2.1 A filter sees final rewards (the original's saw [0.0, 0.0] for a batch with 0.2 to 0.84)."""
    seen: list[list[float | None]] = []

    def reward(sample: Sample) -> float:
        assert sample.index is not None
        return sample.index / 100

    def rewards(samples: list[Sample]) -> list[float]:
        return [reward(sample) for sample in samples]

    def note(samples: list[Sample]) -> bool:
        seen.append([sample.reward for sample in samples])
        return check_reward_nonzero_std(samples)

    scored = {"reward_fn": rewards if whole else reward, "group_rm": whole}
    manager = manager_of(answer_at_once, filter_fn=note, over_sampling_factor=1, **scored)
    batch = await manager.generate_batch()
    assert sorted(seen) == [[0.0, 0.01], [0.02, 0.03], [0.04, 0.05]]
    assert [sample.reward for sample in batch] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert manager.accounting.dropped == 0


async def test_a_group_without_spread_is_dropped_and_replaced() -> None:
    """2.2 The filter of slime works on the rewards of our groups: equal ones are dropped, the batch is still full."""

    def reward(sample: Sample) -> float:
        assert sample.group_index is not None
        return float(sample.index or 0) if sample.group_index % 2 else 1.0

    manager = manager_of(answer_at_once, reward_fn=reward, filter_fn=check_reward_nonzero_std)
    batch = await manager.generate_batch()
    assert len({sample.group_index for sample in batch}) == 3
    assert all(sample.group_index % 2 for sample in batch if sample.group_index is not None)
    assert manager.accounting.dropped >= 1


async def test_a_filter_written_with_torch_runs_unchanged() -> None:
    """2.3 The result of a filter may be a scalar of a tensor or an array."""
    for yes in ODD_ANSWERS:
        batch = await manager_of(answer_at_once, filter_fn=lambda samples, yes=yes: yes).generate_batch()
        assert len(batch) == 6


async def test_a_filter_never_sees_a_group_that_failed() -> None:
    """2.4 Failed groups do not reach the filter."""
    seen: list[int | None] = []

    def note(samples: list[Sample]) -> bool:
        seen.append(samples[0].group_index)
        return all(sample.status is Status.COMPLETED for sample in samples)

    manager = manager_of(only_bad_in_group_zero(lambda request: []), filter_fn=note)
    await manager.generate_batch()
    assert 0 not in seen
    assert manager.accounting.dropped == 0


# -- 3. accounting ----------------------------------------------------------------------------------------------------


async def test_the_run_can_print_its_sum() -> None:
    """3.1 Every prompt taken is named in the sum, and the sum is right."""
    manager = manager_of(
        only_bad_in_group_zero(lambda request: []), filter_fn=lambda samples: samples[0].group_index != 1
    )
    await manager.generate_batch()
    counts = manager.accounting
    assert (counts.failed, counts.dropped, counts.in_batch) == (1, 1, 3)
    assert str(counts).startswith(f"{counts.taken} prompts taken = 3 in batch + 1 dropped + 1 failed + ")
    numbers = [int(word) for word in str(counts).replace("=", "+").split() if word.isdigit()]
    assert numbers[0] == sum(numbers[1:])


async def test_every_settled_group_is_reported_once() -> None:
    """3.2 ``on_group`` is called once with each kept, dropped and failed group and all its samples."""
    scene = attrs.evolve(PLAIN, trouble=0.2, rejects=0.2, batches=4)
    world, _, batches = await play(scene)
    settled = world.settled
    assert len({group.group_index for group in settled}) == len(settled)
    assert {group.outcome for group in settled} == set(OUTCOMES)
    for group in settled:
        if group.outcome == "kept":
            assert group.reason == ""
            assert group.rewards == [sample.reward for sample in group.samples]
        else:
            assert group.reason
    assert sum(group.outcome == "kept" for group in settled) >= len(batches) * scene.batch_size


async def test_a_filter_that_accepts_nothing_ends_the_batch() -> None:
    """3.3 After ``patience`` groups, with its name (the original looped for ever)."""
    manager = manager_of(answer_at_once, filter_fn=lambda samples: False, patience=7)
    with pytest.raises(FilterFailure, match="accepted none of the last"):
        await manager.generate_batch()
    assert 7 <= manager.accounting.dropped <= 7 + manager.config.groups_in_work
    manager.accounting.check()


@pytest.mark.parametrize("patience", [2, 5])
async def test_an_accepted_group_ends_the_row_of_rejected_ones(patience: int) -> None:
    """3.3.1 ``patience`` groups in a row: a run whose filter rejects fewer before each that it accepts never ends."""

    def last_of_a_row(samples: Sequence[Sample]) -> bool:
        assert samples[0].group_index is not None
        return samples[0].group_index % patience == patience - 1

    one_at_a_time = {"batch_size": 1, "over_sampling_factor": 1, "patience": patience}
    manager = manager_of(answer_at_once, filter_fn=last_of_a_row, **one_at_a_time)
    for _ in range(6):
        await manager.generate_batch()
    assert manager.accounting.dropped == 6 * (patience - 1)


async def test_patience_ends_with_the_last_group_of_the_row() -> None:
    """3.3.2 With one group at a time, exactly ``patience`` groups are rejected, also after accepted ones."""
    sizes = {"batch_size": 1, "over_sampling_factor": 1, "patience": 3}
    manager = manager_of(answer_at_once, filter_fn=lambda samples: samples[0].group_index == 2, **sizes)
    await manager.generate_batch()
    with pytest.raises(FilterFailure, match="accepted none of the last 3 groups"):
        await manager.generate_batch()
    assert manager.accounting.dropped == 2 + 3
    with pytest.raises(FilterFailure, match="accepted none of the last 3 groups"):
        await manager.generate_batch()
    assert manager.accounting.dropped == 2 + 3 + 3


async def test_the_rewards_of_earlier_rows_are_not_reported() -> None:
    """3.3.3 Groups rejected before the last accepted one do not belong to the row that ends the run."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        return [sample_for(request, reward=0.25 if request.group_index == 0 else 0.5)]

    sizes = {"batch_size": 1, "over_sampling_factor": 1, "patience": 3}
    manager = manager_of(generate, filter_fn=lambda samples: samples[0].group_index == 1, **sizes)
    await manager.generate_batch()
    with pytest.raises(FilterFailure, match=r"every reward was 0\.5, so there is nothing to learn"):
        await manager.generate_batch()


async def test_causes_are_reset_after_they_were_reported() -> None:
    """3.4 A run that continues after an error does not report old failures as new."""
    broken = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if broken:
            raise OSError("the disk is full")
        return await answer_at_once(prompts)

    manager = manager_of(generate, filter_fn=lambda samples: False, patience=5, over_sampling_factor=1)
    with pytest.raises(GenerateFailure, match="the disk is full"):
        await manager.generate_batch()
    broken = False
    with pytest.raises(FilterFailure, match="accepted none of the last"):
        await manager.generate_batch()


async def test_metrics_compare_kept_with_started_lengths() -> None:
    """3.5 The metrics of a batch show the bias of the filter in lengths."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.group_index is not None
        return [sample_for(request, length=10 if request.group_index % 2 else 2, reward=1.0)]

    manager = manager_of(generate, filter_fn=lambda samples: samples[0].response_length < 5)
    await manager.generate_batch()
    assert manager.metrics["sampled_tokens/kept"] == 2
    assert manager.metrics["sampled_tokens/dropped"] == 10
    assert 2 < manager.metrics["sampled_tokens/all"] < 10
    assert manager.metrics["prompts/in_batch"] == 3


# -- 4. a bad rollout is data -----------------------------------------------------------------------------------------


def of_name(error: BaseException) -> str:
    return type(error).__name__


async def run_with_bad_group_zero(**options: Any) -> tuple[AsyncRolloutManager, Group]:
    """Generate two batches while group 0 fails; return the manager and the record of group 0."""
    settled: list[Group] = []
    manager = manager_of(**{"generate_fn": answer_at_once, "on_group": settled.append, **options})
    async with manager:
        batches = [await manager.generate_batch(), await manager.generate_batch()]
        with anyio.fail_after(20):
            while not manager.accounting.failed:  # noqa: ASYNC110 - groups settle without telling the waiter
                await anyio.sleep(0.002)
    for batch in batches:
        check_batch(batch, manager.config, {number: f"question {number}" for number in range(50)})
        assert 0 not in {sample.group_index for sample in batch}
    assert manager.accounting.failed == 1
    (failed,) = failed_groups(settled)
    assert failed.group_index == 0
    return manager, failed


@pytest.mark.parametrize("error", exceptions_of_guests(), ids=of_name)
async def test_what_generation_raises_costs_its_group_only(error: BaseException) -> None:
    """4.1 Whatever it is; it is attributed, and its traceback is kept with the group."""
    _, failed = await run_with_bad_group_zero(generate_fn=only_bad_in_group_zero(lambda request: _raise(error)))
    failures = [sample.failure for sample in failed.samples if sample.failure]
    assert failures
    for failure in failures:
        assert failure.kind in ("GenerateFailure", type(error).__name__)
        assert failure.place.startswith("group 0 · sample ")
        assert type(error).__name__ in failure.traceback


@pytest.mark.parametrize("what", BROKEN_RETURNS)
async def test_a_return_that_is_no_rollout_costs_its_group_only(what: str) -> None:
    """4.2 Wrong types, no samples, lost statuses, malformed columns: never a crash, never in a batch."""
    generate = only_bad_in_group_zero(BROKEN_RETURNS[what])
    _, failed = await run_with_bad_group_zero(generate_fn=generate, reward_fn=lambda sample: 1.0)
    assert failed.reason.startswith("GenerateFailure: ")
    assert all(sample.to_dict() for sample in failed.samples), "the record can be written down"


@pytest.mark.parametrize("value", BROKEN_REWARDS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("whole", [False, True])
async def test_a_reward_that_is_no_number_costs_its_group_only(value: Any, whole: bool) -> None:
    """4.3 None, NaN, infinity, text and the rest are failures, never a zero."""

    def reward(sample: Sample) -> Any:
        return value if sample.group_index == 0 else 1.0

    def rewards(samples: list[Sample]) -> Any:
        return [1.0, value] if samples[0].group_index == 0 else [1.0, 1.0]

    _, failed = await run_with_bad_group_zero(reward_fn=rewards if whole else reward, group_rm=whole)
    assert failed.reason.startswith("RewardFailure: ")
    assert "expected a finite number" in failed.reason


@pytest.mark.parametrize("error", exceptions_of_guests()[:-1], ids=of_name)
@pytest.mark.parametrize("whole", [False, True])
async def test_what_a_reward_raises_costs_its_group_only(error: BaseException, whole: bool) -> None:
    """4.4 In a thread, once for a sample or once for the group."""

    def reward(given: Any) -> Any:
        samples = given if whole else [given]
        if samples[0].group_index == 0:
            raise error
        return [1.0] * len(samples) if whole else 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward, group_rm=whole)
    assert failed.reason.startswith(("RewardFailure: ", "EndpointUnavailable: "))


@pytest.mark.parametrize("given", [None, 1.0, [], [1.0], [1.0] * 3, {0: 1.0, 1: 1.0}, "11"], ids=repr)
async def test_a_group_reward_gives_one_number_for_each_sample(given: Any) -> None:
    """4.5 Fewer, more or something else fails the group."""

    def rewards(samples: list[Sample]) -> Any:
        return given if samples[0].group_index == 0 else [0.5, 0.5]

    await run_with_bad_group_zero(reward_fn=rewards, group_rm=True)


@pytest.mark.parametrize("error", exceptions_of_guests()[:-1], ids=of_name)
async def test_what_a_filter_raises_costs_its_group_only(error: BaseException) -> None:
    """4.6 A filter that raises has failed its group, not rejected it."""

    def check(samples: list[Sample]) -> bool:
        return bool(_raise(error)) if samples[0].group_index == 0 else True

    manager, _ = await run_with_bad_group_zero(filter_fn=check)
    assert manager.accounting.dropped == 0


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: type(answer).__name__)
async def test_a_filter_answers_with_a_bool(answer: Any) -> None:
    """4.7 None, numbers and arrays are invalid: a forgotten ``return`` does not drop everything silently."""

    def check(samples: list[Sample]) -> Any:
        return answer if samples[0].group_index == 0 else True

    _, failed = await run_with_bad_group_zero(filter_fn=check)
    assert failed.reason.startswith("FilterFailure: ")


async def test_a_rollout_is_tried_again_before_it_is_lost() -> None:
    """4.8 ``max_attempts`` times, from the start; the others of its group are not repeated."""
    calls: Counter[int | None] = Counter()

    async def flaky(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        calls[request.index] += 1
        if request.index == 1 and calls[1] < 3:
            raise ConnectionError("reset")
        return [sample_for(request, reward=1.0)]

    batch = await manager_of(flaky, max_attempts=3, over_sampling_factor=1).generate_batch()
    assert calls == {0: 1, 1: 3, 2: 1, 3: 1, 4: 1, 5: 1}
    assert [sample.metrics["attempts"] for sample in batch] == [1, 3, 1, 1, 1, 1]
    assert all(sample.failure is None for sample in batch)


async def test_the_siblings_of_a_lost_rollout_stop() -> None:
    """4.9 Its group cannot become complete, so its siblings are cancelled."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        if request.index == 0:
            raise ValueError("lost")
        return await (never if request.index == 1 else answer_at_once)(prompts)

    await run_with_bad_group_zero(generate_fn=generate)


async def test_a_failure_can_stop_the_run() -> None:
    """4.10 With ``on_failure="stop"`` the first group lost ends the batch, and is still accounted for."""
    manager = manager_of(only_bad_in_group_zero(lambda request: _raise(ValueError("no"))), on_failure="stop")
    with pytest.raises(GenerateFailure, match=r"group 0 failed: GenerateFailure: .*ValueError: no"):
        await manager.generate_batch()
    assert manager.accounting.failed == 1
    assert manager.accounting.in_flight == 0
    assert len(await manager.generate_batch()) == 6, "and the next call works"


async def test_one_failure_does_not_poison_the_next_call() -> None:
    """4.11 After a batch that ended in an error the manager works as before (slime's next call fails as well)."""
    angry = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if angry:
            raise RuntimeError("down")
        return await answer_at_once(prompts)

    manager = manager_of(generate, patience=2)
    for _ in range(3):
        with pytest.raises(GenerateFailure, match="down"):
            await manager.generate_batch()
    angry = False
    assert len(await manager.generate_batch()) == 6


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
async def test_a_reward_may_give_a_sample_up(status: Status) -> None:
    """4.12 A status that the reward function sets counts as the status of the rollout."""

    def reward(sample: Sample) -> float:
        if sample.group_index == 0:
            sample.status = status
        return 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward)
    assert f"ended {status.value}" in failed.reason


@pytest.mark.parametrize("where", ["reward_fn", "filter_fn"])
async def test_a_column_spoiled_by_a_guest_costs_its_group_only(where: str) -> None:
    """4.13 Rewards and filters may edit masks; an edit that breaks a column fails its group, not the batch."""

    def spoil(given: Any) -> Any:
        for sample in given if isinstance(given, list) else [given]:
            if sample.group_index == 0:
                sample.loss_mask = [*sample.loss_mask, 7]
        return True

    await run_with_bad_group_zero(**{where: spoil})


async def test_an_edit_of_the_mask_survives() -> None:
    """4.14 A mask assigned by a reward arrives in the batch."""

    def reward(sample: Sample) -> float:
        sample.loss_mask = [0, 0, 1]
        return 1.0

    batch = await manager_of(answer_at_once, reward_fn=reward).generate_batch()
    assert all(sample.loss_mask == [0, 0, 1] for sample in batch)


@pytest.mark.parametrize(
    "field",
    [
        {"metrics": {"note": "hi"}},
        {"metrics": {"note": math.nan}},
        {"metrics": None},
        {"completions": ["call"]},
        {"versions": ["3"]},
        {"step_rewards": [0.5, math.nan]},
        {"step_rewards": ["0.5"]},
        {"step_rewards": None},
    ],
)
async def test_records_of_another_kind_are_refused_with_their_rollout(field: dict[str, Any]) -> None:
    """4.15 A value that would break the metrics of a batch, or its file, fails its own rollout."""

    def bad(request: Prompt) -> list[Sample]:
        sample = sample_for(request, reward=1.0)
        for name, value in field.items():
            setattr(sample, name, value)
        return [sample]

    await run_with_bad_group_zero(generate_fn=only_bad_in_group_zero(bad))


# -- 5. broken laws are crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TokenMismatchError("ids differ"),
        ExceptionGroup("in a task group", [ValueError("in a sibling"), TokenMismatchError("ids differ")]),
    ],
    ids=of_name,
)
async def test_a_broken_law_stops_the_run(error: Exception) -> None:
    """5.1 Never retried, never counted as failed, also from inside a task group; its prompt goes back."""
    calls: Counter[int | None] = Counter()

    def broken(request: Prompt) -> Any:
        calls[request.index] += 1
        raise error

    till = Till(questions(50))
    manager = manager_of(only_bad_in_group_zero(broken), till)
    with pytest.raises(TokenMismatchError, match="ids differ"):
        await manager.generate_batch()
    assert max(calls.values()) == 1
    assert manager.accounting.failed == 0
    assert till.back[0] == 1
    manager.accounting.check()


async def test_a_config_error_stops_the_run() -> None:
    """5.2 An error that the user must correct is raised at once and not retried."""
    manager = manager_of(only_bad_in_group_zero(lambda request: _raise(ConfigError.of("tokenizer", None, "one"))))
    with pytest.raises(ConfigError, match="tokenizer: got None; expected one"):
        await manager.generate_batch()
    manager.accounting.check()


async def test_a_group_that_cannot_be_recorded_is_not_lost() -> None:
    """5.3 When ``on_group`` raises, the run stops; the group runs again without generating anything twice."""
    calls: Counter[int | None] = Counter()
    reported: list[int] = []
    full = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        return await answer_at_once(prompts)

    def record(group: Group) -> None:
        if full and group.group_index == 1:
            raise OSError(28, "no space left on device")
        reported.append(group.group_index)

    manager = manager_of(generate, on_group=record, over_sampling_factor=1)
    with pytest.raises(Exception, match="recording with record raised OSError"):
        await manager.generate_batch()
    full = False
    batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {0, 1, 2}
    assert sorted(reported) == [0, 1, 2]
    assert calls[2] == calls[3] == 1
    assert not failed_groups(manager.ready_groups)


# -- 6. deadlines -----------------------------------------------------------------------------------------------------


async def hang_in_group_zero(prompts: Sequence[Prompt]) -> list[Sample]:
    return await (never if prompts[0].group_index == 0 else answer_at_once)(prompts)


async def test_a_hung_rollout_is_cut() -> None:
    """6.1 At ``rollout_seconds``; the batch does not wait for it."""
    _, failed = await run_with_bad_group_zero(generate_fn=hang_in_group_zero, rollout_seconds=0.05, max_attempts=1)
    assert "did not answer within 0.05 s" in failed.reason


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
async def test_a_late_reward_is_a_failure(whole: bool, threaded: bool) -> None:
    """6.2 At ``reward_seconds``, also when it blocks a thread: never a zero, never a wait for ever."""
    release = threading.Event()

    def blocking(given: Any) -> Any:
        samples = given if whole else [given]
        if samples[0].group_index == 0:
            release.wait(30)
        return [1.0] * len(samples) if whole else 1.0

    async def hanging(given: Any) -> Any:
        if (given if whole else [given])[0].group_index == 0:
            await anyio.sleep_forever()
        return [1.0] * len(given) if whole else 1.0

    try:
        _, failed = await run_with_bad_group_zero(
            reward_fn=blocking if threaded else hanging, group_rm=whole, reward_seconds=0.3, max_attempts=1
        )
    finally:
        release.set()
    assert failed.reason.startswith("RewardFailure: ")
    assert "did not answer within" in failed.reason


async def test_a_hung_filter_is_cut() -> None:
    """6.3 At ``filter_seconds``."""
    release = threading.Event()

    def check(samples: list[Sample]) -> bool:
        return release.wait(30) if samples[0].group_index == 0 else True

    try:
        _, failed = await run_with_bad_group_zero(filter_fn=check, filter_seconds=0.3)
    finally:
        release.set()
    assert failed.reason.startswith("FilterFailure: ")


async def test_an_answer_after_the_deadline_is_late() -> None:
    """6.4 A reward function that swallows its deadline and returns 0.0 fails (a source of silent wrong labels)."""

    async def reward(sample: Sample) -> float:
        try:
            if sample.group_index == 0:
                await anyio.sleep_forever()
        except BaseException:  # noqa: BLE001 - the subject
            return 0.0
        return 1.0

    _, failed = await run_with_bad_group_zero(reward_fn=reward, reward_seconds=0.05, max_attempts=1)
    assert "did not answer within" in failed.reason


async def test_the_run_can_say_what_it_waits_for() -> None:
    """6.5 A wait is reported with its group, its operation, its start, its deadline and its source line."""
    manager = manager_of(hang_in_group_zero, batch_size=1, over_sampling_factor=3, n_samples_per_prompt=1)
    async with manager:
        await manager.generate_batch()
        (waiting,) = manager.waiting_for(count=5)
        assert waiting.startswith("group 0 · sample 0: generate_fn hang_in_group_zero for ")
        assert " s left, in " in waiting
        assert waiting.endswith(" in never")
    assert manager.waiting_for() == []


async def test_waiting_for_a_thread_does_not_count_against_the_deadline() -> None:
    """6.6 A deadline covers the function, not the wait for a worker thread."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    turn = threading.Event()

    def reward(sample: Sample) -> float:
        turn.wait(0.02)
        return 1.0

    manager = manager_of(answer_at_once, reward_fn=reward, reward_seconds=0.2, batch_size=5, n_samples_per_prompt=4)
    assert len(await manager.generate_batch()) == 20
    assert manager.accounting.failed == 0


async def test_a_hung_group_is_cut() -> None:
    """6.7 At ``group_seconds``, over all attempts; the group is recorded with the rollouts that it has finished."""

    async def hang_in_one(prompts: Sequence[Prompt]) -> list[Sample]:
        return await (never if prompts[0].index == 1 else answer_at_once)(prompts)

    manager, failed = await run_with_bad_group_zero(generate_fn=hang_in_one, group_seconds=0.05)
    assert failed.reason == "GenerateFailure: the group was not finished within 0.05 s"
    assert [sample.status is Status.FAILED for sample in failed.samples][:2] == [False, True]
    assert manager.failures.lost["deadline"] == 1


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_batch_that_is_not_filled_in_time_says_so(is_open: bool) -> None:
    """6.8 At ``batch_seconds``; accepted groups remain for the next call, and no prompt is lost."""
    release = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == 1:
            await release.wait()
        return await answer_at_once(prompts)

    manager = manager_of(generate, batch_size=2, over_sampling_factor=1, batch_seconds=0.3)
    async with manager if is_open else contextlib.nullcontext():
        with pytest.raises(GenerateFailure, match=r"1 of 2 groups were accepted within 0.3 s; they are kept"):
            await manager.generate_batch()
        release.set()
        batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {0, 1}
    manager.accounting.check()


# -- 7. cancellation and reuse ----------------------------------------------------------------------------------------


async def two_of_three(prompts: Sequence[Prompt]) -> list[Sample]:
    """Every third rollout never ends."""
    assert prompts[0].index is not None
    return await (never if prompts[0].index % 3 == 2 else answer_at_once)(prompts)


async def test_what_is_finished_survives_a_cancellation() -> None:
    """7.1 After a cancelled batch, the next one generates only rollouts that were not finished."""
    calls: Counter[int | None] = Counter()
    stuck = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        return await (two_of_three if stuck else answer_at_once)(prompts)

    manager = manager_of(generate, n_samples_per_prompt=3, over_sampling_factor=1)
    with anyio.move_on_after(0.05) as scope:
        await manager.generate_batch()
    assert scope.cancelled_caught
    assert (manager.accounting.returned, manager.accounting.in_flight) == (3, 0)
    stuck = False
    batch = await manager.generate_batch()
    assert rollouts_of(batch) == list(range(9))
    assert [calls[index] for index in range(9)] == [1, 1, 2] * 3


async def test_a_cancelled_wait_in_the_context_cancels_no_rollout() -> None:
    """7.2 Inside ``async with`` the rollouts outlive a cancelled batch."""
    calls: Counter[int | None] = Counter()
    go = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        await go.wait()
        return await answer_at_once(prompts)

    async with manager_of(generate) as manager:
        with anyio.move_on_after(0.02):
            await manager.generate_batch()
        assert manager.accounting.in_flight == 6
        go.set()
        assert len(await manager.generate_batch()) == 6
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("context", [True, False])
async def test_cancellations_of_plain_asyncio_work_too(context: bool) -> None:
    """7.3 ``asyncio.timeout`` around a batch ends as a timeout, and leaves nothing behind."""
    manager = manager_of(never)
    async with AsyncExitStack() as stack:
        if context:
            await stack.enter_async_context(manager)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await manager.generate_batch()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert manager.accounting.in_flight == 0
    assert manager.accounting.returned == manager.accounting.taken == 6


async def test_a_batch_that_is_counted_is_handed_out() -> None:
    """7.4 A cancellation at the very end of a batch does not swallow it: its groups are ready for the next."""
    for after in range(40):
        manager = manager_of(slow_first, n_samples_per_prompt=1, batch_size=1, over_sampling_factor=3)
        batches: list[list[Sample]] = []

        async def fill(manager: AsyncRolloutManager = manager, batches: list[list[Sample]] = batches) -> None:
            batches.append(await manager.generate_batch())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            await points(40 + after)
            tasks.cancel_scope.cancel()
        assert manager.accounting.in_batch == len(batches)
        assert manager.accounting.in_flight == 0


async def test_a_manager_closes_over_a_rollout_that_swallows_every_cancellation() -> None:
    """7.12 It is abandoned and counted, its prompt goes back, and the accounting adds up."""

    async def stubborn(prompts: Sequence[Prompt]) -> list[Sample]:
        while prompts[0].group_index == 0:
            with contextlib.suppress(asyncio.CancelledError):
                await anyio.sleep_forever()
        return [Sample(tokens=[1], loss_mask=[1], reward=1.0) for _ in prompts]

    manager = manager_of(stubborn, batch_size=1, over_sampling_factor=2, n_samples_per_prompt=1)
    before = len(left_behind())
    with anyio.fail_after(60):
        async with manager:
            await manager.generate_batch()
    assert len(left_behind()) == before + 1
    left_behind()[-1].awaitable.close()  # type: ignore[attr-defined]  # or it would live until the interpreter ends
    assert (manager.accounting.in_batch, manager.accounting.returned, manager.accounting.in_flight) == (1, 1, 0)
    manager.accounting.check()


async def test_a_swallowed_cancellation_is_no_reward() -> None:
    """7.5 A reward of 0.0 that is returned because the manager closed is void; the rollout is scored again."""
    closing = True

    async def reward(sample: Sample) -> float:
        try:
            await (anyio.sleep_forever() if closing else checkpoint())
        except BaseException:  # noqa: BLE001 - the subject
            return 0.0
        return 1.0

    manager = manager_of(answer_at_once, reward_fn=reward)
    with anyio.move_on_after(0.02):
        await manager.generate_batch()
    closing = False
    assert {sample.reward for sample in await manager.generate_batch()} == {1.0}


async def test_a_closed_manager_goes_on_where_it_was() -> None:
    """7.6 Closing returns groups in flight; after reopening, the same group indices come out, none twice."""
    scene = attrs.evolve(PLAIN, batches=8, cut=1.0, longest=40)
    _, till, _ = await play(scene)
    assert till.back.total() > 0


async def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    """7.7 In no exception group, whatever was in flight."""
    manager = manager_of(hang_in_group_zero)

    async def body() -> None:
        async with manager:
            await manager.generate_batch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert manager.accounting.in_flight == 0
    assert manager.accounting.returned >= 1


async def test_an_open_manager_is_not_opened_again() -> None:
    """7.8 The attempt raises, and the manager stays usable."""
    async with manager_of(answer_at_once) as manager:
        with pytest.raises(RuntimeError, match="open already"):
            await manager.__aenter__()
        assert len(await manager.generate_batch()) == 6


async def test_two_batches_at_once_share_nothing() -> None:
    """7.9 Two batches that are requested concurrently are disjoint and whole."""
    batches: list[list[Sample]] = []

    async def fill() -> None:
        batches.append(await manager.generate_batch())

    async with manager_of(slow_first) as manager, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(fill)
    groups = [group for batch in batches for group in check_batch(batch, manager.config, _texts(50))]
    assert len(set(groups)) == len(groups) == 9
    manager.accounting.check()


def _texts(count: int) -> dict[int, str]:
    return dict(enumerate(questions(count)))


async def test_closing_during_a_batch_raises() -> None:
    """7.10 A task that waits for a batch gets an error when another task closes the manager."""
    manager = manager_of(never)
    errors: list[str] = []

    async def fill() -> None:
        try:
            await manager.generate_batch()
        except RuntimeError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks, manager:
        tasks.start_soon(fill)
        await points(5)
    assert errors == ["the manager was closed while this batch was being filled"]
    assert manager.accounting.in_flight == 0


def test_a_manager_outlives_its_event_loop() -> None:
    """7.11 One manager, several loops, one after the other, also after a cancelled batch."""
    stuck = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        return await (two_of_three if stuck else answer_at_once)(prompts)

    async def cut() -> None:
        with anyio.move_on_after(0.02):
            async with manager:
                while True:
                    await manager.generate_batch()

    manager = manager_of(generate, n_samples_per_prompt=1)
    for _ in range(3):
        stuck = True
        asyncio.run(cut())
        stuck = False
        assert len(asyncio.run(manager.generate_batch())) == 3
    manager.accounting.check()


# -- 8. data that runs dry --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [True, False])
async def test_data_that_runs_dry_says_so_and_loses_nothing(context: bool) -> None:
    """8.1 Seven prompts in batches of three: two batches, then an error that counts what is left; one group waits."""
    manager = manager_of(answer_at_once, DataBuffer(questions(7), epochs=1))
    async with AsyncExitStack() as stack:
        if context:
            await stack.enter_async_context(manager)
        batches = [await manager.generate_batch(), await manager.generate_batch()]
        for _ in range(2):
            with pytest.raises(DataExhausted, match="1 of 3 groups are accepted and no prompt is left"):
                await manager.generate_batch()
    assert [group.group_index for group in manager.ready_groups] == [6]
    assert sorted({sample.group_index for batch in batches for sample in batch}) == list(range(6))
    assert manager.accounting.taken == 7 + manager.accounting.returned


async def test_a_buffer_smaller_than_a_batch() -> None:
    """8.2 Without a limit of epochs a small data set fills batch after batch; with one epoch it is exhausted."""
    batch = await manager_of(answer_at_once, 2, batch_size=5).generate_batch()
    assert [sample.prompt for sample in batch][::2] == ["question 0", "question 1"] * 2 + ["question 0"]
    with pytest.raises(DataExhausted, match="2 of 5"):
        await manager_of(answer_at_once, DataBuffer(questions(2), epochs=1), batch_size=5).generate_batch()


async def test_what_runs_dry_waits_for_what_is_in_flight() -> None:
    """8.3 The buffer is empty, but the last group is still in flight: the batch waits for it."""
    batch = await manager_of(slow_first, DataBuffer(questions(3), epochs=1)).generate_batch()
    assert len(batch) == 6


async def test_a_checkpoint_between_batches_loses_no_prompt() -> None:
    """8.4 Saved after a batch, a buffer gives out again whatever is in no batch, dropped or failed: also what is ready.

    Otherwise every restart skips prompts (NeMo-RL lost a third of the data that way, the long rollouts first).
    """
    buffer = DataBuffer(questions(12), epochs=1)
    async with manager_of(answer_at_once, buffer, over_sampling_factor=3) as manager:
        first = await manager.generate_batch()
        await points(200)
        state = buffer.save_state()
    again = DataBuffer(questions(12), epochs=1)
    again.load_state(state)
    async with manager_of(answer_at_once, again) as manager:
        rest = [await manager.generate_batch() for _ in range(3)]
    texts = [sample.prompt for batch in [first, *rest] for sample in batch]
    assert Counter(texts) == dict.fromkeys(questions(12), 2)


# -- 9. nothing is dropped for being long -----------------------------------------------------------------------------


async def test_a_long_group_is_in_some_later_batch() -> None:
    """9.1 A group that finishes long after its batch was full is carried into a later one, whole."""
    long = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].index == 1:
            await long.wait()
        return await answer_at_once(prompts)

    async with manager_of(generate) as manager:
        for _ in range(3):
            batch = await manager.generate_batch()
            assert 0 not in {sample.group_index for sample in batch}
        long.set()
        await points(20)
        batch = await manager.generate_batch()
    assert [sample.index for sample in batch][:2] == [0, 1], "and before anything younger"


async def test_lengths_do_not_decide_what_is_trained() -> None:
    """9.2 Over a finite data set every group ends in a batch, whatever its length: no bias to short replies."""
    rng = random.Random(5)
    lengths = [rng.choice([1, 3, 200]) for _ in range(240)]

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.index is not None
        await points(lengths[request.index])
        return [sample_for(request, length=lengths[request.index], reward=1.0)]

    manager = manager_of(generate, DataBuffer(questions(120), epochs=1), batch_size=10)
    async with manager:
        batches = [await manager.generate_batch() for _ in range(12)]
    assert [len(sample) - 1 for batch in sorted(batches, key=lambda b: b[0].index or 0) for sample in batch].count(
        200
    ) == lengths.count(200)
    assert sorted(sample.index or 0 for batch in batches for sample in batch) == list(range(240))
    assert manager.accounting.returned == 0


async def test_without_the_context_a_long_group_is_handed_back_once() -> None:
    """9.3 The next call waits for a returned group, whatever its length."""
    begun: Counter[int] = Counter()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (request,) = prompts
        assert request.group_index is not None
        begun[request.group_index] += 1
        await points(500 if request.group_index % 4 == 0 else 1)
        return await answer_at_once(prompts)

    manager = manager_of(generate, DataBuffer(questions(400)), batch_size=4)
    batches = [{sample.group_index for sample in await manager.generate_batch()} for _ in range(8)]
    handed_out = set().union(*batches)
    oldest_missing = next(group for group in range(400) if group not in handed_out)
    assert oldest_missing >= 4 * 7, "nothing older than the last batch is left out"
    assert max(begun.values()) <= 2 * manager.config.n_samples_per_prompt


# -- 10. call shapes --------------------------------------------------------------------------------------------------


async def test_the_order_of_arguments() -> None:
    """10.1 ``(config, data_buffer)``; the other order is an error that names the right one."""
    config, buffer = RolloutConfig(batch_size=2, generate_fn=answer_at_once), DataBuffer(["a"])
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.config: .*a RolloutConfig, before the data buffer"):
        AsyncRolloutManager(buffer, config)  # type: ignore[arg-type]
    assert len(await AsyncRolloutManager(config, buffer).generate_batch()) == 16


@pytest.mark.parametrize("second", [None, ["a"], "data.jsonl"])
def test_other_arguments_are_refused_by_name(second: Any) -> None:
    """10.2 An argument that is neither a buffer nor a config is refused."""
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.data_buffer: got .*; expected a DataBuffer"):
        AsyncRolloutManager(RolloutConfig(batch_size=2, generate_fn=answer_at_once), second)
    with pytest.raises(ConfigError, match=r"AsyncRolloutManager.config: got .*; expected a RolloutConfig"):
        AsyncRolloutManager(second, DataBuffer(["a"]))


async def test_functions_may_be_partials_objects_sync_or_async() -> None:
    """10.3 What can be called can be configured."""

    class Judge:
        async def __call__(self, sample: Sample) -> float:
            return 0.25

    async def generate(prompts: Sequence[Prompt], *, reward: float) -> list[Sample]:
        return [sample_for(prompt, reward=reward) for prompt in prompts]

    def lazily(sample: Sample) -> Any:
        return Judge()(sample)

    for judge, expected in [(None, 0.5), (Judge(), 0.25), (partial(Judge()), 0.25), (lazily, 0.25)]:
        manager = manager_of(partial(generate, reward=0.5), reward_fn=judge)
        assert {sample.reward for sample in await manager.generate_batch()} == {expected}


async def test_each_call_asks_for_one_rollout_with_its_place() -> None:
    """10.4 ``generate_fn`` receives a list of one prompt with group index, index, label and metadata."""
    rows = [{"prompt": f"p{number}", "label": number, "metadata": {"level": number}} for number in range(50)]
    seen: list[Prompt] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        seen.extend(prompts)
        assert len(prompts) == 1
        return await answer_at_once(prompts)

    batch = await manager_of(generate, DataBuffer(rows)).generate_batch()
    for request in seen:
        assert request.group_index == (request.index or 0) // 2
        assert request.label == request.group_index
        assert request.metadata == {"level": request.group_index}
    assert [sample.label for sample in batch] == [0, 0, 1, 1, 2, 2]


async def test_the_state_of_a_manager_is_its_repr() -> None:
    """10.5 The repr of a manager contains its batches and its accounting."""
    manager = manager_of(answer_at_once, over_sampling_factor=1)
    assert repr(manager).startswith("<AsyncRolloutManager 0 batches · 0 prompts taken")
    await manager.generate_batch()
    assert (
        repr(manager)
        == "<AsyncRolloutManager 1 batches · 3 prompts taken = 3 in batch + 0 dropped + 0 failed + 0 returned>"
    )


# -- 11. random interleavings ----------------------------------------------------------------------------------------


@many
@given(scene=scenes(threads=False))
def test_every_law_holds_in_any_interleaving(scene: Scene) -> None:
    """11.1 With failures, timeouts, odd results and cancellations: groups are whole, sums add up, nothing is lost."""
    anyio.run(play, scene)


@settings(parent=many, max_examples=60)
@given(scene=scenes(threads=True))
def test_every_law_holds_with_functions_in_threads(scene: Scene) -> None:
    """11.2 The same with sync functions, which run in threads."""
    anyio.run(play, scene)
