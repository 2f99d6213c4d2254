"""The fields of a sample as a table: what each may contain, and how it is written as plain data and read again.

Invariant: ``values_of`` of :mod:`rollouts.training.stored_fields` returns the arguments of the sample whose fields
:func:`fields_to_dict` wrote. This module creates no sample, and does not know how one stores its columns.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import ImageSpan, Message, OnRewrite, StopReason, VersionSpan, as_record
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, Failure
from rollouts.training.compact_record import CompactRecord
from rollouts.trajectory import CompletionRecord

__all__ = ["FIELDS", "RECORDED", "check_values", "cover_the_mask", "fields_to_dict", "with_current_names"]

RECORDED = ("response", "messages", "completions", "versions")
"""The fields that a :class:`CompactRecord` stores."""


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _all_are(kind: Any) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, _LISTS) and (not values or all(isinstance(v, kind) for v in values))


def _are_numbers(values: Collection[Any]) -> bool:
    return _NUMBERS.issuperset(map(type, values)) or all(isinstance(value, numbers.Real) for value in values)


_LISTS, _NUMBERS, _NESTED = (list, tuple), {int, float}, {set, frozenset, list, tuple, dict}
_HISTORIES = get_args(OnRewrite)
_are_messages = _all_are(Message | Mapping)
FIELDS: tuple[tuple[str, Callable[[Any], bool], str, Callable[[Any], Any] | None], ...] = (
    ("prompt", lambda value: isinstance(value, str) or _are_messages(value), "a string, or messages", None),
    ("metadata", _is(dict | Mapping), "a dict", None),
    ("metrics", lambda value: isinstance(value, dict) and _are_numbers(value.values()), "a dict of numbers", None),
    ("stop_reason", _is(StopReason | None), "a StopReason, or None", StopReason),
    ("failure", _is(Failure | None), "a Failure, or None", lambda fields: Failure(**fields)),
    ("history", lambda v: (type(v) is str or isinstance(v, str)) and v in _HISTORIES, f"one of {_HISTORIES}", None),
    ("times", _is(Timeline), "a Timeline", Timeline),
    ("images", _all_are(ImageSpan), "ImageSpans", None),
    ("named_images", _is(dict | Mapping), "images by their hashes", None),
    ("tools", _is(str | None), "the JSON of a list of tools, or None", None),
    ("seat", _is(str), "a string", None),
    ("parent", lambda value: value is None or is_int(value, 0), "an integer >= 0, or None", None),
    ("loss_multiplier", lambda value: is_number(value) and value >= 0, "a finite number >= 0", None),
    ("response", _is(str), "a string", None),
    ("messages", _is(list | tuple), "a list of chat dicts", None),
    (
        "completions",
        _all_are(CompletionRecord),
        "a list of CompletionRecord",
        lambda rows: [CompletionRecord(**row) for row in rows],
    ),
    ("versions", _all_are(VersionSpan), "a list of VersionSpan", lambda spans: [VersionSpan(*span) for span in spans]),
)
"""Of each field that user code may have assigned, or that has another form as plain data: its name, whether a value is
valid, what is expected, and the function that reads its plain data. Images are read apart."""
_SOUND_TYPES: dict[str, set[type]] = {
    "prompt": {str},
    "metadata": {dict},
    "stop_reason": {StopReason, type(None)},
    "failure": {Failure, type(None)},
    "history": {type(None)},
    "times": {Timeline},
    "named_images": {dict},
    "tools": {str, type(None)},
    "seat": {str},
    "parent": {type(None)},
    "response": {str, CompactRecord},
    "messages": {list, tuple, CompactRecord},
    "completions": {CompactRecord},
    "versions": {CompactRecord},
}
"""The types whose values are valid, whatever they contain; values of other types are looked at."""
_slots_of = operator.attrgetter(*(f"_{name}" if name in RECORDED else name for name, *_ in FIELDS))


@functools.lru_cache(maxsize=256)
def _checks_of(types: tuple[type, ...]) -> list[tuple[int, str, Callable[[Any], bool], str]]:
    """The fields whose values must be looked at, if the fields have these types: position, name, check, content."""
    fields = [(position, *field[:3]) for position, field in enumerate(FIELDS)]
    return [field for field in fields if types[field[0]] not in _SOUND_TYPES.get(field[1], ())]


def check_values(sample: Any) -> None:
    """Check the type of each field, and that the columns for trainers fit the rest.

    Raises:
        ConfigError: a field has a wrong type or length.
    """
    values = _slots_of(sample)
    for position, name, good, expected in _checks_of((*map(type, values),)):
        if not good(values[position]):
            raise ConfigError.of(f"Sample.{name}", values[position], expected)
    for name, value in (("conversation", sample.conversation), ("shared", sample.shared)):
        if (type(value) is not int or value < 0) and not is_int(value, 0):
            raise ConfigError.of(f"Sample.{name}", value, "an integer >= 0")
    if sample._advantages is not None or sample._teacher_log_probs is not None:
        for name, column in (("advantages", sample._advantages), ("teacher_log_probs", sample._teacher_log_probs)):
            if column is not None and len(column) != len(sample):
                raise ConfigError.of("Sample", {"tokens": len(sample), name: len(column)}, "columns of one length")
    if sample._step_completions is not None and not _answer_completions(sample, sample._step_completions):
        expected = f"empty, or for each of the {len(sample.step_rewards)} step rewards one of the {sample.turns}"
        raise ConfigError.of("Sample.step_completions", sample.step_completions, f"{expected} completions or -1")


def _answer_completions(sample: Any, numbers: Any) -> bool:
    turns, plain = sample.turns, numbers if isinstance(numbers, list) else numbers.tolist()
    fits = not plain or len(plain) == len(sample.step_rewards)
    return fits and all(is_int(number, -1) and number < turns for number in plain)


def cover_the_mask(versions: Sequence[Any], mask: Any) -> bool:
    """Whether spans of versions cover exactly the positions where the mask is set, each once."""
    covered, total = np.zeros(len(mask), np.bool_), 0
    for span in versions:
        if not isinstance(span, VersionSpan) or not isinstance(span.version, str):
            return False
        if not 0 <= span.start < span.stop <= len(mask):
            return False
        covered[span.start : span.stop] = True
        total += span.stop - span.start
    return (marks := covered.tobytes()) == mask.tobytes() and marks.count(1) == total


def fields_to_dict(sample: Any, *, records: bool) -> dict[str, Any]:
    """The fields of a sample as plain data, without its columns."""
    prompt, read = sample.prompt, sample.read_record if records else lambda name: ()
    label = sample.label
    if type(label) in _NESTED:
        from rollouts.base.stable_repr import in_order  # here: most labels are text

        label = in_order(label)
    return {
        "prompt": prompt if isinstance(prompt, str) else [as_record(entry) for entry in prompt],
        "response": read("response"),
        "response_length": sample.response_length,
        "reward": sample.reward,
        "metadata": sample.metadata,
        "label": label,
        "group_index": sample.group_index,
        "index": sample.index,
        "rollout_id": sample.rollout_id,
        "status": sample.status.value,
        "stop_reason": sample.stop_reason and sample.stop_reason.value,
        "versions": [[span.version, span.start, span.stop] for span in read("versions")],
        "messages": read("messages"),
        "completions": [completion.to_dict() for completion in read("completions")],
        "metrics": sample.metrics,
        "failure": sample.failure and attrs.asdict(sample.failure),
        "history": sample.history,
        "step_rewards": sample.step_rewards,
        "times": sample.times.to_list(),
        "step_completions": [*(sample.step_completions or ())],
        "advantages": None if sample.advantage_column is None else sample.advantage_column.tolist(),
        "teacher_log_probs": None if sample.teacher_column is None else sample.teacher_column.tolist(),
        "loss_multiplier": sample.loss_multiplier,
        "images": [[span.image.sha256, span.start, span.stop] for span in sample.images],
        "tools": sample.tools,
        "seat": sample.seat,
        "conversation": sample.conversation,
        "parent": sample.parent,
        "shared": sample.shared,
    }


_FORMER_NAMES = {"calls": "completions"}
"""Field names in runs that earlier versions of this package stored, and their current names."""


def with_current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace former field names of a stored sample or turn by the current ones."""
    return {_FORMER_NAMES.get(name, name): value for name, value in fields.items()}
