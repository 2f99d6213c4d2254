"""Abort, pause, weights, cache and health."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.engine.frontend import Faults, Frontend
from rollouts.engine.loading import load_folder

PROMPT = [(17 * number) % 500 for number in range(30)]
LONG = {"ignore_eos": True, "max_new_tokens": 900}
WHOLE = {"ignore_eos": True, "max_new_tokens": 200}
"""Of a request that runs while a test does something else, and to its end."""
SHORT = {"ignore_eos": True, "max_new_tokens": 5}


class Running:
    """A request that has sampled tokens and runs for long."""

    def __init__(self, client: Any, **fields: Any) -> None:
        ask = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True, **fields}
        self._events = client.stream(**ask)
        self.last: Any = None

    async def begin(self) -> Running:
        self.last = await anext(self._events)
        return self

    async def end(self) -> Any:
        """The last event."""
        async for event in self._events:
            if event != "[DONE]":
                self.last = event
        return self.last


async def begun(client: Any, **fields: Any) -> Running:
    return await Running(client, **fields).begin()


@contextlib.asynccontextmanager
async def in_background(client: Any, answers: list[Any], **fields: Any) -> AsyncIterator[None]:
    """A request that is sent and not waited for until the end of the block."""
    ask = {"input_ids": [9, 9, 9], "sampling_params": SHORT, **fields}

    async def call() -> None:
        answers.append(await client.generate(**ask))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        yield


async def queued(client: Any, count: int) -> None:
    """Wait until so many requests are in the queue."""
    with anyio.fail_after(10):
        while (await client.get("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] != count:
            pass


# -- abort ------------------------------------------------------------------------------------------------------------


async def test_an_aborted_request_answers_with_what_it_has(client: Any) -> None:
    """Status 200, the partial ids and their logprobs, and a reason of type abort."""
    running = await begun(client, rid="one")
    status, content = await client.post("/abort_request", rid="one")
    answer = await running.end()
    assert (status, content) == (200, "")
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", None)
    assert 0 < len(answer["output_ids"]) < 900
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


async def test_aborting_a_known_rid_aborts_all_that_begin_with_it(client: Any) -> None:
    """A quirk of SGLang: traj-1 also aborts traj-10; a prefix that is not itself a rid does nothing."""
    runs = {rid: await begun(client, rid=rid) for rid in ("traj-1", "traj-10", "other")}
    await client.post("/abort_request", rid="traj")
    await client.post("/abort_request", rid="unknown")
    await client.post("/abort_request", body={})
    await client.post("/abort_request", rid="traj-1")
    ends = [(await runs[rid].end())["meta_info"]["finish_reason"]["type"] for rid in ("traj-1", "traj-10")]
    status, _ = await client.post("/generate", input_ids=[1], rid="other")
    await client.post("/abort_request", abort_all=True)
    assert ends == ["abort", "abort"]
    assert status == 400
    assert (await runs["other"].end())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_in_the_queue_has_a_shape_of_its_own(client: Any) -> None:
    """Without output, without a status code, and without the counts of the prompt."""
    await client.post("/pause_generation", mode="retract")
    answers: list[Any] = []
    async with in_background(client, answers, rid="waits"):
        await queued(client, 1)
        await client.post("/abort_request", rid="waits")
    meta = answers[0]["meta_info"]
    assert answers[0]["output_ids"] == []
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in meta
    assert "cached_tokens" not in meta


async def test_a_rid_in_flight_is_taken(client: Any) -> None:
    """The second request with the same rid is refused, the first continues."""
    running = await begun(client, rid="one")
    status, answer = await client.post("/generate", input_ids=[1], rid="one")
    await client.post("/abort_request", rid="one")
    assert status == 400
    assert "Duplicate request ID detected" in answer["error"]["message"]
    assert (await running.end())["meta_info"]["finish_reason"]["type"] == "abort"


# -- pause ------------------------------------------------------------------------------------------------------------


async def test_pause_by_abort_ends_what_runs_and_holds_what_comes(client: Any) -> None:
    """Partial output for the old; the new waits without an error until generation resumes."""
    running = await begun(client)
    assert (await client.post("/pause_generation", body={}))[0] == 200
    assert (await running.end())["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.get("/ready"))[0] == 503
    assert (await client.post("/flush_cache"))[0] == 200
    answers: list[Any] = []
    async with in_background(client, answers):
        await queued(client, 1)
        assert answers == []
        await client.post("/continue_generation", body={})
    assert len(answers[0]["output_ids"]) == 5
    assert (await client.get("/ready"))[0] == 200


async def test_retracted_requests_are_recomputed_with_the_new_weights(
    client: Any, other_weights: Path, reference: Callable[..., list[float]]
) -> None:
    """One response, split by version spans; each part has the logprobs of its weights."""
    running = await begun(client, sampling_params=WHOLE)
    await client.post("/pause_generation", mode="retract")
    flushed, _ = await client.post("/flush_cache")
    status, update = await client.post("/update_weights_from_disk", model_path=str(other_weights), weight_version="v2")
    await client.post("/continue_generation", body={})
    answer = await running.end()
    meta = answer["meta_info"]
    ids, split = answer["output_ids"], meta["weight_versions"][0]["end"]
    assert (flushed, status, update["success"], update["num_paused_requests"]) == (200, 200, True, 1)
    assert meta["num_retractions"] == 1
    assert meta["finish_reason"] == {"type": "length", "length": 200}
    assert meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": split}, {"version": "v2", "start": split, "end": 200},
    ]  # fmt: skip
    assert meta["weight_version"] == "v2"
    logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert logprobs[:split] == pytest.approx(reference(PROMPT, ids)[:split], abs=1e-3)
    assert logprobs[split:] == pytest.approx(reference(PROMPT, ids, folder=other_weights)[split:], abs=1e-3)


async def test_in_place_keeps_the_cache_and_refuses_to_flush_it(client: Any, other_weights: Path) -> None:
    """With flush_cache the weights change and the answer is still a 400; without, the request spans both versions."""
    running = await begun(client, sampling_params=WHOLE)
    await client.post("/pause_generation", mode="in_place")
    assert (await client.get("/flush_cache"))[0] == 400
    ask = {"model_path": str(other_weights), "weight_version": "v2"}
    status, refused = await client.post("/update_weights_from_disk", **ask)
    assert (status, refused["success"]) == (400, False)
    assert "Weights were updated, but the cache was not flushed" in refused["message"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "default"
    assert (await client.post("/update_weights_from_disk", **ask, flush_cache=False))[0] == 200
    await client.post("/continue_generation", body={})
    meta = (await running.end())["meta_info"]
    assert meta["num_retractions"] == 0
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "v2"]
    assert meta["weight_versions"][1]["end"] == 200


async def test_a_retracted_request_keeps_its_partial_output_when_aborted(client: Any) -> None:
    """It stands in the queue, but it did start."""
    running = await begun(client, rid="one")
    await client.post("/pause_generation", mode="retract")
    await client.post("/abort_request", rid="one")
    answer = await running.end()
    assert len(answer["output_ids"]) > 0
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/pause_generation", b""), ("/pause_generation", b'{"mode": "x"}'), ("/continue_generation", b"")],
)
async def test_pausing_needs_a_body(client: Any, path: str, body: bytes) -> None:
    """No body or another mode is a 400, as SGLang has it."""
    assert (await client.post(path, body))[0] == 400


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_an_update_waits_for_what_runs_and_drops_old_prefixes(
    client: Any, other_weights: Path, reference: Callable[..., list[float]]
) -> None:
    """The running request ends with its weights; the next has the new ones and no stale K/V."""
    running = await begun(client, sampling_params=WHOLE)
    ask = {"model_path": str(other_weights), "weight_version": "v2"}
    status, _ = await client.post("/update_weights_from_disk", **ask)
    before = await running.end()
    after = await client.generate(input_ids=PROMPT, sampling_params=SHORT, return_logprob=True)
    assert status == 200
    assert [span["version"] for span in before["meta_info"]["weight_versions"]] == ["default"]
    assert before["meta_info"]["finish_reason"]["type"] == "length"
    assert (after["meta_info"]["weight_version"], after["meta_info"]["cached_tokens"]) == ("v2", 0)
    logprobs = [logprob for logprob, _, _ in after["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(reference(PROMPT, after["output_ids"], folder=other_weights), abs=1e-4)


async def test_an_update_whose_client_has_gone_is_reported(other_weights: Path) -> None:
    """The engine has the new weights then; folder and version in ``/model_info`` are theirs."""
    begun, released = threading.Event(), threading.Event()

    class Slow(Frontend):
        def _replace(self, *arguments: Any) -> bool:
            begun.set()
            assert released.wait(60)
            return super()._replace(*arguments)

    loaded = load_folder(DEMO_MODEL)
    frontend = Slow(loaded, 1, max_queued=None, health_seconds=10, faults=Faults())
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(functools.partial(frontend.update_weights, other_weights, "v2", flush=True))
            await anyio.to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()
        released.set()
        await frontend.call(lambda: None)
        assert (frontend.path, frontend.version) == (other_weights, "v2")
    finally:
        released.set()
        await frontend.stop()


async def stale(client: Any, reference: Callable[..., list[float]], folder: Path) -> tuple[str, int, float]:
    """A new conversation: its version, the tokens that it found computed, and how wrong its logprobs are."""
    after = await client.generate(input_ids=PROMPT, sampling_params=SHORT, return_logprob=True)
    logprobs = [logprob for logprob, _, _ in after["meta_info"]["output_token_logprobs"]]
    expected = reference(PROMPT, after["output_ids"], folder=folder)
    error = max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True))
    return after["meta_info"]["weight_version"], after["meta_info"]["cached_tokens"], error


@pytest.mark.parametrize("pause", [None, "retract", "in_place"])
async def test_prefixes_of_old_weights_live_on_until_they_are_flushed(
    client: Any, other_weights: Path, reference: Callable[..., list[float]], pause: str | None
) -> None:
    """With ``flush_cache: false`` a new conversation reads the K/V of the old weights under the new version."""
    await client.generate(input_ids=PROMPT, sampling_params=SHORT)
    if pause is not None:
        await client.post("/pause_generation", mode=pause)
    ask = {"model_path": str(other_weights), "weight_version": "v2", "flush_cache": False}
    assert (await client.post("/update_weights_from_disk", **ask))[0] == 200
    await client.post("/continue_generation", body={})
    version, cached, error = await stale(client, reference, other_weights)
    assert (version, cached) == ("v2", len(PROMPT) - 1)
    assert error > 1e-2
    assert (await client.post("/flush_cache"))[0] == 200
    version, cached, error = await stale(client, reference, other_weights)
    assert (version, cached) == ("v2", 0)
    assert error < 1e-4


async def test_an_update_that_waited_may_change_the_weights_and_not_the_cache(
    serving: Callable[..., Any], other_weights: Path, reference: Callable[..., list[float]]
) -> None:
    """SGLang's race as a fault: a 400, tokens of the new version, and the old version in ``/model_info``."""
    async with serving(unflushed_updates=True) as client:
        running = await begun(client, sampling_params=WHOLE)
        ask = {"model_path": str(other_weights), "weight_version": "v2"}
        status, answer = await client.post("/update_weights_from_disk", **ask)
        await running.end()
        _, info = await client.get("/model_info")
        version, cached, error = await stale(client, reference, other_weights)
        idle, _ = await client.post("/update_weights_from_disk", **ask)
        _, named = await client.get("/model_info")
    assert (status, answer["success"]) == (400, False)
    assert "Weights were updated, but the cache was not flushed" in answer["message"]
    assert (info["weight_version"], info["model_path"]) == ("default", str(DEMO_MODEL))
    assert (version, cached) == ("v2", len(PROMPT) - 1)
    assert error > 1e-2
    assert (idle, named["weight_version"], named["model_path"]) == (200, "v2", str(other_weights))


