"""Messages between the manager's process and its worker processes.

A worker receives orders (pickled :class:`Request` objects and cancellations) and sends records: samples, turns, errors.

Invariant: samples and turns are encoded as in the journal (``runs/record_bytes.py``): columns bit for bit, fields as
plain data. Fields that a sample shares unchanged with its prompt are not sent back; :func:`received_sample` restores
them. A label may be any value that pickle accepts. A message contains any number of requests, or any number of records.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rollouts.agent.turn_log import Turn
from rollouts.dtypes import Image, LoadImage, Prompt
from rollouts.errors import ConfigError
from rollouts.runs.record_bytes import Columns, framed, sample_of, turn_of
from rollouts.training.types import Sample

__all__ = [
    "Request",
    "broken_record",
    "leaving_record",
    "order",
    "read_order",
    "received_sample",
    "received_turn",
    "reset_record",
    "sample_records",
    "turn_record",
]


@attrs.frozen(eq=False)
class Request:
    """A request to a worker: one attempt at one rollout."""

    number: int
    """Identifies the request; each record of the worker names it."""
    prompt: Prompt
    logs_turns: bool
    """Whether the worker sends each turn when it ends."""
    turns: tuple[Turn, ...] = ()
    """Turns of the rollout that an earlier process logged."""

    def to_bytes(self) -> bytes:
        """Encode the request for a worker.

        Raises:
            ConfigError: the prompt cannot be sent to another process.
        """
        try:
            return pickle.dumps(self, protocol=5)
        except Exception as error:
            raise ConfigError.of("Prompt", self.prompt, f"one that can be pickled for a worker ({error})") from error


def order(requests: Sequence[bytes], cancelled: Sequence[int] = ()) -> bytes:
    """A message to a worker: encoded requests, and the numbers of requests to cancel."""
    return pickle.dumps((list(requests), list(cancelled)), protocol=5)


def read_order(message: bytes) -> tuple[list[Request], list[int]]:
    """Decode a message of :func:`order`."""
    requests, cancelled = pickle.loads(message)
    return [pickle.loads(request) for request in requests], cancelled


def sample_records(number: int, prompt: Prompt, samples: Sequence[Sample]) -> bytes:
    """Records of a finished rollout, one per branch."""
    return b"".join(
        framed(
            {"number": number, "kind": "sample", "branches": len(samples), "sample": _fields(sample, prompt)},
            Columns.of(sample),
        )
        for sample in samples
    )


def turn_record(number: int, turn: Turn) -> bytes:
    """The record of a turn that has ended."""
    fields: dict[str, Any] = {"number": turn.number, "turn": turn.fields}
    if turn.images:
        fields[_IMAGES] = _data_of(turn.images)
    return framed({"number": number, "kind": "turn", "of": fields}, Columns.of(turn))


def reset_record(number: int) -> bytes:
    """The record that discards the turns of a rollout so far."""
    return framed({"number": number, "kind": "reset"}, None)


def broken_record(number: int, error: Exception) -> bytes:
    """The record of a broken law, or of a config error that fails every rollout."""
    return framed({"number": number, "kind": "broken", "error": type(error).__name__, "message": str(error)}, None)


def leaving_record() -> bytes:
    """The record of a worker that leaves; it belongs to no request."""
    return framed({"number": -1, "kind": "leaving"}, None)


def received_sample(fields: dict[str, Any], columns: Columns, prompt: Prompt) -> Sample:
    """The sample of a record, with the fields that it shares with its prompt."""
    complete = {"prompt": prompt.prompt, "label": prompt.label}
    if "metadata" not in fields:
        complete["metadata"] = dict(prompt.metadata)
    known = {image.sha256: image for message in prompt.messages for image in message.images}
    load_image = _received(fields.get(_IMAGES, {}), known)
    complete |= {name: value for name, value in fields.items() if name != _IMAGES}
    return sample_of(complete, columns, load_image)


def received_turn(fields: dict[str, Any], columns: Columns) -> Turn:
    """The turn of a record."""
    return turn_of(fields, columns, _received(fields.get(_IMAGES, {}), {}))


_IMAGES = "image_data"
"""The field of a record with the bytes of its images, by their hashes."""


def _data_of(images: Mapping[str, Image]) -> dict[str, bytes]:
    return {sha256: image.data for sha256, image in images.items()}


def _received(data: Mapping[str, bytes], known: Mapping[str, Image]) -> LoadImage:
    """The images of a record: the images of its prompt, and the images that came with it."""
    images = {**known, **{sha256: Image(content) for sha256, content in data.items()}}
    return images.__getitem__


def _fields(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    fields = sample.fields_to_dict()
    for name in ("prompt", "label"):
        if getattr(sample, name) is getattr(prompt, name):
            del fields[name]
    before, now = prompt.metadata, sample.metadata
    if len(before) == len(now) and all(key in before and before[key] is value for key, value in now.items()):
        del fields["metadata"]
    known = {image.sha256 for message in prompt.messages for image in message.images}
    new = {sha256: image for sha256, image in sample.named_images.items() if sha256 not in known}
    return {**fields, _IMAGES: _data_of(new)} if new else fields
