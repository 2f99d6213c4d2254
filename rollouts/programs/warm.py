"""Sandboxes that are opened before their rollouts begin, in the order of a data buffer's prompts.

Invariant: a sandbox is handed out once, and answered a command just before. Every sandbox that was opened ahead is
handed out or closed. A start that fails is an error of the rollout that waits for it, or is counted, and not repeated.

Sandboxes of equal kinds are exchangeable. This module knows the order of the prompts only, not the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import TracebackType

import anyio
import anyio.abc
import attrs

from rollouts.base.validators import is_int
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.programs.generate import SandboxChoice, chosen_kind
from rollouts.sandboxes import Ability, Containment, RunningSandbox, Sandbox, SandboxLimits
from rollouts.training.data_buffer import DataBuffer, shuffled

__all__ = ["WarmSandboxes"]

_ALIVE_SECONDS = 10.0
_CLOSE_SECONDS = 30.0


@attrs.define(eq=False)
class _Box:
    """A sandbox that is opened ahead, or being opened."""

    kind: Sandbox
    over: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when it is open, or could not be opened."""
    running: RunningSandbox | None = None
    error: Exception | None = None


@attrs.frozen
class _Warm:
    """A kind whose sandboxes are opened ahead."""

    kind: Sandbox
    queue: WarmSandboxes = attrs.field(eq=False, repr=False)

    @property
    def limits(self) -> SandboxLimits:
        return self.kind.limits

    @property
    def abilities(self) -> frozenset[Ability]:
        return self.kind.abilities

    def containment(self) -> Containment:
        return self.kind.containment()

    async def open(self) -> RunningSandbox:
        return await self.queue.take(self.kind)


