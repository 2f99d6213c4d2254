"""Started samples of slime: ids of their prompts, a response so far with its counters, a generate function.

Invariant: a rollout continues from exactly the state of its sample, by slime's own function, or it is refused by name.
A finished sample is not continued: if it cannot be used, e.g. because it is stale, it is played again from its prompt.
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ConfigError
from rollouts.integrations.slime.images import has_images
from rollouts.integrations.slime.records import family, records

__all__ = ["check_function", "check_given", "is_begun"]

_CONTINUED = (
    "tokens",
    "response",
    "response_length",
    "weight_versions",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
)
"""The fields that slime's own function adds to (slime 0.3.1, rollout/sglang_rollout.py: generate)."""


def is_begun(record: Any) -> bool:
    """Whether slime's own function would continue this sample instead of starting from its prompt."""
    return bool(_brought(record))


def _brought(record: Any) -> list[str]:
    """The fields that a sample brings for slime's own function to add to."""
    if getattr(record.status, "value", "") not in ("pending", "aborted"):
        return []
    fresh = records().sample()
    return [name for name in _CONTINUED if getattr(record, name, None) != getattr(fresh, name, None)]


def check_given(record: Any, *, recipe: bool) -> None:
    """Check that a sample can be played from its state, before a request is sent.

    Args:
        record: slime's sample.
        recipe: whether a recipe plays it, which renders prompts itself.

    Raises:
        ConfigError: it brings ids or a response that its rollout would not continue from.
    """
    brought = _brought(record)
    if not brought:
        return
    expected = None
    if recipe:
        expected = "nothing with a recipe, which renders the prompt itself"
    elif family().package != "slime":
        expected = f"nothing with {family().package}: a rollout starts from the prompt"
    elif has_images(record) and record.response_length:
        expected = "no response with images: slime sends the text of the prompt alone"
    elif not records().is_slime:
        expected = "nothing without slime, whose own function continues from it"
    if expected is not None:
        value = getattr(record, brought[0])
        got = f"{len(value)} ids" if brought[0] == "tokens" else value
        raise ConfigError.of(f"slime sample {record.index}.{brought[0]}", got, expected)


def check_function(record: Any) -> None:
    """Check that a sample which a recipe plays names no generate function.

    Raises:
        ConfigError: it names one.
    """
    function = getattr(record, "generate_function_path", None)
    if function is not None:
        expected = "none with a recipe, which plays every sample"
        raise ConfigError.of(f"slime sample {record.index}.generate_function_path", function, expected)
