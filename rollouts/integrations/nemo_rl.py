"""NeMo-RL 0.6: samples as message logs, and the batch that its GRPO takes.

    out: to_message_log(sample), to_batch(samples)
    in:  nothing: a user's agent enters NeMo-RL only as an agent server of NeMo Gym

Invariant: one message for each run of the mask, so that the concatenated ids are the row's; a message has
``generation_logprobs`` if and only if the policy sampled it. NeMo-RL trains exactly these messages
(NeMo-RL 0.6.0, algorithms/grpo.py: add_grpo_token_loss_masks_and_generation_logprobs). NeMo-RL is never imported;
torch is, in the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.training.comparisons import by_comparison, comparison_name
from rollouts.training.rows import (
    check_has_ids,
    check_one_branch,
    check_temperature,
    int_version,
    reward_of,
    row_columns,
    segments,
)
from rollouts.training.types import Sample, Status

__all__ = ["to_batch", "to_message_log", "write_batch"]


def to_message_log(sample: Sample, *, temperature: float | None = None) -> list[dict[str, Any]]:
    """Convert a row to a message log: ``token_ids`` int64, ``generation_logprobs`` float32 on replies.

    ``content`` is empty: the ids are trained.

    Args:
        sample: one row.
        temperature: NeMo-RL's ``policy.generation.temperature``; samples of another temperature are refused.

    Raises:
        ConfigError: the sample failed, has no sampled token or no logprobs, was sampled at another temperature, or has
            a field that NeMo-RL has no place for.
    """
    check_temperature(sample, "NeMo-RL", temperature)
    import torch

    row = row_columns(sample, "NeMo-RL", "advantages", "teacher_log_probs", "images")
    log = []
    for start, stop, sampled in segments(sample):
        ids = torch.from_numpy(row.tokens[start:stop].astype(np.int64))
        message: dict[str, Any] = {"role": "assistant" if sampled else "user", "content": "", "token_ids": ids}
        if sampled:
            message["generation_logprobs"] = torch.from_numpy(row.logprobs[start:stop].astype(np.float32))
        log.append(message)
    return log


def to_batch(
    samples: Sequence[Sample],
    *,
    task_name: str = "rollouts",
    version: int | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Convert rollouts to a batch, groups next to each other: columns of its ``DatumSpec`` fields, and rewards.

    Args:
        samples: scored samples, in any order.
        task_name: the task's name in NeMo-RL's metrics.
        version: the version of all rollouts, if the versions of the samples are not numbers.
        temperature: as for :func:`to_message_log`.

    Returns:
        ``message_log``, ``length`` (of the prompt, by which NeMo-RL finds the prompts whose rewards it compares, 0.6.0,
        algorithms/grpo.py: extract_initial_prompt_messages), ``extra_env_info``, ``loss_multiplier``, ``idx`` (of the
        group), ``task_name``, ``total_reward`` float32 ``[B]``, ``truncated`` bool ``[B]``, and ``weight_version``, the
        oldest of the batch, for ``ReplayBuffer.push``.

    Raises:
        ConfigError: as :func:`to_message_log`; a rollout forks, whose branches a baseline would count one by one;
            rows that are compared have unlike prompt ids, or with several seats rows that are not compared the same; a
            sample has no reward or group; or a version is not a number.
    """
    import torch

    if not samples:
        raise ConfigError.of("to_batch(samples)", samples, "at least one sample")
    check_one_branch(samples, "NeMo-RL")
    for sample in samples:
        check_has_ids(sample)
        if sample.group_index is None:
            raise ConfigError.of(f"{sample!r}.group_index", None, "the number of its group")
    rows = sorted(samples, key=lambda sample: (sample.group_index or 0, sample.seat))
    _check_openings(rows)
    logs = [to_message_log(row, temperature=temperature) for row in rows]
    return {
        "message_log": logs,
        "length": torch.tensor([len(log[0]["token_ids"]) for log in logs]),
        "extra_env_info": [dict(row.metadata) for row in rows],
        "loss_multiplier": torch.tensor([float(row.loss_multiplier) for row in rows]),
        "idx": [row.group_index for row in rows],
        "task_name": [task_name] * len(rows),
        "total_reward": torch.tensor([reward_of(row) for row in rows], dtype=torch.float32),
        "truncated": torch.tensor([row.status is Status.TRUNCATED for row in rows]),
        "weight_version": min(int_version(row, version) for row in rows),
    }


def _check_openings(rows: Sequence[Sample]) -> None:
    """Check that rows that are compared have equal prompt ids, whose rewards NeMo-RL compares.

    Groups of one prompt share a baseline there; seats of one prompt are refused.
    (NeMo-RL 0.6.0, algorithms/utils.py: calculate_baseline_and_std_per_prompt)
    """
    seats = any(row.seat for row in rows)
    compared: dict[bytes, str] = {}
    for members in by_comparison(rows):
        name, openings = comparison_name(members[0]), [_opening(row) for row in members]
        for row, opening in zip(members, openings, strict=True):
            if seats and compared.setdefault(opening, name) != name:
                expected = f"another than that of {compared[opening]}: NeMo-RL compares the rewards of one prompt"
                raise ConfigError.of(f"{row!r}: its prompt ids", "the same", expected)
            if opening != openings[0]:
                expected = f"those of {members[0]!r}: NeMo-RL compares the rewards of one prompt"
                raise ConfigError.of(f"{row!r}: its prompt ids", "others", expected)


def _opening(row: Sample) -> bytes:
    return row.token_column[: int(row.mask_column.argmax())].tobytes()


def write_batch(
    samples: Sequence[Sample], path: Path, *, version: int | None = None, temperature: float | None = None
) -> None:
    """Write a batch for ``torch.load``; raises as :func:`to_batch`."""
    import torch

    torch.save(to_batch(samples, version=version, temperature=temperature), path)
