"""SkyRL 0.3: samples as a ``GeneratorOutput``, and our agent as the generator of its trainer.

    out: to_generator_output(samples); with register_advantages() also Sample.advantages
    in:  Generator(episodes, client, tokenizer), from an override of BasePPOExp.get_generator

Invariant: one row for each prompt, in the order of the prompts; with ``step_wise`` one for each branch, those of a
rollout next to each other. Every key of the output is there. SkyRL is never imported but for the ids of trajectories.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import ImageSpan, SamplingParams, TokenColumn
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.integrations.given_advantages import given_advantages
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.training.comparisons import by_conversation, comparison_name
from rollouts.training.rows import (
    check_fields,
    check_temperature,
    reward_of_branches,
    row_images,
    split,
    split_advantages,
)
from rollouts.training.types import Sample, Status

__all__ = ["Generator", "SkyRLPolicy", "register_advantages", "to_generator_output", "write_batch"]
_UNUSED = ("trajectory_generation_times", "rollout_expert_indices", "env_metrics")
_VISION = ("pixel_values", "image_grid_thw")
"""The arrays of images that SkyRL passes to the model: a tensor for each row, or for none."""


def to_generator_output(
    samples: Sequence[Sample],
    *,
    step_wise: bool = False,
    trajectory_ids: Sequence[Any] | None = None,
    temperature: float | None = None,
    advantages: bool = False,
) -> dict[str, Any]:
    """Convert samples to a ``GeneratorOutput``, conversations in order: one of each rollout, or of each of its seats.

    Args:
        step_wise: a row for each branch (``generator.step_wise_trajectories=true``); all rows of a rollout get the
            advantage of the last (SkyRL 0.3.0, train/trainer.py: RayPPOTrainer.compute_advantages_and_returns).
        trajectory_ids: one for each conversation; by default its comparison, and the number in it. SkyRL
            compares the rewards of one ``instance_id``.
        temperature: SkyRL's ``generator.sampling_params.temperature``; samples of another temperature are refused.
        advantages: ``Sample.advantages`` of each token in place of the rewards, for a trainer with the estimator of
            :func:`register_advantages`. SkyRL's metrics of rewards are then sums of advantages.

    Raises:
        ConfigError: a sample that is failed, unscored, without logprobs, sampled at another temperature, or with a
            field that SkyRL has no place for; a rollout that forks, without ``step_wise``, or whose branches have
            unlike rewards; a row of text among rows with images; no sample; another number of ``trajectory_ids``; or
            ``advantages`` and a sample without them, or ``step_wise``, where SkyRL copies those of the last row.
    """
    rollouts = by_conversation(samples)
    if advantages and step_wise:
        raise ConfigError.of("advantages", True, "False with step_wise: SkyRL copies the last row's to the others")
    if not rollouts:
        raise ConfigError.of("to_generator_output(samples)", samples, "at least one sample")
    if trajectory_ids is None:
        from skyrl.train.generators.base import TrajectoryID

        trajectory_ids = [TrajectoryID(*one) for one in _ids(rollouts)]
    if len(trajectory_ids) != len(rollouts):
        expected = f"{len(rollouts)}, one for each conversation of a seat: a row takes one"
        raise ConfigError.of("trajectory_ids", f"{len(trajectory_ids)} ids", expected)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    output: dict[str, Any] = {name: [] for name in (*names, "trajectory_ids", "is_last_step")}
    arrays = []
    for branches, trajectory_id in zip(rollouts, trajectory_ids, strict=True):
        if len(branches) > 1 and not step_wise:
            expected = "one row each; generator.step_wise_trajectories takes rollouts that fork"
            raise ConfigError.of(f"{branches[0]!r}", f"{len(branches)} branches", expected)
        reward = reward_of_branches(branches)
        for branch in branches:
            check_temperature(branch, "SkyRL", temperature)
            check_fields(branch, "SkyRL", "loss_multiplier", "teacher_log_probs")
            if not advantages:
                check_fields(branch, "SkyRL without advantages=True", "advantages")
            row = split(branch)
            arrays.append((branch, row_images(branch, "SkyRL", *_VISION)))
            output["prompt_token_ids"].append(row.prompt.tolist())
            output["response_ids"].append(row.response.tolist())
            output["rewards"].append(split_advantages(branch).tolist() if advantages else reward)
            output["loss_masks"].append(row.mask.astype(int).tolist())
            output["stop_reasons"].append("length" if branch.status is Status.TRUNCATED else "stop")
            output["rollout_logprobs"].append(row.logprobs.tolist())
            output["trajectory_ids"].append(trajectory_id)
            output["is_last_step"].append(branch is branches[-1])
    output["is_last_step"] = output["is_last_step"] if step_wise else None
    return {**output, **_vision(arrays), "rollout_metrics": {}, **dict.fromkeys(_UNUSED)}


def register_advantages(name: str = "rollouts") -> None:
    """Register the estimator that takes advantages as they come: ``trainer.algorithm.advantage_estimator=rollouts``.

    For outputs with ``advantages=True``: SkyRL's own estimators would take a column for rewards, and sum it. Call it
    before the trainer starts (SkyRL 0.3.0, backends/skyrl_train/utils/ppo_utils.py: AdvantageEstimatorRegistry).
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    if name not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(name, given_advantages)


