"""The environment protocol, and a base class whose tools are methods.

Invariant: an environment lives for one episode (start, steps, close; never reset). It sees messages only, never a
token, a policy or a sample. It raises plain exceptions; the caller runs it inside a boundary.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar, get_type_hints, runtime_checkable

import anyio.to_thread
import attrs
import msgspec

from rollouts.base.validators import finite
from rollouts.concurrency.times import Span, checked_spans, now
from rollouts.dtypes import MAX_MESSAGE_BYTES, Content, Image, Message, Prompt, Tool, ToolCall, as_messages
from rollouts.errors import ConfigError, EnvironmentFailure, shortened

__all__ = [
    "Environment",
    "EnvironmentFactory",
    "Resumable",
    "StepResult",
    "ToolEnvironment",
    "ToolResult",
    "as_content",
    "bad_step",
    "is_resumable",
    "sound_opening",
    "sound_step",
    "sound_tools",
    "tool",
    "with_system_prompt",
]


TRUNCATED = "truncated_messages"
"""Metric: the number of messages that were cut."""


@attrs.frozen
class StepResult:
    """The environment's answer to one reply of the model."""

    messages: Sequence[Message] = ()
    """New messages for the model: one tool message for each call, in the order of the calls, or user messages."""
    done: bool = False
    """The episode is over; ``messages`` are then not rendered."""
    reward: float | Sequence[float] | None = None
    """Reward of this step, or one value for each rewarded call. Must be finite, or the rollout fails. Without a reward
    function, the rollout's reward is the sum over all steps."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Finite numbers that are summed over the episode, e.g. ``{"invalid_moves": 1}``."""
    continuation: str = ""
    """Text that continues the assistant turn of the reply, e.g. search results between tags: it is encoded alone,
    without chat markup, never trained, and the model continues after it. Not with ``messages``, not with ``done``, and
    not after a reply with tool calls, whose results are messages."""
    times: Sequence[Span] = ()
    """When which tool ran, for the record; a :class:`ToolEnvironment` says so by itself."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """``reward`` as a tuple; empty for ``None``."""
        reward = self.reward
        return () if reward is None else tuple(reward) if isinstance(reward, Sequence) else (reward,)


def sound_step(step: Any, what: str, *, max_bytes: int = MAX_MESSAGE_BYTES) -> StepResult:
    """Validate the return value of an environment's step: chat dicts become messages, rewards floats, metrics numbers.

    Args:
        step: the returned value, of any type.
        what: the function that returned it, for messages, e.g. ``"CalculatorEnvironment.step"``.
        max_bytes: UTF-8 bytes of one message, or of ``continuation``; a longer one is cut, says so to the model, and
            is counted in ``metrics["truncated_messages"]``.

    Raises:
        EnvironmentFailure: it is not a :class:`StepResult`, a message is invalid, ``done`` is not a bool, a reward or
            metric is not a finite number, or ``continuation`` is not a string or not alone.
    """
    if not isinstance(step, StepResult):
        raise bad_step(what, f"got {shortened(step)}; expected a StepResult")
    try:
        if not isinstance(step.done, bool):
            raise ConfigError.of("StepResult.done", step.done, "True or False")
        messages = _messages_of("StepResult.messages", step.messages)
        metrics = _metrics_of(step)
        cut = tuple([_cut(message, max_bytes) for message in messages])
        continuation = _continuation_of(step, messages)
        text = _cut_text(continuation, max_bytes)
        truncated = sum([one is not other for one, other in zip((*cut, text), (*messages, continuation), strict=True)])
        if truncated:
            metrics[TRUNCATED] = metrics.get(TRUNCATED, 0) + truncated
        return StepResult(cut, step.done, _reward_of(step), metrics, text, checked_spans(step.times))
    except ConfigError as error:
        raise bad_step(what, str(error)) from None
    except Exception as error:  # iterating a user-defined list or mapping runs user code
        raise bad_step(what, f"reading its StepResult raised {shortened(error)}") from error


def sound_tools(tools: Any, what: str) -> tuple[Tool, ...]:
    """Validate the tools of an environment.

    Args:
        tools: the value of its attribute ``tools``, of any type.
        what: the attribute, for messages, e.g. ``"CalculatorEnvironment.tools"``.

    Raises:
        EnvironmentFailure: it is not a sequence of :class:`Tool`, or two have the same name.
    """
    if type(tools) is not tuple and (not isinstance(tools, Iterable) or isinstance(tools, str)):
        raise EnvironmentFailure(f"{what}: got {shortened(tools)}; expected a sequence of Tools, empty for none")
    sound = tuple(tools)
    names: set[str] = set()
    for tool in sound:
        if not isinstance(tool, Tool):
            raise EnvironmentFailure(f"{what}: got {shortened(tool)}; expected Tools")
        if tool.name in names:
            raise EnvironmentFailure(f"{what}: got two tools {tool.name!r}; expected another name for each")
        names.add(tool.name)
    return sound


def sound_opening(opening: Any, what: str) -> tuple[Message, ...]:
    """Validate the return value of an environment's start; chat dicts become messages.

    Args:
        opening: the returned value, of any type.
        what: the function that returned it, for messages, e.g. ``"CalculatorEnvironment.start"``.

    Raises:
        EnvironmentFailure: it is not a sequence of one message or more; a string would take the place of the prompt.
    """
    try:
        messages = _messages_of("messages", opening)
    except ConfigError as error:
        raise bad_step(what, str(error)) from None
    except Exception as error:  # iterating a user-defined sequence runs user code
        raise bad_step(what, f"reading its messages raised {shortened(error)}") from error
    if not messages:
        raise bad_step(what, "got no messages; expected the messages that open the conversation, e.g. prompt.messages")
    return messages


def _messages_of(field: str, value: Any) -> tuple[Message, ...]:
    if type(value) is tuple and _ONLY_MESSAGES.issuperset(map(type, value)):
        messages = value
    elif isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError.of(field, value, "a sequence of messages, e.g. [*prompt.messages, Message('user', text)]")
    else:
        messages = as_messages(value)
    for message in messages:
        if not (text := message.text).isascii():
            _check_text(f"content of a {message.role} message", text)
    return messages


_ONLY_MESSAGES = {Message}


def _check_text(field: str, text: str) -> None:
    """Refuse a string that no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError.of(field, text, "a string without lone surrogates") from None


