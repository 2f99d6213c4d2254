"""Validation of samples that a user's function may have changed.

Invariant: a sample that passes can be written and read again, with finite numbers that 32 bits hold. A reward or a
filter changes neither the identity of a sample nor the columns of its replies. This module calls no user function.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias

from rollouts.base.storable import check_readable
from rollouts.base.validators import finite
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, RolloutsError, shortened
from rollouts.training.compact_record import CompactRecord
from rollouts.training.sample import Sample

__all__ = ["copied", "pack", "pack_or_fail", "unchanged"]

_UNCHANGED = ("prompt", "label", "group_index", "index", "rollout_id", "seat", "conversation", "parent", "shared")
"""Fields that name a sample or belong to the data: no reward or filter changes them."""
_COLUMNS = {"tokens": "token_column", "loss_mask": "mask_column", "rollout_log_probs": "logprob_column"}
MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest number that is finite in 32 bits."""

_Identity: TypeAlias = tuple[Any, ...]
"""The values of ``_UNCHANGED``, the completions, and the replies or ``None``."""


def copied(value: Any) -> Any:
    """A copy of nested lists and dicts: other rollouts have the same prompt, and so does the next epoch."""
    if type(value) is dict:
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if type(value) is list else value


def pack_or_fail(samples: Sequence[Sample], failure: type[RolloutsError], source: str) -> None:
    """Check and pack samples that user code may have changed; raise ``failure`` if one does not pack."""
    for sample in samples:
        try:
            pack(sample)
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else f"a value of the sample raises {shortened(error)}"
            raise failure(f"{source}: {text}") from error


class unchanged(contextlib.AbstractContextManager[Any]):  # noqa: N801 - used as `with unchanged(...)`
    """Run a user's function on packed samples; afterwards restore their identities, and check and pack them.

    Raises:
        RolloutsError: a ``failure`` if it changed an identity, or if a sample does not pack.
    """

    def __init__(self, samples: Sequence[Sample], failure: type[RolloutsError], name: str) -> None:
        self._samples, self._failure, self._name = samples, failure, name
        self._known = [_identity_of(sample, copied(sample.label)) for sample in samples]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        change = ""
        for sample, before in zip(self._samples, self._known, strict=True):
            try:
                change = change or _change_of(sample, before)
            except Exception as foreign:  # noqa: BLE001 - comparing a foreign value may run user code
                change = f"Sample: got values that raise {shortened(foreign)}; expected those of the replies"
            _restore(sample, before)
        if error is None and change:
            raise self._failure(f"{self._name}: {change}")
        if error is None:
            pack_or_fail(self._samples, self._failure, f"after {self._name}")


def _identity_of(sample: Sample, label: Any) -> _Identity:
    """The identity of a packed sample, to compare later; compact records are not decoded.

    The replies are columns, versions and images; ``None`` without a record of them: the user set them then.
    """
    records = sample._completions, sample._versions
    completions, versions = [[*stored] if isinstance(stored, list | tuple) else stored for stored in records]
    recorded = sample._compact is not None or completions != []  # an episode may end before its first reply
    columns = sample._tokens, sample._loss_mask, sample._rollout_log_probs
    replies = (*columns, versions, sample.images) if recorded else None
    group = sample.prompt, label, sample.group_index, sample.index, sample.rollout_id
    return *group, sample.seat, sample.conversation, sample.parent, sample.shared, completions, replies


def _restore(sample: Sample, identity: _Identity) -> None:
    sample.prompt, sample.label, sample.group_index, sample.index, sample.rollout_id = identity[:5]
    sample.seat, sample.conversation, sample.parent, sample.shared, sample._completions, replies = identity[5:]
    if replies is not None:
        sample._tokens, sample._loss_mask, sample._rollout_log_probs, sample._versions, sample.images = replies


def _change_of(sample: Sample, before: _Identity) -> str:
    """Describe the first difference of a sample from its earlier identity, whose columns are packed."""
    *values, completions, replies = _identity_of(sample, sample.label)
    *known, known_completions, known_replies = before
    for name, value, expected in zip(_UNCHANGED, values, known, strict=True):
        if value is not expected and (type(value) is not type(expected) or value != expected):
            return f"Sample.{name}: got {shortened(value)}; expected {shortened(expected)}, unchanged"
    if not _are_same("completions", completions, known_completions):
        got = len(completions) if isinstance(completions, list) else shortened(completions)
        return f"Sample.completions: got {got} that it changed; expected those of the replies"
    if replies is None or known_replies is None:
        return ""
    for name, stored, column in zip(_COLUMNS, replies, known_replies, strict=False):
        try:
            now = column if stored is column else getattr(sample, _COLUMNS[name])
        except ConfigError as error:
            return str(error)
        if now is not column and not np.array_equal(now, column):
            return f"Sample.{name}: got values that it changed; expected those of the replies"
    for name, value, expected in zip(("versions", "images"), replies[-2:], known_replies[-2:], strict=True):
        if not _are_same(name, value, expected):
            return f"Sample.{name}: got values that it changed; expected those of the replies"
    return ""


def _are_same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a record are equal, in whichever form they are stored."""
    if one is other:
        return True
    first, second = (getattr(value, name)() if type(value) is CompactRecord else value for value in (one, other))
    return isinstance(first, list | tuple) and bool(first == second)


def pack(sample: Sample) -> None:
    """Pack the sample, and make its numbers finite floats and ints: JSON stores NaN as null, and others as text."""
    sample.pack()
    rewards: Any = sample.step_rewards
    if type(rewards) is not list or rewards:
        if not isinstance(rewards, Sequence) or any(finite(reward) is None for reward in rewards):
            raise ConfigError.of("Sample.step_rewards", rewards, "a list of finite numbers")
        sample.step_rewards = [_number("Sample.step_rewards", reward) for reward in rewards]
    metrics: dict[str, Any] = sample.metrics
    for name, value in metrics.items():
        is_float = type(value) is float and -MAX_FLOAT <= value <= MAX_FLOAT
        if is_float or (type(value) is int and -(2**53) < value < 2**53):
            continue
        number = _number(f"Sample.metrics[{name!r}]", value)
        is_count = isinstance(value, numbers.Integral) and abs(number) < 2**53
        metrics[name] = int(value) if is_count else number
    if sample.reward is not None:
        sample.reward = _number("Sample.reward", sample.reward)
    texts = {} if sample.compact is not None else {"messages": sample.read_record("messages")}
    for name, plain in {"metadata": sample.metadata, "label": sample.label, **texts}.items():
        check_readable(f"Sample.{name}", plain)


def _number(name: str, value: Any) -> float:
    number = finite(value)
    if number is None:
        raise ConfigError.of(name, value, "a finite number")
    if abs(number) > MAX_FLOAT:
        raise ConfigError.of(name, value, "a number that is finite in 32 bits, as trainers take it")
    return number
