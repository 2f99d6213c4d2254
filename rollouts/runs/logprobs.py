"""Law 8 on a stored run: each stored logprob is that of the weights that its token names.

Invariant: every sampled token of the run is compared with a teacher-forced forward pass of the weights of its version,
under the distribution that the record of its completion names; ``run.json`` names it only for completions that do not.
Tokens of a version without weights, or of a distribution that weights alone do not give, are refused before any
comparison. It finds what laws 1 to 5 cannot: a prefix that was cached under other weights, a server that changed
unseen, a run that was continued on another model. It needs the extra ``engine``.

In bfloat16 and float16 the largest difference shows gross faults only, since rounding is as large as the difference of
neighbouring weights. So the mean has a limit too, and each version is also compared with the weights of its
neighbours, and with folders that no version of the run has (``slope.py``).

This module knows no server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info
from rollouts.runs.samplings import Samplings
from rollouts.runs.slope import Slope, slope_of
from rollouts.training.sample_laws import LAWS, Violation

__all__ = [
    "MEAN_SHARE",
    "TOLERANCES",
    "Compared",
    "LogprobReport",
    "VersionReport",
    "check_logprobs",
    "of_many_tokens",
    "verdict",
]

Numbers: TypeAlias = "npt.NDArray[np.floating]"

TOLERANCES = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1.0}
"""Largest difference of a logprob by dtype: two correct implementations differ by rounding, most for rare tokens. In
bfloat16, the largest of 5,000 tokens of an honest run was 0.15 to 0.63, and the mean 0.008."""
MEAN_SHARE = 0.1
"""The largest mean difference of a version, as a share of the tolerance."""


@attrs.define
class VersionReport:
    """The comparison of the tokens of one version, or of the logprobs of one teacher."""

    version: str
    folder: Path
    tokens: int = 0
    largest: float = 0.0
    beyond: int = 0
    """Tokens that differ by more than the tolerance."""
    sum: float = 0.0
    signed_sum: float = 0.0
    slopes: list[Slope] = attrs.field(factory=list)
    kind: str = "version"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.version!r}"

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.tokens)

    def add(self, stored: Numbers, exact: Numbers, tolerance: float) -> tuple[int, float, bool]:
        """Count the logprobs of some tokens; returns position and size of their largest difference, and whether it is
        the largest so far. NaN is larger than any number.
        """
        signed = stored - exact
        part = np.abs(signed)
        at = int(part.argmax())  # of NaN, if there is one
        largest = float(part[at])
        self.tokens += len(part)
        self.sum += float(part.sum())
        self.signed_sum += float(signed.sum())
        self.beyond += int(np.count_nonzero(~(part <= tolerance)))
        is_new = not (largest <= self.largest or math.isnan(self.largest))
        if is_new:
            self.largest = largest
        return at, largest, is_new

    def __str__(self) -> str:
        signed = self.signed_sum / max(1, self.tokens)
        numbers = f"largest difference {self.largest:.1e}, mean {self.mean:.1e}, signed mean {signed:+.1e}"
        slopes = "".join(f"; {slope}" for slope in self.slopes)
        return f"{self.name} against {self.folder}: {self.tokens} tokens, {numbers}{slopes}"


@attrs.define
class LogprobReport:
    """The result of the comparison."""

    dtype: str
    tolerance: float
    temperatures: list[float]
    """Those of the run's completions, ascending."""
    versions: list[VersionReport]
    violations: list[Violation] = attrs.field(factory=list)
    """One for each version with differences, at its largest; others for its mean, and for weights that fit it."""

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        temperatures = ", ".join(f"{one:g}" for one in self.temperatures)
        how = f"{self.dtype}, temperature {temperatures}, tolerance {self.tolerance:g}"
        head = f"law 8 ({LAWS[8]}): {verdict(self.versions, self.violations)} ({how})"
        return "\n".join([head, *(f"  {one}" for one in self.versions)])


def verdict(compared: Sequence[VersionReport], violations: Sequence[Violation]) -> str:
    """Whether the law holds, and the number of tokens."""
    count = max(sum(one.beyond for one in compared), len(violations))
    return f"{f'{count} violations' if count else 'holds'}, {sum(one.tokens for one in compared)} tokens compared"


def check_logprobs(
    run: str | Path, models: Mapping[str | None, Path], *, dtype: str | None = None, tolerance: float | None = None
) -> LogprobReport:
    """Compare every sampled token of a run with the weights of its version.

    Args:
        run: the run's folder; laws 1 to 5 hold for it.
        models: the folder of each version: a model, or a LoRA adapter of the model of ``None``. That of ``None`` is
            for all versions without one. A seat with another policy names its versions ``SEAT/VERSION``; the folder of
            ``SEAT`` is for all of them.
        dtype: of weights and computation; by default that in which the first folder stores its weights.
        tolerance: largest difference of a logprob; by default that of :data:`TOLERANCES`.

    Raises:
        ConfigError: there is no run, a version has no folder, a folder does not load, or neither a completion nor the
            run names its temperature; or its logprobs are of the truncated distribution (``processed``).
    """
    from rollouts.engine.teacher import Teacher, dtype_of  # here: it imports torch

    samplings = Samplings(Path(run))
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
    rivals = {} if dtype == "float32" else _rivals(reports, models)
    compared = Compared()
    folders = [*(version.folder for version in reports.values()), *(one for found in rivals.values() for one in found)]
    for folder in dict.fromkeys(folders):
        _compare(
            Path(run), folder, Teacher(folder, dtype, models.get(None)), reports, report, samplings, rivals, compared
        )
    for name, version in reports.items():
        version.slopes = compared.slopes(name, version.folder, rivals.get(name, []))
        report.violations += of_many_tokens(version, report.tolerance)
    return report


