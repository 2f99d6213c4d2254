"""An environment of an ORS server as an :class:`~rollouts.environments.base.Environment`.

Invariant: one session for each rollout, always deleted at its end. A call that the server refused is a message to the
model; a tool that raised, a lost session and an unreachable server end the rollout.

This module sees messages, never a secret or a session id.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import attrs

from rollouts.dtypes import Content, Message, Prompt, Tool
from rollouts.environments.base import StepResult
from rollouts.environments.ors.client import ORSServer, ORSTask
from rollouts.environments.ors.session import ORSSession
from rollouts.environments.ors.wire import CallAnswer, Listing, content_of

__all__ = ["CONTINUES", "CallRecord", "ORSEnvironment"]

NUDGE = "There was no tool call in that. Go on with one of the tools."
CONTINUES = "continues"
"""Metadata key of an output: the episode continues after a call of the terminal tool. Only servers of this package set
it; in the standard a reply without calls is the last."""


@attrs.frozen
class CallRecord:
    """One call and its result."""

    id: str
    name: str
    text: Content
    """The content of the tool message: a string, or strings and images."""
    reward: float | None
    finished: bool
    failed: bool
    """The server refused the call."""
    metadata: Any


class ORSEnvironment:
    """One task of an ORS server, named by the prompt's metadata (``task_spec``, or ``split`` and ``index``).

    Each call's reward is a step reward. A reply without calls goes to the environment's terminal tool and ends the
    episode. Without a terminal tool, the model gets ``nudge`` as a user message.

    Args:
        server: the environment's server, shared by all rollouts.
        nudge: the answer to a reply without calls if the task has no terminal tool.
        images: whether the model sees images; otherwise text describes them, counted in ``blocks_not_shown``.
    """

    def __init__(self, server: ORSServer, *, nudge: str = NUDGE, images: bool = False) -> None:
        self.server = server
        self.nudge = nudge
        self.images = images
        self.calls: list[CallRecord] = []
        """Every call so far, in order."""
        self.finished = False
        """Whether the environment reported the end of the episode."""
        self._session: ORSSession | None = None
        self._tools: tuple[Tool, ...] = ()
        self._listing = Listing([])
        self._hidden = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        task = ORSTask.of(prompt)
        self._session = session = await self.server.session(task)
        self._listing, self._tools = await self.server.offer(session, task)
        messages, self._hidden = await session.opening(self._listing, images=self.images)
        return messages

    async def step(self, reply: Message) -> StepResult:
        if not reply.tool_calls:
            return await self._answer(reply)
        records: list[CallRecord] = []
        messages: list[Message] = []
        for call in reply.tool_calls:
            record = await self._call(call.id, call.name, call.arguments)
            records.append(record)
            messages.append(Message("tool", record.text, tool_call_id=call.id, name=call.name))
            if record.finished:
                break
        return self._result(records, messages)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(self, reply: Message) -> StepResult:
        terminal = self._listing.terminal_tool
        if terminal is None:
            return StepResult([Message("user", self.nudge)], metrics={"replies_without_calls": 1})
        arguments = {} if terminal.arg is None else {terminal.arg: reply.text}
        record = await self._call("", terminal.name, arguments)
        continues = record.failed or (isinstance(record.metadata, dict) and record.metadata.get(CONTINUES) is True)
        self.finished = self.finished or not continues
        return self._result([record], [Message("user", record.text)])

    async def _call(self, call_id: str, name: str, arguments: Any) -> CallRecord:
        assert self._session is not None, "step before start"
        answer = await self._session.call(name, arguments)
        read = functools.partial(self._record, call_id, name, answer)
        record = await anyio.to_thread.run_sync(read) if self.images else read()  # decoding takes milliseconds
        self.calls.append(record)
        self.finished = self.finished or record.finished
        return record

    def _record(self, call_id: str, name: str, answer: CallAnswer) -> CallRecord:
        if answer.ok and answer.output is not None:
            output = answer.output
            content, hidden = content_of(output.blocks, images=self.images)
            self._hidden += hidden
            return CallRecord(call_id, name, content, output.reward, output.finished, False, output.metadata)
        over = answer.reason == "episode_finished"
        return CallRecord(call_id, name, f"Error: {answer.error}", None, over, True, {"reason": answer.reason})

    def _result(self, records: Sequence[CallRecord], messages: Sequence[Message]) -> StepResult:
        rewards = tuple(record.reward for record in records if record.reward is not None)
        metrics = {"tool_errors": float(sum(record.failed for record in records))}
        if self._hidden:
            metrics["blocks_not_shown"], self._hidden = float(self._hidden), 0
        return StepResult(tuple(messages), done=self.finished, reward=rewards or None, metrics=metrics)
