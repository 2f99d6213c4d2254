"""The laws of every program: pure, quiet, without a key in its arguments, a window with a margin."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.programs import (
    ModelServer,
    Program,
    claude_code,
    codex,
    mini_swe_agent,
    opencode,
    qwen_code,
    script,
)

KEY = "secret-key"
SERVER = ModelServer("http://127.0.0.1:8080/s/7", KEY, "m-1", 32768, "/tmp/home")
PROGRAMS: list[Program] = [claude_code, codex, opencode, qwen_code, mini_swe_agent, partial(script, path=__file__)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_launch_is_pure_and_hides_its_key(program: Program) -> None:
    """The same for the same task; the key is in the environment or a file, never in arguments or a ``repr``."""
    launch = program("mend it", SERVER)
    assert launch == program("mend it", SERVER)
    assert launch.argv.count("mend it") == 1
    assert KEY not in " ".join(launch.argv) + repr(launch) + repr(SERVER)
    kept = " ".join(launch.env.values()) + b" ".join(launch.files.values()).decode()
    assert KEY in kept
    assert "http://127.0.0.1:8080/s/7" in kept + " ".join(launch.argv)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("task", ["", " ", "--help", "a\0b", "x" * 140_000, 5])
def test_a_task_that_is_no_argument_is_refused(program: Program, task: Any) -> None:
    """One that would be read as an option, or that the system does not pass."""
    with pytest.raises(ConfigError, match=r"^task: got .*; expected"):
        program(task, SERVER)


def test_the_window_has_a_margin() -> None:
    """An eighth, in which the reply that makes a program compact still fits."""
    assert SERVER.window == 28672


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("base_url", "127.0.0.1:80", "an http address without a slash at its end"),
        ("base_url", "http://a/", "an http address without a slash at its end"),
        ("api_key", "", "a non-empty string"),
        ("model", None, "a non-empty string"),
        ("context_window", 0, "an integer > 0"),
        ("context_window", True, "an integer > 0"),
        ("home", "~", "an absolute path"),
    ],
)
def test_a_bad_server_is_refused(field: str, value: Any, expected: str) -> None:
    """By name."""
    good: dict[str, Any] = {"base_url": "http://a", "api_key": "k", "model": "m", "context_window": 4096, "home": "/h"}
    ModelServer(**good)
    with pytest.raises(ConfigError, match=f"ModelServer.{field}: got .*; expected {expected}"):
        ModelServer(**good | {field: value})
