"""Former import path of the environment check, for tests that an earlier ``rollouts new-env`` wrote.

New code uses :mod:`rollouts.testing.environment_check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from rollouts.commands.check_env import load_environment
from rollouts.testing.environment_check import CheckOptions, Finding
from rollouts.testing.environment_check import examine as examine_environment

__all__ = ["Candidate", "Finding", "examine"]


@attrs.frozen(kw_only=True)
class Candidate:
    """A file to check, with the options of the check."""

    path: Path
    options: Mapping[str, str] = attrs.field(factory=dict)
    text: str = "Begin."
    prompts: int = 4
    turns: int = 6
    seed: int = 0
    step_seconds: float = 30.0
    stall_seconds: float = 0.05


async def examine(candidate: Candidate) -> list[Finding]:
    """Check the environment of a file; see :func:`rollouts.testing.environment_check.examine`."""
    environment_cls, prompts = load_environment(
        candidate.path, candidate.options, text=candidate.text, count=candidate.prompts
    )
    options = CheckOptions(
        turns=candidate.turns,
        seed=candidate.seed,
        step_seconds=candidate.step_seconds,
        stall_seconds=candidate.stall_seconds,
    )
    return await examine_environment(environment_cls, prompts, options)
