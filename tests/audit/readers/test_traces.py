"""Traces that verifiers' own code writes, without alarm: ``scripts/test --trainers dumps``."""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import random
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.audit import audit, reader_of
from rollouts.engine import DEMO_MODEL
from rollouts.testing.canned import canned_server
from scripts.benches.peers_job import REPLY, Job
from tests.audit.dumps import conversations, encode, model_tokens, said

ROOT = Path(__file__).parents[3]

graph: Any = pytest.importorskip("verifiers.v1.graph")
pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]  # of verifiers and its dependencies


def committed(trace: Any, prompt: list[Any], spans: list[str], reply: str, rng: random.Random) -> Any:
    """A turn of the graph, as verifiers' train client commits it; returns the reply as a message."""
    from verifiers.v1.types import AssistantMessage, Response, TurnTokens

    pieces = [encode(text) for text in spans]
    edges = [0]
    for piece in pieces:
        edges.append(edges[-1] + len(piece))
    ids = encode(reply + "<|im_end|>")
    tokens = TurnTokens(
        prompt_ids=functools.reduce(operator.iadd, pieces, []) + encode("<|im_start|>assistant\n"),
        completion_ids=ids,
        completion_logprobs=[-rng.expovariate(1) for _ in ids],
        message_spans=list(itertools.pairwise(edges)),
    )
    message = AssistantMessage(content=reply)
    answer = Response(id="r", created=0, model="m", message=message, finish_reason="stop", tokens=tokens)
    graph.prepare_turn(trace, prompt).commit(answer)
    return message


@pytest.mark.parametrize("rewritten", [False, True])
def test_traces_that_verifiers_writes_raise_no_alarm(rewritten: bool, tmp_path: Path) -> None:
    """Also where the second request drops the thought of the first reply, so that the trace has two branches."""
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.episode import Episode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Reward, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode

    rng = random.Random(0)
    for one in conversations():
        task = TraceTask(type="T", data=WireTaskData(idx=one.group), hash=f"task{one.group}")
        trace = Trace(task=task, agent=AgentInfo(config=WireAgentConfig.model_construct()))
        question, answer = UserMessage(content="q"), UserMessage(content="result")
        asked = f"<|im_start|>user\nWhat is {one.group}?<|im_end|>\n"
        reply = committed(trace, [question], [asked], f"<think>\nadd\n</think>\n\ncall {one.index}", rng)
        if rewritten:
            reply = AssistantMessage(content=f"call {one.index}")
        shown = f"<|im_start|>assistant\n{reply.content}<|im_end|>"
        result = "\n<|im_start|>user\n7<|im_end|>\n"
        committed(trace, [question, reply, answer], [asked, shown, result], f"It is {one.index}.", rng)
        trace.rewards = {"correct": Reward(score=one.reward)}
        trace.ok = one.index != 3
        write_episode(tmp_path, Episode(task=task, traces=[trace], ok=trace.ok))
    report = audit(tmp_path, reader_of("traces"), model_tokens=model_tokens())
    assert said(f"verifiers, {'a thought dropped' if rewritten else 'two turns'}", report) == []
    assert report.rows == len(conversations()) * (1 + rewritten)
    assert report.judged["roles"] == report.judged["text"] // (1 if rewritten else 2) == report.rows


def test_traces_of_an_environment_raise_no_alarm(tmp_path: Path) -> None:
    """Environment, interception server, train client and renderer of verifiers; three turns with tool calls each."""
    from verifiers.v1.utils.trace_store import write_episode

    sys.path.insert(0, str(ROOT / "scripts" / "benches"))  # verifiers finds plug-ins by the name of a module
    try:
        module = importlib.import_module("peers_verifiers")
    finally:
        sys.path.pop(0)
    job = Job.of(str(DEMO_MODEL))
    prompts = [prompt for prompt in job.prompts(0)[:4] for _ in range(4)]
    with canned_server(job.canned) as url:
        played = anyio.run(module.episodes, job.folder, url, prompts, 16, REPLY, backend="asyncio")
    for episode in played:
        write_episode(tmp_path, episode)
    report = audit(tmp_path, reader_of("traces"), model_tokens=model_tokens())
    assert said("verifiers, its environment", report) == []
    assert (report.rows, report.judged["roles"]) == (16, 16)
