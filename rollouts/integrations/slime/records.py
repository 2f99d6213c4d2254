"""slime's own record classes where slime is installed, and stand-ins of the same shape elsewhere.

Invariant: :class:`Sample` here has slime's fields, defaults, ``to_dict`` and ``from_dict``, so slime reads data that
was written without it. Only a call of :func:`records` imports slime.

The stand-in lacks the methods with which slime's own rollout extends a sample.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import attrs

__all__ = ["DynamicFilterOutput", "Records", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "Sample", "records"]


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

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> _SpecInfo:
        return cls(**{entry.name: data.get(entry.name, 0) for entry in fields(cls)})


@dataclass
class _PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> _PrefixCacheInfo:
        return cls(**{entry.name: data.get(entry.name, 0) for entry in fields(cls)})


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

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, including attributes that are not fields."""
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of :meth:`to_dict`; ``status`` is required."""
        known = {entry.name for entry in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        values["status"] = _Status(data["status"])
        values["spec_info"] = _SpecInfo.from_dict(data.get("spec_info", {}))
        values["prefix_cache_info"] = _PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        sample = cls(**values)
        sample.__dict__.update({name: value for name, value in data.items() if name not in known})
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
class Records:
    """The classes in use: slime's own, or those of this module."""

    sample: Any
    train_output: Any
    eval_output: Any
    filter_output: Any
    is_slime: bool


@functools.cache
def records() -> Records:
    """slime's classes if it can be imported, else the stand-ins; decided once per process."""
    try:
        types = importlib.import_module("slime.utils.types")
        outputs = importlib.import_module("slime.rollout.base_types")
        filters = importlib.import_module("slime.rollout.filter_hub.base_types")
    except ImportError:
        return Records(Sample, RolloutFnTrainOutput, RolloutFnEvalOutput, DynamicFilterOutput, is_slime=False)
    return Records(
        types.Sample,
        outputs.RolloutFnTrainOutput,
        outputs.RolloutFnEvalOutput,
        filters.DynamicFilterOutput,
        is_slime=True,
    )
