"""Transcripts: the stored tokens as text, each reply in colour with its metrics."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollouts.dtypes import Completion, Message, Prompt, StopReason, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.errors import EnvironmentFailure, Failure
from rollouts.renderer import Renderer, renderer_for
from rollouts.training import Sample, trajectory_to_sample
from rollouts.trajectory import CompletionRecord, Trajectory, digest
from rollouts.views.terminal.transcript import pieces_of, transcript, visible


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(str(DEMO_MODEL))


def played(renderer: Renderer, reply: list[int], logprobs: list[float]) -> Sample:
    trajectory = Trajectory()
    opening = [Message("user", "What is 1 + 2?")]
    trajectory.add_context(renderer.opening(opening), opening)
    completion = Completion(
        tokens=reply,
        logprobs=logprobs,
        finish_reason="stop",
        versions=[VersionSpan("v9", 0, len(reply))],
        prompt_tokens=len(trajectory),
        prompt_digest=digest(trajectory.tokens),
        request_id="r",
        cached_tokens=3,
    )
    trajectory.add_reply(completion, Message("assistant", "said"))
    trajectory.seal(StopReason.TASK_COMPLETED)
    sample = trajectory_to_sample(trajectory, Prompt("q", label="3", group_index=4, index=9), renderer.decode)
    sample.reward = 1.0
    return sample


def shown(what: Any, width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def ids(renderer: Renderer, text: str) -> list[int]:
    """Ids of the text of a user's message."""
    with_text, without = (renderer.opening([Message("user", each)]).tolist() for each in (f"x{text}", "x"))
    start = next(at for at, (a, b) in enumerate(zip(with_text, without, strict=False)) if a != b)
    return with_text[start : start + len(with_text) - len(without)]


def test_the_text_is_decoded_from_the_stored_tokens(renderer: Renderer) -> None:
    """The text is that of the tokens, not of the messages; the metrics follow it."""
    reply = [*ids(renderer, " The answer is 3."), *renderer.stop_token_ids[:1]]
    text = shown(transcript(played(renderer, reply, [-0.5] * len(reply)), renderer.decode))
    assert "The answer is 3.<|im_end|>" in text
    assert "said" not in text
    for part in ("group 4 · sample 9 · reward 1", "label 3", "logprob -0.500", "cached 3/", "version v9", "sampled"):
        assert part in text


def test_trained_tokens_are_coloured_by_their_logprob(renderer: Renderer) -> None:
    """A likely token is green, a less likely one yellow, an unlikely one red; context has none of these colours."""
    reply = ids(renderer, " The answer is 3.")
    logprobs = [-0.01] * len(reply)
    logprobs[0], logprobs[1] = -1.5, -6.0
    text = shown(transcript(played(renderer, reply, logprobs), renderer.decode), force_terminal=True)
    first, second = renderer.decode(reply[:1]), renderer.decode(reply[1:2])
    assert f"\x1b[33m{first}\x1b[0m" in text
    assert f"\x1b[31m{second}" in text
    assert "\x1b[32m" in text


def test_colours_need_no_decoder_that_decodes_token_by_token(renderer: Renderer) -> None:
    """With a decoder that drops a leading space, as SentencePiece does, an unlikely token is red."""

    def decode(tokens: Any) -> str:
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")

    sample = played(renderer, [300, 301, 302], [-0.01, -6.0, -0.01])
    assert "w300 w301 w302" in shown(transcript(sample, decode))
    assert "\x1b[31m w301\x1b[0m" in shown(transcript(sample, decode), force_terminal=True)


def test_a_character_of_several_tokens_has_one_colour(renderer: Renderer) -> None:
    """The colour of its least likely token."""

    def decode(tokens: Any) -> str:
        return b"".join({300: b"\xc3", 301: b"\xa9"}.get(token, b".") for token in tokens).decode(errors="replace")

    sample = played(renderer, [302, 300, 301, 302], [-0.01, -0.01, -6.0, -0.01])
    assert "\x1b[32m.\x1b[0m\x1b[31mé\x1b[0m\x1b[32m.\x1b[0m" in shown(transcript(sample, decode), force_terminal=True)


