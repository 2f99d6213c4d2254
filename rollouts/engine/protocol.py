"""The words of the wire: request bodies, their validation, and the four shapes of an error.

Invariant: what leaves :func:`read_generate` can be served as it is: every id lies in the vocabulary, every sampling
value in its range, and prompt and reply fit the context. What cannot be served raises :class:`Refusal`, whose status
and body are those of SGLang 0.5.23.

This module knows no HTTP server and no scheduler.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollouts.engine.answers import Answers, TextForm
from rollouts.engine.loading import Loaded
from rollouts.engine.requests import Request, Rules
from rollouts.errors import RolloutsError

__all__ = ["GenerateBody", "Refusal", "check_ids", "decoded", "read_generate"]

T = TypeVar("T")


class Refusal(RolloutsError):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, body: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message}} if body is None else body

    @classmethod
    def plain(cls, message: str) -> Refusal:
        """The shape in which ``error`` is a string: a sampling parameter that nobody knows."""
        return cls(message, 400, {"error": message})

    @classmethod
    def bad_request(cls, message: str) -> Refusal:
        """The shape of a body that cannot be read."""
        return cls(message, 400, _object(message, "Bad Request", 400))

    @classmethod
    def given_up(cls, message: str, status: int) -> Refusal:
        """The shape of a request that the server gave up: its type is its status."""
        return cls(message, status, _object(message, str(status), status))


def _object(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


# -- bodies -----------------------------------------------------------------------------------------------------------


class GenerateBody(msgspec.Struct, gc=False):
    """``POST /generate``. Keys that are not here are ignored, as SGLang ignores those that it does not know."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    extra_key: str | None = None


class SamplingBody(msgspec.Struct, gc=False):
    """``sampling_params``; the second part is accepted only at values that change nothing."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None
    custom_params: dict[str, Any] | None = None

    stop_regex: str | list[str] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    watermark: Any = None


_NAMES = frozenset(SamplingBody.__struct_fields__)
_INERT: dict[str, tuple[Any, ...]] = {
    "stop_regex": (None, []), "frequency_penalty": (0.0,), "presence_penalty": (0.0,), "repetition_penalty": (1.0,),
    "beam_width": (None, 1), "json_schema": (None,), "regex": (None,), "ebnf": (None,), "structural_tag": (None,),
    "watermark": (None, False),
}  # fmt: skip
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a finite number >= 0", lambda v: math.isfinite(v) and v >= 0),
    "top_p": ("a number in (0, 1]", lambda v: 0 < v <= 1),
    "top_k": ("-1 or an integer >= 1", lambda v: v == -1 or v >= 1),
    "min_p": ("a number in [0, 1]", lambda v: 0 <= v <= 1),
    "max_new_tokens": ("an integer >= 0, or null", lambda v: v is None or v >= 0),
    "min_new_tokens": ("an integer >= 0", lambda v: v >= 0),
    "n": ("an integer >= 1", lambda v: v >= 1),
    "sampling_seed": ("an integer of 64 bits", lambda v: v is None or -(2**63) <= v < 2**64),
}


def decoded(data: bytes, kind: type[T]) -> T:
    """Read a JSON body.

    Raises:
        Refusal: it is no JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise Refusal.bad_request(str(error)) from error


def _sampling(given: dict[str, Any]) -> SamplingBody:
    unknown = given.keys() - _NAMES
    if unknown:
        names = ", ".join(sorted(_NAMES))
        raise Refusal.plain(f"sampling_params: unknown {', '.join(sorted(unknown))}; accepted are {names}")
    try:
        body = msgspec.convert(given, SamplingBody)
    except msgspec.ValidationError as error:
        raise Refusal(f"sampling_params: {error}") from error
    for name, (expected, good) in _RANGES.items():
        value = getattr(body, name)
        if not good(value):
            raise Refusal(f"sampling_params.{name}: got {value!r}; expected {expected}")
    for name, values in _INERT.items():
        if getattr(body, name) not in values:
            raise Refusal(f"sampling_params.{name}: got {getattr(body, name)!r}; this engine does not have it")
    if body.max_new_tokens is not None and body.min_new_tokens > body.max_new_tokens:
        raise Refusal(f"sampling_params.min_new_tokens: got {body.min_new_tokens}; expected at most max_new_tokens")
    return body


# -- reading ----------------------------------------------------------------------------------------------------------


