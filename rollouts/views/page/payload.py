"""The data of a page: a head with the numbers of all groups and samples, and chunks with tokens and messages.

Invariant: tokens, masks, versions and the places of completions are exact. Logprobs have the upper 16 bits of float32
(a relative error below 0.4 %). Groups are read one at a time; only their packed form is held.

Images are in the text of a chunk as ``data:`` URLs, each once.

Format. The head is JSON. A chunk is the length of a JSON text (uint32, little endian), the text, and columns over all
tokens of its samples, in order: the index of each token in the vocabulary of the head (uint16 or uint32), then for each
trained token the upper and then the lower byte of its logprob. Head and chunks are compressed with zlib.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import chat_text
from rollouts.dtypes.lazy_numpy import np
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.renderer.token_text import TokenTexts
from rollouts.runs.failure_kinds import FailureKinds
from rollouts.runs.reading import reading
from rollouts.runs.verify import LAWS, Report
from rollouts.training.types import Sample
from rollouts.views.page.held_up import Batches, as_rows
from rollouts.views.page.source import Entry, Source

__all__ = ["Chunk", "Payload", "build_payload"]

_CHUNK_TOKENS = 200_000
"""Most tokens of a chunk with more than one group: it is unpacked when one of its groups is shown."""
_PROMPT_CHARACTERS = 160
_VIOLATIONS = 100


@attrs.frozen
class Chunk:
    """The samples of some consecutive groups."""

    first: int
    """Position of the first group in the head."""
    groups: int
    data: bytes


@attrs.frozen
class Payload:
    """The data of one run or evaluation."""

    head: bytes
    chunks: list[Chunk]
    tokens: int
    times: bytes = b""
    """The spans of all samples."""
    has_images: bool = False


def build_payload(source: Source, decode: Callable[[Any], str] | None) -> Payload:
    """Read all groups of a source.

    Args:
        source: the run or evaluation.
        decode: from ids to text; ``None`` shows ids as numbers, and messages as the run has them.

    Raises:
        ConfigError: the source cannot be read.
    """
    with reading(source.path):
        return _payload(source, decode)


def _payload(source: Source, decode: Callable[[Any], str] | None) -> Payload:
    head = _Head(TokenTexts(decode))
    chunks: list[Chunk] = []
    waiting: list[Entry] = []
    first = tokens = held = 0

    def close() -> None:
        nonlocal waiting, first, held
        if waiting:
            chunks.append(Chunk(first, len(waiting), head.chunk(waiting)))
            first, waiting, held = first + len(waiting), [], 0

    for entry in source.groups():
        size = sum(len(sample) for sample in entry.samples)
        if held + size > _CHUNK_TOKENS:
            close()
        head.add(entry)
        waiting.append(entry)
        tokens, held = tokens + size, held + size
    close()
    spans = [[chunk.first, chunk.groups] for chunk in chunks]
    content, times = _packed(head.content(source) | {"chunks": spans}), _packed(head.times())
    return Payload(content, chunks, tokens, times, head.has_images)


class _Names:
    """Texts by number, in order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        return list(self.numbers)


