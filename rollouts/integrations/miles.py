"""Rollouts for miles, slime's fork: a class-based rollout function on the samples and flags that both share.

    --rollout-function-path            rollouts.integrations.miles.RolloutFn
    --custom-reward-post-process-path  rollouts.integrations.miles.normalise_rewards
    --data-source-path                 rollouts.integrations.miles.CheckpointedDataSource

Everything but the call is that of :mod:`rollouts.integrations.slime`; what differs between the two trainers is in
:data:`rollouts.integrations.slime.records.FAMILIES`. A process serves miles from the first of these classes on.
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ConfigError
from rollouts.integrations.slime.data_source import CheckpointedDataSource as Checkpointed
from rollouts.integrations.slime.normalisation import normalise_rewards
from rollouts.integrations.slime.records import use_family
from rollouts.integrations.slime.rollout import close_rollouts, generate_rollout_batch

__all__ = ["CheckpointedDataSource", "RolloutFn", "close_rollouts", "normalise_rewards"]


class CheckpointedDataSource(Checkpointed):
    """miles' data source with a buffer that is saved; see :mod:`rollouts.integrations.slime.data_source`."""

    def __init__(self, args: Any) -> None:
        use_family("miles")
        super().__init__(args)


class RolloutFn:
    """A rollout function of miles: made once with the namespace and the data source, called once for each batch.

    Args:
        input: miles' ``RolloutFnConstructorInput``.
    """

    def __init__(self, input: Any) -> None:
        use_family("miles")
        self.args, self.data_source = input.args, input.data_source

    def __call__(self, input: Any) -> Any:
        """Fill one batch, or play the evaluation.

        Args:
            input: miles' ``RolloutFnTrainInput`` or ``RolloutFnEvalInput``.

        Raises:
            ConfigError: a flag is not supported, or the evaluation plays a checkpoint on separate servers.
        """
        for name in ("generate_state", "hf_dir"):
            if getattr(input, name, None) is not None:
                expected = "None: the evaluation of a checkpoint needs separate servers"
                raise ConfigError.of(f"RolloutFnEvalInput.{name}", getattr(input, name), expected)
        return generate_rollout_batch(self.args, input.rollout_id, self.data_source, evaluation=input.evaluation)
