"""Figures of a model: its episodes at temperature 1 and greedy, on the embedded engine."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from rollouts.dtypes import Message, Prompt, ToolCall
from rollouts.engine import running_server
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from scripts.demo_model.demonstrations import (
    answer_text,
    bridge_text,
    opening_text,
)

CALLS = 3
NEW_TOKENS = 48


async def episode(
    session: aiohttp.ClientSession, url: str, tokenizer: Any, prompt: Prompt, seed: int
) -> tuple[bool, int]:
    """Run one problem at temperature 1; returns whether the answer was right, and the number of sampled tokens."""
    environment = CalculatorEnvironment()
    ids: list[int] = tokenizer.encode(opening_text(prompt))
    sampled = 0
    for turn in range(CALLS + 1):
        sampling = {"max_new_tokens": NEW_TOKENS, "sampling_seed": seed * 8 + turn}
        async with session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}) as response:
            answer = await response.json()
        ids += answer["output_ids"]
        sampled += len(answer["output_ids"])
        call = read_call(answer["text"])
        if call is None:
            return answer["text"] == answer_text(prompt.label), sampled
        result = await environment.step(Message("assistant", tool_calls=(call,)))
        ids += tokenizer.encode(bridge_text(result.messages[0].text))
    return False, sampled


def read_call(text: str) -> ToolCall | None:
    """The call that a reply consists of; ``None`` for an answer."""
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    if match is None:
        return None
    try:
        content = json.loads(match[1])
        call = ToolCall(content["name"], content["arguments"])
    except (ValueError, TypeError, KeyError):
        return None
    known = {tool.name for tool in CalculatorEnvironment().tools}
    return call if call.name in known and isinstance(call.arguments, dict) else None


async def measure(folder: Path, tokenizer: Any, seed: int, groups: int, size: int) -> dict[str, float]:
    """Run ``groups`` problems ``size`` times each with the embedded engine."""
    prompts = list(itertools.islice(calculator_prompts(seed), groups))
    rewards = [[False] * size for _ in prompts]
    sampled = 0
    free = anyio.CapacityLimiter(64)

    async with running_server(folder) as url, aiohttp.ClientSession() as session:

        async def play(group: int, number: int) -> None:
            nonlocal sampled
            async with free:
                reward, count = await episode(session, url, tokenizer, prompts[group], group * size + number)
            rewards[group][number] = reward
            sampled += count

        async with anyio.create_task_group() as tasks:
            for group in range(groups):
                for number in range(size):
                    tasks.start_soon(play, group, number)

    def mean(rows: list[list[bool]]) -> float:
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))

    steps = [len(prompt.metadata["steps"]) for prompt in prompts]
    return {
        "accuracy": mean(rewards),
        "one-step accuracy": mean([row for row, count in zip(rewards, steps, strict=True) if count == 1]),
        "two-step accuracy": mean([row for row, count in zip(rewards, steps, strict=True) if count == 2]),
        "groups without spread": sum(len(set(row)) == 1 for row in rewards) / groups,
        "sampled tokens an episode": sampled / (groups * size),
        "episodes": groups * size,
    }
