"""``rollouts audit`` on sound dumps of a million tokens, without weights: CPU of the judgement and its peak memory.

Each format is judged in a separate process, with the tokenizer of the demo model. The rollouts have four turns, and are
in groups of eight.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollouts.engine import DEMO_MODEL

__all__ = ["audit_options", "bench_audit"]

_HEADER = "<|im_start|>assistant\n"
_WIDTH = 448
"""Columns of a padded batch."""


def audit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--tokens", type=int, default=1_000_000)


def bench_audit(args: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """One row for each format."""
    rows: list[dict[str, float | int | str]] = []
    for name, write in _WRITERS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), _rollouts(args.tokens))
            command = [sys.executable, "-m", "scripts.benches.audit", str(path), name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"format": name, **json.loads(done.stdout)})
    return rows


def _rollouts(tokens: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, mask and logprobs of rollouts with so many tokens in all."""
    from rollouts.renderer import load_tokenizer
    from rollouts.renderer.tokenizer import Codec

    codec, rng = Codec(load_tokenizer(DEMO_MODEL)), random.Random(0)
    found: list[tuple[list[int], list[int], list[float]]] = []
    total = 0
    while total < tokens or len(found) % 8:  # whole groups
        ids: list[int] = []
        mask: list[int] = []
        for turn in range(4):
            shown = f"What is {rng.randrange(1000)} + {len(found)}?" if turn == 0 else f"It is {rng.randrange(10**6)}."
            reply = f"I add {' and '.join(str(rng.randrange(1000)) for _ in range(20))}.<|im_end|>"
            start = "" if turn == 0 else "\n"
            for text, sampled in ((f"{start}<|im_start|>user\n{shown}<|im_end|>\n{_HEADER}", 0), (reply, 1)):
                part = codec.encode(text).tolist()
                ids += part
                mask += [sampled] * len(part)
        found.append((ids, mask, [-rng.expovariate(1) if one else 0.0 for one in mask]))
        total += len(ids)
    return found


def _write_nemo(folder: Path, rollouts: list[tuple[list[int], list[int], list[float]]]) -> Path:
    """Lines of one sequence each, padded to the width of the batch."""
    path = folder / "train_data_step1.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, (tokens, mask, logprobs) in enumerate(rollouts):
            pad = [0] * (_WIDTH - len(tokens))
            padded = [*logprobs, *pad]
            line = {
                "token_ids": [tokens + pad],
                "token_loss_mask": [mask + pad],
                "input_lengths": [len(tokens)],
                "generation_logprobs": [padded],
                "prev_logprobs": [padded],
                "sample_loss_mask": [1.0],
                "rewards": [float(number % 2)],
                "idx": number,
            }
            file.write(json.dumps(line) + "\n")
    return path


def _write_slime(folder: Path, rollouts: list[tuple[list[int], list[int], list[float]]]) -> Path:
    """The dictionaries of slime's samples, saved by torch."""
    import torch

    samples = []
    for number, (tokens, mask, logprobs) in enumerate(rollouts):
        before = mask.index(1)
        samples.append(
            {
                "group_index": number // 8,
                "index": number,
                "rollout_id": number,
                "prompt": f"prompt {number // 8}",
                "label": str(number // 8),
                "tokens": tokens,
                "response_length": len(tokens) - before,
                "loss_mask": mask[before:],
                "rollout_log_probs": logprobs[before:],
                "reward": float(number % 2),
                "status": "completed",
                "remove_sample": False,
            }
        )
    torch.save({"rollout_id": 0, "samples": samples}, folder / "0.pt")
    return folder / "0.pt"


_WRITERS: Mapping[str, Callable[[Path, Any], Path]] = {"nemo-rl": _write_nemo, "slime-pt": _write_slime}


def _measure(path: str, name: str) -> dict[str, float | int]:
    from rollouts.audit import ModelTokens, audit, reader_of
    from rollouts.renderer import load_tokenizer

    model_tokens = ModelTokens(load_tokenizer(DEMO_MODEL))
    began = time.process_time()
    report = audit(path, reader_of(name), model_tokens=model_tokens)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = report.broken.total() + report.unusual.total()
    return {"rows": report.rows, "tokens": report.tokens, "findings": found, "CPU s": seconds, "peak MB": peak}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2])))
