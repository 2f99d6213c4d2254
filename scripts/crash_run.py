"""Kill a real run with SIGKILL at random moments, resume it until it is done, and count what was lost.

The engine lives on; the run (``rollouts run`` and ``rollouts run --resume``) is forked from this process and killed
again and again: after a random time, or the moment its journal is seen growing. After every fourth kill the first bytes
of a record are added to the journal, as a death inside a write leaves them. At the end the same run is made without a
kill, and both are compared. Exits with 1 if anything was lost, doubled, skipped or repeated.

Whether what is kept depends on its length is tested against a third run without a kill, over the same prompts, that
samples with another seed: nothing but chance makes the two alike. The same test of what would have been kept, had each
kill thrown away what was in flight, is printed beside it: it tells whether the test could have failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import transformers  # noqa: F401 - loaded once, for all that are forked

from rollouts.commands import main as rollouts
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import READY
from rollouts.renderer import renderer_for
from rollouts.runs.folder import Row, read_info, read_rows
from rollouts.runs.journal import read_journal
from rollouts.runs.run_journal import RunHistory
from rollouts.runs.verify import verify_run
from scripts.crash_recipe import recipe

ROOT = Path(__file__).resolve().parents[1]
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process forks

BIASED = 0.001
"""A run without bias fails by chance once in 500: of the two tests each once in 1,000."""

RECIPE = ROOT / "scripts" / "crash_recipe.py"


@contextlib.contextmanager
def engine(log: Path) -> Iterator[str]:
    """The embedded engine in a process of its own; gives its URL."""
    command = [sys.executable, "-m", "rollouts", "serve", "--port", "0", "--slots", "48", "--stop-with-stdin"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield next(line for line in process.stdout if line.startswith(READY)).removeprefix(READY).strip()
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def forked(arguments: list[str], log: Path) -> int:
    """A command of ours in a child process; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = rollouts(arguments)
    finally:
        os._exit(code)


def finished_in(run: Path) -> tuple[dict[int, int], RunHistory | None]:
    """Index and token checksum of every rollout that the journal calls finished."""
    if not (run / "journal").is_dir():
        return {}, None
    history = RunHistory.read(run / "journal")
    return {index: 0 for index, rollout in history.rollouts.items() if rollout.finished}, history


def crc(tokens: object) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def stored(run: Path) -> Counter[tuple[int, int]]:
    """``(index, checksum of the tokens)`` of every sample in the run's files."""
    return Counter((row.data["index"], crc(row.data["tokens"])) for row in read_rows(run, "all"))


def kill_one_life(pid: int, run: Path, rng: random.Random, longest: float) -> bool:
    """Kill a child at a random moment; False if it had ended by itself."""
    at_growth = rng.random() < 0.5
    until = time.monotonic() + rng.uniform(0.05, longest)
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    if at_growth:  # the moment the journal grows: between a write and what follows from it
        size, give_up = journal_size(run), time.monotonic() + 1.0
        while journal_size(run) == size and time.monotonic() < give_up:
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def journal_size(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "journal").glob("segment-*"))


def tear(run: Path, rng: random.Random, torn_at: int) -> bool:
    """Add the beginning of a record to the journal, as a write that was cut off leaves it.

    Not after another one (the journal is as long as that left it): whoever writes has cut off what was torn before.
    """
    if journal_size(run) == torn_at:
        return False
    segments = sorted((run / "journal").glob("segment-*"))
    entries = list(read_journal(run / "journal")) if segments else []
    if not entries or entries[-1].offset.segment != len(segments) - 1:
        return False
    with segments[-1].open("r+b") as file:
        file.seek(entries[-1].offset.offset)
        record = file.read()
        file.write(record[: rng.randrange(1, len(record))])
    return True


