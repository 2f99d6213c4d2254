"""Faults of user code, each in one group of a run: an environment, a reward, a filter or a generate function."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import anyio.lowlevel
import attrs

from rollouts.dtypes import Endpoint, Limits, Message, Prompt
from rollouts.environments import CalculatorEnvironment, StepResult
from rollouts.errors import ConfigError, DataExhausted, RolloutsError, TokenMismatchError
from rollouts.recipe import Recipe, agent_recipe
from rollouts.runs.reader import load_run
from rollouts.testing.server import StubServer
from rollouts.training import Sample
from scripts.faults.harness import MARK, Outcome, endpoint_at, judged, sound_reply

__all__ = ["CODE", "CodeFault", "Place", "deep", "fault_of", "play_code", "recipe_of"]

Place: TypeAlias = Literal["start", "step", "close", "reward", "group reward", "filter", "generate"]
CONTINUE: Any = object()
"""The value of an action after which the function continues as a sound one."""


@attrs.frozen
class CodeFault:
    """One fault of an environment, a reward, a filter or a generate function."""

    place: Place
    name: str
    act: Callable[[Any], Any]
    """Called with the environment, the sample, the samples or the prompts; its value is returned."""
    accepted: bool = False
    """Its group may be in a batch: the value is valid, or the fault comes after the rollout."""
    ends: str = ""
    """Why it ought to end the run."""
    slow: bool = False
    """It takes more than a second, or leaves something behind for good."""


class _Panic(BaseException):
    """A ``BaseException`` as Rust libraries raise it; it cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("not printable")


def _raises(error: Callable[[], BaseException]) -> Callable[[Any], Any]:
    def act(subject: Any) -> Any:
        raise error()

    return act


def _cancels(subject: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return CONTINUE


async def _hangs(subject: Any) -> Any:
    await anyio.sleep_forever()


async def _swallows(subject: Any) -> Any:
    while True:
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()


def _recurses(subject: Any) -> Any:
    return _recurses(subject)


def deep(times: int = 5000) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(times):
        value = {"in": value}
    return value


def _cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "raises OSError": lambda: OSError("no world today"),
    "raises KeyError": lambda: KeyError("plum"),
    "raises StopIteration": StopIteration,
    "raises StopAsyncIteration": StopAsyncIteration,
    "raises TimeoutError": TimeoutError,
    "raises MemoryError": MemoryError,
    "raises SystemExit": lambda: SystemExit(0),
    "raises GeneratorExit": GeneratorExit,
    "raises CancelledError": asyncio.CancelledError,
    "raises a BaseException that cannot be printed": _Panic,
    "raises a group of BaseExceptions": lambda: BaseExceptionGroup("g", [_Panic(), OSError()]),
    "raises ConfigError": lambda: ConfigError("forged"),
    "raises TokenMismatchError": lambda: TokenMismatchError("forged"),
    "raises DataExhausted": lambda: DataExhausted("forged"),
}
_ACTS: dict[str, Callable[[Any], Any]] = {
    "recurses without end": _recurses,
    "cancels its task": _cancels,
    "awaits for ever": _hangs,
}

