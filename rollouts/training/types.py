"""The trainer's record of a rollout, and the aliases of the functions that users write.

Invariant: the per-token columns of a sample have one length, checked when it is made and when it leaves the manager.
This module knows nothing of how samples are generated, scored or filtered.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.dtypes import ChatDict, Message, OnRewrite, Prompt, StopReason, TokenColumn, VersionSpan, is_frozen
from rollouts.errors import ConfigError, Failure
from rollouts.training.compact_record import CompactRecord
from rollouts.trajectory import CompletionRecord

__all__ = [
    "RECORDED",
    "FilterFn",
    "GenerateFn",
    "Group",
    "GroupRewardFn",
    "Outcome",
    "Prompt",
    "RewardFn",
    "Sample",
    "Status",
    "with_current_names",
]


class Status(enum.Enum):
    """How far a sample came; the values are slime's."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


def _column(name: str, doc: str) -> Any:
    """A per-token column: packed until somebody asks for it, then a plain list that may be changed in place."""
    slot = f"_{name}"

    def get(sample: Sample) -> Any:
        value = getattr(sample, slot)
        if isinstance(value, np.ndarray):
            value = (value.astype(np.int8) if value.dtype == np.bool_ else value).tolist()
            setattr(sample, slot, value)
        return value

    def put(sample: Sample, value: Any) -> None:
        setattr(sample, slot, _held(value))

    return property(get, put, doc=doc)


def _record(name: str, doc: str) -> Any:
    """A text, or a list that may be changed in place. While a :class:`CompactRecord` holds it, that is in its slot."""
    slot = f"_{name}"

    def get(sample: Sample) -> Any:
        value = sample.read(name)
        if name != "response":  # a text cannot be changed: it is made anew each time, and takes no room
            setattr(sample, slot, value)
        return value

    def put(sample: Sample, value: Any) -> None:
        setattr(sample, slot, value)

    return property(get, put, doc=doc)


def _held(value: Any) -> Any:
    """A column as it is held: an array, a list, or ``None``."""
    return value if isinstance(value, list | np.ndarray) or value is None else list(value)


def _pack(name: str, dtype: type, value: Any) -> npt.NDArray[Any]:
    is_column = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1
    if is_column and (dtype is not np.float32 or bool(np.isfinite(value).all())):
        return value  # type: ignore[no-any-return]
    packed: npt.NDArray[Any]
    try:
        column = np.asarray(value)
        packed = column.astype(dtype)
        exact = len(column) == 0 or bool((np.isfinite(packed) if dtype is np.float32 else packed == column).all())
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"Sample.{name}: {error}; expected {_CONTENTS[dtype]}") from None
    if not exact or packed.ndim != 1:
        raise ConfigError.of(f"Sample.{name}", value, _CONTENTS[dtype])
    return packed


_CONTENTS: dict[type, str] = {
    np.int32: "one list of token ids that fit 32 bits",
    np.bool_: "one list of 0 and 1",
    np.float32: "one list of finite numbers",
}


def _status_of(value: Status | str) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise ConfigError.of("Sample.status", value, f"one of {[status.value for status in Status]}") from None


