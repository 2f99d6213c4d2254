"""The wire format: request bodies, their validation, and the four shapes of an error.

Invariant: every request that :func:`read_generate` returns can be served: ids are in the vocabulary, sampling values in
their ranges, prompt and reply fit the context, and no field asks for what is not implemented. All others raise
:class:`Refusal`, with the status and body of SGLang 0.5.23.

This module does not know HTTP servers or the scheduler.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollouts.engine.adapters import Adapter
from rollouts.engine.answers import Answers, TextForm
from rollouts.engine.loading import Loaded
from rollouts.engine.requests import Request, Rules
from rollouts.errors import ConfigError, RolloutsError, shortened

__all__ = ["GenerateBody", "Refusal", "check_ids", "decoded", "read_generate"]

T = TypeVar("T")


class Refusal(RolloutsError):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, body: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message}} if body is None else body

    @classmethod
    def unknown_parameter(cls, message: str) -> Refusal:
        """The shape for an unknown sampling parameter: ``error`` is a string."""
        return cls(message, 400, {"error": message})

    @classmethod
    def bad_request(cls, message: str) -> Refusal:
        """The shape for a body that cannot be decoded."""
        return cls(message, 400, _object(message, "Bad Request", 400))

    @classmethod
    def failed(cls, message: str, status: int) -> Refusal:
        """The shape for a request that the server did not complete: ``type`` is the status."""
        return cls(message, status, _object(message, str(status), status))


def _object(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


# -- bodies -----------------------------------------------------------------------------------------------------------


class GenerateBody(msgspec.Struct, gc=False):
    """``POST /generate``. Unknown keys are ignored, as in SGLang 0.5.23; keys after the blank line are not
    implemented."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    extra_key: str | None = None
    image_data: Any = None
    top_logprobs_num: int | list[int] | None = None
    lora_path: str | list[str | None] | None = None

    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_sampling_mask: Any = None
    sampling_logprobs_mode: Any = None
    input_embeds: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    cache_salt: Any = None
    custom_logit_processor: Any = None


class SamplingBody(msgspec.Struct, gc=False):
    """``sampling_params``. The fields after the blank line are not implemented; only neutral values are accepted."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None

    n: int = 1
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
_UNSERVED = GenerateBody.__struct_fields__[GenerateBody.__struct_fields__.index("token_ids_logprob") :]
_INERT: dict[str, tuple[Any, ...]] = {
    "n": (1,), "stream_interval": (None, 1), "custom_params": (None, {}),
    "stop_regex": (None, []), "frequency_penalty": (0.0,), "presence_penalty": (0.0,), "repetition_penalty": (1.0,),
    "beam_width": (None, 1), "json_schema": (None,), "regex": (None,), "ebnf": (None,), "structural_tag": (None,),
    "watermark": (None, False),
}  # fmt: skip
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a finite number >= 0", lambda v: math.isfinite(v) and v >= 0),
    "top_p": ("a number in (0, 1]", lambda v: 0 < v <= 1),
    "top_k": ("-1 or an integer >= 1 of 63 bits", lambda v: v == -1 or 1 <= v < 2**63),
    "min_p": ("a number in [0, 1]", lambda v: 0 <= v <= 1),
    "max_new_tokens": ("an integer >= 0, or null", lambda v: v is None or v >= 0),
    "min_new_tokens": ("an integer >= 0", lambda v: v >= 0),
    "sampling_seed": ("an integer of 64 bits", lambda v: v is None or -(2**63) <= v < 2**64),
}


_MAX_SEQUENCES = 4096
"""Sequences of one request: each takes memory from its arrival on."""


def decoded(data: bytes, kind: type[T]) -> T:
    """Decode a JSON body.

    Raises:
        Refusal: the body is not JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise Refusal.bad_request(str(error)) from error


def _sampling(params: dict[str, Any]) -> SamplingBody:
    unknown = params.keys() - _NAMES
    if unknown:
        names = ", ".join(sorted(_NAMES))
        raise Refusal.unknown_parameter(f"sampling_params: unknown {', '.join(sorted(unknown))}; expected {names}")
    try:
        body = msgspec.convert(params, SamplingBody)
    except msgspec.ValidationError as error:
        raise Refusal(f"sampling_params: {error}") from error
    for name, (expected, is_valid) in _RANGES.items():
        value = getattr(body, name)
        if not is_valid(value):
            raise Refusal(f"sampling_params.{name}: got {value!r}; expected {expected}")
    for name, values in _INERT.items():
        if getattr(body, name) not in values:
            raise Refusal(f"sampling_params.{name}: got {getattr(body, name)!r}; this engine does not support it")
    if body.max_new_tokens is not None and body.min_new_tokens > body.max_new_tokens:
        raise Refusal(f"sampling_params.min_new_tokens: got {body.min_new_tokens}; expected at most max_new_tokens")
    return body


# -- reading ----------------------------------------------------------------------------------------------------------


