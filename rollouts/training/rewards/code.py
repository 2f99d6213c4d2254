"""Code by its tests: the last code block of a reply, run with its tests in the Python sandbox.

Invariant: a program that fails, loops or ends early has not passed; tests that cannot be run are a
:class:`RewardFailure`, and so is a sandbox that cannot be set up. A machine that does not enforce what is required of
the sandbox runs no program. What shows that the asserts were reached is a word
that the program is not told; one that searches the interpreter it runs in could still find it.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import anyio

from rollouts.environments.python_tool import REQUIRED, Execution, PythonLimits, SandboxError, run_python
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.training.rewards.answers import final_reply
from rollouts.training.types import Sample

__all__ = ["code_of", "code_tests"]

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_EXPECTED = 'a list of asserts, or of {"input": text, "output": text}'

_HARNESS = """\
import sys
word, code, test = eval(sys.stdin.readline())
def run(word=word):
    names = {"__name__": "program"}
    exec(compile(code, "program", "exec"), names)
    exec(compile(test, "test", "exec"), names)
    sys.__stdout__.write("\\n" + word)
    sys.__stdout__.flush()
del word
run()
"""


async def code_tests(
    sample: Sample,
    *,
    tests: str = "test_list",
    share: bool = False,
    limits: PythonLimits | None = None,
    require: Collection[str] | Literal["all"] = REQUIRED,
) -> float:
    """1.0 if the program of the last reply passes all its tests, else 0.0.

    Args:
        sample: ``metadata[tests]`` holds asserts (each is run after the program, with ``metadata["test_imports"]``
            before it), or inputs with the output that the program must print.
        tests: the key of the metadata.
        share: give the share of tests passed.
        limits: of each test's run.
        require: what the sandbox must enforce, as for :func:`run_python`.

    Raises:
        ConfigError: something that is required of the sandbox cannot be enforced on this machine.
        RewardFailure: there are no tests, one is none, or the sandbox cannot be set up.
    """
    wanted = _tests(sample, tests)
    code = code_of(final_reply(sample))
    if code is None:
        return 0.0
    passed: dict[int, bool] = {}
    errors: list[SandboxError | ConfigError] = []
    runner = functools.partial(run_python, limits=limits, require=require)
    async with anyio.create_task_group() as tasks:

        async def run(number: int) -> None:
            try:
                passed[number] = await _passes(code, wanted[number], runner)
            except (SandboxError, ConfigError) as error:
                errors.append(error)
                tasks.cancel_scope.cancel()
            if not share and not passed.get(number):
                tasks.cancel_scope.cancel()

        for number in range(len(wanted)):
            tasks.start_soon(run, number)
    if errors and isinstance(errors[0], ConfigError):
        raise errors[0]
    if errors:
        raise RewardFailure(f"code_tests: {errors[0]}") from errors[0]
    return sum(passed.values()) / len(wanted) if share else float(len(passed) == len(wanted) and all(passed.values()))


def code_of(text: str) -> str | None:
    """The last fenced block; without one the text, if it is a program."""
    blocks = _BLOCK.findall(text)
    if blocks:
        return str(blocks[-1])
    try:
        compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        return None
    return text if text.strip() else None


async def _passes(code: str, test: str | tuple[str, str], runner: Callable[..., Awaitable[Execution]]) -> bool:
    if isinstance(test, tuple):
        given, wanted = test
        done = await runner(code, stdin=given)
        return done.exit_code == 0 and _lines(done.stdout) == _lines(wanted)
    word = secrets.token_hex(16)
    done = await runner(_HARNESS, stdin=repr((word, code, test)) + "\n")
    return done.exit_code == 0 and done.stdout.endswith("\n" + word)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _tests(sample: Sample, key: str) -> list[str | tuple[str, str]]:
    given: Any = sample.metadata.get(key)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise RewardFailure(f"metadata[{key!r}]: got {shortened(given)}; expected {_EXPECTED}")
    imports = "\n".join(str(line) for line in sample.metadata.get("test_imports") or ())
    return [_test(entry, imports, f"metadata[{key!r}][{number}]") for number, entry in enumerate(given)]


def _test(entry: Any, imports: str, place: str) -> str | tuple[str, str]:
    if isinstance(entry, Mapping) and isinstance(entry.get("input"), str) and isinstance(entry.get("output"), str):
        return entry["input"], entry["output"]
    if not isinstance(entry, str) or not entry.strip():
        raise RewardFailure(f"{place}: got {shortened(entry)}; expected {_EXPECTED}")
    test = f"{imports}\n{entry}"
    try:
        compile(test, "test", "exec")
    except (SyntaxError, ValueError) as error:
        raise RewardFailure(
            f"{place}: got {shortened(entry)}, which is no Python ({error}); expected {_EXPECTED}"
        ) from None
    return test
