"""The common part of the wire formats; any body becomes a request or a typed error."""

from __future__ import annotations

import gc
import json
import random
from typing import Any

import attrs
import msgspec
import pytest

from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.programs.gateway.wire import Counts, Entries, Fields, Joined, Wire, decoded_body, encoded
from tests.fuzzing import fuzz, mutated_json, odd_values
from tests.processors import picture
from tests.programs.gateway.scripted import REPLIES, named_events

WIRES: dict[str, Wire] = {"chat": chat, "responses": responses, "messages": messages}
_IMAGE = picture(2, 3)
_SOURCE = {"type": "base64", "media_type": "image/png", "data": _IMAGE.url.partition(",")[2]}
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
BODIES: dict[str, list[Any]] = {
    "chat": [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": _IMAGE.url}}],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "stop": ["a"],
            "n": 2,
            "temperature": 1,
            "response_format": {"type": "text"},
        }
    ],
    "responses": [
        {
            "model": "m",
            "instructions": "i",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {
                    "type": "reasoning",
                    "id": "rs_r",
                    "summary": [{"type": "summary_text", "text": "h"}],
                    "content": None,
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": _IMAGE.url, "detail": "auto"}],
                },
                {"type": "item_reference", "id": "fc_r1_0"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 5,
            "text": {"format": {"type": "text"}},
            "previous_response_id": "resp_r1",
        }
    ],
    "messages": [
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "document", "source": {}}]},
                {"role": "system", "content": "s"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "h", "signature": "r"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "image", "source": _SOURCE}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["a"],
            "context_management": {"edits": [{"type": "x"}]},
            "stream": True,
        }
    ],
}


@pytest.mark.parametrize("name", WIRES)
def test_any_body_is_read_or_refused(name: str, request: pytest.FixtureRequest) -> None:
    """A value of JSON gives a request that every reply answers, or an error that names what was expected."""
    wire, replies, entries = WIRES[name], {"r1": REPLIES["call"]}, Entries()
    read: list[CallRequest] = []

    def check(body: Any) -> None:
        refused = None
        try:
            asked = wire.read(msgspec.json.decode(json.dumps(body)), replies.get)
        except msgspec.DecodeError:
            return
        except ApiError as error:
            refused = error

        def reread() -> CallRequest:
            raw = decoded_body(json.dumps(body).encode(), wire.HISTORY, wire.FIELDS)
            return wire.read(raw, replies.get, entries)

        for _ in range(2):  # also with entries that were read before
            if refused is None:
                assert reread() == asked
            else:
                with pytest.raises(ApiError) as again:  # of several errors, the first that is found
                    reread()
                assert again.value.error_kind in ("invalid_request", "not_found")
        if refused is not None:
            assert refused.error_kind in ("invalid_request", "not_found")
            assert "expected" in str(refused)
            encoded(wire.error(refused)[1])
            return
        read.append(asked)
        for reply in (REPLIES["everything"], REPLIES["malformed call"]):
            encoded(wire.answer(asked, [reply]))
            assert named_events(b"".join(wire.events(asked, [reply])))

    fuzz(mutated_json(BODIES[name]), 20_000 if request.config.getoption("--long") else 60, check)
    fuzz(odd_values, 20, check)
    assert read, "some of the bodies are requests"


@attrs.define
class Texts:
    """Reads strings from lists of requests, and records what was decoded."""

    entries: Entries = attrs.field(factory=Entries)
    decoded: list[str] = attrs.field(factory=list)
    counts: Counts = attrs.field(factory=Counts)

    def of(self, body: bytes) -> list[str]:
        """The strings of a body; ``counts`` are of this body."""
        self.counts = Counts()
        fields = Fields.of(decoded_body(body, "history"))
        texts: list[str] = self.entries.into(Joined(), fields, "history", self._read, self.counts).parts
        return texts

    def _read(self, fields: Fields, counts: Counts) -> list[str]:
        self.decoded.append(fields.required("text"))
        counts["image"] += 1
        return self.decoded[-1:]


def test_an_entry_of_a_history_is_read_once() -> None:
    """A request costs what is new in it; what an entry counts is counted for each request, and few are kept."""
    texts, given = Texts(Entries(most=4)), ["a", "b", "a", "c", "d"]
    for length, cost in ((1, 1), (3, 1), (5, 2), (5, 0)):
        before = len(texts.decoded)
        assert texts.of(json.dumps({"history": [{"text": text} for text in given[:length]]}).encode()) == given[:length]
        assert (len(texts.decoded) - before, texts.counts) == (cost, {"image": length})
    assert texts.of(b'{"history": [{"text": "e"}, {"text": "a"}]}') == ["e", "a"]
    assert texts.decoded == ["a", "b", "c", "d", "e", "a"]


def test_a_list_is_read_from_where_it_differs() -> None:
    """Lists that begin alike, are edited, cut or spelled otherwise, in any order, are what they are without memory."""
    rng = random.Random(0)
    texts, given = Texts(), [str(number) for number in range(12)]
    for _ in range(300):
        kind, at = rng.choice(["longer", "edited", "cut", "back"]), rng.randrange(len(given))
        if kind == "longer":
            given = [*given, *(f"{rng.random()}" for _ in range(2))]
        elif kind == "edited":
            given = [*given[:at], f'{rng.choice("],{[")}"\\', *given[at + 1 :]]
        elif kind == "cut":
            given = given[: max(at, 1)]
        else:
            given = [str(number) for number in range(20)]
        separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n ", " :")])
        body = {"other": [{"text": "x"}], "history": [{"text": text} for text in given], "z": given}
        assert texts.of(json.dumps(body, separators=separators).encode()) == given
        assert texts.counts == {"image": len(given)}


