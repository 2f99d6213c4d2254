"""Kill a real run with SIGKILL at random moments, resume it until it is done, and count what was lost.

The engine keeps running; the run (``rollouts run`` and ``rollouts run --resume``) is forked from this process and
killed repeatedly: after a random time, or when its journal grows. After every fourth kill the first bytes of a record
are added to the journal, as a kill during a write leaves them. After half of the other kills, the bytes behind the
last seal are cut, zeroed, exchanged for junk, or get a hole of 512 bytes, as the death of a machine leaves them:
the rollouts that this removes must be generated again, and those of sealed batches must stay. At the end the same run
is executed without a kill, and both are compared. Exits with 1 if anything was lost, doubled, skipped or repeated.

With ``--harbor`` each program plays a Harbor task in a box over an image, and is graded in another box: no process of a
killed run, no box and no folder may be left, and every rollout has a verdict.

With ``--programs`` each rollout is a process that asks the model through the gateway. Programs cannot be restored: each
that was under way at a kill must have begun again and say so in ``restarted_at_resume``, and no other may say so. No
program of a killed run may continue.

A third run without a kill, over the same prompts with another sampling seed, tests whether the stored samples are
biased by length. The same test is printed for the samples that would remain if each kill discarded the rollouts in
flight: it shows whether the test could have failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import transformers  # noqa: F401 - loaded once, for all that are forked

from rollouts.commands import main as rollouts
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.runs.folder import Row, read_rows
from rollouts.runs.info import batches_written, read_info
from rollouts.runs.journal import Entry, JournalReader, read_journal
from rollouts.runs.run_history import RunHistory
from rollouts.runs.verify import verify_run
from rollouts.sandboxes.kernel import become_subreaper
from scripts.faults.crash_recipe import recipe
from scripts.faults.harness import Engine

BIASED = 0.001
"""An unbiased run fails by chance once in 500: each of the two tests once in 1,000."""

_PROMPTS_OF_SAMPLERS = 6
"""So few that a sampler knows them after some kills."""
DAMAGED = 0.5
"""Share of the kills after which the tail of the journal is changed."""

RECIPE = Path(__file__).with_name("crash_recipe.py")
_GONE_SECONDS = 10.0
"""In which the processes of a killed run end."""


def forked(arguments: list[str], log: Path) -> int:
    """Run a ``rollouts`` command in a forked child process; returns its pid."""
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


def kill_one_life(pid: int, run: Path, rng: random.Random, longest: float) -> bool:
    """Kill a child at a random moment; returns False if it had already ended."""
    at_growth = rng.random() < 0.5
    until = time.monotonic() + rng.uniform(0.05, longest)
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    if at_growth:  # when the journal grows: between a write and the action that follows it
        size, give_up = journal_size(run), time.monotonic() + 1.0
        while journal_size(run) == size and time.monotonic() < give_up:
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def journal_size(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "journal").glob("segment-*"))


def whole_records(run: Path) -> list[Entry]:
    """The records of the journal before a torn tail."""
    return list(JournalReader(run / "journal", batches_written(read_info(run))))


def tear(run: Path, rng: random.Random, torn_at: int) -> bool:
    """Add the beginning of a record to the journal, as an interrupted write leaves it.

    Does nothing if the journal still ends with the last torn record: a resumed run cuts that off before it writes.
    """
    if journal_size(run) == torn_at:
        return False
    segments = sorted((run / "journal").glob("segment-*"))
    entries = whole_records(run) if segments else []
    if not entries or entries[-1].offset.segment != len(segments) - 1:
        return False
    with segments[-1].open("r+b") as file:
        file.seek(entries[-1].offset.offset)
        record = file.read()
        file.write(record[: rng.randrange(1, len(record))])
    return True


def damage(run: Path, rng: random.Random) -> str | None:
    """Change the journal behind its last seal as the death of a machine may; returns how, if there is anything."""
    segments = sorted((run / "journal").glob("segment-*"))
    seals = [entry for entry in whole_records(run) if entry.kind == "sealed"]
    data = segments[-1].read_bytes() if segments else b""
    last = seals[-1].offset if seals else None
    in_last_segment = last is not None and last.segment == len(segments) - 1
    sealed = end_of_record(data, last.offset) if last is not None and in_last_segment else 0
    if sealed == len(data):
        return None
    at = rng.randrange(sealed, len(data))
    kind = rng.choice(("truncated", "zeroed", "junk", "hole"))
    rest = len(data) - at
    hole = min(512, rest)
    ends = {
        "truncated": b"",
        "zeroed": bytes(rest),
        "junk": rng.randbytes(rest),
        "hole": bytes(hole) + data[at + hole :],
    }
    segments[-1].write_bytes(data[:at] + ends[kind])
    return kind


def end_of_record(data: bytes, offset: int) -> int:
    """The end of the record at an offset: a header of 24 bytes has the payload's length in bytes 4 to 8."""
    return offset + 24 + int.from_bytes(data[offset + 4 : offset + 8], "little")


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
        prog="scripts/faults/crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="how often (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--longest", type=float, help="seconds of the longest life (2.5; of programs 15)")
    parser.add_argument("--programs", action="store_true", help="each rollout is a program, started as a process")
    parser.add_argument("--harbor", metavar="IMAGE", default="", help="each program is in a box over this root folder")
    parser.add_argument("--seats", action="store_true", help="each rollout is a play of two agents")
    parser.add_argument("--in-flight", type=int, help="rollouts that run at once, with over_sampling_factor=3")
    parser.add_argument("--sampler", choices=("pass_rate", "pools"), help="chooses among six prompts by their rewards")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--branches", action="store_true", help="each rollout of two turns has three leaves")
    args = parser.parse_args()
    args.programs |= bool(args.harbor)
    args.longest = args.longest or (15.0 if args.programs else 2.5)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="crash_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        engine = Engine(folder / "engine.log")
        try:
            return crash(args, folder, engine)
        finally:
            engine.kill()
    finally:
        if args.keep is None:
            shutil.rmtree(folder)


@attrs.define
class Kills:
    """The lives of a run, and its journal after each kill."""

    run: Path
    log: Path
    command: list[str]
    longest: float
    rng: random.Random
    engine: Engine | None = None
    """Besides which no process of ours may run after a kill, if it is named."""
    left: list[str] = attrs.field(factory=list)
    """The processes that did."""
    done: int = 0
    torn: int = 0
    torn_at: int = 0
    lives: dict[int, int] = attrs.field(factory=dict)
    """The number of kills before a process began."""
    finished: dict[int, int] = attrs.field(factory=dict)
    """The number of the kill after which each index was first finished in the journal."""
    caught: set[int] = attrs.field(factory=set)
    """Rollouts in flight at a kill."""
    begun: set[int] = attrs.field(factory=set)
    """Rollouts within an episode at a kill, or whose program was under way."""
    within: int = 0
    """How many they were, over all kills."""
    damaged: Counter[str] = attrs.field(factory=Counter)
    """How often the journal's tail was changed, by the kind of damage."""
    removed: int = 0
    """Finished rollouts that were in those tails."""
    history: RunHistory | None = None

    def kill(self) -> None:
        """Start a life, kill it, and compare the journal with that of the kill before."""
        resumed = (self.run / "run.json").exists()
        where = ["--resume", str(self.run)] if resumed else ["--out", str(self.run), "--overwrite"]
        pid = forked([*self.command, *where, "--batches", "1000000"], self.log)
        self.lives[pid] = self.done
        if not kill_one_life(pid, self.run, self.rng, self.longest):
            raise SystemExit(f"the run ended by itself; the end of {self.log}:\n{self.log.read_text()[-2000:]}")
        if self.engine is not None:
            self.left += left_behind(self.engine.process.pid)
        self.history = history_of(self.run)
        found = finished_in(self.history)
        lost = self.finished.keys() - found
        if lost:
            raise SystemExit(f"kill {self.done}: finished rollouts {sorted(lost)[:10]} are no longer in the journal")
        for index in found - self.finished.keys():
            self.finished[index] = self.done
        if self.history is not None and self.done % 4 != 3 and self.rng.random() < DAMAGED:
            found = self.damage_tail(self.history, found)
        if self.history is not None:
            self.within += len(self.history.turns)
            self.begun |= self.history.turns.keys()
            self.caught |= unsettled_in(self.history) - found
        self.done += 1
        if self.done % 4 == 0 and (self.run / "journal").is_dir() and tear(self.run, self.rng, self.torn_at):
            self.torn, self.torn_at = self.torn + 1, journal_size(self.run)

    def damage_tail(self, before: RunHistory, found: set[int]) -> set[int]:
        """Change the journal behind its last seal; returns the rollouts that are still finished in it."""
        kind = damage(self.run, self.rng)
        after = history_of(self.run)
        if kind is None or after is None:
            return found
        self.damaged[kind] += 1
        found = finished_in(after)
        sealed = {index for batch in before.sealed for group in batch.groups for index in before.settled[group][2]}
        if len(after.sealed) != len(before.sealed) or not sealed <= found:
            raise SystemExit(f"kill {self.done}: a tail ({kind}) behind the last seal cost a sealed batch")
        lost = self.finished.keys() - found
        self.removed += len(lost)
        self.caught |= lost
        self.finished = {index: kill for index, kill in self.finished.items() if index in found}
        self.begun &= after.turns.keys() | after.rollouts.keys()
        self.history = after
        return found


def history_of(run: Path) -> RunHistory | None:
    if not (run / "journal").is_dir():
        return None
    return RunHistory.read(run / "journal", batches_written(read_info(run)))


def finished_in(history: RunHistory | None) -> set[int]:
    """The index of every rollout that is finished in the journal."""
    return {index for index, rollout in history.rollouts.items() if rollout.finished} if history else set()


def unsettled_in(history: RunHistory) -> set[int]:
    """The index of every rollout of a prompt that is not settled; a group has four."""
    return {number * 4 + k for number in history.unsettled for k in range(4)}


def crash(args: argparse.Namespace, folder: Path, engine: Engine) -> int:
    run, witness, log = folder / "run", folder / "witness", folder / "log"
    base = ["run", str(RECIPE), "--endpoint", engine.url, "--model", str(DEMO_MODEL), "--format", "jsonl"]
    base += ["--set", f"programs={args.programs}", "--set", f"seats={args.seats}", "--set", f"branches={args.branches}"]
    if args.harbor:
        base += ["--set", f"harbor={args.harbor}", "--set", f"tasks={folder / 'tasks'}"]
        become_subreaper()  # the processes of a killed run become ours, so that they can be found
    if args.in_flight is not None:
        base += ["--set", f"in_flight={args.in_flight}"]
    if args.sampler is not None:
        base += ["--set", f"sampler={args.sampler}", "--set", f"prompts={_PROMPTS_OF_SAMPLERS}"]
    options = ["--set", f"witness={witness}"]
    os.environ["TMPDIR"] = str(folder / "tmp")  # a killed run leaves the folders of its programs
    (folder / "tmp").mkdir(exist_ok=True)
    kills = Kills(run, log, [*base, *options], args.longest, random.Random(args.seed), engine if args.harbor else None)
    began = time.monotonic()
    while kills.done < args.kills or kills.history is None:  # on a slow machine, the first lives end before they write
        kills.kill()
        if kills.done % 20 == 0:
            seconds = time.monotonic() - began
            print(f"{kills.done} kills, {seconds:.0f} s: {len(kills.finished)} rollouts finished", flush=True)
    if args.programs and min(kills.finished.values(), default=kills.done) >= kills.done - 1:
        print("no program ended before the last kill, so that nothing could be lost: give --longest more seconds")
        return 1
    batches = str(len(kills.history.sealed) + 1)
    reference, other = folder / "reference", folder / "other"
    unkilled = [*base, "--set", f"witness={folder / 'reference_witness'}", "--batches", batches]
    for arguments in (
        [*base, *options, "--resume", str(run), "--batches", batches],
        [*unkilled, "--out", str(reference)],
        [*unkilled, "--set", "sampling_seed=1", "--out", str(other)],
    ):
        _, status = os.waitpid(forked(arguments, log), 0)
        if status:
            print(f"the last run ended with {status}; the end of {log}:\n{log.read_text()[-2000:]}")
            return 1
    seconds = time.monotonic() - began
    print(f"{kills.done} kills in {seconds:.0f} s, {kills.torn} with a half-written record added; {batches} batches")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(kills.damaged.items())) or "none"
    print(f"tails changed behind the last seal: {kinds}; they had {kills.removed} finished rollouts, which began again")
    tasks = {"harbor": args.harbor, "tasks": folder / "tasks"} if args.harbor else {}
    bad = compare(kills, reference, witness, tasks, programs=args.programs, sampled=args.sampler is not None)
    if args.harbor:
        bad += compare_boxes(kills, folder / "tmp")
    if args.seats:
        again = {row.data["index"] for row in read_rows(run, "all") if "restarted_at_resume" in row.data["metrics"]}
        print(f"{len(again)} plays began again; expected none, since each asks the same")
        bad += len(again)
    if args.programs:
        bad += compare_programs(run, kills.begun, folder / "tmp")
    if args.sampler is None:  # else the groups of two runs have different prompts
        bad += compare_lengths(run, other, kills.caught)
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


