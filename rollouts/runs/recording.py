"""What rollouts were told from outside, kept: replies of the server, answers of environments; and told again.

Invariant: whoever plays a rollout again on its tape is told what it was told when it was recorded, in that order; where
it asks for something else, :class:`ReplayDiverged` says what and where. A reply is on disk before the turn that it
belongs to is.

A tape holds the last attempt at a rollout. Where that went on from a snapshot in another process, it holds what both
were told. Rollouts that play several episodes at once cannot be told apart on a tape. This module plays nothing.
"""

from __future__ import annotations

import contextvars
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import attrs
import numpy as np

from rollouts.agent.turn_log import message_from_dict, message_to_dict
from rollouts.concurrency.boundary import call_foreign, function_name
from rollouts.dtypes import Completion, Message, Prompt, SamplingParams, TokenColumn, Tool, VersionSpan, as_messages
from rollouts.environments.base import Environment, EnvironmentFactory, StepResult, is_resumable
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointUnavailable,
    EnvironmentFailure,
    ReplayDiverged,
)
from rollouts.inference.base import Policy, ServerInfo
from rollouts.runs.folder import RECORDING
from rollouts.runs.journal import Columns, Entry, Journal, Offset, read_entry, read_journal
from rollouts.runs.plain_data import to_msgpack
from rollouts.training.types import GenerateFn, Sample
from rollouts.trajectory import digest

__all__ = ["RECORDING", "Recording", "Tape", "check_recordable", "recorded", "replayed_from"]

_ERRORS = {kind.__name__: kind for kind in (ContextOverflow, EndpointUnavailable, EndpointRefused, EndpointError)}


# -- recording --------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Microphone:
    """Writes what one attempt at a rollout is told."""

    journal: Journal
    index: int | None

    def take_down(self, what: str, columns: Columns | None = None, **fields: Any) -> None:
        self.journal.append("event", {"index": self.index, "what": what, **fields}, columns)


_MICROPHONE: contextvars.ContextVar[_Microphone | None] = contextvars.ContextVar("rollouts_microphone", default=None)


def recorded(
    generate_fn: GenerateFn, journal: Journal, environment_cls: EnvironmentFactory, policy: Policy
) -> GenerateFn:
    """The generate function, with everything that its rollouts are told written to a journal.

    Args:
        generate_fn: takes ``environment_cls`` and ``policy``, as :func:`generate_rollout_batch` does.
        journal: where to; not the run's own.
        environment_cls: what it makes environments with.
        policy: what it asks.

    Raises:
        ConfigError: it takes neither.
    """
    inner = _with_both(generate_fn, _Named(environment_cls, _recording_environment), _RecordingPolicy(policy))

    async def generate(prompts: Sequence[Prompt]) -> Sequence[Sample]:
        (prompt,) = prompts
        microphone = _Microphone(journal, prompt.index)
        microphone.take_down("begin")
        token = _MICROPHONE.set(microphone)
        try:
            samples = await inner(prompts)
        finally:
            _MICROPHONE.reset(token)
        await journal.commit()
        return samples

    generate.__name__ = function_name(generate_fn)
    return generate


def check_recordable(generate_fn: Any) -> None:
    """See that a generate function takes what it is to be given.

    Raises:
        ConfigError: it takes no ``environment_cls`` or no ``policy``.
    """
    parameters = inspect.signature(generate_fn).parameters
    free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not free and not {"environment_cls", "policy"} <= parameters.keys():
        expected = "a generate function that takes environment_cls and policy, so that both can be heard"
        raise ConfigError.of("RolloutConfig.generate_fn", function_name(generate_fn), expected)


def _with_both(generate_fn: Any, environment_cls: Any, policy: Policy) -> GenerateFn:
    check_recordable(generate_fn)

    async def generate(prompts: Sequence[Prompt]) -> Sequence[Sample]:
        samples: Sequence[Sample] = await generate_fn(prompts, environment_cls=environment_cls, policy=policy)
        return samples

    return generate


class _Named:
    """Makes environments, under the name of the class that they stand for."""

    def __init__(self, environment_cls: EnvironmentFactory, make: Callable[[EnvironmentFactory], Environment]) -> None:
        self.__name__ = function_name(environment_cls)
        self._environment_cls = environment_cls
        self._make = make

    def __call__(self) -> Environment:
        return self._make(self._environment_cls)


def _recording_environment(environment_cls: EnvironmentFactory) -> Environment:
    environment = environment_cls()
    microphone = _MICROPHONE.get()
    if microphone is None:
        return environment
    kind = _RecordingResumable if is_resumable(environment) else _RecordingEnvironment
    return kind(environment, function_name(environment_cls), microphone)


