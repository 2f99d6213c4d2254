"""Group advantages by group, not by position: ``--custom-reward-post-process-path ...slime.normalise_rewards``.

Invariant: ``group_index`` determines a sample's group and ``rollout_id`` its rollout, at any position in the batch;
each rollout counts once, however many samples it forked into, and removed samples do not count. A sample whose metadata
has a ``seat`` is compared with the group's samples of that seat only, or as its ``seat_comparison`` says. For groups of
equal size, in order, the results equal slime's (slime 0.3.1, ray/rollout.py: RolloutManager._post_process_rewards).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime.rollout import generate_rollout_batch
from rollouts.integrations.slime.scoring import plain_reward
from rollouts.integrations.slime.settings import ADVANTAGES, NEEDS_ADVANTAGES
from rollouts.training.comparisons import by_key, comparison_keys, conversation_keys

__all__ = ["normalise_rewards", "sample_advantages"]

_CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED = ("grpo", "gspo", "cispo")
_EPSILON = 1e-6


def normalise_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Compute the advantages of a batch.

    Args:
        args: slime's namespace: ``advantage_estimator``, ``rewards_normalization``, ``grpo_std_normalization``.
        samples: slime's samples, flat.

    Returns:
        The raw rewards and the normalised ones: two lists as long as ``samples``.

    Raises:
        ConfigError: only some samples have a ``group_index``; or rewards are divided by the deviation, and samples of
            one rollout have unlike rewards, which the deviation of the rollouts does not describe.
    """
    raw = [float(plain_reward(sample, args)) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _CENTRED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    indices = {sample.group_index is None for sample in samples}
    if len(indices) == 2:
        raise ConfigError.of("group_index", "None on some samples", "a number on every sample, or on none")
    scale = estimator in _SCALED and getattr(args, "grpo_std_normalization", True)
    rewards, rollout_keys = [0.0] * len(raw), conversation_keys(samples)
    for positions in by_key(comparison_keys(samples), range(len(samples))).values():
        counted = [position for position in positions if not samples[position].remove_sample]
        rollouts = by_key([rollout_keys[position] for position in counted], [raw[position] for position in counted])
        for rollout, of_one in rollouts.items():
            if scale and len(set(of_one)) > 1:
                expected = (
                    "one reward, since rewards are divided by the deviation of the rollouts: samples of one rollout"
                    " with unlike rewards, without a seat, need --disable-grpo-std-normalization, or another reward"
                    " post-processing"
                )
                raise ConfigError.of(f"rollout_id {rollout[1]}: rewards", of_one, expected)
        means = np.array([float(np.mean(of_one)) for of_one in rollouts.values()] or [0.0], np.float32)
        spread = means.std(ddof=1, dtype=np.float32) if len(means) > 1 else np.float32(1.0)
        divisor = spread + np.float32(_EPSILON) if scale else np.float32(1.0)
        for position in positions:
            rewards[position] = float((np.float32(raw[position]) - means.mean(dtype=np.float32)) / divisor)
    return raw, rewards


def sample_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """``--custom-advantage-function-path``, in slime's trainer: ``Sample.advantages`` of our rollouts, as returns, too.

    slime carries and splits them as logprobs of a teacher (slime 0.3.1, backends/megatron_utils/actor.py:
    MegatronTrainRayActor._get_rollout_data).

    Raises:
        ConfigError: the launch has a teacher or another rollout function, or the batch has no column.
    """
    column = rollout_data.get("teacher_log_probs")
    if column is None or args.use_opd or load_function(args.rollout_function_path) is not generate_rollout_batch:
        raise ConfigError.of("args.custom_advantage_function_path", ADVANTAGES, NEEDS_ADVANTAGES)
    rollout_data["advantages"] = rollout_data["returns"] = column
