"""A chat template: convert messages to text, as transformers does, but with a fixed date.

Invariant: one object renders the same messages to the same text at any time. This module does not know token ids or
dialects.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from rollouts.dtypes import ChatDict, Message, Tool, ToolCall
from rollouts.errors import ConfigError

__all__ = ["ChatTemplate"]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the text to train on; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with fast paths for the most frequent lookups; the results are the same."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _SAFE and attribute in _SAFE[kind]:
            return getattr(obj, attribute)  # public, and changes nothing
        if kind is jinja2.utils.Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, _MISSING)
            if value is not _MISSING:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *arguments: Any, **options: Any) -> Any:
        if obj is jinja2.utils.Namespace or (type(obj) is BuiltinMethodType and type(obj.__self__) is str):
            options.pop("_loop_vars", None)  # jinja passes these two only to functions that take the context
            options.pop("_block_vars", None)
            return obj(*arguments, **options)
        return super().call(context, obj, *arguments, **options)


_MISSING = object()
_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE = {
    jinja2.runtime.LoopContext: frozenset({"first", "last", "index", "index0", "previtem", "nextitem"}),
    str: frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"}),
}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys; models were trained without either.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_JSON = json.JSONEncoder(ensure_ascii=False).encode
"""``_tojson`` without options."""


def _parts(text: str) -> list[ChatDict]:
    return [{"type": "text", "text": text}]


_RENDERED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_PROBE_NAME, _PROBE_VALUE = "qz7name", "qz7value"


class ChatTemplate:
    """A compiled template with fixed variables.

    Args:
        source: the template's text.
        name: the name in error messages.
        variables: special tokens and options such as ``enable_thinking``.
        moment: the time that ``strftime_now`` formats.
        tells_tools: whether the template gets the tools.

    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, Any],
        moment: datetime.datetime,
        tells_tools: bool = True,
    ) -> None:
        self._tells_tools = tells_tools
        self.source = source
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        self.name = f"{name} ({self.digest})"
        self._variables = dict(variables)
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = self._to_json
        self._tools: tuple[tuple[Tool, ...], list[ChatDict]] = ((), [])
        self._tool_texts: dict[int, list[Any]] = {}
        """The chat form of each tool with its JSON, by ``id``: a cache, because each rendering writes the tools."""
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = moment.strftime
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template {self.name}: it does not compile: {error}") from error
        self._compiled.globals = dict(
            self._compiled.globals
        )  # each rendering copies them; a dict copies faster than a ChainMap

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The variables that a caller can set, special tokens included, without those that each rendering sets.

        A name that the template assigns is one of its own variables, unless the template asks whether it is defined.
        """
        environment = self._compiled.environment
        tree = environment.parse(self.source)
        names = jinja2.meta.find_undeclared_variables(tree)
        assigned = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
        parameters = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "param"}
        asked = {
            node.node.name
            for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
            if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, jinja2.nodes.Name)
        }
        return frozenset(names - environment.globals.keys() - _RENDERED - parameters - (assigned - asked))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True) -> str:
        """Render the conversation as text.

        Raises:
            ConfigError: the template raises on these messages.
        """
        return self._render([self._chat(message) for message in messages], tools, generation_prompt)

    def _chat_of(self, tools: Sequence[Tool]) -> list[ChatDict]:
        """Return the tools in chat form, cached; the sandbox prevents templates from changing them."""
        cached, chats = self._tools
        if len(cached) != len(tools) or not all(map(operator.is_, cached, tools)):
            chats = [tool.to_chat() for tool in tools]
            self._tool_texts = {id(chat): [chat, None] for chat in chats}
            self._tools = (tuple(tools), chats)
        return list(chats)

    def _to_json(self, value: Any, *arguments: Any, **options: Any) -> str:
        if arguments or options:
            return _tojson(value, *arguments, **options)
        cached = self._tool_texts.get(id(value))
        if cached is None or cached[0] is not value:
            return _JSON(value)
        cached[1] = cached[1] or _JSON(value)
        return str(cached[1])

    def _chat(self, message: Message) -> ChatDict:
        """Return a message in chat form, with the reasoning under both field names that templates use."""
        chat = message.to_chat()
        if message.reasoning is not None:
            chat["thinking"] = message.reasoning
        if self._in_parts and message.content:
            chat["content"] = _parts(message.content)
        if message.tool_calls:
            content, as_text = self._form_of_calls
            chat["content"] = chat["content"] or content
            if as_text:
                for call in chat["tool_calls"]:
                    call["function"]["arguments"] = _tojson(call["function"]["arguments"])
        return chat

    @functools.cached_property
    def _in_parts(self) -> bool:
        """Whether content must be a list of parts: templates of some vision models leave plain text out."""
        for in_parts in (False, True):
            content = _parts(_PROBE_VALUE) if in_parts else _PROBE_VALUE
            try:
                if _PROBE_VALUE in self._render([{"role": "user", "content": content}], (), True):
                    return in_parts
            except ConfigError:
                continue
        return False

    @functools.cached_property
    def _form_of_calls(self) -> tuple[Any, bool]:
        """The empty content of a turn with calls, and whether the arguments are a JSON text.

        The content is ``""``, or ``None`` if the template requires it: for other values, DeepSeek's templates write a
        second, empty turn, or no call. Other templates raise on ``None`` or print it. The arguments are an object, or
        a JSON text if the template can only concatenate strings.
        """
        forms = [(self._no_content(as_text), as_text) for as_text in (False, True)]
        for content, as_text in forms:
            text = self._probe(content, as_text) or ""
            if _PROBE_NAME in text and _PROBE_VALUE in text:
                return content, as_text
        return forms[0]

    def _no_content(self, as_text: bool) -> Any:
        empty = _parts("") if self._in_parts else ""
        with_empty, with_none = self._probe(empty, as_text), self._probe(None, as_text)
        return empty if with_none is None or "None" in with_none or with_none == with_empty else None

    def _probe(self, content: Any, as_text: bool) -> str | None:
        """Render a turn with one call; ``None`` if the template raises."""
        arguments: Any = {"x": _PROBE_VALUE}
        call = ToolCall(_PROBE_NAME, arguments, id="call00000").to_chat()
        if as_text:
            call["function"]["arguments"] = _tojson(arguments)
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            user = _parts("U") if self._in_parts else "U"
            return self._render([{"role": "user", "content": user}, turn], (), False)
        except ConfigError:
            return None

    def _render(self, messages: list[ChatDict], tools: Sequence[Tool], generation_prompt: bool) -> str:
        try:
            return self._compiled.render(
                messages=messages,
                tools=(self._chat_of(tools) if self._tells_tools else None) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code and may raise anything
            roles = ", ".join(str(message["role"]) for message in messages[-4:])
            raise ConfigError(
                f"chat template {self.name}: it cannot render these messages (… {roles}): "
                f"{type(error).__name__}: {error}"
            ) from error
