"""Code rewards in the real sandbox: golden programs, cheats, and invalid tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.environments.python_tool import PythonLimits
from rollouts.errors import RewardFailure
from rollouts.training import Sample
from rollouts.training.rewards import code_tests
from rollouts.training.rewards.code import code_of

ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2"]


def sample_of(code: str, tests: Any = ASSERTS, **metadata: Any) -> Sample:
    text = f"Here it is:\n```python\n{code}\n```\nDone."
    metadata = {**metadata, "test_list": tests}
    return Sample(messages=[{"role": "assistant", "content": text}], metadata=metadata)


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def double(x):\n    return 2 * x", 1.0),
        ("def double(x):\n    print('noise')\n    return 2 * x\nif __name__ == '__main__':\n    1 / 0", 1.0),
        ("def double(x):\n    return 4", 0.0),
        ("def double(x):\n    return", 0.0),
        ("def double(x)", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("import sys\nsys.modules['builtins'].AssertionError = None", 0.0),
    ],
)
async def test_golden_programs(code: str, reward: float) -> None:
    """All asserts must be reached and hold; an early exit with status 0 does not pass."""
    assert await code_tests(sample_of(code)) == reward


async def test_a_share_of_the_tests() -> None:
    """One of two."""
    assert await code_tests(sample_of("def double(x):\n    return 4"), share=True) == 0.5


async def test_a_program_that_loops_has_not_passed() -> None:
    """Within the limits of one run."""
    assert await code_tests(sample_of("while True:\n    pass"), limits=PythonLimits(seconds=1)) == 0.0


async def test_inputs_with_outputs() -> None:
    """The program reads and prints; the ends of lines do not count."""
    tests = [{"input": "3\n", "output": "6\n"}, {"input": "5", "output": "10"}]
    assert await code_tests(sample_of("print(2 * int(input()), ' ')", tests)) == 1.0
    assert await code_tests(sample_of("print(6)", tests)) == 0.0


def test_the_code_of_a_reply() -> None:
    """The last block; a reply that is a program; else none."""
    assert code_of("```\na\n```\n```py\nb\n```") == "b\n"
    assert code_of("print(1)") == "print(1)"
    assert code_of("I do not know.") is None
    assert code_of("") is None


@pytest.mark.parametrize("tests", [None, [], "assert True", [""], [3], [{"input": "1"}], ["assert ("]], ids=repr)
async def test_invalid_tests_are_a_failure(tests: Any) -> None:
    """Never a reward of 0, which would blame the program."""
    with pytest.raises(RewardFailure, match=r"metadata\['test_list'\].*expected a list of asserts"):
        await code_tests(sample_of("def double(x): ...", tests))


async def test_real_solutions_pass_their_tests(asset: Callable[[str], Path]) -> None:
    """The reference programs of 20 rows of MBPP."""
    rows = [json.loads(line) for line in asset("datasets/mbpp_sanitized.jsonl").read_text().splitlines()[:20]]
    rewards: dict[int, float] = {}

    async def run(number: int) -> None:
        metadata = rows[number]["metadata"]
        rewards[number] = await code_tests(sample_of(rows[number]["label"], metadata["test_list"], **metadata))

    async with anyio.create_task_group() as tasks:
        for number in range(len(rows)):
            tasks.start_soon(run, number)
    assert rewards == dict.fromkeys(range(20), 1.0)