def test_equal_entries_of_two_lists_are_read_each_in_its_own_way() -> None:
    """A tool and a message may have the same JSON."""
    entry = {"role": "user", "content": "c", "type": "function", "name": "f"}
    for entries in (Entries(), None):
        body = decoded_body(json.dumps({"messages": [entry], "tools": [entry]}).encode(), "messages")
        request = chat.read(body, entries=entries)
        assert (request.messages[0].text, request.tools[0].name) == ("c", "f")


@pytest.mark.parametrize("text", ['[{"a":1},]', '[{"a":1},,{"a":2}]', '[{"a":1}', '[{"a":1}}]', '[{"a":1} {"a":2}]'])
def test_a_list_that_is_no_json_is_refused(text: str) -> None:
    """Also a list that begins as a list that was read: the body is checked as a whole."""
    with pytest.raises(msgspec.DecodeError):
        decoded_body(b'{"history": %b}' % text.encode(), "history")


def test_what_is_unread_of_a_list_has_all_its_new_entries() -> None:
    """It is some entries longer than what is new: a body is searched for new images in this part only."""
    texts, given = Texts(), [{"text": str(number)} for number in range(40)]
    read = 0
    for length in (10, 30, 40):
        body = json.dumps({"history": given[:length]}).encode()
        unread = texts.entries.unread(decoded_body(body, "history"), "history")
        assert unread.count(b"text") == length - max(read - 4, 0)
        texts.of(body)
        read = length
    assert texts.entries.unread(decoded_body(b'{"history": "text"}', "history"), "history") == b""


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("value", [b"[" + b"[]," * 50_000 + b"[]]", b'{"a":' * 500 + b"{}" + b"}" * 500])
def test_no_object_is_made_of_a_field_that_is_not_read(name: str, value: bytes) -> None:
    """Fields beyond the API cost their bytes and no memory of objects."""
    wire = WIRES[name]
    body = b'{"model": "m", "unknown": ' + value + b', "%b": [], "stop": null}' % wire.HISTORY.encode()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        decoded = decoded_body(body, wire.HISTORY, wire.FIELDS)
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert (made < 20, type(decoded["unknown"])) == (True, msgspec.Raw)


@pytest.mark.parametrize("value", [b"[]", b"{}", b'"a"', b"1", b'"\\\\"', b'{"a":"b"}'])
def test_a_body_of_too_many_values_is_refused(value: bytes) -> None:
    """Before one of them is decoded, wherever they are."""
    body = b'{"messages": [' + b",".join([value] * (1 << 18)) + b",1]}"
    with pytest.raises(ApiError, match=r"body: got \d+ bytes; expected at most 262144 values") as refused:
        decoded_body(body, "messages")
    assert refused.value.error_kind == "too_large"


@pytest.mark.parametrize(
    "text", ["[],{" * (1 << 18), '"[,' * (1 << 18), "\\" * (1 << 18) + '"' + "," * (1 << 20), "x, " * (1 << 19)]
)
def test_a_long_text_is_one_value(text: str) -> None:
    """Whatever characters it has."""
    body = json.dumps({"messages": [{"content": text}]}).encode()
    assert chat.HISTORY in decoded_body(body, "messages")


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_an_image_for_a_model_without_images_is_not_decoded(name: str) -> None:
    """A few bytes can be an image of any size: bytes that are not an image are refused in the same way."""
    wire, parts = (
        WIRES[name],
        {
            "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        },
    )
    body = {wire.HISTORY: [{"role": "user", "content": [parts[name]]}]}
    for given in (body, decoded_body(json.dumps(body).encode(), wire.HISTORY, wire.FIELDS)):
        with pytest.raises(ApiError, match=r"\[0\].content\[0\].*: it sees none") as refused:
            wire.read(given, REPLIES.get, Entries(no_images="it sees none"))
        assert (refused.value.error_kind, refused.value.counted) == ("invalid_request", "image")


@pytest.mark.parametrize("name", WIRES)
def test_the_name_of_a_tool_has_a_limit(name: str) -> None:
    """It is refused before the template is tried with it."""
    wire = WIRES[name]
    own: dict[str, Any] = {"name": "a" * 257, "parameters": _SCHEMA, "input_schema": _SCHEMA}
    tool = own if name == "messages" else {"type": "function", **own}
    body = {wire.HISTORY: [{"role": "user", "content": "c"}], "tools": [tool]}
    with pytest.raises(ApiError, match=r"tools\[0\].name: got .* expected at most 256 characters"):
        wire.read(body)


@pytest.mark.parametrize("name", WIRES)
def test_a_ping_is_no_event_of_the_answer(name: str) -> None:
    """Clients skip a comment, and the event ``ping`` of the Messages API."""
    (ping, *more) = named_events(WIRES[name].PING + b"data: 1\n\n")
    assert (ping, more) == ((("ping", {"type": "ping"}), [("", 1)]) if name == "messages" else (("", 1), []))


def test_encoded_json_has_no_line_end() -> None:
    """Some clients split a stream at the line ends of Unicode, which JSON does not escape."""
    value = {"text": "a\u2028b\u2029c\u0085d\r\ne\x0b\x0c\x1c\x1d\x1ef"}
    text = encoded(value)
    assert len(text.decode().splitlines()) == 1
    assert json.loads(text) == value


def test_half_of_a_surrogate_pair_is_encoded() -> None:
    """A model can write it as an escape in the arguments of a call; it is served as it was written."""
    assert encoded({"x": "\ud800"}) == b'{"x": "\\ud800"}'
