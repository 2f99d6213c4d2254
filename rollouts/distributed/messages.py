"""What the process with the manager and its workers say to each other.

Invariant: samples and turns travel as the journal holds them (``training/records.py``): columns bit for bit, fields as
plain data. What a sample has from its prompt unchanged is not sent back, and is the prompt's own again. Requests are
pickled: a label may be anything that pickle takes. A message holds any number of requests, or of records.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from rollouts.agent.turn_log import Turn
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.runs.record_bytes import LENGTH, Columns, packed, sample_of, unpacked
from rollouts.training.types import Sample

__all__ = [
    "Request",
    "broken_record",
    "order",
    "read_order",
    "read_records",
    "reset_record",
    "returned",
    "sample_records",
    "turn_record",
]


@attrs.frozen(eq=False)
class Request:
    """One rollout to be played once."""

    number: int
    """Of the request; what comes back is marked with it."""
    prompt: Prompt
    keeps_turns: bool
    """Whether turns are wanted as they end."""
    turns: tuple[Turn, ...] = ()
    """Those that an earlier process left."""

    def to_bytes(self) -> bytes:
        """As a worker reads it.

        Raises:
            ConfigError: the prompt cannot be sent to another process.
        """
        try:
            return pickle.dumps(self, protocol=5)
        except Exception as error:
            raise ConfigError.of("Prompt", self.prompt, f"one that can be pickled for a worker ({error})") from error


def order(requests: Sequence[bytes], cancelled: Sequence[int] = ()) -> bytes:
    """What a worker is told at once: rollouts to play, and the numbers of those that nobody wants any more."""
    return pickle.dumps((list(requests), list(cancelled)), protocol=5)


def read_order(message: bytes) -> tuple[list[Request], list[int]]:
    """What :func:`order` said."""
    requests, cancelled = pickle.loads(message)
    return [pickle.loads(request) for request in requests], cancelled


def sample_records(number: int, prompt: Prompt, samples: Sequence[Sample]) -> bytes:
    """The rollout of a request, ended: all its branches."""
    return b"".join(
        _record(
            {"number": number, "kind": "sample", "branches": len(samples), "sample": _fields(sample, prompt)},
            Columns.of(sample),
        )
        for sample in samples
    )


def turn_record(number: int, turn: Turn) -> bytes:
    """One more turn of a rollout."""
    fields = {"number": number, "kind": "turn", "of": {"number": turn.number, "turn": turn.fields}}
    return _record(fields, Columns.of(turn))


def reset_record(number: int) -> bytes:
    """The turns of a rollout so far are worth nothing."""
    return _record({"number": number, "kind": "reset"}, None)


def broken_record(number: int, error: Exception) -> bytes:
    """A broken law, or a config that no rollout survives."""
    return _record({"number": number, "kind": "broken", "error": type(error).__name__, "message": str(error)}, None)


def read_records(message: bytes) -> Iterator[tuple[dict[str, Any], Columns | None]]:
    """The records of a message, in order."""
    rest = memoryview(message)
    while rest:
        (size,) = LENGTH.unpack_from(rest)
        yield unpacked(rest[LENGTH.size : LENGTH.size + size])
        rest = rest[LENGTH.size + size :]


def returned(fields: dict[str, Any], columns: Columns, prompt: Prompt) -> Sample:
    """A sample that came back, with what it has from its prompt."""
    own = {"prompt": prompt.prompt, "label": prompt.label}
    if "metadata" not in fields:
        own["metadata"] = dict(prompt.metadata)
    return sample_of({**own, **fields}, columns)


def _fields(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    fields = sample.fields_to_dict()
    for name in ("prompt", "label"):
        if getattr(sample, name) is getattr(prompt, name):
            del fields[name]
    before, now = prompt.metadata, sample.metadata
    if len(before) == len(now) and all(key in before and before[key] is value for key, value in now.items()):
        del fields["metadata"]
    return fields


def _record(fields: dict[str, Any], columns: Columns | None) -> bytes:
    head, buffers = packed(fields, columns)
    return b"".join((LENGTH.pack(LENGTH.size + len(head) + len(buffers)), LENGTH.pack(len(head)), head, buffers))
