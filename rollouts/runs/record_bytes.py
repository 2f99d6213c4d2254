"""Binary encoding of records: fields as MessagePack, per-token columns as raw arrays (9 bytes a token).

    payload = length u32 · MessagePack fields · tokens int32[n] · mask uint8[n] · logprobs float32[n]   (little-endian)

Invariant: columns are decoded bit for bit, fields as plain data. The journal stores records on disk; workers send them
to their parent process, and a service to its consumers, many in a message:

    message = (length u32 · payload)*

This module knows none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from rollouts.agent.turn_log import Turn
from rollouts.base.storable import to_msgpack
from rollouts.dtypes import LoadImage, frozen, hashes_in
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.training.sample_fields import with_current_names
from rollouts.training.types import Sample

__all__ = ["LENGTH", "Columns", "framed", "packed", "read_framed", "sample_of", "turn_of", "unpacked"]

LENGTH = struct.Struct("<I")


@attrs.frozen(eq=False)
class Columns:
    """The per-token columns of a record, all of shape ``[n]``."""

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, record: Sample | Turn) -> Columns:
        """The columns of a sample or a turn."""
        if isinstance(record, Turn):
            return cls(record.tokens, record.mask, record.logprobs)
        return cls(*record.columns)

    def to_bytes(self) -> bytes:
        parts = [np.ascontiguousarray(self.tokens, "<i4").data, np.ascontiguousarray(self.mask, np.bool_).data]
        if self.logprobs is not None:
            parts.append(np.ascontiguousarray(self.logprobs, "<f4").data)
        return b"".join(parts)


def packed(fields: Mapping[str, Any], columns: Columns | None) -> tuple[bytes, bytes]:
    """Encode fields and columns; a payload is the length of the fields, the fields, and the columns."""
    if columns is None:
        return to_msgpack(fields), b""
    shape = [len(columns.tokens), columns.logprobs is not None]
    return to_msgpack({**fields, "columns": shape}), columns.to_bytes()


def unpacked(payload: memoryview) -> tuple[dict[str, Any], Columns | None]:
    """Decode a payload; the columns are read-only copies."""
    (size,) = LENGTH.unpack_from(payload)
    fields = msgspec.msgpack.decode(payload[LENGTH.size : LENGTH.size + size], type=dict[str, Any])
    shape = fields.pop("columns", None)
    if shape is None:
        return fields, None
    buffers = payload[LENGTH.size + size :]
    count, has_logprobs = shape
    tokens = frozen(np.frombuffer(buffers, "<i4", count).astype(np.int32))
    mask = frozen(np.frombuffer(buffers, np.uint8, count, 4 * count).astype(np.bool_))
    logprobs = frozen(np.frombuffer(buffers, "<f4", count, 5 * count).astype(np.float32)) if has_logprobs else None
    return fields, Columns(tokens, mask, logprobs)


def framed(fields: Mapping[str, Any], columns: Columns | None) -> bytes:
    """Encode a record of a message."""
    head, buffers = packed(fields, columns)
    return b"".join((LENGTH.pack(LENGTH.size + len(head) + len(buffers)), LENGTH.pack(len(head)), head, buffers))


def read_framed(message: bytes) -> Iterator[tuple[dict[str, Any], Columns | None]]:
    """Decode the records of a message, in order."""
    rest = memoryview(message)
    while rest:
        (size,) = LENGTH.unpack_from(rest)
        yield unpacked(rest[LENGTH.size : LENGTH.size + size])
        rest = rest[LENGTH.size + size :]


def sample_of(fields: Mapping[str, Any], columns: Columns, load_image: LoadImage) -> Sample:
    """Build a sample from the fields of :meth:`Sample.fields_to_dict` and its columns."""
    arrays = {"tokens": columns.tokens, "loss_mask": columns.mask, "rollout_log_probs": columns.logprobs}
    return Sample.from_dict({**fields, **arrays}, load_image)


def turn_of(fields: Mapping[str, Any], columns: Columns, load_image: LoadImage) -> Turn:
    """Build a turn from its ``number``, its fields under ``turn``, and its columns."""
    assert columns.logprobs is not None, "a turn has logprobs"
    turn = with_current_names(fields["turn"])
    hashes = [*hashes_in(turn.get("messages", ())), *(sha256 for sha256, _, _ in turn.get("images", ()))]
    images = {sha256: load_image(sha256) for sha256 in dict.fromkeys(hashes)}
    return Turn(fields["number"], columns.tokens, columns.mask, columns.logprobs, turn, images)