_VALUES: dict[Place, dict[str, Callable[[], Any]]] = {
    "step": {
        "returns None": lambda: None,
        "returns a dict": lambda: {"messages": []},
        "returns a string": lambda: "done",
        "has a reward of NaN": lambda: StepResult(done=True, reward=math.nan),
        "has an infinite reward": lambda: StepResult(done=True, reward=math.inf),
        "has a reward that is a string": lambda: StepResult(done=True, reward="0.1"),  # type: ignore[arg-type]
        "has a metric that is a string": lambda: StepResult(done=True, metrics={"won": "yes"}),  # type: ignore[dict-item]
        "has a metric of NaN": lambda: StepResult(done=True, metrics={"won": math.nan}),
        "has metrics that are a list": lambda: StepResult(done=True, metrics=["won"]),  # type: ignore[arg-type]
        "has done that is a string": lambda: StepResult(done="yes"),  # type: ignore[arg-type]
        "has a message that is a number": lambda: StepResult([7]),  # type: ignore[list-item]
        "has a message of a wrong role": lambda: StepResult([Message("critic", "no")]),  # type: ignore[arg-type]
        "has a message with bytes": lambda: StepResult([Message("user", b"no")]),  # type: ignore[arg-type]
        "has messages that are None": lambda: StepResult(None),  # type: ignore[arg-type]
    },
    "start": {
        "returns None": lambda: None,
        "returns a string": lambda: "hello",
        "returns no message": list,
        "returns texts": lambda: ["hello"],
        "returns a message of a wrong role": lambda: [Message("critic", "no")],  # type: ignore[arg-type]
    },
    "reward": {
        "returns None": lambda: None,
        "returns a string": lambda: "good",
        "returns NaN": lambda: math.nan,
        "returns infinity": lambda: -math.inf,
        "returns a list": lambda: [1.0],
        "returns a dict": lambda: {"reward": 1.0},
        "returns a complex number": lambda: 1j,
        "returns 10^400": lambda: 10**400,
        "returns an awaitable": lambda: anyio.lowlevel.checkpoint(),
    },
}
_EDITS: dict[str, Callable[[Any], Any]] = {
    "changes group_index": lambda sample: setattr(sample, "group_index", 10**6),
    "changes index": lambda sample: setattr(sample, "index", 10**6),
    "changes rollout_id": lambda sample: setattr(sample, "rollout_id", None),
    "clears completions": lambda sample: setattr(sample, "completions", []),
    "changes a token": lambda sample: setattr(sample, "tokens", [sample.tokens[0] + 1, *sample.tokens[1:]]),
    "adds a token": lambda sample: setattr(sample, "tokens", [*sample.tokens, MARK]),
    "changes the mask": lambda sample: setattr(sample, "loss_mask", [1, *sample.loss_mask[1:]]),
    "changes a logprob": lambda sample: setattr(sample, "rollout_log_probs", [*sample.rollout_log_probs[:-1], -9.0]),
    "sets a status that does not exist": lambda sample: setattr(sample, "status", "banana"),
    "sets cyclic messages": lambda sample: setattr(sample, "messages", [_cyclic()]),
    "sets deep metadata": lambda sample: setattr(sample, "metadata", deep()),
    "sets a cyclic label": lambda sample: setattr(sample, "label", _cyclic()),
    "sets a metric of NaN": lambda sample: sample.metrics.__setitem__("won", math.nan),
    "sets a metric that is a string": lambda sample: sample.metrics.__setitem__("won", "yes"),
    "sets a step reward of NaN": lambda sample: setattr(sample, "step_rewards", [math.nan]),
}


def _then(edit: Callable[[Sample], Any]) -> Callable[[Any], Any]:
    """Edit a sample, or the first of several, and continue as a sound function."""

    def act(subject: Any) -> Any:
        edit(subject[0] if isinstance(subject, Sequence) else subject)
        return CONTINUE

    return act


