"""The logs of a service: append-only files of acknowledgements and policy versions, and of prompts.

    frame = magic 2s · format u8 · length u32 · sequence u64 · crc u32 · MessagePack

Invariant: when :meth:`LeaseLog.append` returns, the record is on disk and survives the machine. A record is on disk
before the next is written, so only the last one can be incomplete; opening the log cuts it. Damage before an intact
record raises :class:`JournalError`. After a failed write the log accepts no further record, because the state of the
file is unknown until it is opened again.

This module does not know what the records mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollouts.base.durable import sync
from rollouts.errors import ConfigError, JournalError
from rollouts.runs.locks import take_lock

__all__ = ["LeaseLog"]

_HEADER = struct.Struct("<2sBIQ")
_CRC = struct.Struct("<I")
_MAGIC, _FORMAT = b"rL", 1
_START = _HEADER.size + _CRC.size


class LeaseLog:
    """The writer of a log; creates the file or continues it. Only one process at a time may open it.

    Args:
        path: of the file.
        replay: receives the records of the file, one after another; its errors pass.

    Raises:
        ConfigError: another process writes to it.
        JournalError: it is damaged, or cannot be opened.
    """

    def __init__(self, path: Path, replay: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
        self.path = path
        self._error: JournalError | None = None
        self._writing = threading.Lock()
        self._in_order = threading.Lock()
        """Held from a write until the loop has its callback."""
        try:
            file = take_lock(path)
            if file is None:
                raise ConfigError.of("log", str(path), "a log that no other process is writing to")
            self._file: int | None = file
            try:
                self._recover(file, replay)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            raise JournalError(f"{path}: the log cannot be opened: {error}") from error

    def __repr__(self) -> str:
        return f"<LeaseLog {self.path}: {self._sequence} records>"

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record in this thread, and wait for the disk.

        Raises:
            JournalError: it cannot be written; whether it is stored is unknown until the log is opened again.
        """
        with self._writing:
            if self._error is not None:
                raise self._error
            assert self._file is not None, "a closed log has an error"
            try:
                rest = memoryview(_frame(self._sequence, record))
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                os.fdatasync(self._file)
            except OSError as error:
                self._error = JournalError(f"{self.path}: the log cannot be written: {error}")
                raise self._error from error
            self._sequence += 1

    async def store(
        self,
        record: Mapping[str, Any],
        then: Callable[[], None] = lambda: None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a record in another thread, and call ``then`` in the loop when it is on disk.

        A write that has begun cannot be cancelled. ``Task.cancel`` ends the wait all the same, and ``then`` is called
        later, in the order of the log. Before the write begins, ``Task.cancel`` prevents it, and ``undo`` is called.

        Raises:
            JournalError: as :meth:`append`.
        """
        loop = asyncio.get_running_loop()
        claim = [record]
        """Taken by the thread that writes or by the cancellation, whichever is first; ``list.pop`` is atomic."""

        def append() -> None:
            if taken := _popped(claim):
                with self._in_order:
                    self.append(taken)
                    with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing asks for the log any more
                        loop.call_soon_threadsafe(then)

        with anyio.CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(append)
            except asyncio.CancelledError:
                if _popped(claim):
                    undo()
                raise

    def close(self) -> None:
        """Release the file; later appends raise."""
        with self._writing:
            if self._file is not None:
                os.close(self._file)
            self._file = None
            self._error = self._error or JournalError(f"{self.path}: the log cannot be written: it is closed")

    def _recover(self, file: int, replay: Callable[[dict[str, Any]], None]) -> None:
        """Read the records, and cut an incomplete last one."""
        size, end, self._sequence = os.fstat(file).st_size, 0, 0
        if size:
            with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data:
                for record, stop in _read(data, 0, 0):
                    replay(record)
                    end, self._sequence = stop, self._sequence + 1
                at = data.find(_MAGIC, end + 1) if end < size else -1
                while at != -1:
                    if next(_read(data, at, None), None) is not None:
                        raise JournalError(f"{self.path}, offset {end}: damaged, and an intact record follows at {at}")
                    at = data.find(_MAGIC, at + 1)
        if end < size:
            os.ftruncate(file, end)
        os.fsync(file)  # a killed process may have left a record that is not on disk
        os.lseek(file, end, os.SEEK_SET)
        sync(self.path.parent)  # stores the file's name


def _frame(sequence: int, record: Mapping[str, Any]) -> bytes:
    payload = msgspec.msgpack.encode(record)
    header = _HEADER.pack(_MAGIC, _FORMAT, len(payload), sequence)
    return header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def _read(data: mmap.mmap, start: int, sequence: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield intact records from ``start`` on, with their ends; ``None`` accepts any first number."""
    while start + _START <= len(data):
        magic, version, length, number = _HEADER.unpack_from(data, start)
        stop = start + _START + length
        if magic != _MAGIC or version != _FORMAT or stop > len(data) or sequence not in (None, number):
            return
        header, payload = data[start : start + _HEADER.size], data[start + _START : stop]
        if _CRC.unpack_from(data, start + _HEADER.size)[0] != zlib.crc32(payload, zlib.crc32(header)):
            return
        yield msgspec.msgpack.decode(payload), stop
        start, sequence = stop, number + 1


def _popped(claim: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    try:
        return claim.pop()
    except IndexError:
        return None
