"""One attempt at one rollout: generate, check, score.

Invariant: an exception of a user's function becomes a sample with status FAILED and its ``failure``; a broken law and a
config error of the generate function propagate. A cancellation of the rollout's own task, by no enclosing scope, costs
the rollout. Returned samples are numbered and packed, and scored unless the rollout is lost; neither a reward nor a
filter changes what identifies them, and no rollout shares lists or dicts of its prompt with another.

This module does not know groups, retries or the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import numbers
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio.lowlevel
import attrs
import msgspec
import numpy as np

from rollouts.base.validators import finite
from rollouts.concurrency.boundary import boundary, function_name, is_cancelled
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import Prompt, StopReason
from rollouts.errors import (
    ConfigError,
    EndpointAway,
    Failure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    shortened,
)
from rollouts.training.compact_record import CompactRecord
from rollouts.training.config import RolloutConfig
from rollouts.training.scoring import score
from rollouts.training.types import Identity, Sample, Status

__all__ = [
    "attempt",
    "ends",
    "is_lost",
    "number_sample",
    "pack_lossy",
    "pack_or_fail",
    "share_rewards",
    "undo_changes",
    "without_own_cancellation",
]

_CLEANING_SECONDS = 300.0
"""Grace period after the deadline of a generate function, for shielded cleanup such as closing environments."""

_LOST = (Status.FAILED, Status.ABORTED)
"""Statuses of a lost rollout: it is tried again, and fails its group when it is lost for good."""


async def attempt(config: RolloutConfig, request: Prompt) -> list[Sample]:
    """Generate a rollout and score it, once.

    Args:
        config: provides ``generate_fn``, ``reward_fn`` (unused with ``group_rm``) and their deadlines.
        request: a prompt with ``group_index`` and ``index``, and the log of its turns.

    Raises:
        ConfigError: every rollout would fail in the same way.
        EndpointAway: no server answered for too long; the rollout is not lost.
        TokenMismatchError: a law is broken.
    """
    samples: list[Sample] = []
    try:
        async with without_own_cancellation(GenerateFailure, "the rollout"):
            name = f"generate_fn {function_name(config.generate_fn)}"
            with boundary(GenerateFailure, name, seconds=config.rollout_seconds, armed=False) as entered:
                own = attrs.evolve(request, label=_copied(request.label), metadata=_copied(request.metadata))
                returned = await entered.guarded(config.generate_fn([own]), grace=_CLEANING_SECONDS)
            samples = _numbered(returned, request, name)
            if not config.group_rm and not is_lost(samples):
                await _score(samples, config)
    except (TokenMismatchError, ConfigError, EndpointAway):
        raise
    except RolloutsError as error:
        failure = Failure.of(error)
        samples = pack_lossy(samples, request) or [
            number_sample(Sample(prompt=request.prompt, label=request.label), request)
        ]
        for sample in samples:
            sample.status, sample.failure = Status.FAILED, failure
    for sample in samples:
        if sample.status in _LOST and not isinstance(sample.failure, Failure):
            sample.failure = Failure.of(GenerateFailure(f"the rollout ended {sample.status.value}"))
    return samples


def _copied(value: Any) -> Any:
    """The value with lists and dicts of its own: other rollouts have the same prompt, and so does the next epoch."""
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if type(value) is list else value


@contextlib.asynccontextmanager
async def without_own_cancellation(failure: type[RolloutsError], what: str) -> AsyncIterator[None]:
    """Run user code; raise ``failure`` if it cancelled its own task, which no enclosing scope asked for."""
    task = asyncio.current_task()
    assert task is not None, "user code is awaited in a task"
    before = task.cancelling()
    try:
        yield
        if task.cancelling() > before:
            await anyio.lowlevel.checkpoint()  # raises a cancellation that no await has raised yet
    except asyncio.CancelledError as error:
        if is_cancelled() or task.cancelling() <= before:
            raise
        while task.cancelling() > before:
            task.uncancel()
        text = f"the task of {what} was cancelled, by none of its scopes; expected no cancel() of current_task()"
        raise failure(text) from error


async def _score(samples: Sequence[Sample], config: RolloutConfig) -> None:
    """Score the samples of a rollout one by one, and check what the reward function may have changed."""
    known = [sample.identity for sample in samples]
    name = f"reward {function_name(config.reward_fn)}"
    try:
        for sample in ends(samples):
            await score(sample, config.reward_fn, seconds=config.reward_seconds)
    finally:
        change = undo_changes(samples, known)
    if change:
        raise RewardFailure(f"{name}: {change}")
    share_rewards(samples)
    pack_or_fail(samples, RewardFailure, f"after {name}")


def _numbered(samples: Any, request: Prompt, name: str) -> list[Sample]:
    """Check what the generate function returned for one rollout; number and pack its samples."""
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a list of one Sample (more where it forks)")
    if len({id(sample) for sample in samples}) < len(samples):
        raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a new Sample for each branch")
    for sample in samples:
        if sample.index not in (None, request.index):
            raise GenerateFailure(f"{name}: got {sample!r}; expected a new Sample for rollout {request.index}")
        number_sample(sample, request)
    if samples[-1].stop_reason is StopReason.FORKED:
        expected = "as the last branch, which ended in a fork; expected the one that goes on"
        raise GenerateFailure(f"{name}: got {samples[-1]!r} {expected}")
    pack_or_fail(samples, GenerateFailure, name)
    return list(samples)


def is_lost(samples: Sequence[Sample]) -> bool:
    """Whether the rollout failed or was aborted, so that it needs another attempt."""
    return any(sample.status in _LOST for sample in samples)


def ends(samples: Sequence[Sample]) -> list[Sample]:
    """The branches that a reward scores: all but those that ended in a fork, where the history was rewritten."""
    return [sample for sample in samples if sample.stop_reason is not StopReason.FORKED]


def share_rewards(samples: Sequence[Sample]) -> None:
    """Copy the reward of a rollout's last branch to the branches that ended in a fork."""
    for branch, following in reversed(list(itertools.pairwise(samples))):
        if branch.stop_reason is StopReason.FORKED:
            branch.reward = following.reward


