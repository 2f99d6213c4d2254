"""Responses of ``/generate``: the output so far, in the format of SGLang 0.5.23.

Invariant: ``output_ids`` contains exactly the sampled ids, and ``output_token_logprobs`` has one entry for each.
``text`` is for display and is trimmed before the stop token or string. A request may still run while it is read.

This module does not know validation or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import attrs

from rollouts.engine.requests import Request

__all__ = ["Answers", "TextForm"]


@attrs.frozen
class TextForm:
    """Options for decoding ids to text."""

    skip_special_tokens: bool
    no_stop_trim: bool


@attrs.frozen
class Answers:
    """One call: its requests, and the format of each response."""

    requests: list[Request]
    forms: list[TextForm]
    single: bool
    """The response is one object, not a list."""
    stream: bool
    logprobs: list[bool]
    texts_in_logprobs: bool
    prompt_ids: bool
    tokenizer: Any

    def of(self, index: int) -> dict[str, Any]:
        """The current response of request number ``index``."""
        request, form = self.requests[index], self.forms[index]
        finish = request.finish  # read first: the engine thread sets it last, after each token and its logprob
        logprobs = request.logprobs[:]
        count = len(logprobs)
        ids = request.tokens[request.prompt_tokens : request.prompt_tokens + count]
        meta: dict[str, Any] = {"id": request.rid, "finish_reason": finish}
        if finish is None or request.started or finish["type"] != "abort":
            meta["prompt_tokens"] = request.prompt_tokens
            meta["cached_tokens"] = request.cached_tokens
            meta["cached_tokens_details"] = None
        meta["completion_tokens"] = count
        meta["reasoning_tokens"] = 0
        meta["num_retractions"] = request.retractions
        meta["dp_rank"] = None
        spans = request.spans
        meta["weight_version"] = spans[-1][0] if spans else None
        ends = [start for _, start in spans[1:]] + [count]
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(spans, ends, strict=True)
            if end > start
        ]
        if self.logprobs[index]:
            meta["output_token_logprobs"] = self._triples(logprobs, ids)
            meta["output_token_logprobs_length"] = count
            if request.tops:
                meta["output_top_logprobs"] = request.top_logprobs[:count]
            start = request.score_from
            scored = request.tokens[start : request.prompt_tokens] if start >= 0 else []
            values = [None, *request.prompt_logprobs]
            meta["input_token_logprobs"] = self._triples(values[: len(scored)], scored[: len(values)])
            if request.tops:  # as wide as input_token_logprobs, whose first token has no logprob either
                meta["input_top_logprobs"] = [None, *request.prompt_tops][: len(scored)]
        meta["e2e_latency"] = time.perf_counter() - request.arrived
        meta["response_sent_to_client_ts"] = time.time()
        answer: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if self.tokenizer is not None:
            answer["text"] = self._text(ids, finish, form)
        if self.prompt_ids:
            answer["prompt_token_ids"] = request.tokens[: request.prompt_tokens]
        return answer

    def _triples(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[Any]:
        if self.texts_in_logprobs and self.tokenizer is not None:
            return [
                [logprob, token, self.tokenizer.decode([token])] for logprob, token in zip(logprobs, ids, strict=True)
            ]
        return list(zip(logprobs, ids, repeat(None)))

    def _text(self, ids: list[int], finish: dict[str, Any] | None, form: TextForm) -> str:
        matched = (
            finish["matched"] if finish is not None and finish["type"] == "stop" and not form.no_stop_trim else None
        )
        if isinstance(matched, int):
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=form.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            return text[: text.index(matched)]
        return text