def read_generate(body: GenerateBody, loaded: Loaded, notify: Callable[[Request], None]) -> Answers:
    """Turn a body into requests.

    Raises:
        Refusal: the request cannot be served.
    """
    prompts, single = _prompts(body, loaded.tokenizer)
    count = len(prompts)
    given = body.sampling_params
    samplings = [_sampling(one or {}) for one in _each("sampling_params", given, count)]
    copies = samplings[0].n
    if any(sampling.n != copies for sampling in samplings):
        raise Refusal("sampling_params.n: expected the same number for all prompts of a batch")
    rids = _rids(body.rid, count, copies, single)
    wants = [bool(one) for one in _each("return_logprob", body.return_logprob, count)]
    starts = [-1 if one is None else one for one in _each("logprob_start_len", body.logprob_start_len, count)]
    if any(_each("top_logprobs_num", body.top_logprobs_num, count)):
        raise Refusal("top_logprobs_num: this engine does not have it")
    requests = []
    for number, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        limit = _limit(len(tokens), sampling, loaded)
        start = starts[number] if wants[number] else -1
        if not -1 <= start < len(tokens):
            raise Refusal(f"logprob_start_len: got {start}; expected -1 to {len(tokens) - 1}")
        check_ids("input_ids", tokens, loaded.vocab_size)
        for copy in range(copies):
            request = Request(
                rid=rids[number * copies + copy],
                tokens=tokens[:],
                rules=_rules(sampling, limit, loaded, copy),
                notify=notify,
                score_from=start,
                namespace=body.extra_key or "",
                stream=body.stream,
            )
            requests.append(request)
    return Answers(
        requests=requests,
        forms=[
            TextForm(sampling.skip_special_tokens, sampling.no_stop_trim)
            for sampling in samplings
            for _ in range(copies)
        ],
        single=single and copies == 1,
        stream=body.stream,
        logprobs=[want for want in wants for _ in range(copies)],
        texts_in_logprobs=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
        tokenizer=loaded.tokenizer,
    )


def _prompts(body: GenerateBody, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether there is one that is no list."""
    if (body.text is None) == (body.input_ids is None):
        raise Refusal("Either text or input_ids should be provided, and not both.")
    if body.text is not None:
        if tokenizer is None:
            raise Refusal("text: the model folder has no tokenizer; send input_ids")
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [list(tokenizer.encode(text)) for text in texts]
        single = isinstance(body.text, str)
    else:
        ids = body.input_ids or []
        flat = [one for one in ids if isinstance(one, int)]
        nested = [one for one in ids if not isinstance(one, int)]
        if flat and nested:
            raise Refusal.bad_request("input_ids: expected ids or lists of ids, got both")
        prompts, single = (nested, False) if nested else ([flat], True)
    if not prompts or not all(prompts):
        raise Refusal("The prompt is empty.")
    return prompts, single


def _each(name: str, value: Any, count: int) -> list[Any]:
    """A value for each prompt: given as a list, or one for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise Refusal(f"{name}: got {len(value)} entries; expected {count}, one for each prompt")
    return value


def _rids(given: str | list[str] | None, count: int, copies: int, single: bool) -> list[str]:
    if given is None or copies > 1:  # with n > 1 SGLang discards the name that it was given
        return [uuid.uuid4().hex for _ in range(count * copies)]
    if isinstance(given, str):
        return [given] if single else [f"{given}_{number}" for number in range(count)]
    rids = list(_each("rid", given, count))
    if len(set(rids)) != len(rids):
        raise Refusal(f"Duplicate request ID detected: {sorted(rid for rid in set(rids) if rids.count(rid) > 1)}")
    return rids


def _limit(prompt: int, sampling: SamplingBody, loaded: Loaded) -> int:
    longest = loaded.max_context
    if prompt >= longest:
        raise Refusal(f"The input ({prompt} tokens) is longer than the model's context length ({longest} tokens).")
    if sampling.max_new_tokens is None:
        return longest - prompt
    if prompt + sampling.max_new_tokens > longest:
        raise Refusal(
            f"Requested token count exceeds the model's maximum context length of {longest} tokens: "
            f"{prompt} of the input and {sampling.max_new_tokens} new ones are {prompt + sampling.max_new_tokens}."
        )
    return sampling.max_new_tokens


def check_ids(name: str, ids: Sequence[Any], vocabulary: int) -> None:
    """Refuse ids that the model does not have."""
    if not all(isinstance(one, int) for one in ids):
        raise Refusal.bad_request(f"{name}: expected ids or lists of ids, got both")
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        wrong = next(one for one in ids if not 0 <= one < vocabulary)
        raise Refusal(f"{name}: got {wrong}; expected ids from 0 to {vocabulary - 1}, the vocabulary of the model")


def _rules(sampling: SamplingBody, limit: int, loaded: Loaded, copy: int) -> Rules:
    extra = sampling.stop_token_ids or []
    check_ids("sampling_params.stop_token_ids", extra, loaded.vocab_size)
    bias = []
    for key, value in (sampling.logit_bias or {}).items():
        if not key.isdecimal() or int(key) >= loaded.vocab_size:
            raise Refusal(f"sampling_params.logit_bias: got {key!r}; expected ids of the vocabulary as keys")
        bias.append((int(key), value))
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
    if stop and loaded.tokenizer is None:
        raise Refusal("sampling_params.stop: the model folder has no tokenizer; use stop_token_ids")
    if len(stop) > 32:
        raise Refusal(f"sampling_params.stop: got {len(stop)} strings; expected at most 32")
    seed = random.getrandbits(64) if sampling.sampling_seed is None else (sampling.sampling_seed + copy) % 2**64
    return Rules(
        temperature=0.0 if sampling.temperature < 1e-6 else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        limit=limit,
        minimum=sampling.min_new_tokens,
        stop=tuple(one for one in stop if one),
        stop_ids=frozenset() if sampling.ignore_eos else loaded.eos_ids | frozenset(extra),
        bias=tuple(bias),
        seed=seed,
    )
