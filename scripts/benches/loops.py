"""Three loops over the same episodes: ours, a lean hand-written one, and a naive one.

``lean`` is the lower bound: aiohttp, a typed decode, arrays, reused request bytes, and each new text tokenised once:
the prompt of a group once for all its samples. It encodes with ``fastokens`` as ours, or with ``tokenizers``, has no
checks and no retries, masks by position and parses no reply. ``naive`` is httpx, the standard library's json, lists,
and a file of JSON lines. ``ours`` is the manager with everything on: parser, checks, masks, metrics, deadlines, and the
journal.

All three return the samples of one round. Only CPU time of this process counts: servers run in their own processes.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anyio
import anyio.to_thread
import attrs
import msgspec
import numpy as np

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.errors import RolloutsError
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer.fast_encoder import Loader
from rollouts.runs.journal import Journal
from rollouts.runs.run_journal import RunJournal
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.types import FilterFn, RewardFn
from scripts.benches.workloads import Play

__all__ = ["Hand", "Round", "lean", "naive", "ours"]


@attrs.frozen
class Hand:
    """A sample of a hand-written loop."""

    tokens: Any
    mask: Any
    logprobs: Any


@attrs.frozen
class Round:
    """The samples and the cost of one loop."""

    samples: list[Any]
    cpu: float
    """Seconds of this process, all threads."""
    wall: float


def _timed(run: Callable[[], Awaitable[list[Any]]]) -> Round:
    with calm_collector():  # as in `rollouts run`, for each of the loops
        wall, cpu = time.perf_counter(), time.process_time()
        samples = anyio.run(run)
        return Round(samples, time.process_time() - cpu, time.perf_counter() - wall)


async def _side_by_side(play: Play, one: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Run all samples, with the concurrency of the workload."""
    samples: list[Any] = [None] * play.workload.samples
    numbers = iter(range(play.workload.samples))

    async def work() -> None:
        for number in numbers:
            samples[number] = await one(number)

    async with anyio.create_task_group() as tasks:
        for _ in range(play.workload.in_flight):
            tasks.start_soon(work)
    return samples


# -- lean -------------------------------------------------------------------------------------------------------------


