"""prime-rl 0.8: rows as ``TrainingSample``, and files of micro batches that its trainer reads step by step.

    out: to_training_samples(samples, env_name=…)
    in:  MicroBatchFiles(output_dir, …).send(samples), so that our manager takes the place of the orchestrator

Invariant: all streams of a row are as long as its tokens, and no row is longer than the trainer's ``seq_len``, where
prime-rl cuts (prime-rl 0.8, trainer/batch.py: prepare_sample). A row has the arrays of exactly the images whose ids it
has. prime-rl is imported when a function needs it.

A ``TrainingSample`` has no policy version: ``manager.stream(max_staleness=…)`` drops stale groups before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.rewards.teacher_top import check_without_top
from rollouts.training.batch import group_advantages
from rollouts.training.rows import check_has_ids, image_column, row_columns, row_images, trimmed
from rollouts.training.types import Sample

__all__ = ["MicroBatchFiles", "to_training_samples", "training_columns", "write_batch"]


def training_columns(
    sample: Sample,
    advantage: float,
    *,
    env_name: str,
    temperature: float | None = None,
    ref_kl_weight: float = 1.0,
) -> dict[str, Any]:
    """The fields of a ``TrainingSample``: lists as long as the row's tokens.

    A row with images has ``mm_token_type_ids``, 1 on the ids that stand for an image, and as ``mm_kwargs`` the arrays
    of the model's processor, by name; :func:`to_training_samples` encodes them.

    Args:
        sample: one row.
        advantage: that of each sampled token, unless the sample has ``advantages``.
        env_name: the environment's name in prime-rl's metrics.
        temperature: that of completions whose record has none, as in runs of earlier versions.
        ref_kl_weight: of the reverse KL divergence to the teacher on each sampled token, times the sample's
            ``loss_multiplier``, where the sample has a teacher's logprobs: they are ``ref_logprobs`` (prime-rl 0.8,
            transports/rollouts/types.py: TrainingSample).

    Raises:
        ConfigError: the sample failed, has no sampled token or no logprobs; a completion has no temperature, or 0, by
            which logits cannot be divided; ``env_name`` is ``"all"``, which is reserved (prime-rl 0.8,
            trainer/batch.py: prepare_sample); or it has images and no ``image_inputs``.
    """
    if env_name == "all" or not env_name:
        raise ConfigError.of("env_name", env_name, "a name other than 'all', which prime-rl reserves")
    row = row_columns(sample, "prime-rl")
    width, column, teacher = len(row.tokens), sample.advantage_column, sample.teacher_column
    advantages = np.where(row.mask, np.float32(advantage) if column is None else column[:width], np.float32(0))
    columns: dict[str, Any] = {
        "token_ids": row.tokens.tolist(),
        "mask": row.mask.tolist(),
        "logprobs": row.logprobs.tolist(),
        "temperatures": _temperatures(sample, width, temperature),
        "env_name": env_name,
        "advantages": advantages.tolist(),
    }
    if sample.loss_multiplier != 1:
        columns["rl_weights"] = [float(sample.loss_multiplier)] * width
    if teacher is not None:
        check_without_top(sample, "prime-rl")
        columns["ref_logprobs"] = np.where(row.mask, teacher[:width], np.float32(0)).tolist()
        weight = np.float32(ref_kl_weight * sample.loss_multiplier)
        columns["ref_kl_weights"] = np.where(row.mask, weight, np.float32(0)).tolist()
    if inputs := row_images(sample):
        columns["mm_kwargs"] = inputs
        columns["mm_token_type_ids"] = image_column(sample).astype(int).tolist()
    return columns


def to_training_samples(
    samples: Sequence[Sample],
    *,
    env_name: str,
    advantages: Sequence[float] | None = None,
    temperature: float | None = None,
    ref_kl_weight: float = 1.0,
) -> list[Any]:
    """Convert rows to ``TrainingSample``, in order: each branch is a sample.

    Args:
        samples: scored samples, whole groups unless ``advantages`` are given.
        env_name: as for :func:`training_columns`.
        advantages: one for each sample; by default :func:`~rollouts.training.group_advantages`.
        temperature: as for :func:`training_columns`.
        ref_kl_weight: as for :func:`training_columns`.

    Raises:
        ConfigError: as :func:`training_columns`.
    """
    for sample in samples:
        check_has_ids(sample)
    from prime_rl.transports.rollouts.types import EncodedTensor, TrainingSample

    def encoded(array: npt.NDArray[Any]) -> Any:
        return EncodedTensor(dtype=str(array.dtype), shape=list(array.shape), data=array.tobytes())

    made = []
    for sample, advantage in zip(samples, group_advantages(samples) if advantages is None else advantages, strict=True):
        named: dict[str, Any] = {"temperature": temperature, "ref_kl_weight": ref_kl_weight}
        columns = training_columns(sample, float(advantage), env_name=env_name, **named)
        if "mm_kwargs" in columns:
            columns["mm_kwargs"] = {name: encoded(array) for name, array in columns["mm_kwargs"].items()}
        made.append(TrainingSample(**columns))
    return made


def write_batch(samples: Sequence[Sample], path: Path) -> None:
    """Write a batch as a msgpack list of ``TrainingSample``, of environment ``rollouts``, with GRPO's advantages.

    Raises:
        ConfigError: as :func:`to_training_samples`.
    """
    path.write_bytes(msgspec.msgpack.encode(to_training_samples(samples, env_name="rollouts")))


class MicroBatchFiles:
    """The files that prime-rl's trainer reads with ``rollout_transport.type="filesystem"``, one batch a step.

    Args:
        output_dir: that of the trainer.
        ranks: its data-parallel ranks.
        seq_len: its ``seq_len``; a longer row is refused.
        env_name: the environment's name in its metrics.
        step: the first step to write.
        pad_to_multiple_of: as in the trainer's configuration.
        temperature: as for :func:`training_columns`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        ranks: int,
        seq_len: int,
        env_name: str,
        step: int = 0,
        pad_to_multiple_of: int = 1,
        temperature: float | None = None,
    ) -> None:
        from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender

        self.ranks, self.seq_len, self.env_name = ranks, seq_len, env_name
        self.pad_to_multiple_of, self.temperature = pad_to_multiple_of, temperature
        self._sender = FileSystemMicroBatchSender(Path(output_dir), ranks, step)

    @property
    def step(self) -> int:
        """The step that the next batch is for."""
        return int(self._sender.current_step)

    async def send(self, samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> None:
        """Write one batch, for the next step of the trainer.

        Raises:
            ConfigError: as :func:`to_training_samples`, or a row is longer than ``seq_len``.
        """
        from prime_rl.trainer.batch import build_bin_cost, prepare_batch

        for sample in samples:
            if len(trimmed(sample)) > self.seq_len:
                expected = f"at most seq_len={self.seq_len} tokens, where prime-rl cuts"
                raise ConfigError.of(f"{sample!r}.tokens", len(trimmed(sample)), expected)
        rows = to_training_samples(samples, env_name=self.env_name, advantages=advantages, temperature=self.temperature)
        grid = prepare_batch(rows, self.seq_len, self.ranks, build_bin_cost(None), self.pad_to_multiple_of)
        await self._sender.send(grid)


def _temperatures(sample: Sample, width: int, default: float | None) -> list[float]:
    """The temperature of each token; 1 on context."""
    column = np.ones(width)
    for number, one in enumerate(sample.completions):
        temperature = default if one.temperature is None else one.temperature
        if not temperature:
            expected = "a number above 0; temperature= gives it where the record has none"
            raise ConfigError.of(f"{sample!r}.completions[{number}].temperature", temperature, expected)
        column[one.start : one.stop] = temperature
    values: list[float] = column.tolist()
    return values
