"""No control, C1 or bidirectional character of foreign text reaches the terminal, whichever verb prints it.

Finding 23: the text comes from a model, a server, a role, a file or an environment.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollouts.base.terminal import guard_standard_error, say, visible
from rollouts.commands import VERBS, main
from rollouts.engine import DEMO_MODEL
from rollouts.views.terminal.console import SafeConsole
from tests.stored_runs import edit_info, edit_line, store_run

HOSTILE = "A\x1b]0;owned\x07B\x1b[2JC\x9b31mD\u202eE\u2066F\rG\x08H\x7fI\u2028J"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Every control character but line ends and tabs, as a terminal could obey it."""
OWN = re.compile("\x1b\\[[0-9;?]*[A-Za-z]|\x1b\\]8;[^\x1b]*\x1b\\\\|\r")
"""The sequences that rich writes: colours, movements of the cursor, carriage returns."""

RECIPE = f"""
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.recipe import agent_recipe

class World(SingleTurnEnvironment):
    async def step(self, reply):
        raise ValueError({HOSTILE!r})

def recipe(endpoint, *, fails: bool = False):
    if fails:
        raise ConfigError({HOSTILE!r})
    return agent_recipe({HOSTILE!r}, endpoint, World, [{HOSTILE!r}] * 4, batch_size=1, n_samples_per_prompt=2)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and a run whose every free text is hostile."""
    path = tmp_path_factory.mktemp("hostile")
    (path / "recipe.py").write_text(RECIPE)
    run = path / "run"
    anyio.run(partial(store_run, run, prompt=HOSTILE + "{}"))

    def hostile(row: dict[str, object]) -> None:
        row.update(
            label=HOSTILE,
            response=HOSTILE,
            reason=HOSTILE,
            messages=[{"role": f"user{HOSTILE}", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}],
            failure={"kind": HOSTILE, "message": HOSTILE, "place": HOSTILE, "traceback": HOSTILE},
        )

    for file in [*(run / "batches").iterdir(), *run.glob("*ed.jsonl")]:
        for number in range(len(file.read_bytes().splitlines())):
            edit_line(file, number, hostile)
    edit_info(run, lambda info: info.update(recipe=HOSTILE, tokenizer=HOSTILE, error=HOSTILE))
    return path


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The hooks of the interpreter are as before."""
    hook, format_warning = sys.excepthook, warnings.formatwarning
    yield
    sys.excepthook, warnings.formatwarning = hook, format_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(None)


LINES = {
    "show": [
        ["RUN"],
        ["RUN", "--group", "0"],
        ["RUN", "--sample", "0"],
        ["RUN", "--sample", "0", "--tokenizer", "MODEL"],
    ],
    "verify": [["RUN"]],
    "view": [
        ["RUN", "--out", "OUT.html"],
        ["RUN", "--tokenizer", "MODEL", "--out", "OUT.htm"],
        ["RUN", "RUN", "--out", "OUT.html"],
    ],
    "export": [
        ["RUN", "--to", "jsonl", f"OUT{HOSTILE.replace('/', '')}".replace("\x00", "")],
        ["RUN", "--to", "hf", "RUN"],
    ],
    "replay": [["RUN"], ["RUN", "--recipe", "RECIPE"]],
    "rescore": [["RUN", "--recipe", "RECIPE", "--out", "OUT"], ["RUN", "--recipe", "FAILS", "--out", "OUT"]],
    "plan": [["RUN"]],
    "run": [["FAILS", "--out", "OUT", "--endpoint", "http://127.0.0.1:9"], ["--resume", "RUN"]],
    "play": [["FAILS", "--endpoint", "http://127.0.0.1:9"]],
    "eval": [["FAILS", "--out", "OUT", "--endpoint", "http://127.0.0.1:9"]],
    "compare": [["RUN", "RUN"]],
    "check": [[f"none{HOSTILE}"]],
    "check-env": [["RECIPE"]],
    "new-env": [[HOSTILE, "--into", "OUT"]],
    "serve": [["--model", HOSTILE]],
    "serve-env": [["FAILS"]],
    "work": [["--join", f"http://127.0.0.1:9/{HOSTILE}", "--patience", "0.1"]],
    "up": [["FAILS", "--out", "OUT", "--port", "0", "--endpoint", "http://127.0.0.1:9"]],
    "gateway": [["--endpoint", f"http://127.0.0.1:9/{HOSTILE}"]],
    "recipes": [[]],
    "doctor": [[]],
    "ls": [["FOLDER"]],
    "curate": [["RUN", "--to", "chat", "--out", "OUT"], ["RUN", "--to", "tokens", "--out", "OUT", "--where", HOSTILE]],
    "check-task": [["FAILS"], [f"none{HOSTILE}"]],
    "audit": [[f"none{HOSTILE}", "--format", "traces"], [f"none{HOSTILE}", "--format", HOSTILE]],
    "conformance": [["--endpoint", f"http://127.0.0.1:9/{HOSTILE}"], ["--table", f"none{HOSTILE}"]],
}


@pytest.mark.parametrize("verb", LINES)
def test_23_no_verb_prints_a_control_character(
    verb: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard output and standard error, in results and in errors."""
    fails = tmp_path / "fails.py"
    fails.write_text(RECIPE.replace("fails: bool = False", "fails: bool = True"))
    names = {"RUN": place / "run", "FOLDER": place, "RECIPE": place / "recipe.py", "FAILS": fails, "MODEL": DEMO_MODEL}
    for line in LINES[verb]:
        arguments = [str(names.get(word, word)).replace("OUT", str(tmp_path / "out")) for word in line]
        with contextlib.suppress(SystemExit):
            main([verb, *arguments])
        out, err = capsys.readouterr()
        assert out + err, f"{arguments} printed nothing"
        assert RAW.findall(out + err) == [], arguments


def test_23_every_verb_is_tried() -> None:
    """A new verb needs a line above."""
    assert len(VERBS) == len(LINES)


def test_23_what_the_interpreter_prints_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    """Uncaught errors, warnings, and logs of a module without a handler."""
    guard_standard_error()
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    assert logging.lastResort is not None
    sys.stderr.write(logging.lastResort.format(logging.LogRecord("x", 40, "x.py", 1, HOSTILE, None, None)))
    sys.stderr.write(warnings.formatwarning(HOSTILE, UserWarning, "x.py", 1))
    err = capsys.readouterr().err
    assert err.count("owned") == 3
    assert RAW.findall(err) == []


def test_23_a_terminal_gets_only_the_sequences_of_rich() -> None:
    """In text, markup, tables, panels and the live display; colours stay."""
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=200)
    table = Table("name", HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE, "red"))
    for what in (HOSTILE, Text(HOSTILE, "green"), table, Panel(HOSTILE, title=HOSTILE)):
        console.print(what)
    with Live(Panel(HOSTILE), console=console, auto_refresh=False) as live:
        live.update(Panel(Text(HOSTILE)), refresh=True)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[32m" in text
    assert "owned" in text
    assert RAW.findall(OWN.sub("", text)) == []


def test_23_plain_text_is_safe_and_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """Line ends, tabs and other scripts are unchanged."""
    say(f"a\tb\n語{HOSTILE}")
    out = capsys.readouterr().out
    assert out.startswith("a\tb\n語A␛]0;owned")
    assert out == visible(f"a\tb\n語{HOSTILE}") + "\n"


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_25_an_output_that_takes_nothing_is_one_error_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, also at the flush that follows."""
    with contextlib.redirect_stdout(Full()):
        assert main(["verify", str(place / "run")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rollouts: error: [Errno 28] No space left")
    assert err.count("\n") == 1
