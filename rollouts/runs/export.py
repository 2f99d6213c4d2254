"""Export of a stored run to one file, or to a folder that Hugging Face's ``datasets`` loads.

    jsonl      one file, one sample a line
    parquet    one file
    hf         a folder: data/train-00000.parquet, … and a README.md that lists them; ``datasets.load_dataset(OUT)``

The images of the samples are copied to a folder ``images``: next to the file, or in the folder.

Invariant: rows are streamed, so memory does not grow with the run. The output appears complete or not at all. The
columns are those of ``columns.py``, with the same values in each format. An active or killed run is exported as far as
it is stored. This module knows no trainer.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from rollouts.base.durable import sync, sync_all
from rollouts.base.storable import to_json
from rollouts.errors import ConfigError, RolloutsError
from rollouts.runs import parquet
from rollouts.runs.columns import columns_table, plain_row
from rollouts.runs.folder import Row, read_rows
from rollouts.runs.images import IMAGES, ImageFolder, hashes_of_row
from rollouts.runs.info import read_info
from rollouts.runs.layout import Which, check_output, check_outside
from rollouts.runs.reading import reading
from rollouts.runs.tools import ToolFolder

__all__ = ["Kind", "check_folder", "export_rows", "replacing"]

Kind: TypeAlias = Literal["jsonl", "parquet", "hf"]

_SHARD_BYTES = 256 << 20
_EXPORTED = {"README.md", "data"}
"""The content of an exported folder without images."""
_MARK = re.compile(r"^\d+ samples of outcome `\w+`, in whole groups\.$", re.MULTILINE)
"""A line of the README.md of every export."""
_ROWS = re.compile(r"train-([0-9a-f]{8}-)?\d{5}\.(parquet|jsonl)")
"""The names of files with rows, of exports and of curated data sets."""


def export_rows(
    run: str | Path,
    out: str | Path,
    kind: Kind,
    outcome: Which = "kept",
    *,
    overwrite: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> list[Path]:
    """Export the samples of a run.

    Args:
        run: the run's folder.
        out: the file, or for ``hf`` the folder.
        kind: the output format.
        outcome: which groups, as for :func:`rollouts.training.load_run`.
        overwrite: replace an existing file, or the folder of an earlier export.
        shard_bytes: size at which ``hf`` starts the next file.

    Returns:
        The files that contain samples.

    Raises:
        ConfigError: ``run`` is not a run, has no sample of this outcome or a damaged file; ``out`` exists or lies among
            the files of a run; or pyarrow is not installed.
        RolloutsError: the disk refuses the write.
    """
    out = Path(out)
    if kind == "hf":
        check_folder(out, _EXPORTED, _MARK, overwrite=overwrite)
    else:
        check_output(out, "OUT", overwrite=overwrite)
    rows = read_rows(run, outcome)
    head = next(rows, None)
    if head is None:
        raise ConfigError.of("run", str(run), f"a run with at least one sample of outcome {outcome!r}")
    rows = itertools.chain([head], rows)
    with replacing(out) as temporary:
        rows = _with_tools(rows, Path(run))
        rows = _copying_images(rows, Path(run), temporary if kind == "hf" else out.parent)
        if kind == "jsonl":
            _write_lines(temporary, rows)
        elif kind == "parquet":
            _write_parquet(temporary, rows)
        else:
            return [out / name for name in _write_folder(temporary, rows, Path(run), outcome, shard_bytes)]
    return [out]


def _with_tools(rows: Iterator[Row], run: Path) -> Iterator[Row]:
    """The rows with their tools in place of the hashes."""
    tools = ToolFolder(run)
    for row in rows:
        yield attrs.evolve(row, data=tools.restored(row.data))


def _copying_images(rows: Iterator[Row], run: Path, folder: Path) -> Iterator[Row]:
    """Copy the images that the rows name to a folder, each before its row."""
    source, target = ImageFolder(run), ImageFolder(folder)
    for row in rows:
        with reading(row):
            hashes = hashes_of_row(row.data)
        source.copy_to(target, hashes)
        yield row


def _plain(row: Row) -> dict[str, Any]:
    with reading(row):
        return plain_row(row.data)


def check_folder(out: Path, exported: Set[str], mark: re.Pattern[str], *, overwrite: bool, option: str = "OUT") -> None:
    """Check that a folder is new, empty, or an earlier export that may be replaced.

    Args:
        out: the folder.
        exported: what an export without images contains.
        mark: found in the README.md of every export, and of no other folder.
        overwrite: whether an earlier export is replaced.
        option: names the folder in errors.

    Raises:
        ConfigError: it is another folder, a file, or lies among the files of a run.
    """
    check_outside(out, option)
    if out.exists() and not out.is_dir():
        raise ConfigError.of(option, str(out), "a folder; a file is there")
    if not out.name:
        raise ConfigError.of(option, str(out), "the name of a folder that is new; the current one is not replaced")
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    earlier = present in (exported, {*exported, IMAGES}) and _is_export(out, mark)
    if present and not (overwrite and earlier):
        found = ". --overwrite replaces it" if earlier else ""
        raise ConfigError.of(option, str(out), f"a folder that is new or empty{found}")


def _is_export(folder: Path, mark: re.Pattern[str]) -> bool:
    """Whether this package wrote a folder, and no file was added to its rows."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
        rows = [path.name for path in (folder / "data").iterdir()]
    except (OSError, ValueError):
        return False
    return mark.search(card) is not None and all(_ROWS.fullmatch(name) for name in rows)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to ``path`` on success and removed on failure.

    Everything is on disk before it gets its name. An earlier folder of this name is removed first.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        yield temporary
        sync_all(temporary)
        if path.is_dir():
            _remove(path)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise RolloutsError(f"{path}: cannot be written: {error}") from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _write_lines(path: Path, rows: Iterator[Row]) -> None:
    with path.open("wb") as file:
        for row in rows:
            file.write(to_json(_plain(row)) + b"\n")


def _write_parquet(path: Path, rows: Iterator[Row], max_bytes: int | None = None) -> int:
    """Write rows until they end or the file has ``max_bytes``; returns their number."""
    count = 0
    with path.open("wb") as file:
        with parquet.RowWriter(file) as writer:
            for row in rows:
                writer.write(_plain(row))
                count += 1
                if max_bytes is not None and file.tell() >= max_bytes:
                    break
    return count


def _write_folder(path: Path, rows: Iterator[Row], run: Path, outcome: Which, shard_bytes: int) -> list[str]:
    (path / "data").mkdir(parents=True)
    names: list[str] = []
    count = 0
    for row in rows:
        name = f"data/train-{len(names):05d}.parquet"
        count += _write_parquet(path / name, itertools.chain([row], rows), shard_bytes)
        names.append(name)
    (path / "README.md").write_text(_card(run, outcome, count), encoding="utf-8")
    return names


def _card(run: Path, outcome: Which, count: int) -> str:
    info = read_info(run)
    listed = {name: info[name] for name in ("recipe", "seed", "status", "config", "versions") if name in info}
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# {info.get("recipe") or run.name}

{count} samples of outcome `{outcome}`, in whole groups.

{columns_table()}

```json
{msgspec.json.format(to_json(listed), indent=2).decode()}
```
"""
