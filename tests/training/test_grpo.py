"""The trainer: its numbers against a float64 reference written in numpy, its layouts against each other, its restarts.

The model here is a table of logits, one row a token: small enough that its gradient is written down by hand.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.training import Sample, credit
from rollouts.training.credit import assign_advantages

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from training.grpo import GrpoConfig, GrpoTrainer, kl_estimate, policy_loss, token_logprobs  # noqa: E402 - needs torch

VOCABULARY = 11


class Table(torch.nn.Module):  # type: ignore[misc]
    """Logits of the next token are a row of the table, whatever stood before the last token."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.from_numpy(table).float())

    @property
    def device(self) -> Any:
        return self.table.device

    def forward(self, input_ids: Any, logits_to_keep: Any = None, **others: Any) -> Any:
        logits = self.table[input_ids]
        return SimpleNamespace(logits=logits if logits_to_keep is None else logits[:, logits_to_keep])


def batch(seed: int = 0) -> list[Sample]:
    """Three groups of four rollouts with gaps in their masks; two of them fork, and share a prefix that is context."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(3):
        for number in range(4):
            branches = 2 if number == 1 and group < 2 else 1
            reward = float(rng.integers(0, 2)) + 0.25 * group
            for _ in range(branches):
                length = int(rng.integers(4, 12))
                mask = rng.random(length) < 0.6
                mask[0], mask[-1] = False, True
                samples.append(
                    Sample(
                        tokens=rng.integers(0, VOCABULARY, length).tolist(),
                        loss_mask=mask.astype(int).tolist(),
                        rollout_log_probs=np.where(mask, -rng.random(length) * 4, 0).tolist(),
                        reward=reward,
                        group_index=group,
                        index=4 * group + number,
                        rollout_id=4 * group + number,
                    )
                )
    return samples


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY))


def reference(
    samples: list[Sample], logits: np.ndarray, anchor: np.ndarray, config: GrpoConfig
) -> tuple[Any, Any, Any]:
    """Advantages, loss and gradient in float64, token by token, from the formulas alone."""
    logits = logits.astype(np.float32).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    base = anchor.astype(np.float32).astype(np.float64)
    base = base - np.log(np.exp(base).sum(-1, keepdims=True))
    of_rollout = {s.rollout_id: (s.group_index, s.reward) for s in samples}
    advantages = []
    for s in samples:
        rewards = np.array([reward for group, reward in of_rollout.values() if group == s.group_index])
        advantages.append((s.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0.0)
    loss, gradient = 0.0, np.zeros_like(logits)
    for s, advantage in zip(samples, advantages, strict=True):
        trained = sum(sum(o.loss_mask) for o in samples if o.rollout_id == s.rollout_id)
        for place in range(1, len(s)):
            if not s.loss_mask[place]:
                continue
            before, token = s.tokens[place - 1], s.tokens[place]
            own, rollout_logprob = logp[before, token], s.logprob_column.astype(np.float64)[place]
            old = own if config.old_logprobs == "trainer" else rollout_logprob
            ratio = np.exp(own - old)
            clipped = np.clip(ratio, 1 - config.eps_clip, 1 + config.eps_clip_high)
            value, slope = -ratio * advantage, -ratio * advantage
            if -clipped * advantage > value:
                value, slope = -clipped * advantage, 0.0
            if config.tis_clip is not None:
                weight = min(np.exp(old - rollout_logprob), config.tis_clip)
                value, slope = value * weight, slope * weight
            if config.kl_coef:
                gap = own - base[before, token]
                kinds = {
                    "k1": (gap, 1.0),
                    "k2": (gap**2 / 2, gap),
                    "k3": (np.exp(-gap) - 1 + gap, 1 - np.exp(-gap)),
                }
                kl, kl_slope = kinds[config.kl_type]
                value, slope = value + config.kl_coef * kl, slope + config.kl_coef * kl_slope
            weight = 1 / trained / len(of_rollout)
            loss += value * weight
            gradient[before] -= slope * weight * np.exp(logp[before])
            gradient[before, token] += slope * weight
    return np.array(advantages), loss, gradient


CONFIGS = {
    "slime's defaults": GrpoConfig(tis_clip=None),
    "truncated importance": GrpoConfig(tis_clip=2.0),
    "ratio to the rollout": GrpoConfig(old_logprobs="rollout", tis_clip=None),
    "k1": GrpoConfig(kl_coef=0.3, kl_type="k1"),
    "k2": GrpoConfig(kl_coef=0.3, kl_type="k2"),
    "k3": GrpoConfig(kl_coef=0.3, kl_type="k3"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("micro_batch_tokens", [8, 4096])
def test_loss_and_gradient_are_those_of_the_reference(name: str, layout: Any, micro_batch_tokens: int) -> None:
    """One fixed batch: loss and gradient agree with float64, for each loss, however it is laid out and cut up."""
    import attrs

    config = attrs.evolve(
        CONFIGS[name], layout=layout, micro_batch_tokens=micro_batch_tokens, minibatches=1, clip_grad=1e9
    )
    samples = batch()
    _, loss, gradient = reference(samples, table(1), table(2), config)
    model = Table(table(1))
    numbers = GrpoTrainer(model, config, reference=Table(table(2))).step(samples)
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(model.table.grad.numpy(), gradient, rtol=1e-4, atol=1e-7)
    assert numbers["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def test_advantages_are_those_of_the_reference() -> None:
    """And of the same rewards in float64: minus the mean, over the unbiased deviation + 1e-6, by rollout."""
    from rollouts.training.batch import group_advantages

    samples = batch()
    expected, _, _ = reference(samples, table(1), table(2), GrpoConfig())
    np.testing.assert_allclose(group_advantages(samples), expected, rtol=1e-6)


def test_tokens_of_the_context_have_no_gradient() -> None:
    """A row of the table that only ever predicts context is not moved, whatever stands there."""
    sample = {"loss_mask": [0, 1, 0, 0, 1], "rollout_log_probs": [0, -1, 0, 0, -1], "group_index": 0}
    samples = [
        Sample(tokens=[0, 1, 2, 3, 4], reward=1.0, rollout_id=0, **sample),
        Sample(tokens=[0, 1, 2, 3, 4], reward=0.0, rollout_id=1, **sample),
    ]
    model = Table(table(3))
    GrpoTrainer(model, GrpoConfig(minibatches=1, old_logprobs="rollout", tis_clip=None)).step(samples)
    moved = model.table.grad.abs().sum(-1) > 0
    assert moved.tolist()[:5] == [True, False, False, True, False]


def test_clipping_stops_where_the_ratio_has_gone_far_enough() -> None:
    """Above 1.28 a good token has no gradient, below 0.8 a bad one; the other way they still have theirs."""
    ratios = torch.tensor([1.27, 1.29, 1.29, 0.79, 0.79, 0.81])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    zeros = torch.zeros(6)
    loss, sums = policy_loss(logprobs, zeros, zeros, advantages, torch.ones(6), GrpoConfig(tis_clip=None))
    loss.backward()
    assert (logprobs.grad != 0).tolist() == [True, False, True, False, True, True]
    assert float(sums["clip_fraction"]) == 4


def test_the_importance_weight_is_cut_at_its_ceiling() -> None:
    """It is exp(old - rollout), at most 2, and never below what it is."""
    old, zeros = torch.tensor([3.0, 0.1, -2.0]), torch.zeros(3)
    loss, sums = policy_loss(old.clone(), old, zeros, torch.ones(3), torch.ones(3), GrpoConfig())
    assert float(loss) == pytest.approx(-(2 + np.exp(0.1) + np.exp(-2)), rel=1e-6)
    assert float(sums["tis_truncated_fraction"]) == 1


def test_the_estimators_agree_where_the_policies_do() -> None:
    """All are 0 for equal logprobs; k2 and k3 are never below it."""
    gaps = torch.linspace(-2, 2, 9)
    for kind in ("k1", "k2", "k3"):
        assert float(kl_estimate(torch.zeros(1), torch.zeros(1), kind)) == 0
    assert (kl_estimate(gaps, torch.zeros(9), "k2") >= 0).all()
    assert (kl_estimate(gaps, torch.zeros(9), "k3") >= 0).all()


# -- with a real model -------------------------------------------------------------------------------------------------


def demo() -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def test_packed_is_padded() -> None:
    """With attention, too: no token sees a token of another sample, whichever stands before it."""
    model, samples = demo(), batch()
    padded, entropy = token_logprobs(model, samples, entropy=True)
    packed, other = token_logprobs(model, samples, packed=True, entropy=True)
    assert len(padded) == sum(sum(sample.loss_mask) for sample in samples)
    assert torch.allclose(padded, packed, atol=1e-5)
    assert torch.allclose(entropy, other, atol=1e-5)


def test_a_resumed_trainer_is_equal_to_the_bit(tmp_path: Path) -> None:
    """Weights, moments, counters and the order of groups after two batches are those of a run that never stopped."""
    first, second = batch(1), batch(2)
    whole = GrpoTrainer(demo(), GrpoConfig(seed=5))
    whole.step(first)
    whole.save(tmp_path / "checkpoint")
    whole.step(second)
    resumed = GrpoTrainer(demo(), GrpoConfig(seed=6))
    resumed.load(tmp_path / "checkpoint")
    resumed.step(second)
    assert (resumed.batches, resumed.optimizer_steps) == (whole.batches, whole.optimizer_steps) == (2, 4)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_checkpoint_replaces_the_existing_one(tmp_path: Path) -> None:
    """Atomically: the folder is renamed into place, and nothing else is left in its parent."""
    trainer = GrpoTrainer(demo(), GrpoConfig())
    trainer.save(tmp_path / "checkpoint")
    trainer.step(batch())
    trainer.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    again = GrpoTrainer(demo(), GrpoConfig())
    again.load(tmp_path / "checkpoint")
    assert again.batches == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_ratio_to_the_rollout_needs_no_importance_weight() -> None:
    """Both would count the same difference twice."""
    with pytest.raises(ConfigError, match="tis_clip"):
        GrpoConfig(old_logprobs="rollout")


def test_a_column_of_advantages_replaces_the_rewards() -> None:
    """With GRPO's in each trained token the step is the same; zeros have the gradient 0."""
    steps = []
    for assign in (lambda samples: None, lambda samples: assign_advantages(samples, credit.grpo)):
        samples = batch()
        assign(samples)
        trainer = GrpoTrainer(Table(table(1)), GrpoConfig(minibatches=1))
        steps.append((trainer.step(samples)["loss"], trainer.model.table.detach().clone()))
    assert steps[0][0] == pytest.approx(steps[1][0], abs=1e-6)
    torch.testing.assert_close(steps[0][1], steps[1][1])
    for sample in samples:
        sample.advantages = np.zeros(len(sample), np.float32)
    assert trainer.step(samples)["grad_norm"] == 0


def test_a_column_in_some_samples_only_is_refused() -> None:
    """The others would be compared by rewards of another scale."""
    samples = batch()
    samples[0].advantages = np.zeros(len(samples[0]), np.float32)
    with pytest.raises(ConfigError, match=r"samples\[1\].advantages: got None; expected a column"):
        GrpoTrainer(Table(table(1)), GrpoConfig()).step(samples)


def test_a_kl_needs_a_reference() -> None:
    """The error is raised at construction of the trainer, not at its first step."""
    with pytest.raises(ConfigError, match="reference"):
        GrpoTrainer(Table(table(0)), GrpoConfig(kl_coef=0.1))


def test_a_batch_without_a_trained_token_is_refused() -> None:
    """There is nothing to learn from it, and no mean over it."""
    sample = Sample(tokens=[1, 2], loss_mask=[0, 0], reward=1.0, group_index=0)
    with pytest.raises(ConfigError, match="at least one trained token"):
        GrpoTrainer(Table(table(0)), GrpoConfig()).step([sample])