def _cut(message: Message, max_bytes: int) -> Message:
    """The message with its whole text cut to ``max_bytes``; images are not counted."""
    if 4 * len(message.text) <= max_bytes:
        return message
    left = max_bytes

    def cut(text: str) -> str:
        nonlocal left
        kept = _cut_text(text, max(left, 0))
        left -= len(text.encode("utf-8", "replace")) if message.images else 0
        return kept

    return message.with_texts(cut)


def _cut_text(text: str, max_bytes: int) -> str:
    """The text, cut to ``max_bytes`` with a note for the model where it is longer."""
    if len(text) * 4 <= max_bytes or len(encoded := text.encode("utf-8", "replace")) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode("utf-8", "ignore")
    return f"{kept}\n[truncated: the first {max_bytes} of {len(encoded)} bytes]"


def _continuation_of(step: StepResult, messages: Sequence[Message]) -> str:
    text: Any = step.continuation
    if not isinstance(text, str):
        raise ConfigError.of("StepResult.continuation", text, 'a string, "" for none')
    if not text:
        return ""
    _check_text("StepResult.continuation", text)
    if messages:
        raise ConfigError.of("StepResult.continuation", text, "none with messages: a step answers in one way")
    if step.done:
        raise ConfigError.of("StepResult.continuation", text, "none with done=True: the model does not continue")
    return text


def bad_step(what: str, text: str) -> EnvironmentFailure:
    """The failure for a step that returned an invalid value."""
    error = EnvironmentFailure(f"{what}: {text}")
    error.kind = "environment_step"
    return error