def left_behind(besides: int) -> list[str]:
    """Wait for the processes below this one, except ``besides``; return the command lines of the rest."""
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        others = [process for process in map(int, children) if process != besides]
        alive = [process for process in others if os.waitpid(process, os.WNOHANG)[0] == 0]
        found = [Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace") for process in alive]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def compare_boxes(kills: Kills, temporary: Path) -> int:
    """Check that nothing is left of the boxes, and that every rollout has a verdict of its tests."""
    rows = [row.data for row in read_rows(kills.run, "all")]
    without = [row["index"] for row in rows if "verdict" not in row["metadata"]]
    left = sorted(path.name for path in temporary.glob("rollouts-*") if path.is_dir())
    print(f"{len(kills.left)} processes of boxes were left by kills {kills.left[:3] or ''}")
    print(f"{len(left)} folders are left {left[:3] or ''}")
    print(f"{len(without)} of {len(rows)} rollouts have no verdict {without[:3] or ''}")
    return len(kills.left) + len(left) + len(without)


def compare(
    kills: Kills, reference: Path, witness: Path, tasks: dict[str, Any], *, programs: bool, sampled: bool
) -> int:
    """Compare the killed run with its journals, its witness, its data and the run without a kill."""
    run, finished = kills.run, kills.finished
    rows = list(read_rows(run, "all"))
    copies = Counter(row.data["index"] for row in rows)
    conversations = Counter(map(conversation_of, rows))
    report = verify_run(run)
    bad = 0

    def report_count(what: str, count: int) -> None:
        nonlocal bad
        bad += count
        print(f"{count} {what}")

    history = history_of(run)
    assert history is not None
    report_count("finished rollouts lost", len(finished.keys() - copies.keys() - unsettled_in(history)))
    report_count("rollouts doubled", sum(count > 1 for count in conversations.values()))
    again, window = scored_again(kills, witness)
    report_count("finished rollouts generated again", again)
    print(f"  ({window} were scored a second time, because the kill came between their reward and their record)")
    groups = {row.data["group_index"]: row.data["prompt"] for row in rows}
    sizes: dict[str, Any] = {"prompts": _PROMPTS_OF_SAMPLERS} if sampled else {}
    sizes |= tasks
    buffer = recipe(Endpoint(model=str(DEMO_MODEL)), witness=witness, programs=programs, **sizes).data_buffer
    expected: dict[int | None, Any] = {
        prompt.group_index: prompt.prompt for prompt in buffer.get_prompts(history.groups)
    }
    if sampled:
        drawn = {number: position for number, position, rewards in history.draws if rewards is None}
        prompts = buffer.prompts
        chosen: dict[int | None, Any] = {number: prompts[at].prompt for number, at in drawn.items() if at is not None}
        others = sum(prompt != expected[number] for number, prompt in chosen.items())
        print(f"{others} of {history.groups} draws are others than those of the epochs")
        expected = chosen
    settled = set(expected) - set(history.unsettled)
    # The last life must have taken unsettled prompts again: they were in flight when the last batch was full.
    report_count(
        "prompts skipped", len(settled - set(groups)) + len(set(history.unsettled) - taken_in_the_last_life(run))
    )
    report_count(
        "prompts repeated or exchanged", sum(expected.get(number) != prompt for number, prompt in groups.items())
    )
    report_count("violations found by verify", len(report.violations))
    print("\n".join(f"  {line}" for line in [*str(report).splitlines(), *map(str, report.violations[:5])]))
    accounting = read_info(run)["accounting"]
    report_count("difference in the sum of the accounting", abs(2 * accounting["taken"] - sum(accounting.values())))
    print(f"  {accounting}")
    if not programs:
        went_on = sum("turns_before_resume" in row.data["metrics"] for row in rows)
        print(f"{went_on} rollouts resumed from their last finished turn ({kills.within} were within an episode)")
    other = {conversation_of(row): row.data for row in read_rows(reference, "all")}
    both = [(row.data, other[conversation_of(row)]) for row in rows if conversation_of(row) in other]
    unlike = [pair for pair in both if pair[0]["tokens"] != pair[1]["tokens"]]
    print(f"{len(both) - len(unlike)} of {len(both)} rollouts have the same tokens as in the run without a kill")
    if not sampled:  # a sampler may draw other prompts after a kill
        report_count("of the others differ by more than rounding", sum(not by_rounding(*pair) for pair in unlike))
    return bad


def by_rounding(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether rounding may have chosen the first token that differs: it is so rare in both that its share of the draw
    is about the error of the weights, which other batches and prefixes change.
    """
    columns = zip(one["tokens"], other["tokens"], one["rollout_log_probs"], other["rollout_log_probs"], strict=False)
    first = next((pair for mine, theirs, *pair in columns if mine != theirs), [0.0])
    return max(first) < _RARE


_RARE = -14.0
"""Of a logprob: probability 8e-7. The weights of a draw are float32."""


def conversation_of(row: Row) -> tuple[int, str, int]:
    """The rollout of a row, and the conversation of its seat."""
    return row.data["index"], row.data["seat"], row.data["conversation"]


def scored_again(kills: Kills, witness: Path) -> tuple[int, int]:
    """Count the calls of the reward after a rollout was finished, and those between its reward and its record."""
    again = window = 0
    seen: set[int] = set()
    for line in witness.read_text().splitlines():
        pid, index, _ = map(int, line.split())
        late = kills.lives.get(pid, len(kills.lives)) > kills.finished.get(index, len(kills.lives))
        again += late
        window += index in seen and not late
        seen.add(index)
    return again, window


def compare_programs(run: Path, begun: set[int], temporary: Path) -> int:
    """Check that the programs under way at a kill began again and are counted, and that none of them continues."""
    rows = list(read_rows(run, "all"))
    again = {row.data["index"] for row in rows if "restarted_at_resume" in row.data["metrics"]}
    expected = begun & {row.data["index"] for row in rows}
    print(f"{len(again & expected)} programs were under way at a kill, began again and are counted")
    missing, wrong, left = expected - again, again - begun, programs_of(temporary)
    print(f"{len(missing)} began again and are not counted, {len(wrong)} are counted and did not begin again")
    print(f"{len(left)} programs continue after the end {left[:3] or ''}")
    return len(missing) + len(wrong) + len(left)


def programs_of(temporary: Path) -> list[str]:
    """The command lines of the processes that were started with a file below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(temporary) in line:
                found.append(line)
    return found


# -- bias: do kills change the distribution of the kept samples? ------------------------------------------------------


def compare_lengths(run: Path, other: Path, caught: set[int]) -> int:
    """Compare the lengths of the killed run with those of a run without a kill and with another sampling seed.

    A group counts once, with the mean of its rollouts, because they share a prompt.
    """
    mine, theirs = list(read_rows(run, "all")), list(read_rows(other, "all"))
    uncaught = [row for row in mine if row.data["index"] not in caught]
    first, second = (np.array(list(lengths_of(rows, "kept").values())) for rows in (mine, theirs))
    bad = report_lengths("groups kept", first, second, permutation_test(first, second), asserted=True)
    for name, rows, asserted in (
        ("all groups, pairs of one prompt", mine, True),
        (f"the same without the {len(mine) - len(uncaught)} rollouts in flight at a kill", uncaught, False),
    ):
        found, wanted = lengths_of(rows), lengths_of(theirs)
        numbers = sorted(found.keys() & wanted.keys())
        if not numbers:
            print(f"sampled tokens a rollout, {name}: no rollouts")
            continue
        first, second = (np.array([each[number] for number in numbers]) for each in (found, wanted))
        bad += report_lengths(name, first, second, pair_test(first - second), asserted=asserted)
    print("  (the last line simulates a run that discards rollouts in flight: the test detects that if p is small)")
    return bad


def lengths_of(rows: list[Row], outcome: str | None = None) -> dict[int, float]:
    """Mean number of sampled tokens of each group's rollouts."""
    lengths: dict[int, list[int]] = {}
    for row in rows:
        if outcome in (None, row.data["outcome"]):
            lengths.setdefault(row.data["group_index"], []).append(sum(row.data["loss_mask"]))
    return {number: float(np.mean(found)) for number, found in lengths.items()}


def report_lengths(name: str, first: np.ndarray, second: np.ndarray, p: float, *, asserted: bool) -> int:
    print(
        f"sampled tokens a rollout, {name}: {first.mean():.2f} with kills (n={len(first)}), {second.mean():.2f} by "
        f"another seed and without (n={len(second)}), permutation test p = {p:.4f}"
    )
    return int(asserted and p < BIASED)


def pair_test(differences: np.ndarray, rounds: int = 5000) -> float:
    """Probability of a mean at least as far from 0, if the sign of each difference were random."""
    rng = np.random.default_rng(0)
    seen = abs(differences.mean())
    signs = rng.choice([-1.0, 1.0], size=(rounds, len(differences)))
    hits = int((abs((signs * differences).mean(axis=1)) >= seen - 1e-12).sum())
    return (hits + 1) / (rounds + 1)


if __name__ == "__main__":
    sys.exit(main())
