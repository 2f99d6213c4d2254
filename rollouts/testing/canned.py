"""A loopback server of prebuilt responses in its own process, fast enough to benchmark its clients.

Invariant: a response equals :func:`~rollouts.testing.replies.reply_body` of the same request byte for byte; a request's
ids are counted, not parsed. Faults occur at the configured rates and equal the faults of
:class:`~rollouts.testing.server.StubServer`.

``/inference/v1/generate`` returns the same replies in vLLM's format.

It does not run a model, serves only the routes of generation, records nothing, and does not know tokenizers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, get_args

import anyio
import attrs
import msgspec

from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.testing.latency import Latency
from rollouts.testing.replies import ERRORS, Fault, Request, probe_body, reply_body

__all__ = ["Canned", "canned_server"]

_START_SECONDS = 60.0
_UNSERVED = ("drip", "error_duplicate")
"""Faults that this server does not have."""

_LONGEST_PROBE = 1000
"""Bytes of a request of the probe of logprobs, at most."""
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_RID = re.compile(rb'"rid"\s*:\s*"([^"]*)"')
_BUDGET = re.compile(rb'"max_(?:new_)?tokens"\s*:\s*(\d+)')
_IDS = re.compile(rb'"(?:input|token)_ids"\s*:\s*\[')
_RID_MARK, _COUNT_MARK = "rid-goes-here", 987_654_321_987
_MARKS = re.compile(rf"{_RID_MARK}|{_COUNT_MARK}|{_COUNT_MARK - 1}".encode())


def _shares(value: Mapping[Fault, float]) -> dict[Fault, float]:
    known = [name for name in get_args(Fault) if name not in _UNSERVED]
    for name, share in value.items():
        if name not in known:
            raise ConfigError.of("Canned.faults", name, f"one of {', '.join(known)}")
        if not 0 <= share <= 1:
            raise ConfigError.of(f"Canned.faults[{name!r}]", share, "a share of all requests, from 0 to 1")
    return dict(value)


def _tuples(replies: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, replies))


@attrs.frozen
class Canned:
    """The responses: the longest reply within the request's ``max_new_tokens``, or else the shortest one, cut.

    With a ``mark``, the number of marks in the request selects the reply.
    """

    replies: Sequence[Sequence[int]] = attrs.field(converter=_tuples)
    """Ids of the replies, stop tokens included; of different lengths, unless there is a ``mark``."""
    texts: Sequence[str] = ()
    """Texts of the replies, for clients that read them."""
    mark: int | None = None
    """An id that each reply contains once: a request with k marks gets reply k, or the last one."""
    latency: Latency | None = None
    faults: Mapping[Fault, float] = attrs.field(factory=dict, converter=_shares)
    """The share of requests for each fault."""
    max_context: int = 1_000_000
    seed: int = 0
    """Seed of faults and logprobs."""

    def __attrs_post_init__(self) -> None:
        lengths = [len(reply) for reply in self.replies]
        if not lengths or 0 in lengths or (self.mark is None and len(set(lengths)) < len(lengths)):
            raise ConfigError.of("Canned.replies", lengths, "replies of different lengths, none empty")
        if self.texts and len(self.texts) != len(self.replies):
            raise ConfigError.of("Canned.texts", self.texts, f"a string for each of the {len(self.replies)} replies")

    def number(self, budget: int, marks: int = 0) -> int:
        """Index of the reply to a request with this budget and this number of marks."""
        if self.mark is not None:
            return min(marks, len(self.replies) - 1)
        lengths = [len(reply) for reply in self.replies]
        return lengths.index(max((length for length in lengths if length <= budget), default=min(lengths)))

    def script(self, input_ids: Sequence[int], params: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The same replies as a script for ``StubServer``."""
        marks = 0 if self.mark is None else list(input_ids).count(self.mark)
        return self.scripted(self.number(params.get("max_new_tokens", 128), marks))

    def scripted(self, number: int) -> tuple[Any, Any, Any]:
        """One reply as ``(ids, logprobs, None)``."""
        reply = self.replies[number]
        logprobs = -np.random.default_rng(self.seed).exponential(size=len(reply)).astype(np.float32)
        return reply, logprobs.tolist(), None


