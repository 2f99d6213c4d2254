"""The data buffer: hands out prompts, and takes unfinished ones back.

Invariant: every prompt of an epoch is handed out once, in an order that depends on seed and epoch only; or a sampler
chooses each prompt. Prompts that were put back come out first, with the same group index. A group index is never used
for two prompts. A saved and loaded buffer continues exactly where it was. This module does not know rollouts.
"""

from __future__ import annotations

import bisect
import functools
import json
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from rollouts.base.storable import check_readable, stable_json
from rollouts.base.validators import is_int
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, RolloutsError, source_line, text_of

if TYPE_CHECKING:
    from rollouts.training.buffer_state import BufferState
    from rollouts.training.samplers.base import Sampler

__all__ = ["DataBuffer", "Draw", "read_prompt", "shuffled"]

Draw: TypeAlias = tuple[int, int | None, Sequence[float | None] | None]
"""The start of a group, ``(group index, position in the data, None)``, or the rewards of a kept or dropped group,
``(group index, None, rewards)``. A draw without a sampler has no position."""

_SAMPLER_METHODS = ("begin", "next", "drawn", "observe", "metrics", "describe", "state_dict", "load_state_dict")


class DataBuffer:
    """A cursor over prompts.

    Args:
        prompts: strings, message lists, ``{"prompt", "label", "metadata"}`` rows, or :class:`Prompt` values.
        seed: seed of the shuffle, which differs in each epoch; ``None`` keeps the order of the data.
        epochs: number of passes over the data; ``None`` for no limit. With a sampler, as many draws as in these passes.
        sampler: chooses the prompt of each group, e.g. :class:`rollouts.training.samplers.PassRateSampler`.

    Raises:
        ConfigError: no prompts, a table, a file or a path, or an invalid row; the message names its position. A prompt
            without text, images and metadata is invalid. Or the sampler does not fit the prompts.
    """

    sampler: Sampler | None = None  # for a subclass that does not call __init__

    def __init__(
        self,
        prompts: Iterable[Any],
        *,
        seed: int | None = None,
        epochs: int | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        if type(prompts) is not list:
            from rollouts.training.row_types import check_rows  # here: most prompts are a list

            check_rows(prompts, "DataBuffer.prompts")
        self._prompts: Sequence[Prompt] = [read_prompt(row, f"prompts[{number}]") for number, row in enumerate(prompts)]
        if not self._prompts:
            raise ConfigError.of("DataBuffer.prompts", [], "at least one prompt")
        if epochs is not None and not is_int(epochs, 1):
            raise ConfigError.of("DataBuffer.epochs", epochs, "an integer >= 1, or None")
        lacking = [name for name in _SAMPLER_METHODS if not callable(getattr(sampler, name, None))]
        if sampler is not None and lacking:
            raise ConfigError.of("DataBuffer.sampler", sampler, f"a sampler, with {', '.join(lacking)}")
        self.seed = seed
        self.epochs = epochs
        self.sampler = sampler
        self._cursor = 0
        self._epoch = 0
        self._next_group_index = 0
        self._positions: dict[int, int] = {}
        """Prompts that are out, by group index: their positions in the data."""
        self._leftovers: list[tuple[int, int]] = []
        """Prompts that were put back, as in :attr:`.BufferState.leftovers`, in the order in which they come out."""
        self._begin()

    def _begin(self) -> None:
        """Begin the order of the epoch, and the sampler."""
        self._order: Sequence[int] = shuffled(len(self._prompts), self.seed, self._epoch)
        self.ask_sampler("begin", self._prompts, self.seed)

    def __repr__(self) -> str:
        end = "" if self.epochs is None else f" of {self.epochs}"
        where = f"epoch {self._epoch}{end}, {self._cursor}/{len(self._prompts)}"
        return f"<DataBuffer {where}, {len(self._leftovers)} put back, next group {self._next_group_index}>"

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._prompts)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts in the order of the data; this takes none."""
        return tuple(self._prompts)

    @property
    def epoch(self) -> int:
        return self._epoch

    def hold_out(self, count: int) -> list[Prompt]:
        """Remove the last distinct prompts, and all their duplicates, from the data, to evaluate on.

        Returns:
            ``count`` distinct prompts.

        Raises:
            ConfigError: prompts were taken already, or none would be left.
        """
        if self._cursor or self._epoch or self._leftovers:
            raise ConfigError.of("hold_out", repr(self), "a buffer from which nothing was taken")
        unique = {_key(prompt): prompt for prompt in self._prompts}
        if not 0 <= count < len(unique):
            raise ConfigError.of("hold_out(count)", count, f"0 to {len(unique) - 1} of {len(unique)} different prompts")
        held_out = dict(list(unique.items())[len(unique) - count :])
        self._prompts = [prompt for prompt in self._prompts if _key(prompt) not in held_out]
        for cached in ("fingerprint", "metadata_checksum"):  # of the data with the removed prompts
            self.__dict__.pop(cached, None)
        self._begin()
        return list(held_out.values())

    def get_prompts(self, count: int) -> list[Prompt]:
        """Take ``count`` prompts, each with its group index: prompts that were put back first, then the data in order.

        Raises:
            DataExhausted: fewer than ``count`` are left; none is taken.
        """
        if not is_int(count, 0):
            raise ConfigError.of("get_prompts(count)", count, "an integer >= 0")
        left = self._count_left()
        if left is not None and left < count:
            raise DataExhausted(f"{count} prompts wanted, {left} left in {self!r}")
        return [self._take() for _ in range(count)]

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Put back unfinished prompts; they come out again first, lowest group index first.

        Raises:
            ConfigError: a prompt was not taken from this buffer, or is done or was put back; none is put back.
        """
        back: dict[int, int] = {}
        for prompt in prompts:
            group_index = prompt.group_index
            if group_index is None or group_index in back or group_index not in self._positions:
                raise ConfigError.of("put_back(prompts)", prompt, "prompts taken from this buffer that are out")
            back[group_index] = self._positions[group_index]
        for group_index, position in back.items():
            del self._positions[group_index]
            bisect.insort(self._leftovers, (position, group_index), key=lambda entry: entry[1])

    def mark_done(self, prompt: Prompt) -> None:
        """Mark a prompt as finished; it can no longer be put back."""
        if prompt.group_index is not None:
            self._positions.pop(prompt.group_index, None)

    def position_of(self, prompt: Prompt) -> int | None:
        """The position in the data that a sampler chose for a prompt that is out; ``None`` without a sampler."""
        return None if self.sampler is None or prompt.group_index is None else self._positions[prompt.group_index]

    def observe(self, prompt: Prompt, rewards: Sequence[float | None]) -> None:
        """Pass the rewards of a group that is out, kept or dropped, to the sampler."""
        if (position := self.position_of(prompt)) is not None:
            self.ask_sampler("observe", position, rewards)

    def ask_sampler(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sampler; ``None`` without one. An error of its code is raised with its name."""
        try:
            return None if self.sampler is None else getattr(self.sampler, method)(*arguments)
        except RolloutsError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {text_of(error)} ({source_line(error) or 'not in a file'})"
            raise RolloutsError(f"{type(self.sampler).__name__}.{method} raised {text}") from error

    def save_state(self) -> BufferState:
        """Return the state. Prompts that are out are saved as put back: a loaded buffer hands them out again."""
        # Here: most runs continue from their journal.
        from rollouts.training.buffer_state import BufferState, sampler_entry

        out = [(position, group_index) for group_index, position in self._positions.items()]
        sampler = None if self.sampler is None else sampler_entry(self.sampler, self.ask_sampler("state_dict"))
        return BufferState(
            cursor=self._cursor,
            epoch=self._epoch,
            next_group_index=self._next_group_index,
            leftovers=tuple(sorted([*self._leftovers, *out], key=lambda entry: entry[1])),
            fingerprint=self.fingerprint,
            sampler=sampler,
            metadata=self.metadata_checksum,
        )

    def load_state(self, state: BufferState) -> None:
        """Restore a saved state.

        Raises:
            ConfigError: the state was saved with other prompts, another seed or another sampler, or is damaged.
        """
        state.check(self.save_state(), len(self._prompts), self._positions_in_epochs())
        self._cursor, self._epoch = state.cursor, state.epoch
        self._next_group_index = state.next_group_index
        self._leftovers = list(state.leftovers)
        self._positions = {}
        self._begin()
        if state.sampler is not None:  # a state without one: its run had no sampler
            self.ask_sampler("load_state_dict", state.sampler)

    def resume_after(self, taken: int, unsettled: Collection[int], draws: Iterable[Draw] = ()) -> None:
        """Set the state of a buffer with the same data that has handed out ``taken`` prompts.

        Args:
            taken: number of group indices used: 0 to ``taken - 1``.
            unsettled: those whose prompts are unfinished; they come out again.
            draws: the draws and the rewards, in the order in which they were recorded, for the sampler.
        """
        size = len(self._prompts)
        self._epoch = max(0, taken - 1) // size  # an epoch begins when its first prompt is taken
        self._cursor = taken - self._epoch * size
        self._next_group_index = taken
        self._positions = {}
        self._begin()
        positions = self._replay_draws(draws)
        in_epochs = self._positions_in_epochs()
        self._leftovers = [(positions[n] if n in positions else in_epochs(n), n) for n in sorted(unsettled)]

    def _replay_draws(self, draws: Iterable[Draw]) -> dict[int, int]:
        """Give the sampler the draws and rewards of an earlier process; return the positions by group index."""
        positions: dict[int, int] = {}
        in_epochs = self._positions_in_epochs()
        for number, position, rewards in draws:
            if rewards is None:
                positions[number] = in_epochs(number) if position is None else position
                self.ask_sampler("drawn", number, positions[number])
            else:
                self.ask_sampler("observe", positions[number], rewards)
        return positions

    def _positions_in_epochs(self) -> Callable[[int], int]:
        """A function of a group index: the position that its draw has without a sampler."""
        order_of = functools.lru_cache(1)(functools.partial(shuffled, len(self._prompts), self.seed))  # one an epoch

        def position(group_index: int) -> int:
            epoch, place = divmod(group_index, len(self._prompts))
            return order_of(epoch)[place]

        return position

    def take_by_index(self, group_index: int) -> Prompt:
        """Take one prompt that was put back, by its group index.

        Raises:
            ConfigError: no prompt with this index was put back.
        """
        for position, number in self._leftovers:
            if number == group_index:
                self._leftovers.remove((position, number))
                self._positions[group_index] = position
                return attrs.evolve(self._prompts[position], group_index=group_index)
        raise ConfigError.of("take_by_index(group_index)", group_index, "the index of a prompt that was put back")

    def _count_left(self) -> int | None:
        if self.epochs is None:
            return None
        rest = (self.epochs - self._epoch) * len(self._prompts) - self._cursor
        return max(0, rest) + len(self._leftovers)  # a state may be of more epochs

    def _take(self) -> Prompt:
        if self._leftovers:
            position, group_index = self._leftovers.pop(0)
        else:
            if self._cursor == len(self._prompts):
                self._cursor, self._epoch = 0, self._epoch + 1
                self._order = shuffled(len(self._prompts), self.seed, self._epoch)
            group_index = self._next_group_index
            position = self._order[self._cursor] if self.sampler is None else self._choice_of(group_index)
            self._cursor += 1
            self._next_group_index += 1
        self._positions[group_index] = position
        return attrs.evolve(self._prompts[position], group_index=group_index)

    def _choice_of(self, group_index: int) -> int:
        position: int = self.ask_sampler("next", group_index)
        if not is_int(position, 0) or position >= len(self._prompts):
            name = f"{type(self.sampler).__name__}.next({group_index})"
            raise ConfigError.of(name, position, f"a position, 0 to {len(self._prompts) - 1}")
        return position

    @functools.cached_property
    def fingerprint(self) -> int:
        """Checksum of the seed and the prompts; metadata is included in place of an opening."""
        from rollouts.base.stable_repr import stable_repr  # here: a run without a journal needs no fingerprint

        crc = zlib.crc32(repr(self.seed).encode())
        for prompt in self._prompts:
            texts = [message.to_record() for message in prompt.messages]
            if not prompt.has_opening:
                crc = zlib.crc32(stable_json(prompt.metadata), crc)
            task = [texts, stable_repr(prompt.label)]
            crc = zlib.crc32(json.dumps(task, sort_keys=True, default=stable_repr).encode(), crc)
        return crc

    @functools.cached_property
    def metadata_checksum(self) -> int:
        """Checksum of the metadata of all prompts, as :func:`stable_json` writes it."""
        return functools.reduce(lambda crc, prompt: zlib.crc32(stable_json(prompt.metadata), crc), self._prompts, 0)


def shuffled(size: int, seed: int | None, epoch: int) -> list[int]:
    """The positions of one epoch in their order; without a seed, that of the data."""
    order = list(range(size))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _key(prompt: Prompt) -> str:
    """Equal for duplicates: the text and label of a prompt; without an opening, the metadata in place of the text."""
    from rollouts.base.stable_repr import stable_key  # here: most runs compare no prompts

    task = [message.to_record() for message in prompt.messages] if prompt.has_opening else prompt.metadata
    return stable_key([task, prompt.label])


def read_prompt(row: Any, place: str) -> Prompt:
    """Read a row: text, messages, a prompt, or an object with ``prompt``, ``label`` and ``metadata``."""
    prompt = _to_prompt(row, place)
    check_readable(f"{place}: label", prompt.label)
    if not prompt.metadata and not prompt.has_opening:  # from metadata the environment may write the opening
        opening = prompt.prompt
        got = opening if isinstance(opening, str) else [message.to_record() for message in opening]
        raise ConfigError(f"{place}: {ConfigError.of('prompt', got, 'some text')}")
    return prompt


def _to_prompt(row: Any, place: str) -> Prompt:
    try:
        if isinstance(row, Prompt):
            return row
        if isinstance(row, Mapping):
            unknown = row.keys() - {"prompt", "label", "metadata"}
            if unknown or "prompt" not in row:
                keys = 'the keys "prompt", and "label" and "metadata" where known; others: load_prompts(prompt=NAME)'
                raise ConfigError.of("row", sorted(row.keys()), keys)
            metadata = row.get("metadata") or {}
            if not isinstance(metadata, Mapping | str):
                raise ConfigError.of("metadata", metadata, "an object")
            return Prompt(row["prompt"], label=row.get("label"), metadata=metadata)
        return Prompt(row)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
