"""Mutation test: small changes of the central modules, each of which their nearest test files must notice.

``scripts/test --mutants [N] [--only GLOB] [--seed S] [--jobs J]`` draws N mutants (200) of the modules of
:data:`NEAREST`, by a fixed seed, and runs the test files of each until one fails. A survivor is a missing test, or a
change without effect. Mutants run in copies of the working tree, which itself is never changed.

Before, the tests run without a mutant, to learn which lines each of them runs: a mutant is given only to tests that run
its statement, the fastest first. ``mutations.py`` has the changes, ``mutant_tests.py`` the tests and ``mutant_crew.py``
the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.faults.mutant_crew import ROOT, Crew
from scripts.faults.mutant_tests import Trial, lines_run_by, play
from scripts.faults.mutations import Mutant, mutants_of

_SEMANTICS = (
    "tests/manager_semantics/test_groups.py",
    "tests/manager_semantics/test_accounting.py",
    "tests/manager_semantics/test_bad_rollouts_are_data.py",
    "tests/manager_semantics/test_cancellation_and_reuse.py",
    "tests/manager_semantics/test_deadlines.py",
    "tests/manager_semantics/test_exhausted_data.py",
    "tests/manager_semantics/test_rewards_before_filters.py",
    "tests/manager_semantics/test_broken_laws_are_crashes.py",
    "tests/manager_semantics/test_call_shapes.py",
    "tests/manager_semantics/test_rare_paths.py",
    "tests/manager_semantics/test_admission.py",
    "tests/training/test_filters.py",
)
_SAMPLERS = ("tests/training/samplers/test_base.py", "tests/training/samplers/test_pass_rate.py")
_EPISODE = (
    "tests/agent/test_episode.py",
    "tests/agent/test_loop.py",
    "tests/agent/test_raw_continuation.py",
    "tests/agent/test_turn_log.py",
    "tests/agent/test_images.py",
    "tests/training/test_continuation.py",
    "tests/seats/test_laws.py",
)
_RUN_JOURNAL = ("tests/runs/test_run_journal_laws.py", "tests/runs/test_run_journal.py")
NEAREST: dict[str, tuple[str, ...]] = {
    "rollouts/trajectory.py": (
        "tests/test_trajectory.py",
        "tests/agent/test_turn_log.py",
        "tests/test_token_exactness.py",
    ),
    "rollouts/agent/episode.py": _EPISODE,
    "rollouts/agent/budget.py": _EPISODE,
    "rollouts/agent/guarded_environment.py": _EPISODE,
    "rollouts/agent/replies.py": _EPISODE,
    "rollouts/agent/turn_recorder.py": _EPISODE,
    "rollouts/renderer/bridge.py": ("tests/renderer/test_bridge_text.py", "tests/renderer/test_bridge.py"),
    "rollouts/renderer/bridge_forms.py": ("tests/renderer/test_bridge_text.py",),
    "rollouts/runs/run_journal.py": _RUN_JOURNAL,
    "rollouts/runs/run_history.py": _RUN_JOURNAL,
    "rollouts/runs/journal.py": ("tests/runs/test_journal.py", "tests/runs/test_damage.py"),
    "rollouts/training/manager.py": (
        "tests/training/test_fail_fast.py",
        "tests/training/test_manager.py",
        "tests/training/test_staleness.py",
        "tests/training/test_failures.py",
        *_SEMANTICS,
    ),
    "rollouts/training/fail_fast.py": ("tests/training/test_fail_fast.py", *_SEMANTICS),
    "rollouts/training/batch_report.py": (
        "tests/training/test_staleness.py",
        "tests/training/test_length_bias.py",
        *_SEMANTICS,
    ),
    "rollouts/training/rollout_log.py": ("tests/training/test_manager.py", *_SEMANTICS),
    "rollouts/training/ledger.py": ("tests/training/test_ledger.py", *_SEMANTICS),
    "rollouts/training/running_groups.py": ("tests/training/test_manager.py", *_SEMANTICS),
    "rollouts/training/failed_samples.py": ("tests/training/test_rollout_attempt.py",),
    "rollouts/training/sample_validator.py": ("tests/training/test_rollout_attempt.py",),
    "rollouts/training/group_runner.py": (
        "tests/training/test_failures.py",
        "tests/training/test_rollout_attempt.py",
        *_SEMANTICS,
    ),
    "rollouts/training/rollout_attempt.py": (
        "tests/training/test_rollout_attempt.py",
        "tests/training/test_failures.py",
        *_SEMANTICS,
    ),
    "rollouts/training/staleness.py": ("tests/training/test_staleness.py",),
    "rollouts/training/buffer_state.py": ("tests/training/test_data_buffer.py",),
    "rollouts/training/data_buffer.py": ("tests/training/test_data_buffer.py", *_SAMPLERS, *_SEMANTICS),
}
"""Test files of each module, or of the modules of a glob, the fastest first."""

PRELOADED = (
    "anyio._backends._asyncio",
    "hypothesis",
    "jinja2",
    "msgspec",
    "numpy",
    "PIL.Image",
    "pytest_asyncio",
    "transformers",
)
"""Modules outside the project that most test files import."""

LEAST_SECONDS = 60
"""Deadline of one test, and of all tests of a mutant; ten and five times what they take without it are added."""

Table = Mapping[str, Sequence[str]]


def drawn(
    count: int, seed: int, *, only: str = "*", table: Table = NEAREST, root: Path = ROOT
) -> list[tuple[Mutant, Sequence[str]]]:
    """``count`` mutants of the table's modules, with the test files of each; the same ones for the same seed."""
    mutants: list[tuple[Mutant, Sequence[str]]] = []
    for pattern, tests in table.items():
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if fnmatch.fnmatch(name, only):
                mutants += [(mutant, tests) for mutant in mutants_of(name, path.read_text(encoding="utf-8"))]
    chosen = sorted(random.Random(seed).sample(range(len(mutants)), min(count, len(mutants))))
    return [mutants[number] for number in chosen]