class _Head:
    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._vocabulary = _Names()
        self._names = {name: _Names() for name in ("outcome", "reason", "environment", "status", "stop", "version")}
        self._groups: dict[str, list[Any]] = {
            name: [] for name in ("number", "outcome", "batch", "reason", "environment", "prompt", "label", "first")
        }
        self._samples: dict[str, list[Any]] = {
            name: []
            for name in (
                "index",
                "rollout",
                "seat",
                "reward",
                "status",
                "stop",
                "tokens",
                "trained",
                "turns",
                "logprob",
                "errors",
                "failure",
            )
        }
        self.has_images = False
        self._failures = FailureKinds()
        self._batches = Batches()
        self._spans: list[tuple[int, int, float, float]] = []
        """The row of the sample, the number of the name, begin and seconds."""
        self._span_names = _Names()

    # -- the numbers of all samples --

    def add(self, entry: Entry) -> None:
        sample = entry.samples[0]
        prompt = sample.prompt if isinstance(sample.prompt, str) else _last_text(sample.prompt)
        _append(
            self._groups,
            number=entry.number,
            outcome=self._names["outcome"](entry.outcome),
            batch=entry.batch,
            reason=self._names["reason"](entry.reason),
            environment=self._names["environment"](str(sample.metadata.get(ENVIRONMENT, ""))),
            prompt=prompt[:_PROMPT_CHARACTERS],
            label=None if sample.label is None else str(sample.label)[:_PROMPT_CHARACTERS],
            first=len(self._samples["index"]),
        )
        self._batches.add(entry.batch, entry.number, entry.samples)
        for position, sample in enumerate(entry.samples):
            self._spans += [
                (len(self._samples["index"]), self._span_names((span.activity, span.name)), span.began, span.seconds)
                for span in sample.times
            ]
            self._add_sample(entry.number, position, sample)

    def _add_sample(self, group: int, position: int, sample: Sample) -> None:
        logprobs = sample.logprob_column
        trained = None if logprobs is None else logprobs[sample.mask_column]
        _append(
            self._samples,
            index=sample.index,
            rollout=f"{sample.rollout_id} {sample.seat} {sample.conversation}" if sample.seat else sample.rollout_id,
            seat=sample.seat and f"{sample.seat} {sample.conversation}",
            reward=None if sample.reward is None else _finite(sample.reward),
            status=self._names["status"](sample.status.value),
            stop=self._names["stop"](sample.stop_reason.value if sample.stop_reason else ""),
            tokens=len(sample),
            trained=sample.sampled_tokens,
            turns=sample.turns,
            logprob=round(float(trained.mean()), 4) if trained is not None and len(trained) else None,
            errors=_finite(sample.metrics.get("tool_errors", 0)),
            failure=sample.failure and self._failures.add(sample.failure, group, position).number,
        )

    def content(self, source: Source) -> dict[str, Any]:
        ids = self._vocabulary.values
        return {
            "title": source.path.resolve().name,
            "path": str(source.path),
            "growing": source.growing,
            "info": source.info,
            "metrics": source.metrics,
            "report": None if source.report is None else _report(source.report),
            "names": {name: names.values for name, names in self._names.items()},
            "groups": self._groups,
            "samples": self._samples,
            "failures": [
                attrs.asdict(kind.failure) | {"count": kind.count, "group": kind.group, "sample": kind.sample}
                for kind in self._failures.kinds
            ],
            "held_up": as_rows(self._batches.held_up()),
            "vocabulary": {"ids": ids, "texts": [self._texts.usual(token) for token in ids]},
        }

    def times(self) -> dict[str, Any]:
        """The spans of all samples in columns; times in tenths of a millisecond after the first begin."""
        origin = min((began for _, _, began, _ in self._spans), default=0.0)
        return {
            "origin": origin,
            "names": self._span_names.values,
            "row": [row for row, _, _, _ in self._spans],
            "name": [name for _, name, _, _ in self._spans],
            "began": [_tenths(began - origin) for _, _, began, _ in self._spans],
            "lasted": [_tenths(seconds) for _, _, _, seconds in self._spans],
        }

    # -- tokens and messages --

    def chunk(self, entries: Sequence[Entry]) -> bytes:
        samples = [sample for entry in entries for sample in entry.samples]
        logprobs = [_trained_logprobs(sample) for sample in samples]
        images = _Names()
        described = [
            self._described(sample, images, has_logprobs=column is not None)
            for sample, column in zip(samples, logprobs, strict=True)
        ]
        numbers = [self._vocabulary(token) for sample in samples for token in sample.token_column.tolist()]
        wide = len(self._vocabulary.numbers) > 0xFFFF
        content = {"samples": described, "wide": wide}
        if images.numbers:
            content["images"] = [image.url for image in images.values]
            self.has_images = True
        text = msgspec.json.encode(content, enc_hook=str)
        present = [column for column in logprobs if column is not None]
        upper = (np.concatenate([np.empty(0, np.float32), *present]).view(np.uint32) >> 16).astype("<u2")
        columns = np.asarray(numbers, "<u4" if wide else "<u2").tobytes()
        planes = (upper >> 8).astype(np.uint8).tobytes() + (upper & 0xFF).astype(np.uint8).tobytes()
        padding = b" " * (-(len(text) + 4) % 4)
        return zlib.compress(struct.pack("<I", len(text + padding)) + text + padding + columns + planes, 9)

    def _described(self, sample: Sample, images: _Names, *, has_logprobs: bool) -> dict[str, Any]:
        ids = sample.token_column.tolist()
        exceptions = self._texts.exceptions(ids)
        texts = [exceptions.get(place, self._texts.usual(token)) for place, token in enumerate(ids)]
        described: dict[str, Any] = {
            "n": len(ids),
            "mask": _runs(sample.mask_column),
            "versions": [[self._names["version"](span.version), span.start, span.stop] for span in sample.versions],
            "completions": [
                [call.start, call.stop, call.finish_reason, call.cached_tokens, round(call.seconds, 4), call.request_id]
                for call in sample.completions
            ],
            "messages": _Places("".join(texts)).of(sample.messages),
            "steps": [_finite(reward) for reward in sample.step_rewards],
            "metrics": {name: _finite(value) for name, value in sample.metrics.items()},
        }
        if sample.images:
            described["images"] = [[images(span.image), span.start, span.stop] for span in sample.images]
        if exceptions:
            described["texts"] = [[place, text] for place, text in exceptions.items()]
        if not has_logprobs:
            described["logprobs"] = False
        return described


