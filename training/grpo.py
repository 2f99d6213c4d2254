"""GRPO on the samples of a batch: one optimizer, one transformers model, one process, on CPU or CUDA.

    trainer = GrpoTrainer(model, GrpoConfig())
    numbers = trainer.step(samples)          # whole groups, as the manager returns them

Invariant: a token has weight in the loss if and only if the policy sampled it, as its mask records. The loss of a batch
is the mean over rollouts of the mean over their trained tokens, whatever the micro-batches and the number of branches
of a rollout. The layouts padded and packed return the same numbers.

The loss of a trained token with advantage A (that of ``Sample.advantages``, or of rewards, which
``rollouts.training.batch`` compares):

    ratio     = exp(logprob - old)                       old: this trainer's weights before the step
    surrogate = max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A)
    tis       = min(exp(old - rollout logprob), tis_clip)     the trainer's weights against the sampling weights
    loss      = tis * surrogate + kl_coef * KL(reference)

This module knows no server, no environment and no prompt.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt
import torch

from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.batch import collate, collate_packed, group_advantages, loss_weights
from rollouts.training.logprob_drift import logprob_drift

__all__ = ["GrpoConfig", "GrpoTrainer", "kl_estimate", "policy_loss", "token_logprobs"]


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """Names and defaults are slime's where slime has them."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 3
    """Optimizer steps over which the learning rate rises to ``lr``; constant from then on."""
    clip_grad: float = 1.0
    """Maximum norm of a gradient."""
    minibatches: int = 2
    """Optimizer steps for each batch, whose groups are split into so many parts."""
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """The denominator of the ratio: the trainer's logprobs, recomputed before the step, or those of the samples."""
    tis_clip: float | None = 2.0
    """Maximum importance weight between trainer and rollout; ``None`` for no such weight. Needs the trainer's own old
    logprobs: with ``old_logprobs="rollout"`` the ratio already contains the difference."""
    kl_coef: float = 0.0
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    temperature: float = 1.0
    """The sampling temperature of the samples."""
    layout: Literal["padded", "packed"] = "padded"
    """Padded is faster without a kernel for variable lengths; packed is faster with one."""
    micro_batch_tokens: int = 4096
    """Tokens of one forward pass, padding included; gradients accumulate over the passes of a minibatch."""
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.old_logprobs == "rollout" and self.tis_clip is not None:
            raise ConfigError.of("GrpoConfig.tis_clip", self.tis_clip, 'None with old_logprobs="rollout"')


# -- arithmetic: vectors over trained tokens, of shape (M,) ------------------------------------------------------------


def policy_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    config: GrpoConfig,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss over trained tokens, and sums over them for the metrics.

    Args:
        logprobs: under the trained weights, with gradient; all arguments have shape ``(M,)``.
        old: under the weights before the step.
        rollout: as stored in the samples.
        advantages: of each token.
        weights: the weight of each token in the mean; see :func:`rollouts.training.batch.loss_weights`.
        reference: under the reference model; needed when ``kl_coef`` is not 0.
    """
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high)
    per_token = torch.maximum(-ratio * advantages, -clipped * advantages)
    sums = {"ratio": ratio.detach().sum(), "clip_fraction": (clipped != ratio).sum()}
    if config.tis_clip is not None:
        tis = (old - rollout).exp()
        sums |= {"tis": tis.sum(), "tis_truncated_fraction": (tis > config.tis_clip).sum()}
        per_token = per_token * tis.clamp(max=config.tis_clip)
    if config.kl_coef:
        assert reference is not None, "a KL needs the logprobs of the reference"
        kl = kl_estimate(logprobs, reference, config.kl_type)
        sums["kl"] = kl.detach().sum()
        per_token = per_token + config.kl_coef * kl
    return (per_token * weights).sum(), sums


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Schulman's estimators of the KL from the policy to the reference, of each token."""
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return (-difference).exp() - 1 + difference


