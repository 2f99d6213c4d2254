"""The launcher of the sandbox: a setup that fails is an error, never an answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from rollouts.environments.python_tool import PythonLimits, containment
from rollouts.environments.sandbox.launch import SandboxError, run_program

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