def _reward_of(step: StepResult) -> float | tuple[float, ...] | None:
    reward: Any = step.reward
    if reward is None:
        return None
    if isinstance(reward, Sequence) and not isinstance(reward, str | bytes | bytearray):
        return tuple([_number(f"reward[{index}]", value) for index, value in enumerate(reward)])
    return _number("reward", reward)


def _metrics_of(step: StepResult) -> dict[str, float]:
    raw: Any = step.metrics
    if type(raw) is not dict and not isinstance(raw, Mapping):
        raise ConfigError.of("StepResult.metrics", raw, "a mapping of names to finite numbers")
    metrics: dict[str, float] = {}
    for name, value in raw.items():
        if not isinstance(name, str):
            raise ConfigError.of("StepResult.metrics", raw, "a mapping of names to finite numbers")
        if type(value) is int and -(2**53) < value < 2**53:
            metrics[name] = value
            continue
        number = _number(f"metrics[{name!r}]", value)
        is_count = isinstance(value, numbers.Integral) and abs(number) < 2**53
        metrics[name] = int(number) if is_count else number
    return metrics


def _number(field: str, value: Any) -> float:
    number = finite(value)
    if number is None:
        raise ConfigError.of(f"StepResult.{field}", value, "a finite number")
    return number


@runtime_checkable
class Environment(Protocol):
    """One episode. Created for each rollout and always closed at its end."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools shown to the model. Read after ``start``; they do not change during the episode."""
        ...

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        """Start the episode; return the messages that open the conversation."""
        ...

    async def step(self, reply: Message) -> StepResult:
        """Answer one reply. Its tool calls are well-formed and name tools of this environment."""
        ...

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after a failure or a cancellation."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Optional protocol of an environment: an episode that another process can resume.

    A killed run resumes such an episode from its last finished turn; other episodes start again.
    """

    async def snapshot(self) -> Any:
        """Return the state of the episode after a step, as plain data (types of MessagePack).

        Other data cannot be read again: it counts as a failed snapshot, without which the episode starts again.
        """
        ...

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        """Restore the state that ``snapshot`` returned. Called instead of ``start``."""
        ...


def is_resumable(environment: object) -> TypeGuard[Resumable]:
    """``isinstance(environment, Resumable)`` at a twentieth of the cost; it runs once an episode."""
    return hasattr(environment, "snapshot") and hasattr(environment, "restore")


EnvironmentFactory = Callable[[], Environment]
"""A class or a ``functools.partial`` of one; called without arguments for each rollout."""

Method = TypeVar("Method", bound=Callable[..., Any])


@attrs.frozen
class ToolResult:
    """A return value of a tool with more than its text: a reward, the end of the episode, or metrics."""

    text: Any
    """The content that the model reads: a string, an image (:class:`~rollouts.dtypes.Image` or PIL), or a list."""
    reward: float | None = None
    """Reward of this call: one of the rewards of the step."""
    done: bool = False
    """The episode is over; later calls of the same reply do not run."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Finite numbers that are summed over the episode."""


def as_content(value: Any) -> Content:
    """Convert a value that user code shows the model: a string, an image (:class:`Image` or PIL), or a list of these.

    Raises:
        ConfigError: it is nothing of these.
    """
    if isinstance(value, str):
        return value
    parts = tuple(value) if isinstance(value, list | tuple) and value else (value,)
    images = [part for part in parts if _is_image(part)]
    if not images or len(images) + sum(isinstance(part, str) for part in parts) < len(parts):
        expected = "a string, a number, an image, or a list of strings and images, which the model reads"
        raise ConfigError.of("content", value, expected)
    return tuple(part if isinstance(part, str) else Image.of(part) for part in parts)


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # no image of Pillow exists before it is imported
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))


