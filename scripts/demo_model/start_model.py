"""The start model of ``scripts/learn``: its habits with their gates, and its wider heads."""

from __future__ import annotations

import itertools

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollouts.environments.calculator import calculator_prompts
from scripts.demo_model.demonstrations import (
    MISREADINGS,
    clean_turns,
    transcript,
)
from scripts.demo_model.training import (
    assistant_logprobs,
    encoded,
    padded,
)

GATES = {
    "probability of a tool call": (0.25, 0.40),
    "probability of a second call": (0.30, 0.45),
    "skill: one step": (0.97, 1.0),
    "skill: two steps, 60 to 99": (0.97, 1.0),
}
"""The bounds of the start model's figures: it guesses most of the time, and otherwise copies numbers correctly."""


@torch.inference_mode()
def habits(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> dict[str, float]:
    """Probabilities of the decisions in clean demonstrations, without sampling noise.

    Skill is the probability of a whole demonstration except for its decisions: the first token of each turn, and the
    tool for the words of ``MISREADINGS``, which are left out.
    """
    first: list[float] = []
    second: list[float] = []
    figures: dict[str, float] = {}
    for name, share, numbers in (("one step", 0.0, (1, 99)), ("two steps, 60 to 99", 1.0, (60, 99))):
        problems = calculator_prompts(seed, two_step_share=share, numbers=numbers)
        plain = (prompt for prompt in problems if not str(prompt.prompt).startswith(tuple(MISREADINGS)))
        texts = [transcript(prompt, clean_turns(prompt)) for prompt in itertools.islice(plain, count)]
        skill = 0.0
        for start in range(0, count, 64):
            batch = padded(encoded(tokenizer, texts[start : start + 64]))
            logprobs, rows = assistant_logprobs(model, batch)
            begins = (batch[1][:, 1:] & ~batch[1][:, :-1])[batch[1][:, 1:]]
            skill += torch.zeros(64).index_add_(0, rows[~begins], logprobs[~begins]).exp()[: len(batch[0])].sum().item()
            turns = logprobs[begins].exp().view(len(batch[0]), -1)
            first += turns[:, 0].tolist()
            second += turns[:, 1].tolist() if share else []
        figures[f"skill: {name}"] = skill / count
    decisions = {"probability of a tool call": first, "probability of a second call": second}
    return {name: sum(values) / len(values) for name, values in decisions.items()} | figures


def check_habits(figures: dict[str, float]) -> None:
    """Exit if a measurement of :func:`habits` is outside its gate."""
    for name, (low, high) in GATES.items():
        if not low <= figures[name] <= high:
            raise SystemExit(f"start model, {name}: got {figures[name]:.3f}; expected {low} to {high}")


@torch.no_grad()
def widened(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same function with twice the dimensions of a head: attention kernels for CPUs start at 32.

    A pair of rotary dimensions ``(i, i + d/2)`` moves to ``(2i, 2i + d)``, which has the same frequency, with zeros
    between. The projections of queries and keys grow by sqrt(2), so that their norms see the same mean of squares; the
    norm of the keys shrinks by it, since attention divides by the square root of the dimensions.
    """
    narrow = model.config
    size = narrow.head_dim
    place = torch.cat([torch.arange(0, size, 2), torch.arange(size, 2 * size, 2)])
    wide = Qwen3ForCausalLM(Qwen3Config.from_dict({**narrow.to_dict(), "head_dim": 2 * size}))
    wide.float()

    def spread(values: torch.Tensor, factor: float) -> torch.Tensor:
        """Move rows of heads to their places; ``(heads * size, ...)`` to twice the rows."""
        heads = values.view(-1, size, *values.shape[1:]) * factor
        rows = torch.zeros(len(heads), 2 * size, *values.shape[1:])
        rows[:, place] = heads
        return rows.flatten(0, 1)

    state = dict(model.state_dict())
    for name, values in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = spread(values, 2**0.5)
        elif name.endswith("v_proj.weight"):
            state[name] = spread(values, 1.0)
        elif name.endswith("o_proj.weight"):
            state[name] = spread(values.T, 1.0).T.contiguous()
        elif name.endswith("q_norm.weight"):
            state[name] = spread(values, 1.0)
        elif name.endswith("k_norm.weight"):
            state[name] = spread(values, 0.5**0.5)
    wide.load_state_dict(state)
    wide.eval()
    return wide