def read_generate(
    body: GenerateBody, loaded: Loaded, notify: Callable[[Request], None], adapters: Mapping[str, Adapter]
) -> Answers:
    """Convert a body into validated requests.

    ``adapters`` are the names that a request may use.

    Raises:
        Refusal: the request cannot be served.
    """
    for name in _UNSERVED:
        value = getattr(body, name)
        if any(value) if isinstance(value, list) else value:
            raise Refusal(f"{name}: got {shortened(value)}; this engine does not support it")
    prompts, single = _prompts(body, loaded.tokenizer)
    count = len(prompts)
    if body.image_data:
        prompts = _with_images(body.image_data, prompts, single, loaded)
    samplings = [_sampling(one or {}) for one in _each("sampling_params", body.sampling_params, count)]
    if count > _MAX_SEQUENCES:
        raise Refusal(f"input_ids: got {count} prompts; expected at most {_MAX_SEQUENCES}")
    rids = _rids(body.rid, count, single)
    wants = [bool(one) for one in _each("return_logprob", body.return_logprob, count)]
    starts = [-1 if one is None else one for one in _each("logprob_start_len", body.logprob_start_len, count)]
    chosen = [_adapter(name, adapters) for name in _each("lora_path", body.lora_path, count)]
    tops = [one or 0 for one in _each("top_logprobs_num", body.top_logprobs_num, count)]
    requests = []
    for index, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        limit = _limit(len(tokens), sampling, loaded)
        start = starts[index] if wants[index] else -1
        if not -1 <= start < len(tokens):
            raise Refusal(f"logprob_start_len: got {start}; expected -1 to {len(tokens) - 1}")
        if tops[index] < 0:
            raise Refusal(f"top_logprobs_num: got {tops[index]}; expected at least 0")
        check_ids("input_ids", tokens, loaded.vocab_size)
        request = Request(
            rid=rids[index],
            tokens=tokens[:],
            rules=_rules(sampling, limit, loaded),
            notify=notify,
            score_from=start,
            namespace=_namespace(body.extra_key, chosen[index]),
            adapter=chosen[index],
            stream=body.stream,
            tops=tops[index] if wants[index] else 0,
        )
        requests.append(request)
    return Answers(
        requests=requests,
        forms=[TextForm(sampling.skip_special_tokens, sampling.no_stop_trim) for sampling in samplings],
        single=single,
        stream=body.stream,
        logprobs=wants,
        texts_in_logprobs=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
        tokenizer=loaded.tokenizer,
    )


def _adapter(name: str | None, adapters: Mapping[str, Adapter]) -> Adapter | None:
    if not name:
        return None
    if name not in adapters:
        loaded = ", ".join(adapters)
        raise Refusal(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded or 'none'}.")
    return adapters[name]


def _namespace(extra_key: str | None, adapter: Adapter | None) -> str:
    """The namespace of a request's prefixes: its adapter has a key, another one each time that it is loaded."""
    return (extra_key or "") if adapter is None else f"{adapter.key}/{extra_key or ''}"


def _prompts(body: GenerateBody, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether the body has a single prompt, not a list."""
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


def _with_images(image_data: Any, prompts: list[list[int]], single: bool, loaded: Loaded) -> list[list[int]]:
    """The prompts with the placeholders of their images expanded."""
    if loaded.images is None:
        raise Refusal(f"image_data: got {shortened(image_data)}; the model folder has no processor")
    if single:
        rows = [image_data if isinstance(image_data, list) else [image_data]]
    else:
        rows = [row if isinstance(row, list) else [row] for row in _each("image_data", image_data, len(prompts))]
    try:
        return [loaded.images.expanded(ids, row) for ids, row in zip(prompts, rows, strict=True)]
    except ConfigError as error:
        raise Refusal(str(error)) from error


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt, from a list or from a single value for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise Refusal(f"{name}: got {len(value)} entries; expected {count}, one for each prompt")
    return value


def _rids(rid: str | list[str] | None, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{index}" for index in range(count)]
    rids = list(_each("rid", rid, count))
    if len(set(rids)) != len(rids):
        raise Refusal(f"Duplicate request ID detected: {sorted(one for one in set(rids) if rids.count(one) > 1)}")
    return rids


def _limit(prompt: int, sampling: SamplingBody, loaded: Loaded) -> int:
    longest = loaded.max_context
    if prompt >= longest:
        raise Refusal(f"The input ({prompt} tokens) is longer than the model's context length ({longest} tokens).")
    budget = sampling.max_new_tokens
    if budget is not None and prompt + budget > longest:
        raise Refusal(
            f"Requested token count exceeds the model's maximum context length of {longest} tokens: "
            f"{prompt} of the input and {budget} new ones are {prompt + budget}."
        )
    if prompt >= loaded.max_input:
        raise Refusal(
            f"Input length ({prompt} tokens) exceeds the maximum allowed length ({loaded.max_input} tokens)."
            " Use a shorter input or enable --allow-auto-truncate."
        )
    room = longest - prompt - 2  # SGLang 0.5.23 uses none of these two either
    return room if budget is None else min(budget, room)


def check_ids(name: str, ids: Sequence[Any], vocabulary: int) -> None:
    """Raise Refusal if an id is not in the vocabulary."""
    if not all(isinstance(one, int) for one in ids):
        raise Refusal.bad_request(f"{name}: expected ids or lists of ids, got both")
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        wrong = next(one for one in ids if not 0 <= one < vocabulary)
        raise Refusal(f"{name}: got {wrong}; expected ids from 0 to {vocabulary - 1}, the vocabulary of the model")


def _rules(sampling: SamplingBody, limit: int, loaded: Loaded) -> Rules:
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
    seed = random.getrandbits(64) if sampling.sampling_seed is None else sampling.sampling_seed % 2**64
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
