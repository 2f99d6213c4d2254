"""The columns of an export: name, type and meaning, and a stored sample as such a row.

Invariant: JSONL, Parquet and Hugging Face exports have the same columns with values of the same types. Every row has
all columns, and every message all of its fields; what a row lacks is null. The files of a run have another form
(``folder.py``), which its readers depend on. This module knows no file and no pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs

from rollouts.base.storable import to_json, to_plain
from rollouts.errors import Failure

__all__ = [
    "COLUMNS",
    "IMAGE",
    "MESSAGE",
    "SPAN",
    "TIME",
    "Column",
    "Type",
    "columns_table",
    "plain_message",
    "plain_row",
    "type_name",
]

Type: TypeAlias = "str | Sequence[Type] | Mapping[str, Type]"
"""The name of an Arrow type; a list of one type; or a struct by its fields."""

_STRINGS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "other")
_CALL: Mapping[str, Type] = {"type": "string", "id": "string", "function": {"name": "string", "arguments": "string"}}
MESSAGE: Mapping[str, Type] = {name: [_CALL] if name == "tool_calls" else "string" for name in _STRINGS}
SPAN: Mapping[str, Type] = {"version": "string", "start": "int32", "stop": "int32"}
TIME: Mapping[str, Type] = {"activity": "string", "name": "string", "began": "float64", "seconds": "float64"}
_COMPLETION: Mapping[str, Type] = {
    "request_id": "string",
    "start": "int32",
    "stop": "int32",
    "finish_reason": "string",
    "prompt_digest": "int64",
    "cached_tokens": "int32",
    "seconds": "float64",
    "continues": "bool_",
    "temperature": "float64",
    "logprobs_of": "string",
}
IMAGE: Mapping[str, Type] = {"sha256": "string", "start": "int32", "stop": "int32"}
_DIGESTS: Mapping[str, Type] = {"tokens": "int64", "loss_mask": "int64", "rollout_log_probs": "int64"}
_FAILURE: Mapping[str, Type] = {field.name: "string" for field in attrs.fields(Failure)}


@attrs.frozen
class Column:
    """One column of an export."""

    type: Type
    meaning: str


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "prompt": Column("string", "the prompt, if it is a string"),
        "prompt_messages": Column([MESSAGE], "the prompt, if it is a list of messages"),
        "messages": Column([MESSAGE], "the whole conversation"),
        "response": Column("string", "the text after the prompt: replies, and the environment's messages between them"),
        "label": Column("string", "the reference answer: a string as it is, another value as JSON"),
        "reward": Column("float64", "the reward; null where the sample failed before it had one"),
        "step_rewards": Column(["float64"], "the rewards of the environment's steps"),
        "step_completions": Column(
            ["int32"], "for each step reward the number of the completion that it answers, -1 or nothing if not known"
        ),
        "tokens": Column(["int32"], "prompt and response ids, in the order the model saw them"),
        "loss_mask": Column(["int8"], "1 where the policy sampled the token, else 0; as long as `tokens`"),
        "rollout_log_probs": Column(["float32"], "the logprob of each sampled token, else 0; as long as `tokens`"),
        "advantages": Column(["float32"], "the advantage of each token, as long as `tokens`; null unless one was set"),
        "teacher_log_probs": Column(
            ["float32"],
            "the logprob of each id under a teacher's weights, as long as `tokens`; null unless one was set",
        ),
        "loss_multiplier": Column("float64", "a factor of the sample's loss; 0 leaves it out"),
        "response_length": Column("int32", "tokens from the first sampled one to the end"),
        "versions": Column([SPAN], "the policy version of each range of sampled tokens"),
        "completions": Column([_COMPLETION], "one entry for each request: its reply is `tokens[start:stop]`"),
        "tools": Column("string", "the tools that the model was shown, a list in chat format as JSON; null if unknown"),
        "images": Column([IMAGE], "the images of the tokens: `images/<sha256>.png` has ids `tokens[start:stop]`"),
        "times": Column([TIME], "what the rollout did when; `began` is in seconds since 1970"),
        "group_index": Column("int64", "the number of the group in the run"),
        "index": Column("int64", "the number of the rollout in the run"),
        "rollout_id": Column("int64", "shared by the branches of one rollout"),
        "seat": Column("string", "the agent of the conversation, in a rollout of several; else empty"),
        "conversation": Column("int32", "the number of the conversation among those of its seat in the rollout"),
        "parent": Column("int32", "conversation that it continues"),
        "shared": Column("int32", "first tokens, of its parent"),
        "status": Column("string", "`completed`, `truncated`, `aborted`, `failed` or `pending`"),
        "stop_reason": Column("string", "why the episode ended"),
        "failure": Column(_FAILURE, "the failure that ended it"),
        "history": Column("string", "what was done where the chat template rewrites the history"),
        "metrics": Column([{"name": "string", "value": "float64"}], "the counters of the episode"),
        "metadata": Column("string", "the prompt's metadata, as JSON"),
        "outcome": Column("string", "of the group: `kept`, `dropped` or `failed`"),
        "reason": Column("string", "why the group was dropped or failed"),
        "batch": Column("int64", "the number of the batch; null in no batch"),
        "digests": Column(_DIGESTS, "checksums of the three token columns"),
    }
)


def plain_row(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a run as a row of an export."""
    prompt, label = stored["prompt"], stored["label"]
    is_text = isinstance(prompt, str)
    fields = {
        **stored,
        "prompt": to_plain(prompt) if is_text else None,
        "prompt_messages": None if is_text else [plain_message(message) for message in prompt],
        "messages": [plain_message(message) for message in stored["messages"]],
        "label": None if label is None else _text(label),
        "reward": None if stored["reward"] is None else float(stored["reward"]),
        "step_rewards": [float(reward) for reward in stored.get("step_rewards") or ()],
        "step_completions": stored.get("step_completions") or [],
        "loss_multiplier": float(stored.get("loss_multiplier", 1.0)),
        "seat": stored.get("seat") or "",
        "conversation": stored.get("conversation") or 0,
        "parent": stored.get("parent"),
        "shared": stored.get("shared") or 0,
        "metadata": to_json(stored["metadata"]).decode(),
        "metrics": [{"name": str(name), "value": float(value)} for name, value in stored["metrics"].items()],
        "versions": [dict(zip(SPAN, span, strict=True)) for span in stored["versions"]],
        "images": [dict(zip(IMAGE, span, strict=True)) for span in stored.get("images") or ()],
        "times": [dict(zip(TIME, span, strict=True)) for span in stored.get("times") or ()],
        "completions": [_struct(completion, _COMPLETION) for completion in stored["completions"]],
        "failure": stored["failure"] and _struct(stored["failure"], _FAILURE),
    }
    return {name: fields.get(name) for name in COLUMNS}


