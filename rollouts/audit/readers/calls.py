"""``calls``: dumps with the ids of each request and reply, so that law 1 is judged in full and without weights.

There are four forms:

1. NeMo Gym's ``rollouts.jsonl``: items of ``response.output`` with ``prompt_token_ids``, ``generation_token_ids`` and
   ``generation_log_probs``.
2. Harbor's trial results: ``rollout_details``, each a chat history that is trained as one sequence, with
   ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs`` by turn
   (harbor 0.25.0, models/agent/rollout_detail.py).
3. Trajectories in ATIF, as Harbor's agents write them: steps of the agent whose ``metrics`` have
   ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs`` (harbor 0.25.0, models/trajectories/metrics.py). They
   name no task and no reward. A folder of trials has them in its results, too, so that one is read if it is named.
4. rLLM's episodes: ``trajectories`` of ``steps`` with ``prompt_ids``, ``response_ids`` and ``logprobs``. Steps whose
   prompt rewrites the history are trained alone, so that a rewrite is unusual and not broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.audit.readers.lines import converted, read_lines
from rollouts.audit.rows import AuditedRow, Finding, Kind, Reader
from rollouts.errors import ConfigError

__all__ = ["READER"]

_FORM = "rollouts of NeMo Gym with token ids, trial results of Harbor with rollout_details, ATIF, or episodes of rLLM"
Ids = list[int]
Numbers = list[float | None]


class _Call(msgspec.Struct):
    prompt: Ids
    reply: Ids
    logprobs: Numbers | None = None


class _Rollout(msgspec.Struct):
    histories: list[list[_Call]]
    linear: bool
    """Whether the trainer joins the calls of a history to one sequence."""
    reward: float | None = None
    group: str | int | None = None
    rollout: str | int | None = None
    failed: str | None = None
    has_status: bool = False
    has_reward: bool = True


def _read(path: Path) -> Iterator[AuditedRow]:
    rows = _objects(path) if path.suffix == ".json" else read_lines(path)
    yield from converted(((place, _plain(value)) for place, value in rows), _Rollout, _FORM, _rows)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """The value of a file of one JSON value, or those of its list."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError.of("FILE", f"{path} ({error})", "a file of JSON") from error
    for number, one in enumerate(value if isinstance(value, list) else [value]):
        yield f"{path.name}, value {number}", one


def _plain(value: Any) -> Any:
    """A line of one of the forms as the fields of ``_Rollout``; any other line as it is, to be refused."""
    if not isinstance(value, dict):
        return value
    try:
        if "response" in value:
            return _of_gym(value)
        if "trajectories" in value:
            return _of_rllm(value)
        if str(value.get("schema_version")).startswith("ATIF"):
            return _of_atif(value)
        result = value.get("agent_result")
        if "rollout_details" in (result if isinstance(result, dict) else value):
            return _of_harbor(value, result if isinstance(result, dict) else value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return msgspec.ValidationError(f"{type(error).__name__}: {error}")
    return msgspec.ValidationError(f"an object with the fields {', '.join(map(str, value))}")


def _of_gym(value: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "prompt": item["prompt_token_ids"],
            "reply": item["generation_token_ids"],
            "logprobs": item.get("generation_log_probs"),
        }
        for item in value["response"].get("output", [])
        if "generation_token_ids" in item
    ]
    return {
        "histories": [calls],
        "linear": True,
        "reward": _number(value.get("reward")),
        "group": _first(value, "_ng_task_index", "task_index", "task_id"),
        "failed": _text(value.get("error") or value["response"].get("error")),
        "has_status": "error" in value or "error" in value["response"],
    }


