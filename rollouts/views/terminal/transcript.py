"""A sample as a transcript: context, sampled tokens coloured by logprob, and the metrics of each completion.

Invariant: the text is decoded from the stored tokens, and taken from the messages only without a tokenizer. Control
characters of a model, a server or a file do not reach the terminal, and foreign text is never markup. Sampled tokens
are green from probability 0.5, yellow from 0.05, red below.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollouts.base.terminal import visible
from rollouts.dtypes import ImageSpan, VersionSpan, chat_text
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.renderer.token_text import TokenTexts
from rollouts.training.types import Sample
from rollouts.trajectory import CompletionRecord

__all__ = ["Piece", "heading", "pieces_of", "pieces_table", "transcript", "visible"]

Decode = Callable[[Any], str]

LIKELY, UNLIKELY = math.log(0.5), math.log(0.05)


@attrs.frozen
class Piece:
    """Token positions ``start`` to ``stop`` of a sample: one reply with its completion, or the context between two."""

    start: int
    stop: int
    completion: CompletionRecord | None


def pieces_of(completions: Sequence[CompletionRecord], length: int) -> Iterator[Piece]:
    """Split a sequence of ``length`` tokens into replies and the context between them."""
    position = 0
    for completion in completions:
        if completion.start > position:
            yield Piece(position, completion.start, None)
        yield Piece(completion.start, completion.stop, completion)
        position = completion.stop
    if length > position:
        yield Piece(position, length, None)


def transcript(sample: Sample, decode: Decode | None) -> RenderableType:
    """A sample with its metrics; without ``decode`` its messages are shown instead of its tokens."""
    logprobs = sample.logprob_column
    if decode is None or not len(sample):
        return Lines(heading(sample), _messages(sample), _failure(sample))
    if logprobs is None:
        logprobs = np.zeros(len(sample), np.float32)
    pieces = list(pieces_of(sample.completions, len(sample)))
    table = pieces_table(pieces, sample.token_column, logprobs, sample.versions, decode, sample.images)
    return Lines(heading(sample), table, _failure(sample))


def pieces_table(
    pieces: Sequence[Piece],
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    versions: Sequence[VersionSpan],
    decode: Decode,
    images: Sequence[ImageSpan] = (),
) -> Table:
    """One row per piece: origin, text, metrics. An image is ``[image 97x61 ab12cd34]`` in the place of its ids."""
    table = Table.grid(padding=(0, 2, 1, 0), expand=True)
    table.add_column(width=8)
    table.add_column(ratio=1)
    table.add_column(width=26)
    texts = TokenTexts(decode)
    for piece in pieces:
        ids = tokens[piece.start : piece.stop]
        if piece.completion is None:
            origin = "prompt" if piece.start == 0 else "context"
            context = _context(tokens, piece, images, decode)
            table.add_row(Text(origin, "dim"), Text(visible(context), "dim"), Text(f"{len(ids)} tokens", "dim"))
            continue
        sampled = logprobs[piece.start : piece.stop]
        text = _coloured(ids, sampled, texts)
        table.add_row(Text("sampled", "bold green"), text, _completion_metrics(piece.completion, sampled, versions))
    return table


def _context(tokens: npt.NDArray[np.int32], piece: Piece, images: Sequence[ImageSpan], decode: Decode) -> str:
    """The text of a piece that was not sampled."""
    texts, position = [], piece.start
    for span in images:
        if piece.start <= span.start and span.stop <= piece.stop:
            texts += [decode(tokens[position : span.start]), span.image.label]
            position = span.stop
    return "".join([*texts, decode(tokens[position : piece.stop])])


def heading(sample: Sample) -> Text:
    """One line: group and sample index, reward, status and stop reason, tokens."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    why = f" ({sample.stop_reason.value})" if sample.stop_reason else ""
    trained = int(sample.mask_column.sum())
    seat = visible(f"{sample.seat} {sample.conversation} · ") if sample.seat else ""
    text = Text(f"group {sample.group_index} · sample {sample.index} · {seat}", "bold")
    text.append(reward, "bold green" if sample.reward else "bold red")
    text.append(f" · {sample.status.value}{why} · {len(sample)} tokens, {trained} trained", "bold")
    if sample.label is not None:
        text.append(f" · label {visible(str(sample.label))}")
    return text.append("\n")


def _failure(sample: Sample) -> Text:
    if sample.failure is None:
        return Text("")
    failure = sample.failure
    text = Text(visible(f"{failure.kind} at {failure.place}: {failure.message}\n"), "red")
    return text.append(visible(failure.traceback.rstrip()), "dim")


def _messages(sample: Sample) -> Table:
    table = Table.grid(padding=(0, 2, 1, 0))
    for message in sample.messages:
        text = chat_text(message.get("content"))
        for call in message.get("tool_calls") or ():
            text += f"\n→ {call.get('function', call)}"
        trained = message.get("role") == "assistant"
        role = Text(visible(str(message.get("role"))), "bold green" if trained else "dim")
        table.add_row(role, Text(visible(text.strip()), "green" if trained else "dim"))
    return table


def _completion_metrics(
    record: CompletionRecord, logprobs: npt.NDArray[np.float32], versions: Sequence[VersionSpan]
) -> Text:
    names = dict.fromkeys(span.version for span in versions if span.start < record.stop and span.stop > record.start)
    lines = [f"{record.stop - record.start} tokens, {record.finish_reason}"]
    if len(logprobs):
        lines.append(f"logprob {statistics.fmean(logprobs.tolist()):.3f}, min {logprobs.min():.2f}")
    lines.append(f"cached {record.cached_tokens}/{record.start}, {record.seconds:.2f} s")
    lines.append(f"version {', '.join(names)}")
    return Text(visible("\n".join(lines)), "cyan")


def _coloured(tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], texts: TokenTexts) -> Text:
    """The text of a reply, each token in the colour of its logprob; a character of several has their lowest."""
    runs: list[tuple[str, float]] = []
    for text, logprob in zip(texts.of(tokens.tolist()), logprobs.tolist(), strict=True):
        if text or not runs:
            runs.append((text, logprob))
        else:
            runs[-1] = runs[-1][0], min(runs[-1][1], logprob)
    coloured = Text()
    for text, logprob in runs:
        coloured.append(visible(text), "green" if logprob >= LIKELY else "yellow" if logprob >= UNLIKELY else "red")
    return coloured