def tool(method: Method) -> Method:
    """Mark a method of a :class:`ToolEnvironment` as a tool.

    The signature becomes the JSON schema, the docstring's first line the description. The method may be sync or async.
    It returns the content that the model reads: a string, a number, an image (:class:`~rollouts.dtypes.Image` or PIL),
    or a list of strings and images; or a :class:`ToolResult`. Any other value fails the rollout. The model
    also sees a ``ValueError`` or ``ArithmeticError`` that it raises.

    Raises:
        ConfigError: it is called with a description, or marks a property.
    """
    if isinstance(method, str):
        raise ConfigError.of("@tool", method, "no arguments: the docstring of the method is its description")
    if isinstance(method, property):
        raise ConfigError("@tool: got a property; expected a method with self")
    method.__rollouts_tool__ = True  # type: ignore[attr-defined]
    return method


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> Sequence[Message]:
    """The messages behind a system prompt, unless they begin with one or ``system_prompt`` is empty."""
    if system_prompt and (not messages or messages[0].role != "system"):
        return (Message("system", system_prompt), *messages)
    return messages


_CALLED_BY_EPISODES = frozenset({"start", "step", "answer", "close"})
_CALLED_AS_A_PAIR = frozenset({"snapshot", "restore"})


class ToolEnvironment:
    """An environment whose tools are its methods marked with :func:`tool`.

    A reply without tool calls ends the episode; override :meth:`answer` to change this.
    """

    system_prompt: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        shadow = vars(cls).get("tools")
        marked = [name for name in dir(cls) if hasattr(inspect.getattr_static(cls, name), "__rollouts_tool__")]
        if isinstance(shadow, list | tuple) and marked:
            expected = f"no such attribute: it hides the methods marked with tool ({', '.join(marked)})"
            raise ConfigError.of(f"{cls.__name__}.tools", shadow, expected)
        called = _CALLED_BY_EPISODES | _CALLED_AS_A_PAIR if is_resumable(cls) else _CALLED_BY_EPISODES
        for name in called.intersection(marked):
            raise ConfigError(f"{cls.__name__}.{name}: got a tool; expected another name: the episode calls {name}")
        for name, value in vars(cls).items():
            if not isinstance(value, property | staticmethod | classmethod):
                continue
            inner = value.fget if isinstance(value, property) else value.__func__
            if hasattr(inner, "__rollouts_tool__"):
                got = f"{cls.__name__}.{name}: got a {type(value).__name__}"
                raise ConfigError(f"{got}; expected @tool alone, on a method with self")
        prompt = inspect.getattr_static(cls, "system_prompt")
        if inspect.isfunction(prompt) or isinstance(prompt, staticmethod | classmethod):
            expected = "a string, or a property that returns one"
            raise ConfigError(f"{cls.__name__}.system_prompt: got a method; expected {expected}")

    @property
    def tools(self) -> Sequence[Tool]:
        return tuple(entry.tool for entry in self._methods.values())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return with_system_prompt(prompt.messages, self.system_prompt)

    async def step(self, reply: Message) -> StepResult:
        if not reply.tool_calls:
            answer: StepResult | Awaitable[StepResult] = self.answer(reply)
            return answer if isinstance(answer, StepResult) else await answer
        messages: list[Message] = []
        rewards: list[float] = []
        times: list[Span] = []
        metrics: dict[str, float] = {"tool_errors": 0}
        done = False
        for call in reply.tool_calls:
            began = now()
            result, failed = await self._run(call)
            times.append(Span("tool", call.name, began, now() - began))
            messages.append(Message("tool", result.text, tool_call_id=call.id, name=call.name))
            rewards += [] if result.reward is None else [result.reward]
            metrics["tool_errors"] += failed
            for name, amount in result.metrics.items():
                number = _number(f"metrics[{name!r}]", amount)
                metrics[name] = metrics.get(name, 0) + (int(number) if isinstance(amount, int) else number)
            done = result.done
            if done:
                break
        return StepResult(tuple(messages), done, rewards or None, metrics, times=times)

    async def answer(self, reply: Message) -> StepResult:
        """Answer a reply without tool calls."""
        return StepResult(done=True)

    async def close(self) -> None:
        return None

    @property
    def _methods(self) -> dict[str, _ToolMethod]:
        return _tool_methods(type(self))  # type: ignore[arg-type]  # a class is hashable

    async def _run(self, call: ToolCall) -> tuple[ToolResult, bool]:
        try:
            arguments = msgspec.convert(dict(call.arguments), self._methods[call.name].arguments)
            result = getattr(self, call.name)(**msgspec.structs.asdict(arguments))
            if not isinstance(result, str):
                result = await result if inspect.isawaitable(result) else result
        except (msgspec.ValidationError, ValueError, ArithmeticError) as error:
            return ToolResult(f"Error: {error}"), True
        return await self._tool_result(call.name, result), False

    async def _tool_result(self, name: str, result: Any) -> ToolResult:
        """The value that a tool returned, with the content that the model reads.

        Raises:
            EnvironmentFailure: it is nothing that a model reads.
        """
        content = result.text if isinstance(result, ToolResult) else result
        if isinstance(content, str):
            return result if isinstance(result, ToolResult) else ToolResult(content)
        if isinstance(content, numbers.Real):
            content = str(content)
        else:
            try:
                content = await anyio.to_thread.run_sync(as_content, content)  # encoding an image takes milliseconds
            except ConfigError as error:
                method = inspect.unwrap(getattr(type(self), name))
                code = getattr(method, "__code__", None)
                line = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
                why = str(error).removeprefix("content: ")
                raise bad_step(f"{type(self).__name__}.step", f"tool {name}{line}: {why}") from None
        return attrs.evolve(result, text=content) if isinstance(result, ToolResult) else ToolResult(content)


