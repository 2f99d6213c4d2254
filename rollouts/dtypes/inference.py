"""The endpoint, sampling parameters and limits of rollouts, and what one request returns.

Invariant: a completion has a logprob and a policy version for each of its tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec

from rollouts.base.validators import are_texts, as_texts, check, integer, is_int, is_number, number, seconds
from rollouts.dtypes.columns import LogprobColumn, TokenColumn, are_logprobs, packed_logprobs, packed_tokens
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, without_password

__all__ = [
    "CONSTRAINTS",
    "MAX_MESSAGE_BYTES",
    "Completion",
    "Concurrency",
    "Endpoint",
    "Extras",
    "FinishReason",
    "Limits",
    "LogprobsOf",
    "OnRewrite",
    "Provider",
    "SamplingParams",
    "StopReason",
    "VersionSpan",
]


class StopReason(enum.StrEnum):
    """Why a rollout ended."""

    TASK_COMPLETED = "task_completed"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The episode used all turns that the limits allow."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """A reply has more tool calls than the limits of a reply or an episode allow; those calls did not run."""
    MAX_TOKENS = "max_tokens"
    """A reply, the sequence or the episode reached its token budget."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The sequence no longer fits the model's context."""
    DEADLINE = "deadline"
    """The episode reached its wall-time limit."""
    FORKED = "forked"
    """The template rewrites this history for the next turn; the episode continues in the next branch."""
    ABORTED = "aborted"
    """The server or the caller aborted a reply; the partial tokens are stored."""
    MALFORMED_REPLY = "malformed_reply"
    """The chat template refuses the reply in a history (an empty one, an odd name); no turn can follow it."""
    FAILED = "failed"
    """The environment or the endpoint failed; the failure is stored with the tokens."""


FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why one completion ended: the model stopped, it reached its token budget, or the request was aborted."""

_FINISH_REASONS = get_args(FinishReason)

LogprobsOf: TypeAlias = Literal["raw", "tempered", "processed", "constrained"]
"""The distribution of a logprob. ``raw``: the distribution of the weights. ``tempered``: after temperature and
penalties, before top-k, top-p and min-p; for a greedy token, at temperature 1. ``processed``: after all of them; the
token was drawn from it. ``constrained``: as ``tempered``, over the ids that a grammar allowed."""
_LOGPROBS_OF = get_args(LogprobsOf)

OnRewrite: TypeAlias = Literal["append", "fork", "error"]
"""The policy for a chat template that rewrites the history, i.e. renders it otherwise than the model has seen it
(thoughts stripped, tools moved): ``append`` keeps the ids; ``fork`` opens a new branch with the rewritten history;
``error`` fails the rollout. ``fork`` and ``error`` render the whole conversation after each turn to detect this."""

Provider: TypeAlias = Literal["sglang", "vllm"]
NEEDS_TOKEN_IDS = "a run sends token ids and gets token ids with their logprobs; OpenAI's chat API has no token ids"
Concurrency: TypeAlias = int | Literal["adaptive"] | None
"""Number of concurrent requests a server: see :class:`Endpoint`."""


@attrs.frozen
class VersionSpan:
    """The policy version that sampled the tokens ``start`` to ``stop`` (half open)."""

    version: str
    start: int
    stop: int


CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The sampling parameters that constrain a reply."""


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(msgspec.json.decode(value), dict)
    except (msgspec.DecodeError, TypeError):
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _checked(default: Any, expected: str, valid: Callable[[Any], bool]) -> Any:
    return attrs.field(default=default, validator=check(expected, valid, optional=default is None))


