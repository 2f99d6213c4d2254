"""The record classes of slime, or of its fork miles, where it is installed, and stand-ins of slime's shape elsewhere.

Invariant: :class:`Sample` here has slime's fields, defaults, and of its methods ``to_dict`` and ``from_dict``, so slime
reads data that was written without it. Only a call of :func:`records` imports slime. All that differs between slime and
miles is in :data:`FAMILIES`; one process serves one of them.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import attrs

from rollouts.errors import ConfigError

__all__ = [
    "FAMILIES",
    "DynamicFilterOutput",
    "Family",
    "Records",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "family",
    "records",
    "use_family",
]


class _Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class _SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class _PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class Sample:
    """slime's sample: ``loss_mask`` and ``rollout_log_probs`` are as long as the response."""

    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, including attributes that are not fields."""
        counters = {"spec_info": asdict(self.spec_info), "prefix_cache_info": asdict(self.prefix_cache_info)}
        return {**self.__dict__, "status": self.status.value, **counters}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of :meth:`to_dict`; ``status`` is required."""
        sample = cls()
        sample.__dict__.update(data, status=_Status(data["status"]))
        sample.spec_info = _SpecInfo(**data.get("spec_info", {}))
        sample.prefix_cache_info = _PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        return sample


@dataclass
class RolloutFnTrainOutput:
    """The return value of a rollout function in training: groups of samples, or groups of rollouts of samples."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Its return value in evaluation: by data set ``rewards``, ``truncated`` and ``samples``, equally long."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """The return value of a dynamic sampling filter."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


@attrs.frozen
class Family:
    """A trainer with slime's samples and flags, and its differences."""

    package: str
    session: str = "session_id"
    """The field of a sample with the routing key of its requests."""
    router_policy: str | None = None
    """The flag without which samples have no routing key; ``None`` where they always have one."""
    replays_top_p: bool = True
    """Whether its trainer replays the ids that ``--rollout-top-p`` kept."""
    numpy_columns: bool = False
    """Whether routed experts are an array, not a tensor."""
    traces: bool = True
    """Whether its dashboards read the trace of a sample."""
    takes_divergences: bool = False
    """Whether its trainer takes a divergence to a teacher at each token, and not only the teacher's logprobs."""
    bounds_single_turns: bool = False
    """Whether ``--rollout-max-context-len`` bounds a rollout of one reply, too."""
    refused: Mapping[str, str] = attrs.field(factory=dict)
    """Flags of this trainer that are not served, with the expected value."""


FAMILIES: Mapping[str, Family] = {
    "slime": Family("slime"),
    "miles": Family(
        "miles",
        session="routing_key",
        router_policy="sglang_router_policy",
        replays_top_p=False,
        numpy_columns=True,
        traces=False,
        takes_divergences=True,  # miles 31f1ca9, backends/training_utils/loss_hub/opd.py: apply_opd_kl_to_advantages
        bounds_single_turns=True,
        refused={
            "use_miles_router": "off: workers are listed by the router of SGLang",
            "multimodal_keys": "none: rollouts with images are compared with slime's own only",
            "chat_template_path": "none: a recipe has the option chat_template, in rollouts_recipe_options",
            "use_rollout_indexer_replay": "off: the rows of the indexer are not requested",
            "recompute_logprobs_via_prefill": "off: a logprob is that of the request that sampled its token",
            "lora_rank": "0: requests name no adapter",
            "lora_adapter_path": "none: requests name no adapter",
            "dumper_enable": "off: the engines are not configured here",
            "custom_agent_function_path": "none: its agents could not be stopped between two calls",
        },
    ),
}
_active = "slime"


def use_family(name: str) -> None:
    """Serve this trainer from now on in this process."""
    global _active
    _active = name


def family() -> Family:
    """The trainer that this process serves."""
    return FAMILIES[_active]


@attrs.frozen
class Records:
    """The classes in use: slime's own, or those of this module."""

    sample: Any
    train_output: Any
    eval_output: Any
    filter_output: Any
    is_slime: bool


def records() -> Records:
    """The trainer's classes if it can be imported, else the stand-ins; decided once per process and trainer."""
    return _records(_active)


@functools.cache
def _records(package: str) -> Records:
    try:
        types = importlib.import_module(f"{package}.utils.types")
        outputs = importlib.import_module(f"{package}.rollout.base_types")
        filters = importlib.import_module(f"{package}.rollout.filter_hub.base_types")
    except ImportError as error:
        if package != "slime":
            raise ConfigError.of(package, f"not importable ({error})", "the trainer of these rollouts") from error
        return Records(Sample, RolloutFnTrainOutput, RolloutFnEvalOutput, DynamicFilterOutput, is_slime=False)
    outcomes = (outputs.RolloutFnTrainOutput, outputs.RolloutFnEvalOutput, filters.DynamicFilterOutput)
    return Records(types.Sample, *outcomes, is_slime=True)
