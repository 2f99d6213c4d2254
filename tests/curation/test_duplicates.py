"""Exact duplicates, overlap with held-out texts, and near duplicates: what is planted is found, and no more."""

from __future__ import annotations

import random

import pytest

from rollouts.curation.duplicates import HashSet, HeldOut, NearDuplicates, digest_of
from rollouts.errors import ConfigError

WORDS = [f"w{number}" for number in range(4000)]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def test_the_set_of_digests_is_a_set() -> None:
    """As a Python set, over digests that collide in their slots, past several doublings."""
    rng = random.Random(0)
    digests = [rng.choice([rng.getrandbits(63) + 1, 1 + 2048 * rng.randrange(900)]) for _ in range(20_000)]
    mine, known = HashSet(), set()
    for digest in digests:
        assert (digest in mine) is (digest in known)
        assert mine.add(digest) is (digest not in known)
        known.add(digest)
    assert len(mine) == len(known)


def test_a_digest_depends_on_the_parts() -> None:
    """Parts are delimited, so that moving bytes from one to the next is another digest."""
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")
    assert digest_of(b"ab", b"c") == digest_of(b"ab", b"c")


def test_100_of_100_planted_overlaps_are_found_and_none_else() -> None:
    """13 words of a held-out text, in other case, with other punctuation and in the middle of another text."""
    rng = random.Random(1)
    held = [text(rng, 60) for _ in range(200)]
    held_out = HeldOut(held)
    for number in range(100):
        words = held[number].upper().split()
        start = rng.randrange(60 - 13)
        planted = " ".join([text(rng, 40), ", ".join(words[start : start + 13]), text(rng, 40)])
        assert held_out.has("another prompt", [text(rng, 9), planted])
        shorter = " ".join([text(rng, 40), " ".join(words[start : start + 12]), text(rng, 40)])
        assert not held_out.has("another prompt", [shorter])


def test_a_short_prompt_is_compared_as_a_whole() -> None:
    """A prompt of fewer than 13 words is held out whatever its case and spaces; another operator is another prompt."""
    held_out = HeldOut(["What is 3 + 4?", "What is 5 + 6?"])
    assert held_out.has("what is  3 + 4?\n", [])
    assert not held_out.has("What is 3 * 4?", [])


def test_a_held_out_text_that_is_there_often_is_no_common_wording() -> None:
    """A file with several rows of one prompt, e.g. a rollout each: its 13 words in a row still show overlap."""
    rng = random.Random(3)
    often, others = text(rng, 30), [text(rng, 30) for _ in range(5)]
    held_out = HeldOut([often, often.upper(), f" {often}\n", often, often, *others])
    assert (held_out.texts, held_out.common) == (10, 0)
    planted = " ".join([text(rng, 20), *often.split()[5:18], text(rng, 20)])
    assert held_out.has("another prompt", [planted])


def test_the_common_wording_of_held_out_texts_is_no_overlap() -> None:
    """An instruction that all held-out prompts have is not a reason to refuse every row."""
    rng = random.Random(2)
    instruction = "Solve the problem step by step and put the final answer into a box at the end of the reply."
    held = [f"{instruction} {text(rng, 30)}" for _ in range(100)]
    held_out = HeldOut(held)
    assert held_out.common > 0
    assert not held_out.has("x", [f"{instruction} {text(rng, 30)}"])
    assert held_out.has("x", [held[7]])
    assert held_out.has("x", [" ".join(held[7].split()[-20:])])


def test_near_duplicates_are_found() -> None:
    """Of 200 texts with 3 % changed words at least 95 % are found, and no text that is unlike all others."""
    pytest.importorskip("rensa", reason="rensa is not installed")
    rng = random.Random(3)
    near = NearDuplicates(0.8)
    originals = [text(rng, 300) for _ in range(500)]
    assert all(near.add(original) for original in originals)
    found = 0
    for original in originals[:200]:
        words = original.split()
        for place in rng.sample(range(300), 9):
            words[place] = rng.choice(WORDS)
        found += not near.add(" ".join(words))
    assert found >= 190


def test_a_short_text_is_near_to_itself_only() -> None:
    """Texts of one piece, and empty ones, are compared, too."""
    pytest.importorskip("rensa", reason="rensa is not installed")
    near = NearDuplicates(0.8)
    assert [near.add(text) for text in ("13", "14", "13", "", "")] == [True, True, False, True, False]


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, float("nan")])
def test_a_similarity_is_between_0_and_1(threshold: float) -> None:
    """Any two texts are at least 0 alike, and a similarity of 1 is an exact duplicate."""
    with pytest.raises(ConfigError, match="--near"):
        NearDuplicates(threshold)


def test_writing_without_spaces_is_compared_by_its_signs() -> None:
    """A sentence of Chinese or Japanese is not one word: each sign counts as a word, in either width."""
    rng = random.Random(4)
    signs = [*map(chr, range(0x4E00, 0x4E00 + 3000)), *map(chr, range(0x3042, 0x3094))]
    held = ["".join(rng.choices(signs, k=60)) for _ in range(100)]
    held_out = HeldOut([*held, "ＡＢＣ は いくつ です か"])
    for number, one in enumerate(held):
        start = rng.randrange(60 - 13)
        before, after = ("".join(rng.choices(signs, k=40)) for _ in range(2))
        assert held_out.has("x", [f"{before}{one[start : start + 13]}{after}"]), number
        assert not held_out.has("x", [f"{before}{one[start : start + 12]}{after}"]), number
    assert held_out.has("abc は いくつ です か", [])
    pytest.importorskip("rensa", reason="rensa is not installed")
    near = NearDuplicates(0.8)
    originals = ["".join(rng.choices(signs, k=300)) for _ in range(100)]
    assert all(near.add(original) for original in originals)
    changed = [[*original] for original in originals]
    for one in changed:
        for place in rng.sample(range(300), 9):
            one[place] = rng.choice(signs)
    assert sum(not near.add("".join(one)) for one in changed) >= 95
