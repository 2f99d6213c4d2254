"""``--rollout-function-path`` of a trainer whose batches are leased, e.g. from ``rollouts up``.

    # leased_rollout.py, for --rollout-function-path leased_rollout.generate_rollout
    generate_rollout = LeasedRollout(sample_batches(Rollouts("http://127.0.0.1:8700"), groups=32))

Invariant: a batch is acknowledged when slime asks for a later one, so one whose training was interrupted returns. The
samples are those of :func:`to_slime`. Where batches come from is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollouts.base.validators import is_int
from rollouts.errors import ConfigError, DataExhausted
from rollouts.integrations.leases import LeasedBatch
from rollouts.integrations.slime.convert import Reading, check_training_batch, to_slime
from rollouts.integrations.slime.extras import Replay
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import ADVANTAGES
from rollouts.training.rows import check_temperature
from rollouts.training.types import Sample

__all__ = ["LeasedRollout"]


class LeasedRollout:
    """A rollout function for slime.

    Args:
        batches: one for each call, of ``--rollout-batch-size`` groups.
        calls_ahead: calls that slime makes before it has trained a batch: 0 with ``train.py``, 1 with
            ``train_async.py`` (slime 0.3.1, train_async.py: train). A lease must last that long.
    """

    def __init__(self, batches: Iterable[LeasedBatch], *, calls_ahead: int = 0) -> None:
        if not is_int(calls_ahead, 0):
            raise ConfigError.of("LeasedRollout.calls_ahead", calls_ahead, "an integer >= 0")
        self._batches: Iterator[LeasedBatch] = iter(batches)
        self._calls_ahead = calls_ahead
        self._untrained: deque[tuple[int, LeasedBatch]] = deque()

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        """Acknowledge what slime has trained, and return the next batch as ``RolloutFnTrainOutput``.

        Raises:
            ConfigError: an evaluation, for which ``--eval-function-path`` names another function; slime's flag of our
                advantages; a batch of another size than the launch's; a sample that slime cannot train, or of another
                temperature.
            DataExhausted: every group was trained.
        """
        if evaluation:
            expected = (
                "--eval-function-path rollouts.integrations.slime.generate_rollout_batch: leases have no evaluation"
            )
            raise ConfigError.of("evaluation", evaluation, expected)
        if getattr(args, "custom_advantage_function_path", None) == ADVANTAGES:
            expected = "none with leases, which pass no advantages to slime"
            raise ConfigError.of("args.custom_advantage_function_path", ADVANTAGES, expected)
        self._acknowledge(self._calls_ahead)
        leased = next(self._batches, None)
        if leased is None:
            self.trained()
            raise DataExhausted("every group of the service is acknowledged or dropped")
        groups = _groups(leased.samples, args)
        reading = Reading(reward_key=getattr(args, "reward_key", None))
        check_training_batch(groups, (args.rollout_batch_size, args.n_samples_per_prompt), reading, Replay.of(args))
        self._untrained.append((rollout_id, leased))  # now: a batch that is refused is not trained
        return records().train_output(samples=groups, metrics={})

    def trained(self) -> None:
        """Acknowledge every batch that was returned: the trainer has trained them."""
        self._acknowledge(0)

    def _acknowledge(self, left: int) -> None:
        while len(self._untrained) > left:
            step, batch = self._untrained[0]
            batch.ack(step)
            self._untrained.popleft()


def _groups(samples: Sequence[Sample], args: Any) -> list[list[Any]]:
    """slime's samples by group and rollout; a rollout with several branches is a list, as slime's third level."""
    replay = Replay.of(args)
    groups: dict[int | None, dict[int | None, list[Any]]] = {}
    for sample in samples:
        check_temperature(sample, "slime", getattr(args, "rollout_temperature", None))
        kl_weights = getattr(args, "opd_reward_weight_mode", None) or "student_p"
        record = to_slime(sample, replay=replay, kl_weights=kl_weights)
        if (key := getattr(args, "reward_key", None)) is not None:
            record.reward = {key: sample.reward}
        rollout = sample.index if sample.rollout_id is None else sample.rollout_id
        groups.setdefault(sample.group_index, {}).setdefault(rollout, []).append(record)
    forks = any(len(branches) > 1 for rollouts in groups.values() for branches in rollouts.values())
    return [[branches if forks else branches[0] for branches in rollouts.values()] for rollouts in groups.values()]
