"""A data buffer whose prompts clients give while the run plays: the log of prompts is the data set.

Invariant: a request's prompts are on disk before :meth:`FedBuffer.feed` returns, and before one of them is taken. The
number of a group is the position of its prompt in the log, so that order and numbers are the same after a kill. A name
stands for one list of prompts: repeating the request changes nothing, also after a restart. A prompt is in memory until
its group is finished, as the bytes of its row; the name of its request stays.

Without a prompt, no group starts and the run waits: the buffer lists a pause. After :meth:`FedBuffer.end` it does not
wait, and the data are exhausted. This module does not know HTTP.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.concurrency.deadlines import listed_pause
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, JournalError, RolloutsError
from rollouts.recipe import Recipe
from rollouts.renderer.options import TEMPLATE_KWARGS
from rollouts.service.lease_log import LeaseLog
from rollouts.training.data_buffer import DataBuffer, Draw, read_prompt

__all__ = [
    "MOST_HELD",
    "MOST_PROMPTS",
    "MOST_WAITING",
    "Fed",
    "FedBuffer",
    "FedEnded",
    "FedFull",
    "NameTaken",
    "fed_recipe",
]

MOST_PROMPTS = 10_000
"""Most prompts of one request."""
MOST_WAITING = 100_000
"""Most prompts that no group has taken."""
MOST_HELD = 1 << 30
"""Most bytes of prompts whose groups are not finished."""
_LONGEST_NAME = 200
_PLAIN = "plain data of JSON, with integers of 64 bits"


class NameTaken(RolloutsError):
    """The name stands for other prompts; nothing changed."""


class FedFull(RolloutsError):
    """As many prompts as the buffer takes wait to be played; nothing changed."""


class FedEnded(RolloutsError):
    """A client said that no more prompts come; nothing changed."""


@attrs.frozen
class Fed:
    """Prompts that are in the log: their groups have the numbers ``first`` to ``first + count - 1``."""

    first: int
    count: int
    repeated: bool = False
    """Whether an earlier request gave them."""


@attrs.frozen(eq=False)
class _Request:
    """The prompts of one request."""

    rows: list[Any]
    encoded: list[bytes]
    """Each row."""
    digest: bytes

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(map(len, self.encoded))


class _Rows(Sequence[Prompt]):
    """The prompts by position; iterating skips dropped ones, and the length includes them."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.bytes = 0
        self._given = 0

    def __len__(self) -> int:
        return self._given

    def __getitem__(self, position: int) -> Prompt:  # type: ignore[override]  # a buffer takes no slices
        return _read(msgspec.msgpack.decode(self.held[position]), position)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, list(self.held))

    def add(self, encoded: Iterable[bytes], wanted: Container[int]) -> None:
        for row in encoded:
            if self._given in wanted:
                self.held[self._given] = row
                self.bytes += len(row)
            self._given += 1

    def drop(self, position: int) -> None:
        self.bytes -= len(self.held.pop(position, b""))


@attrs.frozen
class _Unfinished:
    """The positions whose groups are not finished when a log is opened."""

    first_waiting: int = 0
    taken: Container[int] = ()

    def __contains__(self, position: object) -> bool:
        return position in self.taken or (isinstance(position, int) and position >= self.first_waiting)