@attrs.define(eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class Sample:
    """One rollout (or one branch of one) as trainers take it. Field names are slime's.

    ``tokens``, ``loss_mask`` and ``rollout_log_probs`` read as plain lists and may be changed in place; inside they are
    packed (about 9 bytes a token) whenever nobody has touched them since :meth:`pack`.

    Raises:
        ConfigError: columns of different lengths, or values that their column cannot hold.
    """

    prompt: str | Sequence[Message | ChatDict] = ""
    """What was asked, as the data set has it."""
    _response: Any = attrs.field(default="", alias="response")
    _tokens: Any = attrs.field(factory=list, alias="tokens")
    _loss_mask: Any = attrs.field(default=None, alias="loss_mask")
    reward: float | None = None
    metadata: dict[str, Any] = attrs.field(factory=dict)
    """The prompt's metadata, free for the user."""
    group_index: int | None = None
    """Which group: one for each prompt taken, never used twice in a run."""
    _status: Status = attrs.field(default=Status.PENDING, converter=_status_of, alias="status")
    _rollout_log_probs: Any = attrs.field(default=None, alias="rollout_log_probs")
    label: Any = None
    """The prompt's reference answer."""
    index: int | None = None
    """Running number of the rollout in the run."""
    rollout_id: int | None = None
    """One number for all branches of one rollout."""
    _versions: Any = attrs.field(factory=list, alias="versions")
    _messages: Any = attrs.field(factory=list, alias="messages")
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    _completions: Any = attrs.field(factory=list, alias="completions")
    metrics: dict[str, float] = attrs.field(factory=dict)
    """Numbers counted during the episode: turns, tool calls, malformed calls, seconds in the environment."""
    history: OnRewrite | None = None
    """What was done where the chat template rewrites the history; ``None`` where no renderer was at work."""
    step_rewards: list[float] = attrs.field(factory=list)
    """Rewards of the environment's steps, in order."""

    _told: CompactRecord | None = attrs.field(default=None, init=False)
    """What it says, held small; of each record that is still as it was."""
    trainer_record: Any = attrs.field(default=None, init=False)
    """The same rollout as a trainer's own record, where an integration keeps that object; never stored."""

    @property
    def status(self) -> Status:
        """How far it came; may also be set by its value."""
        return self._status

    @status.setter
    def status(self, value: Status | str) -> None:
        self._status = _status_of(value)

    tokens = _column("tokens", "Prompt and response ids, in the order the model saw them.")
    loss_mask = _column("loss_mask", "1 where the token was sampled by the policy; as wide as ``tokens``.")
    rollout_log_probs = _column("rollout_log_probs", "Logprob of each sampled id, 0 elsewhere; or ``None``.")

    response = _record(
        "response", "Text of everything after the first prompt: replies and what the environment said between them."
    )
    messages = _record("messages", "The whole conversation, as a list of chat dicts.")
    completions = _record("completions", "The completions that sampled its replies, a list of ``CompletionRecord``.")
    versions = _record(
        "versions",
        "Which policy version sampled which positions of ``tokens``, a list of ``VersionSpan``; covers exactly the "
        "mask when given.",
    )

    def __attrs_post_init__(self) -> None:
        self._tokens, self._loss_mask = _held(self._tokens), _held(self._loss_mask)
        self._rollout_log_probs = _held(self._rollout_log_probs)
        if self._loss_mask is None:
            self._loss_mask = [0] * len(self._tokens)
        self.check()

    def __repr__(self) -> str:
        where = f"group {self.group_index} · index {self.index}"
        trained = np.count_nonzero(self._loss_mask)
        counts = f"{len(self)} tokens, {trained} trained"
        return f"<Sample {where}: {counts}, reward {self.reward}, {self.status.value}>"

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Sample) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    # -- columns --

    @property
    def token_column(self) -> npt.NDArray[np.int32]:
        """``tokens`` as int32, shape ``(n,)``, without making a list of them."""
        return _pack("tokens", np.int32, self._tokens)

    @property
    def mask_column(self) -> npt.NDArray[np.bool_]:
        """``loss_mask`` as bool, shape ``(n,)``."""
        return _pack("loss_mask", np.bool_, self._loss_mask)

    @property
    def logprob_column(self) -> npt.NDArray[np.float32] | None:
        """``rollout_log_probs`` as float32, shape ``(n,)``, or ``None``."""
        return (
            None if self._rollout_log_probs is None else _pack("rollout_log_probs", np.float32, self._rollout_log_probs)
        )

    @property
    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32] | None]:
        """The three columns; not looked at again where nobody can have changed them since they were checked."""
        if self._told is not None and self._is_as_it_was():
            return self._told.columns
        return self.token_column, self.mask_column, self.logprob_column

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt: those from the first sampled one on."""
        mask = self.mask_column
        first = int(mask.argmax()) if len(mask) else 0
        return len(mask) - first if len(mask) and mask[first] else 0

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled: those that are trained."""
        return int(np.count_nonzero(self.mask_column))

    @property
    def turns(self) -> int:
        """Completions that sampled its replies."""
        calls = self._completions
        return calls.turns if type(calls) is CompactRecord else len(calls)

    @property
    def told(self) -> CompactRecord | None:
        """What holds its response, messages, calls and versions, if it holds all four: then they are unchanged."""
        told = self._told
        same = (
            self._response is told and self._messages is told and self._completions is told and self._versions is told
        )
        return told if same else None

    @property
    def weight_versions(self) -> list[str]:
        """The policy versions that took part, in the order of their first token."""
        return list(dict.fromkeys(span.version for span in self.read("versions")))

    def read(self, name: str) -> Any:
        """The record of that name, read without changing how the sample holds it."""
        value = getattr(self, f"_{name}")
        return getattr(value, name)() if type(value) is CompactRecord else value

    def keep(self, first: int, decode: Callable[[TokenColumn], str]) -> Sample:
        """Hold what it says small, as places in what its tokens say.

        Args:
            first: where the response begins: it is what ``decode`` gave for the tokens from there on.
            decode: always gives the same text for the same ids.
        """
        columns = (self._tokens, self._loss_mask, self._rollout_log_probs)
        if all(isinstance(column, np.ndarray) and is_frozen(column) for column in columns):
            self._told = CompactRecord.of(
                columns,
                first,
                decode,
                self.response,
                self.read("messages"),
                self.read("completions"),
                self.read("versions"),
            )
            if self._told is not None:
                self._response = self._messages = self._completions = self._versions = self._told
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for other processes: everything as it reads."""
        state = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        return {**state, **{f"_{name}": self.read(name) for name in RECORDED}, "_told": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def _is_as_it_was(self) -> bool:
        """Whether columns and versions are those that were checked when it was made."""
        told = self._told
        if told is None or self._versions is not told:
            return False
        tokens, mask, logprobs = told.columns
        same = self._tokens is tokens and self._loss_mask is mask and self._rollout_log_probs is logprobs
        return same and is_frozen(tokens) and is_frozen(mask) and is_frozen(logprobs)

    def pack(self) -> Sample:
        """Check the sample and hold its columns packed, and records small that nobody has changed."""
        if self._told is not None and self.told is None:
            for name in ("completions", "versions", "messages"):
                value = getattr(self, f"_{name}")
                if type(value) is not CompactRecord and value == getattr(self._told, name)():
                    setattr(self, f"_{name}", self._told)
        if self._is_as_it_was():
            return self._check_records()
        self._tokens, self._loss_mask, self._rollout_log_probs = (
            self.token_column,
            self.mask_column,
            self.logprob_column,
        )
        return self.check()

    def check(self) -> Sample:
        """Raise if the columns differ in length, the versions do not cover the mask, or a record is of another kind."""
        if self._is_as_it_was():
            return self._check_records()
        columns = {"tokens": self._tokens, "loss_mask": self._loss_mask}
        if self._rollout_log_probs is not None:
            columns["rollout_log_probs"] = self._rollout_log_probs
        lengths = {name: None if column is None else len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError.of("Sample", lengths, "columns of one length")
        versions = self.read("versions")
        if versions and not self._cover_the_mask(versions):
            raise ConfigError.of("Sample.versions", versions, "spans that cover exactly the mask, each token once")
        return self._check_records()

    def _check_records(self) -> Sample:
        for name, good, expected in _RECORDS:
            if name == "completions" and type(self._completions) is CompactRecord:
                continue
            if not good(getattr(self, name)):
                raise ConfigError.of(f"Sample.{name}", getattr(self, name), expected)
        return self

    def _cover_the_mask(self, versions: Sequence[VersionSpan]) -> bool:
        covered, total = np.zeros(len(self), np.bool_), 0
        for span in versions:
            if not isinstance(span, VersionSpan) or not 0 <= span.start < span.stop <= len(self):
                return False
            covered[span.start : span.stop] = True
            total += span.stop - span.start
        return total == np.count_nonzero(covered) and np.array_equal(covered, self.mask_column)

    # -- as plain data --

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: lists, numbers, strings. The inverse of :meth:`from_dict`."""
        columns = {
            "tokens": self.token_column.tolist(),
            "loss_mask": self.mask_column.astype(np.int8).tolist(),
            "rollout_log_probs": None if self.logprob_column is None else self.logprob_column.tolist(),
        }
        fields = self.fields_to_dict()
        return {"prompt": fields.pop("prompt"), "response": fields.pop("response"), **columns, **fields}

    def fields_to_dict(self, *, records: bool = True) -> dict[str, Any]:
        """As :meth:`to_dict`, without the columns; without ``records``, what :attr:`told` holds is left empty."""
        prompt, read = self.prompt, self.read if records else _nothing
        return {
            "prompt": prompt
            if isinstance(prompt, str)
            else [entry.to_chat() if isinstance(entry, Message) else dict(entry) for entry in prompt],
            "response": read("response"),
            "response_length": self.response_length,
            "reward": self.reward,
            "metadata": self.metadata,
            "label": self.label,
            "group_index": self.group_index,
            "index": self.index,
            "rollout_id": self.rollout_id,
            "status": self.status.value,
            "stop_reason": self.stop_reason and self.stop_reason.value,
            "versions": [[span.version, span.start, span.stop] for span in read("versions")],
            "messages": read("messages"),
            "completions": [call.to_dict() for call in read("completions")],
            "metrics": self.metrics,
            "failure": self.failure and attrs.asdict(self.failure),
            "history": self.history,
            "step_rewards": self.step_rewards,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ConfigError: an unknown field, or one that is not as it was written.
        """
        values = {key: value for key, value in with_current_names(data).items() if key != "response_length"}
        unknown = values.keys() - {field.alias for field in attrs.fields(cls) if field.init}
        if unknown:
            raise ConfigError.of("Sample", sorted(unknown), "fields of a sample")
        for name, read in _READERS.items():
            if values.get(name) is not None:
                try:
                    values[name] = read(values[name])
                except (TypeError, ValueError):
                    raise ConfigError.of(f"Sample.{name}", values[name], "what to_dict wrote") from None
        return cls(**values)


def _nothing(name: str) -> tuple[()]:
    return ()


def _are_numbers(values: Collection[Any]) -> bool:
    return _NUMBERS.issuperset(map(type, values)) or all(isinstance(value, numbers.Real) for value in values)


_NUMBERS = {int, float}
_FORMER_NAMES = {"calls": "completions"}
"""Fields of a sample as earlier versions of this package stored them, with their names of now."""


def with_current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Stored fields of a sample or a turn, those that have a former name under their current one."""
    return {_FORMER_NAMES.get(name, name): value for name, value in fields.items()}


RECORDED = ("response", "messages", "completions", "versions")
"""What a :class:`CompactRecord` holds."""
_RECORDS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("metadata", lambda value: isinstance(value, Mapping), "a dict"),
    (
        "metrics",
        lambda value: isinstance(value, dict) and _are_numbers(value.values()),
        "a dict of numbers",
    ),
    (
        "completions",
        lambda value: all(isinstance(call, CompletionRecord) for call in value),
        "a list of CompletionRecord",
    ),
]

