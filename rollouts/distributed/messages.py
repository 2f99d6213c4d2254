"""Messages between the manager's process and its worker processes.

A worker receives orders (:class:`Request` objects and cancellations) and sends records: samples, turns, errors. Orders
have one of two formats: :data:`PICKLED` for processes that this one started, and :data:`PLAIN` for a network.

Invariant: samples and turns are encoded as in the journal (``runs/record_bytes.py``): columns bit for bit, fields as
plain data. Fields that a sample shares unchanged with its prompt are not sent back; :func:`received_sample` restores
them. A pickled label may be any value that pickle accepts, a plain one consists of the types of MessagePack and tuples;
:func:`check_plain` refuses a prompt that would change on its way. A message contains any number of requests, or any
number of records.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from rollouts.agent.turn_log import Turn
from rollouts.dtypes import Image, LoadImage, Prompt, TokenColumn, with_images
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointAway, GenerateFailure, RolloutsError, TokenMismatchError
from rollouts.runs.record_bytes import Columns, framed, read_framed, sample_of, turn_of
from rollouts.training.types import Sample

__all__ = [
    "MOST_BYTES",
    "PICKLED",
    "PLAIN",
    "OrderFormat",
    "Request",
    "RunEnds",
    "broken_record",
    "check_plain",
    "clocks_record",
    "leaving_record",
    "received_error",
    "received_sample",
    "received_turn",
    "reset_record",
    "sample_records",
    "servers_record",
    "turn_record",
]

MOST_BYTES = 1 << 28
"""Of a message to a service; only one with a single record may be so long."""


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


@attrs.frozen
class OrderFormat:
    """How orders are encoded."""

    encode: Callable[[Request], bytes]
    """Encode a request; raises ConfigError for a prompt that cannot be sent."""
    join: Callable[[Sequence[bytes], Sequence[int]], bytes]
    """A message to a worker of encoded requests, and of the numbers of requests to cancel."""
    read: Callable[[bytes], tuple[list[Request], list[int]]]
    """Decode a message."""


def _pickled(request: Request) -> bytes:
    try:
        return pickle.dumps(request, protocol=5)
    except Exception as error:
        raise ConfigError.of("Prompt", request.prompt, f"one that can be pickled for a worker ({error})") from error


def _join_pickled(requests: Sequence[bytes], cancelled: Sequence[int]) -> bytes:
    return pickle.dumps((list(requests), list(cancelled)), protocol=5)


def _read_pickled(message: bytes) -> tuple[list[Request], list[int]]:
    requests, cancelled = pickle.loads(message)
    return [pickle.loads(request) for request in requests], cancelled


PICKLED = OrderFormat(_pickled, _join_pickled, _read_pickled)


def _plain(request: Request) -> bytes:
    prompt, fields = request.prompt, {"number": request.number, "kind": "request", "logs_turns": request.logs_turns}
    text = prompt.prompt
    fields |= {"prompt": text if isinstance(text, str) else [message.to_record() for message in text]}
    fields |= {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    images = {image.sha256: image for message in prompt.messages for image in message.images}
    if images:
        fields[_IMAGES] = _data_of(images)
    fields["values"] = msgspec.msgpack.encode(_with_tuples([prompt.label, dict(prompt.metadata)]))
    return framed(fields, None) + b"".join(turn_record(request.number, turn) for turn in request.turns)


def _join_plain(requests: Sequence[bytes], cancelled: Sequence[int]) -> bytes:
    end = [framed({"number": -1, "kind": "cancel", "numbers": list(cancelled)}, None)] if cancelled else []
    return b"".join([*requests, *end])


def _read_plain(message: bytes) -> tuple[list[Request], list[int]]:
    requests: list[Request] = []
    cancelled: list[int] = []
    for fields, columns in read_framed(message):
        match fields["kind"]:
            case "request":
                load_image = _received(fields.get(_IMAGES, {}), {})
                text = fields["prompt"]
                label, metadata = msgspec.msgpack.decode(fields["values"], ext_hook=_tuple_of)
                values = {name: fields[name] for name in _PROMPT_FIELDS} | {"label": label, "metadata": metadata}
                prompt = Prompt(text if isinstance(text, str) else tuple(with_images(text, load_image)), **values)
                requests.append(Request(fields["number"], prompt, fields["logs_turns"]))
            case "turn" if columns is not None:
                last = requests[-1]
                requests[-1] = attrs.evolve(last, turns=(*last.turns, received_turn(fields["of"], columns)))
            case "cancel":
                cancelled += fields["numbers"]
    return requests, cancelled


PLAIN = OrderFormat(_plain, _join_plain, _read_plain)
"""Records as those of workers, so that messages may be joined; nothing is unpickled."""
_PROMPT_FIELDS = ("group_index", "index", "replacement")
_TUPLE = 1
"""The code of a tuple in labels and metadata: an extension of MessagePack whose data is the list of its values."""


def _with_tuples(value: Any) -> Any:
    if isinstance(value, tuple):
        if type(value) is not tuple:
            raise TypeError(f"a tuple of the type {type(value).__name__} would arrive as one without a type")
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_with_tuples(each) for each in value]))
    if isinstance(value, list):
        return [_with_tuples(each) for each in value]
    return {key: _with_tuples(each) for key, each in value.items()} if isinstance(value, dict) else value


def _tuple_of(code: int, data: memoryview) -> tuple[Any, ...]:
    if code != _TUPLE:
        raise ConfigError.of("an order's extension type", code, f"{_TUPLE}, a tuple")
    return tuple(msgspec.msgpack.decode(data, ext_hook=_tuple_of))


def check_plain(prompts: Iterable[Prompt]) -> None:
    """Refuse prompts that workers on a network would receive changed.

    Raises:
        ConfigError: a prompt has a value that is not plain data, such as a set.
    """
    expected = "plain data, of the types of MessagePack and tuples: workers receive it over a network"
    for prompt in prompts:
        try:
            ((received,), _) = _read_plain(_plain(Request(0, prompt, False)))
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise ConfigError.of("Prompt", prompt, f"{expected} ({error})") from error
        if received.prompt != prompt:
            raise ConfigError.of("Prompt", prompt, expected)


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
    """The record of an error of the run or a rollout; :func:`received_error` has its class, or the nearest of these."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "TokenMismatchError")
    if name == "EndpointAway" and type(error) is not EndpointAway:
        name = "RunEnds"
    return framed({"number": number, "kind": "broken", "error": name, "message": str(error)}, None)