# -- running them ------------------------------------------------------------------------------------------------------


def lines_of(crew: Crew, files: Iterable[str], modules: Sequence[str]) -> dict[str, Any]:
    """Seconds of each test, and the lines of the modules that it runs; all tests must pass."""
    found: dict[str, Any] = {}
    for file in files:

        def work(tree: Path, file: str = file) -> object:
            return lines_run_by(tree, file, modules)

        def done(tree: Path, result: str, file: str = file) -> None:
            lines = json.loads(result or "null")
            if lines is None:
                print(tree.with_suffix(".log").read_text(errors="replace"))
                raise SystemExit(f"scripts/test --mutants: {file} fails without a mutant")
            found.update(lines)
            print(f"{file}: {len(lines)} tests", flush=True)

        crew.start(work, done, seconds=3600)
    crew.finish()
    return found


def covering(mutant: Mutant, files: Sequence[str], lines: Mapping[str, Any]) -> Trial:
    """The tests in some files that run the statement of a mutant, the fastest first.

    All of them, if none does: a process that a test starts may run it.
    """
    all_tests = sorted((lines[name][0], name) for name in lines if name.partition("::")[0] in files)
    ran = [(seconds, name) for seconds, name in all_tests if mutant.at_import or _runs(lines[name][1], mutant)]
    ran = ran or all_tests
    times = [seconds for seconds, _ in ran]
    tests = tuple(name for _, name in ran)
    return Trial(mutant, tests, LEAST_SECONDS + 5 * sum(times), LEAST_SECONDS + 10 * max(times, default=0))


def _runs(executed: Iterable[tuple[str, int]], mutant: Mutant) -> bool:
    return any(path == mutant.path and line in mutant.lines for path, line in executed)


def run(crew: Crew, trials: Sequence[Trial], jobs: int) -> dict[Mutant, str]:
    """The first test that fails with each mutant, or "" where it survives; prints each as it ends."""
    results: dict[Mutant, str] = {}
    terminal = os.dup(sys.stdout.fileno())

    def found(trial: Trial, failed: str) -> None:
        end = failed or f"SURVIVES {len(trial.tests)} tests\n{trial.mutant.diff}"
        os.write(terminal, f"{trial.mutant.path}:{trial.mutant.line} {end}\n".encode())

    for part in [trials[number::jobs] for number in range(jobs)]:

        def work(tree: Path, part: Sequence[Trial] = part) -> object:
            failed: dict[int, str] = {}

            def keep(trial: Trial, name: str) -> None:
                failed[part.index(trial)] = name
                found(trial, name)

            play(tree, part, keep)
            return [failed[number] for number in range(len(part))]

        def done(tree: Path, result: str, part: Sequence[Trial] = part) -> None:
            if not result:
                print(tree.with_suffix(".log").read_text(errors="replace"))
                raise SystemExit("scripts/test --mutants: a process died")
            results.update(zip((trial.mutant for trial in part), json.loads(result), strict=True))

        crew.start(work, done, seconds=24 * 3600)
    crew.finish()
    os.close(terminal)
    return results


def report(results: Mapping[Mutant, str]) -> str:
    """The survivors, each with its place and its change."""
    survivors = sorted((mutant for mutant, failed in results.items() if not failed), key=lambda m: (m.path, m.start))
    lines = [f"{mutant.path}:{mutant.line}\n{mutant.diff}\n" for mutant in survivors]
    noticed = len(results) - len(survivors)
    return "\n".join([*lines, f"{noticed} of {len(results)} mutants are noticed; {len(survivors)} survive"])


def main(arguments: Sequence[str] | None = None, table: Table = NEAREST, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="scripts/test --mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=200, metavar="N", help="number of mutants (200)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="modules to draw from, by their path")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed draws other mutants (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="mutants at a time (2)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("ROLLOUTS_TEST_ASSETS", str(ROOT.parent / "shared" / "assets"))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    drew = drawn(options.count, options.seed, only=options.only, table=table, root=root)
    with Crew(options.jobs, root) as crew:
        files = dict.fromkeys(name for _, names in drew for name in names)
        print(f"{len(drew)} mutants; first {len(files)} test files without one", flush=True)
        lines = lines_of(crew, files, list({mutant.path for mutant, _ in drew}))
        trials = [covering(mutant, names, lines) for mutant, names in drew]
        print(report(run(crew, trials, options.jobs)))


if __name__ == "__main__":
    main()
