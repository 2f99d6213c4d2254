"""A chat template: convert messages to text, as transformers does, but with a fixed date.

Invariant: one object renders the same messages to the same text at any time. This module does not know token ids or
dialects. A template is first tried in a separate process (:mod:`rollouts.renderer.template_sandbox`).
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jinja2
import jinja2.meta
import jinja2.nodes

from rollouts.dtypes import ChatDict, Image, Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.template_sandbox import TemplateSandbox, problem_of, tojson

__all__ = ["ChatTemplate"]


_JSON = json.JSONEncoder(ensure_ascii=False).encode
"""``tojson`` without options."""


def _parts(text: str) -> list[ChatDict]:
    return [{"type": "text", "text": text}]


_IMAGE: ChatDict = {"type": "image"}
"""An image as templates get it: they write a placeholder, and do not look at pixels."""

_WRITING = (jinja2.nodes.Output, jinja2.nodes.Add, jinja2.nodes.Concat, jinja2.nodes.Getitem, jinja2.nodes.CondExpr)
"""Nodes whose string constants are written, or name a field."""

_RENDERED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_PROBE_NAME, _PROBE_VALUE = "qz7name", "qz7value"


class _ToolForms:
    """The latest tools, as each rendering writes them: chat dicts, their JSON, and the repr for keys of caches.

    The sandbox prevents templates from changing the chat dicts.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)
        self.key = repr(self.tools)
        self.chats = [tool.to_chat() for tool in tools]
        self.json = dict.fromkeys(map(id, self.chats), "")
        """The JSON of each chat dict, by ``id``; empty until it is needed."""


class ChatTemplate:
    """A compiled template with fixed variables.

    Args:
        source: the template's text.
        name: the name in error messages.
        variables: special tokens and options such as ``enable_thinking``.
        moment: the time that ``strftime_now`` formats.
        tells_tools: whether the template gets the tools.
        shows_images: whether messages may have images; the template gets them as parts ``{"type": "image"}``.

    Raises:
        ConfigError: the source does not compile, or does not end in time.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, Any],
        moment: datetime.datetime,
        tells_tools: bool = True,
        shows_images: bool = False,
    ) -> None:
        self._tells_tools = tells_tools
        self._shows_images = shows_images
        self.source = source
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        self.name = f"{name} ({self.digest})"
        self._variables = dict(variables)
        self.fingerprint = zlib.crc32(
            repr([source, sorted(self._variables.items(), key=repr)]).encode("utf-8", "replace")
        )
        """The CRC-32 of the source and the variables."""
        problem = problem_of(source, json.dumps(self._variables, default=str))
        if problem is not None:
            raise ConfigError(f"chat template {self.name}: {problem}")
        environment = TemplateSandbox.for_chat(moment)
        environment.filters["tojson"] = self._to_json
        self._set_tools(())
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template {self.name}: it does not compile: {error}") from error
        self._compiled.globals = dict(
            self._compiled.globals
        )  # each rendering copies them; a dict copies faster than a ChainMap

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The variables that a caller can set, special tokens included, without the variables that each rendering sets.

        A name that the template assigns is its own variable, unless the template asks whether it is defined.
        """
        environment = self._compiled.environment
        tree = environment.parse(self.source)
        names = jinja2.meta.find_undeclared_variables(tree)
        assigned = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
        parameters = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "param"}
        tested = {
            node.node.name
            for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
            if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, jinja2.nodes.Name)
        }
        return frozenset(names - environment.globals.keys() - _RENDERED - parameters - (assigned - tested))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True) -> str:
        """Render the conversation as text.

        Raises:
            ConfigError: the template raises on these messages.
        """
        return self._render([self._chat(message) for message in messages], tools, generation_prompt)

    @functools.cached_property
    def constants(self) -> tuple[str, ...]:
        """The string constants that expressions compare or search for, without white space around them."""
        tree = self._compiled.environment.parse(self.source)
        found: list[str] = []
        nodes: list[jinja2.nodes.Node] = [tree]
        while nodes:
            node = nodes.pop()
            children = list(node.iter_child_nodes())
            nodes += children
            if not isinstance(node, _WRITING):
                found += [str(child.value) for child in children if isinstance(child, jinja2.nodes.Const)]
        return tuple(sorted({text for value in found if len(text := value.strip()) > 1}))

    def key_of(self, tools: Sequence[Tool]) -> str:
        """The repr of the tools, which keys of caches contain."""
        return self._forms_of(tools).key

    def _forms_of(self, tools: Sequence[Tool]) -> _ToolForms:
        forms = self._tools
        if forms.tools is tools or (len(forms.tools) == len(tools) and all(map(operator.is_, forms.tools, tools))):
            return forms
        return self._set_tools(tools)

    def _to_json(self, value: Any, *arguments: Any, **options: Any) -> str:
        if arguments or options:
            return tojson(value, *arguments, **options)
        known, key = self._tools.json, id(value)
        if key not in known:
            return _JSON(value)
        text = known[key] = known[key] or _JSON(value)
        return text

    def _chat(self, message: Message) -> ChatDict:
        """Return a message in chat form, with the reasoning under both field names that templates use."""
        images = () if type(message.content) is str else message.images
        if images and not self._shows_images:
            message.only_text(f"the renderer of chat template {self.name}")
        chat = (attrs.evolve(message, content="") if images else message).to_chat()
        if message.reasoning is not None:
            chat["thinking"] = message.reasoning
        if images:
            chat["content"] = [_IMAGE if isinstance(part, Image) else _parts(part)[0] for part in message.content]
        elif self._in_parts and message.content:
            chat["content"] = _parts(message.text)
        if message.tool_calls:
            content, as_text = self._form_of_calls
            chat["content"] = chat["content"] or content
            if as_text:
                for call in chat["tool_calls"]:
                    call["function"]["arguments"] = tojson(call["function"]["arguments"])
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
            call["function"]["arguments"] = tojson(arguments)
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            user = _parts("U") if self._in_parts else "U"
            return self._render([{"role": "user", "content": user}, turn], (), False)
        except ConfigError:
            return None

    def _set_tools(self, tools: Sequence[Tool]) -> _ToolForms:
        self._tools = _ToolForms(tools)
        return self._tools

    def _write(self, **given: Any) -> str:
        return self._compiled.render(**given)

    def _render(self, messages: list[ChatDict], tools: Sequence[Tool], generation_prompt: bool) -> str:
        try:
            return self._write(
                messages=messages,
                tools=(list(self._forms_of(tools).chats) if self._tells_tools else None) or None,
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
