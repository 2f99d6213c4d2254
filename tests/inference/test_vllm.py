"""The vLLM policy on a server of vLLM's protocol: exact logprobs, aborts, pauses, updates, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.engine.teacher import Teacher
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.inference.completions import BrokenNumbers
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.shared import policy_of
from rollouts.inference.vllm import VLLMPolicy, read_metrics
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.testing.json_server import JsonServer
from tests.interruptions import check_stops_at_every_split, deviation_of_repeats
from tests.vllm_server import VLLMServer, vllm_server

PROMPT = packed_tokens(range(1, 30))
SHORT = SamplingParams(max_new_tokens=12)
LONG = SamplingParams(max_new_tokens=900, temperature=2.0)
FULL = attrs.evolve(LONG, min_new_tokens=900)
"""It never ends early. A minimum length changes the distribution, so its logprobs are not compared."""


def endpoint_at(url: str, **options: Any) -> Endpoint:
    return Endpoint(provider="vllm", base_url=url, **options)


def policy_at(url: str, **options: Any) -> VLLMPolicy:
    return VLLMPolicy(endpoint_at(url, **options), backoff=lambda failures: 0.0)


@pytest.fixture
async def server() -> AsyncIterator[VLLMServer]:
    async with vllm_server() as server:
        yield server


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(DEMO_MODEL, "float32")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with weights that are a little different."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "moved"
    shutil.copytree(DEMO_MODEL, folder)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    moved = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


def worst(completion: Completion, teacher: Teacher, temperature: float = 1.0) -> float:
    """Largest difference between a reply's logprobs and the logprobs of the weights."""
    ids = np.concatenate([PROMPT, completion.tokens])
    exact = teacher.logprobs(ids, np.arange(len(PROMPT), len(ids)), temperature)
    return float(np.abs(exact - completion.logprobs).max())


async def begun(server: VLLMServer, count: int) -> None:
    """Return when the server has generated so many tokens."""
    while server.frontend.scheduler.generated < count:  # noqa: ASYNC110 - the state is the engine thread's
        await anyio.sleep(0.005)


# -- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "params", "temperature"),
    [
        ("processed", {"temperature": 0.7}, 0.7),
        ("processed", {"temperature": 0}, 1.0),
        ("raw", {"top_p": 0.5}, 1.0),
        ("raw", {"temperature": 0}, 1.0),
    ],
)
async def test_logprobs_are_those_of_the_weights(mode: Any, params: Any, temperature: float, teacher: Teacher) -> None:
    """In both modes, for all parameters that the mode allows."""
    async with vllm_server(mode=mode) as server, policy_at(server.url) as policy:
        completion = await policy.complete(CompletionRequest(PROMPT, attrs.evolve(SHORT, **params)))
    assert len(completion.tokens) > 0
    assert worst(completion, teacher, temperature) < 5e-5


async def test_greedy_replies_are_those_of_the_embedded_engine(server: VLLMServer) -> None:
    """Two protocols, one model: the same ids, logprobs and versions."""
    greedy = attrs.evolve(SHORT, temperature=0)
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(Endpoint(base_url=url)) as other:
        async with policy_at(server.url) as policy:
            replies = [
                await one.complete(CompletionRequest(PROMPT, greedy, stop_token_ids=(502,))) for one in (policy, other)
            ]
    assert replies[0].tokens.tolist() == replies[1].tokens.tolist()
    assert replies[0].logprobs.tolist() == pytest.approx(replies[1].logprobs.tolist(), abs=1e-5)
    assert replies[0].versions == replies[1].versions
    assert replies[0].finish_reason == replies[1].finish_reason


async def test_a_session_names_itself_and_finds_its_prefix(server: VLLMServer) -> None:
    """The header of vLLM and the header of a router, with the key."""
    async with policy_at(server.url, api_key="secret") as policy:
        first = await policy.complete(CompletionRequest(PROMPT, SHORT, session="one"))
        longer = np.concatenate([PROMPT, first.tokens])
        second = await policy.complete(CompletionRequest(longer, SHORT, session="one"))
    assert second.cached_tokens > 0
    assert {name: server.headers[1][name] for name in ("X-Session-ID", "X-SMG-Routing-Key", "Authorization")} == {
        "X-Session-ID": "one",
        "X-SMG-Routing-Key": "one",
        "Authorization": "Bearer secret",
    }


