"""Any tool call, data file, response, journal or option is read, or refused with a ``RolloutsError``.

A few hundred inputs each; over 100,000 with ``--long``. An input may take up to five seconds of processor time.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Optional

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from rollouts.base.storable import to_msgpack
from rollouts.dtypes import Endpoint, Message, ToolCall
from rollouts.errors import ConfigError, EndpointError, JournalError, RolloutsError, TokenMismatchError
from rollouts.http.answers import message_of
from rollouts.inference.completions import SentRequest
from rollouts.inference.generate_wire import read_completion
from rollouts.inference.token_json import SequenceCache
from rollouts.inference.wire_errors import error_of
from rollouts.recipe.files import read_options
from rollouts.renderer.dialects import DIALECTS
from rollouts.runs.journal import Columns, Journal, read_journal
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.prompt_files import load_prompts
from tests.dialects import MALFORMED, TOOLS, WRITTEN
from tests.fuzzing import fuzz, json_texts, mutated_bytes, mutated_json, odd_values, woven

pytestmark = pytest.mark.timeout(3600)

SHARES = {"dialect": 5_000, "jsonl": 15_000, "replies": 15_000, "errors": 5_000, "journal": 12_000, "options": 8_000}
"""Inputs of each kind with ``--long``; those of ``dialect`` for each of them."""


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> Callable[[str], int]:
    long = request.config.getoption("--long")
    return lambda kind: SHARES[kind] if long else 25 if kind == "dialect" else 300


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < 5


def refused_or(read: Callable[[], Any], *errors: type[RolloutsError]) -> Any:
    """Return the result of ``read``, or the listed error that it raises."""
    try:
        return read()
    except errors as error:
        return error


def test_a_long_run_is_long() -> None:
    """At least 100,000 inputs."""
    others = sum(count for kind, count in SHARES.items() if kind != "dialect")
    assert others + SHARES["dialect"] * len(DIALECTS) >= 100_000


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_any_reply_is_read(name: str, examples: Callable[[str], int]) -> None:
    """Parsing never raises. A call has a name and plain arguments, or it has an error."""
    texts = [WRITTEN.get(name, "Hello."), *(text for text, *_ in MALFORMED.get(name, ()))]
    texts += [f"<think>{texts[0]}</think>", f"<|channel|>analysis<|message|>a<|end|>{texts[0]}", "x</think>y"]

    def check(case: tuple[str, bool | None, bool]) -> None:
        text, opened, with_tools = case
        with at_once():
            reply = DIALECTS[name].parse(text, tools=TOOLS if with_tools else (), reasoning_open=opened)
        assert isinstance(reply.content, str)
        assert reply.reasoning is None or isinstance(reply.reasoning, str)
        for call in reply.tool_calls:
            assert isinstance(call, ToolCall)
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, Mapping)
            assert call.error is None or not call.arguments
            assert call.error is not None or call.name
        kept = Message("assistant", reply.content, tool_calls=reply.tool_calls, reasoning=reply.reasoning)
        to_msgpack(kept.to_chat())

    fuzz(st.tuples(woven(texts), st.none() | st.booleans(), st.booleans()), examples("dialect"), check)


ROWS: list[Any] = [
    {"prompt": "What?", "label": "5", "metadata": {"a": [1, None]}},
    {"prompt": [{"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {
        "prompt": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
            {"role": "tool", "content": "5", "tool_call_id": "a", "name": "f"},
        ],
        "label": 3.5,
    },
]
_DEEP = [b"[" * 3000, b'{"prompt":' * 1500, b'{"prompt": "a", "label":' + b"[" * 900 + b"]" * 900 + b"}"]
NESTED = st.sampled_from(_DEEP)


def test_any_data_file_is_read_or_refused(tmp_path: Path, examples: Callable[[str], int]) -> None:
    """The error names the file; prompts that are read pass through a buffer, its checksum and the journal."""
    path = tmp_path / "data.jsonl"
    line = mutated_json(ROWS).map(json_texts)
    lines = st.lists(line | mutated_bytes(line) | st.binary(max_size=20) | NESTED, max_size=4).map(b"\n".join)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with at_once():
            prompts = refused_or(lambda: load_prompts(path), ConfigError)
        if isinstance(prompts, RolloutsError):
            assert str(path) in str(prompts)
            return
        buffer = DataBuffer(prompts, seed=1)
        assert buffer.fingerprint is not None
        for prompt in buffer.get_prompts(len(prompts)):
            to_msgpack({"prompt": [message.to_chat() for message in prompt.messages], "label": prompt.label})

    fuzz(lines, examples("jsonl"), check)


IDS = SequenceCache().encode(np.array([5, 6, 7], dtype=np.int32))
REPLIES: list[Any] = [
    {
        "text": "hi",
        "output_ids": [11, 12],
        "meta_info": {
            "id": "rid",
            "finish_reason": {"type": "stop", "matched": 12},
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "completion_tokens": 2,
            "weight_version": "4",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}],
            "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, "x"]],
            "output_token_logprobs_length": 2,
            "e2e_latency": 0.1,
        },
    },
    {"meta_info": {"id": "rid", "finish_reason": {"type": "abort", "message": "x"}, "prompt_tokens": 0}},
    {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400, "message": "context length exceeded"}}},
    {"error": {"message": "no", "type": "BadRequest", "code": 400}},
    {"object": "error", "message": "no", "code": "503"},
    {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": []}, "output_ids": []},
]


def test_any_reply_of_a_server_is_a_completion_or_an_error(examples: Callable[[str], int]) -> None:
    """A completion has a finite logprob for each id, and versions that cover them."""
    body = mutated_json(REPLIES).map(json_texts)

    def check(payload: bytes) -> None:
        with at_once():
            found = refused_or(
                lambda: read_completion(payload, SentRequest("rid", IDS)), EndpointError, TokenMismatchError
            )
        if isinstance(found, RolloutsError):
            assert str(found)
            return
        assert len(found.tokens) == len(found.logprobs)
        assert all(math.isfinite(value) for value in found.logprobs.tolist())
        assert sum(span.stop - span.start for span in found.versions) == len(found.tokens)
        assert found.prompt_digest == IDS.digest

    fuzz(body | mutated_bytes(body) | st.binary(max_size=30) | NESTED, examples("replies"), check)


def test_any_refusal_of_a_server_is_an_error(examples: Callable[[str], int]) -> None:
    """The error has a message."""
    body = mutated_json([*REPLIES, {"detail": "x"}, {"detail": [{"msg": "y"}]}]).map(json_texts)

    def check(case: tuple[int, bytes]) -> None:
        status, payload = case
        with at_once():
            error = error_of(status, message_of(payload))
        assert isinstance(error, EndpointError)
        assert str(error) != f"status {status}: "

    fuzz(st.tuples(st.integers(100, 999), body | mutated_bytes(body) | NESTED), examples("errors"), check)


HEADER = struct.Struct("<2sBBIQII")


def framed(kind: int, version: int, sequence: int, payload: bytes) -> bytes:
    """A record with valid checksums around any payload, as a faulty writer may leave it."""
    head = HEADER.pack(b"rJ", kind, version, len(payload), sequence, zlib.crc32(payload), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def payload_of(fields: Any, rest: bytes, size: int | None) -> bytes:
    packed = msgspec.msgpack.encode(fields)
    return struct.pack("<I", len(packed) if size is None else size) + packed + rest


SMALL = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=4) | st.binary(max_size=4)
FIELDS = st.dictionaries(st.sampled_from(["columns", "segment", "x"]), SMALL | st.lists(SMALL, max_size=3)) | SMALL
PAYLOADS = st.binary(max_size=12) | st.builds(
    payload_of, FIELDS, st.binary(max_size=20), st.none() | st.integers(0, 2**32 - 1)
)


def test_any_journal_is_read_or_refused(tmp_path: Path, examples: Callable[[str], int]) -> None:
    """The error names file and offset; a journal that can be read can be appended to."""
    with Journal(tmp_path / "whole") as journal:
        for number in range(3):
            tokens = np.arange(number, dtype=np.int32)
            columns = Columns(tokens, tokens > 0, -tokens.astype(np.float32))
            journal.append("sample", {"number": number, "text": "é"}, columns if number else None)
    whole = (tmp_path / "whole" / "segment-000000.journal").read_bytes()
    forged = st.builds(
        framed, st.integers(0, 9), st.sampled_from([1, 1, 1, 2]), st.sampled_from([0, 1, 4, 4, 4, 2**64 - 1]), PAYLOADS
    )
    ends = st.just(b"") | st.binary(max_size=40) | st.integers(0, 60).map(bytes)
    first = mutated_bytes(st.just(whole)) | st.builds(lambda frame: whole + frame, forged) | forged
    segments = st.tuples(st.builds(bytes.__add__, first, ends), st.none() | st.just(whole) | forged | st.binary())
    folders = (tmp_path / str(number) for number in itertools.count())

    def check(data: tuple[bytes, bytes | None]) -> None:
        folder = next(folders)
        folder.mkdir()
        for number, content in enumerate(data):
            if content is not None:
                (folder / f"segment-{number:06d}.journal").write_bytes(content)
        with at_once():
            found = refused_or(lambda: len(list(read_journal(folder))), JournalError)
            if isinstance(found, JournalError):
                assert "offset" in str(found)
                with pytest.raises(JournalError):
                    Journal(folder)
            else:
                with Journal(folder) as again:
                    again.append("turn", {"more": True})
                assert len(list(read_journal(folder))) == found + 1
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    fuzz(segments, examples("journal"), check)


class Colour(enum.Enum):
    RED = "red"


def optioned(
    endpoint: Endpoint,
    *,
    needed: int,
    seconds: float = 1.0,
    flag: bool = False,
    name: str = "",
    path: Path = Path("x"),
    maybe: int | None = None,
    kind: Literal["a", "b", 3] = "a",
    many: list[int] = [],  # noqa: B006 - as users write it
    table: dict[str, float] | None = None,
    pair: tuple[int, str] = (1, ""),
    colour: Colour = Colour.RED,
    anything: Any = None,
    old: Optional[list[str]] = None,  # noqa: UP045 - as users write it
    raw: bytes = b"",
    number: complex = 0j,
    untyped=None,
) -> None:
    """A recipe with options of every kind."""


OPTIONS = ("needed", "seconds", "flag", "name", "path", "maybe", "kind", "many", "table", "pair", "colour", "anything")
OPTIONS += ("old", "raw", "number", "untyped")


def test_any_option_of_a_recipe_is_read_or_refused(examples: Callable[[str], int]) -> None:
    """The error names the option; a value has the type of the recipe's parameter."""
    number = st.integers().map(str) | st.floats().map(str) | st.sampled_from(["1e999", "9" * 5000, "١", "0x1", "1_0"])
    word = st.sampled_from(["true", "False", "null", "None", "[1, 2]", '{"a": 1}', '[1, "a"]', "red", "a", "3", "["])
    text = number | word | st.text(max_size=8) | odd_values.map(lambda value: json_texts(value).decode())
    text |= NESTED.map(bytes.decode) | st.sampled_from(["\ud800", "\0"])
    options = st.dictionaries(st.sampled_from(OPTIONS) | st.text(max_size=5), text, max_size=4)
    options |= options.map(lambda found: {"needed": "1", **{k: v for k, v in found.items() if k in OPTIONS}})

    def check(given: dict[str, str]) -> None:
        with at_once():
            found = refused_or(lambda: read_options(optioned, given), ConfigError)
        if isinstance(found, RolloutsError):
            assert "--set" in str(found) or "option" in str(found)
            return
        assert found.keys() == given.keys()
        assert isinstance(found["needed"], int)
        assert isinstance(found.get("seconds", 1.0), float)
        assert isinstance(found.get("many", []), list)
        assert isinstance(found.get("path", Path()), Path)

    fuzz(options, examples("options"), check)
