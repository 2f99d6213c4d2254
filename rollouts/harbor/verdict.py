"""The verdict of a task's verifier, read from the files that its tests wrote.

Invariant: a number comes from ``reward.json``, or without one from ``reward.txt``, as Harbor 0.25.0 reads them
(harbor/verifier/verifier.py: _parse_reward_json, _parse_reward_text). A missing, empty or unreadable file is a
:class:`NoVerdict` with its reason, never a number.

This module knows no sandbox.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs

from rollouts.errors import EnvironmentFailure, Kind

__all__ = [
    "REASONS",
    "RUNGS",
    "LostVerdicts",
    "NoVerdict",
    "Reason",
    "Rung",
    "Verdict",
    "no_verdict",
    "parse_rewards",
    "reward_in",
]

_log = logging.getLogger(__name__)
_ENOUGH = 3
"""Verdicts that a task has lost, before a warning."""

Rung: TypeAlias = Literal["separate", "carry", "kill", "keep"]
RUNGS: tuple[Rung, ...] = ("separate", "carry", "kill", "keep")
"""Where a verifier runs, the strictest first.

- ``separate``: a fresh box with the artifacts that the task names.
- ``carry``: a fresh box with the agent's working folder and artifacts.
- ``kill``: the agent's box, after all its processes were killed, with ``/tests`` and ``/logs/verifier`` made again.
- ``keep``: the agent's box with its processes, as Harbor grades a task whose verifier is shared.
"""

Reason: TypeAlias = Literal["missing", "empty", "not_a_file", "unreadable", "no_reward", "timeout", "box", "died"]
REASONS: Mapping[Reason, str] = {
    "missing": "the tests wrote no reward file",
    "empty": "the reward file is empty",
    "not_a_file": "the reward file is not a regular file",
    "unreadable": "the reward file does not contain finite numbers",
    "no_reward": "the rewards have several keys, and none is named as the trained one",
    "timeout": "the tests did not end within their deadline",
    "box": "the verifier's box failed",
    "died": "the agent's box ended before the tests",
}
"""Why there is no verdict."""


@attrs.frozen
class Verdict:
    """The rewards of one rollout, and how they were obtained."""

    rewards: Mapping[str, float]
    reward: float
    """The trained one."""
    rung: Rung
    output: str = attrs.field(default="", repr=False)
    """The end of what the tests wrote."""
    collect_failures: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Any]:
        """The verdict for ``Sample.metadata``, as JSON values."""
        return {
            "rewards": dict(self.rewards),
            "rung": self.rung,
            "output": self.output,
            "collect_failures": list(self.collect_failures),
        }


class NoVerdict(EnvironmentFailure):
    """A rollout without a verdict, with the reason."""

    kind: Kind = "verifier"
    reason: Reason = "missing"


def no_verdict(reason: Reason, task: str, rung: str, detail: str = "") -> NoVerdict:
    """The failure of a rollout without a verdict; its message begins with the reason, the task and the rung."""
    text = f"no verdict ({reason}) of task {task} at rung {rung}: {REASONS[reason]}"
    error = NoVerdict(f"{text}: {detail}" if detail else text)
    error.reason, error.kind = reason, "verifier"  # on the object: a boundary keeps it then
    return error


@attrs.define
class LostVerdicts:
    """Verdicts that rollouts got and lost, by task and reason.

    A policy that learns to prevent a verdict where it would lose is paid for it: its failures are dropped. Such a task
    shows as one whose own solution gets a verdict and whose rollouts do not, and is warned of once.
    """

    given: Counter[str] = attrs.field(factory=Counter)
    """Verdicts by task."""
    lost: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Rollouts without one by task and reason."""
    _warned: set[str] = attrs.field(factory=set)

    def note(self, task: str, reason: Reason | None, *, checked: bool) -> None:
        """Count one rollout.

        Args:
            reason: why it has no verdict; ``None`` if it has one.
            checked: whether the task's solution and an agent that does nothing are known to get one.
        """
        if reason is None:
            self.given[task] += 1
            return
        self.lost[task, reason] += 1
        reasons = {each: count for (name, each), count in self.lost.items() if name == task}
        count = sum(reasons.values())
        if checked and count >= _ENOUGH and task not in self._warned:
            self._warned.add(task)
            _log.warning(
                "task %s: %d of %d rollouts have no verdict (%s), although its solution and an agent that does nothing"
                " get one: look whether the policy prevents it",
                task,
                count,
                count + self.given[task],
                ", ".join(f"{each} {number}" for each, number in sorted(reasons.items())),
            )


def parse_rewards(reward_json: bytes | None, reward_text: bytes | None) -> dict[str, float] | Reason:
    """The rewards in the two files, ``None`` for a file that is missing; or the reason why there are none."""
    data = reward_json if reward_json is not None else reward_text
    if data is None:
        return "missing"
    if not data:
        return "empty"
    try:
        text = data.decode()
        found = json.loads(text) if reward_json is not None else {"reward": float(text)}
    except (ValueError, RecursionError):
        return "unreadable"
    if not isinstance(found, dict) or not found or not all(_is_finite(value) for value in found.values()):
        return "unreadable"
    return {name: float(value) for name, value in found.items()}


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def reward_in(rewards: Mapping[str, float], key: str | None) -> float | None:
    """The reward that is trained: that of the key, else the only one, else that of the key ``reward``."""
    if key is not None:
        return rewards.get(key)
    return next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