async def test_a_wrong_key_is_named(server: VLLMServer) -> None:
    """At the first request to the server."""
    server.key = "right"
    async with policy_at(server.url, api_key="wrong") as policy:
        with pytest.raises(EndpointRefused, match=r"status 401: Unauthorized. Check Endpoint.api_key"):
            await policy.describe()


async def test_the_server_describes_itself(server: VLLMServer) -> None:
    """Model, version, weights and context; without the development mode it does not name its weights."""
    async with policy_at(server.url) as policy:
        info = await policy.describe()
    assert (info.version, info.model, info.weight_version) == ("0.32.0", str(DEMO_MODEL), "default")
    assert info.max_context == 1024
    async with vllm_server(dev=False) as plain, policy_at(plain.url) as policy:
        assert (await policy.describe()).weight_version is None
        assert len((await policy.complete(CompletionRequest(PROMPT, SHORT))).versions) == 1


@pytest.mark.parametrize(("length", "overflows"), [(1022, False), (1023, False), (1024, True), (1025, True)])
async def test_prompts_around_the_context(server: VLLMServer, length: int, overflows: bool) -> None:
    """Both sentences about a prompt that does not fit are known; a reply that the context cuts ends by length."""
    ids = packed_tokens([10] * length)
    async with policy_at(server.url) as policy:
        if overflows:
            with pytest.raises(ContextOverflow, match="maximum model length of 1024"):
                await policy.complete(CompletionRequest(ids, SHORT))
        else:
            reply = await policy.complete(CompletionRequest(ids, attrs.evolve(SHORT, min_new_tokens=12)))
            assert (len(reply.tokens), reply.finish_reason) == (1024 - length, "length")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("return_token_ids", "prompt_token_ids: got none"),
        ("max_tokens", "max_new_tokens: 12 ids were requested, "),
        ("stop_token_ids", "stop_token_ids: the reply continues after its stop id"),
        ("logprobs", r"choices\[0\].logprobs: got \d+ token_ids and logprobs of 0 ids"),
    ],
)
async def test_a_field_that_vanishes_is_caught(field: str, message: str) -> None:
    """vLLM ignores fields that it does not know, so a proxy that drops or renames one would go unnoticed."""
    served = vllm_server(ignores=frozenset({field}), max_context=80)
    async with served as server, policy_at(server.url) as policy:
        policy.servers.protocol.probed[server.url] = "processed"  # the probe would refuse some of these servers first
        greedy = attrs.evolve(SHORT, temperature=0, min_new_tokens=12)
        ids = await free_reply()
        with pytest.raises(EndpointRefused, match=message):
            await policy.complete(CompletionRequest(PROMPT, greedy, stop_token_ids=(ids[3],)))


async def free_reply() -> list[int]:
    """The ids of the greedy reply without stop ids."""
    async with vllm_server() as server, policy_at(server.url) as policy:
        reply = await policy.complete(CompletionRequest(PROMPT, attrs.evolve(SHORT, temperature=0, min_new_tokens=12)))
    return [int(token) for token in reply.tokens]