async def test_a_flush_that_lies_is_a_fault(
    serving: Callable[..., Any], other_weights: Path, reference: Callable[..., list[float]]
) -> None:
    """With ``stale_cache`` an update and a flush report success, and the K/V of the old weights stay."""
    async with serving(stale_cache=True) as client:
        await client.generate(input_ids=PROMPT, sampling_params=SHORT)
        ask = {"model_path": str(other_weights), "weight_version": "v2"}
        assert (await client.post("/update_weights_from_disk", **ask))[0] == 200
        assert (await client.post("/flush_cache"))[0] == 200
        version, cached, error = await stale(client, reference, other_weights)
    assert (version, cached) == ("v2", len(PROMPT) - 1)
    assert error > 1e-2


async def test_a_cache_without_namespaces_is_a_fault(serving: Callable[..., Any]) -> None:
    """With ``shared_prefixes`` an ``extra_key`` has no effect."""
    async with serving(shared_prefixes=True) as client:
        await client.generate(input_ids=PROMPT, sampling_params=SHORT)
        answer = await client.generate(input_ids=PROMPT, sampling_params=SHORT, extra_key="other")
    assert answer["meta_info"]["cached_tokens"] == len(PROMPT) - 1


async def test_a_model_under_another_name_is_a_fault(
    serving: Callable[..., Any], other_weights: Path, reference: Callable[..., list[float]]
) -> None:
    """With ``reported_model`` the server names a folder whose weights it does not serve."""
    async with serving(reported_model=other_weights) as client:
        _, info = await client.get("/model_info")
        _, _, error = await stale(client, reference, DEMO_MODEL)
    assert info["model_path"] == str(other_weights)
    assert error < 1e-4


