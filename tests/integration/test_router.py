"""The real router in front of two embedded engines: what slime puts between itself and its engines."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import attrs
import pytest

from rollouts.commands.check_template import echo
from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import EngineProcess, engine_process
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.renderer.example import ExamplePart
from rollouts.testing.server import StubServer

pytest.importorskip("sglang_router", reason="sglang-router is not installed")

READY_SECONDS = 60.0
LONG = SamplingParams(temperature=1.0, max_new_tokens=400)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def router(workers: list[str], log: Path, *, policy: str = "manual") -> Iterator[str]:
    """The router as a process; its URL."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--policy", policy, "--worker-urls", *workers]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text


async def until_ready(url: str, workers: int) -> None:
    """``/readiness``, and not ``/health``, which is 200 with no worker at all."""
    with anyio.fail_after(READY_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await get(f"{url}/readiness")
                listed = (await get(f"{url}/workers"))[1]
                healthy = [worker for worker in listed["workers"] if worker.get("is_healthy", True)]
                if status == 200 and answer and len(healthy) == workers:
                    return
            await anyio.sleep(0.2)


@attrs.frozen
class Fleet:
    url: str
    engines: list[EngineProcess]

    async def generated(self) -> list[int]:
        """Tokens that each engine made so far."""
        infos = [(await get(f"{engine.url}/server_info"))[1] for engine in self.engines]
        return [info["internal_states"][0]["generated_tokens"] for info in infos]


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine_process(DEMO_MODEL, tmp_path / f"engine{number}.log"))
            for number in range(2)
        ]
        url = stack.enter_context(router([engine.url for engine in engines], tmp_path / "router.log"))
        await until_ready(url, 2)
        yield Fleet(url, engines)


def args(fleet_url: str, **overrides: Any) -> Namespace:
    host, port = fleet_url.removeprefix("http://").split(":")
    values = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 4,
        "over_sampling_batch_size": 3,
        "rollouts_over_sampling_factor": 3.0,
        "rollouts_carry_over": True,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 60,
        "hf_checkpoint": str(DEMO_MODEL),
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "rollouts_recipe": "rollouts.integrations.slime.demo.recipe",
    }
    return Namespace(**{**values, **overrides})


class Source:
    """Groups of calculator problems."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.taken = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = []
        for _ in range(num_samples):
            a, b = 10 + self.taken % 80, 20 + self.taken % 70
            groups.append(
                [
                    records().sample(
                        group_index=self.taken, index=self.taken * self.n + i, prompt=f"{a} plus {b}?", label=str(a + b)
                    )
                    for i in range(self.n)
                ]
            )
            self.taken += 1
        return groups


async def test_sessions_stick_to_one_worker(tmp_path: Path) -> None:
    """With ``--policy manual`` the routing key pins a session, so its prefix is in that worker's cache."""
    async with fleet(tmp_path) as engines:
        endpoint = Endpoint(model=str(DEMO_MODEL), base_url=engines.url)
        async with SGLangPolicy(endpoint) as policy:
            assert (await policy.describe()).model is not None
            served: Counter[int] = Counter()
            for session in range(16):
                ids = packed_tokens([(session * 7 + i) % 900 for i in range(40)])
                hits = set()
                for _ in range(4):
                    before = await engines.generated()
                    done = await policy.complete(ids, SamplingParams(max_new_tokens=4), session=f"session-{session}")
                    after = await engines.generated()
                    hits |= {number for number in range(2) if after[number] > before[number]}
                    ids = packed_tokens([*ids.tolist(), *done.tokens.tolist()])
                assert len(hits) == 1
                served.update(hits)
            assert set(served) == {0, 1}


async def test_nothing_that_we_send_is_lost_in_the_router(tmp_path: Path) -> None:
    """It writes bodies and headers anew with the fields it knows; a worker behind it gets all of ours as they were."""
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_new_tokens=7, seed=3, stop=["x"])
    ids = packed_tokens([1, 2, 3])
    async with StubServer() as direct, StubServer() as worker:
        with router([worker.url], tmp_path / "router.log") as url:
            await until_ready(url, 1)
            for where in (direct.url, url):
                async with SGLangPolicy(Endpoint(base_url=where, api_key="secret")) as policy:
                    await policy.complete(ids, sampling, stop_token_ids=(9,), session="s")
        sent, arrived = direct.requests[-1], worker.requests[-1]
    kept = {name: value for name, value in arrived.sampling_params.items() if value is not None}
    assert sent.sampling_params.items() <= kept.items()
    assert {name: arrived.body.get(name) for name in sent.body if name not in ("rid", "sampling_params")} == {
        name: value for name, value in sent.body.items() if name not in ("rid", "sampling_params")
    }
    assert len(arrived.rid) == len(sent.rid)
    headers = {name.lower(): value for name, value in arrived.headers.items()}
    assert headers["x-smg-routing-key"] == "s"
    assert headers["authorization"] == "Bearer secret"


async def test_the_echo_of_a_check_comes_through_the_router(tmp_path: Path) -> None:
    """It asks for the ids with their logprobs, which the router passes on; it drops ``return_prompt_token_ids``."""
    async with fleet(tmp_path) as engines:
        found = await echo(engines.url, [ExamplePart("opening", packed_tokens([1, 2, 3]), False)])
    assert found.exact
    assert found.same_ids is True


async def test_aborts_go_straight_to_the_workers(tmp_path: Path) -> None:
    """The router has no such route: a paused policy finds its requests on the workers, and everything resumes."""
    async with fleet(tmp_path) as engines:
        assert (await get(f"{engines.url}/abort_request"))[0] in (404, 405)
        async with SGLangPolicy(Endpoint(model=str(DEMO_MODEL), base_url=engines.url)) as client:
            policy = ResumablePolicy(client)
            lengths: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def ask(number: int) -> None:
                    ids = packed_tokens([(number * 31 + i) % 900 for i in range(20)])
                    lengths.append(len((await policy.complete(ids, LONG, session=f"s{number}")).tokens))

                for number in range(16):
                    tasks.start_soon(ask, number)
                while sum(await engines.generated()) < 64:  # noqa: ASYNC110 - other processes
                    await anyio.sleep(0.01)
                await policy.pause()
                still = await engines.generated()
                await anyio.sleep(0.5)
                assert await engines.generated() == still
                policy.resume()
            assert len(lengths) == 16
            assert policy.resumed >= 1
            assert client.totals.aborts >= 1


async def test_a_run_through_slimes_door_survives_a_dead_worker(tmp_path: Path) -> None:
    """A worker dies between and during batches; whole groups keep coming, and the next call is sound."""
    async with fleet(tmp_path) as engines:
        launch, source = args(engines.url), Source(4)
        try:
            first = await anyio.to_thread.run_sync(generate_rollout_batch, launch, 0, source)
            engines.engines[0].kill()
            second = await anyio.to_thread.run_sync(generate_rollout_batch, launch, 1, source)
            third = await anyio.to_thread.run_sync(generate_rollout_batch, launch, 2, source)
        finally:
            await anyio.to_thread.run_sync(close_rollouts)
        outputs = (first, second, third)
        for output in outputs:
            assert [len(group) for group in output.samples] == [4, 4, 4]
            for sample in leaves(output.samples):
                assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
                assert sample.session_id
        groups = [group[0].group_index for output in outputs for group in output.samples]
        assert len(set(groups)) == len(groups)