class FedBuffer(DataBuffer):
    """Hands out prompts in the order in which clients gave them, each once.

    Args:
        most_bytes: most bytes of prompts whose groups are not finished.

    Attributes:
        on_fed: called when prompts have come, or the last have.
    """

    def __init__(self, *, most_bytes: int = MOST_HELD) -> None:  # without the one of DataBuffer, which needs prompts
        self.seed, self.epochs, self.sampler = None, 1, None
        self.on_fed: Callable[[], None] | None = None
        self._most_bytes = most_bytes
        self._rows = _Rows()
        self._prompts = self._rows
        self._order = range(0)
        self._has_ended = False
        self._cursor = self._epoch = self._next_group_index = 0
        self._positions = {}
        self._leftovers = []
        self._fed: dict[str, tuple[Fed, bytes]] = {}
        self._log: LeaseLog | None = None
        self._writing = anyio.Lock()
        self._pause: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        end = "no more come" if self._has_ended else f"{self.waiting} wait"
        return f"<FedBuffer: {len(self)} prompts given, {end}>"

    @property
    def waiting(self) -> int:
        """Number of prompts that no group has taken, or that were put back."""
        return len(self) - self._cursor + len(self._leftovers)

    @property
    def is_empty(self) -> bool:
        """Whether the run waits for prompts."""
        return self._pause is not None

    def numbers(self) -> dict[str, int]:
        """Gauges."""
        return {
            "prompts_given": len(self),
            "prompts_waiting": self.waiting,
            "prompts_held": len(self._rows.held),
            "prompt_bytes_held": self._rows.bytes,
            "prompts_ended": int(self._has_ended),
            "waits_for_prompts": int(self.is_empty),
        }

    @contextlib.contextmanager
    def opened(self, path: Path, run: str | None) -> Iterator[Self]:
        """Read the log, and accept prompts while the context is open.

        Args:
            path: of the log.
            run: names the run whose prompts these are.

        Raises:
            ConfigError: another process writes to the log, it is of another run, or it lacks prompts that the run took.
            JournalError: it is damaged, or cannot be opened.
        """
        unfinished = _Unfinished(self._cursor, {position for position, _ in self._leftovers})

        def replay(record: Mapping[str, Any]) -> None:
            match record["kind"]:
                case "prompts":
                    self._keep(record["id"], _checked(record["prompts"]), unfinished)
                case "end":
                    self._has_ended = True
                case "opened" if run is not None and record["run"] not in (None, run):
                    raise ConfigError.of("prompts", f"{path} of the run {record['run']}", f"the log of this run, {run}")

        log = LeaseLog(path, replay)
        try:
            if self._cursor > len(self):
                raise ConfigError.of(str(path), f"{len(self)} prompts", f"the {self._cursor} that the run took")
            log.append({"kind": "opened", "run": run})
            self._log = log
            yield self
        finally:
            self._log = None
            self._ends_pause()
            log.close()

    async def feed(self, name: str, rows: Sequence[Any]) -> Fed:
        """Add prompts to the end of the data; returns when they are on disk.

        Args:
            name: identifies the request.
            rows: as for :class:`DataBuffer`, of plain data, without images.

        Raises:
            ConfigError: the name or a row is invalid; nothing changed.
            NameTaken: the name stands for other prompts.
            FedEnded: a client said that no more come.
            FedFull: too many prompts wait, or are not finished.
            JournalError: the log cannot be written; whether the prompts are stored is unknown until it is opened again.
        """
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise ConfigError.of("id", name, f"a name of 1 to {_LONGEST_NAME} characters")
        request = await anyio.to_thread.run_sync(_checked, rows)
        async with self._writing:
            repeated = name in self._fed
            if not repeated:
                if self._has_ended:
                    raise FedEnded("a client said that no more prompts come, and the run ends without these")
                if self.waiting + len(request.rows) > MOST_WAITING:
                    raise FedFull(f"{self.waiting} prompts wait; at most {MOST_WAITING} do: ask again")
                if self._rows.bytes + request.size > self._most_bytes:
                    held = f"{len(self._rows.held)} prompts of {self._rows.bytes} bytes are not finished"
                    raise FedFull(f"{held}; at most {self._most_bytes} bytes are: ask again")
                if self._log is None:
                    raise JournalError("FedBuffer.feed: prompts are accepted only while the log is open")
                record = {"kind": "prompts", "id": name, "prompts": request.rows}
                await self._log.store(record, functools.partial(self._keep, name, request))
            fed, digest = self._fed[name]
            if digest != request.digest:
                raise NameTaken(f"the id {name!r} stands for other prompts: those of the groups from {fed.first}")
            return attrs.evolve(fed, repeated=repeated)

    async def end(self) -> int:
        """Say that no more prompts come: the run ends when no further batch can be filled.

        Returns:
            The number of prompts that were given, when the end is on disk; repeating it changes nothing.

        Raises:
            JournalError: as :meth:`feed`.
        """
        async with self._writing:
            if not self._has_ended:
                if self._log is None:
                    raise JournalError("FedBuffer.end: the log is not open")
                await self._log.store({"kind": "end"}, self._end)
        return len(self)

    def _end(self) -> None:
        self._has_ended = True
        self._wake()

    def _keep(self, name: str, request: _Request, wanted: Container[int] = _Unfinished()) -> None:
        if name in self._fed:  # a wait was cancelled, and the request repeated before its record was applied
            return
        first = len(self)
        self._rows.add(request.encoded, wanted)
        self._order = range(len(self))
        self._fed[name] = Fed(first, len(request.rows)), request.digest
        self._wake()

    def _wake(self) -> None:
        self._ends_pause()
        if self.on_fed is not None:
            self.on_fed()

    # -- as DataBuffer --

    @functools.cached_property
    def fingerprint(self) -> int:
        """The same for every log, which grows: it is bound to its run, and its records have checksums."""
        return zlib.crc32(b"prompts of clients")

    @functools.cached_property
    def metadata_checksum(self) -> int:
        """The same for every log, as :attr:`fingerprint`."""
        return 0

    def get_prompts(self, count: int) -> list[Prompt]:
        """As :meth:`DataBuffer.get_prompts`; without enough prompts, the pause begins."""
        try:
            return super().get_prompts(count)
        except DataExhausted:
            if self._pause is None and not self._has_ended:
                self._pause = contextlib.ExitStack()
                what = "every prompt was taken: the run waits for clients to give more"
                self._pause.enter_context(listed_pause(what, lambda: 0, blocks_new_work=True))
            raise

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        super().put_back(prompts)
        self._ends_pause()

    def mark_done(self, prompt: Prompt) -> None:
        """As :meth:`DataBuffer.mark_done`; the prompt leaves the memory."""
        position = None if prompt.group_index is None else self._positions.get(prompt.group_index)
        super().mark_done(prompt)
        if position is not None:
            self._rows.drop(position)

    def resume_after(self, taken: int, unsettled: Collection[int], draws: Iterable[Draw] = ()) -> None:
        """As :meth:`DataBuffer.resume_after`; the log may be opened later."""
        self._cursor = self._next_group_index = taken
        self._positions = {}
        self._leftovers = [(number, number) for number in sorted(unsettled)]

    def _ends_pause(self) -> None:
        if self._pause is not None:
            self._pause.close()
            self._pause = None


