"""``scripts/test --mutants``: which changes are made, which tests get them, and what is reported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.faults.mutants import NEAREST, covering, drawn
from scripts.faults.mutations import mutants_of

ROOT = Path(__file__).parents[3]


def changed(source: str) -> list[str]:
    """The changed lines of all mutants of a module."""
    return [mutant.diff.partition("\n+")[2].strip() for mutant in mutants_of("a.py", textwrap.dedent(source))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a not in b", ["x = a in b"]),
        ("x = a is b", ["x = a is not b"]),
        ("x = (a) + (b)", ["x = (a) - (b)"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = (a)"]),
        ("x = [1, True, 'é', 'two words']", ["x = [2, True, 'é', 'two words']"]),
        ("x = b if a else c", ["x = b if not (a) else c"]),
        ("f(a, *b)", ["pass"]),
        ("x = f(a, b, c)", ["x = f(b, a, c)"]),
        ("a.b = c", ["pass"]),
        ("x += a", ["pass", "x -= a"]),
        ("def f(a: 'b') -> 'c':\n    return a", ["return None"]),
        ("raise f(1)", ["pass"]),
        ("for x in a:\n    continue", ["break"]),
    ],
)
def test_each_kind_of_statement_has_its_changes(source: str, expected: list[str]) -> None:
    """One at a time; the rest of the module stays as it is written."""
    assert [line for line in changed(source) if line in expected] == expected


def test_strings_and_bools_are_changed_where_they_are_names() -> None:
    """Texts for people are not."""
    assert changed('x = [True, "kept", "é", "two words"]') == [
        'x = [False, "kept", "é", "two words"]',
        'x = [True, "kept_", "é", "two words"]',
        'x = [True, "kept", "é_", "two words"]',
    ]


def test_texts_annotations_and_assertions_are_not_changed() -> None:
    """Nor are representations, messages of errors, and the exported names."""
    source = '''
        """Doc."""
        __all__ = ["a"]
        x: "b"
        assert x == 1
        class A:
            """Doc."""
            def __repr__(self):
                return "a"
            def f(self, x: "c") -> "d":
                """Doc."""
                raise ValueError(f"{x + 1}", 1)
    '''
    assert changed(source) == ["pass"]


def test_a_mutant_has_the_lines_of_its_statement() -> None:
    """Of a compound one the head; a default value is evaluated when the module is imported."""
    source = (
        "def f(a=1):\n    while (a\n           < 2):\n        a = (3\n             )\n        a = 0\n    return a\n"
    )
    found = {mutant.replacement: (list(mutant.lines), mutant.at_import) for mutant in mutants_of("a.py", source)}
    assert found["2"] == ([1, 2], True)
    assert found["<="] == ([2, 3, 4], False)
    assert found["4"] == ([4, 5], False)
    assert found["return None"] == ([7], False)


def test_a_mutant_goes_to_the_tests_that_run_its_statement() -> None:
    """The fastest of the given files first; a mutant that runs at import, or in none, goes to all their tests."""
    (default, second) = mutants_of("a.py", "def f(a=1):\n    x = a + 0\n    x = a\n")[:2]
    lines = {
        "t.py::slow": [2.0, [["a.py", 2]]],
        "t.py::fast": [1.0, [["a.py", 2], ["a.py", 3]]],
        "t.py::other_line": [0.5, [["a.py", 3]]],
        "t.py::other_module": [0.6, [["b.py", 2]]],
        "u.py::other_file": [0.1, [["a.py", 2]]],
        "v.py::nothing": [0.3, []],
    }
    assert list(covering(second, ["v.py"], lines).tests) == ["v.py::nothing"]
    assert list(covering(second, ["t.py"], lines).tests) == ["t.py::fast", "t.py::slow"]
    assert list(covering(default, ["t.py"], lines).tests) == [
        f"t.py::{n}" for n in ("other_line", "other_module", "fast", "slow")
    ]


def test_the_same_seed_draws_the_same_mutants() -> None:
    """As many as asked for, of the modules asked for."""
    first = drawn(20, 1, only="*/staleness.py")
    assert len(first) == 20
    assert first == drawn(20, 1, only="*/staleness.py") != drawn(20, 2, only="*/staleness.py")
    assert {mutant.path for mutant, _ in first} == {"rollouts/training/staleness.py"}


@pytest.mark.parametrize(("pattern", "tests"), NEAREST.items(), ids=NEAREST)
def test_the_table_names_modules_and_test_files(pattern: str, tests: tuple[str, ...]) -> None:
    """A module that was moved or split needs another line."""
    assert list(ROOT.glob(pattern))
    assert all((ROOT / name).is_file() for name in tests)


_PROJECT = {
    "small.py": """
        LIMIT = 3

        def larger(a, b, name="first"):
            both = [(lambda: a), (lambda: b)]
            return a > b

        def to_the_limit(a):
            return LIMIT - a

        def unused(a):
            return a + 1
    """,
    "test_small.py": """
        from small import larger, to_the_limit

        def test_two_is_larger_than_one():
            assert larger(2, 1)
            assert not larger(1, 2)

        def test_it_is_two_from_one_to_three():
            assert to_the_limit(1) == 2
    """,
    "test_broken.py": """
        def test_broken():
            raise ValueError("broken from the start")
    """,
}


def _run(folder: Path, table: dict[str, list[str]]) -> subprocess.CompletedProcess[str]:
    """Run all mutants of a small project, with the test files of a table."""
    for name, text in _PROJECT.items():
        (folder / name).write_text(textwrap.dedent(text))
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    main = f"main(['99', '--jobs', '1'], {table!r}, Path({str(folder)!r}))"
    code = f"from pathlib import Path; import scripts.faults.mutants as m; m.PRELOADED = (); m.{main}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


_SURVIVORS = """
small.py:4
-def larger(a, b, name="first"):
+def larger(a, b, name="first_"):

