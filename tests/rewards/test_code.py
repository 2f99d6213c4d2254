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
from rollouts.rewards import code_tests
from rollouts.rewards.code import code_of
from rollouts.training import Sample

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


CHEATS = {
    "walks frames": """
import sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, str) and len(value) == 32: sys.stdout.write("\\n" + value); raise SystemExit
    frame = frame.f_back
def double(x): return 4
""",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __lt__(self, other): return True
    def __contains__(self, other): return True
def double(x): return Any()
""",
    "equals everything, by the library": """
from unittest import mock
def double(x): return mock.ANY
""",
    "replaces what the tests compare with": """
def set(items): return 0
def abs(x): return 0
def isinstance(*a): return True
class math:
    @staticmethod
    def isclose(*a): return True
def double(x): return 3
""",
    "writes to every descriptor": """
import os
for number in range(3, 64):
    try: os.write(number, b'{"result": true}\\n' * 50)
    except OSError: pass
def double(x): return 4
""",
    "ends the process in a call": """
import os
def double(x): os._exit(0)
""",
}
TOUGH = [
    "assert double(2) == 5",
    "assert 5 == double(2)",
    "assert abs(double(2) - 5) < 1e-9",
    "import math\nassert math.isclose(double(2), 5)",
    "assert set([double(2)]) == {5}",
    "assert 5 in [double(2)]",
    "assert isinstance(double(2), bytes)",
    "assert double(2) is True or False",
]


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_program_cannot_forge_its_tests(cheat: str) -> None:
    """Hardening 21: none of these tests holds for a program that does not know the answer."""
    assert await code_tests(sample_of(CHEATS[cheat], TOUGH), share=True) == 0.0


PROGRAM = """
import collections, math
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
class Empty(ValueError): pass
Point = collections.namedtuple("Point", "x y")
def sort_in_place(items): items.sort()
def apply(function, *items, **options): return [function(item) for item in items]
def squares(n):
    for i in range(n): yield i * i
def fail(): raise Empty("no", 3)
def count(text): return collections.Counter(text)
def same(value): return value
def left(node): return node.left.value
def area(r): return math.pi * r * r
def sum(a, b): return a + b
LIMIT = 10 ** 30
"""
USES = [
    "s = Stack(1)\ns.push(2).push(3)\nassert len(s) == 3 and list(s) == [1, 2, 3] and s.items[0] == 1 and 2 in s",
    "assert isinstance(Stack(), Stack) and Stack(1) == Stack(1) and Stack(1) != Stack(2)",
    "assert (Stack(1) + Stack(2)).items == [1, 2]",
    "a = [3, 1, 2]\nsort_in_place(a)\nassert a == [1, 2, 3]",
    "n = 2\nassert apply(lambda x: x * n, 1, 2) == [2, 4] and apply(str, 1) == ['1']",
    "assert list(squares(3)) == [0, 1, 4]",
    "try:\n    fail()\nexcept Empty as error:\n    assert error.args == ('no', 3)\nelse:\n    assert False",
    "try:\n    fail()\nexcept ValueError:\n    pass",
    "assert count('aab') == {'a': 2, 'b': 1} and Point(1, 2) == (1, 2)",
    "v = [None, 1.5, 'é\\n', (1, {2: {3}}), b'\\xff', 2j, range(3), frozenset('a'), LIMIT]\nassert same(v) == v",
    "class Node:\n    def __init__(self, value, left=None): self.value, self.left = value, left\n"
    "assert left(Node(1, Node(2))) == 2",
    "assert math.isclose(area(1), math.pi)",
    "assert sum(10, 15) == 25",
    "assert same(float('nan')) != same(float('nan')) and same(float('inf')) == float('inf')",
]


async def test_tests_use_a_program_as_if_it_were_there() -> None:
    """Classes, callbacks, generators, errors, arguments changed in place, and objects of the tests."""
    for use in USES:
        assert await code_tests(sample_of(PROGRAM, [use])) == 1.0, use


async def test_a_program_reads_no_private_attribute_of_the_tests() -> None:
    """A callback leads to no frame or global of the process of the tests."""
    code = "def use(function):\n    return function.__globals__['answer']"
    test = "answer = 42\nassert use(lambda: 0) == 42"
    assert await code_tests(sample_of(code, [test])) == 0.0


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
    long = [{"input": "", "output": "7" * 100_000}]  # more than is kept of a program's output otherwise
    assert await code_tests(sample_of("print('7' * 100_000)", long)) == 1.0


def test_the_code_of_a_reply() -> None:
    """The last block that may be Python, also among blocks of other languages; a reply that is a program; else none."""
    assert code_of("```\na\n```\n```py\nb\n```") == "b\n"
    assert code_of("```bash\npip install a\n```\n```python\na\n```\nIt prints\n```text\n1\n```\nand `b`.") == "a\n"
    assert code_of("```Python3\r\na\r\n```") == "a\r\n"
    assert code_of("print(1)") == "print(1)"
    assert code_of("I do not know.") is None
    assert code_of("") is None


@pytest.mark.parametrize("imports", ["import math", ["import math"]], ids=repr)
async def test_the_imports_of_tests_are_text_or_lines(imports: Any) -> None:
    """Text is not read as one import for each of its characters, which no program would pass."""
    sample = sample_of("def double(x): return 2 * x", ["assert math.isclose(double(2), 4)"], test_imports=imports)
    assert await code_tests(sample) == 1.0


async def test_tests_whose_imports_are_missing_are_a_failure() -> None:
    """Never a reward of 0, which would blame the program."""
    sample = sample_of("def double(x): return 2 * x", ["assert double(2) == 4"], test_imports=["import no_such_module"])
    with pytest.raises(RewardFailure, match=r"test_imports.*no_such_module"):
        await code_tests(sample)


@pytest.mark.parametrize("tests", [None, [], "assert True", [""], [3], [{"input": "1"}], ["assert ("]], ids=repr)
async def test_invalid_tests_are_a_failure(tests: Any) -> None:
    """Never a reward of 0, which would blame the program."""
    with pytest.raises(RewardFailure, match=r"metadata\['test_list'\].*expected a list of asserts"):
        await code_tests(sample_of("def double(x): ...", tests))


async def test_real_solutions_pass_their_tests(asset: Callable[[str], Path]) -> None:
    """The reference programs of 8 rows of MBPP."""
    rows = [json.loads(line) for line in asset("datasets/mbpp_sanitized.jsonl").read_text().splitlines()[:8]]
    rewards: dict[int, float] = {}

    async def run(number: int) -> None:
        metadata = rows[number]["metadata"]
        rewards[number] = await code_tests(sample_of(rows[number]["label"], metadata["test_list"], **metadata))

    async with anyio.create_task_group() as tasks:
        for number in range(len(rows)):
            tasks.start_soon(run, number)
    assert rewards == dict.fromkeys(range(8), 1.0)
