"""Recording and replay of a rollout's external inputs: server replies and environment results.

Invariant: a replayed rollout receives the recorded inputs in the recorded order; a request that differs from the
recorded one raises :class:`ReplayDiverged`. A reply is on disk before its turn is.

A tape contains the last attempt at a rollout; if that attempt resumed from a snapshot in another process, the inputs of
both processes. Episodes that one rollout plays concurrently cannot be separated on its tape. This module runs nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import attrs

from rollouts.agent.turn_log import message_from_dict, message_to_dict
from rollouts.base.storable import to_msgpack
from rollouts.concurrency.boundary import call_foreign, function_name
from rollouts.dtypes import (
    Completion,
    LoadImage,
    Message,
    Prompt,
    Tool,
    VersionSpan,
    digest,
)
from rollouts.dtypes.lazy_numpy import np
from rollouts.environments.base import (
    Environment,
    EnvironmentFactory,
    StepResult,
    is_resumable,
    sound_opening,
    sound_step,
)
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointUnavailable,
    EnvironmentFailure,
    Kind,
    ReplayDiverged,
)
from rollouts.inference.base import CompletionRequest, Policy, PolicyWrapper, ServerInfo, describe_once
from rollouts.runs.images import ImageFolder
from rollouts.runs.info import is_growing
from rollouts.runs.journal import Columns, Entry, Journal, JournalReader, Offset, read_entry
from rollouts.runs.layout import RECORDING
from rollouts.training.types import GenerateFn, Sample

__all__ = ["RECORDING", "Recording", "Tape", "check_recordable", "recorded", "replayed_from"]

_ERRORS = {kind.__name__: kind for kind in (ContextOverflow, EndpointUnavailable, EndpointRefused, EndpointError)}


# -- recording --------------------------------------------------------------------------------------------------------


@attrs.frozen
class _AttemptRecorder:
    """Appends the events of one attempt at a rollout to the recording."""

    journal: Journal
    index: int | None
    images: ImageFolder

    def record(self, what: str, columns: Columns | None = None, **fields: Any) -> None:
        self.journal.append("event", {"index": self.index, "what": what, **fields}, columns)


def recorded(
    generate_fn: GenerateFn, journal: Journal, environment_cls: EnvironmentFactory, policy: Policy
) -> GenerateFn:
    """Wrap a generate function to record the external inputs of its rollouts in a journal.

    Args:
        generate_fn: takes ``environment_cls`` and ``policy``, as :func:`generate_rollout_batch` does.
        journal: the recording's journal, not the run's.
        environment_cls: creates the environments.
        policy: the policy to record.

    Raises:
        ConfigError: as :func:`check_recordable`.
    """
    inner, images = _accepting_both(generate_fn), ImageFolder(journal.path.parent)

    async def generate(prompts: Sequence[Prompt]) -> Sequence[Sample]:
        (prompt,) = prompts
        recorder = _AttemptRecorder(journal, prompt.index, images)
        recorder.record("begin")
        environments = _Named(environment_cls, functools.partial(_recording_environment, recorder))
        samples = await inner(prompts, environment_cls=environments, policy=_RecordingPolicy(policy, recorder))
        await journal.commit()
        return samples

    generate.__name__ = function_name(generate_fn)
    return generate


def check_recordable(generate_fn: Any) -> None:
    """Check that a generate function takes ``environment_cls`` and ``policy``.

    Raises:
        ConfigError: it lacks one of these parameters.
    """
    parameters = inspect.signature(generate_fn).parameters
    free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not free and not {"environment_cls", "policy"} <= parameters.keys():
        expected = "a generate function that takes environment_cls and policy, so that both can be recorded"
        raise ConfigError.of("RolloutConfig.generate_fn", function_name(generate_fn), expected)


def _accepting_both(generate_fn: Any) -> Callable[..., Awaitable[Sequence[Sample]]]:
    """The generate function, which must take ``environment_cls`` and ``policy``."""
    check_recordable(generate_fn)
    accepting: Callable[..., Awaitable[Sequence[Sample]]] = generate_fn
    return accepting


class _Named:
    """Environment factory with the name of the class that it wraps."""

    def __init__(self, environment_cls: EnvironmentFactory, make: Callable[[EnvironmentFactory], Environment]) -> None:
        self.__name__ = function_name(environment_cls)
        self._environment_cls = environment_cls
        self._make = make

    def __call__(self) -> Environment:
        return self._make(self._environment_cls)


def _recording_environment(recorder: _AttemptRecorder, environment_cls: EnvironmentFactory) -> Environment:
    environment = environment_cls()
    kind = _RecordingResumable if is_resumable(environment) else _RecordingEnvironment
    return kind(environment, function_name(environment_cls), recorder)


class _RecordingEnvironment:
    def __init__(self, inner: Any, name: str, recorder: _AttemptRecorder) -> None:
        self._inner = inner
        self._name = name
        self._recorder = recorder

    @property
    def tools(self) -> Sequence[Tool]:
        tools: Sequence[Tool] = self._inner.tools
        return tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        messages = sound_opening(await self._call("start", prompt), f"{self._name}.start")
        await self._store(messages)
        self._record("start", messages=[message_to_dict(message) for message in messages])
        return messages

    async def step(self, reply: Message) -> StepResult:
        result = sound_step(await self._call("step", reply), f"{self._name}.step", max_bytes=sys.maxsize)
        fields: dict[str, Any] = {"done": result.done, "reward": result.reward, "metrics": dict(result.metrics)}
        messages = [message_to_dict(message) for message in result.messages]
        await self._store(result.messages)
        if result.continuation:
            fields["continuation"] = result.continuation
        self._record("step", reply=_checksum(reply), messages=messages, **fields)
        return result

    async def close(self) -> None:
        try:
            await self._call("close")
        except BaseException as error:
            self._record("close", error=f"{type(error).__name__}: {error}")
            raise

    async def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._inner, method)
        kind: Kind = "environment_start" if method in ("start", "restore") else "environment_step"
        return await call_foreign(EnvironmentFailure, f"{self._name}.{method}", function, *arguments, kind=kind)

    async def _store(self, messages: Sequence[Message]) -> None:
        images = [image for message in messages for image in message.images]
        await self._recorder.images.store({image.sha256: image for image in images})

    def _record(self, what: str, **fields: Any) -> None:
        self._recorder.record(what, tools=[attrs.asdict(tool) for tool in self.tools], **fields)


class _RecordingResumable(_RecordingEnvironment):
    async def snapshot(self) -> Any:
        await self._recorder.journal.commit()  # the turn is about to be stored
        return await self._call("snapshot")

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        await self._call("restore", prompt, snapshot)
        self._record("restore")


class _RecordingPolicy(PolicyWrapper):
    def __init__(self, inner: Policy, recorder: _AttemptRecorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def __repr__(self) -> str:
        return f"<recorded {self.inner!r}>"

    async def complete(self, request: CompletionRequest) -> Completion:
        sent = _fields_of(request)
        try:
            reply = await self.inner.complete(request)
        except EndpointError as error:
            kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
            self._recorder.record("complete", error=[kind, str(error)], **sent)
            raise
        columns = Columns(reply.tokens, np.ones(len(reply.tokens), np.bool_), reply.logprobs)
        versions = [[span.version, span.start, span.stop] for span in reply.versions]
        fields = {_REPLY: {name: getattr(reply, name) for name in _REPLY_FIELDS}}
        self._recorder.record("complete", columns, versions=versions, **fields, **sent)
        return reply

    async def describe(self) -> ServerInfo:
        return await describe_once(self.inner)


def _fields_of(request: CompletionRequest) -> dict[str, Any]:
    """The recorded fields of a request."""
    prompt = [len(request.tokens), digest(request.tokens)]
    return {"prompt": prompt, "budget": request.sampling.max_new_tokens}


_REPLY = "told"  # a stored name
_REPLY_FIELDS = (
    "finish_reason",
    "prompt_tokens",
    "prompt_digest",
    "request_id",
    "cached_tokens",
    "seconds",
    "logprobs_of",
)


def _checksum(reply: Message) -> int:
    return zlib.crc32(to_msgpack(message_to_dict(reply)))


# -- reading ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Event:
    offset: Offset
    what: str
    prompt: int
    """Prompt length of a completion, in tokens; else 0."""


class Recording:
    """The recording of a run: one tape a rollout.

    Raises:
        ConfigError: the run was not recorded.
        JournalError: the recording is damaged.
    """

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / RECORDING
        self.images = ImageFolder(run)
        if not self.path.is_dir():
            raise ConfigError.of("run", str(run), "a recorded run: rollouts run --record")
        self._events: dict[int, list[_Event]] = {}
        begun: set[int] = set()
        restored: set[int] = set()
        growing = (Path(run) / "run.json").is_file() and is_growing(run)
        for entry in JournalReader(self.path, 0 if growing else None):
            index, what = entry.fields["index"], entry.fields["what"]
            if what == "begin":
                begun.add(index)
            elif what == "restore":
                begun.discard(index)
                restored.add(index)
                events = self._events.get(index, [])
                events[:] = [event for event in events if event.what != "close"]  # of the environment that was lost
            else:
                length = entry.fields["prompt"][0] if what == "complete" else 0
                if index in begun:
                    begun.discard(index)
                    restored.discard(index)
                    self._events[index] = []
                events = self._events.setdefault(index, [])
                if what == "complete" and index in restored:
                    restored.discard(index)
                    _drop_from(events, length)
                events.append(_Event(entry.offset, what, length))

    def __repr__(self) -> str:
        return f"<Recording {self.path}: {len(self._events)} rollouts>"

    def tape(self, index: int) -> Tape:
        """The tape of the rollout with this index."""
        entries = (read_entry(self.path, event.offset) for event in self._events.get(index, ()))
        return Tape(index, entries, self.images.load)


def _drop_from(events: list[_Event], length: int) -> None:
    """Drop events of a process that died before it stored their turn: its successor requested the reply again."""
    for number, event in enumerate(events):
        if event.what == "complete" and event.prompt >= length:
            del events[number:]
            return


class Tape:
    """The recorded events of one rollout, read in order during its replay.

    Attributes:
        diverged: the first request that differs from the recorded one.
    """

    def __init__(self, index: int | None, entries: Iterator[Entry], load_image: LoadImage) -> None:
        self.index = index
        self.load_image = load_image
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
        """The tools of the next environment."""
        fields = {} if self._next is None else self._next.fields
        return tuple(Tool(**tool) for tool in fields.get("tools", ()))

    def take(self, what: str) -> Entry:
        """Return the next event and advance.

        Raises:
            ReplayDiverged: the next event is not ``what``.
        """
        entry = self._next
        if entry is None or self._what != what:
            raise self.divergence(f"got a request for {what}; expected {self._what}, the next recorded event")
        self._next = next(self._entries, None)
        self._taken += 1
        return entry

    def check(self) -> None:
        """Raise ReplayDiverged if a request differed, or if events are left."""
        if self.diverged is None and self._next is not None:
            self.divergence(f"the rollout ended; expected {self._what}, the next recorded event")
        if self.diverged is not None:
            raise self.diverged

    def close(self) -> str | None:
        """The recorded error of closing the environment, if any."""
        return str(self.take("close").fields["error"]) if self._what == "close" else None

    def divergence(self, text: str) -> ReplayDiverged:
        """Create an error for the current event; the first one is stored in :attr:`diverged`."""
        error = ReplayDiverged(f"rollout {self.index}, event {self._taken}: {text}")
        self.diverged = self.diverged or error
        return error


def replayed_from(
    generate_fn: GenerateFn,
    tapes: Callable[[int], Tape],
    environment_cls: EnvironmentFactory,
    server: Mapping[str, Any],
) -> GenerateFn:
    """Wrap a generate function to replay its rollouts from their tapes, without a server and without environments.

    Args:
        generate_fn: as for :func:`recorded`.
        tapes: returns the tape of a rollout by its index.
        environment_cls: used for its name in messages.
        server: the recorded fields of :class:`ServerInfo`.

    Raises:
        ConfigError: as :func:`recorded`.
    """
    inner, info = _accepting_both(generate_fn), ServerInfo(**server)

    async def generate(prompts: Sequence[Prompt]) -> Sequence[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None, "rollouts are numbered"
        tape = tapes(prompt.index)
        environments = _Named(environment_cls, lambda _: _ReplayedEnvironment(tape))
        return await inner(prompts, environment_cls=environments, policy=_ReplayedPolicy(info, tape))

    return generate


class _ReplayedEnvironment:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.tools = tape.tools()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        stored = self._tape.take("start").fields["messages"]
        return [message_from_dict(fields, self._tape.load_image) for fields in stored]

    async def step(self, reply: Message) -> StepResult:
        fields = self._tape.take("step").fields
        if fields["reply"] != _checksum(reply):
            raise self._tape.divergence(f"the environment receives {reply!r}; expected the recorded reply")
        messages = [message_from_dict(message, self._tape.load_image) for message in fields["messages"]]
        continuation = fields.get("continuation", "")
        return StepResult(messages, fields["done"], fields["reward"], fields["metrics"], continuation)

    async def close(self) -> None:
        error = self._tape.close()
        if error is not None:
            raise RuntimeError(error)


class _ReplayedPolicy:
    takes_images = True

    def __init__(self, info: ServerInfo, tape: Tape) -> None:
        self._info = info
        self._tape = tape

    async def complete(self, request: CompletionRequest) -> Completion:
        await anyio.lowlevel.checkpoint()
        tape = self._tape
        entry = tape.take("complete")
        fields = entry.fields
        for name, value in _fields_of(request).items():
            if fields[name] != value:
                label = "length and checksum of the prompt" if name == "prompt" else "max_new_tokens"
                raise tape.divergence(f"{label}: got {value}; expected {fields[name]}, as recorded")
        if "error" in fields:
            kind, text = fields["error"]
            raise _ERRORS[kind](text)
        assert entry.columns is not None, "a completion has columns"
        assert entry.columns.logprobs is not None
        versions = [VersionSpan(*span) for span in fields["versions"]]
        return Completion(entry.columns.tokens, entry.columns.logprobs, versions=versions, **fields[_REPLY])

    async def describe(self) -> ServerInfo:
        return self._info

    async def aclose(self) -> None:
        return None
