"""The world of the law book of the manager: its functions draw the outcome of each rollout from a seed, and count.

The tests do not rely on the accounting of the manager: a :class:`World` provides the user's functions and counts for
itself; a :class:`Till` is a data buffer that records which groups go out and come back. Time is counted in scheduling
points, except in tests of deadlines.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import attrs
import numpy as np
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rollouts.concurrency.boundary import waits
from rollouts.errors import (
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
)
from rollouts.training.failures import FailurePolicy


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
    "a token id that is not a number": lambda request: [sample_for(request, tokens=["a", "b", "c"])],
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
    in_flight: int | None = None
    replacements: int = 0


class World:
    """The user's functions of one scene. The seed alone determines the outcome of each rollout and group."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.calls: Counter[int] = Counter()
        self.done: set[int] = set()
        self.settled: list[Group] = []
        self.violations: list[str] = []
        self.alive = 0
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
        if in_work > self.manager.config.max_inflight_groups:
            self.violations.append(f"{in_work} groups in work: {counts}")

    async def generate(self, prompts: Sequence[Prompt]) -> Any:
        self.alive += 1
        assert self.manager is not None
        most = self.manager.config.in_flight
        if most is not None and self.alive > most:
            self.violations.append(f"{self.alive} rollouts run at once; at most {most} may")
        try:
            return await self.outcome(prompts)
        finally:
            self.alive -= 1

    async def outcome(self, prompts: Sequence[Prompt]) -> Any:
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
                "in_flight": scene.in_flight,
                "failures": {"generate": FailurePolicy(replacements=scene.replacements)},
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
        assert (manager.slots.running, manager.slots.waiting) == (0, 0), "all slots are free"
        assert manager.slots.has_room(), "no slot is reserved"

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


def of_name(error: BaseException) -> str:
    return type(error).__name__


async def hang_in_group_zero(prompts: Sequence[Prompt]) -> list[Sample]:
    return await (never if prompts[0].group_index == 0 else answer_at_once)(prompts)


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
