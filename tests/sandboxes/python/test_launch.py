"""The launcher of the sandbox: a setup that fails is an error, never an answer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.environments.python_tool import PythonLimits, containment
from rollouts.sandboxes.base import SandboxError
from rollouts.sandboxes.containment import REQUIRED, containment_of
from rollouts.sandboxes.python.launch import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is tested on Linux")
SETTINGS: dict[str, Any] = {**attrs.asdict(PythonLimits()), "namespaces": False}


@pytest.fixture
def lifeline() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


def test_a_program_answers(lifeline: int) -> None:
    """With its outputs apart."""
    answer, out, errors = run_program(b"import os; os.write(1, b'a'); os.write(2, b'bc')", b"", (), SETTINGS, lifeline)
    assert (answer.exit_code, answer.sizes, out, errors) == (0, [1, 2], b"a", b"bc")


def test_a_failed_setup_is_an_error(lifeline: int) -> None:
    """With the step that failed; the program has not begun."""
    if not containment().namespaces:
        pytest.skip("the step that can be made to fail needs them")
    with pytest.raises(SandboxError, match=r"the sandbox could not be set up: OSError: .*mount /tmp: Invalid argument"):
        run_program(b"print(1)", b"", (), {**SETTINGS, "namespaces": True, "disk_bytes": -1}, lifeline)


def test_a_supervisor_that_fails_is_an_error(lifeline: int) -> None:
    """Its traceback is in the error."""
    settings = {name: value for name, value in SETTINGS.items() if name != "output_bytes"}
    with pytest.raises(SandboxError, match=r"ended with status 1 and no answer: (.|\n)*KeyError: 'output_bytes'"):
        run_program(b"print(1, flush=True); input()", b"", (), settings, lifeline)


def test_a_lifeline_that_is_cut_ends_the_program() -> None:
    """At once, whatever its deadline is."""
    reading, writing = os.pipe()
    os.close(writing)
    answer, _, _ = run_program(b"import time; time.sleep(50)", b"", (), {**SETTINGS, "seconds": 50}, reading)
    os.close(reading)
    assert answer.exit_code < 0
    assert answer.seconds < 40


BOXED = [
    ("print(open({secret!r}).read())", "FileNotFoundError"),
    ("import os; open('f', 'w').write(os.getcwd()); print(open('f').read())", "/tmp/work"),
    ("open('/f', 'w')", "OSError"),
    ("open('/dev/f', 'w')", "OSError"),
    ("import os; os.kill(1, 9)", "PermissionError"),
    ("import os; os.fork()", "PermissionError"),
    ("import socket; socket.socket()", "PermissionError"),
    ("import glob, os; print(glob.glob(os.path.dirname(os.__file__) + '/site-packages/*'))", "[]"),
    ("for n in range(9): open(f'f{n}', 'wb').write(bytes(9 << 20))", "OSError"),
]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize(("code", "words"), BOXED)
def test_in_bubblewrap(code: str, words: str, lifeline: int, tmp_path: Path) -> None:
    """A separate file system with a limited disk, without packages, network and other processes."""
    secret = tmp_path / "secret"
    secret.write_text("canary")
    settings = {**SETTINGS, "bubblewrap": shutil.which("bwrap")}
    try:
        answer, out, errors = run_program(
            code.replace("{secret!r}", repr(str(secret))).encode(), b"", (), settings, lifeline
        )
    except SandboxError as error:
        if "bwrap: " not in str(error):
            raise
        pytest.skip(f"bubblewrap may make no namespaces here: {error}")
    assert "bubblewrap" in answer.mechanisms
    last = (out or errors).decode().strip().splitlines()[-1]
    assert last.startswith(words), (last, words)
    containment_of(answer.mechanisms, "").check(REQUIRED)
