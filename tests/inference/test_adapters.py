"""LoRA adapters as policy versions, on both protocols: which adapter a reply has, and servers that lose theirs."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.dtypes import Completion, Endpoint, SamplingParams
from rollouts.engine import running_server
from rollouts.engine.teacher import Teacher
from rollouts.errors import EndpointRefused
from rollouts.inference.adapter_routes import AdapterRoutes
from rollouts.inference.base import CompletionRequest
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.shared import policy_of
from rollouts.inference.weights import update_weights
from rollouts.testing.server import StubServer
from tests.adapters_under_load import PROMPT, Load, rollout_of, worst
from tests.engine_requests import until_it_samples
from tests.peft_folders import merged_folder, small_model, write_adapter
from tests.vllm_server import vllm_server

SHORT = SamplingParams(max_new_tokens=12, seed=1)
LONG = SamplingParams(max_new_tokens=500, temperature=2.0, seed=1)
"""Of so high a temperature that a stop id comes late."""
TOLERANCE = 2e-5
PROVIDERS = ("sglang", "vllm")


@contextlib.asynccontextmanager
async def served(provider: str, port: int = 0, **options: Any) -> AsyncIterator[Endpoint]:
    """The embedded engine, or vLLM's protocol in front of it."""
    if provider == "vllm":
        async with vllm_server(small_model(), port=port, **options) as server:
            yield Endpoint(provider="vllm", base_url=server.url, lora="math")
    else:
        async with running_server(small_model(), port=port, slots=16, **options) as url:
            yield Endpoint(base_url=url, lora="math")


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Three adapters, of different ranks."""
    return [
        write_adapter(tmp_path / f"adapter{seed}", seed, rank=2 + seed, base=small_model(), spread=0.1)
        for seed in range(3)
    ]


@pytest.fixture
def judges(adapters: list[Path], tmp_path: Path) -> list[Teacher]:
    """For each adapter, a forward pass in float64 of the base weights with it added."""
    folders = [merged_folder(one, tmp_path / f"merged{n}", small_model()) for n, one in enumerate(adapters)]
    return [Teacher(folder, "float64") for folder in folders]


def request(tokens: Any = PROMPT, sampling: SamplingParams = SHORT, **fields: Any) -> CompletionRequest:
    return CompletionRequest(np.asarray(tokens, np.int32), sampling, **fields)


def versions(completion: Completion) -> list[str]:
    return [span.version for span in completion.versions]


async def loaded(endpoint: Endpoint) -> list[str]:
    """The adapters that the server lists."""
    async with policy_of(endpoint) as policy:
        return sorted(await AdapterRoutes(endpoint, policy.servers.transport).listed(endpoint.base_url[0]))


async def long_reply(rollout: ResumablePolicy, found: list[Completion]) -> None:
    found.append(await rollout.complete(request(sampling=LONG, session="one")))


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_tokens_are_of_the_adapter_that_they_name(
    provider: str, adapters: list[Path], judges: list[Teacher]
) -> None:
    """Version and logprob of each token are those of the loaded adapter."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        completion = await rollout_of(policy).complete(request())
        assert versions(completion) == ["math-v0"]
        assert worst(PROMPT, completion, {"math-v0": judges[0]}) <= TOLERANCE


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_running_rollout_finishes_with_its_adapter(
    provider: str, adapters: list[Path], judges: list[Teacher]
) -> None:
    """By default an update changes neither its running reply nor its later ones; later rollouts get the new one."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        first, replies = rollout_of(policy), list[Completion]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_reply, first, replies)
            await until_it_samples(policy, LONG)
            await update_weights(endpoint, lora=adapters[1], name="math-v1")
            assert not replies, "the update came in the middle of the reply"
            second = await rollout_of(policy).complete(request())
        tokens = np.concatenate([PROMPT, replies[0].tokens, [5, 6]])
        third = await first.complete(request(tokens, session="one"))
        assert [versions(one) for one in (replies[0], second, third)] == [["math-v0"], ["math-v1"], ["math-v0"]]
        of = {"math-v0": judges[0], "math-v1": judges[1]}
        assert worst(PROMPT, replies[0], of, 2.0) <= TOLERANCE
        assert worst(PROMPT, second, of) <= TOLERANCE
        assert worst(tokens, third, of) <= TOLERANCE
        assert first.resumed == 0


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_running_reply_continues_with_the_new_adapter(
    provider: str, adapters: list[Path], judges: list[Teacher]
) -> None:
    """``switch``: each token of the reply names its adapter, and has that adapter's logprob after all before it."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        first, replies = rollout_of(policy), list[Completion]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_reply, first, replies)
            await until_it_samples(policy, LONG)
            await update_weights(endpoint, lora=adapters[1], name="math-v1", while_running="switch")
            assert not replies, "the update came in the middle of the reply"
        assert versions(replies[0]) == ["math-v0", "math-v1"]
        assert first.resumed == 1
        of = {"math-v0": judges[0], "math-v1": judges[1]}
        assert worst(PROMPT, replies[0], of, 2.0) <= TOLERANCE
        assert versions(await first.complete(request(session="two"))) == ["math-v1"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("while_running", ["finish", "switch"])
async def test_six_updates_under_load(
    provider: str, while_running: Any, adapters: list[Path], judges: list[Teacher], tmp_path: Path
) -> None:
    """Three adapters in six versions while eight rollouts of several turns play: none fails, nothing pauses."""
    of = {f"math-v{number}": judges[number % 3] for number in range(7)}
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        load = Load(policy)
        await load.play_over_updates(endpoint, adapters, tmp_path, while_running)
        gc.collect()
        await update_weights(endpoint, lora=adapters[1], name="math-v7")
        assert await loaded(endpoint) == ["math-v7"]
    assert load.paused == []
    assert load.versions == of.keys()
    assert load.worst(of) <= TOLERANCE


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_an_old_adapter_is_unloaded_when_no_rollout_names_it(provider: str, adapters: list[Path]) -> None:
    """By the first update after its last rollout; an adapter that a rollout names stays."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        rollout: ResumablePolicy | None = rollout_of(policy)
        assert rollout is not None
        await rollout.complete(request())
        await update_weights(endpoint, lora=adapters[1], name="math-v1")
        assert await loaded(endpoint) == ["math-v0", "math-v1"]
        assert versions(await rollout.complete(request())) == ["math-v0"]
        rollout = None
        gc.collect()
        await update_weights(endpoint, lora=adapters[2], name="math-v2")
        assert await loaded(endpoint) == ["math-v2"]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_restarted_server_gets_its_adapters_again(
    provider: str, adapters: list[Path], judges: list[Teacher]
) -> None:
    """Before its first reply: also the adapter with which a rollout began, although a newer one is loaded."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        endpoint = await first.enter_async_context(served(provider))
        port = int(endpoint.base_url[0].rpartition(":")[2])
        policy = await stack.enter_async_context(policy_of(endpoint))
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        rollout = rollout_of(policy)
        await rollout.complete(request())
        await update_weights(endpoint, lora=adapters[1], name="math-v1")
        await first.aclose()
        await stack.enter_async_context(served(provider, port))
        assert await loaded(endpoint) == []
        old, new = await rollout.complete(request()), await rollout_of(policy).complete(request())
        assert (versions(old), versions(new)) == (["math-v0"], ["math-v1"])
        of = {"math-v0": judges[0], "math-v1": judges[1]}
        assert max(worst(PROMPT, one, of) for one in (old, new)) <= TOLERANCE


async def test_an_adapter_whose_folder_changed_is_not_loaded_again(adapters: list[Path]) -> None:
    """Its tokens would name weights that did not sample them: the rollout is refused."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        endpoint = await first.enter_async_context(served("sglang"))
        port = int(endpoint.base_url[0].rpartition(":")[2])
        policy = await stack.enter_async_context(policy_of(endpoint))
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        await first.aclose()
        write_adapter(adapters[0], 9, base=small_model())
        await stack.enter_async_context(served("sglang", port))
        with pytest.raises(EndpointRefused, match=r"adapter0 has changed since it was loaded"):
            await rollout_of(policy).complete(request())


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_resumed_rollout_finds_its_adapter(provider: str, adapters: list[Path]) -> None:
    """A rollout that continues logged turns has the adapter of their last token, not the newest."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        for number in range(2):
            await update_weights(endpoint, lora=adapters[number], name=f"math-v{number}")
            keep = rollout_of(policy)
            await keep.complete(request())
        again = await rollout_of(policy).complete(request(version="math-v1"))
        assert versions(again) == ["math-v1"]
        with pytest.raises(EndpointRefused, match=r"does not have the LoRA adapter 'math-v7'.*name='math-v7'"):
            await rollout_of(policy).complete(request(version="math-v7"))


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_another_process_finds_the_newest_adapter(provider: str, adapters: list[Path]) -> None:
    """It asks the server when a rollout begins; a rollout that has begun keeps its adapter."""
    async with served(provider) as endpoint:
        other = attrs.evolve(endpoint, base_url=endpoint.base_url[0].replace("127.0.0.1", "localhost"))
        async with policy_of(other) as policy:
            await update_weights(endpoint, lora=adapters[0], name="math-v9")
            first = rollout_of(policy)
            assert versions(await first.complete(request())) == ["math-v9"]
            await update_weights(endpoint, lora=adapters[1], name="math-v10")
            with anyio.fail_after(10):
                while versions(await rollout_of(policy).complete(request())) != ["math-v10"]:
                    pass
            assert versions(await first.complete(request())) == ["math-v9"]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_server_without_adapters_is_refused_before_work(provider: str) -> None:
    """The message names the call that loads one."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        with pytest.raises(EndpointRefused, match=r"no LoRA adapter 'math'.*name='math-v0'"):
            await policy.check_sampling(SHORT)


async def test_a_server_that_ignores_the_adapter_is_refused(adapters: list[Path]) -> None:
    """As an old server, or a router that drops the field: it would answer with the base model."""
    async with StubServer() as server:
        endpoint = Endpoint(base_url=server.url, lora="math")
        async with policy_of(endpoint) as policy:
            sender: Any = policy._sender
            await sender.family.learn("math-v0", str(adapters[0]))
            sender.family.current = "math-v0"
            sender.family.present[server.url].add("math-v0")
            with pytest.raises(EndpointRefused, match="ignores lora_path"):
                await rollout_of(policy).complete(request())
        assert len(server.requests) == 1, "only the question"


async def test_a_reply_of_another_model_is_refused(adapters: list[Path]) -> None:
    """vLLM repeats the adapter's name in each response."""

    def dropped(response: dict[str, Any]) -> dict[str, Any]:
        return {**response, "model": "demo"}

    async with served("vllm", edit=dropped) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        with pytest.raises(EndpointRefused, match="model: got 'demo'; expected 'math-v0'"):
            await rollout_of(policy).complete(request())


async def test_other_base_weights_are_refused(adapters: list[Path]) -> None:
    """The adapter's name would mean another function than in the tokens before."""
    async with served("sglang") as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        await rollout_of(policy).complete(request())
        await update_weights(attrs.evolve(endpoint, lora=None), small_model(), "other")
        with pytest.raises(EndpointRefused, match=r"base weights 'other'; expected 'default'"):
            await rollout_of(policy).complete(request())


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_session_finds_its_prefix_and_no_other_adapters(provider: str, adapters: list[Path]) -> None:
    """The second turn of a rollout reads the first from the cache; a rollout with another adapter does not."""
    async with served(provider) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        first = rollout_of(policy)
        reply = await first.complete(request(session="one"))
        tokens = np.concatenate([PROMPT, reply.tokens, [5]])
        assert (await first.complete(request(tokens, session="one"))).cached_tokens >= len(PROMPT)
        await update_weights(endpoint, lora=adapters[1], name="math-v1")
        assert (await rollout_of(policy).complete(request(tokens, session="two"))).cached_tokens == 0


async def test_a_cache_too_small_for_all_adapters_stays_exact(adapters: list[Path], judges: list[Teacher]) -> None:
    """vLLM reads an adapter again that its cache has dropped: from the same folder, so it is the same one."""
    async with served("vllm", cpu_loras=1) as endpoint, policy_of(endpoint) as policy:
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        old = rollout_of(policy)
        await old.complete(request())
        await update_weights(endpoint, lora=adapters[1], name="math-v1")
        new = rollout_of(policy)
        of = {"math-v0": judges[0], "math-v1": judges[1]}
        for turn in range(3):
            for rollout in (old, new):
                reply = await rollout.complete(request(PROMPT[turn:]))
                assert worst(PROMPT[turn:], reply, of) <= TOLERANCE


def test_judges_are_apart(judges: list[Teacher]) -> None:
    """The adapters differ by far more than the tolerance, so that a wrong one is noticed."""
    scores = [judge.logprobs(PROMPT, np.arange(1, 60), 1.0) for judge in judges]
    base = functools.partial(Teacher(small_model(), "float64").logprobs, PROMPT, np.arange(1, 60), 1.0)
    scores.append(base())
    gaps = [float(np.abs(a - b).max()) for n, a in enumerate(scores) for b in scores[:n]]
    assert min(gaps) > 1000 * TOLERANCE
