"""Encoding word by word: what the tokenizer gives for the whole text, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.engine import DEMO_MODEL
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.renderer.word_cache import _BEYOND_ASCII, Words

tokenizers = pytest.importorskip("tokenizers")

DEMO = load_tokenizer(DEMO_MODEL).backend_tokenizer
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECE = st.one_of(
    st.sampled_from(["'S", "don't", "  ", "\n", " \n ", "\r\n", "\t", "/\n", "1234", "CamelCASE", "x" * 90]),
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.sampled_from(["<|im_", "|>", "<tool_", "call>"]),
    st.text(st.sampled_from("éÉ×–“’…→│✓😀 a'\n1/"), max_size=12),
    st.text(st.sampled_from("aA1 \n\r\t'/<.|\x0b\x1c"), max_size=12),
)  # fmt: skip


def copied(raw: Any) -> Any:
    """One that may be changed."""
    return tokenizers.Tokenizer.from_str(raw.to_str())


def whole(raw: Any, text: str) -> list[int]:
    ids: list[int] = raw.encode(text, add_special_tokens=False).ids
    return ids


def encoded(words: Words, text: str, *, opening: bool = False) -> list[int] | None:
    ids = words.encode(text, opening=opening)
    return None if ids is None else ids.tolist()


def compare(raw: Any, marks: list[str]) -> None:
    words = Words.of(raw)
    assert words is not None

    @settings(suppress_health_check=[HealthCheck.too_slow])  # not a matter of what is drawn: the machine is busy
    @given(st.lists(st.one_of(st.sampled_from(marks), PIECE), max_size=16).map("".join))
    def play(text: str) -> None:
        assert encoded(words, text) == whole(raw, text)
        assert encoded(words, text) == whole(raw, text)  # from what is kept
        opening = f"{text}{text * 8}{marks[0]}{text * 40}"  # of long parts, some of them alike
        assert encoded(words, opening, opening=True) == whole(raw, opening)
        assert encoded(words, opening, opening=True) == whole(raw, opening)

    play()


def test_the_demo_model_agrees() -> None:
    """Its tokenizer cuts by spaces, letters and pairs of digits."""
    compare(DEMO, ["<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "gptoss"])
def test_real_tokenizers_agree(name: str, tokenizer: Callable[..., Any]) -> None:
    """With their own rules and marks."""
    raw = tokenizer(name).backend_tokenizer
    compare(raw, [token.content for token in raw.get_added_tokens_decoder().values()][:30])


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    """A small tokenizer of our own."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["It's a test, don't you think so?  It is THE test of 1234 tests.\n\n Yes."] * 9, trainer)
    return made


def cut_by(expression: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    parts = tokenizers.pre_tokenizers
    split = parts.Split(tokenizers.Regex(expression), behavior, invert)
    return parts.Sequence([split, parts.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    "expression", [QWEN, QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), r"\p{Lu}?\p{Ll}+|\s++|[^\s\p{L}]"]
)
def test_other_rules_agree(expression: str) -> None:
    """Wherever the expression is one that can be read; what it leaves between its words is the tokenizer's."""
    raw = trained(cut_by(expression))
    words = Words.of(raw)
    if words is None:
        assert "Lu" in expression  # not every character is of a word
    else:
        compare(raw, ["THE test"])


def test_the_rule_of_gpt2_agrees() -> None:
    """It is built in where a byte-level pre-tokenizer stands alone."""
    compare(trained(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)), [" test"])


@pytest.mark.parametrize(
    "expression",
    [
        r"\h+|\s+",
        r"\p{Han}+|\s+",
        r"(?<=a)b|.",
        r"\w+|\W+",
        r"[a[bc]]+|\s+",
        r"[\p{M}]+|\s+",
        r"\p{Lo}|\s+",
        r"^\s+",
        r"a+|\s+",
        r"(?i:\p{Lu})|\s+|\p{L}|[^\s\p{L}]",
    ],
)
def test_an_expression_that_cannot_be_read_is_refused(expression: str) -> None:
    """Sets, looks behind, anchors and properties that mean something else to Python, or nothing."""
    assert Words.of(trained(cut_by(expression))) is None


def test_parts_that_look_beyond_a_word_are_refused() -> None:
    """The text goes to the tokenizer whole."""
    parts, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers
    refused = [
        trained(cut_by(QWEN, "merged_with_next")),
        trained(cut_by(QWEN, "isolated", invert=True)),
        trained(parts.ByteLevel(add_prefix_space=True)),
        trained(parts.Whitespace()),
        trained(cut_by(QWEN), normalizers.Lowercase()),
        trained(cut_by(QWEN), normalizers.Prepend("x")),
    ]
    assert [Words.of(raw) for raw in refused] == [None] * len(refused)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_a_token_that_looks_at_its_neighbours_forbids_it(flag: str) -> None:
    """Such as one that takes the spaces before it."""
    raw = copied(DEMO)
    raw.add_tokens([tokenizers.AddedToken("<new>", **{"normalized": False, flag: True})])
    assert Words.of(raw) is None


def test_dropout_forbids_it() -> None:
    """No text has one encoding then."""
    raw = copied(DEMO)
    raw.model.dropout = 0.5
    assert Words.of(raw) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "gptoss"])
def test_each_character_beyond_ascii_is_cut_as_the_tokenizer_cuts_it(name: str, tokenizer: Callable[..., Any]) -> None:
    """Before and behind letters of both cases, digits, spaces, line ends, apostrophes, and its kind."""
    raw = tokenizer(name).backend_tokenizer
    words = Words.of(raw)
    assert words is not None
    contexts = "?a?B? ?1?\n?'s?'?  ??/\n/?\t?Ab?bA?.?é?É’?"
    for one in _BEYOND_ASCII:
        text = contexts.replace("?", one)
        assert encoded(words, text) == whole(raw, text), ascii(one)


@pytest.mark.parametrize(
    "text", ["漢字", "e\u0301", "a\u00a0b", "½", "ª", "ŉ", "ſ", "ж", "\u2028", "❤\ufe0f", "\u212b"]
)
def test_other_characters_are_the_tokenizers(text: str) -> None:
    """Also where only one of them is in a text."""
    words = Words.of(DEMO)
    assert words is not None
    assert words.encode(f"plain and {text}") is None


def test_a_token_that_is_added_later_is_seen() -> None:
    """From then on texts are the tokenizer's."""
    raw = copied(DEMO)
    words = Words.of(raw)
    assert words is not None
    assert encoded(words, "a <new> b") == whole(raw, "a <new> b")
    raw.add_special_tokens(["<new>"])
    assert words.encode("a <new> b") is None


_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")


def test_what_is_kept_is_bounded() -> None:
    """However many words there are, and however long they are."""
    words = Words.of(DEMO)
    assert words is not None
    for first in range(0, 80_000, 8_000):
        text = " ".join(f"w{str(number).translate(_AS_LETTERS)}" for number in range(first, first + 8_000))
        assert encoded(words, text) == whole(DEMO, text)
    long = "y" * 5000
    assert encoded(words, long) == whole(DEMO, long)
    assert len(words._known) - len(words._special) <= 1 << 15
    assert long not in words._known


def test_a_renderer_encodes_each_word_once() -> None:
    """And counts tokens as before."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    renderer = Renderer(tokenizer)
    before = renderer.encoded_tokens
    ids = renderer.encode("What is seven times eight? What is seven?")
    assert ids.tolist() == whole(tokenizer.backend_tokenizer, "What is seven times eight? What is seven?")
    assert renderer.encoded_tokens - before == len(ids)