def token_logprobs(
    model: Any, samples: Sequence[Sample], *, packed: bool = False, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of the trained tokens, in the order of the samples, ``(M,)``; optionally their entropies.

    One teacher-forced forward pass. The first token of a sample has no logprob, since no token precedes it.
    """
    device = model.device
    if packed:
        whole = collate_packed(samples, device=device)
        mask = whole.loss_masks & (whole.positions > 0)
        before = mask.nonzero()[:, 0] - 1
        rows = {"input_ids": whole.tokens[None], "position_ids": whole.positions[None]}
        logits = model(**rows, use_cache=False, logits_to_keep=before).logits[0]
        targets = whole.tokens[mask]
    else:
        batch = collate(samples, device=device)
        mask = batch.loss_masks[:, 1:]
        rows = {"input_ids": batch.tokens, "attention_mask": batch.attention_mask}
        logits = model(**rows, use_cache=False).logits[:, :-1][mask]
        targets = batch.tokens[:, 1:][mask]
    logits = logits.float()
    every = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    spread = None
    if entropy:
        with torch.no_grad():
            spread = -(every.exp() * every).sum(-1)
    return every.gather(1, targets[:, None])[:, 0], spread


# -- the trainer -------------------------------------------------------------------------------------------------------


class GrpoTrainer:
    """A trainer of one model on batches of samples.

    Args:
        model: a causal language model of transformers, on the training device.
        config: the hyperparameters.
        reference: the reference model of the KL; needed when ``kl_coef`` is not 0.

    Attributes:
        batches: number of batches used.
        optimizer_steps: number of optimizer steps.
    """

    def __init__(self, model: Any, config: GrpoConfig | None = None, *, reference: Any = None) -> None:
        self.model = model
        self.config = config or GrpoConfig()
        self.reference = reference
        if self.config.kl_coef and reference is None:
            raise ConfigError.of("GrpoTrainer.reference", None, "a model, since kl_coef is not 0")
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.config.lr, betas=self.config.betas, weight_decay=self.config.weight_decay
        )
        self.batches = 0
        self.optimizer_steps = 0
        self._random = random.Random(self.config.seed)
        model.eval()  # no dropout: the logprobs of two passes must be comparable

    def __repr__(self) -> str:
        return f"<GrpoTrainer {self.batches} batches, {self.optimizer_steps} optimizer steps, {self.model.device}>"

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch of whole groups, in ``minibatches`` optimizer steps.

        Returns:
            Means over trained tokens: ``ratio``, ``clip_fraction``, ``entropy``, ``kl``, ``tis``, the difference
            between rollout and trainer logprobs; and ``loss``, ``grad_norm``, ``lr``, ``seconds``.

        Raises:
            ConfigError: a sample without reward, group or logprobs; a batch without trained tokens; or columns of
                advantages in some of its samples only.
        """
        began = time.perf_counter()
        if not any(sample.mask_column[1:].any() for sample in samples):
            raise ConfigError.of("step(samples)", samples, "samples with at least one trained token")
        rollout = [_trained(sample) for sample in samples]
        advantages = _advantages(samples)
        trainer, entropy = self._logprobs(samples, self.model)
        old = trainer if self.config.old_logprobs == "trainer" else rollout
        reference = self._logprobs(samples, self.reference)[0] if self.config.kl_coef else old
        sums: collections.Counter[str] = collections.Counter()
        notes: dict[str, list[float]] = {}
        for part in self._minibatches(samples):
            weights = loss_weights([samples[row] for row in part])
            place = dict(zip(part, weights, strict=True))
            self.optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for rows in self._micro_batches(samples, part):
                counts = torch.tensor([len(rollout[row]) for row in rows], device=self.model.device)
                logprobs, _ = token_logprobs(
                    self.model, [samples[row] for row in rows],
                    packed=self.config.layout == "packed", temperature=self.config.temperature,
                )  # fmt: skip
                each, summed = policy_loss(
                    logprobs,
                    torch.cat([old[row] for row in rows]).to(logprobs),
                    torch.cat([rollout[row] for row in rows]).to(logprobs),
                    torch.cat([advantages[row] for row in rows]).to(logprobs),
                    torch.tensor([place[row] for row in rows]).to(logprobs).repeat_interleave(counts),
                    self.config,
                    torch.cat([reference[row] for row in rows]).to(logprobs),
                )
                each.backward()
                loss += each.item()
                sums.update({name: float(value) for name, value in summed.items()}, tokens=len(logprobs))
            notes.setdefault("loss", []).append(loss)
            notes.setdefault("grad_norm", []).append(self._apply())
        self.batches += 1
        return {
            **{name: value / sums["tokens"] for name, value in sums.items() if name != "tokens"},
            **{name: sum(values) / len(values) for name, values in notes.items()},
            "entropy": float(torch.cat(entropy).mean()),
            **logprob_drift([one.numpy() for one in rollout], [one.numpy() for one in trainer]),
            "trained_tokens": float(sum(map(len, rollout))),
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": time.perf_counter() - began,
        }

    def logprobs(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """The logprobs of each sample's trained tokens under the current weights, on the CPU."""
        return self._logprobs(samples, self.model)[0]

    # -- parts of a step --

    def _apply(self) -> float:
        """Take one optimizer step with the current gradients; returns their norm."""
        self.optimizer_steps += 1
        warmth = min(1.0, self.optimizer_steps / max(self.config.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * warmth
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(f"the gradient of optimizer step {self.optimizer_steps} has norm {float(norm)}")
        self.optimizer.step()
        return float(norm)

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample], model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        logprobs: list[torch.Tensor] = [torch.empty(0)] * len(samples)
        entropies = list(logprobs)
        for rows in self._micro_batches(samples, range(len(samples))):
            chosen = [samples[row] for row in rows]
            packed, temperature = self.config.layout == "packed", self.config.temperature
            values, entropy = token_logprobs(model, chosen, packed=packed, temperature=temperature, entropy=True)
            assert entropy is not None
            counts = [len(_trained(sample)) for sample in chosen]
            for row, value, spread in zip(rows, values.cpu().split(counts), entropy.cpu().split(counts), strict=True):
                logprobs[row], entropies[row] = value, spread
        return logprobs, entropies

    def _minibatches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Rows of each optimizer step: whole groups, split at random."""
        groups: dict[int | None, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.group_index, []).append(row)
        order = list(groups)
        self._random.shuffle(order)
        parts = min(self.config.minibatches, len(order))
        for part in range(parts):
            yield [row for group in order[part::parts] for row in groups[group]]

    def _micro_batches(self, samples: Sequence[Sample], rows: Iterable[int]) -> Iterator[list[int]]:
        """Rows of each forward pass: of similar length, and together within ``micro_batch_tokens``."""
        chosen: list[int] = []
        used = 0
        for row in sorted((row for row in rows if len(_trained(samples[row]))), key=lambda row: len(samples[row])):
            length = len(samples[row])
            used = used + length if self.config.layout == "packed" else length * (len(chosen) + 1)
            if chosen and used > self.config.micro_batch_tokens:
                yield chosen
                chosen, used = [], length
            chosen.append(row)
        if chosen:
            yield chosen

    # -- on disk --

    def save(self, folder: str | Path, *, tokenizer: Any = None) -> Path:
        """Write model, optimizer, counters and random states to a folder, atomically."""
        folder = Path(folder)
        writing = folder.with_name(f".{folder.name}.writing")
        shutil.rmtree(writing, ignore_errors=True)
        self.model.save_pretrained(writing)
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "counters": (self.batches, self.optimizer_steps),
            "random": self._random.getstate(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        torch.save(state, writing / "trainer.pt")
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, folder.with_name(f".{folder.name}.old"))
        os.replace(writing, folder)
        shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)
        return folder

    def load(self, folder: str | Path) -> None:
        """Restore the state of :meth:`save`, bit for bit on the same machine. The weights are loaded in place."""
        folder = Path(folder)
        saved = type(self.model).from_pretrained(folder, dtype=self.model.dtype, local_files_only=True)
        self.model.load_state_dict(saved.state_dict())
        state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches, self.optimizer_steps = state["counters"]
        self._random.setstate(state["random"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])


def _trained(sample: Sample) -> torch.Tensor:
    """Rollout logprobs of the trained tokens, ``(m,)``; the first token of a sample is never trained."""
    return _of_trained(sample, sample.logprob_column)


def _of_trained(sample: Sample, column: npt.NDArray[np.float32] | None) -> torch.Tensor:
    """The values of a column at the trained tokens, ``(m,)``."""
    trained = sample.mask_column[1:]
    return torch.empty(0) if column is None else torch.from_numpy(np.ascontiguousarray(column[1:][trained]))


def _advantages(samples: Sequence[Sample]) -> list[torch.Tensor]:
    """The advantages of each sample's trained tokens, ``(m,)``: its column's, or those of the rewards."""
    if all(sample.advantage_column is None for sample in samples):
        shares = group_advantages(samples)
        return [
            torch.full((int(np.count_nonzero(sample.mask_column[1:])),), float(share))
            for sample, share in zip(samples, shares, strict=True)
        ]
    for number, sample in enumerate(samples):
        if sample.advantage_column is None:
            raise ConfigError.of(f"samples[{number}].advantages", None, "a column, as other samples of the batch have")
    return [_of_trained(sample, sample.advantage_column) for sample in samples]
