"""``traces``: ``traces.jsonl`` of verifiers, a line for each episode with its traces; and lines of single traces.

A trace is a graph of messages; each node has the tokens that it adds, and a path from a root to a leaf is one training
sequence (verifiers 0.4.0, v1/graph.py: MessageNode; v1/trace.py: Trace, Branch). Logprobs are rounded to 4 decimals. A
sampled node on several paths is trained in the first one, as prime-rl trains it. A trace that is not ``ok`` is not
trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.audit.readers.lines import converted, read_lines
from rollouts.audit.rows import AuditedRow, Finding, Reader

__all__ = ["READER"]

_FORM = "episodes of verifiers' traces.jsonl, or its traces, one a line"


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


class _Node(msgspec.Struct):
    message: _Message
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float | None] = []


class _Reward(msgspec.Struct):
    score: float | None = None
    weight: float = 1.0


class _Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Task(msgspec.Struct):
    key: str | None = None
    hash: str | None = None


class _Agent(msgspec.Struct):
    name: str = "agent"
    trainable: bool = True


class _Trace(msgspec.Struct):
    nodes: list[_Node]
    id: str = ""
    task: _Task = msgspec.field(default_factory=_Task)
    agent: _Agent = msgspec.field(default_factory=_Agent)
    rewards: dict[str, _Reward | None] = {}
    ok: bool = False
    errors: list[_Error] = []


class _Group(msgspec.Struct):
    id: str


class _Episode(msgspec.Struct):
    traces: list[_Trace]
    id: str = ""
    group: _Group | None = None
    ok: bool = False


def _read(path: Path) -> Iterator[AuditedRow]:
    rows = ((place, _as_episode(value)) for place, value in read_lines(path))
    yield from converted(rows, _Episode, _FORM, _of_episode)


def _as_episode(value: Any) -> Any:
    """A line of one trace as an episode."""
    return {"traces": [value], "ok": True} if isinstance(value, dict) and "nodes" in value else value


def _of_episode(place: str, episode: _Episode) -> Iterator[AuditedRow]:
    for number, trace in enumerate(episode.traces):
        where = f"{place}, trace {trace.id[:8] or number}"
        yield from _of_trace(where, trace, episode)


def _of_trace(place: str, trace: _Trace, episode: _Episode) -> Iterator[AuditedRow]:
    findings = list(_of_nodes(place, trace.nodes))
    error = f"{trace.errors[-1].type}: {trace.errors[-1].message}" if trace.errors else "ok is false"
    task = trace.task.hash or trace.task.key if episode.group is None else episode.group.id
    row = AuditedRow(
        place,
        group=None if task is None else (task, trace.agent.name),
        rollout=trace.id or None,
        rewards=[_value(reward) for reward in trace.rewards.values() if reward is not None] or [None],
        failed=None if trace.ok else error,
        has_status=True,
        trained=trace.ok and episode.ok and trace.agent.trainable,
        findings=findings,
    )
    broken_graph = any(finding.check == "rows" for finding in findings)
    paths = [] if broken_graph else _paths(trace.nodes)
    if not paths or not any(node.token_ids for node in trace.nodes):
        yield row
        return
    trained: set[int] = set()
    for number, path in enumerate(paths):
        branch = _branch(f"{place}, branch {number}", trace.nodes, path, trained)
        if number:  # of the trace: said with its first branch
            row.rewards, row.findings = None, []
        for name in ("group", "rollout", "rewards", "failed", "has_status", "trained", "findings"):
            setattr(branch, name, getattr(row, name))
        trained.update(path)
        yield branch


def _value(reward: _Reward) -> float:
    return math.nan if reward.score is None else reward.score * reward.weight


def _of_nodes(place: str, nodes: Sequence[_Node]) -> Iterator[Finding]:
    """Rules of a single node."""
    for number, node in enumerate(nodes):
        where = f"{place}, node {number}"
        if node.parent is not None and not 0 <= node.parent < number:
            yield Finding.of("broken", "rows", f"{where}, parent", node.parent, f"an earlier node, below {number}")
        if len(node.mask) != len(node.token_ids):
            got, expected = f"{len(node.mask)} values", f"{len(node.token_ids)}, as many as token_ids"
            yield Finding.of("broken", "mask", f"{where}, mask", got, expected)
        elif len(node.logprobs) != sum(node.mask):
            got, expected = f"{len(node.logprobs)} numbers", f"{sum(node.mask)}, one for each trained token"
            yield Finding.of("broken", "logprobs", f"{where}, logprobs", got, expected)
        if any(node.mask) and not node.sampled:
            expected = f"no trained token: the model did not sample this {node.message.role} message"
            yield Finding.of("broken", "mask", f"{where}, mask", f"{sum(node.mask)} trained tokens", expected)
        elif node.sampled and node.token_ids and not any(node.mask):
            yield Finding.of("unusual", "mask", f"{where}, mask", "no trained token", "those of the sampled reply")


def _paths(nodes: Sequence[_Node]) -> list[list[int]]:
    """The path to each leaf, from its root; leaves in order."""
    parents = {node.parent for node in nodes}
    found = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].parent
        found.append(path[::-1])
    return found


def _branch(place: str, nodes: Sequence[_Node], path: Sequence[int], trained: set[int]) -> AuditedRow:
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float | None] = []
    texts = []
    for number in path:
        node = nodes[number]
        start = len(tokens)
        tokens += node.token_ids
        own = node.mask if len(node.mask) == len(node.token_ids) else [False] * len(node.token_ids)
        if number in trained or len(node.logprobs) != sum(own):
            own = [False] * len(own)
        mask += own
        values = iter(node.logprobs)
        logprobs += [next(values) if one else 0.0 for one in own]
        if any(own) and node.sampled and isinstance(node.message.content, str):
            texts.append((start, len(tokens), node.message.content))
    return AuditedRow(place, tokens=tokens, mask=mask, logprobs=logprobs, texts=texts)


READER = Reader(
    _read,
    ("traces.jsonl",),
    lacks={
        "once": "a sampled node is stored once, and the trainer decides in which of its paths it is trained",
        "requests": "the nodes are joined by the writer, and the ids of each request are not in the file",
        "advantages": "the file has no advantage of a rollout",
    },
)