class WarmSandboxes:
    """The ``sandbox`` of a program's rollouts, opened ahead while its context lasts; as without it before and after.

    Args:
        sandbox: the kind of every prompt, or a function that chooses it.
        buffer: hands out the prompts. Without a sampler: what that will choose is not known.
        ahead: how many sandboxes are open or being opened before they are needed.
        copies: sandboxes for each prompt, ``n_samples_per_prompt``.

    Attributes:
        counts: ``warm``: open when they were needed; ``awaited``: being opened then; ``cold``: not begun; ``dead``:
            opened ahead, and did not answer; ``failed``: could not be opened ahead; ``unused``: closed at the end or
            for others.
        seconds: ``started``: how long all starts took that were used; ``waited``: how long rollouts waited for them.
    """

    def __init__(self, sandbox: SandboxChoice, buffer: DataBuffer, *, ahead: int, copies: int = 1) -> None:
        if buffer.sampler is not None:
            raise ConfigError.of(
                "WarmSandboxes.buffer", buffer, "a data buffer without a sampler, whose order is known"
            )
        for name, value in (("ahead", ahead), ("copies", copies)):
            if not is_int(value, 1):
                raise ConfigError.of(f"WarmSandboxes.{name}", value, "an integer >= 1")
        self._sandbox = self.__wrapped__ = sandbox
        self._buffer = buffer
        self._calls: Counter[int] = Counter()
        """How many rollouts of each group that is out have asked for their kind."""
        self._order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, len(buffer), buffer.seed))
        self._ahead, self._copies = ahead, copies
        self._boxes: list[_Box] = []
        self._failed: list[Sandbox] = []
        """Kinds that could not be opened ahead, and are not tried again."""
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stack = contextlib.AsyncExitStack()
        self._filling = anyio.Lock()
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    async def __call__(self, prompt: Prompt) -> Sandbox:
        """The kind of a prompt; opening it takes a sandbox that was opened ahead, where there is one."""
        if prompt.group_index is not None:
            self._calls[prompt.group_index] += 1
        return _Warm(await chosen_kind(self._sandbox, prompt), self)

    async def __aenter__(self) -> WarmSandboxes:
        self._tasks = await self._stack.enter_async_context(first_error())
        self._refill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.cancel_scope.cancel()
        try:
            await self._stack.__aexit__(kind, error, traceback)
        finally:
            for box in self._boxes:
                await self._discard(box, "unused")
            self._boxes.clear()

    async def take(self, kind: Sandbox) -> RunningSandbox:
        """An open sandbox of a kind.

        Raises:
            SandboxError: it cannot be opened.
        """
        began = anyio.current_time()
        try:
            while (box := self._next(kind)) is not None:
                self._boxes.remove(box)
                how = "warm" if box.over.is_set() else "awaited"
                try:
                    await box.over.wait()
                except anyio.get_cancelled_exc_class():
                    self._boxes.append(box)
                    raise
                if box.error is not None:
                    raise box.error
                if box.running is not None and await self._is_alive(box, box.running):
                    self.counts[how] += 1
                    return box.running
            self.counts["cold"] += 1
            running = await kind.open()
            self.seconds["started"] += anyio.current_time() - began
            return running
        finally:
            self.seconds["waited"] += anyio.current_time() - began
            self._refill()

    def _next(self, kind: Sandbox) -> _Box | None:
        """The box to take: an open one, else the one whose start began first."""
        equal = [box for box in self._boxes if box.kind == kind]
        return next((box for box in equal if box.over.is_set()), equal[0] if equal else None)

    async def _is_alive(self, box: _Box, running: RunningSandbox) -> bool:
        """Whether an open box answers; a dead one is closed and counted."""
        try:
            with anyio.move_on_after(_ALIVE_SECONDS):
                await running.exec(["true"])  # any end of it is an answer
                return True
        except Exception:  # noqa: BLE001 - a kind may be foreign code
            pass
        except anyio.get_cancelled_exc_class():
            await self._discard(box, "unused")
            raise
        await self._discard(box, "dead")
        return False

    async def _discard(self, box: _Box, why: str) -> None:
        if box.running is not None:
            self.counts[why] += 1
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True), contextlib.suppress(Exception):
                await box.running.close()

    def _refill(self) -> None:
        if self._tasks is not None and not self._filling.statistics().tasks_waiting:
            self._tasks.start_soon(self._fill)

    async def _fill(self) -> None:
        """Begin the starts that the next prompts lack; close boxes that none of them needs, beyond ``ahead``."""
        async with self._filling:
            spare = list(self._boxes)
            for kind in await self._wanted():
                found = next((box for box in spare if box.kind == kind), None)
                if found is not None:
                    spare.remove(found)
                elif self._tasks is not None and kind not in self._failed:
                    box = _Box(kind)
                    self._boxes.append(box)
                    self._tasks.start_soon(self._open, box)
            for box in spare:
                if len(self._boxes) > 2 * self._ahead and box in self._boxes and box.over.is_set():
                    self._boxes.remove(box)
                    await self._discard(box, "unused")

    async def _wanted(self) -> list[Sandbox]:
        """The kinds of the next sandboxes, in their order."""
        kinds: list[Sandbox] = []
        for prompt, copies in itertools.islice(self._upcoming(), self._ahead):
            if len(kinds) >= self._ahead:
                break
            try:
                kinds += [await chosen_kind(self._sandbox, prompt)] * copies
            except EnvironmentFailure:  # of its rollout, which asks again
                self.counts["failed"] += 1
        return kinds[: self._ahead]

    def _upcoming(self) -> Iterator[tuple[Prompt, int]]:
        """The next prompts in their order, each with the number of its rollouts that did not ask yet."""
        state, prompts = self._buffer.save_state(), self._buffer.prompts
        out = {group_index for _, group_index in state.leftovers}
        self._calls = Counter({group_index: count for group_index, count in self._calls.items() if group_index in out})
        for position, group_index in state.leftovers:  # prompts that are out, or were put back
            if self._calls[group_index] < self._copies:
                yield prompts[position], self._copies - self._calls[group_index]
        end = None if self._buffer.epochs is None else self._buffer.epochs * len(prompts)
        for group_index in itertools.count(state.next_group_index):
            if group_index == end:
                return
            epoch, place = divmod(group_index, len(prompts))
            yield prompts[self._order(epoch)[place]], self._copies

    async def _open(self, box: _Box) -> None:
        began = anyio.current_time()
        try:
            box.running = await box.kind.open()
            self.seconds["started"] += anyio.current_time() - began
        except Exception as error:  # noqa: BLE001 - of the rollout that waits for it
            box.error = error
            if box.kind not in self._failed:
                self._failed.append(box.kind)
            if box in self._boxes:
                self._boxes.remove(box)
                self.counts["failed"] += 1
        finally:
            box.over.set()