class _Triple(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token: int


class _Meta(msgspec.Struct, gc=False):
    output_token_logprobs: list[_Triple]


class _Answer(msgspec.Struct, gc=False):
    meta_info: _Meta
    output_ids: list[int]


_DECODER = msgspec.json.Decoder(_Answer)
_JSON = {"Content-Type": "application/json"}


def lean(play: Play, url: str, *, encoder: Literal["fastokens", "tokenizers"] = "fastokens") -> Round:
    """The floor."""
    raw = play.renderer._model.codec._raw  # the tokenizer without anything around it
    assert raw is not None
    encode = raw.encode_batch_fast
    fast = Loader(raw)().result() if encoder == "fastokens" else None
    if encoder == "fastokens" and fast is None:
        raise SystemExit(f"fastokens does not read this tokenizer: {play.renderer}")
    openings: dict[int, list[int]] = {}
    params = msgspec.json.encode(_params(play))
    tail = b'],"return_logprob":true,"logprob_start_len":-1,"stream":false,"sampling_params":' + params + b"}"

    def tokenise(text: str) -> list[int]:
        packed = None if fast is None else fast.encode(text)
        ids: list[int] = encode([text], add_special_tokens=False)[0].ids if packed is None else packed.tolist()
        return ids

    def opening(number: int) -> list[int]:
        """The ids of a prompt, for all samples of its group."""
        group = number // play.n
        if group not in openings:
            openings[group] = tokenise(play.opening(number))
        return openings[group]

    async def one(session: aiohttp.ClientSession, number: int) -> Hand:
        head = b'{"rid":"%s","input_ids":[' % uuid.uuid4().hex.encode()
        context = opening(number)
        tokens, logprobs, mask = array("i", context), array("f", bytes(4 * len(context))), bytearray(len(context))
        sent = bytearray(msgspec.json.encode(context)[1:-1])
        for turn in range(play.workload.turns):
            async with session.post(f"{url}/generate", data=b"".join((head, sent, tail)), headers=_JSON) as response:
                answer = _DECODER.decode(await response.read())
            reply, triples = answer.output_ids, answer.meta_info.output_token_logprobs
            new = reply
            tokens.extend(reply)
            logprobs.extend([triple.logprob for triple in triples])
            mask += b"\1" * len(reply)
            if turn + 1 < play.workload.turns:
                bridge = tokenise(play.bridge(number, turn))
                tokens.extend(bridge)
                logprobs.frombytes(bytes(4 * len(bridge)))
                mask += bytes(len(bridge))
                new = reply + bridge
                sent += b"," + msgspec.json.encode(new)[1:-1]
        columns = np.array(tokens, np.int32), np.frombuffer(mask, np.bool_), np.array(logprobs, np.float32)
        return Hand(*columns)

    async def run() -> list[Any]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
            return await _side_by_side(play, functools.partial(one, session))

    return _timed(run)


# -- naive -----------------------------------------------------------------------------------------------------------


def naive(play: Play, url: str) -> Round:
    """httpx, json, lists, a line of JSON for each sample; each new text is tokenised once, unlike in most loops."""
    import httpx  # needed by this loop only

    params = _params(play)
    raw = play.renderer._model.codec._raw
    assert raw is not None
    decode = raw.decode
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 - closed below

    async def one(client: Any, number: int) -> Hand:
        tokens = play.renderer.encode(play.opening(number)).tolist()
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        for turn in range(play.workload.turns):
            body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True}
            answer = (await client.post(f"{url}/generate", json=body)).json()
            triples = answer["meta_info"]["output_token_logprobs"]
            said = decode(answer["output_ids"], skip_special_tokens=False)
            call = re.search(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
            if call is not None and json.loads(call[1])["name"] != "look":
                raise SystemExit("another call than the canned one")
            tokens += [token for _, token, _ in triples]
            logprobs += [logprob for logprob, _, _ in triples]
            mask += [1] * len(triples)
            if turn + 1 < play.workload.turns:
                bridge = play.renderer.encode(play.bridge(number, turn)).tolist()
                tokens, mask, logprobs = tokens + bridge, mask + [0] * len(bridge), logprobs + [0.0] * len(bridge)
        row = {"tokens": tokens, "loss_mask": mask, "rollout_log_probs": logprobs}
        await anyio.to_thread.run_sync(file.write, json.dumps(row) + "\n")
        return Hand(tokens, mask, logprobs)

    async def run() -> list[Any]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return await _side_by_side(play, functools.partial(one, client))

    with file:
        return _timed(run)


def _params(play: Play) -> dict[str, Any]:
    return {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": play.workload.reply,
        "skip_special_tokens": False, "no_stop_trim": True, "stop_token_ids": list(play.renderer.stop_token_ids),
    }  # fmt: skip


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(
    play: Play,
    url: str,
    journal: Path,
    *,
    reward_fn: RewardFn | None = None,
    filter_fn: FilterFn | None = None,
) -> Round:
    """The manager, in batches of as many rollouts as are in flight."""
    workload = play.workload
    generate_fn = functools.partial(
        generate_rollout_batch,
        environment_cls=play.environment_cls,
        endpoint=Endpoint(base_url=url),
        tokenizer=play.renderer,
        limits=Limits(max_turns=workload.turns + 1),
        sampling=SamplingParams(max_new_tokens=workload.reply),
    )

    async def run() -> list[Sample]:
        async with SGLangPolicy(Endpoint(base_url=url), vocab_size=play.renderer.vocab_size) as policy:
            config = RolloutConfig(
                batch_size=max(1, workload.in_flight // play.n),
                n_samples_per_prompt=play.n,
                over_sampling_factor=1,
                generate_fn=functools.partial(generate_fn, policy=policy),
                reward_fn=reward_fn,
                filter_fn=filter_fn,
                failure_budget=0,
            )
            samples: list[Sample] = []
            with Journal(journal) as held:
                async with AsyncRolloutManager(
                    config, DataBuffer(play.prompts), rollout_log=RunJournal(held)
                ) as manager:
                    while len(samples) < workload.samples:
                        samples += await manager.generate_batch()
                        await held.sync()
            if policy.totals.retries:
                raise RolloutsError("the server failed a request: this measures something else")
            return samples

    return _timed(run)
