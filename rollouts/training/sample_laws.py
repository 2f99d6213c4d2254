"""Checks of laws 1, 2 and 4 on one sample: tokens equal those of its requests, mask and versions cover exactly the
sampled tokens, step rewards and metrics are finite.

Invariant: pure; each column is compared with what the others imply, and its first wrong position is reported. A change
that no column contradicts (a token after the last request, another valid logprob) is found by the checksums stored with
the row. This module knows one sample, never its group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import msgspec

from rollouts.base.validators import finite
from rollouts.dtypes import are_logprobs, digest
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import shortened
from rollouts.training.column_digests import column_digests
from rollouts.training.types import Sample

__all__ = [
    "LAWS",
    "Stored",
    "StoredCompletion",
    "Violation",
    "check_sample",
    "check_stored",
    "reply_key",
]

LAWS = {1: "tokens", 2: "mask", 3: "once", 4: "accounting", 5: "groups", 8: "logprobs"}


@attrs.frozen
class Violation:
    """A broken law and its location."""

    law: int
    place: str
    """File and line, the sample's group and index, the position; as far as known."""
    got: str = attrs.field(converter=str)
    expected: str

    def __str__(self) -> str:
        return f"law {self.law} ({LAWS[self.law]}) broken: {self.place}: got {self.got}; expected {self.expected}"


class StoredCompletion(msgspec.Struct):
    """The fields of a completion that the laws check."""

    request_id: str
    start: int
    stop: int
    prompt_digest: int


class Stored(msgspec.Struct):
    """The fields of a stored row that the laws check."""

    tokens: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float | None] | None
    completions: list[StoredCompletion]
    versions: list[tuple[str, int, int]]
    group_index: int
    index: int
    rollout_id: int
    outcome: str
    batch: int | None
    reward: float | None
    prompt: Any
    label: Any
    digests: dict[str, int | None]
    history: str | None = None
    step_rewards: list[float | None] = []
    metrics: dict[str, Any] = {}
    step_completions: list[int] = []
    advantages: list[float | None] | None = None
    teacher_log_probs: list[float | None] | None = None
    loss_multiplier: float | None = 1.0
    images: list[tuple[str, int, int]] = []
    seat: str = ""
    conversation: int = 0
    parent: int | None = None
    shared: int = 0


def check_sample(sample: Sample) -> list[Violation]:
    """Return the violations of laws 1, 2 and 4 in a sample in memory; empty if it is sound."""
    columns = column_digests(sample.token_column, sample.mask_column, sample.logprob_column)
    fields = {**sample.to_dict(), "outcome": "kept", "batch": None, "digests": columns}
    fields |= {name: fields[name] or 0 for name in ("group_index", "index", "rollout_id")}
    stored = msgspec.convert(fields, Stored)
    return check_stored(stored, repr(sample))


def check_stored(stored: Stored, place: str, vocab_size: int | None = None) -> list[Violation]:
    """As :func:`check_sample`, for a stored row; ``place`` is its name in messages. Ids are below ``vocab_size``."""
    try:
        tokens = np.array(stored.tokens, np.int32)
    except OverflowError:
        return [Violation(1, f"{place}, tokens", "an id over 32 bits", "ids of 32 bits")]
    violations = [*_check_tokens(stored, place, tokens, vocab_size), *_check_numbers(stored, place)]
    columns = _columns(stored)
    if columns is None:
        widths = [len(stored.tokens), len(stored.loss_mask), len(stored.rollout_log_probs or ())]
        got = f"tokens, loss_mask and rollout_log_probs of {widths}"
        expected = "three columns of one length, the mask of 0 and 1, with logprobs where it is 1"
        return [*violations, Violation(2, place, got, expected)]
    mask, logprobs = columns
    violations += _check_mask(stored, place, mask)
    violations += _check_logprobs(place, mask, logprobs)
    violations += _check_images(stored, place, mask)
    if violations:
        return violations
    actual = column_digests(tokens, mask, None if stored.rollout_log_probs is None else logprobs)
    return [
        Violation(
            1 if name == "tokens" else 2, f"{place}, {name}", f"checksum {value}", f"{written}, as it was written"
        )
        for name, value in actual.items()
        if (written := stored.digests.get(name)) != value
    ]


def reply_key(stored: Stored, call: StoredCompletion) -> tuple[Any, ...]:
    """A key that is equal for equal replies to equal requests: law 3 trains each of them in one branch of a rollout."""
    conversation = (stored.seat, stored.conversation)
    return (conversation, call.prompt_digest, *stored.tokens[call.start : call.stop])


def _check_tokens(
    stored: Stored, sample: str, tokens: npt.NDArray[np.int32], vocab_size: int | None
) -> Iterator[Violation]:
    """Law 1: ids are in the vocabulary; the checksum of each request equals that of the tokens before its reply."""
    crc = position = end = 0
    if len(tokens) and tokens.min() < 0:
        position = int(tokens.argmin())
        yield Violation(1, f"{sample}, tokens, position {position}", str(tokens[position]), "an id >= 0")
        return
    if vocab_size is not None and len(tokens) and tokens.max() >= vocab_size:
        position = int(tokens.argmax())
        expected = f"an id < {vocab_size}, the size of the vocabulary"
        yield Violation(1, f"{sample}, tokens, position {position}", str(tokens[position]), expected)
        return
    for number, call in enumerate(stored.completions):
        place = f"{sample}, call {number}"
        if not max(end, 1) <= call.start <= call.stop <= len(tokens):
            expected = f"a range between {max(end, 1)}, where the last one ended, and {len(tokens)}"
            yield Violation(1, place, f"positions {call.start} to {call.stop}", expected)
            return
        crc = digest(tokens[position : call.start], crc)
        if crc != call.prompt_digest:
            where = f"{place}, positions {position} to {call.start}"
            expected = f"{call.prompt_digest:#010x}, that of the request as it was sent"
            yield Violation(1, where, f"checksum {crc:#010x}", expected)
            return
        position, end = call.start, call.stop