def fed_recipe(recipe: Recipe) -> Recipe:
    """The recipe with prompts of clients in the place of its data.

    Raises:
        ConfigError: it chooses or counts its prompts, limits the time of a batch, or prepares for its own data.
    """
    buffer, why = recipe.data_buffer, "prompts of clients"
    if buffer.sampler is not None:
        raise ConfigError.of("sampler", buffer.sampler, f"none: {why} are played in their order")
    if buffer.epochs is not None:
        raise ConfigError.of("epochs", buffer.epochs, f"None: {why} are played once each")
    if recipe.config.batch_seconds is not None:
        raise ConfigError.of("batch_seconds", recipe.config.batch_seconds, f"None: a batch waits for {why}")
    if recipe.lifetime is not None:
        raise ConfigError.of("Recipe.lifetime", recipe.lifetime, "None: it prepares the recipe's own prompts (warm=0)")
    return attrs.evolve(recipe, data_buffer=FedBuffer())


def _read(row: Any, number: int) -> Prompt:
    place = f"prompts[{number}]"
    prompt = read_prompt(row, place)
    if any(message.images for message in prompt.messages):
        raise ConfigError.of(f"{place}.images", "images", "text: the images of prompts are checked before a run")
    if TEMPLATE_KWARGS in prompt.metadata:
        raise ConfigError.of(f"{place}.metadata", TEMPLATE_KWARGS, "other keys: templates are tested before a run")
    return prompt


def _checked(rows: Sequence[Any]) -> _Request:
    """Read the rows of a request; raises ConfigError."""
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes) or not 0 < len(rows) <= MOST_PROMPTS:
        got = f"{len(rows)} rows" if isinstance(rows, list) else rows
        raise ConfigError.of("prompts", got, f"a list of 1 to {MOST_PROMPTS} rows")
    for number, row in enumerate(rows):
        if not isinstance(row, str | list | Mapping):
            raise ConfigError.of(f"prompts[{number}]", row, "text, a list of messages, or an object")
    try:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(rows))  # what a restart reads
        digest = hashlib.sha256(msgspec.json.encode(plain, order="sorted")).digest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError.of("prompts", rows, f"{_PLAIN} ({error})") from error
    for number, row in enumerate(plain):
        _read(row, number)
    return _Request(plain, [msgspec.msgpack.encode(row) for row in plain], digest)
