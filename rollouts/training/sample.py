"""The trainer's record of a rollout.

Invariant: the per-token columns of a sample have one length, checked at construction and before it leaves the manager.
This module does not know how samples are generated, scored or filtered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from rollouts.concurrency.times import Timeline
from rollouts.dtypes import (
    ChatDict,
    Image,
    ImageSpan,
    LoadImage,
    Message,
    OnRewrite,
    StopReason,
    TokenColumn,
    images_in,
    is_frozen,
)
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, Failure
from rollouts.training.compact_record import CompactRecord, prefix_of, sizes_of
from rollouts.training.sample_columns import as_column, column, pack_column, record
from rollouts.training.sample_fields import RECORDED, check_values, cover_the_mask, fields_to_dict
from rollouts.training.status import Status

__all__ = ["ImageInputs", "Sample"]

ImageInputs: TypeAlias = Callable[[Sequence[Image]], "dict[str, npt.NDArray[Any]]"]
"""Makes the model's inputs of images, as :meth:`rollouts.renderer.images.ImageProcessor.inputs` does."""

_NO_IMAGES: Mapping[str, Image] = {}
"""Shared by all samples without images; never changed."""


def _status_of(value: Status | str) -> Status:
    try:
        return value if type(value) is Status else Status(value)
    except ValueError:
        raise ConfigError.of("Sample.status", value, f"one of {[status.value for status in Status]}") from None


