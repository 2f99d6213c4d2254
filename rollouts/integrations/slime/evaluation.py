"""Evaluation: play every prompt of every configured data set ``n_samples`` times.

Invariant: the lists of a data set are equally long and in the order of its rows. A rollout that fails all attempts is
left out and counted in the metrics, never given a reward. With ``--log-passrate``, which counts by position, all
rollouts of its prompt are left out. If none is left, the evaluation raises.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.base.extras import install_command
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, GenerateFailure, at
from rollouts.inference.priorities import behind_training
from rollouts.integrations.slime.extras import add_spans
from rollouts.integrations.slime.images import shown_prompt, shows_images
from rollouts.integrations.slime.pipeline import Pipeline
from rollouts.integrations.slime.records import family
from rollouts.integrations.slime.settings import NO_GROUP_RM, EvalSet, Settings
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Group, Sample, Status

__all__ = ["evaluate", "load_eval_prompts"]

_LOG = logging.getLogger(__name__)
_NAMED = 5
"""Broken lines that a warning names."""
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
        played = pipeline.for_evaluation(entry, rollout_id)
        with at(f"evaluation {entry.name}"):
            rows, skipped = await anyio.to_thread.run_sync(_read, entry.path)
            if await anyio.to_thread.run_sync(_are_slimes, entry, settings, rows):
                played.rows = await anyio.to_thread.run_sync(load_image_rows, entry, settings)
                prompts = [_prompt_of(row, entry) for row in played.rows]
            else:
                prompts = await anyio.to_thread.run_sync(load_eval_prompts, entry, settings, rows)
            samples, failed = await _play(entry, prompts, played)
        finished = [played.finished(sample, data=entry) for sample in samples]
        if family().traces:
            for sample, record in zip(samples, finished, strict=True):
                add_spans([[record]], [played.started.get(sample.index or 0)], of_group=False)
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


async def _play(entry: EvalSet, prompts: list[Prompt], pipeline: Pipeline) -> tuple[list[Sample], int]:
    """Play the prompts; each rollout is its own group, so a failure costs only that rollout."""
    behind = [attrs.evolve(prompt, urgency=behind_training) for prompt in prompts]
    repeated = [prompt for prompt in behind for _ in range(entry.n_samples)]
    failures: list[Group] = []

    def record(group: Group) -> None:
        if group.outcome == "failed":
            failures.append(group)

    config = pipeline.evaluation(entry, len(repeated))
    async with AsyncRolloutManager(config, DataBuffer(repeated, epochs=1), on_group=record) as manager:
        try:
            samples = await manager.generate_batch()
        except DataExhausted:
            samples = [sample for group in manager.ready_groups for sample in group.samples]
    if pipeline.settings.whole_prompts:
        incomplete = {(group.group_index or 0) // entry.n_samples for group in failures}
        samples = [sample for sample in samples if (sample.group_index or 0) // entry.n_samples not in incomplete]
    if not samples:
        lost = "a rollout of each prompt" if pipeline.settings.whole_prompts else f"all {len(repeated)} rollouts"
        raise GenerateFailure(f"evaluation {entry.name}: {lost} failed: {failures[0].reason}")
    return samples, len(failures)


def load_eval_prompts(
    entry: EvalSet, settings: Settings, rows: Sequence[Mapping[str, Any]] | None = None
) -> list[Prompt]:
    """The prompts of a data set, as slime's flags describe them; ``rows`` are those of its file.

    Where slime applies the chat template, the prompt is the same text, or a message with a recipe.

    Raises:
        ConfigError: the file is missing or of another format, or a row has no prompt.
    """
    prompts = []
    for number, row in enumerate(_read(entry.path)[0] if rows is None else rows):
        for key in (entry.input_key, entry.label_key):
            if key is not None and key not in row:
                raise ConfigError.of(f"{entry.path}, row {number}", sorted(row), f"the key {key!r}")
        prompt = row[entry.input_key]
        if entry.apply_chat_template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        metadata, tools = row.get(entry.metadata_key) or {}, None
        if entry.tool_key and entry.tool_key in row:
            tools = row[entry.tool_key]
            tools = msgspec.json.decode(tools) if isinstance(tools, str) else tools
            metadata = {**metadata, "tools": tools}
        if entry.apply_chat_template and settings.recipe is None:
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **entry.chat_template_kwargs}
            prompt = _tokenizer(settings.endpoint.model).apply_chat_template(prompt, **options)
        if hasattr(entry.source, "inject_metadata"):
            metadata = entry.source.inject_metadata(metadata)
        prompts.append(Prompt(prompt, label=row[entry.label_key] if entry.label_key else None, metadata=metadata))
    longest = settings.eval_max_prompt_len
    if longest is not None and prompts and isinstance(prompts[0].prompt, str):
        codec = Codec(_tokenizer(settings.endpoint.model))
        prompts = [prompt for prompt in prompts if len(codec.encode(str(prompt.prompt))) <= longest]
    if not prompts:
        bound = "" if longest is None else f" of at most {longest} tokens (--eval-max-prompt-len)"
        raise ConfigError.of(f"eval data set {entry.name}", entry.path, f"a file with at least one row{bound}")
    return prompts


def _are_slimes(entry: EvalSet, settings: Settings, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether slime's own class loads the rows: prompts of messages, with a model that has a processor.

    :func:`load_eval_prompts` loads rows of text: slime's class refuses them for a model with a processor
    (slime 0.3.1, utils/data.py: Dataset).

    Raises:
        ConfigError: rows have images inside their messages, and slime is not installed to load them.
    """
    if entry.multimodal_keys:
        return True
    prompts = [row.get(entry.input_key) for row in rows]
    if not entry.apply_chat_template and not any(isinstance(prompt, list) for prompt in prompts):
        return False
    try:
        return _processor(family().package, settings.endpoint.model) is not None
    except ImportError as error:
        if not any(map(shows_images, prompts)):
            return False
        expected = f"no images inside messages without {family().package}, whose data set loads them ({error})"
        raise ConfigError.of(f"eval data set {entry.name}", entry.path, expected) from None