def _struct(value: Mapping[str, Any], fields: Mapping[str, Type]) -> dict[str, Any]:
    return {name: value.get(name) for name in fields}


def _text(value: Any) -> str:
    """A string unchanged but for lone surrogates, which are replaced; another value as JSON."""
    return str(to_plain(value)) if isinstance(value, str) else to_json(value).decode()


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def plain_message(message: Any) -> dict[str, Any]:
    """A chat message with the fields of :data:`MESSAGE`; ``other`` has, as JSON, what has no field."""
    if not isinstance(message, Mapping):
        return {**dict.fromkeys(MESSAGE), "other": to_json(message).decode()}
    calls, other = message.get("tool_calls"), {name: value for name, value in message.items() if name not in _FIELDS}
    row: dict[str, Any] = {name: _text_or_none(message.get(name)) for name in MESSAGE}
    row["tool_calls"] = None
    if isinstance(calls, list | tuple) and all(map(_is_call, calls)):
        row["tool_calls"] = [_call(call) for call in calls]
    elif calls is not None:
        other["tool_calls"] = calls
    row["other"] = to_json(other).decode() if other else None
    return row


_FIELDS = {*MESSAGE} - {"other"}


def _is_call(call: Any) -> bool:
    """Whether a tool call has no other fields than those of :data:`_CALL`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and {*call} <= {*_CALL} and {*function} <= {"name", "arguments"}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: _text_or_none(call["function"].get(name)) for name in ("name", "arguments")}
    return {"type": _text_or_none(call.get("type")), "id": _text_or_none(call.get("id")), "function": function}


def type_name(kind: Type) -> str:
    """A type as Arrow prints it, in short: ``list<int32>``, ``struct<start: int32>``."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, Mapping):
        return f"struct<{', '.join(f'{name}: {type_name(inner)}' for name, inner in kind.items())}>"
    (inner,) = kind
    return f"list<{'message' if inner is MESSAGE else type_name(inner)}>"


def columns_table() -> str:
    """The columns as a Markdown table, for the documentation and the card of a data set."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | `{type_name(column.type)}` | {column.meaning} |" for name, column in COLUMNS.items()]
    return "\n".join([*lines, "", f"A `message` is a `{type_name(MESSAGE)}`."])