# NO_OP: the properties of columns convert what is assigned to them; every other assignment is checked by `check`.
@attrs.define(eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class Sample:
    """One rollout, or one branch of a rollout, in the form that trainers take. Field names are slime's.

    ``tokens``, ``loss_mask`` and ``rollout_log_probs`` keep the assigned values until :meth:`pack` makes them read-only
    arrays of about 9 bytes a token. From then on they read as read-only lists: an edit in place raises ``TypeError``;
    assign a new list to change one. A sample of the agent loop is packed from the start, and so are its messages,
    completions and versions.

    Raises:
        ConfigError: columns of different lengths, or values that do not fit the type of their column.
    """

    prompt: str | Sequence[Message | ChatDict] = ""
    """The prompt, as in the data set unless the generate function plays another; no reward or filter changes it."""
    _response: Any = attrs.field(default="", alias="response")
    _tokens: Any = attrs.field(factory=list, alias="tokens", converter=as_column)
    _loss_mask: Any = attrs.field(default=None, alias="loss_mask", converter=as_column)
    reward: float | None = None
    metadata: dict[str, Any] = attrs.field(factory=dict)
    """The prompt's metadata; user code may add to it."""
    group_index: int | None = None
    """Number of the group, unique in the run: each prompt taken from the buffer gets a new one."""
    _status: Status = attrs.field(default=Status.PENDING, converter=_status_of, alias="status")
    _rollout_log_probs: Any = attrs.field(default=None, alias="rollout_log_probs", converter=as_column)
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
    """The times of its parts, its reward function included; not compared by ``==``."""
    _step_completions: Any = attrs.field(default=None, alias="step_completions", converter=as_column)
    _advantages: Any = attrs.field(default=None, alias="advantages", converter=as_column)
    _teacher_log_probs: Any = attrs.field(default=None, alias="teacher_log_probs", converter=as_column)
    loss_multiplier: float = 1.0
    """Factor of the sample's loss; 0 leaves it out of the loss and in its group's advantages."""
    images: tuple[ImageSpan, ...] = attrs.field(default=(), converter=tuple[ImageSpan, ...])
    """The images of its tokens, in order, with the positions of their placeholder ids."""
    seat: str = ""
    """The agent that it is a conversation of, in a rollout of several; empty in a rollout of one."""
    conversation: int = 0
    """Number of the conversation among those of its seat in the rollout; branches of a conversation share it."""
    parent: int | None = None
    """Of a branch: the number of the conversation that it continues."""
    shared: int = 0
    """Of a branch: the number of its first tokens that ``parent`` trains."""
    named_images: Mapping[str, Image] = _NO_IMAGES
    """Every image that prompt, messages and tokens name, by its SHA-256; a run's folder has each as a file."""
    tools: str | None = None
    """The tools that the model was shown, a list in chat format as JSON; ``None`` if unknown. A run has each once."""

    _compact: CompactRecord | None = attrs.field(default=None, init=False)
    """Compact storage of the response and the records; a record that was assigned since is in its slot instead."""
    trainer_record: Any = attrs.field(default=None, init=False)
    """The trainer's record of this rollout, where an integration needs that object; never written to disk."""
    image_inputs: ImageInputs | None = attrs.field(default=None, init=False)
    """Makes the model's inputs of the images; ``None`` in a sample that was copied or read from disk."""

    @property
    def status(self) -> Status:
        """Completion status; may be set as a :class:`Status` or as its value."""
        return self._status

    @status.setter
    def status(self, value: Status | str) -> None:
        self._status = _status_of(value)

    tokens = column("tokens", "Prompt and response ids, in the order the model saw them.")
    loss_mask = column("loss_mask", "1 where the token was sampled by the policy, else 0; as long as ``tokens``.")
    rollout_log_probs = column("rollout_log_probs", "Logprob of each sampled id, 0 elsewhere; or ``None``.")
    step_completions = column(
        "step_completions", "For each step reward the number of the completion that it answers, -1 where not known."
    )
    advantages = column("advantages", "Advantage of each token, for a trainer that takes them; or ``None``.")
    teacher_log_probs = column("teacher_log_probs", "Logprob of each id under a teacher's weights; or ``None``.")

    response = record("response", "Text after the first prompt: replies, and the environment's messages between them.")
    messages = record("messages", "The whole conversation, as a list of chat dicts.")
    completions = record("completions", "The completions of its replies, a list of ``CompletionRecord``.")
    versions = record(
        "versions",
        "Policy version of each sampled position of ``tokens``, a list of ``VersionSpan``; empty, or covers exactly "
        "the mask.",
    )

    def __attrs_post_init__(self) -> None:
        if self._loss_mask is None:
            self._loss_mask = [0] * len(self._tokens)
        prompt = () if isinstance(self.prompt, str) else self.prompt
        named = [*(image for entry in prompt for image in images_in(entry)), *(span.image for span in self.images)]
        found = {**self.named_images, **{image.sha256: image for image in named}}
        self.named_images = found or _NO_IMAGES
        self.check()

    def __repr__(self) -> str:
        where = f"group {self.group_index} · index {self.index}"
        where += f" · {self.seat} {self.conversation}" if self.seat else ""
        trained = np.count_nonzero(self._loss_mask)
        return f"<Sample {where}: {len(self)} tokens, {trained} trained, reward {self.reward}, {self.status.value}>"

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
        return pack_column("tokens", np.int32, self._tokens)

    @property
    def mask_column(self) -> npt.NDArray[np.bool_]:
        """``loss_mask`` as bool, shape ``(n,)``."""
        return pack_column("loss_mask", np.bool_, self._loss_mask)

    @property
    def logprob_column(self) -> npt.NDArray[np.float32] | None:
        """``rollout_log_probs`` as float32, shape ``(n,)``, or ``None``."""
        logprobs = self._rollout_log_probs
        return None if logprobs is None else pack_column("rollout_log_probs", np.float32, logprobs)

    @property
    def advantage_column(self) -> npt.NDArray[np.float32] | None:
        """``advantages`` as float32, shape ``(n,)``, or ``None``."""
        return None if self._advantages is None else pack_column("advantages", np.float32, self._advantages)

    @property
    def teacher_column(self) -> npt.NDArray[np.float32] | None:
        """``teacher_log_probs`` as float32, shape ``(n,)``, or ``None``."""
        teacher = self._teacher_log_probs
        return None if teacher is None else pack_column("teacher_log_probs", np.float32, teacher)

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
        """The model's inputs for its images, such as ``pixel_values``: arrays, joined along dimension 0.

        Computed at each read, because it may be a thousand times larger than the images. The processor keeps the inputs
        of an image for a while, so that samples with the same image share the work. ``None`` without images.

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
        return self.sizes[2]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, which are trained."""
        return self.sizes[1]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of all its tokens, ``sampled_tokens`` and ``response_length``."""
        known, mask = self._compact, self._loss_mask
        return known.sizes if known and mask is known.columns[1] and is_frozen(mask) else sizes_of(self.mask_column)

    @property
    def turns(self) -> int:
        """Number of completions."""
        completions = self._completions
        return completions.turns if type(completions) is CompactRecord else len(completions)

    @property
    def prefix(self) -> tuple[int, int]:
        """Tokens of the prompts of its completions, and how many of them the server had cached."""
        completions = self._completions
        return completions.prefix if type(completions) is CompactRecord else prefix_of(completions)

    @property
    def compact(self) -> CompactRecord | None:
        """Compact storage of response, messages, completions and versions; ``None`` if one of the four has changed."""
        compact = self._compact
        return compact if self._response is self._messages is self._completions is self._versions is compact else None

    @property
    def weight_versions(self) -> list[str]:
        """The policy versions of its tokens, in the order of their first token."""
        versions = self._versions
        return [*(versions.weight_versions if type(versions) is CompactRecord else {v.version: None for v in versions})]

    def read_record(self, name: str) -> Any:
        """Return the response, messages, completions or versions as assigned; a plain copy of packed values."""
        value = getattr(self, f"_{name}")
        return getattr(value, name)() if type(value) is CompactRecord else value

    def compact_records(self, first: int, decode: Callable[[TokenColumn], str]) -> Sample:
        """Store response, messages, completions and versions compactly, if the columns are arrays.

        Args:
            first: offset of the response: ``decode`` returned it for the tokens from there on.
            decode: deterministic, from ids to text.
        """
        columns = (self._tokens, self._loss_mask, self._rollout_log_probs)
        if all([isinstance(column, np.ndarray) for column in columns]):  # noqa: C419 - a generator makes more calls
            self._compact = CompactRecord.of(columns, first, decode, *map(self.read_record, RECORDED))
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
            object.__setattr__(self, name, as_column(value) if isinstance(value, np.ndarray) else value)

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
        if self._advantages is not None or self._teacher_log_probs is not None:
            self._advantages, self._teacher_log_probs = self.advantage_column, self.teacher_column
        numbers = self._step_completions
        if numbers is not None and getattr(numbers, "dtype", None) != np.int32:
            self._step_completions = pack_column("step_completions", np.int32, numbers)
        if not self._is_unchanged():
            self._tokens, self._loss_mask = self.token_column, self.mask_column
            self._rollout_log_probs = self.logprob_column
            self._check_columns()
        check_values(self)
        return self

    def check(self) -> Sample:
        """Check the sample and return it.

        Raises:
            ConfigError: columns of different lengths, versions that do not cover the mask, or a field of a wrong type.
        """
        if not self._is_unchanged():
            self._check_columns()
        check_values(self)
        return self

    def _check_columns(self) -> None:
        columns = {"tokens": self._tokens, "loss_mask": self._loss_mask}
        if self._rollout_log_probs is not None:
            columns["rollout_log_probs"] = self._rollout_log_probs
        lengths = {name: None if values is None else len(values) for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError.of("Sample", lengths, "columns of one length")
        versions = self.versions
        if versions and not cover_the_mask(versions, self.mask_column):
            expected = "spans that cover exactly the mask, each token once, with the name of a version"
            raise ConfigError.of("Sample.versions", versions, expected)

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
        return fields_to_dict(self, records=records)

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
        from rollouts.training.stored_fields import values_of  # here: most runs read no stored sample

        return cls(**values_of(data, {field.alias for field in attrs.fields(cls) if field.init}, load_image))
