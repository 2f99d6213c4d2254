"""Kinds of faults of servers, of user code and of programs, each played in a run of its own, and how a run held them.

A fault is held if it costs at most its rollout or group and nothing false is stored: the run finishes, ``verify``
finds no violation, and no invalid reply and no group of a failed function is in a batch. Invalid replies contain an id
that sound replies never contain.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import inspect
import math
import random
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.lowlevel
import attrs
import msgspec

from rollouts.dtypes import Endpoint, Limits, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, StepResult
from rollouts.errors import ConfigError, DataExhausted, RolloutsError, TokenMismatchError
from rollouts.programs import ModelServer
from rollouts.programs.recipe import function_recipe
from rollouts.recipe import Recipe, agent_recipe
from rollouts.renderer import renderer_for
from rollouts.runs.reader import load_run
from rollouts.runs.resume import begin
from rollouts.runs.run import RunResult, run
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.replies import Answer, Fault
from rollouts.testing.server import StubServer
from rollouts.training import Sample

__all__ = [
    "CODE",
    "GUESTS",
    "REPLIES",
    "CodeFault",
    "GuestFault",
    "Outcome",
    "ReplyFault",
    "play_code",
    "play_guest",
    "play_reply",
    "recipe_of",
    "sound_reply",
]

Outcome: TypeAlias = Literal["held", "silent", "ended"]
"""``ended``: the run ended early, or raised."""

_RENDERER = renderer_for(str(DEMO_MODEL))
_SOUND = tuple(map(int, _RENDERER.encode("The answer is 3.<|im_end|>")))
_CALL = tuple(
    int(token)
    for token in _RENDERER.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
)
_MARK = int(_RENDERER.encode("Z")[0])
"""An id of invalid replies only."""
assert _MARK not in _SOUND + _CALL


# -- replies of servers -----------------------------------------------------------------------------------------------


@attrs.frozen
class ReplyFault:
    """One invalid, late, broken or unusual response of a server."""

    name: str
    fault: Fault | Answer
    accepted: bool = False
    """It may be trained on: it is complete, or an aborted part of a reply."""


def _body(*, drop: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """A reply of two ids; ``changes`` of ``output_ids``, of ``meta_info`` as a whole, or of its fields."""
    ids = changes.pop("output_ids", [_MARK, _MARK])
    meta = {
        "finish_reason": {"type": "stop", "matched": _MARK},
        "output_token_logprobs": [[-0.5, _MARK, None], [-0.5, _MARK, None]],
        "weight_version": "v1",
    }
    body: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
    if "meta_info" in changes:
        body["meta_info"] = changes.pop("meta_info")
    meta.update(changes)
    for name in drop:
        body.pop(name, None)
        meta.pop(name, None)
    return body


def _ids(*ids: Any) -> dict[str, Any]:
    return _body(output_ids=list(ids), output_token_logprobs=[[-0.5, each, None] for each in ids])


def _logprob(value: Any) -> dict[str, Any]:
    return _body(output_token_logprobs=[[-0.5, _MARK, None], [value, _MARK, None]])


def _spans(*edges: tuple[Any, Any]) -> dict[str, Any]:
    return _body(weight_versions=[{"version": "v1", "start": start, "end": end} for start, end in edges])


_BODIES: dict[str, dict[str, Any]] = {
    "an id of the size of the vocabulary": _ids(_MARK, _RENDERER.vocab_size),
    "an id of a million": _ids(_MARK, 1_000_000),
    "an id of 2^31": _ids(_MARK, 2**31),
    "an id of 2^64": _ids(_MARK, 2**64 - 1),
    "a negative id": _ids(_MARK, -1),
    "an id that is a float": _ids(_MARK, 7.5),
    "an id that is a text": _ids(_MARK, "7"),
    "an id that is null": _ids(_MARK, None),
    "an id that is a bool": _ids(_MARK, True),
    "an id that is a list": _ids(_MARK, [7]),
    "ids that are a text": _body(output_ids="ZZ"),
    "ids that are an object": _body(output_ids={"0": _MARK}),
    "fewer ids than logprobs": _body(output_ids=[_MARK]),
    "more ids than logprobs": _body(output_ids=[_MARK] * 3),
    "other ids than those of the logprobs": _body(output_ids=[_MARK, _MARK + 1]),
    "no logprobs": _body(drop=["output_token_logprobs"]),
    "logprobs that are null": _body(output_token_logprobs=None),
    "logprobs that are an object": _body(output_token_logprobs={"0": -0.5}),
    "logprobs without ids": _body(output_token_logprobs=[-0.5, -0.5]),
    "a logprob with one field": _body(output_token_logprobs=[[-0.5], [-0.5]]),
    "a logprob of 5": _logprob(5.0),
    "a logprob of 0.01": _logprob(0.01),
    "a logprob of -1e300": _logprob(-1e300),
    "a logprob of 1e300": _logprob(1e300),
    "a logprob that is null": _logprob(None),
    "a logprob that is a text": _logprob("-0.5"),
    "a logprob that is a bool": _logprob(True),
    "a logprob that is a list": _logprob([-0.5]),
    "no finish reason": _body(drop=["finish_reason"]),
    "a finish reason that is null": _body(finish_reason=None),
    "a finish reason that is a text": _body(finish_reason="stop"),
    "a finish reason that is a number": _body(finish_reason=1),
    "an unknown finish reason": _body(finish_reason={"type": "tired"}),
    "an abort with a status of 500": _body(finish_reason={"type": "abort", "message": "no", "status_code": 500}),
    "an abort with a status of 400": _body(finish_reason={"type": "abort", "message": "no", "status_code": 400}),
    "weight versions with a gap": _spans((0, 1)),
    "weight versions that overlap": _spans((0, 2), (1, 2)),
    "weight versions beyond the end": _spans((0, 3)),
    "weight versions that begin below 0": _spans((-1, 2)),
    "weight versions with a text": _spans(("0", 2)),
    "weight versions that are a number": _body(weight_versions=7),
    "one prompt id too many": _body(prompt_tokens=10**6),
    "a negative number of prompt ids": _body(prompt_tokens=-1),
    "a number of prompt ids that is a text": _body(prompt_tokens="9"),
    "the id of another request": _body(id="another"),
    "an id of a request that is a number": _body(id=7),
    "meta_info that is null": _body(meta_info=None),
    "meta_info that is a list": _body(meta_info=[]),
    "no meta_info": _body(drop=["meta_info"]),
    "no ids and no logprobs": _body(drop=["output_ids", "output_token_logprobs"]),
}

_JSON = msgspec.json.encode(_body())
_RAW: dict[str, bytes] = {
    "an empty body": b"",
    "null": b"null",
    "a number": b"1",
    "a text": b'"Z"',
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of replies": b"[" + _JSON + b"," + _JSON + b"]",
    "JSON that is cut": _JSON[:-9],
    "JSON with bytes behind it": _JSON + b"Z",
    "two documents": _JSON + b"\n" + _JSON,
    "NaN as a literal": _JSON.replace(b"-0.5", b"NaN"),
    "Infinity as a literal": _JSON.replace(b"-0.5", b"-Infinity"),
    "UTF-16": _JSON.decode().encode("utf-16"),
    "bytes that are no UTF-8": b"\xff\xfe\x00Z",
    "NUL bytes": b"\0" * 4096,
    "10,000 nested lists": b"[" * 10_000,
    "HTML": b"<html>Z</html>",
    "an event stream": b"data: " + _JSON + b"\n\ndata: [DONE]\n\n",
    "an OpenAI completion": b'{"object":"text_completion","choices":[{"text":"Z","finish_reason":"stop"}]}',
    "more bytes than were asked for": b" " * (1 << 22) + _JSON,
}

_STATUSES: tuple[int, ...] = (
    201,
    204,
    301,
    302,
    307,
    400,
    401,
    403,
    404,
    405,
    408,
    409,
    410,
    413,
    415,
    418,
    422,
    429,
    500,
    501,
    502,
)
_STATUSES += (503, 504, 507, 520, 529)

_NAMED: dict[Fault, bool] = {
    "reset": False, "reset_in_body": False, "hang": True, "drip": True, "close_after": True, "error_500": False,
    "error_503": False, "error_string": False, "error_object": False, "error_type": False, "error_context": True,
    "error_budget": True, "error_in_200": False, "abort_503": False, "not_json": False, "not_http": False,
    "wrong_ids": False, "wrong_count": False, "wrong_rid": False, "nan": False, "nan_happened": False,
    "no_logprobs": False, "no_output_ids": True, "old": True, "abort": True, "abort_queued": True,
}  # fmt: skip
"""Faults of the stub with its own reply, and whether they may be trained on."""


def _reply_faults() -> Iterator[ReplyFault]:
    for name, body in _BODIES.items():
        yield ReplyFault(name, Answer(200, msgspec.json.encode(body)))
    for name, raw in _RAW.items():
        yield ReplyFault(name, Answer(200, raw))
    for status in _STATUSES:
        yield ReplyFault(f"status {status}", Answer(status, _JSON if status != 204 else b""))
    for fault, accepted in _NAMED.items():
        yield ReplyFault(f"the stub's {fault}", fault, accepted)


REPLIES = tuple(_reply_faults())


# -- user code --------------------------------------------------------------------------------------------------------

Place: TypeAlias = Literal["start", "step", "close", "reward", "group reward", "filter", "generate"]
SOUND: Any = object()
"""What an action returns if the function is to go on as a sound one."""


@attrs.frozen
class CodeFault:
    """One fault of an environment, a reward, a filter or a generate function."""

    place: Place
    name: str
    act: Callable[[Any], Any]
    """Called with the environment, the sample, the samples or the prompts; what it returns is returned."""
    accepted: bool = False
    """Its group may be in a batch: the value is valid, or the fault comes after the rollout."""
    ends: str = ""
    """Why it ought to end the run."""
    slow: bool = False
    """It takes more than a second, or leaves something behind for good."""


class _Panic(BaseException):
    """As those of Rust libraries: no ``Exception``; it cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("not printable")