class _RecordingEnvironment:
    def __init__(self, inner: Any, name: str, microphone: _Microphone) -> None:
        self._inner = inner
        self._name = name
        self._microphone = microphone

    @property
    def tools(self) -> Sequence[Tool]:
        tools: Sequence[Tool] = self._inner.tools
        return tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        messages = as_messages(await self._ask("start", prompt))
        self._take_down("start", messages=[message_to_dict(message) for message in messages])
        return messages

    async def step(self, reply: Message) -> StepResult:
        answer: StepResult = await self._ask("step", reply)
        if isinstance(answer, StepResult):
            told = {"done": answer.done, "reward": answer.reward, "metrics": dict(answer.metrics)}
            messages = [message_to_dict(message) for message in answer.messages]
            self._take_down("step", reply=_checksum(reply), messages=messages, **told)
        return answer

    async def close(self) -> None:
        try:
            await self._ask("close")
        except BaseException as error:
            self._take_down("close", error=f"{type(error).__name__}: {error}")
            raise

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await call_foreign(
            EnvironmentFailure, f"{self._name}.{method}", getattr(self._inner, method), *arguments
        )

    def _take_down(self, what: str, **fields: Any) -> None:
        self._microphone.take_down(what, tools=[attrs.asdict(tool) for tool in self.tools], **fields)


class _RecordingResumable(_RecordingEnvironment):
    async def snapshot(self) -> Any:
        await self._microphone.journal.commit()  # the turn is about to be kept
        return await self._ask("snapshot")

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        await self._ask("restore", prompt, snapshot)
        self._take_down("restore")


class _RecordingPolicy:
    def __init__(self, inner: Policy) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<recorded {self.inner!r}>"

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        microphone = _MICROPHONE.get()
        asked: dict[str, Any] = {"prompt": [len(tokens), digest(tokens)], "budget": sampling.max_new_tokens}
        try:
            reply = await self.inner.complete(tokens, sampling, stop_token_ids=stop_token_ids, session=session)
        except EndpointError as error:
            if microphone is not None:
                kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
                microphone.take_down("complete", error=[kind, str(error)], **asked)
            raise
        if microphone is not None:
            columns = Columns(reply.tokens, np.ones(len(reply.tokens), np.bool_), reply.logprobs)
            versions = [[span.version, span.start, span.stop] for span in reply.versions]
            told = {name: getattr(reply, name) for name in _TOLD}
            microphone.take_down("complete", columns, versions=versions, told=told, **asked)
        return reply

    async def describe(self) -> ServerInfo:
        return await self.inner.describe()

    async def aclose(self) -> None:
        await self.inner.aclose()


_TOLD = ("finish_reason", "prompt_tokens", "prompt_digest", "request_id", "cached_tokens", "seconds")


def _checksum(reply: Message) -> int:
    return zlib.crc32(to_msgpack(message_to_dict(reply)))


# -- reading ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Event:
    place: Offset
    what: str
    prompt: int
    """Length of the prompt of a completion."""


class Recording:
    """The tapes of a run.

    Raises:
        ConfigError: the run was not recorded.
        JournalError: the recording is damaged.
    """

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / RECORDING
        if not self.path.is_dir():
            raise ConfigError.of("run", str(run), "one that was recorded: rollouts run --record")
        self._events: dict[int, list[_Event]] = {}
        begun: set[int] = set()
        restored: set[int] = set()
        for entry in read_journal(self.path):
            index, what = entry.fields["index"], entry.fields["what"]
            if what == "begin":
                begun.add(index)
            elif what == "restore":
                begun.discard(index)
                restored.add(index)
                told = self._events.get(index, [])
                told[:] = [event for event in told if event.what != "close"]  # of the world that died
            else:
                length = entry.fields["prompt"][0] if what == "complete" else 0
                if index in begun:
                    begun.discard(index)
                    restored.discard(index)
                    self._events[index] = []
                events = self._events.setdefault(index, [])
                if what == "complete" and index in restored:
                    restored.discard(index)
                    _cut_behind(events, length)
                events.append(_Event(entry.place, what, length))

    def __repr__(self) -> str:
        return f"<Recording {self.path}: {len(self._events)} rollouts>"

    def tape(self, index: int) -> Tape:
        """What the rollout of this index was told."""
        return Tape(index, (read_entry(self.path, event.place) for event in self._events.get(index, ())))


def _cut_behind(events: list[_Event], length: int) -> None:
    """Drop what a process was told that died before its turn was kept: the next asked again for that reply."""
    for number, event in enumerate(events):
        if event.what == "complete" and event.prompt >= length:
            del events[number:]
            return


