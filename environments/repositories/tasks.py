"""The tasks: one module, its tests, the defect and a solution for each. They need Python's standard library only.

:data:`SOLUTIONS` is for checks of the tasks and for scripted programs; no place of a program contains it.
"""

from __future__ import annotations

import difflib

from rollouts.programs.launchers.repository_task import Files, RepositoryTask

__all__ = ["SOLUTIONS", "TASKS"]

_ROWS: list[tuple[str, str, str, tuple[str, str], str, str]] = [
    (
        "slug",
        "`slug` keeps several dashes in a row: `slug('a - b')` should be 'a-b'.",
        "import re\n\n\ndef slug(text):\n    return re.sub('[^a-z0-9]', '-', text.lower()).strip('-')\n",
        ("[^a-z0-9]", "[^a-z0-9]+"),
        "slug('a - b'), 'a-b'",
        "slug('A b!'), 'a-b'",
    ),
    (
        "median",
        "`median` of an even number of values should be the mean of the two in the middle.",
        "def median(values):\n    ordered = sorted(values)\n"
        "    middle = len(ordered) // 2\n    return ordered[middle]\n",
        (
            "    return ordered[middle]\n",
            "    if len(ordered) % 2:\n        return ordered[middle]\n"
            "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
        ),
        "median([4, 1, 3, 2]), 2.5",
        "median([3, 1, 2]), 2",
    ),
    (
        "roman",
        "`roman` writes 4 as IIII; it should be IV, and likewise for 9, 40, 90, 400 and 900.",
        "VALUES = [(1000, 'M'), (500, 'D'), (100, 'C'), (50, 'L'), (10, 'X'), (5, 'V'), (1, 'I')]\n\n\n"
        "def roman(number):\n    text = ''\n    for value, letters in VALUES:\n"
        "        text += letters * (number // value)\n        number %= value\n    return text\n",
        (
            "[(1000, 'M'), (500, 'D'), (100, 'C'), (50, 'L'), (10, 'X'), (5, 'V'), (1, 'I')]",
            "[(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'),\n"
            "          (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]",
        ),
        "roman(1994), 'MCMXCIV'",
        "roman(2023), 'MMXXIII'",
    ),
    (
        "chunks",
        "`chunks` loses the last values when they do not fill a chunk.",
        "def chunks(values, size):\n    return [values[i:i + size] for i in range(0, len(values) - size + 1, size)]\n",
        ("len(values) - size + 1", "len(values)"),
        "chunks([1, 2, 3], 2), [[1, 2], [3]]",
        "chunks([1, 2, 3, 4], 2), [[1, 2], [3, 4]]",
    ),
    (
        "merge",
        "`merge` of nested dictionaries replaces the inner ones; it should merge them, too.",
        "def merge(one, other):\n    return {**one, **other}\n",
        (
            "    return {**one, **other}\n",
            "    both = {**one, **other}\n    for key in one.keys() & other.keys():\n"
            "        if isinstance(one[key], dict) and isinstance(other[key], dict):\n"
            "            both[key] = merge(one[key], other[key])\n    return both\n",
        ),
        "merge({'a': {'b': 1}}, {'a': {'c': 2}}), {'a': {'b': 1, 'c': 2}}",
        "merge({'a': 1}, {'a': 2}), {'a': 2}",
    ),
    (
        "duration",
        "`duration` cannot read hours: `duration('1h30m')` should be 5400.",
        "import re\n\n\ndef duration(text):\n    units = {'m': 60, 's': 1}\n"
        "    return sum(int(count) * units[unit] for count, unit in re.findall('([0-9]+)([ms])', text))\n",
        (
            "    units = {'m': 60, 's': 1}\n"
            "    return sum(int(count) * units[unit] for count, unit in re.findall('([0-9]+)([ms])', text))\n",
            "    units = {'h': 3600, 'm': 60, 's': 1}\n"
            "    return sum(int(count) * units[unit] for count, unit in re.findall('([0-9]+)([hms])', text))\n",
        ),
        "duration('1h30m'), 5400",
        "duration('2m5s'), 125",
    ),
    (
        "brackets",
        "`brackets` calls '([)]' balanced; each bracket must close the one opened last.",
        "def brackets(text):\n    return all(text.count(a) == text.count(b) for a, b in ('()', '[]'))\n",
        (
            "    return all(text.count(a) == text.count(b) for a, b in ('()', '[]'))\n",
            "    pairs, opened = {')': '(', ']': '['}, []\n    for letter in text:\n"
            "        if letter in '([':\n            opened.append(letter)\n"
            "        elif letter in pairs and (not opened or opened.pop() != pairs[letter]):\n"
            "            return False\n    return not opened\n",
        ),
        "brackets('([)]'), False",
        "brackets('([])'), True",
    ),
    (
        "leap",
        "`leap` says that 1900 was a leap year; centuries are leap years only if 400 divides them.",
        "def leap(year):\n    return year % 4 == 0\n",
        ("year % 4 == 0", "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"),
        "leap(1900), False",
        "leap(2000), True",
    ),
    (
        "wrap",
        "`wrap` breaks words in the middle; it should break lines at spaces only.",
        "def wrap(text, width):\n    return [text[i:i + width] for i in range(0, len(text), width)]\n",
        (
            "    return [text[i:i + width] for i in range(0, len(text), width)]\n",
            "    lines = []\n    for word in text.split():\n"
            "        if lines and len(lines[-1]) + 1 + len(word) <= width:\n            lines[-1] += ' ' + word\n"
            "        else:\n            lines.append(word)\n    return lines\n",
        ),
        "wrap('one two three', 7), ['one two', 'three']",
        "wrap('one', 7), ['one']",
    ),
    (
        "version",
        "`newest` compares versions as texts, so that 1.9 is newer than 1.10; compare their numbers.",
        "def newest(versions):\n    return max(versions)\n",
        ("max(versions)", "max(versions, key=lambda text: [int(part) for part in text.split('.')])"),
        "newest(['1.9', '1.10']), '1.10'",
        "newest(['1.2', '1.3']), '1.3'",
    ),
]


def _tests(module: str, function: str, shows: str, keeps: str) -> bytes:
    return f"""import unittest

from {module} import {function}


class Tests(unittest.TestCase):
    def test_defect(self):
        self.assertEqual({shows})

    def test_before(self):
        self.assertEqual({keeps})
""".encode()


def _diff(path: str, before: str, after: str) -> bytes:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")).encode()


def _task(name: str, problem: str, source: str, change: tuple[str, str], shows: str, keeps: str) -> RepositoryTask:
    test_file = f"tests/test_{name}.py"
    tests = _tests(name, shows.partition("(")[0], shows, keeps)
    files = {
        f"{name}.py": source.encode(),
        "tests/__init__.py": b"",
        test_file: tests,
        "README.md": f"# {name}\n\nRun the tests with `python3 -m unittest`.\n".encode(),
        ".gitignore": b"__pycache__/\n",
    }
    return RepositoryTask(
        name=name,
        problem=f"{problem} The code is in {name}.py. Do not change the tests.",
        source=Files(files),
        test_files={"tests/__init__.py": b"", test_file: tests},
        fail_to_pass=f"tests.test_{name}.Tests.test_defect",
        pass_to_pass=f"tests.test_{name}.Tests.test_before",
        reference=_diff(f"{name}.py", source, source.replace(*change)),
        test_seconds=30.0,
    )


TASKS = {row[0]: _task(*row) for row in _ROWS}
"""By name."""
SOLUTIONS = {name: source.replace(*change) for name, _, source, change, _, _ in _ROWS}
"""The mended module of each task."""