def number_sample(sample: Sample, request: Prompt) -> Sample:
    """Set the sample's ``group_index``, ``index`` and ``rollout_id`` from the request, and return it."""
    sample.group_index, sample.index, sample.rollout_id = request.group_index, request.index, request.index
    return sample


def pack_or_fail(samples: Sequence[Sample], failure: type[RolloutsError], source: str) -> None:
    """Check and pack samples that user code may have changed; raise ``failure`` for one that does not pack."""
    for sample in samples:
        try:
            _pack(sample)
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else f"a value of the sample raises {shortened(error)}"
            raise failure(f"{source}: {text}") from error


def undo_changes(samples: Sequence[Sample], known: Sequence[Identity]) -> str:
    """Restore what identifies samples that a user's function had; describe the first change, empty if there is none."""
    change = ""
    for sample, before in zip(samples, known, strict=True):
        try:
            change = change or _change_of(sample, before)
        except Exception as error:  # noqa: BLE001 - to compare what user code has put there may run user code
            change = f"Sample: got values that raise {shortened(error)}; expected those of the replies"
        sample.identity = before
    return change


def _change_of(sample: Sample, before: Identity) -> str:
    """Describe the first difference of a sample from what identified it, whose columns are packed."""
    *values, completions, replies = sample.identity
    *known, known_completions, known_replies = before
    for name, value, expected in zip(_UNCHANGED, values, known, strict=True):
        if value is not expected and (type(value) is not type(expected) or value != expected):
            return f"Sample.{name}: got {shortened(value)}; expected {shortened(expected)}, unchanged"
    if not _are_same("completions", completions, known_completions):
        got = len(completions) if isinstance(completions, list) else shortened(completions)
        return f"Sample.completions: got {got} that it changed; expected those of the replies"
    if replies is None or known_replies is None:
        return ""
    for name, column in zip(_COLUMNS, known_replies, strict=False):
        try:
            now = getattr(sample, _COLUMNS[name])
        except ConfigError as error:
            return str(error)
        if now is not column and not np.array_equal(now, column):
            return f"Sample.{name}: got values that it changed; expected those of the replies"
    for name, value, expected in zip(("versions", "images"), replies[-2:], known_replies[-2:], strict=True):
        if not _are_same(name, value, expected):
            return f"Sample.{name}: got values that it changed; expected those of the replies"
    return ""


_UNCHANGED = ("prompt", "group_index", "index", "rollout_id")
_COLUMNS = {"tokens": "token_column", "loss_mask": "mask_column", "rollout_log_probs": "logprob_column"}


