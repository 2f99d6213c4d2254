"""Helpers for tests of rollouts of programs: a sandbox whose programs are functions, and a client of the gateway."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import anyio
import attrs

from rollouts.programs import Launch, ModelServer
from rollouts.sandboxes import Ability, Containment, Exit, SandboxError, SandboxLimits

__all__ = ["Chat", "FakeSandbox", "Running", "program"]

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


def program(task: str, server: ModelServer) -> Launch:
    """A launch that a :class:`FakeSandbox` understands."""
    env = {"URL": server.openai_url, "KEY": server.api_key, "TASK": task}
    return Launch(("fake",), env, {"~/settings": b"quiet"})


@attrs.define
class Chat:
    """A client of the chat API; an answer that is an error is kept."""

    env: Mapping[str, str]
    http: aiohttp.ClientSession
    statuses: list[int] = attrs.field(factory=list)

    async def ask(self, *messages: Any, tools: Any = TOOLS, **fields: Any) -> dict[str, Any]:
        """The message of the reply; empty without a reply. A string is a user message."""
        given = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        body = {"model": "m", "messages": given, **({"tools": tools} if tools else {}), **fields}
        headers = {"Authorization": f"Bearer {self.env['KEY']}"}
        async with self.http.post(f"{self.env['URL']}/chat/completions", json=body, headers=headers) as response:
            self.statuses.append(response.status)
            answer = await response.json()
            return answer["choices"][0]["message"] if response.status == 200 else {}


Act = Callable[[Chat], Awaitable[int | None]]


@attrs.define(eq=False)
class Running:
    """An open fake sandbox."""

    kind: FakeSandbox
    workspace: str = "/workspace"
    home: str = "/home/agent"
    listener: socket.socket | None = None
    files: dict[str, bytes] = attrs.field(factory=dict)

    def url_inside(self, port: int | None = None) -> str:
        return f"http://127.0.0.1:{port}"

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        seconds: float,
        stop: anyio.Event | None = None,
    ) -> Exit:
        self._raise_at("run")
        assert env is not None
        assert stop is not None
        code: int | None = -9

        async def play(scope: anyio.CancelScope) -> None:
            nonlocal code
            async with aiohttp.ClientSession() as http:
                code = await self.kind.act(Chat(env, http))
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, tasks.cancel_scope)
            await stop.wait()
            self.kind.counts["killed"] += 1
            tasks.cancel_scope.cancel()
        return Exit(code or 0, "said", f"error of {env['TASK']}", 0.5)

    async def exec(self, argv: Sequence[str], **options: Any) -> Exit:
        raise SandboxError("a fake sandbox runs no commands")

    async def read(self, path: str) -> bytes | None:
        self._raise_at("read")
        return self.files.get(path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._raise_at("write")
        self.files[path] = data

    async def kill_all(self) -> None:
        return None

    async def pack(self, path: str, archive: Any) -> bool:
        return False

    async def unpack(self, archive: Any, folder: str) -> None:
        raise SandboxError("a fake sandbox has no folders")

    async def close(self) -> None:
        self.kind.counts["closed"] += 1
        self._raise_at("close")

    def _raise_at(self, step: str) -> None:
        if self.kind.fails_at == step:
            raise self.kind.raises(f"planted at {step}")


@attrs.define(eq=False)
class FakeSandbox:
    """A sandbox whose program is a function of a client of the gateway, and that may fail at a step."""

    act: Act
    fails_at: str = ""
    raises: type[Exception] = SandboxError
    counts: Counter[str] = attrs.field(factory=Counter)
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)

    @property
    def abilities(self) -> frozenset[Ability]:
        return frozenset()

    def containment(self) -> Containment:
        return Containment({}, {}, ())

    async def open(self) -> Running:
        if self.fails_at == "open":
            raise SandboxError("planted at open")
        self.counts["opened"] += 1
        return Running(self)
