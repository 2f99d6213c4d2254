"""Law 8 of teachers on a stored run: each stored logprob of a teacher is that of the teacher's weights.

Invariant: every sampled token with a logprob of a teacher is compared with a teacher-forced forward pass of that
teacher's folder at temperature 1, and so are its most probable ids. A column that the record contradicts is a violation
without weights: a teacher that is named and has no column, a logprob above 0, one on context, wrong most probable ids.
A sample without a column, a column that names no teacher, and a tokenizer that cannot be compared are named in a note.

It finds what no request shows: a teacher that served other weights than its user thinks, the policy's own among them.
This module knows no server. It needs the extra ``engine``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards.teacher_top import SCORED_BY, TOLERANCE, TeacherTop, checked_top, top_of
from rollouts.rewards.teachers import first_different_id
from rollouts.runs.folder import Row, read_rows
from rollouts.runs.info import read_info
from rollouts.runs.logprobs import TOLERANCES, Compared, VersionReport, of_many_tokens, verdict
from rollouts.training.sample_laws import LAWS, Violation
from rollouts.training.types import Sample

__all__ = ["TeacherReport", "check_teachers"]


@attrs.define
class TeacherReport:
    """The result of the comparison."""

    dtype: str
    tolerance: float
    teachers: list[VersionReport]
    tops: int = 0
    """The number of tokens whose most probable ids were compared."""
    violations: list[Violation] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        tops = f", the most probable ids of {self.tops}" if self.tops else ""
        how = f"{self.dtype}, temperature 1, tolerance {self.tolerance:g}"
        head = f"law 8 ({LAWS[8]}) of teachers: {verdict(self.teachers, self.violations)}{tops} ({how})"
        return "\n".join([head, *(f"  {one}" for one in self.teachers), *(f"note: {one}" for one in self.notes)])


@attrs.frozen(eq=False)
class _Scored:
    """The logprobs of a teacher in one row."""

    row: Row
    sample: Sample
    name: str
    """The teacher's URL; empty if the row names none."""
    positions: npt.NDArray[np.int64]
    """Of the sampled tokens, ``[n]``."""
    logprobs: npt.NDArray[np.float32]
    """Of the sampled tokens, ``[n]``."""
    top: TeacherTop | None

    def place(self, position: int) -> str:
        return f"{_place(self.row, self.sample)}, teacher_log_probs, position {position}"


def check_teachers(
    run: str | Path,
    models: Mapping[str | None, Path],
    rivals: Mapping[str | None, Path] | None = None,
    *,
    dtype: str | None = None,
    tolerance: float | None = None,
) -> TeacherReport:
    """Compare the teachers' logprobs of a run with the weights of each teacher.

    Args:
        run: the run's folder; laws 1 to 5 hold for it.
        models: the folder of each teacher by its URL in ``metadata["scored_by"]``. That of ``None`` is for all others,
            and for columns that name no teacher.
        rivals: folders of the policy; in bfloat16 and float16, each teacher is compared with them, too.
        dtype: of weights and computation; by default that in which the first folder stores its weights.
        tolerance: largest difference of a logprob; by default that of :data:`~rollouts.runs.logprobs.TOLERANCES`.

    Raises:
        ConfigError: the run does not exist or has no logprobs of a teacher, a teacher has no folder, or a folder has
            no teacher or does not load.
    """
    from rollouts.engine.teacher import Teacher, dtype_of  # here: it imports torch

    dtype = dtype or dtype_of(models.get(None) or next(iter(models.values())))
    if dtype not in TOLERANCES:
        raise ConfigError.of("--dtype", dtype, f"one of {', '.join(TOLERANCES)}")
    report = TeacherReport(dtype, TOLERANCES[dtype] if tolerance is None else tolerance, [])
    names = _judge_records(Path(run), report)
    teachers = _reports(names, models)
    report.teachers = list(teachers.values())
    _compare_tokenizers(Path(run), report)
    if report.violations:
        report.notes.append("logprobs not compared with the weights, since the records contradict themselves")
        return report
    others = {} if dtype == "float32" else _rivals(teachers, [*models.values(), *(rivals or {}).values()])
    compared = Compared()
    for folder in dict.fromkeys(
        [one.folder for one in teachers.values()] + [one for of in others.values() for one in of]
    ):
        _compare(Path(run), folder, Teacher(folder, dtype), teachers, report, others, compared)
    for name, teacher in teachers.items():
        teacher.slopes = compared.slopes(name, teacher.folder, others.get(name, []))
        report.violations += of_many_tokens(teacher, report.tolerance)
    return report


