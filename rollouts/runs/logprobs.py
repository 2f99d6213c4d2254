"""Law 8 on a stored run: each stored logprob is that of the weights that its token names.

Invariant: every sampled token of the run is compared with a teacher-forced forward pass of the weights of its version,
under the distribution that the record of its completion names; ``run.json`` names it only for completions that do not.
Tokens of a version without weights, or of a distribution that weights alone do not give, are refused before any
comparison. It finds what laws 1 to 5 cannot: a prefix that was cached under other weights, a server that changed
unseen, a run that was continued on another model. It needs the extra ``engine``.

This module knows no server.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.errors import ConfigError
from rollouts.runs.folder import JOURNAL, Row, read_info, read_rows
from rollouts.runs.run_journal import RunHistory
from rollouts.runs.settings import recorded_settings
from rollouts.training.sample_laws import LAWS, Violation
from rollouts.training.types import Sample

__all__ = ["TOLERANCES", "LogprobReport", "VersionReport", "check_logprobs"]

TOLERANCES = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.5}
"""Largest difference of a logprob by dtype: two correct implementations differ by rounding, most for rare tokens."""


@attrs.define
class VersionReport:
    """The comparison of the tokens of one version."""

    version: str
    folder: Path
    tokens: int = 0
    largest: float = 0.0
    beyond: int = 0
    """Tokens that differ by more than the tolerance."""
    sum: float = 0.0

    def __str__(self) -> str:
        mean = self.sum / max(1, self.tokens)
        numbers = f"largest difference {self.largest:.1e}, mean {mean:.1e}"
        return f"version {self.version!r} against {self.folder}: {self.tokens} tokens, {numbers}"


@attrs.define
class LogprobReport:
    """The result of the comparison."""

    dtype: str
    tolerance: float
    temperatures: list[float]
    """Those of the run's completions, ascending."""
    versions: list[VersionReport]
    violations: list[Violation] = attrs.field(factory=list)
    """One for each version with differences, at its largest."""

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        beyond = sum(version.beyond for version in self.versions)
        verdict = f"{beyond} violations" if beyond else "holds"
        compared = f"{sum(version.tokens for version in self.versions)} tokens compared"
        temperatures = ", ".join(f"{one:g}" for one in self.temperatures)
        how = f"{self.dtype}, temperature {temperatures}, tolerance {self.tolerance:g}"
        return "\n".join([f"law 8 ({LAWS[8]}): {verdict}, {compared} ({how})", *(f"  {one}" for one in self.versions)])


def check_logprobs(
    run: str | Path, models: Mapping[str | None, Path], *, dtype: str | None = None, tolerance: float | None = None
) -> LogprobReport:
    """Compare every sampled token of a run with the weights of its version.

    Args:
        run: the run's folder; laws 1 to 5 hold for it.
        models: the folder of each version: a model, or a LoRA adapter of the model of ``None``. That of ``None`` is
            for all versions without one.
        dtype: of weights and computation; by default that in which the first folder stores its weights.
        tolerance: largest difference of a logprob; by default that of :data:`TOLERANCES`.

    Raises:
        ConfigError: there is no run, a version has no folder, a folder does not load, or neither a completion nor the
            run names its temperature; or its logprobs are of the truncated distribution (``processed``).
    """
    from rollouts.engine.teacher import Teacher, dtype_of  # here: it imports torch

    samplings = _Samplings(Path(run))
    reports = _versions(run, models, samplings)
    if dtype is None:
        dtype = dtype_of(models.get(None) or next(iter(models.values())))
    if dtype not in TOLERANCES:
        raise ConfigError.of("--dtype", dtype, f"one of {', '.join(TOLERANCES)}")
    report = LogprobReport(
        dtype,
        TOLERANCES[dtype] if tolerance is None else tolerance,
        sorted(samplings.temperatures),
        list(reports.values()),
    )
    for folder in dict.fromkeys(version.folder for version in reports.values()):
        _compare(Path(run), folder, Teacher(folder, dtype, models.get(None)), reports, report, samplings)
    return report


def _versions(run: str | Path, models: Mapping[str | None, Path], samplings: _Samplings) -> dict[str, VersionReport]:
    """An empty report for each version in the run, in the order of its first token; checks every completion."""
    names: dict[str, None] = {}
    for row in read_rows(run, "all"):
        sample = row.sample()
        samplings.scales(sample, row)
        names |= dict.fromkeys(span.version for span in sample.versions)
    _check_adapters(Path(run), [name for name in names if name not in models])
    missing = [name for name in names if name not in models and None not in models]
    if missing:
        expected = f"a folder for each version of the run, also for {', '.join(f'{name}=DIR' for name in missing)}"
        raise ConfigError.of("--model", [f"{name}={folder}" for name, folder in models.items()], expected)
    return {name: VersionReport(name, models.get(name) or models[None]) for name in names}


def _check_adapters(run: Path, unnamed: Sequence[str]) -> None:
    """Refuse to compare tokens of LoRA adapters with their base model."""
    family = (read_info(run).get("endpoint") or {}).get("lora")
    adapters = [name for name in unnamed if family is not None and name.startswith(family)]
    if adapters:
        raise ConfigError.of("--lora", None, f"the folder of each adapter, {', '.join(f'{a}=DIR' for a in adapters)}")


