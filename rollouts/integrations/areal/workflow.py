"""AReaL 1.0: our agent as a ``RolloutWorkflow``, and samples as its tensors.

Invariant: ids, mask, logprobs and versions of a row are those of its sample up to the last sampled token, because AReaL
puts the reward on the token before the last and would lose it on context. All branches of a rollout are rows of one
dict, and every dict has the same keys. A rollout that failed is ``None``, which AReaL counts as rejected.

areal and torch are imported in the functions that need them.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError, RolloutsError
from rollouts.inference.base import Policy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.integrations.areal.policies import EnginePolicy, ServersPolicy
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.training.rows import check_fields, reward_of, segments, split, trimmed, version_column
from rollouts.training.types import Sample
from rollouts.validators import is_int

__all__ = ["Workflow", "to_tensors", "turn_column", "write_batch"]

_LOG = logging.getLogger(__name__)
_NO_TOP_K = 10**8 - 1
"""AReaL's default of ``top_k``, which means none."""


class Workflow:
    """``RolloutsWorkflow``: one rollout of our agent, scored; give it to ``engine.submit`` or by its name.

    Args:
        gconfig: AReaL's ``GenerationHyperparameters``; ``max_tokens`` is the context of the model.
        tokenizer: a transformers tokenizer, or the folder of one.
        inference: ``engine`` samples through ``engine.agenerate``, ``http`` through our client of its servers.
        prompt_key, label_key: where a row of the data set has its messages (or one text) and its reference answer; its
            other fields are the prompt's metadata.
        **options: as for :meth:`Episodes.of`.

    Attributes:
        failures: how many rollouts failed, by cause.

    Raises:
        ConfigError: an option is wrong, or ``gconfig`` has stop strings or a frequency penalty, which are not sent.
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        *,
        inference: Literal["engine", "http"] = "engine",
        prompt_key: str = "messages",
        label_key: str = "answer",
        **options: Any,
    ) -> None:
        for name in ("stop", "frequency_penalty", "ignore_eos", "min_new_tokens"):
            if getattr(gconfig, name, None):
                raise ConfigError.of(f"gconfig.{name}", getattr(gconfig, name), "none: the agent does not send it")
        if inference not in ("engine", "http"):
            raise ConfigError.of("inference", inference, '"engine" or "http"')
        self.gconfig, self.tokenizer, self.inference = gconfig, tokenizer, inference
        self.prompt_key, self.label_key = prompt_key, label_key
        self.episodes = Episodes.of(**options)
        self.sampling = SamplingParams(
            temperature=0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=-1 if gconfig.top_k >= _NO_TOP_K or gconfig.top_k < 1 else gconfig.top_k,
            max_new_tokens=gconfig.max_new_tokens,
        )
        self.failures: Counter[str] = Counter()

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Play one rollout; returns its rows as tensors, or ``None`` if it failed."""
        rest = {name: value for name, value in data.items() if name not in (self.prompt_key, self.label_key)}
        prompt = prompt_of(data[self.prompt_key], label=data.get(self.label_key), metadata=rest)
        try:
            rows = await self.episodes.play(prompt, lambda: self._policy(engine), self.tokenizer, self.sampling)
            return to_tensors(rows)
        except ConfigError:
            raise
        except RolloutsError as error:
            self.failures[type(error).__name__] += 1
            _LOG.warning("a rollout failed and is rejected: %s", error)
            return None

    def _policy(self, engine: Any) -> Policy:
        if self.inference == "engine":
            return EnginePolicy(engine, self.gconfig)
        return ResumablePolicy(ServersPolicy(engine, self.gconfig))


def to_tensors(samples: Sequence[Sample], *, version: int | None = None) -> dict[str, Any]:
    """Samples as AReaL's dict of tensors ``[m, T]``, one row a sample, in order, padded on the right by AReaL.

    Keys: ``input_ids``, ``loss_mask``, ``versions``, ``turn_ids`` (int32), ``logprobs`` (float32), ``attention_mask``
    (bool); ``rewards`` (float32 ``[m]``).

    Args:
        samples: the branches of one rollout, or all samples of one group.
        version: the version of all tokens, where theirs are no numbers.

    Raises:
        ConfigError: a sample that no trainer takes (:func:`~rollouts.training.rows.split`), without a reward or with a
            field that AReaL lacks.
    """
    import torch
    from areal.utils.data import concat_padded_tensors

    if version is not None and not is_int(version, 0):
        raise ConfigError.of("version", version, "an integer >= 0")
    rows = []
    for sample in samples:
        check_fields(sample, "AReaL", "advantages", "teacher_log_probs", "loss_multiplier", "images")
        split(sample)
        tokens, mask, logprobs = trimmed(sample).columns
        columns = {
            "input_ids": tokens,
            "loss_mask": mask.astype(np.int32),
            "logprobs": logprobs,
            "versions": version_column(sample, version).astype(np.int32),
            "turn_ids": turn_column(sample),
            "attention_mask": np.ones(len(tokens), np.bool_),
        }
        row = {name: torch.tensor(column).unsqueeze(0) for name, column in columns.items()}
        rows.append({**row, "rewards": torch.tensor([reward_of(sample)], dtype=torch.float32)})
    padded: dict[str, Any] = concat_padded_tensors(rows)
    return padded


def turn_column(sample: Sample) -> npt.NDArray[np.int32]:
    """The number of the turn that sampled each token of the row, -1 on context, int32 ``[n]``."""
    runs = segments(sample)
    column = np.full(runs[-1][1], -1, np.int32)
    turn = -1
    for record in sample.completions:
        turn += not record.continues
        column[record.start : record.stop] = turn
    if not sample.completions:
        for turn, (start, stop, _) in enumerate(run for run in runs if run[2]):
            column[start:stop] = turn
    return column


def write_batch(samples: Sequence[Sample], path: Path) -> None:
    """Write a batch as a list of dicts, one for each group, with ``torch.save``.

    Raises:
        ConfigError: as :func:`to_tensors`.
        ModuleNotFoundError: areal is not installed.
    """
    import torch

    groups = itertools.groupby(samples, lambda sample: sample.group_index)
    torch.save([to_tensors(list(members)) for _, members in groups], path)
