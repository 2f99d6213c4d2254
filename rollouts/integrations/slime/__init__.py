"""Integration with slime: whole groups of checked samples for its trainer, at each of its plug-in points.

    --rollout-function-path            ....generate_rollout_batch   the only flag that is required
    --custom-reward-post-process-path  ....normalise_rewards        groups by group_index, not by position
    --custom-advantage-function-path   ....sample_advantages        those of tokens, of rollouts.training.credit
    --data-source-path                 ....CheckpointedDataSource   saves groups in flight
    --custom-generate-function-path    ....generate                 one rollout, in slime's own loop
    --custom-rm-path                   ....reward                   the recipe's reward, in slime's own loop
    --dynamic-sampling-filter-path     ....filters.check_...
    --buffer-filter-path               ....filters.pop_...

(``....`` stands for ``rollouts.integrations.slime.``)

Importing this package does not import slime; torch is imported only to write a file in slime's format.
"""

from rollouts.integrations.slime.convert import from_slime, to_slime
from rollouts.integrations.slime.data_source import CheckpointedDataSource
from rollouts.integrations.slime.debug_data import export_run, write_debug_data
from rollouts.integrations.slime.normalisation import normalise_rewards, sample_advantages
from rollouts.integrations.slime.plugins import generate, policy_for, reward
from rollouts.integrations.slime.rollout import close_rollouts, generate_rollout_batch

__all__ = [
    "CheckpointedDataSource",
    "close_rollouts",
    "export_run",
    "from_slime",
    "generate",
    "generate_rollout_batch",
    "normalise_rewards",
    "policy_for",
    "reward",
    "sample_advantages",
    "to_slime",
    "write_debug_data",
]
