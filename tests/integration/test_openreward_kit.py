"""The guest compared with the original kit: the same rewards on the same server, and exact tokens.

Needs ``openreward`` and, in ``OPENREWARD_COOKBOOK``, the folder ``training/slime`` of openreward-cookbook.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from aiohttp import web

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.recipes.environments.openreward import generate, load_settings, prepare_tasks, reward
from rollouts.recipes.environments.openreward.tasks import write_tasks
from rollouts.testing.server import StubServer
from rollouts.training import load_prompts
from tests.integration.test_ors import toys
from tests.worlds import Speller

pytestmark = pytest.mark.extra

KIT = Path(__file__).with_name("openreward_kit.py")
HEAD = """
environments:
  adder: {%s, max_turns: 4}
system_prompt_template: |
  Use a tool.
  {tools}
  Write <tool_call>
  {{"name": <name>, "arguments": <object>}}
  </tool_call>
thinking: false
"""


@pytest.fixture(scope="module")
def cookbook() -> Path:
    if "OPENREWARD_COOKBOOK" not in os.environ:
        pytest.skip("OPENREWARD_COOKBOOK names no folder training/slime of openreward-cookbook")
    return Path(os.environ["OPENREWARD_COOKBOOK"])


@pytest.fixture(scope="module")
def url(cookbook: Path) -> Iterator[str]:
    yield from toys("openreward")


def scripted(text: str) -> str:
    """The model's next reply: four ways, by the task. All calls are JSON, since the original fails on others."""
    start = int(re.findall(r"Get from (\d+) to", text)[-1])
    turn = text.count("<|im_start|>assistant") - 1

    def call(name: str, **given: int | str) -> str:
        return f"I choose.\n<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"

    ways = (
        [call("add", amount=5), call("submit")],
        [call("submit")],
        [call("add", amount=1)] * 9,
        ["Hm.", call("add", amount="five"), call("add", amount=5), call("submit")],
    )
    return ways[start % 4][turn]


class TextEngine:
    """An engine that takes text, as the original sends it, and replies with unusual tokenisations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.speller = Speller(tokenizer, 0, seed=1)
        self.conditioned: list[list[int]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        text = scripted(body["text"])
        ids = self.speller.spell(text)
        self.conditioned.append(self.tokenizer.encode(body["text"], add_special_tokens=False))
        logprobs = [[-0.5, number, None] for number in ids]
        return web.json_response({"text": text, "output_ids": ids, "meta_info": {"output_token_logprobs": logprobs}})

    async def start(self) -> int:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return int(self.runner.addresses[0][1])


@pytest.mark.parametrize(
    "entry",
    [
        "reward_reduction: sum",
        "reward_reduction: mean, nonterminal_reward: -1.0",
        "reward_reduction: max, max_reward: 0.5",
        "reward_reduction: min, nonterminal_reward: 0.0, min_reward: -0.1",
    ],
)
async def test_the_same_rewards_on_exact_tokens(
    entry: str,
    cookbook: Path,
    url: str,
    tmp_path: Path,
    tokenizer: Callable[[str], Any],
    tokenizer_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight tasks in four ways: equal rewards; each of our requests is a prefix of the trained ids."""
    for name in ("OPENREWARD_SESSION_URL", "OPENREWARD_API_URL"):
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("OPENREWARD_API_KEY", "none")
    monkeypatch.setenv("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
    config, rows = tmp_path / "train_config.yaml", tmp_path / "rows.jsonl"
    config.write_text(HEAD % entry)
    settings = load_settings(config)
    write_tasks(await prepare_tasks(settings), rows)
    qwen = tokenizer("qwen3")

    engine = TextEngine(qwen)
    line = [sys.executable, KIT, cookbook, config, rows, tokenizer_folder("qwen3"), "127.0.0.1", await engine.start()]
    run = functools.partial(subprocess.run, [str(part) for part in line], capture_output=True, text=True, check=False)
    done = await anyio.to_thread.run_sync(run)
    await engine.runner.cleanup()
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])

    speller = Speller(qwen, qwen.convert_tokens_to_ids("<|im_end|>"), seed=1)

    def answer(ids: list[int], sampling: dict[str, Any]) -> list[int]:
        return [*speller.spell(scripted(qwen.decode(ids))), speller.stop]

    ours = []
    async with StubServer(answer) as server:
        policy = SGLangPolicy(Endpoint(base_url=server.url))
        for prompt in load_prompts(rows):
            before = len(server.requests)
            (sample,) = await generate(
                [prompt],
                settings=settings,
                endpoint=policy.endpoint,
                tokenizer=qwen,
                policy=policy,
                sampling=SamplingParams(max_new_tokens=512),
            )
            assert sample.failure is None, sample.failure
            for request in server.requests[before:]:
                assert request.input_ids == sample.tokens[: len(request.input_ids)]
            ours.append(sample)
        await policy.aclose()
    await settings.server("adder", "adder").aclose()

    rewards = [reward(sample, settings=settings) for sample in ours]
    assert rewards == [entry["reward"] for entry in theirs] == [entry["reward_func"] for entry in theirs]
    assert len(set(rewards)) > 1
    for sample, other in zip(ours, theirs, strict=True):
        for field in ("rewards", "stop_reason", "num_failed_tool_calls"):
            assert sample.metadata[field] == other["metadata"][field]
    kept = {tuple(entry["tokens"]) for entry in theirs}
    drifted = [ids for ids in engine.conditioned if not any(list(tokens[: len(ids)]) == ids for tokens in kept)]
    assert drifted, "the original is conditioned on ids that it does not train"
