"""Training of the demo model on demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollouts.dtypes import Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import calculator_prompts
from scripts.demo_model.demonstrations import (
    BEGINNING,
    CONTEXT,
    Turn,
    clean_turns,
    flawed_turns,
    transcript,
)

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and the mask of what the assistant wrote, both ``(sequences, longest)``."""


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    header = tokenizer.encode("<|im_start|>assistant\n")
    rows = []
    for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts):
        ids, mask, at = encoding.ids, [False] * len(encoding.ids), 0
        while at < len(ids):
            if ids[at : at + len(header)] == header:
                at += len(header)
                stop = ids.index(end, at) + 1
                mask[at:stop] = [True] * (stop - at)
                at = stop
            else:
                at += 1
        rows.append((ids, mask))
    return rows


def padded(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (row_ids, row_mask) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        mask[row, : len(row_ids)] = torch.tensor(row_mask)
    return ids, mask


Demonstrator = Callable[[Prompt, random.Random], tuple[list[Turn], bool]]
"""The turns of a demonstration, and whether only the first ``BEGINNING`` tokens of its assistant are trained."""


def mixed(flawed_share: float) -> Demonstrator:
    """Clean demonstrations, and this share with a mistake at random."""

    def demonstrate(prompt: Prompt, rng: random.Random) -> tuple[list[Turn], bool]:
        return flawed_turns(prompt, rng) if rng.random() < flawed_share else clean_turns(prompt), False

    return demonstrate


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, demonstrate: Demonstrator, size: int = 16, pool: int = 32
) -> Iterator[Batch]:
    """Endless batches of sequences of similar length."""
    prompts = calculator_prompts(seed)
    rng = random.Random(seed)
    while True:
        texts, beginnings = [], []
        for _ in range(size * pool):
            prompt = next(prompts)
            turns, beginning = demonstrate(prompt, rng)
            texts.append(transcript(prompt, turns))
            beginnings.append(beginning)
        rows = encoded(tokenizer, texts)
        for (_, mask), beginning in zip(rows, beginnings, strict=True):
            if beginning:
                end = mask.index(True) + BEGINNING
                mask[end:] = [False] * (len(mask) - end)
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(groups)
        yield from map(padded, groups)


def assistant_logprobs(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the assistant's tokens, flat, and the row that each belongs to.

    Padding is on the right, where causal attention ignores it, so no attention mask is needed.
    """
    ids, mask = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = mask[:, 1:]
    logits = model.lm_head(hidden[wanted])
    targets = ids[:, 1:][wanted]
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return logprobs, wanted.nonzero()[:, 0]


def demo_model() -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, local_files_only=True)
    return model


def demo_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.float()
    return model


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, in float32 and for all matrices of a shape at once.

    That of torch takes half of the time of a step on CPUs without instructions for bfloat16.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in self.param_groups[0]["params"]:
            self.shapes.setdefault(parameter.shape, []).append(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is passed
        """Take one step."""
        rate, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for (rows, columns), matrices in self.shapes.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            buffer = self.state[matrices[0]].setdefault("momentum", torch.zeros_like(gradients))
            buffer.lerp_(gradients, 1 - momentum)
            update = gradients.lerp(buffer, momentum)
            update = update.mT if rows > columns else update
            update = update / update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = update @ update.mT
                update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
            update = update.mT if rows > columns else update
            for matrix, change in zip(matrices, update, strict=True):
                matrix.sub_(change, alpha=rate * 0.2 * max(rows, columns) ** 0.5)


def train(
    model: Qwen3ForCausalLM,
    data: Iterator[Batch],
    steps: int,
    muon_lr: float,
    adam_lr: float,
    warmup: int,
    row_tokens: int | None = None,
) -> Iterator[tuple[int, float]]:
    """Train in place; yields (step, loss) after each step.

    The loss is the mean over tokens, or with ``row_tokens`` the sum over tokens divided by that many a row. Rows of a
    batch have similar lengths, so the mean weighs a token of a short row (a guess) more than one of a long row (a
    call), and the model would not learn their shares.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=muon_lr)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = ((muon, muon_lr), (adam, adam_lr))
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * (1 - 0.98 * step / steps)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        batch = next(data)
        logprobs, _ = assistant_logprobs(model, batch)
        loss = -logprobs.mean() if row_tokens is None else -logprobs.sum() / (len(batch[0]) * row_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step + 1, loss.item()
    model.eval()


@torch.inference_mode()
def clean_probability(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int
) -> list[float]:
    """The mean probability of the clean demonstration at temperature 1, over one-step and over two-step problems.

    Other solutions exist, so each is a lower bound of the accuracy, without sampling noise.
    """
    means = []
    for share in (0.0, 1.0):
        prompts = calculator_prompts(seed, two_step_share=share)
        texts = [transcript(prompt, clean_turns(prompt)) for prompt, _ in zip(prompts, range(count), strict=False)]
        total = 0.0
        for start in range(0, count, 64):
            logprobs, rows = assistant_logprobs(model, padded(encoded(tokenizer, texts[start : start + 64])))
            sums = torch.zeros(64).index_add_(0, rows, logprobs)
            total += sums[: len(texts[start : start + 64])].exp().sum().item()
        means.append(total / count)
    return means
