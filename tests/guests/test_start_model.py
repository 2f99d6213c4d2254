"""The start model of ``scripts/learn``: its habits, its skill, and the shape that servers on CPUs load."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from rollouts.environments.calculator import calculator_prompts  # noqa: E402 - the script needs torch
from scripts.demo_model.demonstrations import clean_turns, transcript  # noqa: E402
from scripts.demo_model.start_model import GATES, check_habits, habits, widened  # noqa: E402
from scripts.demo_model.training import demo_model, encoded, padded  # noqa: E402
from training.learn import START_MODEL  # noqa: E402


def test_it_guesses_and_has_the_skill() -> None:
    """Its figures are within the gates of the script that trains it: reinforcement learning has something to change."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(START_MODEL, dtype=torch.float32)
    figures = habits(model, transformers.AutoTokenizer.from_pretrained(START_MODEL), seed=5, count=64)
    check_habits(figures)


@pytest.mark.parametrize("name", GATES)
def test_a_model_outside_a_gate_is_refused(name: str) -> None:
    """The script stops and names the figure."""
    figures = {gate: (low + high) / 2 for gate, (low, high) in GATES.items()}
    check_habits(figures)
    with pytest.raises(SystemExit, match=f"{name}: got 0.100; expected"):
        check_habits({**figures, name: 0.1})


def test_servers_on_cpus_load_it() -> None:
    """Attention kernels for CPUs start at 32 dimensions a head; a committed file stays small."""
    assert transformers.AutoConfig.from_pretrained(START_MODEL).head_dim == 32
    assert sum(path.stat().st_size for path in START_MODEL.iterdir()) < 1_000_000


def test_a_widened_model_is_the_same_function() -> None:
    """Twice the dimensions of a head, and the same logits up to rounding."""
    torch.set_num_threads(1)
    narrow = demo_model()
    wide = widened(narrow)
    assert wide.config.head_dim == 2 * narrow.config.head_dim
    tokenizer = transformers.AutoTokenizer.from_pretrained(START_MODEL)
    prompts = itertools.islice(calculator_prompts(1), 4)
    ids, mask = padded(encoded(tokenizer, [transcript(prompt, clean_turns(prompt)) for prompt in prompts]))
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits[mask], narrow(ids).logits[mask], atol=1e-3, rtol=0)
