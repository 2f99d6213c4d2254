"""Reward for code: the last code block of a reply, run with its tests in the Python sandbox.

Invariant: a program that fails, loops or exits early has not passed. Tests that cannot run are a
:class:`RewardFailure`, and so is a sandbox that cannot be set up. No program runs on a machine that cannot enforce the
required restrictions. A secret word printed after the asserts proves that they were reached; a program that searches
the memory of its interpreter could still find it.
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
        sample: ``metadata[tests]`` contains asserts, each of which runs after the program and
            ``metadata["test_imports"]``, or inputs with the expected output of the program.
        tests: key of the tests in the metadata.
        share: return the share of tests passed instead.
        limits: resource limits of one test.
        require: restrictions that the sandbox must enforce, as for :func:`run_python`.

    Raises:
        ConfigError: this machine cannot enforce a required restriction.
        RewardFailure: there are no tests, a test is invalid, or the sandbox cannot be set up.
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
    """The last fenced code block, else the whole text if it is a program, else ``None``."""
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
        stdin, expected = test
        result = await runner(code, stdin=stdin)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(expected)
    word = secrets.token_hex(16)
    result = await runner(_HARNESS, stdin=repr((word, code, test)) + "\n")
    return result.exit_code == 0 and result.stdout.endswith("\n" + word)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _tests(sample: Sample, key: str) -> list[str | tuple[str, str]]:
    entries: Any = sample.metadata.get(key)
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        raise RewardFailure(f"metadata[{key!r}]: got {shortened(entries)}; expected {_EXPECTED}")
    imports = "\n".join(str(line) for line in sample.metadata.get("test_imports") or ())
    return [_test(entry, imports, f"metadata[{key!r}][{number}]") for number, entry in enumerate(entries)]


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