def _are_same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a record are equal, in whichever form they are stored."""
    if one is other:
        return True
    first, second = (getattr(value, name)() if type(value) is CompactRecord else value for value in (one, other))
    return isinstance(first, list | tuple) and bool(first == second)


def pack_lossy(samples: Sequence[Sample], prompt: Prompt) -> list[Sample]:
    """Pack samples of a failed rollout of a prompt for the record; what does not pack is lost, and nothing else."""
    for sample in samples:
        try:
            _pack(sample)
        except Exception:  # noqa: BLE001 - a user's value may raise anything
            _lose_unfit(sample, prompt)
    return list(samples)


def _lose_unfit(sample: Sample, prompt: Prompt) -> None:
    """Empty a sample, and give back each part with which it packs."""
    given = [dict(_readable(sample, part)) for part in _PARTS]
    for part in _PARTS:
        _set(sample, {name: empty() for name, empty in part.items()})
    sample.label = _copied(prompt.label)
    for values in [*given, *map(_fitting, given)]:
        before = {name: getattr(sample, name) for name in values}
        try:
            _set(sample, values)
            _pack(sample)
        except Exception:  # noqa: BLE001 - this part does not pack
            _set(sample, before)


_PARTS: tuple[dict[str, Callable[[], Any]], ...] = (
    {
        "tokens": list, "loss_mask": list, "rollout_log_probs": lambda: None, "versions": list, "completions": list,
        "step_completions": lambda: None, "images": tuple, "named_images": dict, "response": str,
        "loss_multiplier": lambda: 1.0, "advantages": lambda: None, "teacher_log_probs": lambda: None,
    },
    {"reward": lambda: None}, {"label": lambda: None}, {"step_rewards": list}, {"messages": list},
    {"metrics": dict}, {"metadata": dict}, {"times": Timeline}, {"stop_reason": lambda: None},
    {"failure": lambda: None}, {"history": lambda: None},
)  # fmt: skip
"""The fields of a sample that pack or do not pack together, with what is there if they do not."""


def _readable(sample: Sample, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        with contextlib.suppress(Exception):  # of a record that cannot be read
            yield name, getattr(sample, name)


def _set(sample: Sample, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(sample, name, value)


def _fitting(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of metrics and metadata, the entries that fit by themselves."""
    fits = {"metrics": _is_metric, "metadata": _is_plain}
    return {
        name: {key: entry for key, entry in value.items() if fits[name](key, entry)}
        for name, value in values.items()
        if name in fits and isinstance(value, dict)
    }


def _is_metric(name: Any, value: Any) -> bool:
    return isinstance(name, str) and finite(value) is not None and abs(value) <= _LARGEST


def _is_plain(name: Any, value: Any) -> bool:
    with contextlib.suppress(Exception):  # a key or a value that does not pack
        _check_plain("metadata", {name: value})
        return True
    return False


def _pack(sample: Sample) -> None:
    """Pack the sample, and make its numbers finite floats and ints: JSON stores NaN as null, and others as text."""
    sample.pack()
    rewards: Any = sample.step_rewards
    if not isinstance(rewards, Sequence) or any(finite(reward) is None for reward in rewards):
        raise ConfigError.of("Sample.step_rewards", rewards, "a list of finite numbers")
    sample.step_rewards = [_number("Sample.step_rewards", reward) for reward in rewards]
    metrics: dict[str, Any] = sample.metrics
    for name, value in metrics.items():
        number = _number(f"Sample.metrics[{name!r}]", value)
        if type(value) is not float:
            is_count = isinstance(value, numbers.Integral) and abs(number) < 2**53
            metrics[name] = int(value) if is_count else number
    if sample.reward is not None:
        sample.reward = _number("Sample.reward", sample.reward)
    texts = {} if sample.compact is not None else {"messages": sample.read_record("messages")}
    for name, plain in {"metadata": sample.metadata, "label": sample.label, **texts}.items():
        _check_plain(f"Sample.{name}", plain)


def _number(name: str, value: Any) -> float:
    number = finite(value)
    if number is None:
        raise ConfigError.of(name, value, "a finite number")
    if abs(number) > _LARGEST:
        raise ConfigError.of(name, value, "a number that is finite in 32 bits, as trainers take it")
    return number


_LARGEST = float(np.finfo(np.float32).max)
_MOST_LEVELS = 100


def _check_plain(name: str, value: Any) -> None:
    """Refuse lists and dicts that are nested deeper than an encoder can follow, and keys that no decoder reads.

    Raises:
        ConfigError: there are such ones; a cycle is one.
    """
    level = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(_MOST_LEVELS):
        if not level:
            return
        for held in level:
            if isinstance(held, dict) and not _KEYS.issuperset(map(type, held)):
                _check_keys(name, held)
        inside = [entry for held in level for entry in (held.values() if isinstance(held, dict) else held)]
        level = [*{id(entry): entry for entry in inside if isinstance(entry, dict | list | tuple)}.values()]
    if level:
        raise ConfigError(f"{name}: nested deeper than {_MOST_LEVELS} levels, or in itself")


_KEYS = frozenset({str, int, float, bool, type(None)})


def _check_keys(name: str, keys: Iterable[Any]) -> None:
    """Refuse a key that the journal would write as a map, such as one of an attrs class: it could not be read again."""
    for key in keys:
        try:
            encoded = msgspec.msgpack.encode({key: 0}, enc_hook=repr)
        except Exception:  # noqa: BLE001 - it is written as its text
            continue
        try:
            msgspec.msgpack.decode(encoded)
        except msgspec.DecodeError:
            raise ConfigError.of(f"{name}, a key", key, "a text or a number") from None
