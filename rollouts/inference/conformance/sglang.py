"""The points of SGLang's protocol that a run relies on.

Invariant: each point leaves the server as it was: nothing runs, nothing is paused, the weights have their name. The
points pause the server, load its own weights again and flush its cache, so no other client should use it meanwhile.
The best point needs no weights: the server scores its replies, which finds a wrong temperature, logprobs of another
distribution, and K/V of other weights.

This module does not know other protocols; their points have the same names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint
from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, without_password
from rollouts.http.answers import message_of
from rollouts.http.client import KEEPALIVE_SECONDS, ConnectFailed, ConnectionLost
from rollouts.inference.conformance.points import MAX_ERROR_CHARACTERS, Finding, Point, Report, Skipped, ask_all
from rollouts.inference.conformance.probe import FREE, Probe, Reply, listed, opened
from rollouts.inference.weights import update_weights
from rollouts.inference.wire_errors import MayStillRun, error_of

__all__ = ["POINTS", "conformance_of"]

TOLERANCES = {"float32": 1e-3, "float16": 5e-2}
"""By the dtype that the server reports; 0.5 for any other."""
_LONGEST = 1 << 16
"""Contexts beyond this are not filled."""


async def conformance_of(
    endpoint: Endpoint, *, unsafe: bool = False, tolerance: float | None = None, idle_seconds: float = 7.0
) -> Report:
    """Ask every point of the server at the first URL of an endpoint.

    Args:
        endpoint: URL and keys.
        unsafe: also ask what may end the server.
        tolerance: largest difference of two logprobs of one token; by default by the server's dtype.
        idle_seconds: how long a connection stays idle until it is looked at.

    Raises:
        EndpointUnavailable: no server answers.
        EndpointRefused: it is not an SGLang server, or it wants another key.
    """
    async with opened(Probe, endpoint, tolerance=tolerance, idle_seconds=idle_seconds) as probe:
        await probe.describe()
        info = await probe.info("/server_info")
        kind = "rollouts engine, protocol of SGLang" if info.get("engine") == "rollouts" else "SGLang"
        behind = f", {len(probe.servers)} behind a router" if probe.is_router else ""
        results = await ask_all(POINTS, probe, unsafe=unsafe)
        differences = [str(text) for text in info.get("differences") or ()]
        return Report(f"{kind} {info.get('version', 'of an unknown version')}{behind}", results, differences)


# -- description ------------------------------------------------------------------------------------------------------


async def _description(probe: Probe) -> Finding:
    info = await probe.describe()
    came = f"model, version {info.version}, weights {info.weight_version!r}, room for {info.max_context} tokens"
    return Finding(info.model is not None and info.max_context is not None, came)


async def _limits(probe: Probe) -> Finding:
    info = await probe.info("/server_info")
    names = ("max_req_input_len", "max_total_num_tokens")
    return Finding(
        all(isinstance(info.get(name), int) for name in names), ", ".join(f"{n} {info.get(n)}" for n in names)
    )


async def _ready(probe: Probe) -> Finding:
    statuses = [status for status, _ in await probe.get("/ready")]
    return Finding(set(statuses) == {200}, f"status {listed(statuses)} while nothing runs")


async def _loads(probe: Probe) -> Finding:
    running = await probe.running()
    return Finding(running is not None, "no counts" if running is None else f"{running} requests")


# -- replies ----------------------------------------------------------------------------------------------------------


async def _reply(probe: Probe) -> Finding:
    rid = f"{probe.version()}-reply"
    reply = await probe.reply(probe.prompt("reply"), rid=rid)
    return _whole(reply, rid, 24)


async def _at_once(probe: Probe) -> Finding:
    findings: list[Finding] = []

    async def one(number: int) -> None:
        rid = f"{probe.version()}-{number:04d}"
        prompt = probe.prompt(f"at once {number}", 8 + number)
        findings.append(_whole(await probe.reply(prompt, rid=rid, sampling_params={"max_new_tokens": 8}), rid, 8))

    try:
        async with first_error() as tasks:
            for number in range(64):
                tasks.start_soon(one, number)
    finally:
        await probe.until_idle()  # else a server with a short queue refuses the requests of the next points
    wrong = [finding for finding in findings if not finding.ok]
    return wrong[0] if wrong else Finding(True, "64 whole replies")


def _whole(reply: Reply, rid: str, budget: int) -> Finding:
    checks = {
        f"id {reply.meta.get('id')!r}": reply.meta.get("id") == rid,
        f"prompt_tokens {reply.meta.get('prompt_tokens')} of {len(reply.prompt)}": reply.meta.get("prompt_tokens")
        == len(reply.prompt),
        f"{len(reply.ids)} ids of {budget}": len(reply.ids) == budget,
        "ids and logprob ids differ": reply.ids == reply.logprob_ids,
        f"finish {reply.finish}": reply.finish.get("type") == "length",
    }
    wrong = [text for text, ok in checks.items() if not ok]
    return Finding(not wrong, "; ".join(wrong) or "rid, prompt_tokens, ids and logprob ids as expected")


async def _versions(probe: Probe) -> Finding:
    reply = await probe.reply(probe.prompt("versions"))
    spans = reply.meta["weight_versions"]
    ends = [(span["start"], span["end"]) for span in spans]
    whole = [start for start, _ in ends] + [len(reply.ids)] == [0] + [end for _, end in ends]
    served = await probe.served()
    named = {span["version"] for span in spans}
    return Finding(whole and named <= served, f"{len(spans)} spans, {listed(named)}; the server: {listed(served)}")


async def _scored(probe: Probe, name: str, **sampling: float) -> Finding:
    reply = await probe.reply(probe.prompt(name), sampling_params=sampling)
    return await _agree(probe, reply)


async def _scored_after_hit(probe: Probe) -> Finding:
    first = await probe.reply(probe.prompt("hit", probe.prefix), session="hit")
    longer = [*first.prompt, *first.ids, *probe.prompt("hit, next", 8)]
    second = await probe.reply(longer, session="hit")
    found = await _agree(probe, second)
    return Finding(found.ok, f"{found.came}; {second.cached} of {len(longer)} prompt ids cached")


async def _agree(probe: Probe, reply: Reply) -> Finding:
    scores = await probe.scores(reply)
    tolerance = await _tolerance(probe)
    worst = max(abs(one - other) for one, other in zip(reply.logprobs, scores, strict=True))
    return Finding(len(scores) > 0 and worst <= tolerance, f"largest difference {worst:.1e} (tolerance {tolerance:g})")


async def _tempered(probe: Probe) -> Finding:
    firsts: dict[int, Reply] = {}
    for number in range(200):
        if number % 40 == 0:  # a model may be certain of the reply to a prompt
            prompt, firsts = probe.prompt(f"tempered {number}"), {}
        reply = await probe.reply(
            prompt, session=str(number), sampling_params={"temperature": 2.0, "max_new_tokens": 1}
        )
        firsts.setdefault(reply.ids[0], reply)
        if number % 40 > 10 and len(firsts) > 1:
            break
    if len(firsts) < 2:
        raise Skipped("40 draws at temperature 2 gave one token only, for each of 5 prompts")
    one, other = sorted(firsts.values(), key=lambda reply: reply.logprobs[0])[:: len(firsts) - 1]
    plain = (await probe.scores(one))[0] - (await probe.scores(other))[0]
    tempered = one.logprobs[0] - other.logprobs[0]
    came = f"two logprobs differ by {tempered:.4f}, at temperature 1 by {plain:.4f}"
    return Finding(abs(tempered - plain / 2) <= await _tolerance(probe), came)


async def _tolerance(probe: Probe) -> float:
    if probe.tolerance is not None:
        return probe.tolerance
    return TOLERANCES.get(str(await probe.dtype()), 0.5)


async def _seed(probe: Probe) -> Finding:
    prompt = probe.prompt("seed")
    sampling = {"temperature": 2.0, "sampling_seed": 7}
    replies = [(await probe.reply(prompt, session=str(n), sampling_params=sampling)).ids for n in range(2)]
    return Finding(replies[0] == replies[1], "honoured" if replies[0] == replies[1] else "ignored")


# -- ends -------------------------------------------------------------------------------------------------------------


async def _stop_id(probe: Probe) -> Finding:
    prompt = probe.prompt("stop")
    greedy = await probe.reply(prompt, session="stop", sampling_params={"temperature": 0})
    stop = greedy.ids[0]
    sampling = {"temperature": 0, "ignore_eos": False, "stop_token_ids": [stop]}
    reply = await probe.reply(prompt, session="stop", sampling_params=sampling)
    ok = reply.ids == [stop] and (reply.finish.get("type"), reply.finish.get("matched")) == ("stop", stop)
    return Finding(ok, f"{len(reply.ids)} ids, finish {reply.finish}")


async def _stop_string(probe: Probe) -> Finding:
    prompt = probe.prompt("stop string")
    greedy = await probe.reply(prompt, session="stop string", sampling_params={"temperature": 0})
    text = await probe.text(greedy)
    half = text[len(text) // 3 :]
    stop = re.search(r"[a-zA-Z0-9 ]{2}", half)
    if stop is None:
        raise Skipped("the server sends no text, or one without two letters in a row")
    sampling = {"temperature": 0, "stop": [stop[0]]}
    reply = await probe.reply(prompt, session="stop string", sampling_params=sampling)
    ok = (
        stop[0] in await probe.text(reply)
        and reply.ids == greedy.ids[: len(reply.ids)]
        and reply.finish.get("type") == "stop"
    )
    return Finding(ok, f"{len(reply.ids)} of {len(greedy.ids)} ids, finish {reply.finish}")


async def _stop_at_the_end(probe: Probe) -> Finding:
    prompt = probe.prompt("stop at the end")
    greedy = await probe.reply(prompt, sampling_params={"temperature": 0, "max_new_tokens": 8})
    stop = greedy.ids[0]
    budget = {"temperature": 0, "max_new_tokens": 1}
    ended = [await probe.reply(prompt, sampling_params={**budget, "ignore_eos": False, "stop_token_ids": [stop]})]
    text = await probe.text(await probe.reply(prompt, sampling_params=budget))
    if text.strip():
        ended.append(await probe.reply(prompt, sampling_params={**budget, "stop": [text]}))
    found = [str(reply.finish.get("type")) for reply in ended]
    return Finding(set(found) == {"stop"}, f"finish of a stop id and a stop string: {', '.join(found)}")


async def _abort(probe: Probe) -> Finding:
    rid = f"{probe.version()}-abort"
    async with probe.long("abort", 2000, rid=rid) as reply:
        statuses = await probe.abort(rid)
    ended = reply()
    ok = ended.finish.get("type") == "abort" and ended.ids == ended.logprob_ids and statuses == {200}
    return Finding(ok, f"finish {ended.finish.get('type')}, {len(ended.ids)} ids, {len(ended.logprobs)} logprobs")


async def _abort_unknown(probe: Probe) -> Finding:
    statuses = await probe.abort(f"{probe.version()}-none")
    return Finding(statuses == {200}, f"status {listed(statuses)}")


async def _same_rid(probe: Probe) -> Finding:
    rid = f"{probe.version()}-twice"
    async with probe.long("twice", 2000, rid=rid):
        error = await _refused(probe, {"input_ids": probe.prompt("twice"), "rid": rid}, session=rid)
        await probe.abort(rid)
    return Finding(isinstance(error, MayStillRun), _named(error))


async def _hang_up(probe: Probe) -> Finding:
    if await probe.running() is None:
        raise Skipped("the server does not count its requests")
    async with first_error() as tasks:

        async def call() -> None:
            sampling = {"max_new_tokens": await probe.budget(4000)}
            await probe.reply(probe.prompt("hang up"), sampling_params=sampling)

        tasks.start_soon(call)
        with anyio.move_on_after(10):
            while not await probe.running():  # noqa: ASYNC110 - another process
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    began = anyio.current_time()
    with anyio.move_on_after(20) as waited:
        while await probe.running():  # noqa: ASYNC110 - another process
            await anyio.sleep(0.02)
    return Finding(not waited.cancelled_caught, f"{anyio.current_time() - began:.1f} s until nothing runs")


# -- limits -----------------------------------------------------------------------------------------------------------


async def _too_long(
    probe: Probe, lengths: Callable[[int], Sequence[int]], *, budget: int = 1, may_serve: bool = True
) -> Finding:
    context = await _context(probe)
    refused, served = [], []
    for length in lengths(context):
        body = {"input_ids": probe.prompt("too long", length), "sampling_params": {**FREE, "max_new_tokens": budget}}
        error = await _refused(probe, body)
        if error is None:
            served.append(length)
        else:
            refused.append(error)
    wrong = [error for error in refused if not isinstance(error, ContextOverflow)]
    parts = [_named(error) for error in (wrong or refused)[-1:]]
    parts += [f"served: prompts of {listed(served)}, of {context}"] if served else []
    return Finding(not wrong and (may_serve or not served), "; ".join(parts))


async def _to_the_end(probe: Probe) -> Finding:
    context = await _context(probe)
    reply = await probe.reply(probe.prompt("to the end", context - 24))
    ok = 0 < len(reply.ids) <= 24 and reply.finish.get("type") == "length"
    return Finding(ok, f"{len(reply.ids)} of 24 ids, finish {reply.finish}")


async def _context(probe: Probe) -> int:
    context = await probe.context()
    if context is None or context > _LONGEST:
        raise Skipped(f"the context is {context}")
    return context


async def _bad_requests(probe: Probe) -> Finding:
    ids = probe.prompt("bad")
    bodies: list[dict[str, Any] | bytes] = [
        {"input_ids": ids, "sampling_params": {"temperature": -1}},
        {"input_ids": "x"},
        b"{",
    ]
    errors = [await _refused(probe, body) for body in bodies]
    return Finding(all(isinstance(error, EndpointRefused) for error in errors), "; ".join(map(_named, errors)))


async def _unknown_field(probe: Probe) -> Finding:
    body = {"input_ids": probe.prompt("field"), "sampling_params": {"max_new_tokens": 1, "no_such_field": 1}}
    error = await _refused(probe, body)
    return Finding(error is not None, _named(error))


async def _outside(probe: Probe) -> Finding:
    try:
        error = await _refused(probe, {"input_ids": [1, 2**31 - 1], "sampling_params": {"max_new_tokens": 1}})
    except (ConnectFailed, ConnectionLost) as lost:
        return Finding(False, f"the server ended: {lost}")
    return Finding(isinstance(error, EndpointRefused), _named(error))


async def _refused(probe: Probe, body: Mapping[str, Any] | bytes, session: str = "") -> EndpointError | None:
    """The error of a request; ``None`` if it was served."""
    status, payload = await probe.post(body, session)
    return None if status == 200 else error_of(status, message_of(payload))


# -- weights ----------------------------------------------------------------------------------------------------------


async def _pause(probe: Probe) -> Finding:
    async with probe.long("pause") as reply:
        try:
            came = await probe.pause()
        finally:
            with anyio.CancelScope(shield=True):
                await probe.unpause()
    found = await _agree(probe, reply())
    ok = found.ok and reply().finish.get("type") == "length"
    return Finding(ok, f"{came}, {len(reply().ids)} ids; {found.came}")


async def _update(probe: Probe) -> Finding:
    folder, before = await probe.folder(), await _version(probe)
    prompt = probe.prompt("update", probe.prefix)
    await probe.reply(prompt, session="update")
    try:
        async with probe.long("update, running") as reply:
            await update_weights(probe.endpoint, folder, probe.version())
        after = await probe.reply(prompt, session="update")
    finally:
        await _rename(probe, before)
    found = await _agree(probe, reply())
    versions = [span["version"] for span in after.meta["weight_versions"]]
    ok = found.ok and versions == [probe.version()] and after.cached == 0
    named = "the new version" if versions == [probe.version()] else f"versions {versions}"
    return Finding(ok, f"{named}, {after.cached} of {len(prompt)} ids cached after it; the running reply: {found.came}")


async def _busy_update(probe: Probe) -> Finding:
    folder, before = await probe.folder(), await _version(probe)
    try:
        async with probe.long("busy"):
            body = {"model_path": folder, "weight_version": probe.version()}
            answers = await probe.control("/update_weights_from_disk", body)
        await update_weights(probe.endpoint, folder, probe.version())  # flushes what the first may have left
    finally:
        await _rename(probe, before)
    texts = [f"{status}: {message_of(payload)}" for status, payload in answers]
    return Finding({status for status, _ in answers} == {200}, "; ".join(dict.fromkeys(texts)))


async def _stale_prefixes(probe: Probe) -> Finding:
    folder, before = await probe.folder(), await _version(probe)
    prompt = probe.prompt("stale", probe.prefix)
    await probe.reply(prompt, session="stale")
    try:
        await probe.load_in_place(folder)
        plain = await probe.reply(prompt, session="stale")
        apart = await probe.reply(prompt, session="stale", extra_key=probe.version())
    finally:
        with anyio.CancelScope(shield=True):
            await probe.unpause()
            await probe.clear()
            await _rename(probe, before)
    return Finding(
        apart.cached == 0, f"cached after it: {plain.cached} of {len(prompt)} ids, with an extra_key {apart.cached}"
    )


async def _extra_key(probe: Probe) -> Finding:
    prompt = probe.prompt("key", probe.prefix)
    keys = (None, None, "other", "other")
    cached = [(await probe.reply(prompt, session="key", **({"extra_key": key} if key else {}))).cached for key in keys]
    came = "cached: {} and then {}, with an extra_key {} and then {}".format(*cached)
    return Finding(cached[2] == 0 and cached[0] == 0, came)


async def _session(probe: Probe) -> Finding:
    ids, hits = probe.prompt("session", probe.prefix), []
    for turn in range(6):
        reply = await probe.reply(ids, session="session", sampling_params={"max_new_tokens": 4})
        hits.append(reply.cached)
        ids = [*ids, *reply.ids, *probe.prompt(f"session {turn}", 12)]
    found = sum(hit > 0 for hit in hits[1:])
    return Finding(found == 5, f"{found} of 5 later turns found their prefix")


async def _version(probe: Probe) -> str:
    return next(iter(await probe.served())) or "default"


async def _rename(probe: Probe, version: str) -> None:
    with anyio.CancelScope(shield=True):
        await probe.rename(version)


# -- connections ------------------------------------------------------------------------------------------------------


async def _idle(probe: Probe) -> Finding:
    url = urlsplit(probe.url)
    if url.scheme != "http" or url.hostname is None:
        raise Skipped("only asked over http")
    async with await anyio.connect_tcp(url.hostname, url.port or 80) as stream:
        await stream.send(f"GET /health HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n\r\n".encode())
        await stream.receive()
        began = anyio.current_time()
        with anyio.move_on_after(probe.idle_seconds):
            async for _ in stream:
                pass
            seconds = anyio.current_time() - began
            return Finding(seconds >= KEEPALIVE_SECONDS, f"closed after {seconds:.1f} s")
    return Finding(True, f"open after {probe.idle_seconds:g} s")


def _named(error: EndpointError | None) -> str:
    if error is None:
        return "served"
    text = f"{type(error).__name__}: {without_password(str(error))}"
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."


# -- the table --------------------------------------------------------------------------------------------------------

_EXACT = "law 8: trained logprobs are those of the weights that the token names"
_WRITE = "every reply: what is stored is what was sampled"
_UPDATES = "update_weights"

POINTS: Sequence[Point[Probe]] = (
    Point("describes itself", "GET /model_info, /server_info, /v1/models: model and room for prompt and reply",
          "preflight; the budget of a reply; refusing another model on resume", _description),
    Point("limits of a request", "GET /server_info: max_req_input_len, max_total_num_tokens",
          "the room of a request is exact where the KV pool is smaller than the context", _limits, relied=False),
    Point("ready", "GET /ready: 200", "a server that pauses or loads is waited for", _ready, relied=False),
    Point("load", "GET /v1/loads: requests that run and wait", "concurrency=\"adaptive\"", _loads, relied=False),
    Point("a whole reply", "24 ids with logprobs: rid, prompt_tokens, ids equal to the logprobs' ids, finish length",
          _WRITE, _reply),
    Point("64 replies at once", "64 prompts of different lengths: each its own reply", _WRITE, _at_once),
    Point("version spans", "weight_versions cover the reply, and name what /model_info names",
          "law 2: each token has its policy version", _versions),
    Point("own score, cold", "a reply's logprobs are those with which the server scores the same ids",
          _EXACT, functools.partial(_scored, name="cold")),
    Point("own score, after a prefix hit", "the same for the next turn of a conversation", _EXACT, _scored_after_hit),
    Point("temperature scales logprobs", "at temperature 2, the difference of two logprobs is half of that at 1",
          "law 8 and the trainer: the temperature of the record", _tempered),
    Point("top_k does not renormalise", "with top_k 3, the logprobs are those of the whole distribution",
          "SamplingParams: logprobs of a truncated distribution", functools.partial(_scored, name="top_k", top_k=3)),
    Point("greedy is untempered", "at temperature 0, the logprobs are those of temperature 1", _EXACT,
          functools.partial(_scored, name="greedy", temperature=0.0)),
    Point("stop ids stay", "a stop id ends the reply and is its last id", "the end of a turn is trained", _stop_id),
    Point("stop strings stay", "a stop string ends the reply, and its ids stay",
          "SamplingParams.stop: the stored ids are what was sampled", _stop_string),
    Point("a stop on the last token", "a stop id or string is the last token of the budget: finish stop, not length",
          "an episode is completed, not truncated", _stop_at_the_end, relied=False),
    Point("abort", "POST /abort_request by rid: the reply so far, with its logprobs",
          "cancelled and late rollouts; pauses of the policy", _abort),
    Point("abort of an unknown rid", "POST /abort_request: 200", "an abort that comes late", _abort_unknown),
    Point("a rid twice", "a second request of a running rid: 400 Duplicate request ID",
          "a request that a router sent twice is not stored twice", _same_rid),
    Point("hang-up", "the connection of a long reply is closed: it ends", "none: the client aborts by rid", _hang_up,
          relied=False),
    Point("longer than the context", "a prompt of the context, and of 10 more: an overflow that is recognised",
          "StopReason.CONTEXT_OVERFLOW instead of a failure",
          functools.partial(_too_long, lengths=lambda n: (n + 10, n), may_serve=False)),
    Point("almost the context", "prompts of the context less 6 to 1: served, or an overflow that is recognised",
          "StopReason.CONTEXT_OVERFLOW instead of a failure",
          functools.partial(_too_long, lengths=lambda n: tuple(range(n - 6, n)))),
    Point("a budget beyond the context", "prompt and budget exceed the context: an overflow that is recognised",
          "StopReason.CONTEXT_OVERFLOW instead of a failure",
          functools.partial(_too_long, lengths=lambda n: (n - 100,), budget=200)),
    Point("a budget to the end of the context", "prompt and a budget of 24 fill the context: finish length",
          "a reply that the server cuts is CONTEXT_OVERFLOW", _to_the_end),
    Point("bad requests", "a bad value, a wrong type, half a JSON: refused, not retried", "EndpointRefused",
          _bad_requests),
    Point("an unknown field", "a sampling field that does not exist: refused",
          "none: the client checks what comes back", _unknown_field, relied=False),
    Point("seed", "a seeded request twice: one reply", "sampling_seed", _seed, relied=False),
    Point("pause", "POST /pause_generation retract during a reply: it is held, continues, and is whole", _UPDATES,
          _pause),
    Point("update", "update_weights during a reply, with the server's own folder: new version, no old prefix",
          _UPDATES, _update),
    Point("update of a busy server", "POST /update_weights_from_disk during a reply, without a pause: 200",
          "none: update_weights flushes again in a pause", _busy_update, relied=False),
    Point("extra_key", "a known prompt with a new extra_key: nothing cached",
          "update_weights(while_running=\"in_place\"): no prefix of old weights", _extra_key),
    Point("prefixes after an update in place", "a known prompt after it, with a new extra_key: nothing cached",
          "update_weights(while_running=\"in_place\"): no prefix of old weights", _stale_prefixes),
    Point("one session, one server", "6 turns with one routing key: each finds its prefix",
          "the prefix cache: speed, not exactness", _session, relied=False),
    Point("an idle connection", "is not closed before the client discards it (4 s)",
          "none: a request on a closed connection is sent again", _idle, relied=False),
    Point("an id outside the vocabulary", "is refused, and the server lives on",
          "none: the client checks ids first", _outside, relied=False, unsafe=True),
)  # fmt: skip
"""In the order of asking; points that may end the server are last."""
