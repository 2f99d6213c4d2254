"""``rollouts gateway``: a program started by hand, and its session as a run."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from rollouts.commands import main
from rollouts.commands.gateway import add, serve_program
from rollouts.engine import DEMO_MODEL
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer
from tests.programs.gateway.programs import spoken

HI = [{"role": "user", "content": "hi"}]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return parser.parse_args(["gateway", "--port", "0", *words])


async def ask(base: str, key: str, messages: list[Any]) -> Any:
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{base}/v1/chat/completions", json={"messages": messages}, headers=headers) as response:
            return await response.json()


async def test_a_session_is_printed_and_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls of one conversation: a line each; after the signal a run with one sample that keeps every law."""
    replies = iter(["Hello.", "Bye."])
    info = {"model_path": str(DEMO_MODEL), "weight_version": "v1"}
    async with StubServer(lambda ids, params: spoken(next(replies)), model_info=info) as server:
        args = arguments("--endpoint", server.url, "--out", str(tmp_path / "run"), "--max-new-tokens", "64")
        codes: list[int] = []
        started = anyio.Event()

        async def serve() -> None:
            codes.append(await serve_program(args, {}, started.set))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await started.wait()
            printed = capsys.readouterr().out
            base = printed.split("serving at ")[1].strip()
            key = printed.split("OPENAI_API_KEY=")[1].split()[0]
            assert f"ANTHROPIC_BASE_URL={base} " in printed
            assert f"OPENAI_BASE_URL={base}/v1 " in printed
            first = (await ask(base, key, HI))["choices"][0]["message"]
            await ask(base, key, [*HI, first, {"role": "user", "content": "more"}])
            wrong = await ask(base, "another-key-000001", HI)
            assert "the key is missing or unknown" in wrong["error"]["message"]
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [0]
    printed = capsys.readouterr().out
    assert "call 0 · root · " in printed
    assert "call 1 · after 0 · " in printed
    assert "'Bye.'" in printed
    assert [request.sampling_params["max_new_tokens"] for request in server.requests] == [64, 64]
    (sample,) = load_run(tmp_path / "run")
    assert sum(sample.loss_mask) == len(spoken("Hello.")) + len(spoken("Bye."))
    assert sample.messages[-1]["content"] == "Bye."
    assert verify_run(tmp_path / "run").violations == []
    for verb in (["verify"], ["show"], ["show", "--sample", "0"]):
        assert main([verb[0], str(tmp_path / "run"), *verb[1:]]) == 0
    assert main(["view", str(tmp_path / "run"), "--out", str(tmp_path / "run.html")]) == 0


async def test_a_session_without_calls_is_a_run_without_samples(tmp_path: Path) -> None:
    """The run is whole nevertheless."""
    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        args = arguments("--endpoint", server.url, "--out", str(tmp_path / "run"))
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(serve_program, args, {}, started.set)
            await started.wait()
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(load_run(tmp_path / "run")) == 0
    assert verify_run(tmp_path / "run").violations == []


def test_a_folder_with_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any request is sent; ``--overwrite`` replaces it."""
    (tmp_path / "run.json").touch()
    assert main(["gateway", "--endpoint", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