def _check_mask(stored: Stored, place: str, mask: npt.NDArray[np.bool_]) -> Iterator[Violation]:
    """Law 2: the mask is 1 exactly at the sampled positions, each of which has exactly one version."""
    sampled = _covered(len(mask), ((call.start, call.stop) for call in stored.completions))
    yield from _compare(place, "loss_mask", mask, sampled, "1 where a call sampled, 0 elsewhere")
    spans = [(start, stop) for _, start, stop in stored.versions]
    inside = all(0 <= start < stop <= len(mask) for start, stop in spans)
    if not inside or any(left[1] > right[0] for left, right in itertools.pairwise(spans)):
        expected = f"spans between 0 and {len(mask)}, one after the other"
        yield Violation(2, f"{place}, versions", shortened(spans), expected)
    else:
        yield from _compare(place, "versions", _covered(len(mask), spans), sampled, "a version where a call sampled")


def _check_logprobs(sample: str, mask: npt.NDArray[np.bool_], logprobs: npt.NDArray[np.float32]) -> Iterator[Violation]:
    """Law 2: a trained token has a logprob, any other has 0."""
    good = np.where(mask, are_logprobs(logprobs), logprobs == 0)
    if not good.all():
        position = int(good.argmin())
        place = f"{sample}, rollout_log_probs, position {position}"
        expected = "a finite number <= 0, since the mask is 1" if mask[position] else "0, since the mask is 0"
        yield Violation(2, place, str(logprobs[position]), expected)


def _check_images(stored: Stored, place: str, mask: npt.NDArray[np.bool_]) -> Iterator[Violation]:
    """Law 1: the ids of images follow each other, are of one id each, and were not sampled."""
    end = 0
    for number, (_, start, stop) in enumerate(stored.images):
        where = f"{place}, images[{number}]"
        if not end <= start < stop <= len(mask):
            expected = f"a range between {end}, where the last one ended, and {len(mask)}"
            yield Violation(1, where, f"positions {start} to {stop}", expected)
            return
        if mask[start:stop].any():
            yield Violation(2, where, f"a sampled token in positions {start} to {stop}", "ids of the prompt")
        elif len(set(stored.tokens[start:stop])) > 1:
            got = f"several ids in positions {start} to {stop}"
            yield Violation(1, where, got, "one id, as often as the image has tokens")
        end = stop


def _check_numbers(stored: Stored, place: str) -> Iterator[Violation]:
    """Law 4: step rewards and metrics are finite, step rewards belong to completions; law 2: columns for trainers.

    JSON stores NaN and infinity as null, Parquet as they are.
    """
    for name, value in stored.metrics.items():
        if finite(value) is None:
            yield Violation(4, f"{place}, metrics[{name!r}]", repr(value), "a finite number")
            return
    for position, reward in enumerate(stored.step_rewards):
        if reward is None or not math.isfinite(reward):
            where = f"{place}, step_rewards, position {position}"
            yield Violation(4, where, str(reward), "a finite number")
            return
    numbers, turns = stored.step_completions, len(stored.completions)
    if numbers and (len(numbers) != len(stored.step_rewards) or not all(-1 <= number < turns for number in numbers)):
        expected = f"for each of the {len(stored.step_rewards)} step rewards -1 or one of the {turns} completions"
        yield Violation(4, f"{place}, step_completions", str(numbers), expected)
    if stored.loss_multiplier is None or not 0 <= stored.loss_multiplier < math.inf:
        yield Violation(4, f"{place}, loss_multiplier", str(stored.loss_multiplier), "a finite number >= 0")
    for name in ("advantages", "teacher_log_probs"):
        column, width = getattr(stored, name), len(stored.tokens)
        if column is not None and len(column) != width:
            yield Violation(2, f"{place}, {name}", f"{len(column)} numbers", f"{width}, as many as tokens")
        elif column is not None and not all(number is not None and math.isfinite(number) for number in column):
            yield Violation(2, f"{place}, {name}", "a number that is not finite", "finite numbers")


def _compare(
    sample: str, name: str, got: npt.NDArray[np.bool_], expected: npt.NDArray[np.bool_], rule: str
) -> Iterator[Violation]:
    if not np.array_equal(got, expected):
        position = int((got != expected).argmax())
        place = f"{sample}, {name}, position {position}"
        yield Violation(2, place, str(int(got[position])), f"{int(expected[position])}: {rule}")


def _columns(stored: Stored) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]] | None:
    """Mask and logprobs, or ``None`` if one of them is malformed or not as long as the tokens."""
    if set(stored.loss_mask) - {0, 1} or (stored.rollout_log_probs is None and any(stored.loss_mask)):
        return None
    width = len(stored.tokens)
    values = [0.0] * width if stored.rollout_log_probs is None else stored.rollout_log_probs
    logprobs = np.array([math.nan if value is None else value for value in values], np.float32)
    if len(stored.loss_mask) != width or len(logprobs) != width:
        return None
    return np.array(stored.loss_mask, np.bool_), logprobs


def _covered(width: int, spans: Iterable[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    covered = np.zeros(width, np.bool_)
    for start, stop in spans:
        covered[max(start, 0) : max(stop, 0)] = True
    return covered
