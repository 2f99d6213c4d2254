"""Replay of a recorded run without a server and without its environments.

Invariant: every replayed sample equals the stored one in every field, bit for bit; otherwise the first difference is
raised. Metrics that depend on the clock or on restarts (``CIRCUMSTANCES``) are copied from the stored sample. Groups
with a failure are skipped: a failure contains its traceback, which a replay cannot reproduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.base.storable import to_json
from rollouts.errors import ConfigError, ReplayDiverged
from rollouts.recipe import Recipe
from rollouts.runs.images import ImageFolder
from rollouts.runs.info import read_info
from rollouts.runs.layout import JOURNAL, check_output
from rollouts.runs.reader import load_run
from rollouts.runs.recording import Recording, Tape, replayed_from
from rollouts.runs.run_history import RunHistory
from rollouts.training.failures import FailureStats
from rollouts.training.group_runner import GroupRunner
from rollouts.training.types import Sample

__all__ = ["CIRCUMSTANCES", "Replayed", "replay"]

CIRCUMSTANCES = (
    "environment_seconds",
    "attempts",
    "turns_before_resume",
    "restarted_at_resume",
    "unfit_turns_at_resume",
    "snapshot_failures",
)
"""Metrics that depend on the clock or on restarts, not on the rollout."""


@attrs.frozen
class Replayed:
    """Counts of the groups and samples that were replayed and are equal."""

    groups: int
    samples: int
    left_out: int
    """Groups that failed."""

    def __str__(self) -> str:
        return f"{self.samples} samples in {self.groups} groups are equal, {self.left_out} failed groups left out"


async def replay(run: Path, recipe: Recipe, out: Path | None = None, *, overwrite: bool = False) -> Replayed:
    """Replay every settled group of a recorded run and compare it with the stored one.

    Args:
        run: the run's folder.
        recipe: the run's recipe, possibly changed since.
        out: a JSONL file for the replayed samples.
        overwrite: replace an existing file.

    Raises:
        ReplayDiverged: a request or a field of a sample differs.
        ConfigError: the run was not recorded, the recipe has other data or sizes, or ``out`` exists or lies among
            the files of a run.
        JournalError: the recording is damaged.
    """
    if out is not None:
        check_output(out, "--out", overwrite=overwrite)
    recording = Recording(run)
    info = read_info(run)
    history = RunHistory.read(run / JOURNAL)
    _check_same(info, history, recipe)
    stored = load_run(run, "all")
    indices = stored.group_indices
    buffer = recipe.data_buffer
    buffer.resume_after(max(indices, default=-1) + 1, indices, history.draws)
    tapes: dict[int, Tape] = {}

    def tape_of(index: int) -> Tape:
        tapes[index] = recording.tape(index)
        return tapes[index]

    generate_fn = replayed_from(
        recipe.config.generate_fn, tape_of, recipe.environment_for("replay"), info.get("server") or {}
    )
    config = attrs.evolve(
        recipe.config, generate_fn=generate_fn, filter_fn=None, max_attempts=1, failures={}, failure_budget=None
    )
    runner = GroupRunner(config, FailureStats(None, 1), None, {}, lambda: False)
    groups = samples = 0
    with (out or Path("/dev/null")).open("wb") as file:
        for group_index in indices:
            before = stored.group(group_index)
            if any(sample.failure for sample in before):
                continue
            tapes.clear()
            group = await runner.run(buffer.take_by_index(group_index), {})
            for tape in tapes.values():
                tape.check()
            _compare(before, group.samples)
            if out is not None:
                for sample in group.samples:
                    ImageFolder(out.parent).write(sample.named_images)
            file.writelines(to_json(sample.to_dict()) + b"\n" for sample in group.samples)
            groups, samples = groups + 1, samples + len(before)
    return Replayed(groups, samples, len(indices) - groups)


def _check_same(info: Mapping[str, Any], history: RunHistory, recipe: Recipe) -> None:
    then = history.runs[0] if history.runs else {}
    if then.get("data") != recipe.data_buffer.fingerprint:
        raise ConfigError.of("recipe, data", recipe.data_buffer, "the seed and the prompts of the run")
    size = recipe.config.n_samples_per_prompt
    if size != then.get("n_samples_per_prompt"):
        raise ConfigError.of("recipe, n_samples_per_prompt", size, f"{then.get('n_samples_per_prompt')}, as in the run")


def _compare(stored: list[Sample], played: tuple[Sample, ...]) -> None:
    """Raise at the first difference; copies ``CIRCUMSTANCES`` and times from the stored samples."""
    if [sample.index for sample in stored] != [sample.index for sample in played]:
        got = [sample.index for sample in played]
        raise ReplayDiverged(f"group {stored[0].group_index}: samples {got}; expected {[s.index for s in stored]}")
    for before, after in zip(stored, played, strict=True):
        replayed = {name: value for name, value in after.metrics.items() if name not in CIRCUMSTANCES}
        copied = {name: value for name, value in before.metrics.items() if name in CIRCUMSTANCES or name in replayed}
        after.metrics = {**copied, **replayed}
        after.times = before.times
        then, now = (msgspec.json.decode(to_json(sample.to_dict())) for sample in (before, after))
        for completion, known in zip(now["completions"], then["completions"], strict=False):
            for name in _LATER & completion.keys() - known.keys():
                del completion[name]
        for name, value in then.items():
            if name == "step_completions" and not value:
                continue  # a run of an earlier version
            if now[name] != value:
                failure = f" ({after.failure.message})" if after.failure else ""
                raise ReplayDiverged(
                    f"group {before.group_index} · index {before.index}, {name}{_difference(now[name], value)}{failure}"
                )


_LATER = {"temperature", "logprobs_of"}
"""Fields of a completion that runs of earlier versions lack."""


def _difference(got: Any, expected: Any) -> str:
    if isinstance(got, list) and isinstance(expected, list):
        for position, (one, other) in enumerate(zip(got, expected, strict=False)):
            if one != other:
                return f", position {position}: got {one!r}; expected {other!r}"
        return f": got {len(got)} entries; expected {len(expected)}"
    return f": got {got!r}; expected {expected!r}"