async def test_server_info_lists_the_differences_from_sglang(client: Any) -> None:
    """A client can print in what this server differs from the one whose version it reports."""
    _, info = await client.get("/server_info")
    assert info["engine"] == "rollouts"
    assert any("vocabulary" in text for text in info["differences"])


async def test_idle_connections_are_closed(serving: Callable[..., Any]) -> None:
    """As SGLang's server does after 5 seconds; a test may choose fewer."""
    async with serving(keep_alive_seconds=0.05) as client:
        host, _, port = client.url.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with anyio.fail_after(5):
                received = b"".join([data async for data in stream])
    assert received.startswith(b"HTTP/1.1 200 ")


async def test_an_update_can_abort_what_runs(client: Any, other_weights: Path) -> None:
    """``abort_all_requests`` does not wait for replies to end."""
    running = await begun(client)
    status, _ = await client.post("/update_weights_from_disk", model_path=str(other_weights), abort_all_requests=True)
    assert status == 200
    assert (await running.end())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_bad_path_changes_nothing(client: Any, tmp_path: Path, tiny_folder: Path) -> None:
    """A folder without a model, or with another model, is a 400 with success: false, and the old weights serve on."""
    before = await client.generate(input_ids=PROMPT, sampling_params={**SHORT, "temperature": 0})
    for folder in (tmp_path, tiny_folder):
        ask = {"model_path": str(folder), "weight_version": "v2"}
        status, answer = await client.post("/update_weights_from_disk", **ask)
        assert (status, answer["success"]) == (400, False)
    after = await client.generate(input_ids=PROMPT, sampling_params={**SHORT, "temperature": 0})
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"


