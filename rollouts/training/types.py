"""The trainer's record of a rollout, and the types of the functions that users write.

Invariant: the per-token columns of a sample have one length, checked at construction and before it leaves the manager.
This module does not know how samples are generated, scored or filtered.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.base.validators import finite, is_int, is_number
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import (
    ChatDict,
    Image,
    ImageSpan,
    LoadImage,
    Message,
    OnRewrite,
    Prompt,
    StopReason,
    TokenColumn,
    VersionSpan,
    as_record,
    frozen,
    hashes_in,
    images_in,
    is_frozen,
    with_images,
)
from rollouts.errors import ConfigError, Failure
from rollouts.training.compact_record import CompactRecord
from rollouts.training.read_only import ReadOnlyList, read_only, recently
from rollouts.trajectory import CompletionRecord

__all__ = [
    "RECORDED",
    "FilterFn",
    "GenerateFn",
    "Group",
    "GroupRewardFn",
    "Identity",
    "ImageInputs",
    "Outcome",
    "Prompt",
    "RewardFn",
    "Sample",
    "Status",
    "by_rollout",
    "reward_of_rollout",
    "rollout_keys",
    "with_current_names",
]


class Status(enum.Enum):
    """Completion status of a sample; the values are slime's."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


def _column(name: str, doc: str) -> Any:
    """Property of a per-token column: what was assigned, and from :meth:`Sample.pack` on a read-only list."""
    slot = f"_{name}"

    def get(sample: Sample) -> Any:
        stored = getattr(sample, slot)
        return _listed(stored, name) if isinstance(stored, np.ndarray) else stored

    def put(sample: Sample, value: Any) -> None:
        setattr(sample, slot, _as_column(value))

    return property(get, put, doc=doc)


def _record(name: str, doc: str) -> Any:
    """Property of a text or a list: what was assigned, or a read-only copy of what a :class:`CompactRecord` stores."""
    slot = f"_{name}"

    def get(sample: Sample) -> Any:
        stored = getattr(sample, slot)
        return _decoded(stored, name) if type(stored) is CompactRecord else stored

    def put(sample: Sample, value: Any) -> None:
        setattr(sample, slot, value)

    return property(get, put, doc=doc)


def _listed(column: npt.NDArray[Any], name: str) -> Any:
    def unpack() -> ReadOnlyList:
        return ReadOnlyList((column.view(np.int8) if column.dtype == np.bool_ else column).tolist(), f"Sample.{name}")

    return recently((column, name), unpack)


def _decoded(record: CompactRecord, name: str) -> Any:
    return recently((record, name), lambda: read_only(getattr(record, name)(), f"Sample.{name}"))


def _as_column(value: Any) -> Any:
    """Convert an array to a read-only one and other sequences to a list; lists and ``None`` stay as they are."""
    if isinstance(value, np.ndarray):
        return value if is_frozen(value) else frozen(value.copy())
    return value if isinstance(value, list) or value is None else list(value)


def _pack(name: str, dtype: type, value: Any) -> npt.NDArray[Any]:
    """Return the value as a read-only array: itself if it is an array of that type, else a copy."""
    is_column = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1
    if is_column and (dtype is not np.float32 or bool(np.isfinite(value).all())):
        return value  # type: ignore[no-any-return]
    packed: npt.NDArray[Any]
    try:
        column = np.asarray(value)
        packed = frozen(column.astype(dtype))
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


Identity: TypeAlias = tuple[Any, int | None, int | None, int | None, Any, tuple[Any, ...] | None]
"""Value of :attr:`Sample.identity`."""


ImageInputs: TypeAlias = Callable[[Sequence[Image]], dict[str, npt.NDArray[Any]]]
"""Makes what a model computes with of images, as :meth:`rollouts.renderer.images.ImageProcessor.inputs` does."""


_NO_IMAGES: Mapping[str, Image] = {}
"""Shared by all samples without images; never changed."""


def _spans(images: Iterable[ImageSpan]) -> tuple[ImageSpan, ...]:
    return tuple(images)


def _status_of(value: Status | str) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise ConfigError.of("Sample.status", value, f"one of {[status.value for status in Status]}") from None


