"""Dumps in the forms of other systems, from conversations whose logprobs are those of the demo model."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rollouts.audit import AuditReport, ModelTokens
from rollouts.engine import DEMO_MODEL
from rollouts.renderer import load_tokenizer

__all__ = [
    "Dump",
    "conversations",
    "encode",
    "logprobs",
    "model_tokens",
    "of_gym",
    "of_nemo",
    "of_slime",
    "of_traces",
    "said",
    "write_lines",
]

Dump = list[dict[str, Any]]

HEADER = "<|im_start|>assistant\n"
GROUPS, SIZE = 3, 4


@functools.cache
def model_tokens() -> ModelTokens:
    return ModelTokens(load_tokenizer(DEMO_MODEL))


def _decode(tokens: Sequence[int]) -> str:
    return model_tokens().codec.decode(tokens)


@functools.cache
def _teacher() -> Any:
    from rollouts.engine.teacher import Teacher  # here: it imports torch

    return Teacher(DEMO_MODEL, "float32")


def encode(text: str) -> list[int]:
    return model_tokens().codec.encode(text).tolist()


def logprobs(tokens: Sequence[int], mask: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Those of the demo model where the mask is 1, 0 elsewhere."""
    positions = np.flatnonzero(mask)
    column = np.zeros(len(tokens))
    if not len(positions):
        return column.tolist()
    column[positions] = _teacher().logprobs(np.array(tokens, np.int32), positions, temperature)
    return column.tolist()


@attrs.frozen
class Conversation:
    """Texts shown and sampled, in turns; each reply ends with its stop token."""

    group: int
    index: int
    turns: list[tuple[str, str]]

    @property
    def columns(self) -> tuple[list[int], list[int]]:
        """Tokens and mask."""
        tokens: list[int] = []
        mask: list[int] = []
        for shown, reply in self.turns:
            for text, one in ((shown, 0), (reply, 1)):
                ids = encode(text)
                tokens += ids
                mask += [one] * len(ids)
        return tokens, mask

    @property
    def reward(self) -> float:
        return float(self.index % 2)


@functools.cache
def conversations() -> tuple[Conversation, ...]:
    """Groups of rollouts with a tool call, a tool result and an answer each."""
    found = []
    for index in range(GROUPS * SIZE):
        group = index // SIZE
        question = f"<|im_start|>user\nWhat is {group} + 3?<|im_end|>\n{HEADER}"
        call = f"<think>\nadd {index}\n</think>\n\n<tool_call>\n{group} + 3\n</tool_call><|im_end|>"
        result = f"\n<|im_start|>user\n<tool_response>\n{group + 3}\n</tool_response><|im_end|>\n{HEADER}"
        found.append(Conversation(group, index, [(question, call), (result, f"It is {group + index % 2}.<|im_end|>")]))
    return tuple(found)


def of_slime() -> Dump:
    """Dicts as ``Sample.to_dict`` of slime 0.3.1 writes them."""
    rows = []
    for one in conversations():
        tokens, mask = one.columns
        before = mask.index(1)
        values = logprobs(tokens, mask)
        rows.append(
            {
                "group_index": one.group,
                "index": one.index,
                "rollout_id": one.index,
                "prompt": f"What is {one.group} + 3?",
                "label": str(one.group + 3),
                "tokens": tokens,
                "response": _decode(tokens[before:]),
                "response_length": len(tokens) - before,
                "loss_mask": mask[before:],
                "rollout_log_probs": values[before:],
                "reward": one.reward,
                "status": "completed",
                "remove_sample": False,
                "metadata": {},
                "weight_versions": ["3"],
                "multimodal_inputs": None,
            }
        )
    return rows


def of_traces() -> Dump:
    """Episodes as ``write_episode`` of verifiers 0.4.0 writes them."""
    rows = []
    for one in conversations():
        nodes: list[dict[str, Any]] = []
        tokens, mask = one.columns
        values, at = logprobs(tokens, mask), 0
        for number, (shown, reply) in enumerate(one.turns):
            context, header, ids = encode(shown.removesuffix(HEADER)), encode(HEADER), encode(reply)
            parent = {"parent": len(nodes) - 1} if nodes else {}
            role = "tool" if number else "user"
            nodes.append({**parent, "message": {"role": role, "content": shown}, "sampled": False})
            nodes[-1] |= {"token_ids": context, "mask": [False] * len(context), "logprobs": []}
            at += len(context) + len(header)
            content = reply.partition("<|im_end|>")[0]
            nodes.append({"parent": len(nodes) - 1, "message": {"role": "assistant", "content": content}})
            nodes[-1] |= {"sampled": True, "token_ids": header + ids, "mask": [False] * len(header) + [True] * len(ids)}
            nodes[-1]["logprobs"] = [round(value, 4) for value in values[at : at + len(ids)]]
            at += len(ids)
        trace = {
            "id": f"trace{one.index}",
            "task": {"type": "Task", "data": {}, "hash": f"task{one.group}"},
            "agent": {"config": {}, "name": "agent", "trainable": True},
            "nodes": nodes,
            "rewards": {"correct": {"score": one.reward, "weight": 1.0}},
            "ok": True,
            "errors": [],
        }
        rows.append({"id": f"episode{one.index}", "ok": True, "traces": [trace]})
    return rows


def of_gym() -> Dump:
    """Rollouts as NeMo Gym writes them, with ids and logprobs of each call in its output items."""
    rows = []
    for one in conversations():
        items: list[dict[str, Any]] = []
        tokens, mask = one.columns
        values, before = logprobs(tokens, mask), 0
        for shown, reply in one.turns:
            start = before + len(encode(shown))
            stop = start + len(encode(reply))
            items.append(
                {
                    "type": "message",
                    "role": "assistant",
                    "prompt_token_ids": tokens[:start],
                    "generation_token_ids": tokens[start:stop],
                    "generation_log_probs": values[start:stop],
                }
            )
            items.append({"type": "function_call_output", "output": "text"})
            before = stop
        rows.append({"_ng_task_index": one.group, "response": {"output": items, "error": None}, "reward": one.reward})
    return rows


def of_nemo() -> Dump:
    """Lines as NeMo-RL's ``log_batched_dict_as_jsonl`` writes them: one sequence each, padded."""
    width = max(len(one.columns[0]) for one in conversations()) + 2
    rows = []
    for one in conversations():
        tokens, mask = one.columns
        values = logprobs(tokens, mask)
        pad = [0] * (width - len(tokens))
        rows.append(
            {
                "content": ["text"],
                "rewards": [one.reward],
                "input_lengths": [len(tokens)],
                "token_ids": [tokens + pad],
                "token_loss_mask": [mask + pad],
                "sample_loss_mask": [1.0],
                "advantages": [[one.reward - 0.5] * width],
                "generation_logprobs": [values + pad],
                "prev_logprobs": [[value + 0.001 for value in values] + pad],
                "idx": one.index,
            }
        )
    return rows


def write_lines(path: Path, rows: Dump) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(name: str, report: AuditReport) -> list[str]:
    """The broken findings; prints a line of the table of ``docs/audit.md``."""
    unusual = ", ".join(f"{count} {check}" for check, count in sorted(report.unusual.items())) or "0"
    weights = report.judged["weights"] or "–"
    print(f"\n| {name} | {report.rows} | {report.tokens} | {report.broken.total()} | {unusual} | {weights} |")
    return [str(finding) for finding in report.findings if finding.kind == "broken"]