def _judge_records(run: Path, report: TeacherReport) -> list[str]:
    """Judge what needs no weights; returns the teachers in the order of their first sample."""
    names: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for row in read_rows(run, "all"):
        sample = row.sample()
        scored = sample.teacher_column is not None
        counts["kept"] += row.outcome == "kept"
        counts["not scored"] += row.outcome == "kept" and not scored
        report.violations += list(_contradictions(row, sample))[:1]
        if scored:
            names[name := _name_of(sample)] = None
            counts["unnamed"] += not name
            top = sample.metadata.get(SCORED_BY)
            counts["students"] += isinstance(top, Mapping) and "student_log_probs" in top
    if not names and not report.violations:
        raise ConfigError.of("--teacher-model", str(run), "a run whose samples have teacher_log_probs: none has")
    if counts["not scored"]:
        report.notes.append(
            f"{counts['not scored']} of {counts['kept']} samples in batches have no logprobs of a teacher"
        )
    if counts["unnamed"]:
        report.notes.append(f'the columns of {counts["unnamed"]} samples name no teacher (metadata["{SCORED_BY}"])')
    if counts["students"]:
        report.notes.append(f"the student's logprobs of {counts['students']} samples were not compared")
    return list(names)


def _contradictions(row: Row, sample: Sample) -> Iterator[Violation]:
    """The contradictions in a record of a teacher's logprobs."""
    place, column = f"{_place(row, sample)}, teacher_log_probs", sample.teacher_column
    named, mask = SCORED_BY in sample.metadata, sample.mask_column
    if named and not _name_of(sample):
        yield Violation(8, f"{_place(row, sample)}, metadata[{SCORED_BY!r}]", "no url", "the URL of one teacher")
    if column is None:
        if named:
            yield Violation(8, place, "none", f"a logprob of each sampled id, by {_name_of(sample)}")
        return
    above = mask & (column > TOLERANCE)
    if above.any():
        at = int(above.argmax())
        yield Violation(8, f"{place}, position {at}", f"{column[at]:.6g}", "a logprob, at most 0")
    context = ~mask & (column != 0)
    if named and context.any():
        at = int(context.argmax())
        yield Violation(8, f"{place}, position {at}", f"{column[at]:.6g}", "0: the id was not sampled")
    try:
        if (top := top_of(sample)) is not None:
            checked_top(top, sample.token_column[mask], column[mask])
    except (ConfigError, RewardFailure) as error:
        yield Violation(8, f"{_place(row, sample)}, metadata[{SCORED_BY!r}]", error, "the teacher's most probable ids")


def _name_of(sample: Sample) -> str:
    stored = sample.metadata.get(SCORED_BY)
    url = stored.get("url") if isinstance(stored, Mapping) else None
    return url if isinstance(url, str) else ""


def _place(row: Row, sample: Sample) -> str:
    return f"{row} (group {sample.group_index} · index {sample.index})"


def _reports(names: list[str], models: Mapping[str | None, Path]) -> dict[str, VersionReport]:
    """An empty report for each teacher."""
    folders = {name: models.get(name) or models.get(None) for name in names}
    missing = [name or "DIR, for columns that name no teacher" for name, folder in folders.items() if folder is None]
    unknown = [name for name in models if name is not None and name not in names]
    if missing or unknown:
        expected = (
            f"a folder for each teacher of the run, {', '.join(f'{name}=DIR' for name in names if name) or 'DIR'}"
        )
        raise ConfigError.of("--teacher-model", [f"{name}={folder}" for name, folder in models.items()], expected)
    return {name: VersionReport(name, folder, kind="teacher") for name, folder in folders.items() if folder is not None}