@attrs.frozen
class SamplingParams:
    """Sampling parameters. The defaults sample from the full distribution, so that logprobs are those of the policy.

    With ``top_p`` below 1 or ``top_k`` set, SGLang 0.5.23 reports the logprob of the untruncated distribution, as vLLM
    0.32.0 does in its raw mode. The client refuses them for a vLLM server in its processed mode.
    """

    temperature: float = attrs.field(default=1.0, validator=number(least=0))
    top_p: float = _checked(1.0, "a number in (0, 1]", lambda v: is_number(v) and 0 < v <= 1)
    top_k: int = _checked(-1, "-1 or an integer >= 1", lambda v: is_int(v) and (v == -1 or v >= 1))
    min_p: float = _checked(0.0, "a number in [0, 1]", lambda v: is_number(v) and 0 <= v <= 1)
    max_new_tokens: int = attrs.field(default=1024, validator=integer(1))
    """Budget of one reply, in tokens."""
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_texts,
        validator=check(
            "a string or several, none empty, at most 32",
            lambda stops: are_texts(stops) and "" not in stops and len(stops) <= 32,
        ),
    )
    """Stop strings; their tokens stay in the reply. Servers accept 32."""
    seed: int | None = _checked(None, "an integer", is_int)
    min_new_tokens: int = attrs.field(default=0, validator=integer(0))
    repetition_penalty: float = _checked(1.0, "a number in (0, 2]", lambda v: is_number(v) and 0 < v <= 2)
    """Logprobs belong to the penalised distribution."""
    json_schema: str | None = _checked(None, "a JSON schema, as text", _is_json_object)
    """Constrains the whole reply, also thoughts and tool calls, as do ``regex`` and ``ebnf``; at most one of the four.
    Logprobs belong to the distribution over the ids that it allows, and a trainer computes others."""
    regex: str | None = _checked(None, "a non-empty string", _is_text)
    ebnf: str | None = _checked(None, "a non-empty string", _is_text)
    structural_tag: str | None = _checked(None, "a structural tag, as JSON", _is_json_object)
    """Constrains the parts of a reply that begin with one of its triggers, such as tool calls; the rest is free."""

    def __attrs_post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError.of("SamplingParams", " and ".join(given), f"at most one of {', '.join(CONSTRAINTS)}")

    @property
    def constrained(self) -> bool:
        """Whether a grammar limits the ids of a reply."""
        return bool(self.json_schema or self.regex or self.ebnf or self.structural_tag)  # none may be empty

    @property
    def greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def tempered(self) -> bool:
        """Whether logprobs before and after the temperature differ."""
        return not self.greedy and self.temperature != 1

    @property
    def sent_temperature(self) -> float:
        """The temperature of requests, which records of completions have: 0 if they are greedy.

        At another temperature, SGLang's logprob of a token with ``top_k=1`` depends on its batch: tempered if any
        request in it is not greedy, else raw (SGLang 0.5.23, layers/sampler.py: Sampler.forward).
        """
        return 0.0 if self.greedy else self.temperature