@attrs.frozen
class _ToolMethod:
    tool: Tool
    arguments: type[msgspec.Struct]

    @classmethod
    def of(cls, name: str, method: Callable[..., Any]) -> _ToolMethod:
        try:
            hints = get_type_hints(method)
        except NameError as error:
            expected = "types that the module has"
            raise ConfigError(
                f"{method.__qualname__}: got an annotation with no meaning ({error}); expected {expected}"
            ) from None
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        parameters = list(inspect.signature(method).parameters.values())
        if not parameters or (parameters[0].name != "self" and parameters[0].name in hints):
            names = ", ".join(parameter.name for parameter in parameters)
            raise ConfigError.of(method.__qualname__, f"({names})", "self as the first argument of a tool")
        for parameter in parameters[1:]:
            argument = f"{method.__qualname__}({parameter.name})"
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError.of(argument, str(parameter), "named arguments only: a model cannot pass others")
            if parameter.name not in hints:
                raise ConfigError.of(argument, "no annotation", "a type for each argument of a tool")
            _check_schema(argument, hints[parameter.name])
            entry = (parameter.name, hints[parameter.name])
            fields.append(entry if parameter.default is parameter.empty else (*entry, parameter.default))
        arguments = msgspec.defstruct(name, fields, forbid_unknown_fields=True)
        _, components = msgspec.json.schema_components([arguments])
        schema = {key: value for key, value in components[name].items() if key != "title"}
        description = (inspect.getdoc(method) or "").partition("\n")[0]
        return cls(Tool(name, description, schema), arguments)


def _check_schema(argument: str, kind: Any) -> None:
    try:
        msgspec.json.schema(kind)
    except TypeError:
        expected = "a type of JSON, as str, int, float, bool, list[...], dict[str, ...], Literal[...] or a dataclass"
        raise ConfigError.of(argument, kind, expected) from None


@functools.cache
def _tool_methods(cls: type[Any]) -> dict[str, _ToolMethod]:
    """The marked methods in order of definition, base classes first."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update(dict.fromkeys(name for name, value in vars(base).items() if hasattr(value, "__rollouts_tool__")))
    return {name: _ToolMethod.of(name, getattr(cls, name)) for name in names}
