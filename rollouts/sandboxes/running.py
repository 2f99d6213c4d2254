"""The common part of the open sandboxes of all kinds: the commands of the protocol, and the checks before them.

Invariant: no command starts with arguments that an operating system refuses, or in a closed sandbox. This module knows
no kind of sandbox.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence

import anyio

from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import Ability, Command, Exit, SandboxError, inner_path

__all__ = ["Running", "stopped_by"]


class Running(ABC):
    """An open sandbox, of which a kind defines how one command runs."""

    workspace: str
    home: str
    abilities: frozenset[Ability] = frozenset()
    """Those of its kind."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        """Held while a command runs."""
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        seconds: float,
        stop: anyio.Event | None = None,
    ) -> Exit:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        return await self._command(Command(argv, env or {}, seconds, self.workspace, stop=stop))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        user: str | None = None,
    ) -> Exit:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        where = self.workspace if cwd is None else inner_path(cwd, self.workspace, self.home)
        command = Command(argv, env or {}, seconds, where, stdin, user=user)
        if user is not None and "users" not in self.abilities:
            raise ConfigError.of("user", user, f"None: {type(self).__name__} runs commands as one user")
        return await self._command(command)

    async def kill_all(self) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        raise SandboxError(f"kill_all: {type(self).__name__} cannot")

    async def pack(self, path: str, archive: str | os.PathLike[str]) -> bool:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        raise SandboxError(f"pack: {type(self).__name__} cannot")

    async def unpack(self, archive: str | os.PathLike[str], folder: str) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        raise SandboxError(f"unpack: {type(self).__name__} cannot")

    @abstractmethod
    async def _command(self, command: Command) -> Exit:
        """Run one command when no other runs."""

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")


@contextlib.asynccontextmanager
async def stopped_by(stop: anyio.Event | None) -> AsyncIterator[None]:
    """End the code inside when the event is set."""
    if stop is None:
        yield
        return

    async def wait(scope: anyio.CancelScope) -> None:
        await stop.wait()
        scope.cancel()

    async with first_error() as tasks:
        tasks.start_soon(wait, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()