def _check_urls(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not (are_texts(value) and value and all(url.startswith(("http://", "https://")) for url in value)):
        printable = tuple(map(without_password, value)) if are_texts(value) else value
        raise ConfigError.of("Endpoint.base_url", printable, "one or more URLs that start with http:// or https://")


def _urls(value: Any) -> Any:
    urls = as_texts(value)
    return tuple(url.rstrip("/") for url in urls) if are_texts(urls) else urls


@attrs.frozen
class Endpoint:
    """An inference endpoint: its address, its sampling parameters, its timeouts.

    Args:
        provider: the server's protocol: ``"sglang"`` or ``"vllm"``.
        model: name or folder of the model; also the default source of the tokenizer.
        base_url: one URL, or the URLs of several servers of the same model.
        api_key: sent as a bearer token; never printed.
        lora: the family of LoRA adapters: replies are sampled with the newest adapter named ``lora`` or ``lora-vN``.
        admin_key: sent instead with aborts and weight updates, to servers with ``--admin-api-key``; never printed.
    """

    provider: Provider = attrs.field(
        default="sglang", validator=check(f'"sglang" or "vllm": {NEEDS_TOKEN_IDS}', lambda v: v in get_args(Provider))
    )
    model: str = attrs.field(
        default="default", validator=check("a non-empty string", lambda v: isinstance(v, str) and bool(v))
    )
    base_url: tuple[str, ...] = attrs.field(
        default="http://127.0.0.1:30000",
        converter=_urls,
        validator=_check_urls,
        repr=lambda urls: without_password(repr(urls)),
    )
    lora: str | None = attrs.field(
        default=None,
        validator=check(
            "a name of letters, digits, '.', '_' and '-', without a version",
            lambda v: isinstance(v, str) and bool(re.fullmatch(r"(?!.*-v\d+\Z)[A-Za-z0-9][\w.-]*", v, re.ASCII)),
            optional=True,
        ),
    )
    api_key: str | None = attrs.field(default=None, repr=False)
    admin_key: str | None = attrs.field(default=None, repr=False)
    sampling: SamplingParams = attrs.field(
        factory=SamplingParams, validator=attrs.validators.instance_of(SamplingParams)
    )
    connect_seconds: float = attrs.field(default=5.0, validator=seconds(above=0))
    request_seconds: float = attrs.field(default=600.0, validator=seconds(above=0))
    """Deadline of one completion, from sending the request to the last byte of the response."""
    max_retries: int = attrs.field(default=5, validator=integer(0))
    """Retries of a request that failed at a running server (lost connection, 5xx except 503)."""
    outage_seconds: float = attrs.field(default=1800.0, validator=seconds(least=0))
    """How long requests wait for servers that are down, restarting, overloaded or have never answered, before the run
    ends and returns its prompts; deadlines stand still. Enough to load a model of 70 billion parameters, 140 GB, at
    80 MB/s. Preflight asks each server once, so that a wrong URL is an error at once."""
    concurrency: Concurrency = attrs.field(
        default=None,
        validator=check('an integer >= 1, "adaptive" or None', lambda v: v in (None, "adaptive") or is_int(v, 1)),
    )
    """Concurrent requests for each server; further ones wait in the client. ``"adaptive"``: as many as the server runs
    without queueing or running out of KV cache, as its load report says. ``None``: no limit."""

    priority: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Send priorities where the server schedules by them: evaluations last, the last rollouts of a group first."""

    def __attrs_post_init__(self) -> None:
        for name, key in (("api_key", self.api_key), ("admin_key", self.admin_key)):
            if key and any(url != without_password(url) for url in self.base_url):
                expected = "none where a URL has a user name or a password: a request carries one of them"
                raise ConfigError.of(f"Endpoint.{name}", "(not shown)", expected)


@attrs.frozen(eq=False)
class Extras:
    """Further data of a server about a completion, where the caller asks for them.

    It stays in memory with the completion; no run folder contains it.

    Raises:
        ValueError: the sets of ``top_p_ids`` do not add up.
    """

    requests: tuple[Mapping[str, float], ...] = ()
    """For each request: ``ended`` (Unix time), ``seconds``, counts of tokens, and the numbers of the server."""
    experts: TokenColumn | None = None
    """Routed experts of consecutive positions, shape ``(n, layers * top_k)``. The last sampled token has none: it has
    not been routed yet."""
    experts_start: int = 0
    """Position of the first row of ``experts``."""
    top_p_ids: TokenColumn | None = None
    """The ids that ``top_p`` kept, token after token, in one column."""
    top_p_counts: TokenColumn | None = None
    """The number of kept ids for each sampled token, as long as the completion."""

    def __attrs_post_init__(self) -> None:
        ids = 0 if self.top_p_ids is None else len(self.top_p_ids)
        counts = np.empty(0, np.int32) if self.top_p_counts is None else self.top_p_counts
        if int(counts.sum()) != ids or (counts < 0).any():
            raise ValueError(f"the sets of top_p have {ids} ids; expected {int(counts.sum())}, the sum of their sizes")

    @classmethod
    def joined(cls, parts: Sequence[Extras]) -> Extras:
        """The extras of consecutive completions of one sequence.

        The rows of a position come from the part that had it first: a later part computed them again, perhaps with
        other weights.

        Raises:
            ValueError: the rows of a part begin after the last ones.
        """
        start: int | None = None
        rows: list[TokenColumn] = []
        covered = 0
        for part in parts:
            if part.experts is None:
                continue
            if start is None:
                start = covered = part.experts_start
            if part.experts_start > covered:
                raise ValueError(f"routed experts from position {part.experts_start} on; expected {covered} or less")
            new = part.experts[covered - part.experts_start :]
            rows.append(new)
            covered += len(new)
        ids = [part.top_p_ids for part in parts if part.top_p_ids is not None]
        counts = [part.top_p_counts for part in parts if part.top_p_counts is not None]
        return cls(
            requests=tuple(request for part in parts for request in part.requests),
            experts=None if start is None else np.concatenate(rows),
            experts_start=start or 0,
            top_p_ids=np.concatenate(ids) if ids else None,
            top_p_counts=np.concatenate(counts) if counts else None,
        )


@attrs.frozen
class Completion:
    """The result of one request to the policy: exactly the tokens that it sampled.

    Raises:
        ValueError: the columns differ in length, a logprob is not finite or is above 0, or the versions do not cover
            the tokens.
    """

    tokens: TokenColumn = attrs.field(converter=packed_tokens, eq=list)
    """Sampled ids, shape ``(n,)``, including the stop id if one was sampled."""
    logprobs: LogprobColumn = attrs.field(converter=packed_logprobs, eq=list)
    """Natural-log probability of each sampled id, shape ``(n,)``."""
    finish_reason: FinishReason
    versions: Sequence[VersionSpan]
    """The policy versions of the tokens; they cover ``0..n`` without gap or overlap."""
    prompt_tokens: int
    """Number of prompt ids that the server reports."""
    prompt_digest: int
    """CRC-32 of the ids that were sent, as little-endian int32; it links a stored sequence to the real request."""
    request_id: str
    cached_tokens: int = 0
    """Number of prompt ids that the server read from its prefix cache."""
    seconds: float = 0.0
    """Wall time of the request, retries included."""
    waited: float = 0.0
    """Seconds of it before the request that was answered was sent: no free slot, earlier attempts, an outage."""
    server: str = ""
    """URL of the server that answered."""
    extras: Extras | None = attrs.field(default=None, eq=False, repr=False)
    """Further columns and numbers; ``None`` unless the caller asked for them."""
    logprobs_of: LogprobsOf | None = None
    """The distribution of the logprobs; ``None`` if the policy does not say."""

    def __attrs_post_init__(self) -> None:
        if self.finish_reason not in _FINISH_REASONS:
            raise ConfigError.of("Completion.finish_reason", self.finish_reason, f"one of {_FINISH_REASONS}")
        if self.logprobs_of is not None and self.logprobs_of not in _LOGPROBS_OF:
            raise ConfigError.of("Completion.logprobs_of", self.logprobs_of, f"one of {_LOGPROBS_OF}")
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} sampled tokens came with {len(self.logprobs)} logprobs")
        if not np.logical_and.reduce(are_logprobs(self.logprobs)):
            raise ValueError("a sampled token came without a finite logprob <= 0")
        position = 0
        for span in self.versions:
            if span.start != position or span.stop <= span.start:
                raise ValueError(f"version spans must follow each other from 0, got {self.versions}")
            position = span.stop
        if position != len(self.tokens):
            raise ValueError(f"version spans cover {position} of {len(self.tokens)} sampled tokens")


MAX_MESSAGE_BYTES = 64 * 1024
"""Default of ``Limits.max_message_bytes``."""


@attrs.frozen
class Limits:
    """When an episode ends. Counts end it before useless work; seconds are deadlines in wall time."""

    max_turns: int = attrs.field(default=10, validator=integer(1))
    """Replies of one episode."""
    max_tokens: int | None = attrs.field(default=None, validator=integer(2, optional=True))
    """Tokens of one sequence, prompt included. The context length that the server reports applies as well."""
    max_sampled_tokens: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Sampled tokens of one episode, all turns and branches together; the limit of a turn is ``max_new_tokens``."""
    max_tool_calls: int | None = attrs.field(default=None, validator=integer(0, optional=True))
    """Tool calls of one episode. A reply that exceeds it is stored, and none of its calls runs."""
    max_parallel_calls: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Tool calls of one reply. A reply with more is stored, and none of its calls runs. If the chat template has one
    call a turn, the limit is 1."""
    on_cut: Literal["stop", "continue"] = attrs.field(
        default="stop", validator=check('"stop" or "continue"', lambda v: v in ("stop", "continue"))
    )
    """After a reply cut by ``max_new_tokens``: end the episode, or pass the cut reply to the environment."""
    last_calls: Literal["skip", "run"] = attrs.field(
        default="skip", validator=check('"skip" or "run"', lambda v: v in ("skip", "run"))
    )
    """The tool calls of the last turn: skip them, or run them for their reward; no reply can use their results."""
    step_seconds: float = attrs.field(default=120.0, validator=seconds(above=0))
    """Deadline of each start, step, snapshot and restore of the environment."""
    max_message_bytes: int = attrs.field(default=MAX_MESSAGE_BYTES, validator=integer(1))
    """UTF-8 bytes of one message of a step. A longer one is cut, ends with a note that says so to the model, and is
    counted in ``metrics["truncated_messages"]``."""
    close_seconds: float = attrs.field(default=30.0, validator=seconds(above=0))
    episode_seconds: float = attrs.field(default=3600.0, validator=seconds(above=0))