async def test_weights_of_nan_are_broken_numbers(server: VLLMServer, tmp_path: Path) -> None:
    """The server says 200 and healthy; the reply is refused at once, and not retried."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO_MODEL, tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    broken = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
    save_file(broken, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    await update_weights(endpoint_at(server.url), tmp_path / "nan", "nan")
    async with policy_at(server.url) as policy:
        policy.servers.protocol.probed[server.url] = "processed"
        with pytest.raises(BrokenNumbers, match="expected a finite logprob: the model computed NaN"):
            await policy.complete(CompletionRequest(PROMPT, SHORT))
    assert len(server.bodies) == 1


async def test_interrupted_replies_are_those_of_an_uninterrupted_server(server: VLLMServer, teacher: Teacher) -> None:
    """Other random numbers after an interruption, and the same ends at stop strings."""
    async with policy_at(server.url) as policy:
        assert abs(await deviation_of_repeats(policy, teacher, 150, after=(1,))) < 4
        await check_stops_at_every_split(policy)


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_the_mode_is_probed_before_the_first_request() -> None:
    """Raw logprobs of a tempered draw are refused by name before it is sent; at temperature 1 they are right."""
    async with vllm_server(mode="raw") as server, policy_at(server.url) as policy:
        with pytest.raises(ConfigError, match=r"temperature 0.7, .*Start it with --logprobs-mode processed_logprobs"):
            await policy.complete(CompletionRequest(PROMPT, attrs.evolve(SHORT, temperature=0.7)))
        assert server.bodies == []
        assert len((await policy.complete(CompletionRequest(PROMPT, SHORT))).tokens) > 0


async def test_a_server_of_logits_is_refused() -> None:
    """For any sampling parameters."""
    async with vllm_server(mode="logits") as server, policy_at(server.url) as policy:
        with pytest.raises(EndpointRefused, match=r"the server's --logprobs-mode: a logprob of .* came"):
            await policy.describe()


async def test_a_server_without_ids_names_its_flag() -> None:
    """A plain ``vllm serve`` is refused at the first request, with the flag that it lacks."""
    async with vllm_server(scale_out=False) as server, policy_at(server.url) as policy:
        with pytest.raises(EndpointRefused, match="Restart vllm serve with --enable-scale-out"):
            await policy.describe()


async def test_another_server_is_refused() -> None:
    """Each protocol names the server that it does not find."""
    async with running_server(DEMO_MODEL) as url, policy_at(url) as policy:
        with pytest.raises(EndpointRefused, match=r"is not a vLLM server: .*owned_by 'rollouts'"):
            await policy.describe()
    async with vllm_server() as server, SGLangPolicy(Endpoint(base_url=server.url)) as sglang:
        with pytest.raises(EndpointRefused, match="is not an SGLang server"):
            await sglang.describe()


# -- aborts and pauses ------------------------------------------------------------------------------------------------


async def test_an_interrupted_reply_keeps_its_tokens(server: VLLMServer, teacher: Teacher) -> None:
    """The abort has the prefixed id; a bare one would be acknowledged and do nothing."""
    replies: list[Completion] = []

    async def call() -> None:
        replies.append(await policy.complete(CompletionRequest(PROMPT, LONG)))

    async with policy_at(server.url) as policy:
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(call)
            await begun(server, 60)
            await policy.interrupt()
    aborted = [reply for reply in replies if reply.finish_reason == "abort" and len(reply.tokens)]
    assert aborted
    for reply in aborted:
        assert worst(reply, teacher, 2.0) < 5e-5


async def test_a_cancelled_call_stops_its_generation(server: VLLMServer) -> None:
    """Nothing runs afterwards."""
    async with policy_at(server.url) as policy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy.complete, CompletionRequest(PROMPT, FULL))
            await begun(server, 20)
            tasks.cancel_scope.cancel()
        assert policy.totals.aborts == 1
        await policy.abort_all(5.0)
    assert server.frontend.scheduler.running == 0


async def test_abort_all_ends_the_requests_of_others(server: VLLMServer) -> None:
    """Until the server is idle by its metrics; without the development mode it says what is missing."""
    async with policy_at(server.url) as policy, policy_at(server.url) as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.complete, CompletionRequest(PROMPT, FULL))
            await begun(server, 20)
            await policy.abort_all(5.0)
    async with vllm_server(dev=False) as plain, policy_at(plain.url) as policy:
        with pytest.raises(EndpointUnavailable, match=r"POST .*/abort_requests returned status 404"):
            await policy.abort_all(5.0)


async def test_a_reply_that_was_aborted_unasked_goes_on(server: VLLMServer, moved: Path) -> None:
    """A pause of mode abort ends every request: the reply is whole, and names both versions."""
    replies: list[Completion] = []
    long = attrs.evolve(LONG, max_new_tokens=120, min_new_tokens=120)

    async def call() -> None:
        replies.append(
            await ResumablePolicy(policy_of(endpoint_at(server.url))).complete(CompletionRequest(PROMPT, long))
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await begun(server, 20)
        await update_weights(endpoint_at(server.url), moved, "v1", while_running="abort")
    assert (len(replies[0].tokens), replies[0].finish_reason) == (120, "length")
    assert [span.version for span in replies[0].versions] == ["default", "v1"]


@pytest.mark.parametrize("rejects", [False, True])
async def test_a_pause_by_another_client_is_waited_for(rejects: bool) -> None:
    """A paused server keeps requests, or rejects them with a 503 as newer versions do: neither is a failure."""
    async with vllm_server(rejects=rejects) as server, policy_at(server.url) as policy, policy_at(server.url) as other:
        await policy.complete(CompletionRequest(PROMPT, SHORT))
        await other.servers.transport.post(f"{server.url}/pause?mode=abort", b"{}", {})
        assert await policy.servers.protocol.is_ready(server.url) is False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy.complete, CompletionRequest(PROMPT, SHORT))
            while len(server.bodies) < 2:  # noqa: ASYNC110 - the request arrives
                await anyio.sleep(0.005)
            await other.servers.transport.post(f"{server.url}/resume", b"{}", {})
        assert await policy.servers.protocol.is_ready(server.url) is True
        assert policy.totals.completions == 2


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "wait", "abort"])
async def test_an_update_under_load_is_exact(
    server: VLLMServer, moved: Path, teacher: Teacher, mode: WhileRunning
) -> None:
    """Every token is of the version that it names; the cache is cleared before the server continues."""
    replies: list[Completion] = []
    async with policy_at(server.url) as policy:

        async def call() -> None:
            replies.append(
                await ResumablePolicy(policy).complete(
                    CompletionRequest(PROMPT, attrs.evolve(LONG, max_new_tokens=150))
                )
            )

        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(call)
            await begun(server, 60)
            await update_weights(endpoint_at(server.url), moved, "v1", while_running=mode)
        await call()
    assert [call.partition("?")[0] for call in server.calls] == [
        "/pause",
        "/collective_rpc reload_weights",
        "/update_weight_version v1",
        "/reset_prefix_cache",
        "/resume",
    ]
    teachers = {"default": teacher, "v1": Teacher(moved, "float32")}
    assert any(len(reply.versions) == 2 for reply in replies) == (mode != "wait")
    assert [span.version for span in replies[-1].versions] == ["v1"]
    for reply in replies:
        ids = np.concatenate([PROMPT, reply.tokens])
        for span in reply.versions:
            places = np.arange(len(PROMPT) + span.start, len(PROMPT) + span.stop)
            exact = teachers[span.version].logprobs(ids, places, 2.0)
            assert np.abs(exact - reply.logprobs[span.start : span.stop]).max() < 5e-5


async def test_an_update_in_place_isolates_new_conversations(
    server: VLLMServer, moved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache keeps K/V of the old weights; a conversation that begins later has a salt, and does not read them."""
    async with policy_at(server.url) as policy:
        await policy.complete(CompletionRequest(PROMPT, SHORT, session="before"))
        await update_weights(endpoint_at(server.url), moved, "v1", while_running="in_place")
        after = await policy.complete(CompletionRequest(PROMPT, SHORT, session="after"))
    assert "cache_salt" not in server.bodies[0]
    assert server.bodies[1]["cache_salt"].startswith("v1 ")
    assert after.cached_tokens == 0
    assert "contains K/V of the old weights" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"expected a folder that this process and the server can read"),
        (lambda folder: (folder / "config.json").unlink(), "with config.json"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
            "model.safetensors'; expected a whole file of safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "with all files of model.safetensors.index.json, also b.safetensors",
        ),
    ],
)
async def test_a_folder_that_would_end_the_server_is_never_sent(
    server: VLLMServer, tmp_path: Path, damage: Any, message: str
) -> None:
    """vLLM ends at the first request after a failed load."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        await update_weights(endpoint_at(server.url), tmp_path / "model", "v1")
    assert server.calls == []


async def test_a_failed_load_keeps_the_server_paused_until_a_good_one(
    server: VLLMServer, moved: Path, tmp_path: Path
) -> None:
    """Its weights are incomplete: the message says so, no request reaches it, and the next update heals it."""
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config.replace('"qwen3"', '"no such model"'))
    async with policy_at(server.url) as policy:
        before = await policy.complete(CompletionRequest(PROMPT, SHORT))
        with pytest.raises(EndpointUnavailable, match="incomplete, or under another version: it stays paused until"):
            await update_weights(endpoint_at(server.url), tmp_path / "other", "v1")
        assert await policy.servers.protocol.is_ready(server.url) is False
        assert "/resume" not in server.calls
        await update_weights(endpoint_at(server.url), moved, "v2")
        after = await policy.complete(CompletionRequest(PROMPT, SHORT))
    assert (before.versions[0].version, after.versions[0].version) == ("default", "v2")


async def test_an_update_needs_the_development_mode() -> None:
    """The message names the variable, and the server serves on."""
    async with vllm_server(dev=False) as server, policy_at(server.url) as policy:
        with pytest.raises(EndpointRefused, match=r"/pause.*404: .*VLLM_SERVER_DEV_MODE=1"):
            await update_weights(endpoint_at(server.url), DEMO_MODEL, "v1")
        await policy.complete(CompletionRequest(PROMPT, SHORT))


async def test_tied_embeddings_are_not_updated_on_a_cpu(moved: Path, tmp_path: Path) -> None:
    """vLLM would load all but the output head there; a separate head is loaded."""
    import torch
    from safetensors.torch import load_file, save_file

    async with vllm_server(device="cpu") as server:
        with pytest.raises(EndpointRefused, match=r"no lm_head.weight. Save the model with tie_word_embeddings false"):
            await update_weights(endpoint_at(server.url), moved, "v1")
        assert server.calls == []
        shutil.copytree(moved, tmp_path / "untied")
        weights = load_file(moved / "model.safetensors")
        weights["lm_head.weight"] = torch.clone(weights["model.embed_tokens.weight"])
        save_file(weights, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
        await update_weights(endpoint_at(server.url), tmp_path / "untied", "v1")
        assert server.frontend.version == "v1"


async def test_a_server_that_reports_another_version_is_an_error() -> None:
    """After the update, the version is read back."""
    answers = {"/reset_prefix_cache": {"success": True}, "/weight_info": {"weight_version": "old"}}
    async with JsonServer(lambda asked: (200, answers.get(asked.path.partition("?")[0], {}))) as server:
        with pytest.raises(EndpointRefused, match="weight_version 'old'; expected 'v1', which was just loaded"):
            await update_weights(endpoint_at(server.url), DEMO_MODEL, "v1")


async def test_a_cache_that_is_not_cleared_is_an_error() -> None:
    """The server stays paused: it would read K/V of the old weights."""
    paths: list[str] = []

    def answer(asked: Any) -> tuple[int, Any]:
        paths.append(asked.path.partition("?")[0])
        return 200, {"success": not paths[-1].startswith("/reset")}

    async with JsonServer(answer) as server:
        with pytest.raises(EndpointRefused, match=r"/reset_prefix_cache.*: 200: .*it stays paused"):
            await update_weights(endpoint_at(server.url), DEMO_MODEL, "v1")
    assert "/resume" not in paths


async def test_a_server_that_comes_back_is_probed_again() -> None:
    """It may have other flags: a restarted server with raw logprobs is refused for a tempered draw."""
    tempered = attrs.evolve(SHORT, temperature=0.7)
    async with vllm_server() as server:
        port = int(server.url.rpartition(":")[2])
        policy = VLLMPolicy(endpoint_at(server.url), poll_seconds=0.05)
        await policy.describe()
        await policy.complete(CompletionRequest(PROMPT, tempered))
    async with policy, anyio.create_task_group() as tasks:
        refused: list[str] = []

        async def call() -> None:
            try:
                await policy.complete(CompletionRequest(PROMPT, tempered))
            except ConfigError as error:
                refused.append(str(error))

        tasks.start_soon(call)
        while not policy._reachability.outage._waiting:  # noqa: ASYNC110 - the request finds no server
            await anyio.sleep(0.005)
        async with vllm_server(port=port, mode="raw"):
            while not refused:  # noqa: ASYNC110 - the request finds the server
                await anyio.sleep(0.005)
    assert "temperature 0.7" in refused[0]


def test_the_load_is_read_from_metrics() -> None:
    """Over all engines; any other response is not a load."""
    text = b"""# HELP
vllm:num_requests_running{engine="0",model_name="demo"} 3.0
vllm:num_requests_running{engine="1",model_name="demo"} 4.0
vllm:num_requests_waiting{engine="0",model_name="demo"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25
"""
    load = read_metrics(text)
    assert load is not None
    assert (load.running, load.waiting, load.kv_use) == (7, 2, 0.25)
    assert read_metrics(b'{"loads": []}') is None