def _given(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A function of one argument that returns a new value each time."""
    return lambda _: value()


def _swap(samples: Sequence[Sample]) -> Any:
    samples[0].index, samples[1].index = samples[1].index, samples[0].index
    return CONTINUE


def _code_faults() -> Iterator[CodeFault]:
    places: tuple[Place, ...] = ("start", "step", "close", "reward", "group reward", "filter", "generate")
    for place in places:
        for name, error in _ERRORS.items():
            # A package error of the generate function is one of the loop, not of user code.
            if not (place == "generate" and issubclass(type(error()), RolloutsError)):
                yield CodeFault(place, name, _raises(error), accepted=place == "close")
        for name, act in _ACTS.items():
            yield CodeFault(place, name, act, accepted=place == "close", slow=name == "awaits for ever")
        yield CodeFault(place, "swallows its cancellation", _swallows, accepted=place == "close", slow=True)
    for kind, message in ((ConfigError, "a setting is invalid"), (TokenMismatchError, "a law is broken")):
        reason = f"{message}, as the generate function of the package reports it"
        yield CodeFault("generate", f"raises {kind.__name__}", _raises(partial(kind, "no")), ends=reason)
    interrupt = "Ctrl-C ends a run"
    yield CodeFault("step", "raises KeyboardInterrupt", _raises(KeyboardInterrupt), ends=interrupt)
    yield CodeFault("reward", "raises KeyboardInterrupt", _raises(KeyboardInterrupt), ends=interrupt)
    for place, values in _VALUES.items():
        for name, make in values.items():
            yield CodeFault(place, name, _given(make))
    yield CodeFault("step", "has a message of 2 MB", lambda world: _long_message(world), accepted=True)
    yield CodeFault("group reward", "returns one reward for all", lambda samples: [1.0])
    yield CodeFault("group reward", "returns a number", lambda samples: 1.0)
    yield CodeFault("group reward", "returns NaN", lambda samples: [math.nan] * len(samples))
    yield CodeFault("group reward", "returns texts", lambda samples: ["1"] * len(samples))
    for name, edit in _EDITS.items():
        for place in ("reward", "group reward", "filter"):
            yield CodeFault(place, name, _then(edit))
    yield CodeFault("filter", "swaps two indices", _swap)
    for name, value in {"NaN": math.nan, "a string": "1.0", "infinity": math.inf}.items():
        edit = partial(lambda sample, value: setattr(sample, "reward", value), value=value)
        yield CodeFault("filter", f"sets a reward of {name}", _then(edit))
    for name, value in {"None": None, "a string": "yes", "a number": 1, "a list": []}.items():
        yield CodeFault("filter", f"returns {name}", _given(partial(copy.copy, value)))
    for name, value in {"None": None, "no sample": [], "a string": "sample", "a number": 7}.items():
        yield CodeFault("generate", f"returns {name}", _given(partial(copy.copy, value)))


def _long_message(world: Any) -> StepResult:
    world.said = True
    return StepResult([Message("user", "x" * 2_000_000)]) if not world.turns else StepResult(done=True)


CODE = tuple(_code_faults())


def fault_of(place: Place, name: str) -> CodeFault:
    return next(fault for fault in CODE if (fault.place, fault.name) == (place, name))


LIMITS = Limits(max_turns=3, step_seconds=0.3, close_seconds=0.3)

Choose: TypeAlias = Callable[[Sequence[Place], int | None], CodeFault | None]
"""Return the fault of a function for a group, if it has one at these places."""


def _sound(places: Sequence[Place], group: int | None) -> None:
    """No function fails."""


async def _acted(fault: CodeFault | None, place: Place, subject: Any) -> Any:
    if fault is None or fault.place != place:
        return CONTINUE
    value = fault.act(subject)
    return await value if inspect.iscoroutine(value) and fault.name != "returns an awaitable" else value


class HostileWorld(CalculatorEnvironment):
    """A calculator with the fault that is chosen for its prompt."""

    choose: Choose
    fault: CodeFault | None = None  # an environment that a check closes has not started

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.turns = 0
        self.fault = type(self).choose(("start", "step", "close"), prompt.group_index)
        value = await _acted(self.fault, "start", self)
        return await super().start(prompt) if value is CONTINUE else value

    async def step(self, reply: Message) -> StepResult:
        value = await _acted(self.fault, "step", self)
        self.turns += 1
        return await super().step(reply) if value is CONTINUE else value

    async def close(self) -> None:
        await _acted(self.fault, "close", self)


def recipe_of(
    endpoint: Endpoint, choose: Choose = _sound, *, batches: int, limits: Limits = LIMITS, **config: Any
) -> Recipe:
    """A recipe of calculator episodes, two in a group, with functions that fail where ``choose`` says so."""
    world = type("World", (HostileWorld,), {"choose": staticmethod(choose)})

    async def reward(sample: Sample) -> Any:
        value = await _acted(choose(("reward",), sample.group_index), "reward", sample)
        return float(len(sample.tokens)) if value is CONTINUE else value

    async def group_reward(samples: Sequence[Sample]) -> Any:
        value = await _acted(choose(("group reward",), samples[0].group_index), "group reward", samples)
        return [1.0] * len(samples) if value is CONTINUE else value

    async def keep(samples: Sequence[Sample]) -> Any:
        value = await _acted(choose(("filter",), samples[0].group_index), "filter", samples)
        return True if value is CONTINUE else value

    group_rm = config.pop("group_rm", False)
    made = agent_recipe(
        "faults",
        endpoint,
        world,
        [f"What is 1 + {number}?" for number in range(50)],
        reward_fn=group_reward if group_rm else reward,
        n_samples_per_prompt=config.pop("n_samples_per_prompt", 2),
        batches=batches,
        max_new_tokens=64,
        epochs=None,
        limits=limits,
    )
    agents = made.config.generate_fn

    async def generate(prompts: Sequence[Prompt]) -> Any:
        value = await _acted(choose(("generate",), prompts[0].group_index), "generate", prompts)
        return await agents(prompts) if value is CONTINUE else value

    late = {"reward_seconds": 0.5, "filter_seconds": 0.5, "rollout_seconds": 5.0}
    sizes = {"batch_size": 2, "patience": 10**6, "failure_budget": 1.0}
    functions = {"generate_fn": generate, "filter_fn": keep, "group_rm": group_rm}
    return attrs.evolve(made, config=attrs.evolve(made.config, **{**late, **sizes, **functions, **config}))


async def play_code(fault: CodeFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run in which the second group gets the fault."""
    met: list[int] = []

    def choose(places: Sequence[Place], group: int | None) -> CodeFault | None:
        if fault.place not in places or group != 1:
            return None
        met.append(group)
        return fault

    def wrong() -> str:
        if not met:
            return "the fault was not met"
        false = not fault.accepted and any(sample.group_index == 1 for sample in load_run(folder))
        return "its group is in a batch" if false else ""

    async with StubServer(sound_reply(random.Random(0))) as server:
        recipe = recipe_of(
            endpoint_at(server.url), choose, batches=2, group_rm=fault.place == "group reward", max_attempts=1
        )
        return await judged(recipe, folder, wrong)
