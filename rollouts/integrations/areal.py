"""AReaL 1.0: our agent as a ``RolloutWorkflow``, policies over its inference engine, samples as its tensors.

    out: to_tensors(samples)
    in:  RolloutsWorkflow(gconfig, tokenizer, recipe=…), for engine.submit or by its name

Invariant: ids, mask, logprobs and versions of a row are those of its sample up to the last sampled token, because AReaL
puts the reward on the token before the last and would lose it on context
(AReaL 1.0.4, trainer/ppo/actor.py: PPOActor._compute_advantages). All branches of a rollout are rows of one dict, and
every dict has the same keys. A token has the version that AReaL reports for it.

AReaL normalises rewards by group in slices of ``group_size`` rows of the whole batch, and divides the rows after the
last whole slice by its epsilon (AReaL 1.0.4, utils/data.py: Normalization). So where rewards are compared by group,
every comparison has as many rows: others are refused, and a rollout that failed costs its group.

``RolloutsWorkflow`` is :class:`Workflow`, registered with AReaL's base class when its name is first read. areal and
torch are imported in the functions that need them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import attrs

from rollouts.dtypes import Completion, Endpoint, SamplingParams, TokenColumn, VersionSpan
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointUnavailable, RolloutsError
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.shared import shared_policy
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.training.comparisons import by_comparison
from rollouts.training.rows import (
    check_one_branch,
    check_temperature,
    image_column,
    reward_of,
    row_columns,
    row_images,
    turn_column,
    version_column,
)
from rollouts.training.types import Sample

__all__ = ["EnginePolicy", "ServersPolicy", "Workflow", "to_tensors", "write_batch"]

_LOG = logging.getLogger(__name__)
_NO_TOP_K = 10**8 - 1
"""From here on ``top_k`` means none; the default is 10**8 (AReaL 1.0.4, api/cli_args.py: GenerationHyperparameters)."""
_PAUSE_SECONDS = 0.5


class EnginePolicy(TrainerPolicy):
    """A policy over ``engine.agenerate``, which resumes a generation that an update of weights aborts.

    (AReaL 1.0.4, infra/remote_inf_engine.py: agenerate)
    """

    trainer = "AReaL"
    unsupported = ("stop", "seed", "min_new_tokens", "repetition_penalty", "min_p")

    def __init__(self, engine: Any, gconfig: Any) -> None:
        self.engine, self.gconfig, self.max_context = engine, gconfig, gconfig.max_tokens

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        from areal.api import ModelRequest

        gconfig = self.gconfig.new(
            n_samples=1, max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            greedy=sampling.temperature == 0, stop_token_ids=list(stop_token_ids),
        )  # fmt: skip
        request = ModelRequest(rid=session, input_ids=tokens.tolist(), gconfig=gconfig)
        try:
            reply = await self.engine.agenerate(request)
        except (RuntimeError, OSError, ValueError) as error:
            raise EndpointUnavailable(f"AReaL's engine: {type(error).__name__}: {error}") from error
        return Reply(
            tokens=reply.output_tokens,
            logprobs=reply.output_logprobs,
            stopped_by=reply.stop_reason,
            version=reply.output_versions,
            seconds=reply.latency,
        )


class ServersPolicy(TrainerPolicy):
    """Our client of the engine's servers, inside a :class:`ResumablePolicy`: its tokens get the engine's version.

    A part of a reply during which the version changed has the older one.
    """

    takes_images = True

    def __init__(self, engine: Any, gconfig: Any) -> None:
        self.engine, self.max_context = engine, gconfig.max_tokens
        urls = [address if "//" in address else f"http://{address}" for address in engine.addresses]
        self.inner = shared_policy(Endpoint(model="trained", base_url=urls), None)

    async def complete(self, request: CompletionRequest) -> Completion:
        while self.engine.workflow_executor.is_paused():  # noqa: ASYNC110 - AReaL has no event for it
            await anyio.sleep(_PAUSE_SECONDS)
        version = str(int(self.engine.get_version()))
        reply = await self.inner.complete(request)
        spans = [VersionSpan(version, 0, len(reply.tokens))] if len(reply.tokens) else []
        return attrs.evolve(reply, versions=spans)

    async def interrupt(self) -> None:
        await self.inner.interrupt()


class Workflow:
    """``RolloutsWorkflow``: one rollout of our agent, scored; give it to ``engine.submit`` or by its name.

    Args:
        gconfig: AReaL's ``GenerationHyperparameters``; ``max_tokens`` is the context of the model.
        tokenizer: a transformers tokenizer, or the folder of one.
        inference: ``engine`` samples through ``engine.agenerate``, ``http`` through our client of its servers.
        reward_norm: the levels of the actor's ``reward_norm``. With ``group``, a rollout that failed raises, so that
            AReaL rejects its whole group (AReaL 1.0.4, infra/workflow_executor.py: WorkflowExecutor), and rollouts may
            not fork. With ``batch``, also where there is no ``reward_norm``, it is ``None``, and the rest of its group
            is trained (AReaL 1.0.4, infra/remote_inf_engine.py: GroupedRolloutWorkflow).
        prompt_key, label_key: where a row of the data set has its messages (or one text) and its reference answer; its
            other fields are the prompt's metadata.
        **options: as for :meth:`Episodes.of`.

    Attributes:
        failures: how many rollouts failed, by cause.

    Raises:
        ConfigError: an option is wrong, rollouts may fork and are compared by group, or ``gconfig`` has stop strings or
            a frequency penalty, which are not sent.
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        *,
        inference: Literal["engine", "http"] = "engine",
        reward_norm: Literal["group", "batch"] = "group",
        prompt_key: str = "messages",
        label_key: str = "answer",
        **options: Any,
    ) -> None:
        for name in ("stop", "frequency_penalty", "ignore_eos", "min_new_tokens"):
            if getattr(gconfig, name, None):
                raise ConfigError.of(f"gconfig.{name}", getattr(gconfig, name), "none: the agent does not send it")
        if inference not in ("engine", "http"):
            raise ConfigError.of("inference", inference, '"engine" or "http"')
        if reward_norm not in ("group", "batch"):
            raise ConfigError.of("reward_norm", reward_norm, '"group" or "batch"')
        self.gconfig, self.tokenizer, self.inference = gconfig, tokenizer, inference
        self.prompt_key, self.label_key = prompt_key, label_key
        self.by_group = reward_norm == "group"
        self.episodes = Episodes.of(**options)
        if self.by_group and self.episodes.history == "fork":
            expected = '"append" or "error": a rollout that forks has several rows; or reward_norm="batch"'
            raise ConfigError.of("history", "fork", expected)
        self.images = bool(self.episodes.options.get("images"))
        if self.images and inference == "engine":
            raise ConfigError.of("images", True, 'inference="http": engine.agenerate reports no number of prompt ids')
        self.sampling = SamplingParams(
            temperature=0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=-1 if gconfig.top_k >= _NO_TOP_K or gconfig.top_k < 1 else gconfig.top_k,
            max_new_tokens=gconfig.max_new_tokens,
        )
        self.failures: Counter[str] = Counter()

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Play one rollout; returns its rows as tensors, or ``None`` if it failed and rewards have no groups.

        Raises:
            RolloutsError: it failed, and its group with it.
        """
        rest = {name: value for name, value in data.items() if name not in (self.prompt_key, self.label_key)}
        prompt = prompt_of(data[self.prompt_key], label=data.get(self.label_key), metadata=rest)
        try:
            rows = await self.episodes.play(prompt, lambda: self._policy(engine), self.tokenizer, self.sampling)
            return to_tensors(rows, images=self.images, temperature=self.sampling.temperature)
        except ConfigError:
            raise
        except RolloutsError as error:
            self.failures[type(error).__name__] += 1
            if self.by_group:
                raise
            _LOG.warning("a rollout failed and is rejected: %s", error)
            return None

    def _policy(self, engine: Any) -> Policy:
        if self.inference == "engine":
            return EnginePolicy(engine, self.gconfig)
        return ResumablePolicy(ServersPolicy(engine, self.gconfig))


def to_tensors(
    samples: Sequence[Sample], *, version: int | None = None, images: bool = False, temperature: float | None = None
) -> dict[str, Any]:
    """Convert samples to AReaL's dict of tensors ``[m, T]``, one row a sample, in order.

    AReaL's own function pads them on the right (AReaL 1.0.4, utils/data.py: concat_padded_tensors).

    Keys: ``input_ids``, ``loss_mask``, ``versions``, ``turn_ids`` (int32), ``logprobs`` (float32), ``attention_mask``
    (bool); ``rewards`` (float32 ``[m]``). With images also ``mm_token_type_ids`` (int64, 1 on the ids of images), and
    ``multi_modal_input``, a list of ``m`` dicts: ``pixel_values`` and ``image_grid_thw``, ``{}`` for a row of text.

    Args:
        samples: the branches of one rollout, or all samples of one comparison: a group, or one of its seats.
        version: the version of all tokens, if their versions are not numbers.
        images: whether the keys of images exist although no sample has an image.
        temperature: AReaL's ``actor.temperature``; samples of another temperature are refused.

    Raises:
        ConfigError: a sample that no trainer takes (:func:`~rollouts.training.rows.split`), without a reward, sampled
            at another temperature or with a field that AReaL lacks.
    """
    for sample in samples:
        check_temperature(sample, "AReaL", temperature)
    import torch
    from areal.utils.data import concat_padded_tensors

    rows, images = [], images or any(sample.images for sample in samples)
    for sample in samples:
        tokens, mask, logprobs = row_columns(sample, "AReaL", "advantages", "teacher_log_probs", "loss_multiplier")
        columns = {
            "input_ids": tokens,
            "loss_mask": mask.astype(np.int32),
            "logprobs": logprobs,
            "versions": version_column(sample, version).astype(np.int32),
            "turn_ids": turn_column(sample),
            "attention_mask": np.ones(len(tokens), np.bool_),
        }
        row: dict[str, Any] = {name: torch.tensor(column).unsqueeze(0) for name, column in columns.items()}
        row["rewards"] = torch.tensor([reward_of(sample)], dtype=torch.float32)
        if images:
            row["mm_token_type_ids"] = torch.from_numpy(image_column(sample)).long().unsqueeze(0)
            arrays = row_images(sample, "AReaL", "pixel_values", "image_grid_thw")
            row["multi_modal_input"] = [{name: torch.tensor(array) for name, array in arrays.items()}]
        rows.append(row)
    padded: dict[str, Any] = concat_padded_tensors(rows)
    return padded


def write_batch(
    samples: Sequence[Sample], path: Path, *, version: int | None = None, temperature: float | None = None
) -> None:
    """Write a batch as a list of dicts, one for each comparison: each group, or each of its seats, with ``torch.save``.

    Raises:
        ConfigError: as :func:`to_tensors`; or a rollout forks, or the comparisons have unlike numbers of rows:
            ``reward_norm`` by group would weigh a rollout by its branches, or compare rows of two comparisons.
        ModuleNotFoundError: areal is not installed.
    """
    check_one_branch(samples, "AReaL's reward_norm by group")
    compared = by_comparison(samples)
    if len(sizes := {len(members) for members in compared}) > 1:
        expected = "as many for each comparison: AReaL's reward_norm by group counts rows; to_tensors makes one dict"
        raise ConfigError.of("samples: rows of a comparison", sorted(sizes), expected)
    import torch

    images = any(sample.images for sample in samples)
    options: dict[str, Any] = {"images": images, "version": version, "temperature": temperature}
    torch.save([to_tensors(members, **options) for members in compared], path)


def __getattr__(name: str) -> Any:
    if name != "RolloutsWorkflow":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from areal.api import RolloutWorkflow

    return RolloutWorkflow.register(Workflow)
