"""A chat: a conversation of a seat whose other side is the play.

Invariant: it is one episode of the agent loop whose turns the play asks for: the policy only ever receives tokens of
the chat (law 1), and each sampled token is trained once (laws 2 and 3). Its clock runs only while it is asked. Replies
with tool calls go to the seat's environment and are never returned. A reply that an earlier process logged is returned
again where the same messages are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio.lowlevel
import attrs

from rollouts.agent.episode import Episode
from rollouts.agent.guarded_environment import GuardedEnvironment
from rollouts.agent.loop import begin_episode, seal, within
from rollouts.agent.turn_log import Turn, message_from_dict, replayed
from rollouts.dtypes import Limits, Message, StopReason, Tool
from rollouts.environments.base import Environment
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import (
    ConfigError,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    TokenMismatchError,
    at,
    current_place,
)
from rollouts.inference.base import check_takes_images
from rollouts.renderer.in_threads import in_thread
from rollouts.seats.play_log import digest_of
from rollouts.seats.table import Player, Table, as_sent
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample

__all__ = ["CHAT_LIMITS", "Chat", "Reply"]

CHAT_LIMITS = Limits(max_turns=100, on_cut="continue")
"""Those of a game rather than of an agent."""


@attrs.frozen
class Reply:
    """The reply of a seat."""

    text: str
    """Empty where a limit left no token for a reply."""
    message: Message | None = None
    over: StopReason | None = None
    """The limit or the environment that ended the chat; ``None`` while it can be asked again."""


class Chat:
    """One conversation of a seat. Asks of one chat follow each other; several chats may be asked at once.

    Attributes:
        reward: that of its samples; the sum of its environment's step rewards if it stays ``None``.
        over: why it ended; ``None`` while it can be asked.
    """

    def __init__(self, table: Table, seat: str, system: str = "") -> None:
        of = table.seats[seat]
        if of.program is not None:
            error = ConfigError.of(f"seats.{seat}.chat", of.program, "a seat without a program: a program has runs")
            table.note(error)
            raise error
        self._table = table
        self.seat = seat
        self.number = table.begin(self)
        self.reward: float | None = None
        self.over: StopReason | None = None
        self._system = system
        self._limits = of.limits if isinstance(of.limits, Limits) else CHAT_LIMITS
        self._factory = of.environment_cls or SingleTurnEnvironment
        self._left = self._limits.episode_seconds
        self.asking = False
        """Whether an ask is waiting for its reply."""
        self._episode: Episode | None = None
        self._player: Player | None = None
        self._guarded: GuardedEnvironment | None = None
        self._tools: tuple[Tool, ...] = ()
        self._turn = 0
        self._first: Sequence[Message] = ()
        self._logged = (0, 0, 0, 0)
        self._kept = list(table.log.take(self._key))
        self._given = 0
        """Number of kept turns whose replies were returned."""

    def __repr__(self) -> str:
        return f"<chat {self.seat} {self.number}: {self._turn} replies, {self.over or 'open'}>"

    @property
    def environment(self) -> Environment | None:
        """The seat's environment, open until the play returns; ``None`` before the first ask."""
        return None if self._guarded is None else self._guarded.environment

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return [] if self._episode is None else list(self._episode.trajectory.messages)

    @property
    def kept(self) -> bool:
        return self._given < len(self._kept)

    @property
    def _key(self) -> str:
        return f"{self.seat}/{self.number}"

    async def ask(self, said: str | Sequence[Any]) -> Reply:
        """Say something to the seat, and return its reply.

        Args:
            said: the text of a user message, or messages.

        Raises:
            SeatFailed: the seat failed, and with it the rollout; or the chat is over, or is being asked.
        """
        table = self._table
        table.check(self)
        if self.asking:
            raise table.fail(self, GenerateFailure("asked while it is being asked; expected one ask after the other"))
        if self.over is not None:
            text = f"asked after its end ({self.over.value}); expected the play to look at Reply.over"
            raise table.fail(self, GenerateFailure(text))
        self.asking = True
        try:
            with table.failing(self), at(f"{current_place()} · seat {self.seat} {self.number}"):
                return await self._answer(as_sent(said))
        except Exception:
            raise
        except BaseException:  # a scope of the play, whose reply is lost
            self.over = self.over or StopReason.DEADLINE
            raise
        finally:
            self.asking = False

    async def _answer(self, said: Sequence[Message]) -> Reply:
        if not self._first:
            said = self._first = (Message("system", self._system), *said) if self._system else said
        asked = digest_of(said) if self._table.log.logs else ""
        if self._given < len(self._kept):
            await anyio.lowlevel.checkpoint()
            return await self._kept_reply(asked)
        episode, player = await self._begun()
        reply, reason, ended = None, None, False
        episode.stop_reason = StopReason.DEADLINE
        with within(episode, self._left) as clock:
            reply, reason = await self._turns(episode, player, said)
            ended = True
        self._left = clock.ends - asyncio.get_running_loop().time()
        self.over = reason if ended else episode.stop_reason
        if episode.failure is not None:
            raise self._table.fail(self, episode.failure)
        if self.over is StopReason.ABORTED:
            raise GenerateFailure("the server aborted the reply")
        if not episode.branches[0].completions and self.over is not StopReason.CONTEXT_OVERFLOW:
            raise GenerateFailure(f"no reply: {self.over.value if self.over else 'nothing was sampled'}")
        if self._table.log.logs and episode.trajectory.completions:
            await self._log(episode, asked, reply)
        return Reply("" if reply is None else reply.text, reply, self.over)

    async def _begun(self) -> tuple[Episode, Player]:
        """The episode, begun at the first ask, and the model."""
        if self._episode is None or self._player is None:
            table = self._table
            player = self._player = await table.player(self.seat, self.number)
            self._episode = await begin_episode(
                table.prompt,
                player.policy,
                player.renderer,
                sampling=player.sampling,
                limits=self._limits,
                max_context=player.max_context,
                history=table.options.history,
            )
        return self._episode, self._player

    async def _turns(
        self, episode: Episode, player: Player, said: Sequence[Message]
    ) -> tuple[Message | None, StopReason | None]:
        """Append what was said, and sample until a reply has no tool calls.

        Returns:
            The last reply, ``None`` if a limit leaves no token for it; and why the chat is over.
        """
        if self._turn >= self._limits.max_turns:
            return None, StopReason.MAX_TURNS
        if self._guarded is None:
            await self._open(episode, player, said)
        else:
            await episode.append_messages(said, self._tools)
        assert self._guarded is not None, "just opened"
        while True:
            self._turn += 1
            reply, reason = await episode.request_reply(self._turn, self._tools)
            if reply is None or reason is not None or not reply.tool_calls:
                return reply, reason
            step = await self._guarded.step(reply, episode.trajectory, has_tools=bool(self._tools))
            if step.done:
                return reply, StopReason.TASK_COMPLETED
            if self._turn >= self._limits.max_turns:
                return reply, StopReason.MAX_TURNS
            if step.continuation:
                await episode.append_continuation(step.continuation, self._guarded.name, self._tools)
            else:
                await episode.append_messages(step.messages, self._tools)

    async def _open(self, episode: Episode, player: Player, said: Sequence[Message]) -> None:
        player.renderer.check_images(said)
        if player.renderer.images is not None:
            check_takes_images(player.policy)
            await in_thread(player.renderer.images.check_repeats)
        prompt = attrs.evolve(self._table.prompt, prompt=said)
        self._guarded = episode.environment = GuardedEnvironment.create(self._factory, self._limits)
        opening = await self._guarded.open(prompt, episode.trajectory)
        self._tools = episode.tools_of(self._guarded)
        try:
            await episode.open_conversation(opening, self._tools)
        except ConfigError as error:  # what the play says may be the text of another seat
            raise GenerateFailure(f"the chat template refuses the opening of the chat: {error}") from error

    async def finish(self) -> None:
        """Close the environment and seal the branches."""
        episode = self._episode
        if episode is None or episode.trajectory.stop_reason is not None:
            return
        if episode.environment is not None:
            await episode.environment.close(episode.trajectory)
        episode.stop_reason = self.over or StopReason.TASK_COMPLETED
        seal(episode, episode.branches, episode.tools)

    def samples(self) -> list[Sample]:
        """Its branches as samples; none without a reply."""
        if self._episode is None or self._player is None or not self._episode.branches[0].completions:
            return []
        renderer = self._player.renderer
        images = None if renderer.images is None else renderer.images.inputs
        samples = trajectory_to_samples(self._episode.branches, self._table.prompt, renderer.decode, images)
        for sample in samples:
            sample.seat, sample.conversation = self.seat, self.number
            sample.reward = sample.reward if self.reward is None else self.reward
        return samples

    # -- the log --

    async def _log(self, episode: Episode, asked: str, reply: Message | None) -> None:
        replies, environment = episode.replies, self._guarded
        fields: dict[str, Any] = {
            "asked": asked,
            "replied": reply is not None,
            "over": self.over and self.over.value,
            "turn": self._turn,
            "left": self._left,
            "session": episode.session,
            "calls_asked": replies.call_count,
            "replies": replies.count,
            "open_turn": replies.start if replies.continues else None,
        }
        if self._factory is SingleTurnEnvironment:
            fields["snapshot"] = None  # it has no state
        elif environment is not None and environment.resumable is not None:
            try:
                fields["snapshot"] = await environment.snapshot(episode.trajectory)
            except EnvironmentFailure:
                episode.trajectory.count("snapshot_failures")
        self._logged = await self._table.log.save(self._key, episode.trajectory, self._logged, fields)

    async def _kept_reply(self, asked: str) -> Reply:
        """The reply that an earlier process logged.

        Raises:
            Diverged: something else was asked then, or the chat cannot continue from there.
        """
        turn = self._kept[self._given]
        if turn.fields.get("asked") != asked:
            raise self._table.diverge(f"{self._key}, ask {self._given}: other messages than before the interruption")
        reply = _reply_of(turn)
        if self._given + 1 == len(self._kept):
            await self._restore()
        self._given += 1  # a play that gives up before has a kept turn left: the rollout begins again
        return reply

    async def _restore(self) -> None:
        """Continue after the last kept turn."""
        last = self._kept[-1]
        episode, player = await self._begun()
        if "snapshot" not in last.fields:
            raise self._table.diverge(f"{self._key}: its environment has no snapshot")
        try:
            earlier = replayed(self._kept, player.renderer.vocab_size)
            self._turn, self._left = int(last.fields["turn"]), float(last.fields["left"])
        except (TokenMismatchError, LookupError, TypeError, ValueError) as error:
            raise self._table.diverge(f"{self._key}: {error}") from error
        self._guarded = episode.environment = GuardedEnvironment.create(self._factory, self._limits)
        prompt = attrs.evolve(self._table.prompt, prompt=self._first)
        try:
            await self._guarded.restore(prompt, last.fields["snapshot"], episode.trajectory)
            self._tools = episode.tools_of(self._guarded)
        except EnvironmentFailure as error:
            raise self._table.fail(self, Failure.of(error)) from error
        episode.adopt_logged(earlier, last.fields)
        over = last.fields["over"]
        self.over = None if over is None else StopReason(over)
        self._logged = (len(earlier), len(earlier.completions), len(earlier.messages), len(earlier.times))


def _reply_of(turn: Turn) -> Reply:
    fields = turn.fields
    over = None if fields.get("over") is None else StopReason(fields["over"])
    if not fields.get("replied"):
        return Reply("", None, over)
    given = next(one for one in reversed(fields["messages"]) if one["role"] == "assistant")
    message = message_from_dict(given, turn.images.__getitem__)
    return Reply(message.text, message, over)