class Tape:
    """Tells one rollout again what it was told.

    Attributes:
        diverged: where the rollout first asked for something else.
    """

    def __init__(self, index: int | None, entries: Iterator[Entry]) -> None:
        self.index = index
        self.diverged: ReplayDiverged | None = None
        self._entries = entries
        self._next = next(entries, None)
        self._taken = 0

    def __repr__(self) -> str:
        return f"<Tape of rollout {self.index}: {self._taken} taken, next {self._what}>"

    @property
    def _what(self) -> str:
        return "nothing" if self._next is None else str(self._next.fields["what"])

    def tools(self) -> tuple[Tool, ...]:
        """The tools of the environment that is made next."""
        fields = {} if self._next is None else self._next.fields
        return tuple(Tool(**tool) for tool in fields.get("tools", ()))

    def take(self, what: str) -> Entry:
        """The next thing told, which must be an answer to this."""
        entry = self._next
        if entry is None or self._what != what:
            raise self.divergence(f"asked for {what}; expected {self._what}, which is what was recorded next")
        self._next = next(self._entries, None)
        self._taken += 1
        return entry

    def check(self) -> None:
        """Raise where the rollout asked for something else, or ended before its tape."""
        if self.diverged is None and self._next is not None:
            self.divergence(f"the rollout ended; expected {self._what}, which is what was recorded next")
        if self.diverged is not None:
            raise self.diverged

    def close(self) -> str | None:
        """What closing the environment raised."""
        return str(self.take("close").fields["error"]) if self._what == "close" else None

    def divergence(self, text: str) -> ReplayDiverged:
        """Remember the first place that differs."""
        error = ReplayDiverged(f"rollout {self.index}, event {self._taken}: {text}")
        self.diverged = self.diverged or error
        return error


_TAPE: contextvars.ContextVar[Tape] = contextvars.ContextVar("rollouts_tape")


def replayed_from(
    generate_fn: GenerateFn,
    tapes: Callable[[int], Tape],
    environment_cls: EnvironmentFactory,
    server: Mapping[str, Any],
) -> GenerateFn:
    """The generate function, with its rollouts told what is on their tapes; no server and no environment is asked.

    Args:
        generate_fn: as for :func:`recorded`.
        tapes: gives the tape of a rollout by its index.
        environment_cls: named in messages only.
        server: what it said of itself: the fields of :class:`ServerInfo`.

    Raises:
        ConfigError: as :func:`recorded`.
    """
    policy = _ReplayedPolicy(ServerInfo(**server))
    inner = _with_both(generate_fn, _Named(environment_cls, lambda _: _ReplayedEnvironment(_TAPE.get())), policy)

    async def generate(prompts: Sequence[Prompt]) -> Sequence[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None, "rollouts are numbered"
        token = _TAPE.set(tapes(prompt.index))
        try:
            return await inner(prompts)
        finally:
            _TAPE.reset(token)

    return generate


class _ReplayedEnvironment:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.tools = tape.tools()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return [message_from_dict(fields) for fields in self._tape.take("start").fields["messages"]]

    async def step(self, reply: Message) -> StepResult:
        fields = self._tape.take("step").fields
        if fields["reply"] != _checksum(reply):
            raise self._tape.divergence(f"the environment is given {reply!r}; expected the reply that was recorded")
        messages = [message_from_dict(message) for message in fields["messages"]]
        return StepResult(messages, fields["done"], fields["reward"], fields["metrics"])

    async def close(self) -> None:
        error = self._tape.close()
        if error is not None:
            raise RuntimeError(error)


class _ReplayedPolicy:
    def __init__(self, info: ServerInfo) -> None:
        self._info = info

    async def complete(
        self, tokens: TokenColumn, sampling: SamplingParams, *, stop_token_ids: tuple[int, ...] = (), session: str = ""
    ) -> Completion:
        await anyio.lowlevel.checkpoint()
        tape = _TAPE.get()
        entry = tape.take("complete")
        fields = entry.fields
        asked = {"prompt": [len(tokens), digest(tokens)], "budget": sampling.max_new_tokens}
        for name, value in asked.items():
            if fields[name] != value:
                told = "length and checksum of the prompt" if name == "prompt" else "tokens that the reply may have"
                raise tape.divergence(f"{told}: got {value}; expected {fields[name]}, as recorded")
        if "error" in fields:
            kind, text = fields["error"]
            raise _ERRORS[kind](text)
        assert entry.columns is not None, "a completion has columns"
        assert entry.columns.logprobs is not None
        versions = [VersionSpan(*span) for span in fields["versions"]]
        return Completion(entry.columns.tokens, entry.columns.logprobs, versions=versions, **fields["told"])

    async def describe(self) -> ServerInfo:
        return self._info

    async def aclose(self) -> None:
        return None
