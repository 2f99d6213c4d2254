"""Batches of a stored run as files of a trainer's own type: one table from a trainer's name to its function.

Invariant: a file has every sample of its batch, with its tokens, mask, logprobs, versions and reward. A sample that the
trainer's type cannot hold is refused by name. The files appear together, or none does.

This module knows no trainer; it imports the function of the exporter that is named.
"""

from __future__ import annotations

import itertools
import pkgutil
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from rollouts.base.plugins import plugins
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.layout import batch_name, check_outside
from rollouts.training.rows import check_has_ids

__all__ = ["EXPORTERS", "Exporter", "export_batches", "exporter_of", "exporters"]

ENTRY_POINTS = "rollouts.exporters"
"""The group in which packages add an :class:`Exporter`."""


@attrs.frozen
class Exporter:
    """How a batch becomes a file of a trainer."""

    function: str
    """``module:name`` of a function of the samples of a batch and the path of its file."""
    suffix: str
    meaning: str
    """The content of the file, for ``--help``."""
    package: str | None = None
    """The package that writes it; ``None`` if the file is plain data."""
    numbers_versions: bool = False
    """Whether the file has policy versions as numbers, so that the function takes ``version=``."""
    no_temperature: str | None = None
    """Why the function does not take the trainer's ``temperature=``; ``None`` if it does."""


EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {
        "areal": Exporter(
            "rollouts.integrations.areal:write_batch",
            ".pt",
            "torch.load: a list of dicts, one for each group; no forks",
            "areal",
            numbers_versions=True,
        ),
        "nemo": Exporter(
            "rollouts.integrations.nemo_rl:write_batch",
            ".pt",
            "torch.load: message logs and rewards; no forks",
            numbers_versions=True,
        ),
        "openrlhf": Exporter(
            "rollouts.integrations.openrlhf:write_batch", ".jsonl", "a line for each response of an executor; no forks"
        ),
        "prime-rl": Exporter(
            "rollouts.integrations.prime_rl:write_batch",
            ".bin",
            "msgpack: a list of TrainingSample",
            "prime_rl",
            no_temperature="its files have the temperature of each token",
        ),
        "skyrl": Exporter(
            "rollouts.integrations.skyrl:write_batch", ".json", "a GeneratorOutput, step-wise if a rollout forks"
        ),
        "tinker": Exporter(
            "rollouts.integrations.tinker:write_batch",
            ".jsonl",
            "a line for each datum, its columns as lists",
            no_temperature="its forward_backward divides by no temperature, so a run has 1",
        ),
        "verl": Exporter(
            "rollouts.integrations.verl.rows:write_batch",
            ".pkl",
            "DataProto.load_from_disk; no rollouts that fork",
            "verl",
            numbers_versions=True,
        ),
    }
)


def exporters() -> list[str]:
    """The names of the exporters, built in and of packages; none of them is imported."""
    return [*EXPORTERS, *(name for name in plugins(ENTRY_POINTS) if name not in EXPORTERS)]


def exporter_of(name: str) -> Exporter:
    """The exporter with this name; built-in names cannot be replaced.

    Raises:
        ConfigError: no such name, or what the package adds is not an :class:`Exporter`.
    """
    if name in EXPORTERS:
        return EXPORTERS[name]
    added = plugins(ENTRY_POINTS).get(name)
    if added is None:
        raise ConfigError.of("--to", name, f"one of {', '.join(exporters())}")
    exporter = added.load()
    if not isinstance(exporter, Exporter):
        raise added.refused(f"got {exporter!r}; expected an Exporter of rollouts.integrations.exports")
    return exporter


def export_batches(
    run: str | Path,
    out: str | Path,
    trainer: str,
    *,
    version: int | None = None,
    temperature: float | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write one file for each batch of a run.

    Args:
        run: the run's folder.
        out: a folder that is new or empty.
        trainer: a name of :func:`exporters`.
        version: the number of the policy version of all tokens, if the server's versions are not numbers.
        temperature: that by which the trainer divides logits; by default 1.
        overwrite: replace the folder of an earlier export.

    Returns:
        The files.

    Raises:
        ConfigError: the run does not exist or has no batch, ``out`` is not such a folder, the trainer is not installed,
            its type cannot hold a sample, a sample was sampled at another temperature, or its files have no ``version``
            or ``temperature``.
    """
    exporter, out = exporter_of(trainer), Path(out)
    if version is not None and not exporter.numbers_versions:
        having = ", ".join(name for name, other in EXPORTERS.items() if other.numbers_versions)
        raise ConfigError.of("version", version, f"none with --to {trainer}: files for {having} have it")
    if temperature is not None and exporter.no_temperature is not None:
        raise ConfigError.of("temperature", temperature, f"none with --to {trainer}: {exporter.no_temperature}")
    options = {"version": version, "temperature": temperature}
    options = {name: value for name, value in options.items() if value is not None}
    check_outside(out, "OUT")
    if not out.name:
        raise ConfigError.of("OUT", str(out), "the name of a folder that is new; the current one is not replaced")
    present = [path.name for path in out.iterdir()] if out.is_dir() else []
    ours = all(name.startswith("batch-") and name.endswith(exporter.suffix) for name in present)
    if (out.exists() and not out.is_dir()) or (present and not (overwrite and ours)):
        found = ". --overwrite replaces the files of an earlier export" if present and ours else ""
        raise ConfigError.of("OUT", str(out), f"a folder that is new or empty{found}")
    write: Callable[..., None] = pkgutil.resolve_name(exporter.function)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        names = []
        for number, rows in itertools.groupby(read_rows(run, "kept"), lambda row: row.data.get("batch") or 0):
            names.append(batch_name(number) + exporter.suffix)
            samples = [row.sample() for row in rows]
            for sample in samples:
                check_has_ids(sample)  # before the packages of trainers are looked for
            write(samples, temporary / names[-1], **options)
        if not names:
            raise ConfigError.of("run", str(run), "a run with at least one batch")
        if out.is_dir():
            shutil.rmtree(out)
        temporary.replace(out)
    except ModuleNotFoundError as error:
        expected = f"the package {error.name}, which is not installed: docs/trainers/{trainer}.md"
        raise ConfigError.of("--to", trainer, expected) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [out / name for name in names]
