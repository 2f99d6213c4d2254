"""A stand-in for the package ``e2b``: sandboxes in which nothing runs but a scripted coding agent.

slime's example ``coding_agent_rl`` uses it unmodified. The agent is the command that the harness starts; it talks to
the example's adapter over HTTP, as a real one does. The example keeps one adapter for the life of its process, which
asks the server that its first call named: here it ends with its sandboxes, so that each test has one for its server.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import aiohttp
import attrs

__all__ = ["sandboxes"]

AGENT = "/tmp/.run.sh"
"""The harness starts the agent with this file."""
SOLVES = "make solved"
"""The evaluation command that succeeds; any other fails."""


class CommandExitException(Exception):
    """A command that failed."""

    exit_code, stdout, stderr = 1, "", "failed"


@attrs.frozen
class Done:
    """The result of a command."""

    stdout: str = ""
    exit_code: int = 0
    stderr: str = ""


class AsyncSandbox:
    """One sandbox; ``commands`` and ``files`` are itself."""

    sandbox_id = "sandbox"

    @classmethod
    async def create(cls, **_: Any) -> AsyncSandbox:
        return cls()

    @property
    def commands(self) -> AsyncSandbox:
        return self

    @property
    def files(self) -> AsyncSandbox:
        return self

    async def run(self, command: str, *, envs: Mapping[str, str] | None, **_: Any) -> Done:
        if f"setsid bash {AGENT}" in command:
            assert envs is not None
            await converse(envs["ANTHROPIC_BASE_URL"], envs["ANTHROPIC_AUTH_TOKEN"])
        elif command.startswith("test -f"):
            return Done("0")
        elif "git diff" in command:
            return Done("diff --git a/x b/x\n")
        elif "&& make " in command and SOLVES not in command:
            raise CommandExitException
        return Done()

    async def write(self, path: str, data: Any, **_: Any) -> None:
        return None

    async def read(self, path: str, **_: Any) -> str:
        return ""

    async def kill(self) -> None:
        return None


async def converse(url: str, token: str) -> None:
    """Two turns of one conversation, then a separate conversation, as of a sub-agent."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        for number, asked in enumerate((["Solve it.", "Go on."], ["Look at the tests."])):
            history: list[dict[str, Any]] = []
            for text in asked:
                history.append({"role": "user", "content": [{"type": "text", "text": text}]})
                body = {"model": "m", "max_tokens": 64, "messages": history, "system": f"Agent {number}."}
                headers = {"Authorization": f"Bearer {token}"}
                async with session.post(f"{url}/v1/messages", headers=headers, json=body) as response:
                    history.append({"role": "assistant", "content": (await response.json())["content"]})


@contextlib.contextmanager
def sandboxes(folder: Path) -> Iterator[None]:
    """Let ``e2b`` be this module, and set what the example reads from the environment; at the end, stop its adapter."""
    archive = folder / "archive.tar"
    archive.write_bytes(b"")
    names = ("e2b", "e2b.sandbox", "e2b.sandbox.commands", "e2b.sandbox.commands.command_handle")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["e2b"])["AsyncSandbox"] = AsyncSandbox
    vars(modules[names[-1]])["CommandExitException"] = CommandExitException
    environment = {
        "ADAPTER_PUBLIC_HOST": "127.0.0.1",
        "ADAPTER_BIND_HOST": "127.0.0.1",
        "ADAPTER_PORT": "0",
        "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": "image",
        "SLIME_AGENT_NODE_TARBALL": str(archive),
        "SLIME_AGENT_CC_TARBALL": str(archive),
    }
    real = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(modules)
    try:
        with patch.dict(os.environ, environment):
            yield
    finally:
        _stop_adapter()
        # only these: patch.dict would also remove every module that was first imported here
        for name in names:
            del sys.modules[name]
        sys.modules.update(real)


def _stop_adapter() -> None:
    module = sys.modules.get("examples.coding_agent_rl.generate")
    if module is None:
        return
    kind = vars(module)["_AdapterService"]
    service = kind._instances.pop(kind, None)
    if service is not None:
        service.app_handle.stop()
        service.app_handle.loop.close()