async def test_naming_the_weights_aborts_everything_by_default(client: Any) -> None:
    """The default of ``abort_all_requests`` is a trap that clients must know."""
    running = await begun(client)
    kept = await client.post("/update_weight_version", new_version="v1", abort_all_requests=False)
    await client.generate(input_ids=[9, 9, 9], sampling_params=SHORT)  # steps that the running request takes too
    lost = await client.post("/update_weight_version", new_version="v2")
    answer = await running.end()
    assert (kept[0], lost[0]) == (200, 200)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]][:2] == ["default", "v1"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "v2"


# -- cache and health -------------------------------------------------------------------------------------------------


async def test_a_flush_forgets_all_prefixes(client: Any) -> None:
    """GET and POST; what was cached is computed again."""
    ask = {"input_ids": PROMPT, "sampling_params": SHORT}
    cached = [(await client.generate(**ask))["meta_info"]["cached_tokens"] for _ in range(2)]
    assert (await client.get("/flush_cache"))[0] == 200
    cached.append((await client.generate(**ask))["meta_info"]["cached_tokens"])
    assert cached == [0, len(PROMPT) - 1, 0]


async def test_a_flush_fails_while_requests_run(client: Any) -> None:
    """Without a timeout at once; with one it waits for an idle engine."""
    running = await begun(client, sampling_params=WHOLE)
    busy, text = await client.post("/flush_cache")
    patient, _ = await client.post("/flush_cache?timeout=30")
    wrong, _ = await client.post("/flush_cache?timeout=soon")
    assert (busy, text.strip(), patient, wrong) == (400, "Flush cache failed.", 200, 400)
    assert (await running.end())["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
async def test_health_samples_a_token_and_blocks_while_paused(serving: Callable[..., Any], path: str) -> None:
    """The health check of a paused engine fails at its deadline; ``/ready`` distinguishes paused from dead."""
    async with serving(health_seconds=1.0) as client:
        well, _ = await client.get(path)
        await client.post("/pause_generation", mode="in_place")
        paused, _ = await client.get(path)
        ready, _ = await client.get("/ready")
        await client.post("/continue_generation", body={})
        again, _ = await client.get(path)
    assert (well, paused, ready, again) == (200, 503, 503, 200)


# -- what it is -------------------------------------------------------------------------------------------------------


async def test_model_and_server_information(client: Any) -> None:
    """Model, weights, version and context, under their new names and their old ones."""
    _, model = await client.get("/model_info")
    _, server = await client.get("/server_info")
    _, models = await client.get("/v1/models")
    assert (model["model_path"], model["weight_version"]) == (str(DEMO_MODEL), "default")
    assert (server["version"], server["context_length"]) == ("0.5.23", 1024)
    assert models["data"][0]["max_model_len"] == 1024
    assert (await client.get("/get_model_info"))[1] == model
    assert (await client.get("/get_server_info"))[1]["version"] == server["version"]


async def test_text_and_ids_are_converted(client: Any, tokenizer: Any) -> None:
    """``/tokenize`` and ``/detokenize``, one or many."""
    _, one = await client.post("/tokenize", prompt="Add 12 and 7.")
    _, many = await client.post("/v1/tokenize", prompt=["Add", "7"])
    _, text = await client.post("/detokenize", tokens=one["tokens"])
    _, texts = await client.post("/v1/detokenize", tokens=many["tokens"])
    assert one == {"tokens": tokenizer.encode("Add 12 and 7."), "count": len(one["tokens"]), "max_model_len": 1024}
    assert text == {"text": "Add 12 and 7."}
    assert texts == {"text": ["Add", "7"]}
    assert (await client.post("/detokenize", tokens=[999]))[0] == 400
