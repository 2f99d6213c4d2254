"""Reward for code: the last code block of a reply, run with its tests in the Python sandbox.

Invariant: a program that fails, loops or exits early has not passed. Tests that cannot run are a
:class:`RewardFailure`, and so is a sandbox that cannot be set up. No program runs on a machine that cannot enforce the
required restrictions. Asserts run in another process than the program, which can neither read them nor change how they
compare (:mod:`rollouts.rewards.code_remote`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.environments.python_tool import REQUIRED, PythonLimits, SandboxError, run_connected, run_python
from rollouts.errors import RewardFailure, shortened
from rollouts.rewards.answers import final_reply
from rollouts.rewards.code_remote import text_of
from rollouts.training.types import Sample

__all__ = ["code_of", "code_tests"]

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_LANGUAGES = ("", "python", "python3", "py")
_Require: TypeAlias = Collection[str] | Literal["all"]
_EXPECTED = 'a list of asserts, or of {"input": text, "output": text}'


async def code_tests(
    sample: Sample,
    *,
    tests: str = "test_list",
    share: bool = False,
    limits: PythonLimits | None = None,
    require: _Require = REQUIRED,
) -> float:
    """1.0 if the program of the last reply passes all its tests, else 0.0.

    Args:
        sample: ``metadata[tests]`` contains asserts, each of which runs after the program and
            ``metadata["test_imports"]``, or inputs with the expected output of the program.
        tests: key of the tests in the metadata.
        share: return the share of tests passed instead.
        limits: resource limits of one test; its output may be longer by the output that is expected.
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
    try:
        async with first_error() as tasks:

            async def run(number: int) -> None:
                passed[number] = await _passes(code, wanted[number], limits, require)
                if not share and not passed[number]:
                    tasks.cancel_scope.cancel()

            for number in range(len(wanted)):
                tasks.start_soon(run, number)
    except SandboxError as error:
        raise RewardFailure(f"code_tests: {error}") from error
    return sum(passed.values()) / len(wanted) if share else float(len(passed) == len(wanted) and all(passed.values()))


@attrs.frozen
class _Assert:
    """Asserts, and the imports that run before them."""

    text: str
    imports: str


def code_of(text: str) -> str | None:
    """The last fenced code block of Python or of no language, else the text if it is a program, else ``None``."""
    blocks = [code for language, code in _BLOCK.findall(text) if language.strip().lower() in _LANGUAGES]
    if blocks:
        return str(blocks[-1])
    try:
        compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        return None
    return text if text.strip() else None


async def _passes(code: str, test: _Assert | tuple[str, str], limits: PythonLimits | None, require: _Require) -> bool:
    if isinstance(test, tuple):
        stdin, expected = test
        limits = limits or PythonLimits()
        limits = attrs.evolve(limits, output_bytes=limits.output_bytes + len(expected.encode(errors="replace")))
        result = await run_python(code, stdin=stdin, limits=limits, require=require)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(expected)
    word = secrets.token_hex(16)
    program = text_of(f"run_program({code!r}, {test.imports!r})")
    tests = text_of(f"run_tests({test.text!r}, {test.imports!r}, {word!r})")
    result = await run_connected(program, tests, limits=limits, require=require)
    _, missing, error = result.stdout.rpartition(f"\n{word} ")
    if missing:
        raise RewardFailure(f"metadata['test_imports']: {error.strip()}; expected modules of the sandbox")
    return result.exit_code == 0 and result.stdout.endswith(f"\n{word}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _tests(sample: Sample, key: str) -> list[_Assert | tuple[str, str]]:
    entries: Any = sample.metadata.get(key)
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        raise RewardFailure(f"metadata[{key!r}]: got {shortened(entries)}; expected {_EXPECTED}")
    lines: Any = sample.metadata.get("test_imports") or ()
    imports = lines if isinstance(lines, str) else "\n".join(map(str, lines))
    return [_test(entry, imports, f"metadata[{key!r}][{number}]") for number, entry in enumerate(entries)]


def _test(entry: Any, imports: str, place: str) -> _Assert | tuple[str, str]:
    if isinstance(entry, Mapping) and isinstance(entry.get("input"), str) and isinstance(entry.get("output"), str):
        return entry["input"], entry["output"]
    if not isinstance(entry, str) or not entry.strip():
        raise RewardFailure(f"{place}: got {shortened(entry)}; expected {_EXPECTED}")
    try:
        compile(imports, "test", "exec")
        compile(entry, "test", "exec")
    except (SyntaxError, ValueError) as error:
        raise RewardFailure(
            f"{place}: got {shortened(entry)}, which is not Python ({error}); expected {_EXPECTED}"
        ) from None
    return _Assert(entry, imports)