@contextlib.contextmanager
def canned_server(canned: Canned) -> Iterator[str]:
    """Serve in a child process while the context lasts; yields the URL."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(canned, there), daemon=True)
    process.start()
    try:
        if not here.poll(_START_SECONDS):
            raise TimeoutError(f"the canned server did not start within {_START_SECONDS:g} s")
        yield here.recv()
    finally:
        process.terminate()
        process.join(10)


def _run(canned: Canned, ready: Connection) -> None:
    anyio.run(_serve, canned, ready)


async def _serve(canned: Canned, ready: Connection) -> None:
    answers = _Answers(canned)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answers), "127.0.0.1", 0, backlog=8192)
    ready.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await anyio.sleep_forever()


class _Answers:
    """Responses to requests; every reply is encoded once."""

    def __init__(self, canned: Canned) -> None:
        self.canned = canned
        self.live: dict[bytes, tuple[asyncio.TimerHandle | None, _Connection, bytes]] = {}
        """Generations in progress, by rid."""
        self._built: dict[tuple[int, int], list[bytes]] = {}
        self._vllm: dict[tuple[int, int], bytes] = {}
        mark = canned.mark
        self._mark = None if mark is None else re.compile(rb"(?<![0-9])%d(?![0-9])" % mark)
        self._rng = random.Random(canned.seed)
        self.unnamed = itertools.count()

    def fault(self) -> Fault:
        """Draw the fault of the next request."""
        if not self.canned.faults:
            return "none"
        point = self._rng.random()
        for name, share in self.canned.faults.items():
            point -= share
            if point < 0:
                return name
        return "none"

    def built(self, rid: bytes, body: bytes) -> bytes:
        """The response body for a request, assembled from prebuilt pieces."""
        key = number, budget = self.number(body)
        pieces = self._built.get(key)
        if pieces is None:
            params = {"max_new_tokens": budget}
            arrived = Request(_RID_MARK, range(_COUNT_MARK), params, {}, {})  # type: ignore[arg-type]  # only its length
            pieces = self._built[key] = _MARKS.split(msgspec.json.encode(self._body(number, arrived, "none")))
        count = body.count(b",", *_ids(body)) + 1
        first, second, third, last = pieces
        return b"".join((first, rid, second, str(count).encode(), third, str(count - 1).encode(), last))

    def faulty(self, body: bytes, fault: Fault) -> tuple[int, bytes]:
        """Status and body of a response with a fault (not prebuilt)."""
        if fault == "not_json":
            return 200, b"<html>Welcome</html>"
        if fault in ERRORS:
            status, error = ERRORS[fault]
            return status, msgspec.json.encode(error)
        fields = msgspec.json.decode(body)
        arrived = Request(fields.get("rid", ""), fields["input_ids"], fields.get("sampling_params", {}), {}, fields)
        return 200, msgspec.json.encode(self._body(self.number(body)[0], arrived, fault))

    def as_vllm(self, body: bytes) -> bytes:
        """The response body in vLLM's format for token ids, without latency and faults."""
        number, budget = self.number(body)
        if (number, budget) not in self._vllm:
            ids, logprobs, _ = self.canned.scripted(number)
            content = [{"token": f"token_id:{token}", "logprob": one} for token, one in zip(ids, logprobs, strict=True)]
            finish = "length" if len(ids) > budget else "stop"
            choice = {"index": 0, "token_ids": ids[:budget], "logprobs": {"content": content[:budget]}}
            response = {"request_id": "canned", "choices": [{**choice, "finish_reason": finish}]}
            self._vllm[number, budget] = msgspec.json.encode(response)
        return self._vllm[number, budget]

    def number(self, body: bytes) -> tuple[int, int]:
        """Index of the reply to a request, and the request's budget in tokens."""
        budget = _budget(body)
        marks = 0 if self._mark is None else len(self._mark.findall(body, *_ids(body)))
        return self.canned.number(budget, marks), budget

    def _body(self, number: int, arrived: Request, fault: Fault) -> Mapping[str, Any]:
        body = reply_body(lambda input_ids, params: self.canned.scripted(number), arrived, fault)
        return {**body, "text": self.canned.texts[number]} if self.canned.texts else body


