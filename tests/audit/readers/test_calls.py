"""Rollouts that NeMo Gym's own capture builds, without alarm.

``NEMO_GYM_PATH`` names a checkout of NeMo Gym; its capture needs pydantic and orjson.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.audit import audit, reader_of
from tests.audit.dumps import conversations, encode, model_tokens, said

pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def capture() -> Iterator[Any]:
    path = os.environ.get("NEMO_GYM_PATH")
    if not path:
        pytest.skip("NEMO_GYM_PATH names no checkout of NeMo Gym")
    pytest.importorskip("orjson")
    sys.path.append(path)
    yield importlib.import_module("nemo_gym.token_id_capture")
    sys.path.remove(path)


def calls(turns: list[tuple[str, str]], rng: random.Random) -> list[dict[str, Any]]:
    """The served responses of a rollout, as Gym's model server returns them: items with the ids of their call."""
    made: list[dict[str, Any]] = []
    tokens: list[int] = []
    for shown, reply in turns:
        tokens, ids = tokens + encode(shown), encode(reply)
        text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply}]}
        ids_of_call = {
            "prompt_token_ids": tokens,
            "generation_token_ids": ids,
            "generation_log_probs": [-rng.expovariate(1) for _ in ids],
        }
        made.append({"output": [{"type": "reasoning", "summary": []}, {**text, **ids_of_call}]})
        tokens = tokens + ids
    return made


def written(capture: Any, folder: Path, edit: Callable[[list[dict[str, Any]]], Any] = lambda calls: None) -> Path:
    """Rollouts captured by its sink and store, joined by its builder, and written as a line each."""
    rng = random.Random(0)
    path = folder / "rollouts.jsonl"
    lines = []
    for one in conversations():
        store, name = capture.TokenCaptureStore(folder / "capture"), f"rollout-{one.index}"
        responses = calls(one.turns, rng)
        edit(responses)
        for number, response in enumerate(responses):
            context = capture.CaptureContext(name, f"call-{number}", store, "m")
            token = capture.set_token_sink(context)
            try:
                anyio.run(capture.capture_tokens, response)
            finally:
                capture.reset_token_sink(token)
        built = capture.trajectories_for_rollout(name, [folder / "capture"], model="m")
        assert built["mask_sample"] is False
        response = {**built["rebuilt_response"], "error": None}
        lines.append({"_ng_task_index": one.group, "response": response, "reward": one.reward})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rollouts_that_gym_captures_raise_no_alarm(capture: Any, tmp_path: Path) -> None:
    """Two calls a rollout, whose prompts its builder joins: every call is judged, and every row has its group."""
    report = audit(written(capture, tmp_path), reader_of("calls"), model_tokens=model_tokens())
    assert said("NeMo Gym, two calls", report) == []
    assert report.rows == len(conversations())
    assert report.judged["requests"] == report.rows


def test_a_planted_defect_is_found(capture: Any, tmp_path: Path) -> None:
    """In what its own code has written: other ids in a later prompt, a logprob above 0, columns of unlike widths."""
    lines = [json.loads(line) for line in written(capture, tmp_path).read_text().splitlines()]

    def items(number: int) -> list[dict[str, Any]]:
        return [item for item in lines[number]["response"]["output"] if "generation_token_ids" in item]

    at = len(items(0)[0]["prompt_token_ids"])
    items(0)[1]["prompt_token_ids"][at] += 1
    items(1)[0]["generation_log_probs"][0] = 0.5
    items(2)[1]["generation_log_probs"].pop()
    path = tmp_path / "planted.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = audit(path, reader_of("calls"), model_tokens=model_tokens())
    assert (set(report.broken), report.broken["requests"]) == ({"requests", "logprobs"}, 1)
    assert report.broken["logprobs"] == 2
