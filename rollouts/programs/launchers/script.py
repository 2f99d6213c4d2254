"""A script of the user, with the SDK of OpenAI or Anthropic or a framework on them.

The task is its only argument; its variables are the variables that the SDKs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollouts.errors import ConfigError
from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["script"]


def script(task: str, server: ModelServer, *, path: str | Path, command: Sequence[str] = ("python3",)) -> Launch:
    """Start a file of ours, which is copied into the sandbox.

    Args:
        path: the file.
        command: its interpreter inside, e.g. that of a virtual environment with the SDK.
    """
    check_task(task)
    source = Path(path)
    if not source.is_file():
        raise ConfigError.of("path", str(path), "a file that exists")
    env = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
        "ANTHROPIC_BASE_URL": server.base_url,
        "ANTHROPIC_API_KEY": server.api_key,
        "ANTHROPIC_MODEL": server.model,
        "MODEL_CONTEXT_WINDOW": str(server.window),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
    }
    return Launch((*command, f"{server.home}/{source.name}", task), env, {f"~/{source.name}": source.read_bytes()})
