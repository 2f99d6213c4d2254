"""Steps that NeMo-RL's own code plays, flattens and logs, without alarm: ``scripts/test --trainers nemo``.

Its rollout loop, loss masks, the statements of ``grpo_train`` that collect a step, and its logger run unchanged; a stub
stands for the engine and the environment, and the demo model for the trainer's forward pass.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.audit import AuditReport, audit, reader_of
from rollouts.audit.weights import Weights
from rollouts.engine import DEMO_MODEL
from rollouts.renderer import load_tokenizer
from tests.audit.dumps import HEADER, conversations, encode, logprobs, model_tokens, said
from tests.lifted import lifted, run_statements

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]

LOSSES = "add_grpo_token_loss_masks_and_generation_logprobs"


@pytest.fixture
def source() -> Path:
    """The folder of the package."""
    spec = importlib.util.find_spec("nemo_rl")
    if spec is None or spec.origin is None:
        pytest.skip("scripts/test --trainers nemo runs it")
    return Path(spec.origin).parent


class Played:
    """The engine and the environment of the conversations of ``tests/audit/dumps.py``, a batch at a time.

    Args:
        shown: the end of a message that the environment adds after the last reply.
        cut: the conversation whose last reply the engine cuts.
    """

    def __init__(self, batch_of: Callable[..., Any], shown: str = "", cut: int | None = None) -> None:
        self._batch_of, self._shown, self._cut = batch_of, shown, cut
        self.step = SimpleNamespace(remote=self._step)

    def generate(self, data: Any, greedy: bool) -> Any:
        """The reply that follows the ids of each row, with the logprobs of the demo model."""
        rows, values, lengths, cut = [], [], [], []
        for row, length in zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True):
            one, turn = self._turn_of(row[:length])
            ids = encode(conversations()[one].turns[turn][1])
            cut.append(one == self._cut and turn == 1)
            tokens = row[:length] + (ids[:-2] if cut[-1] else ids)
            rows.append(tokens)
            mask = [0] * length + [1] * (len(tokens) - length)
            values.append(logprobs(tokens, mask))
            lengths.append(len(tokens) - length)
        width = max(map(len, rows))
        return self._batch_of(
            {
                "output_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
                "logprobs": torch.tensor([row + [0.0] * (width - len(row)) for row in values]),
                "generation_lengths": torch.tensor(lengths),
                "unpadded_sequence_lengths": torch.tensor(list(map(len, rows))),
                "truncated": torch.tensor(cut),
            }
        )

    def _turn_of(self, tokens: list[int]) -> tuple[int, int]:
        """The conversation and the turn of a prompt; equal prompts are those of a group, in order."""
        self._asked = getattr(self, "_asked", {})
        for number, one in enumerate(conversations()):
            before: list[int] = []
            for turn, (shown, reply) in enumerate(one.turns):
                before += encode(shown)
                if before == tokens and (number, turn) not in self._asked:
                    self._asked[number, turn] = True
                    return number, turn
                before += encode(reply)
        raise AssertionError(tokens)

    def _step(self, logs: Sequence[Sequence[Mapping[str, str]]], numbers: Sequence[int]) -> Any:
        ends = [sum(message["role"] == "assistant" for message in log) == 2 for log in logs]
        texts = [
            self._shown if end else conversations()[one].turns[1][0] for end, one in zip(ends, numbers, strict=True)
        ]
        rewards = [conversations()[one].reward if end else 0.0 for end, one in zip(ends, numbers, strict=True)]
        shown = [{"role": "environment", "content": text} for text in texts]
        result = shown, list(numbers), None, torch.tensor(rewards), torch.tensor(ends), None
        return lambda: result  # the future of an actor


def dumped(
    source: Path, folder: Path, played: dict[str, Any], skip_prev_logprobs: bool = False, limit: int = 999
) -> Path:
    """The file of one step of ``grpo_train``."""
    utils: Any = importlib.import_module("nemo_rl.data.llm_message_utils")
    batch_of: Any = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    interfaces: Any = importlib.import_module("nemo_rl.environments.interfaces")
    media: Any = importlib.import_module("nemo_rl.data.multimodal_utils")
    play = lifted(
        source / "experience" / "rollouts.py",
        *("_add_r3_fallback_metrics", "_find_routed_experts_template", "generate_responses", "calculate_rewards"),
        *("_add_multimodal_generation_payload", "backfill_missing_routed_experts", "run_multi_turn_rollout"),
        torch=torch,
        ray=SimpleNamespace(get=lambda futures: [future() for future in futures]),
        BatchedDataDict=batch_of,
        EnvironmentReturn=interfaces.EnvironmentReturn,
        NATIVE_MULTIMODAL_KEYS=media.NATIVE_MULTIMODAL_KEYS,
        batched_message_log_to_flat_message=utils.batched_message_log_to_flat_message,
        get_keys_from_message_log=utils.get_keys_from_message_log,
        **dict.fromkeys(("GenerationDatumSpec", "FlatMessagesType", "DatumSpec"), Any),
    )
    stub, tokenizer = Played(batch_of, **played), load_tokenizer(DEMO_MODEL)
    start = batch_of(
        {
            "message_log": [
                [{"role": "user", "content": one.turns[0][0], "token_ids": torch.tensor(encode(one.turns[0][0]))}]
                for one in conversations()
            ],
            "extra_env_info": [one.index for one in conversations()],
            "task_name": ["sum"] * len(conversations()),
        }
    )
    batch, _ = play["run_multi_turn_rollout"](stub, start, tokenizer, {"sum": stub}, limit)
    masks = lifted(
        source / "algorithms" / "grpo.py",
        *(LOSSES, "_should_log_nemo_gym_responses"),
        torch=torch,
        cast=lambda _, value: value,
        backfill_missing_routed_experts=play["backfill_missing_routed_experts"],
    )
    masks[LOSSES](batch["message_log"])
    flat, lengths = utils.batched_message_log_to_flat_message(
        batch["message_log"], pad_value_dict={"token_ids": 0}, make_sequence_length_divisible_by=8
    )
    batch["loss_multiplier"] = (~batch["truncated"]).float()
    scope = {
        **masks,
        "BatchedDataDict": batch_of,
        "ClippedPGLossDataDict": Any,
        "flat_messages": flat,
        "input_lengths": lengths,
        "repeated_batch": batch,
        "rewards": batch["total_reward"],
        "master_config": SimpleNamespace(env={}, grpo=SimpleNamespace(use_dynamic_sampling=False)),
        "total_steps": 0,
        "logger": writer(source, folder, batch_of),
    }
    collects = lambda node: isinstance(node, ast.Assign) and ast.unparse(node).startswith("train_data = ")  # noqa: E731
    assert run_statements(source / "algorithms" / "grpo.py", "grpo_train", collects, scope) == 1
    exact = torch.zeros_like(flat["generation_logprobs"])
    for number, length in enumerate(lengths.tolist()):
        tokens = flat["token_ids"][number, :length].tolist()
        noise = np.random.default_rng(number).normal(0, 0.01, length)  # of bfloat16
        exact[number, :length] = torch.tensor(np.array(logprobs(tokens, [0] + [1] * (length - 1))) + noise)
    scope["train_data"]["prev_logprobs"] = torch.zeros_like(exact) if skip_prev_logprobs else exact
    centred = batch["total_reward"] - batch["total_reward"].mean()
    scope["train_data"]["advantages"] = centred[:, None].expand(-1, flat["token_ids"].shape[1])
    logs = lambda node: isinstance(node, ast.If) and "log_data['agent_ref']" in ast.unparse(node)  # noqa: E731
    found = [0]

    def outermost(node: ast.stmt) -> bool:
        found[0] += logs(node)
        return logs(node) and found[0] == 1

    assert run_statements(source / "algorithms" / "grpo.py", "grpo_train", outermost, scope) == 1
    return folder / "train_data_step1.jsonl"


def writer(source: Path, folder: Path, batch_of: Any) -> Any:
    """The logger, of which only the method that writes lines is run."""
    import os

    method = lifted(
        source / "utils" / "logger.py",
        "log_batched_dict_as_jsonl",
        BatchedDataDict=batch_of,
        os=os,
        json=json,
        torch=torch,
        np=np,
    )["log_batched_dict_as_jsonl"]
    logger = SimpleNamespace(base_log_dir=str(folder))
    logger.log_batched_dict_as_jsonl = method.__get__(logger)
    return logger


def judged(path: Path, weights: bool = False) -> AuditReport:
    model = Weights(DEMO_MODEL, "float32", 1.0) if weights else None
    return audit(path, reader_of("nemo-rl"), model_tokens=model_tokens(), weights=model)


CASES: dict[str, dict[str, Any]] = {
    "two turns": {"played": {}},
    "a message after the last reply": {"played": {"shown": f"\n<|im_start|>user\nThanks.<|im_end|>\n{HEADER}"}},
    "a reply that the engine cuts": {"played": {"cut": 5}},
    "rollouts that reach the limit": {"played": {}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", [False, True])
def test_a_step_of_its_own_code_raises_no_alarm(case: str, weights: bool, source: Path, tmp_path: Path) -> None:
    """Twelve rollouts with a tool result, judged by the trainer's logprobs, and by the weights."""
    call = conversations()[0].turns[0]
    limits = {"limit": sum(len(encode(text)) for text in call) + 4} if "limit" in case else {}  # in the tool's result
    report = judged(dumped(source, tmp_path, **CASES[case], **limits), weights)
    assert said(f"NeMo-RL, {case}", report) == []
    assert report.rows == 12
    assert report.judged["weights"] == 12