def _rivals(reports: Mapping[str, VersionReport], models: Mapping[str | None, Path]) -> dict[str, list[Path]]:
    """The folders that may have sampled the tokens of each version instead of its folder: of the versions before and
    after it, and all folders that no version has."""
    versions = list(reports.values())
    unused = set(models.values()).difference(version.folder for version in versions)
    rivals = {}
    for number, version in enumerate(versions):
        near = [one.folder for one in versions[max(0, number - 1) : number + 2]]
        rivals[version.version] = [folder for folder in dict.fromkeys([*near, *unused]) if folder != version.folder]
    return rivals


def of_many_tokens(version: VersionReport, tolerance: float) -> list[Violation]:
    """The violations of a version that no token shows alone."""
    place, found = f"{version.name}, {version.tokens} tokens", []
    if not version.beyond and not version.mean <= MEAN_SHARE * tolerance:
        expected = f"at most {MEAN_SHARE * tolerance:g} against {version.folder}"
        found.append(Violation(8, place, f"a mean difference of {version.mean:.2g}", expected))
    for slope in version.slopes:
        if slope.fits_rival:
            got = f"logprobs of {slope.rival} (slope {slope.value:.2f} ± {slope.error:.2f})"
            found.append(Violation(8, place, got, f"those of {version.folder} (slope 0)"))
    return found


@attrs.define(eq=False)
class Compared:
    """The logprobs of a run that are compared with several folders, in the order of its tokens."""

    stored: dict[str, list[Numbers]] = attrs.field(factory=dict)
    exact: dict[tuple[str, Path], list[Numbers]] = attrs.field(factory=dict)

    def slopes(self, version: str, folder: Path, rivals: Sequence[Path]) -> list[Slope]:
        if not rivals:
            return []
        stored, own = np.concatenate(self.stored[version]), np.concatenate(self.exact[version, folder])
        found = [slope_of(rival, stored, own, np.concatenate(self.exact[version, rival])) for rival in rivals]
        return [slope for slope in found if slope is not None]


def _versions(run: str | Path, models: Mapping[str | None, Path], samplings: Samplings) -> dict[str, VersionReport]:
    """An empty report for each version in the run, in the order of its first token; checks every completion."""
    names: dict[str, None] = {}
    for row in read_rows(run, "all"):
        sample = row.sample()
        samplings.of(sample, row)
        names |= dict.fromkeys(span.version for span in sample.versions)
    folders = {name: _folder_of(name, models) for name in names}
    _check_adapters(Path(run), [name for name in names if name not in models])
    missing = [name for name, folder in folders.items() if folder is None]
    if missing:
        expected = f"a folder for each version of the run, also for {', '.join(f'{name}=DIR' for name in missing)}"
        raise ConfigError.of("--model", [f"{name}={folder}" for name, folder in models.items()], expected)
    return {name: VersionReport(name, folder) for name, folder in folders.items() if folder is not None}


def _folder_of(version: str, models: Mapping[str | None, Path]) -> Path | None:
    """The folder of a version; of one of a seat, ``SEAT/VERSION``, that of the seat where it has no other."""
    seat = version.partition("/")[0]
    return models.get(version) or models.get(seat) or models.get(None)


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
    samplings: Samplings,
    rivals: Mapping[str, Sequence[Path]],
    compared: Compared,
) -> None:
    worst: dict[str, Violation] = {}
    for row in read_rows(run, "all"):
        sample = row.sample()
        spans = [
            span
            for span in sample.versions
            if reports[span.version].folder == folder or folder in rivals.get(span.version, ())
        ]
        if not spans:
            continue
        tokens, stored = sample.token_column, sample.logprob_column
        assert stored is not None, "law 2: a sampled token has a logprob"
        if int(tokens.max()) >= teacher.vocab_size:
            expected = f"a model with the id {int(tokens.max())}, which is in {row}; it has {teacher.vocab_size} ids"
            raise ConfigError.of("--model", str(folder), expected)
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        distribution = samplings.of(sample, row)
        masked = distribution.without_stops[positions]
        exact = teacher.logprobs(
            tokens,
            positions,
            distribution.divisors[positions],
            without=samplings.stop_ids if masked.any() else (),
            masked=masked,
        )
        stop = 0
        for span in spans:
            first, stop = stop, stop + span.stop - span.start
            of, here = reports[span.version], exact[first:stop]
            if rivals.get(span.version):
                compared.exact.setdefault((span.version, folder), []).append(here)
            if of.folder != folder:
                continue
            if rivals.get(span.version):
                compared.stored.setdefault(span.version, []).append(stored[span.start : span.stop])
            at, _, is_new = of.add(stored[span.start : span.stop], here, report.tolerance)
            if is_new:
                position = span.start + at
                worst[of.version] = Violation(
                    8,
                    f"{row} (group {sample.group_index} · index {sample.index}), position {position}",
                    f"logprob {float(stored[position]):.6g} of version {of.version!r}",
                    f"{float(exact[first + at]):.6g}, that of {folder}",
                )
    report.violations += [worst[name] for name, of in reports.items() if name in worst and of.beyond]