small.py:6
-    return a > b
+    return a >= b

small.py:12
-    return a + 1
+    return None

small.py:12
-    return a + 1
+    return a - 1

small.py:12
-    return a + 1
+    return a + 2

4 of 9 mutants are noticed; 5 survive
"""


def test_survivors_are_reported_with_their_change(tmp_path: Path) -> None:
    """Of functions, defaults and constants; the working tree stays as it was."""
    done = _run(tmp_path, {"*small.py": ["test_small.py"]})
    assert done.returncode == 0, done.stderr
    assert "\nsmall.py:2 test_small.py::test_it_is_two_from_one_to_three\n" in done.stdout
    assert "\nsmall.py:6 test_small.py::test_two_is_larger_than_one\n" in done.stdout
    assert done.stdout.endswith(_SURVIVORS)
    assert (tmp_path / "small.py").read_text() == textwrap.dedent(_PROJECT["small.py"])


def test_tests_that_fail_without_a_mutant_are_said(tmp_path: Path) -> None:
    """With what they print; nothing is mutated."""
    done = _run(tmp_path, {"small.py": ["test_broken.py"]})
    assert done.returncode == 1
    assert "broken from the start" in done.stdout
    assert done.stderr == "scripts/test --mutants: test_broken.py fails without a mutant\n"


_HANG = """
import sys, time
from pathlib import Path
from scripts.faults.mutant_crew import Crew
from scripts.faults.mutant_tests import Trial, play
from scripts.faults.mutations import mutants_of
with Crew(1, Path(sys.argv[1])) as crew:
    source = Path(sys.argv[1], "small.py").read_text()
    mutants = {mutant.replacement: mutant for mutant in mutants_of("small.py", source)}
    trials = [Trial(mutants[text], ("test_small.py::test_three_rounds",), *limits)
        for text, limits in (("-", (3.0, 60.0)), ("-", (60.0, 3.0)), ("<=", (60.0, 60.0)))]
    def work(tree):
        found = []
        play(tree, trials, lambda trial, failed: found.append(failed))
        return found
    crew.start(work, lambda tree, result: print(result), seconds=600)
    crew.finish()
"""


def test_a_mutant_that_hangs_is_noticed(tmp_path: Path) -> None:
    """At its deadline or at that of a test; the next one is played."""
    (tmp_path / "small.py").write_text("def rounds(a):\n    while a < 3:\n        a += 1\n    return a\n")
    test = "from small import rounds\ndef test_three_rounds():\n    assert rounds(0) == 3\n"
    (tmp_path / "test_small.py").write_text(test)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    line = [sys.executable, "-c", _HANG, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == '["over 3 s", "test_small.py::test_three_rounds", "test_small.py::test_three_rounds"]\n'


_CREW = """
import os, sys, time
from pathlib import Path
from scripts.faults.mutant_crew import Crew
results = []
with Crew(2, Path(sys.argv[1])) as crew:
    tree = lambda tree, result: results.append(result)
    crew.start(lambda tree: time.sleep(600), tree, seconds=0.2)
    crew.start(lambda tree: os._exit(0), tree, seconds=60)
    crew.start(lambda tree: [*sorted(os.listdir()), *os.listdir("link")], tree, seconds=60)
    crew.finish()
    trees = list(crew._folder.iterdir())
print(sorted(results), any(path.exists() for path in trees))
"""


def test_a_process_that_hangs_or_dies_has_no_result(tmp_path: Path) -> None:
    """The others continue in copies, which hold the files that git does not ignore, and are removed at the end."""
    for name, text in {"a.py": "", "b.pyc": "", ".gitignore": "*.pyc\n", "folder/c.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("folder")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    line = [sys.executable, "-c", _CREW, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == """['', '', '[".gitignore", "a.py", "folder", "link", "c.py"]'] False\n"""


_ENDED = """
import os, signal, sys, time
from pathlib import Path
from scripts.faults.mutant_crew import Crew
def work(tree):
    if not os.fork():
        time.sleep(600)
    os.write(terminal, f"{os.getpgid(0)} {tree}\\n".encode())
    time.sleep(600)
terminal = os.dup(1)
with Crew(1, Path(sys.argv[1])) as crew:
    crew.start(work, print, seconds=600)
    crew.finish()
"""


def test_no_process_outlives_a_crew_that_is_terminated(tmp_path: Path) -> None:
    """Nor do children of its processes, nor a copy."""
    (tmp_path / "a.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    line = [sys.executable, "-c", _ENDED, str(tmp_path)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as crew:
        assert crew.stdout is not None
        group, tree = crew.stdout.readline().split()
        crew.terminate()
        try:
            crew.communicate(timeout=60)  # until no process is left that could write
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGKILL)
    assert crew.returncode == 128 + signal.SIGTERM
    assert not Path(tree).parent.exists()