def _vision(rows: Sequence[tuple[Sample, Mapping[str, Any]]]) -> dict[str, Any]:
    """The tensors of images, one for each row and name; ``None`` for rows of text."""
    if not any(arrays for _, arrays in rows):
        return dict.fromkeys(_VISION)
    import torch

    for branch, arrays in rows:
        if arrays.keys() != set(_VISION):
            expected = f"{' and '.join(_VISION)} of each row: SkyRL takes no batch that has them for some rows only"
            raise ConfigError.of(f"{branch!r}.multimodal_train_inputs", sorted(arrays), expected)
    return {name: [torch.tensor(arrays[name]) for _, arrays in rows] for name in _VISION}


def write_batch(samples: Sequence[Sample], path: Path, *, temperature: float | None = None) -> None:
    """Write a batch as one JSON object, its trajectory ids too.

    Raises:
        ConfigError: as :func:`to_generator_output`, or a sample has images.
    """
    for sample in samples:
        check_fields(sample, "SkyRL's file in JSON", "images")
    rollouts = by_conversation(samples)
    step_wise = len(rollouts) < len(samples)
    ids = [{"instance_id": group, "repetition_id": number} for group, number in _ids(rollouts)]
    output = to_generator_output(samples, step_wise=step_wise, trajectory_ids=ids, temperature=temperature)
    path.write_bytes(msgspec.json.encode(output))


def _ids(rollouts: Sequence[Sequence[Sample]]) -> list[tuple[str, int]]:
    """The comparison of each conversation, and its number in it."""
    numbers: Counter[str] = Counter()
    groups = [comparison_name(branches[0]) for branches in rollouts]
    return [(group, (numbers.update([group]), numbers[group] - 1)[1]) for group in groups]


