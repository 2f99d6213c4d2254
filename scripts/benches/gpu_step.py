"""A GRPO step and the engine on a Qwen3-shaped model with random weights: tokens a second, memory, agreement.

Runs on CUDA in bfloat16 if a device exists, else on the CPU in float32, which only tests the code: its figures mean
nothing.
"""

from __future__ import annotations

import functools
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
import transformers

from rollouts.dtypes import Completion, Endpoint, SamplingParams, VersionSpan, packed_tokens
from rollouts.engine import running_server
from rollouts.inference.sglang import SGLangPolicy
from rollouts.training import Sample, Status
from training.grpo import GrpoConfig, GrpoTrainer, token_logprobs

__all__ = ["SIZES", "run_gpu"]

SIZES: dict[str, functools.partial[transformers.Qwen3Config]] = {
    "tiny": functools.partial(
        transformers.Qwen3Config, vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ),
    "0.6b": functools.partial(
        transformers.Qwen3Config, vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
}  # fmt: skip


def run_gpu(size: str, *, groups: int, n: int, longest: int, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for padded and packed steps, for the agreement with the CPU in float32, and for the engine over HTTP.

    Args:
        size: a key of ``SIZES``.
        groups: number of prompts in a batch.
        n: rollouts of each prompt.
        longest: tokens of the longest sample; lengths are spread evenly below it.
        steps: number of timed steps, after one warm-up step.
        seed: seed of weights and samples.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    config = SIZES[size](max_position_embeddings=longest, tie_word_embeddings=True)
    reference = transformers.Qwen3ForCausalLM(config).eval()
    samples = _samples(reference, groups, n, longest, random.Random(seed))
    tokens = sum(len(sample) for sample in samples)
    rows: list[dict[str, Any]] = []
    for layout in ("padded", "packed"):
        model = _on(reference, config, device, dtype)
        trainer = GrpoTrainer(model, GrpoConfig(layout=layout, lr=1e-6, minibatches=1, micro_batch_tokens=8 * longest))
        numbers = trainer.step(samples)
        _reset_peak(device)
        began = time.perf_counter()
        for _ in range(steps):
            numbers = trainer.step(samples)
        _wait(device)
        rows.append(
            {
                "what": f"step, {layout}",
                "device": _name(device, dtype),
                "tokens_per_s": steps * tokens / (time.perf_counter() - began),
                "peak_gib": _peak_gib(device),
                "loss": float(numbers["loss"]),
            }
        )
        del trainer, model
    rows.append(_agreement(reference, config, samples[: 2 * n], device, dtype))
    rows.append(_engine(reference, samples, longest // 4, device, dtype))
    return rows


def _engine(reference: Any, samples: list[Sample], reply: int, device: Any, dtype: Any) -> dict[str, Any]:
    """Replies to the prompts of the samples, all at once; compares their logprobs with the CPU's in float32."""
    prompts = [sample.tokens[: max(1, len(sample) // 4)] for sample in samples]
    sampling = SamplingParams(max_new_tokens=reply)
    replies: dict[int, Completion] = {}

    async def play(folder: Path) -> float:
        server = running_server(folder, slots=len(prompts), dtype=str(dtype).removeprefix("torch."))
        async with server as url, SGLangPolicy(Endpoint(base_url=url)) as policy:

            async def ask(number: int) -> None:
                replies[number] = await policy.complete(packed_tokens(prompts[number]), sampling)

            await ask(0)
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for number in range(len(prompts)):
                    tasks.start_soon(ask, number)
            return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        seconds = anyio.run(play, Path(folder))
    differences = []
    for number in range(min(8, len(prompts))):
        ids = [*prompts[number], *replies[number].tokens.tolist()]
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows = torch.arange(len(prompts[number]) - 1, len(ids) - 1)
        theirs = scores[rows, torch.tensor(ids[len(prompts[number]) :])].numpy()
        differences.append(np.abs(theirs - replies[number].logprobs))
    far = np.concatenate(differences)
    return {
        "what": f"engine, {len(prompts)} replies of {reply}",
        "device": _name(device, dtype),
        "tokens_per_s": sum(len(done.tokens) for done in replies.values()) / seconds,
        "mean": float(far.mean()),
        "largest": float(far.max()),
    }


def _agreement(reference: Any, config: Any, samples: list[Sample], device: Any, dtype: Any) -> dict[str, Any]:
    """Logprobs of the same weights on the device and on the CPU in float32."""
    with torch.no_grad():
        ours, _ = token_logprobs(_on(reference, config, device, dtype), samples)
        theirs, _ = token_logprobs(reference, samples)
    difference = (ours.float().cpu() - theirs.float()).abs()
    return {
        "what": "|logprob - CPU float32|",
        "device": _name(device, dtype),
        "mean": float(difference.mean()),
        "largest": float(difference.max()),
    }


def _on(reference: Any, config: Any, device: Any, dtype: Any) -> Any:
    """A copy, newly built, so that buffers which must stay float32 (rotary) are not rounded with the weights."""
    model = transformers.Qwen3ForCausalLM(config)
    model.load_state_dict(reference.state_dict())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _samples(model: Any, groups: int, n: int, longest: int, rng: random.Random) -> list[Sample]:
    samples = []
    for index in range(groups * n):
        length = longest * (1 + index % n) // n
        prompt = max(1, length // 4)
        tokens = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        samples.append(
            Sample(
                tokens=tokens,
                loss_mask=[0] * prompt + [1] * (length - prompt),
                rollout_log_probs=[0.0] * prompt + [-float(np.log(model.config.vocab_size))] * (length - prompt),
                versions=[VersionSpan("random", prompt, length)],
                reward=float(rng.random() < 0.5),
                group_index=index // n,
                index=index,
                rollout_id=index,
                status=Status.COMPLETED,
            )
        )
    for group in range(groups):  # every group has spread
        samples[group * n].reward, samples[group * n + 1].reward = 0.0, 1.0
    return samples


def _name(device: Any, dtype: Any) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: Any) -> float:
    """Of the device; on the CPU, of the whole process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