def _compare(
    run: Path,
    folder: Path,
    teacher: Any,
    reports: Mapping[str, VersionReport],
    report: LogprobReport,
    samplings: _Samplings,
) -> None:
    worst: dict[str, Violation] = {}
    for row in read_rows(run, "all"):
        sample = row.sample()
        spans = [span for span in sample.versions if reports[span.version].folder == folder]
        if not spans:
            continue
        tokens, stored = sample.token_column, sample.logprob_column
        assert stored is not None, "law 2: a sampled token has a logprob"
        if int(tokens.max()) >= teacher.vocab_size:
            expected = f"a model with the id {int(tokens.max())}, which is in {row}; it has {teacher.vocab_size} ids"
            raise ConfigError.of("--model", str(folder), expected)
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        exact = teacher.logprobs(tokens, positions, samplings.scales(sample, row)[positions])
        differences = np.abs(stored[positions] - exact)
        first = 0
        for span in spans:
            of = reports[span.version]
            part = differences[first : first + span.stop - span.start]
            at = int(part.argmax())  # of NaN, if there is one
            of.tokens += len(part)
            of.sum += float(part.sum())
            of.beyond += int(np.count_nonzero(~(part <= report.tolerance)))
            if not part[at] <= of.largest:
                of.largest = float(part[at])
                position = span.start + at
                worst[of.version] = Violation(
                    8,
                    f"{row} (group {sample.group_index} · index {sample.index}), position {position}",
                    f"logprob {float(stored[position]):.6g} of version {of.version!r}",
                    f"{float(exact[first + at]):.6g}, that of {folder}",
                )
            first += len(part)
    report.violations += [worst[name] for name, of in reports.items() if name in worst and of.beyond]


@attrs.define
class _Samplings:
    """How the completions of a run were sampled."""

    run: Path
    temperatures: set[float] = attrs.field(factory=set, init=False)
    """Those of the completions so far; 0 for greedy ones."""

    def scales(self, sample: Sample, row: Row) -> npt.NDArray[np.float64]:
        """The divisor of the logits of each sampled token: its temperature, 1 if it is greedy or raw, ``[n]``.

        Raises:
            ConfigError: neither the completion nor the run names it, or it is of the truncated distribution.
        """
        column = np.zeros(len(sample))
        for number, one in enumerate(sample.completions):
            if one.logprobs_of == "processed":
                expected = "raw or tempered: top-k, top-p and min-p of a completion are not recorded"
                raise ConfigError.of(f"{row}, completions[{number}].logprobs_of", one.logprobs_of, expected)
            if one.logprobs_of is None:
                self._check_provider()
            temperature = self._of_run if one.temperature is None else 0.0 if self._greedy else one.temperature
            self.temperatures.add(temperature)
            column[one.start : one.stop] = 1.0 if one.logprobs_of == "raw" else temperature or 1.0
        rest = sample.mask_column & (column == 0)
        if rest.any():
            self._check_provider()
            self.temperatures.add(self._of_run)
            column[rest] = self._of_run or 1.0
        return column

    @functools.cached_property
    def _recorded(self) -> list[dict[str, Any]]:
        """The sampling parameters of each start of the run."""
        info = read_info(self.run)
        settings = [start.get("settings") or {} for start in _starts(self.run)] or [info.get("settings") or {}]
        return [start.get("sampling") or recorded_settings(info).get("sampling") or {} for start in settings]

    @functools.cached_property
    def _greedy(self) -> bool:
        """Whether each start sampled with ``top_k=1``, at which servers ignore the temperature."""
        return all(sampling.get("top_k") == 1 for sampling in self._recorded)

    @functools.cached_property
    def _of_run(self) -> float:
        """The temperature of completions without one, as in runs of earlier versions.

        Raises:
            ConfigError: the run does not name it, or was resumed with another one.
        """
        found = {0.0 if sampling.get("top_k") == 1 else sampling.get("temperature") for sampling in self._recorded}
        value = found.pop() if len(found) == 1 else sorted(map(str, found))
        if not isinstance(value, int | float):
            name = f"{self.run / 'run.json'}, settings.sampling.temperature"
            raise ConfigError.of(name, value, "one number for the whole run")
        return float(value)

    def _check_provider(self) -> None:
        """Check that logprobs whose distribution is not recorded are of a server whose distribution is known."""
        if self._provider not in ("sglang", "vllm"):
            expected = "sglang or vllm, whose logprobs are known"
            raise ConfigError.of(f"{self.run / 'run.json'}, endpoint.provider", self._provider, expected)

    @functools.cached_property
    def _provider(self) -> Any:
        return (read_info(self.run).get("endpoint") or {}).get("provider", "sglang")


def _starts(run: Path) -> list[dict[str, Any]]:
    """The journal's record of each start of the run."""
    return list(RunHistory.read(run / JOURNAL).runs) if (run / JOURNAL).is_dir() else []