def test_a_step_without_the_trainers_logprobs_is_not_judged_by_them(source: Path, tmp_path: Path) -> None:
    """With ``force_on_policy_ratio`` NeMo-RL stores zeros in their place."""
    report = judged(dumped(source, tmp_path, {}, skip_prev_logprobs=True))
    assert report.findings == []
    assert not report.judged["weights"]
    assert "--model" in report.reasons["weights"]


def shift(line: dict[str, Any]) -> None:
    line["generation_logprobs"][0] = [0.0, *line["generation_logprobs"][0][:-1]]


def train_result(line: dict[str, Any]) -> None:
    mask = line["token_loss_mask"][0]
    first, stop = mask.index(1), mask.index(0, mask.index(1))
    mask[first:stop], mask[stop] = mask[first:stop], 1


def train_padding(line: dict[str, Any]) -> None:
    line["input_lengths"][0] -= 8


def encode_again(line: dict[str, Any]) -> None:
    mask, ids = line["token_loss_mask"][0], line["token_ids"][0]
    ids[mask.index(1) + 2] = ids[mask.index(1) + 3]


def scale(line: dict[str, Any]) -> None:
    line["generation_logprobs"][0] = [value / 1.3 for value in line["generation_logprobs"][0]]


def above(line: dict[str, Any]) -> None:
    line["generation_logprobs"][0][line["token_loss_mask"][0].index(1)] = 0.5


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "logprobs shifted": (shift, {"weights", "logprobs", "mask"}),
    "tool result trained": (train_result, {"mask", "roles", "logprobs"}),
    "padding trained": (train_padding, {"mask"}),
    "reply encoded again": (encode_again, {"weights"}),
    "another temperature": (scale, {"weights"}),
    "logprob above 0": (above, {"logprobs", "mask"}),
    "reward NaN": (lambda line: line.update(rewards=[float("nan")]), {"rewards"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_defect_in_a_file_of_its_own_code_is_found(name: str, source: Path, tmp_path: Path) -> None:
    """In its row, against the weights."""
    path = dumped(source, tmp_path, {})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    plant, checks = PLANTED[name]
    plant(lines[5])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = judged(path, weights=True)
    found = {finding.check for finding in report.findings if "jsonl:6" in finding.violation.place}
    assert found & checks, report
    assert all("jsonl:6" in finding.violation.place for finding in report.findings)
