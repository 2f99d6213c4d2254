"""``rollouts ls``: the runs and evaluations in a folder, one line each.

Invariant: it reads ``run.json``, ``metrics.jsonl`` or ``eval.json`` of each folder, no sample, and changes nothing. A
folder that cannot be read is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_verb
from rollouts.errors import ConfigError
from rollouts.runs.info import batches_written, read_info
from rollouts.runs.layout import METRICS
from rollouts.runs.reading import check_file, reading
from rollouts.runs.writer import check_idle
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["add", "entries", "list_runs"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "ls", _ls, "list the runs and evaluations in a folder", "ls runs")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _ls(args: argparse.Namespace) -> int:
    found = entries(args.folder)
    if args.json:
        say(json.dumps(found))
    else:
        list_runs(args.folder, found, SafeConsole())
    return 0


def entries(folder: Path) -> list[dict[str, Any]]:
    """The runs and evaluations in a folder and in its folders, oldest first.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError.of("DIR", str(folder), "a folder with runs")
    return sorted(_entries(folder), key=lambda entry: (entry["started"] or "", entry["path"]))


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        try:
            with reading(path):
                entry = _entry(path)
        except ConfigError as error:
            entry = {**_NOTHING, "path": str(path), "status": "unreadable", "error": str(error)}
        if entry is not None:
            yield entry


def _entry(path: Path) -> dict[str, Any] | None:
    if (path / "run.json").is_file():
        return _run(path)
    return _evaluation(path) if (path / "eval.json").is_file() else None


_NOTHING: dict[str, Any] = dict.fromkeys(
    ("recipe", "batches", "batches_wanted", "groups", "reward", "started", "error")
)


class _Accounting(msgspec.Struct):
    in_batch: int = 0
    dropped: int = 0
    failed: int = 0


class _Info(TypedDict, total=False):
    """The fields of ``run.json`` that are listed."""

    status: str | None
    recipe: str | None
    batches: int | None
    batches_wanted: int | None
    started: str | None
    error: str | None
    accounting: _Accounting | None


class _Batch(msgspec.Struct):
    reward: float | None = msgspec.field(name="reward/mean", default=None)


class _Estimate(msgspec.Struct):
    value: float | None = None


class _Evaluation(msgspec.Struct):
    """The fields of ``eval.json`` that are listed."""

    recipe: str | None = None
    estimates: dict[str, _Estimate] | None = None


def _run(path: Path) -> dict[str, Any]:
    stored = read_info(path)
    info = msgspec.convert(stored, type=_Info)
    accounting, status = info.pop("accounting", None), info.get("status")
    if status == "running":
        try:
            check_idle(path, "DIR")
            status = "killed"
        except ConfigError:
            pass
    lines = _text(path / METRICS).splitlines() if (path / METRICS).is_file() else []
    lines = lines[: batches_written(stored)]
    last = msgspec.json.decode(lines[-1], type=_Batch) if lines else _Batch()
    return {
        **_NOTHING,
        "path": str(path),
        **info,
        "status": status,
        "groups": msgspec.to_builtins(accounting or _Accounting()),
        "reward": last.reward,
    }


def _evaluation(path: Path) -> dict[str, Any]:
    info = msgspec.json.decode(_text(path / "eval.json"), type=_Evaluation)
    estimates = info.estimates or {}
    status = "evaluated" if estimates else "evaluation"
    reward = estimates.get("reward", _Estimate()).value
    return {**_NOTHING, "path": str(path), "recipe": info.recipe, "status": status, "reward": reward}


def _text(path: Path) -> bytes:
    check_file(path)
    return path.read_bytes()


def list_runs(folder: Path, found: list[dict[str, Any]], console: Console) -> None:
    """Print a table of :func:`entries`."""
    if not found:
        console.print(Text(visible(f"{folder} contains no run and no evaluation")), soft_wrap=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("path", "recipe"):
        table.add_column(name, overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("batches", "kept", "dropped", "failed", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found:
        batches = [str(entry[name]) for name in ("batches", "batches_wanted") if entry[name] is not None]
        groups = entry["groups"] or {}
        reward = "" if entry["reward"] is None else f"{entry['reward']:.3f}"
        cells = ["/".join(batches), *(str(groups.get(name, "")) for name in ("in_batch", "dropped", "failed")), reward]
        names = (Text(visible(str(entry[name] or ""))) for name in ("path", "recipe", "status"))
        table.add_row(*names, *cells)
    console.print(table)
