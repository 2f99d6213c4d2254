"""Evaluation: play every prompt of every configured data set ``n_samples`` times.

Invariant: the lists of a data set are equally long and in the order of its rows. A rollout that fails all attempts is
left out and counted in the metrics, never given a reward. With ``--log-passrate``, which counts by position, all
rollouts of its prompt are left out. If none is left, the evaluation raises.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, GenerateFailure, at
from rollouts.integrations.slime.buffer import TrainerBuffer
from rollouts.integrations.slime.extras import add_spans
from rollouts.integrations.slime.given_samples import shows_images
from rollouts.integrations.slime.pipeline import Pipeline
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.settings import NO_GROUP_RM, EvalSet, Settings
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.prompt_files import rows_of
from rollouts.training.types import Group, Sample, Status

__all__ = ["evaluate", "load_eval_rows"]

_LOG = logging.getLogger(__name__)
_NAMED = 5
"""Broken lines that a warning names."""
_tokenizer = functools.lru_cache(maxsize=2)(load_tokenizer)
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


async def evaluate(
    settings: Settings, pipeline: Pipeline, rollout_id: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Play all data sets concurrently.

    Returns:
        By data set the lists ``rewards``, ``truncated`` and ``samples``; and metrics.

    Raises:
        ConfigError: no data set is configured, one cannot be read, or the launch has ``--group-rm``.
        GenerateFailure: all rollouts of a data set failed.
    """
    if not settings.eval_sets:
        raise ConfigError.of("args.eval_datasets", [], "at least one data set: --eval-prompt-data or --eval-config")
    if settings.group_rm:
        raise ConfigError.of("args.group_rm", True, NO_GROUP_RM)
    data: dict[str, dict[str, Any]] = {entry.name: {} for entry in settings.eval_sets}
    metrics: dict[str, float] = {}

    async def play(entry: EvalSet) -> None:
        with at(f"evaluation {entry.name}"):
            rows, skipped = await anyio.to_thread.run_sync(load_eval_rows, entry, settings)
            groups = [
                [_rollout_of(rows[index // entry.n_samples], index, entry)]
                for index in range(len(rows) * entry.n_samples)
            ]
            buffer = TrainerBuffer(SimpleNamespace(get_samples=lambda count: []), 1, kept=groups)
            played = pipeline.for_evaluation(entry, rollout_id, buffer.taken.__getitem__)
            samples, failed = await _play(entry, buffer, len(groups), played)
        finished = [played.finished(sample) for sample in samples]
        if family().traces:
            for sample, record in zip(samples, finished, strict=True):
                add_spans([[record]], [buffer.taken[sample.group_index or 0].started.get(0)], of_group=False)
        data[entry.name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status is Status.TRUNCATED for sample in samples],
            "samples": finished,
        }
        metrics[f"eval/{entry.name}/failed_samples"] = failed
        if skipped:
            metrics[f"eval/{entry.name}/skipped_lines"] = skipped

    async with first_error() as sets:
        for entry in settings.eval_sets:
            sets.start_soon(play, entry)
    return data, metrics


async def _play(entry: EvalSet, buffer: TrainerBuffer, rollouts: int, pipeline: Pipeline) -> tuple[list[Sample], int]:
    """Play the rollouts; each is its own group, so a failure costs only that rollout."""
    groups: list[Group] = []
    async with AsyncRolloutManager(pipeline.evaluation(rollouts), buffer, on_group=groups.append) as manager:
        try:
            samples = await manager.generate_batch()
        except DataExhausted:
            samples = [sample for group in manager.ready_groups for sample in group.samples]
    failures = [group for group in groups if group.outcome == "failed"]
    if pipeline.settings.whole_prompts:
        incomplete = {(group.group_index or 0) // entry.n_samples for group in failures}
        samples = [sample for sample in samples if (sample.group_index or 0) // entry.n_samples not in incomplete]
    if not samples:
        lost = "a rollout of each prompt" if pipeline.settings.whole_prompts else f"all {rollouts} rollouts"
        raise GenerateFailure(f"evaluation {entry.name}: {lost} failed: {failures[0].reason}")
    return samples, len(failures)


def _rollout_of(row: Any, index: int, entry: EvalSet) -> Any:
    """slime's sample of one rollout of a row (slime 0.3.1, rollout/sglang_rollout.py: eval_rollout_single_dataset)."""
    sample = copy.copy(row)
    sample.index, sample.metadata = index, dict(row.metadata or {})
    for name in ("custom_rm_path", "generate_function_path"):
        if hasattr(sample, name):  # miles has only one of them
            setattr(sample, name, entry.function(name))
    return sample


def load_eval_rows(entry: EvalSet, settings: Settings) -> tuple[list[Any], int]:
    """slime's sample of each row of a data set, and the number of lines that are not JSON.

    slime's own class loads prompts of messages for a model with a processor; it refuses text for such a model
    (slime 0.3.1, utils/data.py: Dataset).

    Raises:
        ConfigError: the file is missing or of another format, a row has no prompt, or rows have images and slime is not
            installed or the model has no processor.
    """
    rows, skipped = _read(entry.path)
    longest = settings.eval_max_prompt_len
    prompts, model, processor = [row.get(entry.input_key) for row in rows], settings.endpoint.model, None
    if entry.multimodal_keys or entry.apply_chat_template or any(isinstance(prompt, list) for prompt in prompts):
        refused: Any = entry.multimodal_keys
        try:
            processor, expected = _processor(family().package, model), f"a model with a processor; {model} has none"
        except ImportError as error:
            expected = f"no images inside messages without {family().package}, whose data set loads them ({error})"
            refused = refused or any(map(shows_images, prompts))
        if processor is None and refused:
            name = "multimodal_keys" if entry.multimodal_keys else "path"
            raise ConfigError.of(f"eval data set {entry.name}.{name}", getattr(entry, name), expected)
    if processor is None:
        loaded = [_text_row(number, row, entry, settings) for number, row in enumerate(rows)]
        if longest is not None and loaded and isinstance(loaded[0].prompt, str):
            codec = Codec(_tokenizer(model))
            loaded = [row for row in loaded if len(codec.encode(row.prompt)) <= longest]
    else:
        loaded = _slimes_rows(entry, settings, processor)
    if not loaded:
        bound = "" if longest is None else f" of at most {longest} tokens (--eval-max-prompt-len)"
        raise ConfigError.of(f"eval data set {entry.name}", entry.path, f"a file with at least one row{bound}")
    if hasattr(entry.source, "inject_metadata"):
        for row in loaded:
            row.metadata = entry.source.inject_metadata(row.metadata)
    return loaded, skipped


def _slimes_rows(entry: EvalSet, settings: Settings, processor: Any) -> list[Any]:
    """The rows as slime's own class loads them; with a recipe, its prompts are messages."""
    dataset = importlib.import_module(f"{family().package}.utils.data").Dataset(
        entry.path,
        _tokenizer(settings.endpoint.model),
        processor,
        settings.eval_max_prompt_len,
        prompt_key=entry.input_key,
        multimodal_keys=dict(entry.multimodal_keys or {}),
        label_key=entry.label_key,
        tool_key=entry.tool_key,
        metadata_key=entry.metadata_key,
        apply_chat_template=entry.apply_chat_template and settings.recipe is None,
        apply_chat_template_kwargs=dict(entry.chat_template_kwargs),
    )
    return list(dataset.samples)


@functools.lru_cache(maxsize=2)
def _processor(package: str, model: str) -> Any:
    return importlib.import_module(f"{package}.utils.processing_utils").load_processor(model, trust_remote_code=True)


def _text_row(number: int, row: Mapping[str, Any], entry: EvalSet, settings: Settings) -> Any:
    """slime's sample of a row: where slime applies the chat template, of that text, or of a message with a recipe."""
    for key in (entry.input_key, entry.label_key):
        if key is not None and key not in row:
            raise ConfigError.of(f"{entry.path}, row {number}", sorted(row), f"the key {key!r}")
    prompt = row[entry.input_key]
    if entry.apply_chat_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    metadata, tools = Prompt("", metadata=row.get(entry.metadata_key) or {}).metadata, None  # it may be JSON text
    if entry.tool_key and entry.tool_key in row:
        tools = row[entry.tool_key]
        tools = msgspec.json.decode(tools) if isinstance(tools, str) else tools
        metadata = {**metadata, "tools": tools}
    if entry.apply_chat_template and settings.recipe is None:
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **entry.chat_template_kwargs}
        prompt = _tokenizer(settings.endpoint.model).apply_chat_template(prompt, **options)
    label = row[entry.label_key] if entry.label_key else None
    return records().sample(prompt=prompt, label=label, metadata=metadata)


def _read(path: str) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSONL or Parquet file, and the number of lines that are not JSON: slime skips them, too.

    ``path@[a:b]`` selects a slice (slime 0.3.1, utils/data.py: read_file).
    """
    match = _SLICE.match(path)
    start, stop = None, None
    if match is not None:
        path = match["path"]
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    if not Path(path).is_file():
        raise ConfigError.of("eval data set", path, "a file that exists")
    broken: list[int] = []
    rows = (row for _, row in rows_of(path)) if path.endswith(".parquet") else _json_rows(path, broken)
    backwards = (start or 0) < 0 or (stop or 0) < 0
    chosen = list(rows)[start:stop] if backwards else list(islice(rows, start, stop))
    if broken:
        _LOG.warning("%s: %d lines skipped, since they are not JSON: lines %s", path, len(broken), broken[:_NAMED])
    return chosen, len(broken)


def _json_rows(path: str, broken: list[int]) -> Iterator[dict[str, Any]]:
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)  # as slime, it takes NaN
            except (ValueError, RecursionError):
                broken.append(number)
                continue
            if not isinstance(row, dict):
                raise ConfigError.of(f"{path}, line {number}", row, "a JSON object")
            yield row