def _ids(body: bytes) -> tuple[int, int]:
    """Start and end of the list of ids in a body."""
    found = _IDS.search(body)
    begin = found.end() if found else 0
    return begin, body.find(b"]", begin)


def _budget(body: bytes) -> int:
    found = _BUDGET.search(body, body.find(b'"sampling_params"'))
    return int(found[1]) if found else 128


class _Connection(asyncio.Protocol):
    """One connection: sequential requests."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._buffer = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._buffer, 0, end)
            self._needed = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < self._needed:
                return
            line = bytes(self._buffer[: self._buffer.find(b"\r\n")])
            body = bytes(memoryview(self._buffer)[end + 4 : self._needed])
            del self._buffer[: self._needed]
            self._needed = 0
            self._serve(line.split(b" ")[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            self._generate(body)
        elif path == b"/inference/v1/generate":
            self._respond(200, self._answers.as_vllm(body))
        elif path == b"/abort_request":
            fields = msgspec.json.decode(body)
            self._abort(b"" if fields.get("abort_all") else fields["rid"].encode())
        elif path == b"/workers":  # as a router with one server behind it
            host, port = self._transport.get_extra_info("sockname")[:2]
            self._respond(200, msgspec.json.encode({"workers": [{"url": f"http://{host}:{port}"}]}))
        elif path == b"/v1/models":
            self._respond(200, msgspec.json.encode({"data": [{"max_model_len": self._answers.canned.max_context}]}))
        else:  # /model_info and its like
            self._respond(200, b'{"version": "0.5.23", "model_path": "canned", "weight_version": "v1"}')

    def _generate(self, body: bytes) -> None:
        if len(body) < _LONGEST_PROBE and b'"top_logprobs_num"' in body:
            self._respond(200, msgspec.json.encode(probe_body(msgspec.json.decode(body))))
            return
        found = _RID.search(body, 0, 64) or _RID.search(body)
        rid = found[1] if found else b"canned-%d" % next(self._answers.unnamed)
        fault, latency = self._answers.fault(), self._answers.canned.latency
        if fault == "hang":
            self._answers.live[rid] = (None, self, body)
        elif latency is not None:
            number, budget = self._answers.number(body)
            seconds = latency.seconds(min(budget, len(self._answers.canned.replies[number])))
            timer = asyncio.get_running_loop().call_later(seconds, self._finish, rid, body, fault)
            self._answers.live[rid] = (timer, self, body)
        else:
            self._finish(rid, body, fault)

    def _finish(self, rid: bytes, body: bytes, fault: Fault) -> None:
        self._answers.live.pop(rid, None)
        if fault == "none":
            self._respond(200, self._answers.built(rid, body))
        elif fault == "reset":
            self._reset()
        elif fault == "not_http":
            self._transport.write(b"\x00\x01 no HTTP \r\n\r\n")
            self._transport.close()
        elif fault in ("reset_in_body", "close_after"):
            whole = self._answers.built(rid, body)
            sent = whole if fault == "close_after" else whole[: len(whole) // 2]
            self._transport.write(_head(200, len(whole)) + sent)
            self._transport.close()
        else:
            self._respond(*self._answers.faulty(body, fault))

    def _abort(self, rid: bytes) -> None:
        for name in [live for live in self._answers.live if live.startswith(rid)]:
            timer, connection, body = self._answers.live.pop(name)
            if timer is not None:
                timer.cancel()
            connection._respond(*self._answers.faulty(body, "abort"))
        self._respond(200, b"")

    def _respond(self, status: int, body: bytes) -> None:
        self._transport.write(_head(status, len(body)) + body)

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._transport.abort()


def _head(status: int, length: int) -> bytes:
    return b"HTTP/1.1 %d Canned\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, length)