class SkyRLPolicy(TrainerPolicy):
    """A policy over SkyRL's ``inference_engine_client``, which pauses requests while weights change.

    (SkyRL 0.3.0, backends/skyrl_train/inference_servers/remote_inference_client.py: PauseMode)

    ``version`` is the trainer's step: a reply does not report its version, so a reply across an update has the earlier
    one (SkyRL 0.3.0, backends/skyrl_train/inference_servers/base.py: InferenceEngineOutput). ``max_context`` is the
    context of the engine, if known. A request with images has all ids, and the arrays that the server's processor
    makes of the images; the server's ids of each image are compared with the request's.
    """

    trainer = "SkyRL"
    unsupported = ("seed",)
    takes_images = True

    def __init__(self, client: Any, *, version: int, max_context: int | None = None) -> None:
        self.client, self.version, self.max_context = client, version, max_context

    async def sample(
        self,
        tokens: TokenColumn,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        session: str,
        images: Sequence[ImageSpan] = (),
    ) -> Reply:
        params: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(stop_token_ids),
            "include_stop_str_in_output": True,
            "logprobs": 1,
        }
        params |= {n: getattr(sampling, n) for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        request = {"prompts": None, "prompt_token_ids": [tokens.tolist()], "sampling_params": params}
        features = [await self._features(tokens, images)] if images else None
        output = await self.client.generate(
            {**request, "session_ids": [session] if session else None, "mm_features": features, "cache_salt": None}
        )
        if len(output["response_ids"]) != 1:
            raise EndpointUnavailable(f"SkyRL returned {len(output['response_ids'])} replies; expected 1")
        logprobs = output["response_logprobs"]
        return Reply(
            tokens=output["response_ids"][0],
            logprobs=None if logprobs is None else logprobs[0],
            stopped_by=output["stop_reasons"][0],
            version=self.version,
        )

    async def _features(self, tokens: TokenColumn, images: Sequence[ImageSpan]) -> dict[str, Any]:
        """The server's arrays of the images, at their positions in the request.

        Raises:
            EndpointRefused: it writes other ids for an image.
        """
        content = [{"type": "image_url", "image_url": {"url": span.image.url}} for span in images]
        body = {"model": self.client.model_name, "messages": [{"role": "user", "content": content}]}
        rendered = await self.client.render_chat_completion({"json": body})
        features = rendered.get("features") or {}
        places = features.get("mm_placeholders", {}).get("image", ())
        theirs = [rendered["token_ids"][one["offset"] : one["offset"] + one["length"]] for one in places]
        ours = [tokens[span.start : span.stop].tolist() for span in images]
        if theirs != ours:
            got, expected = [len(ids) for ids in theirs], [len(ids) for ids in ours]
            raise EndpointRefused(
                f"SkyRL's server writes {got} ids for the images; expected the {expected} of the prompt"
            )
        at = [{"offset": span.start, "length": span.stop - span.start} for span in images]
        return {**features, "mm_placeholders": {"image": at}}


class Generator:
    """SkyRL's ``GeneratorInterface``: our agent plays every prompt of a batch.

    The data set's other columns are the metadata, the ``ground_truth`` of its ``reward_spec`` the label. A rollout that
    fails all attempts of ``episodes`` ends the step with its cause.

    Args:
        episodes: environment, limits, reward and options of a rollout.
        client: the ``inference_engine_client``; with its ``max_context``, if known.
        tokenizer: that of the trainer.
        step_wise: as ``generator.step_wise_trajectories``, for rollouts that fork.
    """

    def __init__(
        self,
        episodes: Episodes,
        client: Any,
        tokenizer: Any,
        *,
        step_wise: bool = False,
        max_context: int | None = None,
    ) -> None:
        self.episodes, self.client, self.tokenizer = episodes, client, tokenizer
        self.step_wise, self.max_context = step_wise, max_context

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Play the prompts of a ``GeneratorInput``; returns a ``GeneratorOutput``."""
        prompts = input_batch["prompts"]
        metadata = input_batch["batch_metadata"]
        version = 0 if metadata is None else metadata.global_step
        policy = SkyRLPolicy(self.client, version=version, max_context=self.max_context)
        sampling = sampling_of(input_batch["sampling_params"] or {})
        extras = input_batch["env_extras"] or [{} for _ in prompts]
        played: list[list[Sample]] = [[] for _ in prompts]

        async def play(number: int) -> None:
            label = extras[number].get("reward_spec", {}).get("ground_truth")
            prompt = attrs.evolve(prompt_of(prompts[number], label=label, metadata=extras[number]), index=number)
            played[number] = await self.episodes.play(prompt, lambda: policy, self.tokenizer, sampling)

        async with first_error() as tasks:
            for number in range(len(prompts)):
                tasks.start_soon(play, number)
        for number, branch in [(number, branch) for number, branches in enumerate(played) for branch in branches]:
            branch.rollout_id = number
        return to_generator_output(
            [*itertools.chain(*played)],
            step_wise=self.step_wise,
            trajectory_ids=input_batch["trajectory_ids"] or [None] * len(prompts),
            temperature=sampling.temperature,
        )


_RENAMED = {"max_tokens": "max_new_tokens", "max_generate_length": "max_new_tokens", "min_tokens": "min_new_tokens"}
_IGNORED = ("logprobs", "skip_special_tokens", "include_stop_str_in_output", "additional_kwargs")


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """Convert SkyRL's sampling parameters to ours; an unknown parameter is a ConfigError."""
    known = {field.name for field in attrs.fields(SamplingParams)}
    values = {_RENAMED.get(name, name): value for name, value in params.items() if value is not None}
    unknown = values.keys() - known - set(_IGNORED)
    if unknown or values.get("additional_kwargs"):
        raise ConfigError.of("sampling_params", sorted(unknown or ["additional_kwargs"]), f"some of {sorted(known)}")
    return SamplingParams(**{name: value for name, value in values.items() if name in known})
