"""Training data: prompts in, whole groups of samples out. Imports neither torch nor transformers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.training.agent_integration import (
        agent_rollout_to_sample,
        agent_rollout_to_samples,
        generate_rollout_batch,
    )
    from rollouts.training.buffer_state import BufferState
    from rollouts.training.config import RolloutConfig
    from rollouts.training.continuation import continue_rollout
    from rollouts.training.data_buffer import DataBuffer
    from rollouts.training.filters import (
        check_any_success,
        check_min_reward,
        check_quality_and_diversity,
        check_reasonable_length,
        check_response_diversity,
        check_reward_nonzero_std,
        make_length_filter,
        make_threshold_filter,
    )
    from rollouts.training.manager import AsyncRolloutManager
    from rollouts.training.metrics import Accounting
    from rollouts.training.prompt_files import load_prompts
    from rollouts.training.samples import trajectory_to_sample, trajectory_to_samples
    from rollouts.training.types import FilterFn, GenerateFn, Group, GroupRewardFn, Prompt, RewardFn, Sample, Status

    # of the wing for programs, which this package does not import:
    function_rollout_to_samples: Any
    generate_function_batch: Any
    generate_program_batch: Any
    program_rollout_to_samples: Any

__all__ = [
    "Accounting",
    "AsyncRolloutManager",
    "BufferState",
    "DataBuffer",
    "FilterFn",
    "GenerateFn",
    "Group",
    "GroupRewardFn",
    "Prompt",
    "RewardFn",
    "RolloutConfig",
    "Sample",
    "Status",
    "agent_rollout_to_sample",
    "agent_rollout_to_samples",
    "check_any_success",
    "check_min_reward",
    "check_quality_and_diversity",
    "check_reasonable_length",
    "check_response_diversity",
    "check_reward_nonzero_std",
    "continue_rollout",
    "function_rollout_to_samples",
    "generate_function_batch",
    "generate_program_batch",
    "generate_rollout_batch",
    "load_prompts",
    "load_run",
    "make_length_filter",
    "make_threshold_filter",
    "program_rollout_to_samples",
    "trajectory_to_sample",
    "trajectory_to_samples",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.training.agent_integration": (
            "agent_rollout_to_sample",
            "agent_rollout_to_samples",
            "generate_rollout_batch",
        ),
        "rollouts.training.config": ("RolloutConfig",),
        "rollouts.training.continuation": ("continue_rollout",),
        "rollouts.training.buffer_state": ("BufferState",),
        "rollouts.training.data_buffer": ("DataBuffer",),
        "rollouts.training.filters": (
            "check_any_success",
            "check_min_reward",
            "check_quality_and_diversity",
            "check_reasonable_length",
            "check_response_diversity",
            "check_reward_nonzero_std",
            "make_length_filter",
            "make_threshold_filter",
        ),
        "rollouts.training.manager": ("AsyncRolloutManager",),
        "rollouts.training.prompt_files": ("load_prompts",),
        "rollouts.training.metrics": ("Accounting",),
        "rollouts.programs.generate": (
            "function_rollout_to_samples",
            "generate_function_batch",
            "generate_program_batch",
            "program_rollout_to_samples",
        ),
        "rollouts.training.samples": ("trajectory_to_sample", "trajectory_to_samples"),
        "rollouts.training.types": (
            "FilterFn",
            "GenerateFn",
            "Group",
            "GroupRewardFn",
            "Prompt",
            "RewardFn",
            "Sample",
            "Status",
        ),
    },
)
_READER = "rollouts.runs.reader"  # imported at the first call: stored runs are a layer above this package


def load_run(path: str | Path, outcome: str = "kept") -> Sequence[Sample]:
    """Load a stored run as a lazy sequence of samples; see :func:`rollouts.runs.reader.load_run`.

    Args:
        path: the folder of the run.
        outcome: which groups: ``"kept"``, ``"dropped"``, ``"failed"``, ``"unbatched"`` or ``"all"``.
    """
    return cast("Sequence[Sample]", importlib.import_module(_READER).load_run(path, outcome))