def _raises(error: Callable[[], BaseException]) -> Callable[[Any], Any]:
    def act(subject: Any) -> Any:
        raise error()

    return act


def _cancels(subject: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return SOUND


async def _hangs(subject: Any) -> Any:
    await anyio.sleep_forever()


async def _swallows(subject: Any) -> Any:
    while True:
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()


def _recurses(subject: Any) -> Any:
    return _recurses(subject)


def _deep(times: int = 5000) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(times):
        value = {"in": value}
    return value


def _cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "raises OSError": lambda: OSError("no world today"),
    "raises KeyError": lambda: KeyError("plum"),
    "raises StopIteration": StopIteration,
    "raises StopAsyncIteration": StopAsyncIteration,
    "raises TimeoutError": TimeoutError,
    "raises MemoryError": MemoryError,
    "raises SystemExit": lambda: SystemExit(0),
    "raises GeneratorExit": GeneratorExit,
    "raises CancelledError": asyncio.CancelledError,
    "raises a BaseException that cannot be printed": _Panic,
    "raises a group of BaseExceptions": lambda: BaseExceptionGroup("g", [_Panic(), OSError()]),
    "raises ConfigError": lambda: ConfigError("forged"),
    "raises TokenMismatchError": lambda: TokenMismatchError("forged"),
    "raises DataExhausted": lambda: DataExhausted("forged"),
}
_ACTS: dict[str, Callable[[Any], Any]] = {
    "recurses without end": _recurses,
    "cancels its task": _cancels,
    "awaits for ever": _hangs,
}