class _Places:
    """The texts of messages as places in the text of the tokens, wherever they are in it in order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._from = 0

    def of(self, messages: Iterable[Mapping[str, Any]]) -> list[Any]:
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> list[Any]:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        called = [[str(call.get("name")), _text_of(call.get("arguments"))] for call in calls]
        packed: list[Any] = [message.get("role"), self._place(chat_text(message.get("content")))]
        return [*packed, called] if called else packed

    def _place(self, text: str) -> str | list[int]:
        start = self._text.find(text, self._from) if text else -1
        if start < 0:
            return text
        self._from = start + len(text)
        return [_utf16(self._text[:start]), _utf16(text)]


def _utf16(text: str) -> int:
    """The length of a string in JavaScript."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value, enc_hook=str).decode()


def _last_text(prompt: Sequence[Any]) -> str:
    """The last message of a prompt that is a conversation."""
    last = prompt[-1] if prompt else {}
    return chat_text(last.get("content") if isinstance(last, Mapping) else getattr(last, "content", last))


def _tenths(seconds: float) -> int:
    """Tenths of a millisecond; 0 for a time that no clock shows, such as an infinite one."""
    return round(10_000 * seconds) if abs(seconds) < 1e12 else 0


def _trained_logprobs(sample: Sample) -> Any:
    column = sample.logprob_column
    return None if column is None else column[sample.mask_column]


def _runs(mask: Any) -> list[int]:
    """The places where a mask changes: start, stop, start, stop, …"""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [int(edge) for edge in edges]


def _append(columns: dict[str, list[Any]], **values: Any) -> None:
    for name, value in values.items():
        columns[name].append(value)


def _finite(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _report(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "laws": [
            [law, LAWS[law], sum(violation.law == law for violation in report.violations), dict(found)]
            for law, found in report.checked.items()
        ],
        "violations": [[v.law, v.place, v.got, v.expected] for v in itertools.islice(report.violations, _VIOLATIONS)],
        "notes": report.notes,
    }


def _packed(content: Mapping[str, Any]) -> bytes:
    return zlib.compress(msgspec.json.encode(content, enc_hook=str), 9)
