"""The texts of tokens, joined, are the decoded text, whatever a tokenizer does at borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollouts.renderer.token_text import TokenTexts
from rollouts.renderer.tokenizer import Codec


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gptoss"])
def test_characters_of_several_tokens(tokenizer: Callable[..., Any], name: str) -> None:
    """A character of several tokens belongs to the first of them; half a character at the end is shown as it is."""
    codec = Codec(tokenizer(name))
    texts = TokenTexts(codec.decode)
    ids = [int(token) for token in codec.encode("a 😀🏳️‍🌈 naïve 日本語 \U0001f9ec\n\n ok")]
    for stop in (len(ids), len(ids) - 3, 1, 0):
        assert "".join(texts.of(ids[:stop])) == codec.decode(ids[:stop])


def test_a_decoder_that_drops_the_first_space() -> None:
    """Only the first token differs from its text elsewhere."""
    words = [" the", " cat", "s"]

    def decode(ids: Any) -> str:
        return "".join(words[token] for token in ids).removeprefix(" ")

    texts = TokenTexts(decode)
    assert texts.usual(1) == " cat"
    assert texts.exceptions([0, 1, 2, 1]) == {0: "the"}
    assert texts.of([0, 1, 2, 1]) == ["the", " cat", "s", " cat"]


def test_without_a_tokenizer_ids_are_shown() -> None:
    """No text is invented."""
    texts = TokenTexts(None)
    assert (texts.usual(17), texts.exceptions([17])) == ("⟨17⟩", {})
