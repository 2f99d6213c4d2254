"""Where a reply ends that was sampled in parts."""

from __future__ import annotations

import numpy as np
import pytest

from rollouts.dtypes import Completion, Extras, SamplingParams, TokenColumn, VersionSpan, packed_tokens
from rollouts.inference.reply_parts import mixed_seed, rest_of, until_stop


def decode(tokens: TokenColumn) -> str:
    """One byte for each id."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def part_of(text: str, finish_reason: str = "length", extras: Extras | None = None) -> Completion:
    tokens = list(text.encode())
    return Completion(
        tokens=tokens,
        logprobs=[-float(number) for number in range(len(tokens))],
        finish_reason=finish_reason,  # type: ignore[arg-type]  # one of the three
        versions=[VersionSpan("a", 0, 1), VersionSpan("b", 1, len(tokens))],
        prompt_tokens=2,
        prompt_digest=0,
        request_id="r",
        extras=extras,
    )


def before(text: str) -> TokenColumn:
    return packed_tokens(list(text.encode()))


def test_the_rest_has_another_seed_and_what_remains_of_the_lengths() -> None:
    """Each number of sampled tokens gives another seed; nothing sampled gives the same parameters."""
    sampling = SamplingParams(max_new_tokens=10, min_new_tokens=4, seed=0)
    assert rest_of(sampling, 0) is sampling
    rest = rest_of(sampling, 3)
    assert (rest.max_new_tokens, rest.min_new_tokens) == (7, 1)
    assert rest_of(sampling, 9).min_new_tokens == 0
    seeds = [mixed_seed(0, sampled) for sampled in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds[0] == 0
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert mixed_seed(None, 5) is None


@pytest.mark.parametrize("text", ["a</search> goes on", "</search>", "é</search>é"])
@pytest.mark.parametrize("stop", ["</search>", "h>", "é<"])
def test_a_part_ends_where_a_stop_string_that_began_earlier_ends(text: str, stop: str) -> None:
    """For every split inside the string, also inside a character: the part ends with its last byte, and is a stop."""
    whole, wanted = text.encode(), stop.encode()
    start = whole.find(wanted)
    for split in range(start + 1, start + len(wanted)) if start >= 0 else range(1, len(whole)):
        tail = whole[split:]
        part = Completion(list(tail), [-1.0] * len(tail), "length", [VersionSpan("a", 0, len(tail))], 2, 0, "r")
        found = until_stop(packed_tokens(list(whole[:split])), part, ("not there", stop), (), decode)
        if start < 0:
            assert found is part
        else:
            assert bytes(found.tokens.tolist()) == whole[split : start + len(wanted)]
            assert found.finish_reason == "stop"


def test_versions_logprobs_and_extras_are_cut_too() -> None:
    """Of two kept tokens: two logprobs, the spans up to there, and the rows of all positions but the last."""
    extras = Extras(
        experts=np.arange(10, dtype=np.int32).reshape(5, 2),
        experts_start=1,
        top_p_ids=np.arange(7, dtype=np.int32),
        top_p_counts=np.array([1, 2, 3, 1], np.int32),
    )
    found = until_stop(before("xa"), part_of("bcde", extras=extras), ("abc",), (), decode)
    assert found.tokens.tolist() == list(b"bc")
    assert found.logprobs.tolist() == [0.0, -1.0]
    assert [(span.version, span.start, span.stop) for span in found.versions] == [("a", 0, 1), ("b", 1, 2)]
    assert found.extras is not None
    assert found.extras.experts is not None
    assert found.extras.top_p_ids is not None
    assert len(found.extras.experts) == 2 + 2 - 1 - 1
    assert found.extras.top_p_ids.tolist() == [0, 1, 2]


def test_the_last_token_of_an_aborted_part_may_end_the_reply() -> None:
    """A server that aborts does not compare it with stop ids and stop strings."""
    for stop, ids in ((("cd",), ()), ((), (ord("d"),))):
        found = until_stop(before(""), part_of("abcd", "abort"), stop, ids, decode)
        assert (found.finish_reason, found.tokens.tolist()) == ("stop", list(b"abcd"))
    goes_on = until_stop(before(""), part_of("abcd", "abort"), ("bc",), (ord("c"),), decode)
    assert goes_on.finish_reason == "abort", "the server compared all tokens but the last"


def test_a_minimum_may_delay_stop_strings() -> None:
    """As on vLLM: a stop string within the minimum does not end the reply; a later stop string does."""
    part = part_of("bcabc")
    assert until_stop(before("a"), part, ("abc",), (), decode).tokens.tolist() == list(b"bc")
    assert until_stop(before("a"), part, ("abc",), (), decode, unstopped=3).tokens.tolist() == list(b"bcabc")
    assert until_stop(before("a"), part, ("abc",), (), decode, unstopped=2).tokens.tolist() == list(b"bc")


def test_a_part_without_a_stop_is_unchanged() -> None:
    """Also an empty one, and one whose stop string is in the earlier part alone."""
    part = part_of("bcde")
    assert until_stop(before("a"), part, ("xyz",), (1,), decode) is part
    empty = Completion((), (), "abort", (), 2, 0, "r")
    assert until_stop(before("ab"), empty, ("ab",), (), decode) is empty
