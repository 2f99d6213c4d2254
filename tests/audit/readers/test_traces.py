"""Traces that verifiers' own code writes: its message graph, its branches, its file."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from pathlib import Path
from typing import Any

import pytest

from rollouts.audit import audit, reader_of
from tests.audit.dumps import conversations, encode, model_tokens

graph: Any = pytest.importorskip("verifiers.v1.graph")
pytestmark = pytest.mark.extra


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
    assert [str(finding) for finding in report.findings] == []
    assert report.rows == len(conversations()) * (1 + rewritten)
    assert report.judged["roles"] == report.judged["text"] // (1 if rewritten else 2) == report.rows