@attrs.define(eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class Sample:
    """One rollout, or one branch of a rollout, in the form that trainers take. Field names are slime's.

    ``tokens``, ``loss_mask`` and ``rollout_log_probs`` are what was assigned, until :meth:`pack` makes them read-only
    arrays of about 9 bytes a token. From then on they read as read-only lists: an edit in place raises ``TypeError``;
    assign a new list to change one. A sample of the agent loop is packed from the start, and so are its messages,
    completions and versions.

    Raises:
        ConfigError: columns of different lengths, or values that do not fit the type of their column.
    """

    prompt: str | Sequence[Message | ChatDict] = ""
    """The prompt, as in the data set."""
    _response: Any = attrs.field(default="", alias="response")
    _tokens: Any = attrs.field(factory=list, alias="tokens")
    _loss_mask: Any = attrs.field(default=None, alias="loss_mask")
    reward: float | None = None
    metadata: dict[str, Any] = attrs.field(factory=dict)
    """The prompt's metadata; user code may add to it."""
    group_index: int | None = None
    """Number of the group, unique in the run: each prompt taken from the buffer gets a new one."""
    _status: Status = attrs.field(default=Status.PENDING, converter=_status_of, alias="status")
    _rollout_log_probs: Any = attrs.field(default=None, alias="rollout_log_probs")
    label: Any = None
    """The prompt's reference answer."""
    index: int | None = None
    """Running number of the rollout in the run."""
    rollout_id: int | None = None
    """Number shared by all branches of one rollout."""
    _versions: Any = attrs.field(factory=list, alias="versions")
    _messages: Any = attrs.field(factory=list, alias="messages")
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    _completions: Any = attrs.field(factory=list, alias="completions")
    metrics: dict[str, float] = attrs.field(factory=dict)
    """Counters of the episode: turns, tool calls, malformed calls, seconds in the environment."""
    history: OnRewrite | None = None
    """Policy that was used where the chat template rewrites the history; ``None`` if no renderer was used."""
    step_rewards: list[float] = attrs.field(factory=list)
    """Rewards of the environment's steps, in order."""
    times: Timeline = attrs.field(factory=Timeline)
    """What the rollout did when, its reward function included; no part of equality."""
    _step_completions: Any = attrs.field(default=None, alias="step_completions")
    _advantages: Any = attrs.field(default=None, alias="advantages")
    _teacher_log_probs: Any = attrs.field(default=None, alias="teacher_log_probs")
    loss_multiplier: float = 1.0
    """Factor of the sample's loss; 0 leaves it out of the loss and in its group's advantages."""
    images: tuple[ImageSpan, ...] = attrs.field(default=(), converter=_spans)
    """The images of its tokens, in order, with the positions of their placeholder ids."""
    named_images: Mapping[str, Image] = _NO_IMAGES
    """Every image that prompt, messages and tokens name, by its SHA-256; a run's folder has each as a file."""

    _compact: CompactRecord | None = attrs.field(default=None, init=False)
    """Compact storage of the text and the records; a record that has changed since has its value in its own slot."""
    trainer_record: Any = attrs.field(default=None, init=False)
    """The trainer's own record of this rollout, where an integration needs that object; never written to disk."""
    image_inputs: ImageInputs | None = attrs.field(default=None, init=False)
    """Makes the tensors of the images; a sample that was read from disk or copied has none until it is set."""

    @property
    def status(self) -> Status:
        """Completion status; may be set as a :class:`Status` or as its value."""
        return self._status

    @status.setter
    def status(self, value: Status | str) -> None:
        self._status = _status_of(value)

    tokens = _column("tokens", "Prompt and response ids, in the order the model saw them.")
    loss_mask = _column("loss_mask", "1 where the token was sampled by the policy, else 0; as long as ``tokens``.")
    rollout_log_probs = _column("rollout_log_probs", "Logprob of each sampled id, 0 elsewhere; or ``None``.")

    step_completions = _column(
        "step_completions", "For each step reward the number of the completion that it answers, -1 where not known."
    )
    advantages = _column("advantages", "Advantage of each token, for a trainer that takes them; or ``None``.")
    teacher_log_probs = _column("teacher_log_probs", "Logprob of each id under a teacher's weights; or ``None``.")

    response = _record("response", "Text after the first prompt: replies, and the environment's messages between them.")
    messages = _record("messages", "The whole conversation, as a list of chat dicts.")
    completions = _record("completions", "The completions of its replies, a list of ``CompletionRecord``.")
    versions = _record(
        "versions",
        "Policy version of each sampled position of ``tokens``, a list of ``VersionSpan``; empty, or covers exactly "
        "the mask.",
    )

    def __attrs_post_init__(self) -> None:
        self._tokens, self._loss_mask = _as_column(self._tokens), _as_column(self._loss_mask)
        self._rollout_log_probs = _as_column(self._rollout_log_probs)
        self._advantages, self._teacher_log_probs = _as_column(self._advantages), _as_column(self._teacher_log_probs)
        self._step_completions = _as_column(self._step_completions)
        if self._loss_mask is None:
            self._loss_mask = [0] * len(self._tokens)
        prompt = () if isinstance(self.prompt, str) else self.prompt
        named = [*(image for entry in prompt for image in images_in(entry)), *(span.image for span in self.images)]
        found = {**self.named_images, **{image.sha256: image for image in named}}
        self.named_images = found or _NO_IMAGES
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
        if not isinstance(other, Sample):
            return NotImplemented
        return {**self.to_dict(), "times": []} == {**other.to_dict(), "times": []}

    __hash__ = None  # type: ignore[assignment]  # mutable

    # -- columns --

    @property
    def token_column(self) -> npt.NDArray[np.int32]:
        """``tokens`` as int32, shape ``(n,)``; creates no list."""
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
    def advantage_column(self) -> npt.NDArray[np.float32] | None:
        """``advantages`` as float32, shape ``(n,)``, or ``None``."""
        return None if self._advantages is None else _pack("advantages", np.float32, self._advantages)

    @property
    def teacher_column(self) -> npt.NDArray[np.float32] | None:
        """``teacher_log_probs`` as float32, shape ``(n,)``, or ``None``."""
        teacher = self._teacher_log_probs
        return None if teacher is None else _pack("teacher_log_probs", np.float32, teacher)

    @property
    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32] | None]:
        """Tokens, mask and logprobs; checked only if they may have changed since the last check."""
        if self._compact is not None and self._is_unchanged():
            return self._compact.columns
        return self.token_column, self.mask_column, self.logprob_column

    @property
    def multimodal_inputs(self) -> dict[str, list[Any]] | None:
        """The images of its tokens as ``{"images": [PIL image, …]}``, decoded at each read; ``None`` without images."""
        return {"images": [span.image.to_pil() for span in self.images]} if self.images else None

    @property
    def multimodal_train_inputs(self) -> dict[str, npt.NDArray[Any]] | None:
        """What the model computes with for its images, such as ``pixel_values``: arrays, joined along dimension 0.

        Computed at each read, because it may be a thousand times larger than the images. The processor keeps what it
        made of an image for a while, so that samples with the same image share the work. ``None`` without images.

        Raises:
            ConfigError: there are images, and the sample has no ``image_inputs``.
        """
        if not self.images:
            return None
        if self.image_inputs is None:
            raise ConfigError.of("Sample.image_inputs", None, "ImageProcessor.inputs, e.g. renderer.images.inputs")
        return self.image_inputs([span.image for span in self.images])

    @property
    def response_length(self) -> int:
        """Tokens from the first sampled one to the end."""
        mask = self.mask_column
        first = int(mask.argmax()) if len(mask) else 0
        return len(mask) - first if len(mask) and mask[first] else 0

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled: those that are trained."""
        return int(np.count_nonzero(self.mask_column))

    @property
    def turns(self) -> int:
        """Number of completions."""
        completions = self._completions
        return completions.turns if type(completions) is CompactRecord else len(completions)

    @property
    def compact(self) -> CompactRecord | None:
        """Compact storage of response, messages, completions and versions; ``None`` if one of the four has changed."""
        compact = self._compact
        slots = (self._response, self._messages, self._completions, self._versions)
        return compact if all(slot is compact for slot in slots) else None

    @property
    def identity(self) -> Identity:
        """Prompt, group index, index, rollout id, completions and replies of a packed sample, to compare later.

        The replies are columns, versions and images; ``None`` without a record of them, because they are the user's
        then. Compact records are not decoded.
        """
        completions, versions = (
            [*stored] if isinstance(stored, list | tuple) else stored for stored in (self._completions, self._versions)
        )
        no_replies = isinstance(completions, list) and not completions
        recorded = self._compact is not None or not no_replies  # an episode may end before its first reply
        columns = (self._tokens, self._loss_mask, self._rollout_log_probs)
        replies = (*columns, versions, self.images) if recorded else None
        return self.prompt, self.group_index, self.index, self.rollout_id, completions, replies

    @identity.setter
    def identity(self, value: Identity) -> None:
        self.prompt, self.group_index, self.index, self.rollout_id, self._completions, replies = value
        if replies is not None:
            self._tokens, self._loss_mask, self._rollout_log_probs, self._versions, self.images = replies

    @property
    def weight_versions(self) -> list[str]:
        """The policy versions of its tokens, in the order of their first token."""
        return list(dict.fromkeys(span.version for span in self.versions))

    def read_record(self, name: str) -> Any:
        """Return the response, messages, completions or versions as assigned; a plain copy of what is packed."""
        value = getattr(self, f"_{name}")
        return getattr(value, name)() if type(value) is CompactRecord else value

    def compact_records(self, first: int, decode: Callable[[TokenColumn], str]) -> Sample:
        """Store response, messages, completions and versions compactly, if the columns are arrays.

        Args:
            first: offset of the response: it is the text that ``decode`` returned for the tokens from there on.
            decode: deterministic, from ids to text.
        """
        columns = (self._tokens, self._loss_mask, self._rollout_log_probs)
        if all(isinstance(column, np.ndarray) for column in columns):
            self._compact = CompactRecord.of(
                columns,
                first,
                decode,
                self.response,
                self.read_record("messages"),
                self.read_record("completions"),
                self.read_record("versions"),
            )
            if self._compact is not None:
                self._response = self._messages = self._completions = self._versions = self._compact
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without compact storage."""
        state = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        state |= {f"_{name}": self.read_record(name) for name in RECORDED}
        return {**state, "_compact": None, "image_inputs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, _as_column(value) if isinstance(value, np.ndarray) else value)

    def _is_unchanged(self) -> bool:
        """Whether columns and versions are the read-only objects that were checked before."""
        compact = self._compact
        if compact is None or self._versions is not compact:
            return False
        tokens, mask, logprobs = compact.columns
        same = self._tokens is tokens and self._loss_mask is mask and self._rollout_log_probs is logprobs
        return same and is_frozen(tokens) and is_frozen(mask) and is_frozen(logprobs)

    def pack(self) -> Sample:
        """Check the sample as :meth:`check`, and pack its columns."""
        self._advantages, self._teacher_log_probs = self.advantage_column, self.teacher_column
        numbers = self._step_completions
        if numbers is not None and getattr(numbers, "dtype", None) != np.int32:
            self._check_records()  # before packing, which takes True for 1
            self._step_completions = _pack("step_completions", np.int32, numbers)
        if self._is_unchanged():
            return self._check_records()
        self._tokens, self._loss_mask, self._rollout_log_probs = (
            self.token_column,
            self.mask_column,
            self.logprob_column,
        )
        return self.check()

    def check(self) -> Sample:
        """Check the sample and return it.

        Raises:
            ConfigError: columns of different lengths, versions that do not cover the mask, or a field of a wrong type.
        """
        if self._is_unchanged():
            return self._check_records()
        columns = {"tokens": self._tokens, "loss_mask": self._loss_mask}
        if self._rollout_log_probs is not None:
            columns["rollout_log_probs"] = self._rollout_log_probs
        lengths = {name: None if column is None else len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError.of("Sample", lengths, "columns of one length")
        versions = self.versions
        if versions and not self._cover_the_mask(versions):
            expected = "spans that cover exactly the mask, each token once, with the name of a version"
            raise ConfigError.of("Sample.versions", versions, expected)
        return self._check_records()

    def _check_records(self) -> Sample:
        for name, good, expected in _FIELDS:
            if not good(getattr(self, name)):
                raise ConfigError.of(f"Sample.{name}", getattr(self, name), expected)
        for name, good, expected in _RECORDS:
            value = getattr(self, f"_{name}")
            if type(value) is not CompactRecord and not good(value):
                raise ConfigError.of(f"Sample.{name}", value, expected)
        for name, column in (("advantages", self._advantages), ("teacher_log_probs", self._teacher_log_probs)):
            if column is not None and len(column) != len(self):
                lengths = {"tokens": len(self), name: len(column)}
                raise ConfigError.of("Sample", lengths, "columns of one length")
        if self._step_completions is not None and not self._answer_completions(self._step_completions):
            expected = f"empty, or for each of the {len(self.step_rewards)} step rewards one of the {self.turns}"
            raise ConfigError.of("Sample.step_completions", self.step_completions, f"{expected} completions or -1")
        return self

    def _answer_completions(self, numbers: Any) -> bool:
        turns, plain = self.turns, numbers if isinstance(numbers, list) else numbers.tolist()
        fits = not plain or len(plain) == len(self.step_rewards)
        return fits and all(is_int(number, -1) and number < turns for number in plain)

    def _cover_the_mask(self, versions: Sequence[Any]) -> bool:
        covered, total = np.zeros(len(self), np.bool_), 0
        for span in versions:
            if not isinstance(span, VersionSpan) or not isinstance(span.version, str):
                return False
            if not 0 <= span.start < span.stop <= len(self):
                return False
            covered[span.start : span.stop] = True
            total += span.stop - span.start
        return total == np.count_nonzero(covered) and np.array_equal(covered, self.mask_column)

    # -- plain data --

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: lists, numbers, strings. The inverse of :meth:`from_dict`."""
        columns = {
            "tokens": self.token_column.tolist(),
            "loss_mask": self.mask_column.astype(np.int8).tolist(),
            "rollout_log_probs": None if self.logprob_column is None else self.logprob_column.tolist(),
        }
        fields = self.fields_to_dict()
        return {"prompt": fields.pop("prompt"), "response": fields.pop("response"), **columns, **fields}

    def fields_to_dict(self, *, records: bool = True) -> dict[str, Any]:
        """As :meth:`to_dict`, without the columns; ``records=False`` leaves the fields of :attr:`compact` empty."""
        prompt, read = self.prompt, self.read_record if records else _nothing
        return {
            "prompt": prompt if isinstance(prompt, str) else [as_record(entry) for entry in prompt],
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
            "completions": [completion.to_dict() for completion in read("completions")],
            "metrics": self.metrics,
            "failure": self.failure and attrs.asdict(self.failure),
            "history": self.history,
            "step_rewards": self.step_rewards,
            "times": self.times.to_list(),
            "step_completions": [*(self.step_completions or ())],
            "advantages": None if self.advantage_column is None else self.advantage_column.tolist(),
            "teacher_log_probs": None if self.teacher_column is None else self.teacher_column.tolist(),
            "loss_multiplier": self.loss_multiplier,
            "images": [[span.image.sha256, span.start, span.stop] for span in self.images],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], load_image: LoadImage | None = None) -> Sample:
        """Create a sample from the output of :meth:`to_dict`.

        Args:
            data: the fields; images are named by their hashes.
            load_image: returns an image by its hash: ``named_images.__getitem__`` of the sample, or
                ``rollouts.runs.images.ImageFolder(run).load``.

        Raises:
            ConfigError: an unknown field, a value that :meth:`to_dict` does not write, or there are images and no
                ``load_image``.
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
        _restore_images(values, load_image)
        return cls(**values)


def _restore_images(values: dict[str, Any], load_image: LoadImage | None) -> None:
    """Load the images that fields of a stored sample name."""
    spans, prompt = values.get("images") or (), values.get("prompt") or ""
    chats = [*(() if isinstance(prompt, str) else prompt), *(values.get("messages") or ())]
    hashes = dict.fromkeys([*hashes_in(chats), *(sha256 for sha256, _, _ in spans)])
    if not hashes:
        values["images"] = ()
        return
    if load_image is None:
        expected = "load_image, which returns an image by its hash"
        raise ConfigError.of("Sample.from_dict(load_image)", None, f"{expected}: the sample has images")
    loaded = {sha256: load_image(sha256) for sha256 in hashes}
    values["named_images"] = loaded
    values["images"] = [ImageSpan(loaded[sha256], start, stop) for sha256, start, stop in spans]
    if not isinstance(prompt, str):
        values["prompt"] = with_images(prompt, loaded.__getitem__)


def _nothing(name: str) -> tuple[()]:
    return ()


def _are_all(values: Any, kind: Any) -> bool:
    return isinstance(values, list | tuple) and (not values or all(isinstance(value, kind) for value in values))


def _are_numbers(values: Collection[Any]) -> bool:
    return _NUMBERS.issuperset(map(type, values)) or all(isinstance(value, numbers.Real) for value in values)


_NUMBERS = {int, float}


_FORMER_NAMES = {"calls": "completions"}
"""Field names in runs that earlier versions of this package stored, and their current names."""


def with_current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace former field names of a stored sample or turn by the current ones."""
    return {_FORMER_NAMES.get(name, name): value for name, value in fields.items()}


_RECORDS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("response", lambda value: isinstance(value, str), "a text"),
    ("messages", lambda value: isinstance(value, list | tuple), "a list of chat dicts"),
    ("completions", lambda value: _are_all(value, CompletionRecord), "a list of CompletionRecord"),
    ("versions", lambda value: _are_all(value, VersionSpan), "a list of VersionSpan"),
]
"""The fields that a :class:`CompactRecord` stores, with a check of what user code may have assigned."""
RECORDED = tuple(name for name, _, _ in _RECORDS)

_HISTORIES = get_args(OnRewrite)
_FIELDS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("prompt", lambda value: isinstance(value, str) or _are_all(value, Message | Mapping), "a text, or messages"),
    ("metadata", lambda value: isinstance(value, dict | Mapping), "a dict"),
    (
        "metrics",
        lambda value: isinstance(value, dict) and _are_numbers(value.values()),
        "a dict of numbers",
    ),
    ("stop_reason", lambda value: value is None or isinstance(value, StopReason), "a StopReason, or None"),
    ("failure", lambda value: value is None or isinstance(value, Failure), "a Failure, or None"),
    (
        "history",
        lambda value: value is None or (isinstance(value, str) and value in _HISTORIES),
        f"one of {_HISTORIES}",
    ),
    ("times", lambda value: isinstance(value, Timeline), "a Timeline"),
    ("images", lambda value: _are_all(value, ImageSpan), "ImageSpans"),
    ("named_images", lambda value: isinstance(value, dict | Mapping), "images by their hashes"),
    ("loss_multiplier", lambda value: is_number(value) and value >= 0, "a finite number >= 0"),
]

_READERS: dict[str, Callable[[Any], Any]] = {
    "stop_reason": StopReason,
    "versions": lambda spans: [VersionSpan(*span) for span in spans],
    "completions": lambda records: [CompletionRecord(**record) for record in records],
    "failure": lambda failure: Failure(**failure),
    "times": Timeline,
}

Outcome: TypeAlias = Literal["kept", "dropped", "failed"]
"""Outcome of a group: accepted by the filter, rejected by the filter, or lost to a failure."""


@attrs.frozen
class Group:
    """All rollouts of one prompt, with their outcome."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """In order of ``index``; a failed group may lack some."""
    outcome: Outcome
    reason: str = ""
    """Why it was dropped or failed."""

    @property
    def group_index(self) -> int:
        assert self.prompt.group_index is not None  # set by the buffer
        return self.prompt.group_index

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]

    @property
    def rollout_rewards(self) -> list[float | None]:
        """The reward of each rollout, however many branches it has."""
        return [reward_of_rollout(branches) for branches in by_rollout(self.samples)]

    @property
    def rollout_lengths(self) -> list[int]:
        """The sampled tokens of each rollout."""
        return [sum(branch.sampled_tokens for branch in branches) for branches in by_rollout(self.samples)]


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The branches of each rollout, in order; a sample without ``rollout_id`` is a rollout of its own."""
    rollouts: dict[tuple[str, int], list[Sample]] = {}
    for key, sample in zip(rollout_keys(samples), samples, strict=True):
        rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())


def rollout_keys(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    """Key of each sample's rollout: ``rollout_id``, or the position among ``samples`` if it is ``None``."""
    return [
        ("place", number) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        for number, sample in enumerate(samples)
    ]


def reward_of_rollout(branches: Sequence[Sample]) -> float | None:
    """The mean reward of the branches of a rollout, which mostly is the reward of each; ``None`` if one has none."""
    if len(branches) == 1:
        return branches[0].reward
    rewards = [reward for branch in branches if (reward := finite(branch.reward)) is not None]
    return sum(rewards) / len(rewards) if len(rewards) == len(branches) else None


GenerateFn: TypeAlias = Callable[[Sequence[Prompt]], Awaitable[Sequence[Sample]]]
"""Generates one rollout for each prompt, in order; a rollout that forks is several samples with one ``rollout_id``."""

RewardFn: TypeAlias = Callable[[Sample], float | Awaitable[float]]
"""Scores a sample. A sync function runs in a thread."""

GroupRewardFn: TypeAlias = Callable[[list[Sample]], Sequence[float] | Awaitable[Sequence[float]]]
"""With ``group_rm``: takes the group and returns one reward for each sample. A sync function runs in a thread."""

FilterFn: TypeAlias = Callable[[list[Sample]], bool | Awaitable[bool]]
"""Keeps (True) or drops (False) a scored group; pure. May also return an object with ``keep`` and ``reason``, such as
slime's ``DynamicFilterOutput``."""