def _compare_tokenizers(run: Path, report: TeacherReport) -> None:
    """Judge that each id is one token for teacher and policy, where both tokenizers are on this machine."""
    policy = read_info(run).get("tokenizer")
    for folder in dict.fromkeys(one.folder for one in report.teachers):
        here = isinstance(policy, str) and Path(policy).is_dir() and (folder / "tokenizer_config.json").is_file()
        if not here or not isinstance(policy, str):
            report.notes.append(f"the tokenizers of {folder} and of the policy, {policy}, are not both on this machine")
        elif (different := first_different_id(folder, policy)) is not None:
            number, theirs, ours = different
            got, expected = f"id {number} is {theirs!r}", f"{ours!r}, as in {policy}"
            report.violations.append(Violation(8, f"tokenizer of {folder}", got, expected))


def _rivals(teachers: Mapping[str, VersionReport], folders: list[Path]) -> dict[str, list[Path]]:
    """The folders that may have given the logprobs of each teacher in its place."""
    return {
        name: [folder for folder in dict.fromkeys(folders) if folder != teacher.folder]
        for name, teacher in teachers.items()
    }


def _scored(run: Path) -> Iterator[_Scored]:
    for row in read_rows(run, "all"):
        sample = row.sample()
        column, positions = sample.teacher_column, np.flatnonzero(sample.mask_column)
        if column is not None and len(positions):
            yield _Scored(row, sample, _name_of(sample), positions, column[positions], top_of(sample))


def _compare(
    run: Path,
    folder: Path,
    model: Any,
    teachers: Mapping[str, VersionReport],
    report: TeacherReport,
    rivals: Mapping[str, list[Path]],
    compared: Compared,
) -> None:
    """Compare the logprobs of the teachers of a folder, and collect those of teachers to which it is a rival."""
    worst: dict[str, Violation] = {}
    for one in _scored(run):
        teacher = teachers[one.name]
        if teacher.folder != folder and folder not in rivals.get(one.name, ()):
            continue
        tokens = one.sample.token_column
        top = one.top if teacher.folder == folder else None
        largest_id = int(max(tokens.max(), -1 if top is None else top.ids.max()))
        if largest_id >= model.vocab_size:
            expected = f"a model with the id {largest_id}, which is in {one.row}; it has {model.vocab_size} ids"
            raise ConfigError.of("--teacher-model", str(folder), expected)
        exact = model.logprobs(tokens, one.positions, 1.0)
        if rivals.get(one.name):
            compared.exact.setdefault((one.name, folder), []).append(exact)
        if teacher.folder != folder:
            continue
        if rivals.get(one.name):
            compared.stored.setdefault(one.name, []).append(one.logprobs)
        at, _, is_new = teacher.add(one.logprobs, exact, report.tolerance)
        if is_new:
            got = f"logprob {float(one.logprobs[at]):.6g} of {teacher.name}"
            worst[one.name] = Violation(
                8, one.place(int(one.positions[at])), got, f"{float(exact[at]):.6g}, that of {folder}"
            )
        if top is not None:
            report.tops += len(one.positions)
            report.violations += list(_of_top(one, top, model, folder, report.tolerance))[:1]
    report.violations += [worst[name] for name, of in teachers.items() if name in worst and of.beyond]


def _of_top(one: _Scored, top: TeacherTop, model: Any, folder: Path, tolerance: float) -> Iterator[Violation]:
    """The most probable ids of a row: each has its logprob under the weights, and no other id has a larger one."""
    own, best = model.top_logprobs(one.sample.token_column, one.positions, top.ids)
    for exact, words in ((own, "of id {}"), (best, "of the most probable id number {}")):
        wrong = ~(np.abs(top.logprobs - exact) <= tolerance)
        if wrong.any():
            row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
            which = words.format(int(top.ids[row, column]) if exact is own else int(column))
            got = f"logprob {float(top.logprobs[row, column]):.6g} {which}"
            place = f"{_place(one.row, one.sample)}, metadata[{SCORED_BY!r}], position {int(one.positions[row])}"
            yield Violation(8, place, got, f"{float(exact[row, column]):.6g}, that of {folder}")
