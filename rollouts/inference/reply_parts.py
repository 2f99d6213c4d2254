"""A reply that was sampled in several requests: the parameters of what is left, and where the reply ends.

Invariant (law 10): the joined reply has the distribution of an uninterrupted one. The rest gets other random numbers,
the rest of the budget and the rest of the minimum length. A stop string or stop id ends the reply at the token at which
a server ends an uninterrupted one, also where the string began in an earlier part.

This module does no I/O, and does not know servers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import attrs

from rollouts.dtypes import Completion, Extras, SamplingParams, TokenColumn, VersionSpan, frozen
from rollouts.dtypes.lazy_numpy import np

__all__ = ["Decode", "mixed_seed", "rest_of", "until_stop"]

Decode = Callable[[TokenColumn], str]
"""The text of ids, special tokens included."""

_SPLIT_CHARACTER = 4
"""Tokens before a stop string that may hold the first bytes of its first character."""


def mixed_seed(seed: int | None, sampled: int) -> int | None:
    """The seed of what is left of a reply after ``sampled`` tokens.

    A server that honours seeds begins its random numbers again in each request: with the same seed, the tokens after an
    interruption would repeat the draws of the first ones.
    """
    return seed if seed is None or not sampled else zlib.crc32(f"{seed}+{sampled}".encode()) & 0x7FFFFFFF


def rest_of(sampling: SamplingParams, sampled: int) -> SamplingParams:
    """The parameters of what is left of a reply after ``sampled`` tokens, fewer than its budget."""
    if not sampled:
        return sampling
    return attrs.evolve(
        sampling,
        max_new_tokens=sampling.max_new_tokens - sampled,
        min_new_tokens=max(0, sampling.min_new_tokens - sampled),
        seed=mixed_seed(sampling.seed, sampled),
    )


def until_stop(
    before: TokenColumn,
    part: Completion,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    decode: Decode | None,
    *,
    unstopped: int = 0,
) -> Completion:
    """The part up to the token that ends the whole reply; the whole part if no token ends it.

    The server compared the text of this part only, and not the last token of a part that it aborted (SGLang 0.5.23,
    managers/schedule_batch.py: update_finish_state).

    Args:
        before: all tokens of the reply before this part, ``(n,)``.
        part: the next tokens.
        stop: stop strings; they need ``decode``.
        stop_token_ids: stop ids.
        decode: the text of ids.
        unstopped: number of tokens at the start of the reply within which no stop string ends it.
    """
    count, aborted = len(part.tokens), part.finish_reason == "abort"
    if not count:
        return part
    if stop:
        assert decode is not None, "the caller refuses stop strings without it"
        longest = max(len(one.encode()) for one in stop) + _SPLIT_CHARACTER  # a token has at least one byte
        reply = np.concatenate([before, part.tokens])
        first = max(len(before), unstopped)
        last = min(len(before) + longest, len(reply)) if len(before) else 0
        for at in [*range(first, last), *([len(reply) - 1] if aborted and len(reply) > unstopped else [])]:
            if _ends_string(reply[max(0, at + 1 - longest) : at + 1], stop, decode):
                return _first_tokens(part, at + 1 - len(before))
    if aborted and int(part.tokens[-1]) in stop_token_ids:
        return _first_tokens(part, count)
    return part


def _ends_string(tokens: TokenColumn, stop: tuple[str, ...], decode: Decode) -> bool:
    """Whether the last of these tokens completes a stop string."""
    known = len(decode(tokens[:-1]).rstrip("\N{REPLACEMENT CHARACTER}"))  # of a character that is not complete yet
    text = decode(tokens)
    return any(text.find(one, max(0, known - len(one) + 1)) >= 0 for one in stop)


def _first_tokens(part: Completion, count: int) -> Completion:
    """The first tokens of a part, as a reply that a stop ended."""
    versions = [
        VersionSpan(span.version, span.start, min(span.stop, count)) for span in part.versions if span.start < count
    ]
    return attrs.evolve(
        part,
        tokens=part.tokens[:count],
        logprobs=part.logprobs[:count],
        versions=versions,
        finish_reason="stop",
        extras=None if part.extras is None else _first_extras(part.extras, part.prompt_tokens, count),
    )


def _first_extras(extras: Extras, prompt_tokens: int, count: int) -> Extras:
    """The extras of the first tokens of a part; the last token does not have routed experts yet."""
    experts, ids, counts = extras.experts, extras.top_p_ids, extras.top_p_counts
    if experts is not None:
        experts = experts[: max(0, prompt_tokens + count - 1 - extras.experts_start)]
    if counts is not None and ids is not None:
        counts = counts[:count]
        ids = frozen(ids[: int(counts.sum())])
    return attrs.evolve(extras, experts=experts, top_p_ids=ids, top_p_counts=counts)
