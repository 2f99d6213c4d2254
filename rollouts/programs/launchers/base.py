"""The protocol of programs: from a task and a model server to a command, its environment and its files.

A program is a pure function; its options are set with ``functools.partial``. It starts nothing, and needs no program to
be installed. The exit code of a program is not a verdict on its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from rollouts.base.validators import check, is_int
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import NON_EMPTY

__all__ = ["Launch", "ModelServer", "Program", "check_task"]

_MOST_BYTES = (1 << 17) - 1
"""Of one argument, on Linux."""


def _check_url(instance: ModelServer, field: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")) or value.endswith("/"):
        raise ConfigError.of("ModelServer.base_url", value, "an http address without a slash at its end")


@attrs.frozen
class ModelServer:
    """Where a program's model answers, as seen inside the program's sandbox."""

    base_url: str = attrs.field(validator=_check_url)
    """Without ``/v1``."""
    api_key: str = attrs.field(validator=NON_EMPTY, repr=False)
    model: str = attrs.field(validator=NON_EMPTY)
    """Any name: the server answers with its only model."""
    context_window: int = attrs.field(validator=check("an integer > 0", lambda value: is_int(value, 1)))
    """Tokens of the model's context, prompt and reply together."""
    home: str = attrs.field(validator=check("an absolute path", lambda value: str(value).startswith("/")))
    """The program's home folder inside the sandbox, for settings that name files."""

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's APIs."""
        return f"{self.base_url}/v1"

    @property
    def window(self) -> int:
        """The context window to name to a program: an eighth less, so that it compacts before an overflow."""
        return self.context_window - self.context_window // 8


@attrs.frozen
class Launch:
    """How a program is started."""

    argv: Sequence[str]
    env: Mapping[str, str] = attrs.field(repr=False)
    """In addition to what the sandbox sets."""
    files: Mapping[str, bytes] = attrs.field(factory=dict, repr=False)
    """To write before the start, by path; ``~/`` is the home folder."""


class Program(Protocol):
    """A function from a task and a model server to a launch."""

    def __call__(self, task: str, server: ModelServer, /) -> Launch:
        """Build the launch of one rollout."""
        ...


def check_task(task: str) -> None:
    """Raise unless a task can be an argument of a command line."""
    if not isinstance(task, str) or not task.strip() or task.startswith("-") or "\0" in task:
        raise ConfigError.of("task", task, "a non-empty string that does not begin with '-'")
    if len(task.encode(errors="surrogateescape")) > _MOST_BYTES:
        raise ConfigError(f"task: got {len(task):,} characters; expected at most {_MOST_BYTES:,} bytes, one argument")
