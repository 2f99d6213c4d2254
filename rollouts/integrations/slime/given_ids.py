"""Token ids that slime's samples bring: of their prompts, or of aborted rollouts with a response so far.

Invariant: a rollout continues from exactly these ids, by slime's own function, or it is refused by name. A finished
sample is not continued: if it cannot be used, e.g. because it is stale, it is played again from its prompt.
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ConfigError
from rollouts.integrations.slime.images import has_images
from rollouts.integrations.slime.records import family, records

__all__ = ["brings_ids", "check_given_ids"]


def brings_ids(record: Any) -> bool:
    """Whether slime's own function would continue this sample of slime from its ids."""
    return bool(record.tokens) and getattr(record.status, "value", "") in ("pending", "aborted")


def check_given_ids(record: Any, *, recipe: bool) -> None:
    """Check that the ids of a sample can be continued, before a request is sent.

    Args:
        record: slime's sample.
        recipe: whether a recipe plays it, which renders prompts itself.

    Raises:
        ConfigError: it brings ids that its rollout would not be sampled from.
    """
    if not brings_ids(record):
        return
    expected = None
    if recipe:
        expected = "no ids with a recipe, which renders the prompt itself"
    elif family().package != "slime":
        expected = f"no ids with {family().package}: a rollout starts from the prompt"
    elif has_images(record) and record.response_length:
        expected = "no response with images: slime sends the text of the prompt alone"
    elif not records().is_slime:
        expected = "no ids without slime, whose own function continues from them"
    if expected is not None:
        raise ConfigError.of(f"slime sample {record.index}.tokens", f"{len(record.tokens)} ids", expected)
