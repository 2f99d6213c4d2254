"""Samples as the rows of verl 0.9: ``AgentLoopOutput``, the ``DataProto`` of v0, the TransferQueue of V1.

Invariant: prompt, response, mask and logprobs of a row are those of its sample up to the last sampled token. Batches
are made by verl's own functions. A row that verl would damage, or that would end its step, is refused first.

verl and torch are imported in the functions that need them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio

from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.integrations.given_advantages import given_advantages
from rollouts.rewards.teacher_top import top_of
from rollouts.training.comparisons import by_conversation, comparison_name
from rollouts.training.rows import (
    check_fields,
    check_temperature,
    reward_of_branches,
    row_images,
    split,
    split_advantages,
    trimmed,
    version_column,
)
from rollouts.training.types import Sample

__all__ = [
    "put_group",
    "register_advantages",
    "teacher_columns",
    "to_data_proto",
    "to_outputs",
    "worker",
    "write_batch",
]


def to_outputs(
    samples: Sequence[Sample],
    *,
    version: int | None = None,
    scored: bool = True,
    temperature: float | None = None,
    advantages: bool = False,
    teacher: bool = False,
) -> list[Any]:
    """The branches of one rollout, or of one conversation of a seat, as verl's ``AgentLoopOutput``, in order.

    Branches with unlike rewards are refused: verl V1 gives all of them the advantage of the last
    (verl 0.9.1, trainer/ppo/v1/utils.py: compute_advantage_for_multi_trajectories).

    verl makes the arrays of the images in ``multi_modal_data`` again, with its own processor, and its own reward
    function scores an output without a reward (verl 0.9.1, experimental/agent_loop/agent_loop.py:
    AgentLoopWorker._compute_multi_modal_inputs, AgentLoopWorker._compute_score).

    Args:
        samples: of one rollout.
        version: the version of all tokens, if their versions are not numbers.
        scored: whether each needs a reward.
        temperature: verl's ``rollout.temperature``; samples of another temperature are refused.
        advantages: V1 gets ``Sample.advantages`` of each token as ``rm_scores``, where verl has the reward on the last
            token; for a trainer with the estimator of :func:`register_advantages`, and without
            ``use_kl_in_reward``. verl's metrics and filters of rewards are then of sums of advantages.
        teacher: for a trainer with ``distillation``: the columns of :func:`teacher_columns`, which verl's own
            teachers would make otherwise.

    Raises:
        ConfigError: a sample that no trainer takes (:func:`~rollouts.training.rows.split`), without a reward, sampled
            at another temperature or with a field that verl lacks; or branches with unlike rewards.
    """
    has_reward = scored or any(sample.reward is not None for sample in samples)
    reward = reward_of_branches(samples) if has_reward else None
    for sample in samples:
        check_temperature(sample, "verl", temperature)
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    outputs = []
    for sample in samples:
        check_fields(sample, "verl", "loss_multiplier")
        if not teacher:
            check_fields(sample, "verl without teacher=True", "teacher_log_probs")
        if not advantages:
            check_fields(sample, "verl without advantages=True", "advantages")
        make: Any = _with_columns(split_advantages(sample)) if advantages else AgentLoopOutput
        row, versions = split(sample), version_column(sample, version)
        steps = versions[versions >= 0]
        outputs.append(
            make(
                prompt_ids=row.prompt.tolist(),
                response_ids=row.response.tolist(),
                response_mask=row.mask.astype(np.int8).tolist(),
                response_logprobs=row.logprobs.tolist(),
                reward_score=reward,
                multi_modal_data=trimmed(sample).multimodal_inputs,
                num_turns=sum(message.get("role") != "system" for message in sample.messages),
                metrics=AgentLoopMetrics(
                    generate_sequences=sample.metrics.get("generation_seconds", 0.0),
                    tool_calls=sample.metrics.get("environment_seconds", 0.0),
                ),
                extra_fields={
                    "min_global_steps": int(steps.min()),
                    "max_global_steps": int(steps.max()),
                    "turn_scores": list(sample.step_rewards),
                    "tool_rewards": [],
                    "reward_extra_info": {},
                    **(teacher_columns(sample) if teacher else {}),
                },
            )
        )
    return outputs


def teacher_columns(sample: Sample) -> dict[str, Any]:
    """The columns that verl's distillation losses read, of the row of a sample with n ids: tensors ``[n, 1 or K]``.

    Entry t is of id t + 1, as verl's own teachers have it; that of a token which was not sampled is 0, as is verl's
    last, and its loss is masked (verl 0.9.1, workers/rollout/sglang_rollout/async_sglang_server.py:
    _extract_prompt_logprobs_sglang; workers/utils/padding.py: no_padding_2_padding).

    Returns:
        ``teacher_ids``, int32, and ``teacher_logprobs``, float32: the teacher's K most probable ids for
        ``loss_mode=forward_kl_topk`` with ``topk`` K, or the sampled ids, K = 1, for the modes of estimators.

    Raises:
        ConfigError: no teacher scored the sample.
    """
    import torch

    logprobs = sample.teacher_column
    if logprobs is None:
        raise ConfigError.of(f"{sample!r}.teacher_log_probs", None, "a column, of rewards.Teacher, in every sample")
    row = trimmed(sample)
    sampled, top = np.flatnonzero(row.mask_column), top_of(row)
    if top is None:
        ids, values = row.token_column[sampled, None], logprobs[sampled, None]
    else:
        ids, values = top.ids, top.logprobs
    columns = np.zeros((len(row), ids.shape[1]), np.int32), np.zeros((len(row), ids.shape[1]), np.float32)
    columns[0][sampled - 1], columns[1][sampled - 1] = ids, values
    return {"teacher_ids": torch.from_numpy(columns[0]), "teacher_logprobs": torch.from_numpy(columns[1])}


def _with_columns(column: Any) -> Any:
    """An output whose ``rm_scores`` are this column.

    (verl 0.9.1, experimental/agent_loop/agent_loop.py: AgentLoopOutput.as_dict)
    """
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    class OutputWithAdvantages(AgentLoopOutput):  # type: ignore[misc]  # verl has no types
        def as_dict(self) -> Any:
            return {**super().as_dict(), "rm_scores": torch.from_numpy(column)}

    return OutputWithAdvantages


def register_advantages(name: str = "rollouts") -> None:
    """Register the estimator that takes advantages as they come: ``algorithm.adv_estimator=rollouts``.

    For rows with ``advantages=True``: verl's own estimators would take a column for rewards, and sum it. Call it in the
    process of the trainer (verl 0.9.1, trainer/ppo/core_algos.py: register_adv_est).
    """
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(name)(given_advantages)


async def to_data_proto(
    samples: Sequence[Sample],
    worker: Any,
    *,
    version: int | None = None,
    advantages: bool = False,
    teacher: bool = False,
) -> Any:
    """Samples as the ``DataProto`` of a step of verl v0, made by verl's own functions; one row a sample, in order.

    Its ``uid`` is the name of its comparison, for verl's advantages.

    Args:
        samples: finished and scored; none of a rollout that forked, which v0 cannot tell from a group.
        worker: see :func:`worker`; its lengths pad the rows, and its temperature is that of verl's trainer.
        version, advantages, teacher: as for :func:`to_outputs`.

    Raises:
        ConfigError: as :func:`to_outputs`; a row is longer than verl's lengths; or the worker makes other arrays of its
            images.
    """
    import torch

    lengths = worker.rollout_config.prompt_length, worker.rollout_config.response_length
    padded, rollouts = [], set()
    for sample in samples:
        (output,) = to_outputs(
            [sample],
            version=version,
            temperature=worker.rollout_config.temperature,
            advantages=advantages,
            teacher=teacher,
        )
        got = len(output.prompt_ids), len(output.response_ids)
        if got[0] > lengths[0] or got[1] > lengths[1]:
            raise ConfigError.of(f"{sample!r}: prompt and response", got, f"at most {lengths}, verl's lengths")
        conversation = sample.rollout_id, sample.seat, sample.conversation
        if sample.group_index is None or (sample.rollout_id is not None and conversation in rollouts):
            raise ConfigError.of(f"{sample!r}", sample.rollout_id, "one sample a rollout, with a group: no forks in v0")
        rollouts.add(conversation)
        _check_images(sample, output, worker)
        padded.append(await worker._agent_loop_postprocess(output, False, raw_prompt=sample.messages))
    uids = np.array([comparison_name(sample) for sample in samples], dtype=object)
    data = worker._postprocess(padded, input_non_tensor_batch={"uid": uids})
    for row, sample in zip(data.batch["rm_scores"], samples if advantages else (), strict=False):
        column = split_advantages(sample)
        row[: len(column)] = torch.from_numpy(column)
    return data


def _check_images(sample: Sample, output: Any, worker: Any) -> None:
    """Check that verl's arrays of the images of a row equal those of the rollout's processor."""
    ours = row_images(sample)
    if not ours:
        return
    if worker.processor is None:
        count = f"{len(sample.images)} images"
        raise ConfigError.of(f"{sample!r}.images", count, "none, or a worker with verl's processor")
    import torch

    made = worker._compute_multi_modal_inputs(output, torch.tensor(output.prompt_ids + output.response_ids))
    theirs = {name: array for name, array in made.items() if name not in _OF_VERL}
    equal = theirs.keys() == ours.keys() and all(np.array_equal(theirs[name], ours[name]) for name in ours)
    if not equal:
        got = {name: tuple(array.shape) for name, array in theirs.items()}
        shapes = {name: array.shape for name, array in ours.items()}
        raise ConfigError.of(f"{sample!r}: arrays of verl's processor", got, f"those of the rollout, {shapes}")


_OF_VERL = ("mm_token_type_ids", "images_seqlens")
"""Arrays that verl derives from the ids and ``image_grid_thw``."""


def worker(kind: Any, config: Any, tokenizer: Any, processor: Any = None) -> Any:
    """An agent loop worker of verl of which only the conversion of rows is used: no servers, no Ray, no reward loop.

    Args:
        kind: ``AgentLoopWorker`` or, of V1, the class behind the Ray actor ``AgentLoopWorkerTQ``.
        config: verl's configuration.
        tokenizer: pads the rows.
        processor: for rows with images: that of verl's ``hf_processor``.
    """
    made = object.__new__(kind)
    rollout = config.actor_rollout_ref.rollout
    made.config, made.rollout_config, made.tokenizer, made.processor = config, rollout, tokenizer, processor
    made.distillation_enabled, made.reward_loop_worker_handles, made.mm_processor_kwargs = False, None, {}
    return made


async def put_group(
    samples: Sequence[Sample],
    worker: Any,
    *,
    uid: str,
    global_steps: int,
    partition: str = "train",
    version: int | None = None,
    columns: Mapping[str, Any] | None = None,
    advantages: bool = False,
    teacher: bool = False,
) -> None:
    """Put the rows of one group into the TransferQueue of verl V1, and mark its prompt as finished.

    Args:
        samples: all rollouts of one prompt, with their branches; of one comparison: verl compares rows of one ``uid``.
        worker: see :func:`worker`; of the class behind ``AgentLoopWorkerTQ``.
        uid: the prompt's key.
        global_steps: the step in which the prompt was first dispatched; verl drops or awaits groups by it
            (verl 0.9.1, trainer/ppo/v1/replay_buffer.py: ReplayBufferAsync._stale_terminal_keys).
        partition: ``train`` or ``val``.
        version, advantages, teacher: as for :func:`to_outputs`.
        columns: further columns of the data set; default: those of the prompt.

    Raises:
        ConfigError: as :func:`to_outputs`; ``uid`` has an underscore, at which verl splits the keys of its rows
            (verl 0.9.1, trainer/ppo/v1/replay_buffer.py: ReplayBuffer._clear_groups); or the worker makes other arrays
            of images.
    """
    import transfer_queue

    if "_" in uid:
        raise ConfigError.of("uid", uid, "a key without an underscore: verl would find no rows of it")
    compared = sorted({comparison_name(sample) for sample in samples})
    if len(compared) > 1:
        raise ConfigError.of("put_group(samples)", compared, "one comparison: a uid for each, such as each seat")
    of_verl = worker.rollout_config.val_kwargs if partition == "val" else worker.rollout_config
    options = {"version": version, "temperature": of_verl.temperature, "advantages": advantages}
    options["teacher"] = teacher
    rollouts = [to_outputs(branches, **options) for branches in by_conversation(samples)]
    for sample, output in zip(itertools.chain(*by_conversation(samples)), itertools.chain(*rollouts), strict=True):
        _check_images(sample, output, worker)
    first = samples[0]
    row = {
        "raw_prompt": list(itertools.takewhile(lambda message: message.get("role") != "assistant", first.messages)),
        "data_source": "rollouts",
        "reward_model": {"ground_truth": first.label},
        "extra_info": dict(first.metadata),
        **(columns or {}),
    }
    for session, outputs in enumerate(rollouts):
        place = {"uid": uid, "session_id": session, "global_steps": global_steps}
        await worker._agent_loop_postprocess(outputs, partition == "val", **{**row, **place})
    tag = {"is_prompt": True, "status": "finished", "global_steps": global_steps}
    await transfer_queue.async_kv_put(key=uid, partition_id=partition, tag=tag)


def write_batch(
    samples: Sequence[Sample], path: Path, *, version: int | None = None, temperature: float | None = None
) -> None:
    """Write a batch as a ``DataProto``, padded to its own longest prompt and response: ``DataProto.load_from_disk``.

    Raises:
        ConfigError: as :func:`to_data_proto`.
        ModuleNotFoundError: verl is not installed.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    rows = [split(sample) for sample in samples]
    lengths = max(len(row.prompt) for row in rows), max(len(row.response) for row in rows)
    rollout = SimpleNamespace(prompt_length=lengths[0], response_length=lengths[1], temperature=temperature)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    made = worker(AgentLoopWorker, config, _Padding())
    data = anyio.run(functools.partial(to_data_proto, samples, made, version=version))
    data.save_to_disk(str(path))


class _Padding:
    """Pads with id 0, which the attention mask hides: a stored run does not contain its tokenizer."""

    pad_token_id = 0
    padding_side = "right"

    def pad(self, inputs: Mapping[str, Any], max_length: int, **options: Any) -> dict[str, Any]:
        import torch

        ids = torch.tensor(inputs["input_ids"])
        empty = max_length - len(ids)
        sides = (empty, 0) if self.padding_side == "left" else (0, empty)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {name: torch.nn.functional.pad(column, sides).unsqueeze(0) for name, column in columns.items()}