_READERS: dict[str, Callable[[Any], Any]] = {
    "stop_reason": StopReason,
    "versions": lambda spans: [VersionSpan(*span) for span in spans],
    "completions": lambda records: [CompletionRecord(**record) for record in records],
    "failure": lambda failure: Failure(**failure),
}

Outcome: TypeAlias = Literal["kept", "dropped", "failed"]
"""Where a group ended: accepted, rejected by the filter, or lost to a failure."""


@attrs.frozen
class Group:
    """All rollouts of one prompt, settled."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """In order of ``index``; of a failed group, what there is."""
    outcome: Outcome
    reason: str = ""
    """Why it was dropped or failed."""

    @property
    def group_index(self) -> int:
        assert self.prompt.group_index is not None  # given by the buffer that it was taken from
        return self.prompt.group_index

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]


GenerateFn: TypeAlias = Callable[[Sequence[Prompt]], Awaitable[Sequence[Sample]]]
"""Makes one rollout for each prompt given, in order; several samples with one ``rollout_id`` where a rollout forks."""

RewardFn: TypeAlias = Callable[[Sample], float | Awaitable[float]]
"""Scores a sample. A sync one runs in a thread."""

GroupRewardFn: TypeAlias = Callable[[list[Sample]], Sequence[float] | Awaitable[Sequence[float]]]
"""With ``group_rm``: takes the group and gives one reward for each sample. A sync one runs in a thread."""

FilterFn: TypeAlias = Callable[[list[Sample]], bool | Awaitable[bool]]
"""Keeps (True) or drops (False) a group: same prompt, rewards set. Pure. An object with ``keep`` and ``reason``, such
as slime's ``DynamicFilterOutput``, is an answer too."""