@functools.lru_cache(maxsize=2)
def _processor(package: str, model: str) -> Any:
    return importlib.import_module(f"{package}.utils.processing_utils").load_processor(model, trust_remote_code=True)


def load_image_rows(entry: EvalSet, settings: Settings) -> list[Any]:
    """Load a data set with images as slime's own class does; with a recipe, its prompts are messages.

    Raises:
        ConfigError: slime is not installed, or the model has no processor.
    """
    package = family().package
    try:
        data = importlib.import_module(f"{package}.utils.data")
        processor = _processor(package, settings.endpoint.model)
    except ImportError as error:
        expected = f"none without {package}, whose data set reads images ({error})"
        raise ConfigError.of(f"eval data set {entry.name}.multimodal_keys", entry.multimodal_keys, expected) from None
    if processor is None:
        expected = f"a model with a processor; {settings.endpoint.model} has none"
        raise ConfigError.of(f"eval data set {entry.name}.multimodal_keys", entry.multimodal_keys, expected)
    samples = data.Dataset(
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
    ).samples
    return list(samples)


def _prompt_of(row: Any, entry: EvalSet) -> Prompt:
    metadata = row.metadata
    if hasattr(entry.source, "inject_metadata"):
        metadata = entry.source.inject_metadata(metadata)
    return Prompt(shown_prompt(row), label=row.label, metadata=metadata or {})


@functools.lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    return load_tokenizer(model)


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
    rows = _parquet_rows(path) if path.endswith(".parquet") else _json_rows(path, broken)
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


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError.of("eval data set", path, f"pyarrow installed: {install_command('parquet')}") from None
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()