_STEPS: dict[str, Any] = {
    "returns None": lambda: None,
    "returns a dict": lambda: {"messages": []},
    "returns a text": lambda: "done",
    "has a reward of NaN": lambda: StepResult(done=True, reward=math.nan),
    "has an infinite reward": lambda: StepResult(done=True, reward=math.inf),
    "has a reward that is a text": lambda: StepResult(done=True, reward="0.1"),  # type: ignore[arg-type]
    "has a metric that is a text": lambda: StepResult(done=True, metrics={"won": "yes"}),  # type: ignore[dict-item]
    "has a metric of NaN": lambda: StepResult(done=True, metrics={"won": math.nan}),
    "has metrics that are a list": lambda: StepResult(done=True, metrics=["won"]),  # type: ignore[arg-type]
    "has done that is a text": lambda: StepResult(done="yes"),  # type: ignore[arg-type]
    "has a message that is a number": lambda: StepResult([7]),  # type: ignore[list-item]
    "has a message of a wrong role": lambda: StepResult([Message("critic", "no")]),  # type: ignore[arg-type]
    "has a message with bytes": lambda: StepResult([Message("user", b"no")]),  # type: ignore[arg-type]
    "has messages that are None": lambda: StepResult(None),  # type: ignore[arg-type]
}
_STARTS: dict[str, Callable[[], Any]] = {
    "returns None": lambda: None,
    "returns a text": lambda: "hello",
    "returns no message": list,
    "returns texts": lambda: ["hello"],
    "returns a message of a wrong role": lambda: [Message("critic", "no")],  # type: ignore[arg-type]
}
_REWARDS: dict[str, Callable[[], Any]] = {
    "returns None": lambda: None,
    "returns a text": lambda: "good",
    "returns NaN": lambda: math.nan,
    "returns infinity": lambda: -math.inf,
    "returns a list": lambda: [1.0],
    "returns a dict": lambda: {"reward": 1.0},
    "returns a complex number": lambda: 1j,
    "returns 10^400": lambda: 10**400,
    "returns an awaitable": lambda: anyio.lowlevel.checkpoint(),
}
_EDITS: dict[str, Callable[[Any], Any]] = {
    "changes group_index": lambda sample: setattr(sample, "group_index", 10**6),
    "changes index": lambda sample: setattr(sample, "index", 10**6),
    "changes rollout_id": lambda sample: setattr(sample, "rollout_id", None),
    "clears completions": lambda sample: setattr(sample, "completions", []),
    "changes a token": lambda sample: setattr(sample, "tokens", [sample.tokens[0] + 1, *sample.tokens[1:]]),
    "adds a token": lambda sample: setattr(sample, "tokens", [*sample.tokens, _MARK]),
    "changes the mask": lambda sample: setattr(sample, "loss_mask", [1, *sample.loss_mask[1:]]),
    "changes a logprob": lambda sample: setattr(sample, "rollout_log_probs", [*sample.rollout_log_probs[:-1], -9.0]),
    "sets a status that does not exist": lambda sample: setattr(sample, "status", "banana"),
    "sets cyclic messages": lambda sample: setattr(sample, "messages", [_cyclic()]),
    "sets deep metadata": lambda sample: setattr(sample, "metadata", _deep()),
    "sets a cyclic label": lambda sample: setattr(sample, "label", _cyclic()),
    "sets a metric of NaN": lambda sample: sample.metrics.__setitem__("won", math.nan),
    "sets a metric that is a text": lambda sample: sample.metrics.__setitem__("won", "yes"),
    "sets a step reward of NaN": lambda sample: setattr(sample, "step_rewards", [math.nan]),
}