class RunEnds(EndpointAway):
    """A worker's reason to end the run that holds for all workers, such as a spent budget; never an outage."""


_ERRORS: dict[str, type[RolloutsError]] = {
    kind.__name__: kind for kind in (ConfigError, EndpointAway, GenerateFailure, RunEnds)
}


def received_error(fields: Mapping[str, Any]) -> RolloutsError:
    """The error of a record of :func:`broken_record`."""
    return _ERRORS.get(fields["error"], TokenMismatchError)(fields["message"])


def leaving_record() -> bytes:
    """The record of a worker that leaves; it belongs to no request."""
    return framed({"number": -1, "kind": "leaving"}, None)


def servers_record(away: str, answered: bool) -> bytes:
    """The report of a worker: why it waits for a server, or empty; and whether it was answered since the last one."""
    return framed({"number": -1, "kind": "servers", "away": away, "answered": answered}, None)


def clocks_record(paused: Sequence[int], running: Sequence[int]) -> bytes:
    """A worker's report: the requests whose deadlines were paused, and those whose deadlines run again."""
    return framed({"number": -1, "kind": "clocks", "paused": list(paused), "running": list(running)}, None)


def received_sample(fields: dict[str, Any], columns: Columns, prompt: Prompt) -> Sample:
    """The sample of a record, with the fields that it shares with its prompt."""
    complete = {"prompt": prompt.prompt, "label": prompt.label}
    if "metadata" not in fields:
        complete["metadata"] = dict(prompt.metadata)
    known = {image.sha256: image for message in prompt.messages for image in message.images}
    load_image = _received(fields.get(_IMAGES, {}), known)
    complete |= {name: value for name, value in fields.items() if name != _IMAGES}
    sample = sample_of(complete, columns, load_image)
    if columns.logprobs is None or bool(np.isfinite(columns.logprobs).all()):  # else it does not pack, and is refused
        sample.compact_records(0, functools.partial(_response, sample.response))
    return sample


def _response(response: str, _: TokenColumn) -> str:
    """The response that the worker decoded."""
    return response


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