def permutation_test(first: np.ndarray, second: np.ndarray, rounds: int = 5000) -> float:
    """Probability of a difference of means at least as large, if the two were drawn from one set of lengths."""
    rng = np.random.default_rng(0)
    both = np.concatenate([first, second])
    seen = abs(first.mean() - second.mean())
    hits = 0
    for _ in range(rounds):
        rng.shuffle(both)
        hits += abs(both[: len(first)].mean() - both[len(first) :].mean()) >= seen - 1e-12
    return (hits + 1) / (rounds + 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/crash_test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="how often (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--longest", type=float, default=2.5, help="seconds of the longest life (2.5)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="crash_test_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with engine(folder / "engine.log") as url:
            return crash(args, folder, url)
    finally:
        if args.keep is None:
            shutil.rmtree(folder)


def crash(args: argparse.Namespace, folder: Path, url: str) -> int:
    rng = random.Random(args.seed)
    run, witness, log = folder / "run", folder / "witness", folder / "log"
    base = ["run", str(RECIPE), "--endpoint", url, "--model", str(DEMO_MODEL), "--format", "jsonl"]
    options = ["--set", f"witness={witness}"]
    renderer_for(str(DEMO_MODEL))  # so that what it imports is loaded before the first fork
    finished: dict[int, int] = {}
    """Life after whose death each index was seen finished in the journal."""
    lives: dict[int, int] = {}
    caught: set[int] = set()
    """Rollouts that a kill found in flight."""
    kills = torn = torn_at = going_on = 0
    began = time.monotonic()
    while kills < args.kills:
        where = ["--resume", str(run)] if (run / "run.json").exists() else ["--out", str(run), "--overwrite"]
        pid = forked([*base, *options, *where, "--batches", "1000000"], log)
        lives[pid] = kills
        if not kill_one_life(pid, run, rng, args.longest):
            print(f"the run ended by itself; the end of {log}:\n{log.read_text()[-2000:]}")
            return 1
        found, history = finished_in(run)
        lost_now = set(finished) - set(found)
        if lost_now:
            print(f"kill {kills}: finished rollouts {sorted(lost_now)[:10]} are no longer in the journal")
            return 1
        for index in found.keys() - finished.keys():
            finished[index] = kills
        if history is not None:
            going_on += len(history.turns)
            caught |= {number * 4 + k for number in history.unsettled for k in range(4)} - found.keys()
        kills += 1
        if kills % 4 == 0 and (run / "journal").is_dir() and tear(run, rng, torn_at):
            torn, torn_at = torn + 1, journal_size(run)
        if kills % 20 == 0:
            print(f"{kills} kills, {time.monotonic() - began:.0f} s: {len(finished)} rollouts finished", flush=True)
    history = finished_in(run)[1]
    assert history is not None
    batches = str(len(history.sealed) + 1)
    reference, other = folder / "reference", folder / "other"
    afresh = [*base, "--set", f"witness={folder / 'reference_witness'}", "--batches", batches]
    for arguments in (
        [*base, *options, "--resume", str(run), "--batches", batches],
        [*afresh, "--out", str(reference)],
        [*afresh, "--set", "sampling_seed=1", "--out", str(other)],
    ):
        _, status = os.waitpid(forked(arguments, log), 0)
        if status:
            print(f"the last run ended with {status}; the end of {log}:\n{log.read_text()[-2000:]}")
            return 1
    print(
        f"{kills} kills in {time.monotonic() - began:.0f} s, {torn} with a half-written record added; {batches} batches"
    )
    bad = compare(run, reference, witness, finished, lives, going_on) + compare_lengths(run, other, caught)
    print("FAILED" if bad else "passed")
    return 1 if bad else 0


def taken_in_the_last_life(run: Path) -> set[int]:
    taken: set[int] = set()
    for entry in read_journal(run / "journal"):
        if entry.kind == "run":
            taken = set()
        elif entry.kind == "taken":
            taken.add(entry.fields["group"])
    return taken


def compare(
    run: Path, reference: Path, witness: Path, finished: dict[int, int], lives: dict[int, int], going_on: int
) -> int:
    rows = list(read_rows(run, "all"))
    copies = Counter(row.data["index"] for row in rows)
    report = verify_run(run)
    bad = 0

    def tell(what: str, count: int) -> None:
        nonlocal bad
        bad += count
        print(f"{count} {what}")

    history = finished_in(run)[1]
    assert history is not None
    handed_back = {number * 4 + k for number in history.unsettled for k in range(4)}
    tell("finished rollouts lost", len([i for i in finished if i not in copies and i not in handed_back]))
    tell("rollouts doubled", sum(count > 1 for count in copies.values()))
    again = window = 0
    seen: dict[int, int] = {}
    for line in witness.read_text().splitlines():
        pid, index, _ = map(int, line.split())
        life = lives.get(pid, len(lives))
        again += index in finished and life > finished[index]
        window += index in seen and not (index in finished and life > finished[index])
        seen[index] = life
    tell("finished rollouts generated again", again)
    print(f"  ({window} were scored a second time, because the kill came between their reward and their record)")
    groups = {row.data["group_index"]: row.data["prompt"] for row in rows}
    buffer = recipe(Endpoint(model=str(DEMO_MODEL)), witness=witness).data_buffer
    expected = {prompt.group_index: prompt.prompt for prompt in buffer.get_prompts(history.groups)}
    settled = set(expected) - set(history.unsettled)
    # What came to no end must have been taken again by the last life: it was in flight when the last batch was full.
    tell("prompts skipped", len(settled - set(groups)) + len(set(history.unsettled) - taken_in_the_last_life(run)))
    tell("prompts repeated or exchanged", sum(expected.get(number) != prompt for number, prompt in groups.items()))
    tell("violations found by verify", len(report.violations))
    print("\n".join(f"  {line}" for line in [*str(report).splitlines(), *map(str, report.violations[:5])]))
    accounting = read_info(run)["accounting"]
    tell("by which the accounting does not add up", abs(2 * accounting["taken"] - sum(accounting.values())))
    print(f"  {accounting}")
    went_on = sum("turns_before_resume" in row.data["metrics"] for row in rows)
    print(f"{went_on} rollouts went on from their last finished turn ({going_on} were in the middle when killed)")
    other = {row.data["index"]: row.data["tokens"] for row in read_rows(reference, "all")}
    both = [row for row in rows if row.data["index"] in other]
    same = sum(other[row.data["index"]] == row.data["tokens"] for row in both)
    print(f"{same} of {len(both)} rollouts have the same tokens as in the run without a kill")
    return bad


# -- bias: is what is kept another set than without a kill? -----------------------------------------------------------


def compare_lengths(run: Path, other: Path, caught: set[int]) -> int:
    """Whether the lengths of what the killed run has are those of a run without a kill that samples by another seed.

    A group counts once, with the mean of its rollouts: they have a prompt in common.
    """
    mine, theirs = list(read_rows(run, "all")), list(read_rows(other, "all"))
    uncaught = [row for row in mine if row.data["index"] not in caught]
    first, second = (np.array(list(lengths_of(rows, "kept").values())) for rows in (mine, theirs))
    bad = tell_lengths("groups kept", first, second, permutation_test(first, second), asserted=True)
    for name, rows, asserted in (
        ("groups played, pairs of one prompt", mine, True),
        (f"the same without the {len(mine) - len(uncaught)} rollouts that a kill found in flight", uncaught, False),
    ):
        found, wanted = lengths_of(rows), lengths_of(theirs)
        numbers = sorted(found.keys() & wanted.keys())
        first, second = (np.array([each[number] for number in numbers]) for each in (found, wanted))
        bad += tell_lengths(name, first, second, pair_test(first - second), asserted=asserted)
    print("  (the last line is of a run that throws away what is in flight: the test has seen that if p is small)")
    return bad


def lengths_of(rows: list[Row], outcome: str | None = None) -> dict[int, float]:
    """Mean number of sampled tokens of each group's rollouts."""
    lengths: dict[int, list[int]] = {}
    for row in rows:
        if outcome in (None, row.data["outcome"]):
            lengths.setdefault(row.data["group_index"], []).append(sum(row.data["loss_mask"]))
    return {number: float(np.mean(found)) for number, found in lengths.items()}


def tell_lengths(name: str, first: np.ndarray, second: np.ndarray, p: float, *, asserted: bool) -> int:
    print(
        f"sampled tokens a rollout, {name}: {first.mean():.2f} with kills (n={len(first)}), {second.mean():.2f} by "
        f"another seed and without (n={len(second)}), permutation test p = {p:.4f}"
    )
    return int(asserted and p < BIASED)


def pair_test(differences: np.ndarray, rounds: int = 5000) -> float:
    """Probability of a mean at least as far from 0, if the sign of each difference were a matter of chance."""
    rng = np.random.default_rng(0)
    seen = abs(differences.mean())
    signs = rng.choice([-1.0, 1.0], size=(rounds, len(differences)))
    hits = int((abs((signs * differences).mean(axis=1)) >= seen - 1e-12).sum())
    return (hits + 1) / (rounds + 1)


if __name__ == "__main__":
    sys.exit(main())
