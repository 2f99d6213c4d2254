"""The job of ``peers.py`` as a plug-in of verifiers: tasks, and a harness that runs them in this process.

verifiers uses its own environment, interception server, training client with its renderer, trace and reward. Two parts
are cheaper than its defaults, in its favour: its stock harness starts a process for each episode (seconds of CPU), and
runs tools in MCP servers. ``Harness.launch`` allows a loop in the process; this one is minimal (aiohttp, plain
functions as tools).
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Iterable
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.utils.loaders import load_environment

from scripts.benches.peers_job import SYSTEM, TOOLS, calculated, reward

__all__ = ["InProcess", "Problems", "episodes", "play"]

_VALUES = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv}


class Problem(vf.Task[vf.TaskData]):
    """One prompt, and its reward."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Score the last message."""
        return reward(str(trace.branches[-1].messages[-1].content))


class Problems(vf.Taskset[Problem, vf.TasksetConfig]):
    """The prompts of the round."""

    prompts: ClassVar[list[str]] = []

    def load(self) -> Iterable[Problem]:
        for prompt in self.prompts:
            yield Problem(vf.TaskData(prompt=prompt, system_prompt=SYSTEM), self.config.task)


class InProcessConfig(vf.HarnessConfig):
    """No further settings."""


class InProcess(vf.Harness[InProcessConfig]):
    """The loop: request a reply and run its calls, until a reply has none."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    http: ClassVar[aiohttp.ClientSession]
    tools: ClassVar[list[Any]] = [one.to_chat() for one in TOOLS]

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Every call of the model goes to the interception server, as it must."""
        system, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": self.tools}
            async with self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                said = (await response.json())["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return vf.ProgramResult(0, "", "")
            for call in said["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                value = calculated(_VALUES[call["function"]["name"]](arguments["a"], arguments["b"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": value})


async def play(folder: str, url: str, prompts: list[str], in_flight: int, reply: int) -> list[Any]:
    """Ids, mask, logprobs and reward of each episode."""
    return [_row(episode) for episode in await episodes(folder, url, prompts, in_flight, reply)]


async def episodes(folder: str, url: str, prompts: list[str], in_flight: int, reply: int) -> list[vf.Episode]:
    """The episodes of one environment."""
    Problems.prompts = prompts
    config = vf.SingleAgentEnvConfig.model_validate(
        {
            "taskset": {"id": __name__},
            "agent": {"harness": {"id": __name__}, "runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
    )
    environment = load_environment(config)
    client = vf.TrainClientConfig(base_url=f"{url}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=folder)
    context = vf.ModelContext(model=folder, client=client, sampling=vf.SamplingConfig(max_tokens=reply))
    semaphore = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as InProcess.http:
        async with environment.serving(), asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(environment.run_slot(environment.slots(task)[0], context, semaphore))
                for task in environment.taskset
            ]
    return [run.result() for run in runs]


def _row(episode: vf.Episode) -> tuple[list[int], list[bool], list[float], float]:
    (trace,) = episode.traces
    if not trace.ok:
        raise SystemExit(f"verifiers failed: {[error.message for error in (*episode.errors, *trace.errors)]}")
    (branch,) = trace.branches
    return branch.token_ids, branch.sampled_mask, branch.logprobs, trace.reward
