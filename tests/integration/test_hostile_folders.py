"""The folder of a run that a stranger made: each verb ends with one line, never with a traceback, and never waits."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.commands import main
from rollouts.engine import DEMO_MODEL
from rollouts.runs.checksums import sealed
from rollouts.runs.journal import Journal, _frame, read_journal
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer
from tests.stored_runs import edit_info, edit_line

BATCH = "batches/batch-000000.jsonl"
SEGMENT = "journal/segment-000000.journal"
NESTED = b'{"a":' * 5000 + b"1" + b"}" * 5000
HUGE = b"1" + b"0" * 5000
RECIPE = """
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe

def parity(sample):
    return float(sample.index % 2)

def recipe(endpoint):
    prompts = [f"question {number}" for number in range(20)]
    sizes = {"batch_size": 2, "n_samples_per_prompt": 2, "max_turns": 1, "max_new_tokens": 4}
    return agent_recipe("small", endpoint, CalculatorEnvironment, prompts, reward_fn=parity, keep="all", **sizes)
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one batch, whose server still answers, so that it can be resumed."""
    path = tmp_path_factory.mktemp("sound")
    (path / "small.py").write_text(RECIPE)
    server = StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server):
        command = [
            "run",
            str(path / "small.py"),
            "--endpoint",
            server.url,
            "--out",
            str(path / "run"),
            "--batches",
            "1",
        ]
        assert main([*command, "--format", "jsonl", "--quiet", "--no-rehearsal"]) == 0
        yield path / "run"


# -- what a stranger may write ----------------------------------------------------------------------------------------


def nested_line(run: Path) -> None:
    lines = (run / BATCH).read_bytes().splitlines(keepends=True)
    body = lines[0][: lines[0].rindex(b',"crc32"')]
    (run / BATCH).write_bytes(sealed(body + b',"more":' + NESTED + b"}") + b"".join(lines[1:]))


def huge_number(run: Path) -> None:
    lines = (run / BATCH).read_bytes().splitlines(keepends=True)
    body = re.sub(rb'"group_index":\d+', b'"group_index":' + HUGE, lines[0][: lines[0].rindex(b',"crc32"')])
    (run / BATCH).write_bytes(sealed(body + b"}") + b"".join(lines[1:]))


def endless_line(run: Path) -> None:
    with (run / BATCH).open("wb") as file:
        file.write(b'{"a":"')
        for _ in range(32):
            file.write(b"a" * (1 << 20))


def fifo(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def sparse(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.truncate(6 << 30)

    return change


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return change


def info(**fields: Any) -> Callable[[Path], None]:
    return lambda run: edit_info(run, lambda values: values.update(fields))


def row(**fields: Any) -> Callable[[Path], None]:
    return lambda run: edit_line(run / BATCH, 0, lambda values: values.update(fields))


def text(name: str, data: bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_bytes(data)

    return change


def record(kind: str, **fields: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with Journal(run / "journal") as journal:
            journal.append(kind, fields)

    return change


def nested_record(run: Path) -> None:
    last = max(entry.sequence for entry in read_journal(run / "journal"))
    with (run / SEGMENT).open("ab") as file:
        file.write(b"".join(_frame(1, last + 1, b"\x81\xa1a" * 5000 + b"\x01", b"")))


def parquet_junk(run: Path) -> None:
    (run / BATCH).unlink()
    (run / "batches" / "batch-000000.parquet").write_bytes(b"PAR1junkPAR1")


VERBS = ("show", "view", "verify", "export", "resume")
READERS = ("show", "view", "export")
"""The verbs that read the samples and no journal; ``--resume`` writes a damaged batch again from the journal."""

CHANGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a FIFO as run.json": (fifo("run.json"), VERBS),
    "a FIFO as batch": (fifo(BATCH), VERBS),
    "a FIFO as dropped.jsonl": (fifo("dropped.jsonl"), VERBS),
    "a FIFO as metrics.jsonl": (fifo("metrics.jsonl"), VERBS),
    "a FIFO as segment": (fifo(SEGMENT), VERBS),
    "a FIFO as lock": (fifo("journal/lock"), VERBS),
    "a FIFO as recording": (fifo("recording/segment-000000.journal"), VERBS),
    "a sparse run.json": (sparse("run.json"), VERBS),
    "a sparse batch": (sparse(BATCH), VERBS),
    "a sparse metrics.jsonl": (sparse("metrics.jsonl"), VERBS),
    "a sparse segment": (sparse(SEGMENT), VERBS),
    "a device as batch": (link(BATCH, "/dev/zero"), VERBS),
    "a device as run.json": (link("run.json", "/dev/zero"), VERBS),
    "a link to itself": (link(BATCH, "batch-000000.jsonl"), VERBS),
    "a nested run.json": (text("run.json", NESTED), VERBS),
    "a huge run.json": (text("run.json", b'{"a":[' + b"[]," * (6 << 20)), VERBS),
    "a list as run.json": (text("run.json", b"[1]"), VERBS),
    "a list as settings": (info(settings=[1]), ("show", "view", "verify")),
    "text as command": (info(command="x"), ("resume",)),
    "numbers as servers": (info(endpoint={"base_url": 5}, command={"recipe": "x"}), ("resume",)),
    "more batches than there are": (info(batches=10**18), ("verify", "resume")),
    "a nested line": (nested_line, ("verify", *READERS)),
    "a huge number": (huge_number, ("verify", *READERS)),
    "an endless line": (endless_line, ("verify", *READERS)),
    "a line that is not UTF-8": (text(BATCH, sealed(b'{"a":"\xff\xfe"}')), ("verify", *READERS)),
    "junk as Parquet": (parquet_junk, ("verify", *READERS)),
    "a number as messages": (row(messages=5), ("verify", *READERS)),
    "an object as reward": (row(reward={"a": [1]}), ("verify", *READERS)),
    "a number as image": (row(images=[[5, 0, 1]]), ("verify", *READERS)),
    "50,000 versions": (row(versions=[["v", 0, 1]] * 50_000), ("show", "view", "verify")),
    "nested metrics": (text("metrics.jsonl", NESTED + b"\n"), ("view", "verify")),
    "a nested record": (nested_record, ("verify", "resume")),
    "a group of a far number": (record("taken", group=10**15), ("verify", "resume")),
    "a seal of nothing": (record("sealed", batch="x", groups=[10**9], metrics=5, accounting=5), ("resume",)),
    "an outcome of nothing": (record("group", group=99, outcome="x", rollouts=[1]), ("verify", "resume")),
}
"""The change, and the verbs that end with an error; the others do not read the value, or have a use for it."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_folder_is_a_line_of_error(
    sound: Path, tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 for each verb, in seconds. Where verification can continue it lists what is broken, with 1."""
    apply, failing = CHANGES[change]
    for verb in VERBS:
        run = Path(shutil.copytree(sound, tmp_path / verb))
        apply(run)
        capfd.readouterr()
        code = main(command(verb, run, tmp_path))
        lines = capfd.readouterr().err.splitlines()
        if verb == "verify" and code == 1:
            assert verb in failing
            assert lines
            assert all(line.startswith(("law ", "... and ")) for line in lines)
        else:
            assert (verb, code, len(lines)) == (verb, 2, 1) if verb in failing else (verb, 0, 0), lines


@pytest.mark.parametrize("content", [b"", b'{"status', b"[1]", b"{}", b'{"name": "other", "status": "finished"}'])
def test_a_run_json_of_something_else_is_a_line_of_error(
    tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 for each verb, and no page, table or list of laws: there is no run to judge."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_bytes(content)
    for verb in VERBS:
        code = main(command(verb, tmp_path / "other", tmp_path))
        output = capfd.readouterr()
        assert (verb, code, output.out, len(output.err.splitlines())) == (verb, 2, "", 1), output.err
        assert "run.json" in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def command(verb: str, run: Path, folder: Path) -> list[str]:
    return {
        "show": ["show", str(run)],
        "view": ["view", str(run), "--out", str(folder / "view.html"), "--overwrite"],
        "verify": ["check-run", str(run)],
        "export": ["export", str(run), "--to", "jsonl", str(folder / "out.jsonl"), "--overwrite"],
        "resume": ["run", "--resume", str(run), "--batches", "1", "--quiet"],
    }[verb]


def test_rewards_whose_sum_overflows_are_verified(sound: Path, tmp_path: Path) -> None:
    """The spread is infinite then; each reward is compared with the journal's."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    for number in range(4):
        edit_line(run / BATCH, number, lambda row: row.update(reward=1e308))
    report = verify_run(run)
    assert "mean reward inf" in str(report)
    assert any("reward" in str(violation) for violation in report.violations)


def test_times_that_no_clock_shows_are_viewed(sound: Path, tmp_path: Path) -> None:
    """As 0; the stored times stay what they are."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    edit_line(run / BATCH, 0, lambda row: row.update(times=[["tool", "x", 1e308, 1e308], ["tool", "x", 1.0, -1e308]]))
    assert main(["view", str(run), "--out", str(tmp_path / "view.html")]) == 0