def _of_harbor(value: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    histories = []
    for detail in result["rollout_details"] or []:
        prompts, replies = detail["prompt_token_ids"], detail["completion_token_ids"]
        logprobs = detail.get("logprobs") or [None] * len(replies)
        columns = zip(prompts, replies, logprobs, strict=True)
        histories.append([dict(zip(("prompt", "reply", "logprobs"), one, strict=True)) for one in columns])
    verified = value.get("verifier_result") or {}
    rewards = verified.get("rewards") or {}
    return {
        "histories": histories,
        "linear": True,
        "reward": _number(value.get("reward", rewards.get("reward"))),
        "group": _first(value, "task_name", "task_checksum"),
        "rollout": _first(value, "id", "trial_name"),
        # A trial that ends with an exception, such as a timeout, may still be verified.
        "failed": None if verified else _text((value.get("exception_info") or {}).get("exception_type")),
        "has_status": "exception_info" in value,
    }


def _of_atif(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "histories": _atif_histories(value),
        "linear": True,
        "rollout": value.get("session_id"),
        "has_reward": False,
    }


def _atif_histories(value: dict[str, Any]) -> list[Any]:
    """The calls of a trajectory, and of its subagents."""
    metrics = [step.get("metrics") or {} for step in value["steps"] if step["source"] == "agent"]
    calls = [
        {"prompt": one["prompt_token_ids"], "reply": one["completion_token_ids"], "logprobs": one.get("logprobs")}
        for one in metrics
        if one.get("completion_token_ids") is not None
    ]
    others = [_atif_histories(one) for one in value.get("subagent_trajectories") or ()]
    return [calls, *(history for histories in others for history in histories)]


def _of_rllm(value: dict[str, Any]) -> dict[str, Any]:
    histories = [
        [
            {"prompt": step["prompt_ids"], "reply": step["response_ids"], "logprobs": step.get("logprobs")}
            for step in trajectory["steps"]
        ]
        for trajectory in value["trajectories"]
    ]
    rewards = [trajectory.get("reward") for trajectory in value["trajectories"]]
    task, _, _ = str(value.get("id", "")).rpartition(":")  # an episode's id is its task's with a number
    return {
        "histories": histories,
        "linear": False,
        "reward": _number(next((reward for reward in rewards if reward is not None), None)),
        "group": value.get("task_id") or task or None,
        "rollout": value.get("id"),
        "failed": _text(value["termination_reason"]) if value.get("termination_reason") == "error" else None,
        "has_status": "termination_reason" in value,
    }


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


def _first(value: dict[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _text(value: Any) -> str | None:
    return None if not value else str(value)


@attrs.define
class _Sequence:
    """Calls that follow each other, joined."""

    tokens: Ids = attrs.field(factory=list)
    mask: list[int] = attrs.field(factory=list)
    logprobs: Numbers | None = attrs.field(factory=list)

    def add(self, call: _Call, place: str) -> Iterator[Finding]:
        """Add a call whose prompt begins with the tokens."""
        shown = call.prompt[len(self.tokens) :]
        self.tokens += shown + call.reply
        self.mask += [0] * len(shown) + [1] * len(call.reply)
        logprobs = call.logprobs
        if logprobs is not None and len(logprobs) != len(call.reply):
            expected = f"{len(call.reply)}, one for each token of the reply"
            yield Finding.of("broken", "logprobs", place, f"{len(logprobs)} logprobs", expected)
            logprobs = [0.0] * len(call.reply)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += [0.0] * len(shown) + logprobs


def _rows(place: str, rollout: _Rollout) -> Iterator[AuditedRow]:
    rows: list[AuditedRow] = []
    for number, history in enumerate(rollout.histories):
        where = f"{place}, history {number}" if len(rollout.histories) > 1 else place
        rows += _of_history(where, history, "broken" if rollout.linear else "unusual")
    rows = rows or [AuditedRow(place)]
    for row in rows:
        row.group = rollout.group
        row.rollout = None if rollout.rollout is None else (rollout.group, rollout.rollout)
        row.failed, row.has_status = rollout.failed, rollout.has_status
    rows[0].rewards = [rollout.reward] if rollout.has_reward else None
    yield from rows


def _of_history(place: str, history: list[_Call], rewritten: Kind) -> Iterator[AuditedRow]:
    """The sequences of a history: one, unless a prompt does not begin with the tokens before it."""
    sequence, findings = _Sequence(), []
    for number, call in enumerate(history):
        where = f"{place}, call {number}"
        before = sequence.tokens
        at = _first_difference(before, call.prompt)
        if at is not None:
            kind: Kind = rewritten if sequence.mask[at] else "unusual"
            got = f"id {call.prompt[at]}" if at < len(call.prompt) else f"the end of its {len(call.prompt)} ids"
            origin = "sampled in an earlier call" if sequence.mask[at] else "shown in an earlier call"
            findings.append(
                Finding.of(kind, "requests", f"{where}, prompt position {at}", got, f"id {before[at]}, {origin}")
            )
            yield _row(place, sequence, findings, judged=True)
            sequence, findings = _Sequence(), []
        findings += sequence.add(call, where)
    if sequence.tokens:
        yield _row(place, sequence, findings, judged=len(history) > 1)


def _row(place: str, sequence: _Sequence, findings: list[Finding], *, judged: bool) -> AuditedRow:
    return AuditedRow(
        place,
        tokens=sequence.tokens,
        mask=sequence.mask,
        logprobs=sequence.logprobs,
        findings=findings,
        judged={"requests"} if judged else set(),
    )


def _first_difference(before: Ids, prompt: Ids) -> int | None:
    """The first position of ``before`` at which ``prompt`` has another id or none; ``None`` if it begins with it."""
    if prompt[: len(before)] == before:
        return None
    return next((at for at, (one, other) in enumerate(zip(before, prompt, strict=False)) if one != other), len(prompt))


READER = Reader(
    _read,
    (".jsonl", "result.json"),
    lacks={
        "once": "two calls of a program may be equal, and are then two replies",
        "text": "the text of a reply is parsed into items, and is not that of its ids",
        "advantages": "the file has no advantages",
    },
)
