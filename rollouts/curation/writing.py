"""The folder of a curated data set.

    data/train-DIGEST-00000.parquet, …   the rows; or .jsonl
    README.md                            the card, which datasets.load_dataset(FOLDER) reads, too
    curation.json                        the account, the command and the runs, for programs

Invariant: rows are streamed; the folder appears complete or not at all. The same curation writes the same bytes. Other
rows have other file names: ``datasets`` caches a folder by its name and the names in its card, not by its content, and
would return the rows of an earlier folder (datasets 5.2.0, load.py: LocalDatasetModuleFactory).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from rollouts.base.extras import install_command
from rollouts.base.storable import to_json
from rollouts.curation.card import card, command_of
from rollouts.curation.curate import Account, Curation
from rollouts.curation.rows import COLUMNS
from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.columns import Type
from rollouts.runs.export import check_folder, replacing

__all__ = ["Format", "check_out", "write_folder"]

Format: TypeAlias = Literal["auto", "parquet", "jsonl"]
"""``auto`` is Parquet if pyarrow is installed."""

_WRITTEN = {"README.md", "curation.json", "data"}
_MARK = re.compile(r"^# Curated rollouts: \w+$", re.MULTILINE)
_SHARD_BYTES = 256 << 20


def check_out(out: str | Path, format: Format = "auto", *, overwrite: bool = False) -> Literal["parquet", "jsonl"]:
    """Check that a data set may be written to a folder; returns the format of its files.

    Raises:
        ConfigError: it is a file, has other content, or lies among the files of a run; the format is unknown, or is
            Parquet without pyarrow.
    """
    check_folder(Path(out), _WRITTEN, _MARK, overwrite=overwrite, option="--out")
    if format not in ("auto", "parquet", "jsonl"):
        raise ConfigError.of("--format", format, '"auto", "parquet" or "jsonl"')
    if format == "parquet" and not parquet.available():
        raise ConfigError.of("--format", format, f'pyarrow, or "jsonl": {install_command("parquet")}')
    return "parquet" if format != "jsonl" and parquet.available() else "jsonl"


def write_folder(
    curation: Curation,
    out: str | Path,
    *,
    format: Format = "auto",
    overwrite: bool = False,
    without_source: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> Account:
    """Write the rows of a curation and their card.

    Args:
        curation: the rows.
        out: the folder; it appears when everything is written.
        format: of the files with rows.
        overwrite: replace an earlier data set of this kind.
        without_source: leave out the column ``source``, for trainers that take no other column than theirs.
        shard_bytes: size at which the next file starts.

    Returns:
        The account of the rollouts.

    Raises:
        ConfigError: as :func:`check_out`; or no row is left, with the reasons.
        RolloutsError: the disk refuses the write.
    """
    kind = check_out(out, format, overwrite=overwrite)
    columns = {
        name: type_ for name, type_ in COLUMNS[curation.target].items() if name != "source" or not without_source
    }
    rows: Iterator[dict[str, Any]] = ({name: row[name] for name in columns} for row in curation)
    head = next(rows, None)
    if head is None:
        reasons = "; ".join(f"{count} {reason}" for reason, count in curation.account.refused.most_common())
        raise ConfigError.of("runs", f"{curation.account.read} rollouts ({reasons})", "at least one row that is left")
    rows = itertools.chain([head], rows)
    with replacing(Path(out)) as temporary:
        (temporary / "data").mkdir(parents=True)
        names: list[str] = []
        for row in rows:
            name = f"data/train-{len(names):05d}.{kind}"
            _write_file(temporary / name, itertools.chain([row], rows), columns, shard_bytes)
            names.append(name)
        names = _named_by_content(temporary, names)
        facts = {
            "command": command_of(curation, without_source=without_source),
            "target": curation.target,
            "account": curation.account.to_dict(),
            "runs": [{"run": str(run.path), "model": run.model, "sha256": run.digest} for run in curation.runs],
        }
        (temporary / "curation.json").write_bytes(msgspec.json.format(to_json(facts), indent=2) + b"\n")
        (temporary / "README.md").write_text(card(curation, names, without_source=without_source), encoding="utf-8")
    return curation.account


def _named_by_content(folder: Path, names: list[str]) -> list[str]:
    """Add a digest of all rows to the names of the files; returns the new names."""
    hashed = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            while part := file.read(1 << 20):
                hashed.update(part)
    named = [name.replace("data/train-", f"data/train-{hashed.hexdigest()[:8]}-") for name in names]
    for name, new in zip(names, named, strict=True):
        (folder / name).rename(folder / new)
    return named


def _write_file(path: Path, rows: Iterator[dict[str, Any]], columns: Mapping[str, Type], max_bytes: int) -> None:
    with path.open("wb") as file:
        if path.suffix == ".parquet":
            with parquet.RowWriter(file, columns, sized="input_ids") as writer:
                for row in rows:
                    writer.write(row)
                    if file.tell() >= max_bytes:
                        break
        else:
            for row in rows:
                file.write(to_json(row) + b"\n")
                if file.tell() >= max_bytes:
                    break