def _then(edit: Callable[[Sample], Any]) -> Callable[[Any], Any]:
    """Edit a sample, or the first of several, and go on as a sound function."""

    def act(subject: Any) -> Any:
        edit(subject[0] if isinstance(subject, Sequence) else subject)
        return SOUND

    return act


def _same(value: object) -> object:
    return value


def _given(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A function of one argument that returns a new value each time."""
    return lambda _: value()


def _swap(samples: Sequence[Sample]) -> Any:
    samples[0].index, samples[1].index = samples[1].index, samples[0].index
    return SOUND


def _code_faults() -> Iterator[CodeFault]:
    places: tuple[Place, ...] = ("start", "step", "close", "reward", "group reward", "filter", "generate")
    for place in places:
        for name, error in _ERRORS.items():
            # A package error of the generate function is one of the loop, not of user code.
            if not (place == "generate" and issubclass(type(error()), RolloutsError)):
                yield CodeFault(place, name, _raises(error), accepted=place == "close")
        for name, act in _ACTS.items():
            yield CodeFault(place, name, act, accepted=place == "close", slow=name == "awaits for ever")
        yield CodeFault(place, "swallows its cancellation", _swallows, accepted=place == "close", slow=True)
    for kind, message in ((ConfigError, "a setting is invalid"), (TokenMismatchError, "a law is broken")):
        reason = f"{message}, as the generate function of the package reports it"
        yield CodeFault("generate", f"raises {kind.__name__}", _raises(partial(kind, "no")), ends=reason)
    interrupt = "Ctrl-C ends a run"
    yield CodeFault("step", "raises KeyboardInterrupt", _raises(KeyboardInterrupt), ends=interrupt)
    yield CodeFault("reward", "raises KeyboardInterrupt", _raises(KeyboardInterrupt), ends=interrupt)
    for name, value in _STEPS.items():
        yield CodeFault("step", name, _given(value))
    yield CodeFault("step", "has a message of 2 MB", lambda world: _long_message(world), accepted=True)
    for name, value in _STARTS.items():
        yield CodeFault("start", name, _given(value))
    for name, value in _REWARDS.items():
        yield CodeFault("reward", name, _given(value))
    yield CodeFault("group reward", "returns one reward for all", lambda samples: [1.0])
    yield CodeFault("group reward", "returns a number", lambda samples: 1.0)
    yield CodeFault("group reward", "returns NaN", lambda samples: [math.nan] * len(samples))
    yield CodeFault("group reward", "returns texts", lambda samples: ["1"] * len(samples))
    for name, edit in _EDITS.items():
        for place in ("reward", "group reward", "filter"):
            yield CodeFault(place, name, _then(edit))
    yield CodeFault("filter", "swaps two indices", _swap)
    for name, value in {"NaN": math.nan, "a text": "1.0", "infinity": math.inf}.items():
        edit = partial(lambda sample, value: setattr(sample, "reward", value), value=value)
        yield CodeFault("filter", f"sets a reward of {name}", _then(edit))
    for name, value in {"None": None, "a text": "yes", "a number": 1, "a list": []}.items():
        yield CodeFault("filter", f"returns {name}", _given(partial(_same, value)))
    for name, value in {"None": None, "no sample": [], "a text": "sample", "a number": 7}.items():
        yield CodeFault("generate", f"returns {name}", _given(partial(_same, value)))


def _long_message(world: Any) -> StepResult:
    world.said = True
    return StepResult([Message("user", "x" * 2_000_000)]) if not world.turns else StepResult(done=True)


CODE = tuple(_code_faults())


# -- programs ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class GuestFault:
    """What one hostile program does to the gateway, among the sound programs of other rollouts."""

    name: str
    act: Callable[[ModelServer], Awaitable[Any]]


_LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def _chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": "Hello"}], **fields})


def _posts(
    body: Callable[[], bytes], *, times: int = 1, encoding: str = ""
) -> Callable[[ModelServer], Awaitable[None]]:
    """Send a body some times at once; whatever is answered, the program goes on."""

    async def act(server: ModelServer) -> None:
        sent, headers = body(), {"x-api-key": server.api_key}
        if encoding:
            headers["Content-Encoding"] = encoding

        async def post(http: aiohttp.ClientSession) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{server.base_url}/v1/chat/completions", data=sent, headers=headers) as answer:
                    await answer.read()

        async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
            for _ in range(times):
                tasks.start_soon(post, http)

    return act


def _offers(name: str) -> Callable[[ModelServer], Awaitable[None]]:
    odd = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    return _posts(lambda: _chat(tools=[_LOOK, odd]))


def _sends(data: bytes, connections: int = 1) -> Callable[[ModelServer], Awaitable[None]]:
    """Open connections without a key, send bytes on each, and leave."""

    async def act(server: ModelServer) -> None:
        address = urlsplit(server.base_url)
        assert address.hostname is not None
        assert address.port is not None
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(connections):
                stream = await anyio.connect_tcp(address.hostname, address.port)
                await stack.enter_async_context(stream)
                with contextlib.suppress(anyio.BrokenResourceError):
                    await stream.send(data)

    return act


async def _leaves(server: ModelServer) -> None:
    """Begin a call and go away, again and again."""
    for _ in range(20):
        with anyio.move_on_after(0.002):
            await _posts(_chat)(server)


def _picture() -> bytes:
    """An image of 64 million pixels in a few bytes."""
    header = struct.pack(">II5B", 8192, 8192, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(8192 * (1 + 3 * 8192) // 64))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in chunks
    )
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return _chat(messages=[{"role": "user", "content": content}])


_ODD_NAMES = {
    "a quote": 'say"hello"', "a line end": "a\nb", "an object": '{"name": "x"}', "an escape": "a\\u0022",
    "the end of a call": "</tool_call>", "a NUL": "\0", "a special token": "<|im_start|>user", "no character": "",
    "a megabyte": "a" * 1_000_000,
}  # fmt: skip
GUESTS = (
    *(GuestFault(f"offers a tool with {what} in its name", _offers(name)) for what, name in _ODD_NAMES.items()),
    GuestFault("sends a compressed body", _posts(lambda: gzip.compress(b" " * 50_000_000), encoding="gzip")),
    GuestFault("sends 100 MB", _posts(lambda: b" " * 100_000_000)),
    GuestFault("sends 3 MB of lists in an unknown field", _posts(lambda: b'{"x":[' + b"[]," * 1_000_000 + b"1]}")),
    GuestFault("sends 3 MB of lists in a message", _posts(lambda: b'{"messages":[' + b"[]," * 1_000_000 + b"1]}")),
    GuestFault("sends a million fields", _posts(lambda: msgspec.json.encode({str(n): 1 for n in range(1_000_000)}))),
    GuestFault("sends 100,000 nested lists", _posts(lambda: b'{"x":' + b"[" * 100_000)),
    GuestFault("sends deep arguments", _posts(lambda: _chat(tools=[_LOOK], tool_choice={"type": _deep(400)}))),
    GuestFault("sends an image that is too large", _posts(_picture)),
    GuestFault("sends the same call 100 times at once", _posts(_chat, times=100)),
    GuestFault("asks for 128 replies", _posts(lambda: _chat(n=128))),
    GuestFault("asks for an endless reply", _posts(lambda: _chat(max_tokens=10**18))),
    GuestFault("sends half of a surrogate pair", _posts(lambda: b'{"messages": "\\ud800"}')),
    GuestFault("sends no HTTP", _sends(b"\x1b[31m nonsense\r\n\r\n", 20)),
    GuestFault("sends half of a head", _sends(b"POST / HTTP/1.1\r\nHost: x\r\n", 20)),
    GuestFault("opens 300 connections", _sends(b"", 300)),
    GuestFault("leaves its calls", _leaves),
)


# -- runs of them -----------------------------------------------------------------------------------------------------

Choose: TypeAlias = Callable[[Sequence[Place], int | None], CodeFault | None]
"""Return the fault of a function for a group, if it has one at these places."""


async def _acted(fault: CodeFault | None, place: Place, subject: Any) -> Any:
    if fault is None or fault.place != place:
        return SOUND
    value = fault.act(subject)
    return await value if inspect.iscoroutine(value) and fault.name != "returns an awaitable" else value


class HostileWorld(CalculatorEnvironment):
    """A calculator with the fault that is chosen for its prompt."""

    choose: Choose

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.turns = 0
        self.fault = type(self).choose(("start", "step", "close"), prompt.group_index)
        value = await _acted(self.fault, "start", self)
        return await super().start(prompt) if value is SOUND else value

    async def step(self, reply: Message) -> StepResult:
        value = await _acted(self.fault, "step", self)
        self.turns += 1
        return await super().step(reply) if value is SOUND else value

    async def close(self) -> None:
        await _acted(self.fault, "close", self)


def recipe_of(url: str, choose: Choose, *, batches: int, **config: Any) -> Recipe:
    """A recipe of groups of two calculator episodes, with functions that fail where ``choose`` says so."""
    world = type("World", (HostileWorld,), {"choose": staticmethod(choose)})
    endpoint = Endpoint(base_url=url, model=str(DEMO_MODEL), request_seconds=5.0, max_retries=3)

    async def reward(sample: Sample) -> Any:
        value = await _acted(choose(("reward",), sample.group_index), "reward", sample)
        return float(len(sample.tokens)) if value is SOUND else value

    async def group_reward(samples: Sequence[Sample]) -> Any:
        value = await _acted(choose(("group reward",), samples[0].group_index), "group reward", samples)
        return [1.0] * len(samples) if value is SOUND else value

    async def keep(samples: Sequence[Sample]) -> Any:
        value = await _acted(choose(("filter",), samples[0].group_index), "filter", samples)
        return True if value is SOUND else value

    group_rm = config.pop("group_rm", False)
    made = agent_recipe(
        "faults",
        endpoint,
        world,
        [f"What is 1 + {number}?" for number in range(50)],
        reward_fn=group_reward if group_rm else reward,
        n_samples_per_prompt=2,
        batches=batches,
        max_new_tokens=64,
        epochs=None,
        limits=Limits(max_turns=3, step_seconds=0.3, close_seconds=0.3),
    )
    agents = made.config.generate_fn

    async def generate(prompts: Sequence[Prompt]) -> Any:
        value = await _acted(choose(("generate",), prompts[0].group_index), "generate", prompts)
        return await agents(prompts) if value is SOUND else value

    late = {"reward_seconds": 0.5, "filter_seconds": 0.5, "rollout_seconds": 5.0}
    sizes = {"batch_size": 2, "patience": 10**6, "failure_budget": 1.0}
    functions = {"generate_fn": generate, "filter_fn": keep, "group_rm": group_rm}
    return attrs.evolve(made, config=attrs.evolve(made.config, **{**late, **sizes, **functions, **config}))


async def stored(recipe: Recipe, folder: Path, **options: Any) -> RunResult:
    """Run it with a journal in a folder."""
    writer = RunWriter(folder, recipe.describe(), format="jsonl")
    run_journal = begin(folder, recipe.describe(), recipe.data_buffer)
    with run_journal.journal:
        return await run(recipe, writer, run_journal=run_journal, **options)


def sound_reply(rng: random.Random) -> Callable[[list[int], dict[str, Any]], Sequence[int]]:
    """A script of calls and answers."""
    return lambda ids, sampling: _CALL if rng.random() < 0.3 else _SOUND


async def play_reply(fault: ReplyFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run in which the second request gets the fault."""
    async with StubServer(sound_reply(random.Random(0)), faults=["none", fault.fault]) as server:
        recipe = recipe_of(server.url, lambda places, group: None, batches=2)
        if fault.fault == "hang":
            recipe = attrs.evolve(recipe, config=attrs.evolve(recipe.config, rollout_seconds=1.0))
        outcome, error = await _outcome(recipe, folder)
        if outcome == "held" and len(server.requests) < 2:
            return "silent", "the fault was not met"
    if outcome == "held" and not fault.accepted and any(_MARK in sample.tokens for sample in load_run(folder, "all")):
        return "silent", "the reply is stored"
    return outcome, error


async def play_code(fault: CodeFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run in which the second group gets the fault."""
    bad = 1
    met: list[int] = []

    def choose(places: Sequence[Place], group: int | None) -> CodeFault | None:
        if fault.place in places and group == bad:
            met.append(bad)
            return fault
        return None

    async with StubServer(sound_reply(random.Random(0))) as server:
        recipe = recipe_of(server.url, choose, batches=2, group_rm=fault.place == "group reward", max_attempts=1)
        outcome, error = await _outcome(recipe, folder)
    if outcome == "held" and not met:
        return "silent", "the fault was not met"
    if outcome == "held" and not fault.accepted and any(sample.group_index == bad for sample in load_run(folder)):
        return "silent", "its group is in a batch"
    return outcome, error


async def play_guest(fault: GuestFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run of programs of which the first, and then one in six, is hostile; the sound ones are in batches."""
    met: list[int] = []
    lost: list[str] = []

    async def agent(server: ModelServer, prompt: Prompt) -> float:
        assert prompt.index is not None
        if prompt.index % 6 == 0:
            met.append(prompt.index)
            await fault.act(server)
            return 0.0
        history: list[Any] = [{"role": "user", "content": prompt.messages[0].text}]
        async with aiohttp.ClientSession(headers={"x-api-key": server.api_key}) as http:
            for _ in range(2):
                async with http.post(
                    f"{server.base_url}/v1/chat/completions", json={"messages": history, "tools": [_LOOK]}
                ) as answer:
                    whole = await answer.json()
                    if answer.status != 200:
                        lost.append(str(whole))
                history += [whole["choices"][0]["message"], {"role": "user", "content": "And?"}]
        return 1.0

    async with StubServer(lambda ids, sampling: _SOUND) as server:
        endpoint = Endpoint(base_url=server.url, model=str(DEMO_MODEL), request_seconds=5.0, max_retries=3)
        prompts = [f"What is 1 + {number}?" for number in range(12)]
        recipe = function_recipe(
            "guests",
            endpoint,
            agent,
            prompts,
            n_samples_per_prompt=1,
            keep="all",
            batches=2,
            max_new_tokens=64,
            epochs=None,
        )
        config = attrs.evolve(recipe.config, batch_size=5, patience=10**6, failure_budget=1.0, max_attempts=1)
        outcome, error = await _outcome(attrs.evolve(recipe, config=config), folder)
    if outcome == "held" and (not met or lost):
        return "silent", lost[0] if lost else "the fault was not met"
    return outcome, error


async def _outcome(recipe: Recipe, folder: Path) -> tuple[Outcome, str]:
    try:
        with anyio.fail_after(60):
            result = await stored(recipe, folder)
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - the finding
        return "ended", repr(error)[:300]
    result.accounting.check()
    if result.status != "finished":
        return "ended", str(result.error)[:300]
    report = verify_run(folder)
    return ("held", "") if report.ok else ("silent", str(report.violations[0])[:300])
