"""The nearest names of a misspelled one."""

from __future__ import annotations

import pytest

from rollouts.base.nearest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("rn", ["run", "show", "serve"], ["run"]),
        ("calclator", ["calculator", "calculator_grpo", "guess"], ["calculator"]),
        ("Batch-Size", ["batch_size", "batches"], ["batch_size"]),
        ("tool_error", ["tool_errors", "tool_calls"], ["tool_errors"]),
        ("n_samples", ["sampler", "sampler_runs", "n_samples_per_prompt"], ["n_samples_per_prompt"]),
        ("x", ["run", "show"], []),
        ("run", [], []),
    ],
)
def test_the_nearest_names(name: str, known: list[str], expected: list[str]) -> None:
    """Names that are clearly farther than the nearest are left out."""
    assert nearest(name, known) == expected


def test_the_part_of_a_message() -> None:
    """Several names that are about equally near; nothing where none is near."""
    assert did_you_mean("shoe", ["show", "shop"]) == " (did you mean show or shop?)"
    assert did_you_mean("quux", ["show"]) == ""
