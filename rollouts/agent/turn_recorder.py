"""Logging of finished turns, and the trajectory of the turns that an interrupted rollout had logged.

Invariant: a turn is logged once, after its step and before the next reply. Logged turns that do not fit the prompt are
not resumed: the episode starts from the beginning.
"""

from __future__ import annotations

import time
from typing import Any

from rollouts.agent.guarded_environment import GuardedEnvironment
from rollouts.agent.turn_log import Turn, TurnLog, prompt_digest, replayed
from rollouts.dtypes import Prompt
from rollouts.errors import EnvironmentFailure, TokenMismatchError
from rollouts.trajectory import Trajectory

__all__ = ["TurnRecorder"]


class TurnRecorder:
    """Logs the turns of an episode of one branch.

    Args:
        log: contains the turns of an earlier process, and takes the new ones.
        prompt: of the episode; logged turns of another prompt are ignored.
        vocab_size: as for :func:`~rollouts.agent.turn_log.replayed`.
        trajectory: counts logged turns that do not fit.
    """

    def __init__(self, log: TurnLog, prompt: Prompt, vocab_size: int | None, trajectory: Trajectory) -> None:
        self.log = log
        self.earlier: Trajectory | None = None
        """The trajectory of the logged turns, if the episode can resume after them."""
        self.seconds_before = 0.0
        """Wall time of the logged turns."""
        self._digest = prompt_digest(prompt)  # once: its cost is that of the prompt's text
        self._began = time.monotonic()
        self._logged = (0, 0, 0, 0)  # numbers of tokens, completions, messages and times in the log
        turns = log.turns
        same = turns and turns[0].fields["prompt"] == self._digest
        if not same or not turns[-1].resumable:
            return
        try:
            seconds = float(turns[-1].fields["seconds"])
            self.earlier = replayed(turns, vocab_size)
        except (TokenMismatchError, LookupError, TypeError, ValueError):
            trajectory.count("unfit_turns_at_resume", len(turns))
        else:
            self.seconds_before = seconds

    async def save(
        self, trajectory: Trajectory, environment: GuardedEnvironment, open_turn: int | None, **fields: Any
    ) -> None:
        """Log everything since the last logged turn; without a snapshot if the environment fails to return one.

        ``open_turn``: the start of an assistant turn that continues, else ``None``.
        """
        if environment.resumable is not None:
            try:
                fields["snapshot"] = await environment.snapshot(trajectory)
            except EnvironmentFailure:
                trajectory.count("snapshot_failures")
        seconds = time.monotonic() - self._began
        fields = {"prompt": self._digest, "seconds": seconds, "open_turn": open_turn, **fields}
        turn = Turn.since(trajectory, *self._logged, **fields)
        self._mark(trajectory, is_open=open_turn is not None)
        await self.log.save(turn)

    def resumed(self, trajectory: Trajectory, *, is_open: bool) -> None:
        """Note that the episode continues after the logged turns."""
        self._began -= self.seconds_before
        self._mark(trajectory, is_open=is_open)

    def _mark(self, trajectory: Trajectory, *, is_open: bool) -> None:
        """Note that the log contains the trajectory. The last message of an open turn still grows."""
        messages = len(trajectory.messages) - is_open
        self._logged = (len(trajectory), len(trajectory.completions), messages, len(trajectory.times))
