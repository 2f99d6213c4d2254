"""A run: a whole episode of a seat, with its environment or as a program in a fresh sandbox.

Invariant: it is an episode or a session as in a rollout of one agent, with the seed, the clock and the versions of its
seat. A finished episode is logged as one turn; a program is not, so that a play with one begins again after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rollouts.agent.loop import begin_episode, play_to_end
from rollouts.agent.turn_log import replayed
from rollouts.dtypes import Limits, Prompt, StopReason, chat_text
from rollouts.dtypes.lazy_numpy import np
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import (
    ConfigError,
    Failure,
    GenerateFailure,
    TokenMismatchError,
    at,
    current_place,
)
from rollouts.seats.play_log import digest_of
from rollouts.seats.table import Player, Table, as_sent
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample, Status
from rollouts.trajectory import Trajectory

__all__ = ["Run"]


class Run:
    """One episode of a seat.

    Attributes:
        reward: that of its samples. By default the sum of the environment's step rewards, ``None`` without any.
        metadata: what a program's workspace took, and how the program ended; empty for an environment.
    """

    def __init__(self, table: Table, seat: str) -> None:
        self._table = table
        self.seat = seat
        self.number = table.begin(self)
        self.reward: float | None = None
        self.asking = False
        """Whether it is being played."""
        self.metadata: dict[str, Any] = {}
        self._samples: list[Sample] = []
        self._kept = list(table.log.take(self._key))

    def __repr__(self) -> str:
        return f"<run {self.seat} {self.number}: {len(self._samples)} samples>"

    @property
    def kept(self) -> bool:
        return bool(self._kept)

    @property
    def _key(self) -> str:
        return f"{self.seat}/{self.number}"

    @property
    def messages(self) -> list[Any]:
        """The conversation of the last branch, as chat dicts; empty before its end."""
        return list(self._samples[-1].read_record("messages")) if self._samples else []

    @property
    def text(self) -> str:
        """The text of the last reply; empty without one."""
        replies = [message for message in self.messages if message.get("role") == "assistant"]
        return chat_text(replies[-1].get("content")) if replies else ""

    @property
    def over(self) -> StopReason | None:
        """Why it ended."""
        return self._samples[-1].stop_reason if self._samples else None

    async def play(self, given: Any, options: Mapping[str, Any]) -> None:
        """Play it; ``SeatHandle.run`` does.

        Raises:
            SeatFailed: the episode failed, and with it the rollout.
        """
        table, seat = self._table, self._table.seats[self.seat]
        table.check(self)
        self.asking = True
        try:
            with table.failing(self), at(f"{current_place()} · seat {self.seat} {self.number}"):
                prompt = self._prompt(given)
                player = await table.player(self.seat, self.number)
                if seat.program is not None:
                    await self._run_program(prompt, player, options)
                elif options:
                    raise ConfigError.of(f"seats.{self.seat}.run", sorted(options), "none: the seat has no program")
                else:
                    await self._run_episode(prompt, player, own=given is table.prompt)
        finally:
            self.asking = False
        failure = self._samples[-1].failure
        if self._samples[-1].status in (Status.FAILED, Status.ABORTED):
            raise table.fail(self, failure or Failure.of(GenerateFailure("the run was aborted")))
        self.reward = self._samples[-1].reward

    def _prompt(self, given: Any) -> Prompt:
        of = self._table.prompt
        if isinstance(given, Prompt):
            return attrs.evolve(
                given, group_index=of.group_index, index=of.index, replacement=of.replacement, turn_log=None
            )
        return attrs.evolve(of, prompt=given if isinstance(given, str) else tuple(as_sent(given)))

    async def _run_episode(self, prompt: Prompt, player: Player, *, own: bool) -> None:
        """Play an episode, or take the kept one.

        Raises:
            GenerateFailure: the template refuses the text of the play; with ``own`` the prompt is that of the rollout,
                as for one agent: then ConfigError.
        """
        table, seat = self._table, self._table.seats[self.seat]
        asked = digest_of(prompt.messages, prompt.label, prompt.metadata) if table.log.logs else ""
        branches = self._kept_episode(asked, player)
        if branches is None:
            episode = await begin_episode(
                prompt,
                player.policy,
                player.renderer,
                sampling=player.sampling,
                limits=seat.limits if isinstance(seat.limits, Limits) else None,
                max_context=player.max_context,
                history=table.options.history,
            )
            try:
                await play_to_end(episode, seat.environment_cls or SingleTurnEnvironment)
            except ConfigError as error:
                if own or episode.tools is None or len(episode.trajectory):
                    raise
                player.renderer.self_test(episode.tools).raise_if_refused()
                raise GenerateFailure(f"the chat template refuses the opening of the run: {error}") from error
            branches = episode.branches
            (last,) = branches[-1:]
            if len(branches) == 1 and last.completions and last.stop_reason not in _UNFINISHED:
                fields = {"asked": asked, "over": last.stop_reason and last.stop_reason.value, "open_turn": None}
                await table.log.save(self._key, last, (0, 0, 0, 0), fields)
        renderer = player.renderer
        images = None if renderer.images is None else renderer.images.inputs
        self._samples = trajectory_to_samples(branches, table.prompt, renderer.decode, images)

    def _kept_episode(self, asked: str, player: Player) -> list[Trajectory] | None:
        """The episode that an earlier process finished, ``None`` without one.

        Raises:
            Diverged: it had another prompt.
        """
        if not self._kept:
            return None
        if len(self._kept) != 1 or self._kept[0].fields.get("asked") != asked:
            raise self._table.diverge(f"{self._key}: another prompt than before the interruption")
        try:
            earlier = replayed(self._kept, player.renderer.vocab_size)
            reason = StopReason(self._kept[0].fields["over"])
        except (TokenMismatchError, LookupError, TypeError, ValueError) as error:
            raise self._table.diverge(f"{self._key}: {error}") from error
        earlier.count("turns_before_resume", len(earlier.completions))
        self._kept = []
        return [earlier.seal(reason)]

    async def _run_program(self, prompt: Prompt, player: Player, options: Mapping[str, Any]) -> None:
        from rollouts.programs.generate import program_rollout_to_samples  # here: it imports the gateway

        seat, table = self._table.seats[self.seat], self._table
        assert seat.program is not None
        assert seat.sandbox is not None
        given: dict[str, Any] = {**table.options.renderer, **options}
        if seat.limits is not None:
            given["limits"] = seat.limits
        samples = await program_rollout_to_samples(
            prompt,
            program=seat.program,
            sandbox=seat.sandbox,
            endpoint=player.endpoint,
            tokenizer=player.renderer,
            sampling=player.sampling,
            policy=player.policy,
            history=table.options.history,
            **given,
        )
        taken = samples[-1].metadata
        self.metadata = {name: value for name, value in taken.items() if prompt.metadata.get(name) is not value}
        for sample in samples:
            sample.prompt, sample.label = table.prompt.prompt, table.prompt.label
            sample.metadata = {**table.prompt.metadata, **self.metadata}
        self._samples = samples

    async def finish(self) -> None:
        """Nothing to do: its environment or its sandbox is closed."""

    def samples(self) -> list[Sample]:
        """Its branches as samples; none without a reply."""
        found = [sample for sample in self._samples if sample.turns or np.any(sample.mask_column)]
        for sample in found:
            sample.seat, sample.conversation, sample.reward = self.seat, self.number, self.reward
        return found


_UNFINISHED = (StopReason.FAILED, StopReason.ABORTED)