def test_messages_replace_tokens_without_a_tokenizer(renderer: Renderer) -> None:
    """Without a decoder the conversation is shown as text."""
    reply = ids(renderer, " The answer is 3.")
    text = shown(transcript(played(renderer, reply, [-0.5] * len(reply)), None))
    assert "said" in text
    assert "What is 1 + 2?" in text


def test_a_sample_without_tokens_shows_its_failure() -> None:
    """The transcript of a rollout that failed at once is its failure."""
    sample = Sample(prompt="q", failure=Failure.of(EnvironmentFailure("no world")))
    assert "EnvironmentFailure at here: no world" in shown(transcript(sample, None))


def test_pieces_cover_a_sequence_without_a_gap(renderer: Renderer) -> None:
    """Replies and context follow each other from the first token to the last."""
    sample = played(renderer, ids(renderer, " yes"), [-0.1] * len(ids(renderer, " yes")))
    pieces = list(pieces_of(sample.completions, len(sample) + 5))
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, len(sample) + 5)


def test_control_characters_do_not_reach_the_terminal() -> None:
    """A model cannot move the cursor; line ends and tabs stay."""
    assert visible("a\x1b[2Jb\n\tc\x7f") == "a␛[2Jb\n\tc␡"


@pytest.mark.parametrize(
    "character",
    ["\x80", "\x85", "\x9b", "\x9f", "\u061c", "\u200e", "\u200f", "\u2028", "\u2029", "\ud800", "\udfff"]
    + [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))],
    ids=lambda character: f"{ord(character):04X}",
)
def test_a_character_that_controls_the_terminal_is_shown_by_its_number(character: str) -> None:
    """C1 controls (U+009B begins an escape sequence), bidirectional controls, line separators, lone surrogates."""
    assert visible(f"a{character}b") == f"a<U+{ord(character):04X}>b"


def test_letters_of_every_script_stay_as_they_are() -> None:
    """Joiners that emoji, Persian and Hindi are written with, too."""
    text = "naïve\u00a0größer שלום می‌خواهم 👩‍💻 क्‍ष 日本 �"
    assert visible(text) == text


HOSTILE = "[/b] [x] :smile: \x1b[2J \x9b31m \u202e"
SHOWN = "[/b] [x] :smile: ␛[2J <U+009B>31m <U+202E>"


def test_foreign_text_in_a_transcript_is_neither_markup_nor_control() -> None:
    """Role, content and call of a message; label; kind, place and text of a failure; finish reason and version."""
    failure = Failure(HOSTILE, f"words {HOSTILE}", f"place {HOSTILE}", "")
    call = {"function": {"name": HOSTILE}}
    messages = [
        {"role": f"role {HOSTILE}", "content": f"content {HOSTILE}"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    sample = Sample(prompt="q", label=f"label {HOSTILE}", messages=messages, failure=failure)
    text = shown(transcript(sample, None), width=400)
    for word in ("role", "content", "label", "place", "words"):
        assert f"{word} {SHOWN}" in text
    assert "'name': '[/b] [x] :smile: " in text
    reply = CompletionRecord("r", 1, 2, f"reason {HOSTILE}", 0, 0, 0.1)
    spans = [VersionSpan(f"v {HOSTILE}", 1, 2)]
    sample = Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0, -0.1], completions=[reply], versions=spans)
    text += shown(transcript(sample, lambda tokens: f"{HOSTILE} "))
    assert "reason [/b] [x]" in text
    assert "version v [/b] [x]" in text
    assert not set("\x1b\x9b\u202e") & set(text)


def test_a_character_of_several_tokens_is_one_character() -> None:
    """Where tokens are bytes, a character that they spell together is shown whole."""

    def decode(tokens: Any) -> str:
        return bytes(np.asarray(tokens).tolist()).decode(errors="replace")

    text = "né".encode()
    call = CompletionRecord("r", 1, 4, "stop", 0, 0, 0.1)
    sample = Sample(
        tokens=[65, *text], loss_mask=[0, 1, 1, 1], rollout_log_probs=[0, -0.1, -0.1, -0.1], completions=[call]
    )
    assert "né" in shown(transcript(sample, decode))
