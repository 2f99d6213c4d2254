"""Replies of servers that are invalid, late, broken or unusual, each met by one run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.runs.reader import load_run
from rollouts.testing.replies import Answer, Fault
from rollouts.testing.server import StubServer
from scripts.faults.harness import MARK, RENDERER, Outcome, endpoint_at, judged, sound_reply
from scripts.faults.user_code import recipe_of

__all__ = ["REPLIES", "ReplyFault", "play_reply"]


@attrs.frozen
class ReplyFault:
    """One invalid, late, broken or unusual response of a server."""

    name: str
    fault: Fault | Answer
    accepted: bool = False
    """It may be trained on: it is complete, or an aborted part of a reply."""


def _body(*, drop: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """A reply of two ids; ``changes`` of ``output_ids``, of ``meta_info`` as a whole, or of its fields."""
    ids = changes.pop("output_ids", [MARK, MARK])
    meta = {
        "finish_reason": {"type": "stop", "matched": MARK},
        "output_token_logprobs": [[-0.5, MARK, None], [-0.5, MARK, None]],
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
    return _body(output_token_logprobs=[[-0.5, MARK, None], [value, MARK, None]])


def _spans(*edges: tuple[Any, Any]) -> dict[str, Any]:
    return _body(weight_versions=[{"version": "v1", "start": start, "end": end} for start, end in edges])


_BODIES: dict[str, dict[str, Any]] = {
    "an id of the size of the vocabulary": _ids(MARK, RENDERER.vocab_size),
    "an id of a million": _ids(MARK, 1_000_000),
    "an id of 2^31": _ids(MARK, 2**31),
    "an id of 2^64": _ids(MARK, 2**64 - 1),
    "a negative id": _ids(MARK, -1),
    "an id that is a float": _ids(MARK, 7.5),
    "an id that is a string": _ids(MARK, "7"),
    "an id that is null": _ids(MARK, None),
    "an id that is a bool": _ids(MARK, True),
    "an id that is a list": _ids(MARK, [7]),
    "ids that are a string": _body(output_ids="ZZ"),
    "ids that are an object": _body(output_ids={"0": MARK}),
    "fewer ids than logprobs": _body(output_ids=[MARK]),
    "more ids than logprobs": _body(output_ids=[MARK] * 3),
    "other ids than those of the logprobs": _body(output_ids=[MARK, MARK + 1]),
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
    "a logprob that is a string": _logprob("-0.5"),
    "a logprob that is a bool": _logprob(True),
    "a logprob that is a list": _logprob([-0.5]),
    "no finish reason": _body(drop=["finish_reason"]),
    "a finish reason that is null": _body(finish_reason=None),
    "a finish reason that is a string": _body(finish_reason="stop"),
    "a finish reason that is a number": _body(finish_reason=1),
    "an unknown finish reason": _body(finish_reason={"type": "tired"}),
    "an abort with a status of 500": _body(finish_reason={"type": "abort", "message": "no", "status_code": 500}),
    "an abort with a status of 400": _body(finish_reason={"type": "abort", "message": "no", "status_code": 400}),
    "weight versions with a gap": _spans((0, 1)),
    "weight versions that overlap": _spans((0, 2), (1, 2)),
    "weight versions beyond the end": _spans((0, 3)),
    "weight versions that begin below 0": _spans((-1, 2)),
    "weight versions with a string": _spans(("0", 2)),
    "weight versions that are a number": _body(weight_versions=7),
    "one prompt id too many": _body(prompt_tokens=10**6),
    "a negative number of prompt ids": _body(prompt_tokens=-1),
    "a number of prompt ids that is a string": _body(prompt_tokens="9"),
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
    "a string": b'"Z"',
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of replies": b"[" + _JSON + b"," + _JSON + b"]",
    "JSON that is cut": _JSON[:-9],
    "JSON with bytes behind it": _JSON + b"Z",
    "two documents": _JSON + b"\n" + _JSON,
    "NaN as a literal": _JSON.replace(b"-0.5", b"NaN"),
    "Infinity as a literal": _JSON.replace(b"-0.5", b"-Infinity"),
    "UTF-16": _JSON.decode().encode("utf-16"),
    "bytes that are not UTF-8": b"\xff\xfe\x00Z",
    "NUL bytes": b"\0" * 4096,
    "10,000 nested lists": b"[" * 10_000,
    "HTML": b"<html>Z</html>",
    "an event stream": b"data: " + _JSON + b"\n\ndata: [DONE]\n\n",
    "an OpenAI completion": b'{"object":"text_completion","choices":[{"text":"Z","finish_reason":"stop"}]}',
    "more bytes than were asked for": b" " * (1 << 22) + _JSON,
}

_STATUSES = "201 204 301 302 307 400 401 403 404 405 408 409 410 413 415 418 422 429 500 501 502 503 504 507 520 529"

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
    for status in map(int, _STATUSES.split()):
        yield ReplyFault(f"status {status}", Answer(status, _JSON if status != 204 else b""))
    for fault, accepted in _NAMED.items():
        yield ReplyFault(f"the stub's {fault}", fault, accepted)


REPLIES = tuple(_reply_faults())


async def play_reply(fault: ReplyFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run in which the second request gets the fault."""
    async with StubServer(sound_reply(random.Random(0)), faults=["none", fault.fault]) as server:

        def wrong() -> str:
            if len(server.requests) < 2:
                return "the fault was not met"
            false = not fault.accepted and any(MARK in sample.tokens for sample in load_run(folder, "all"))
            return "the reply is stored" if false else ""

        recipe = recipe_of(endpoint_at(server.url), batches=2)
        if fault.fault == "hang":
            recipe = attrs.evolve(recipe, config=attrs.evolve(recipe.config, rollout_seconds=1.0))
        return await judged(recipe, folder, wrong)
