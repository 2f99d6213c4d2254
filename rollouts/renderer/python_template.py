"""A chat template in Python, for families whose publisher writes prompts by code and not with a jinja template.

Invariant: it is judged by the same self-test as any chat template. The function is code of the user, and must return
the same text for the same arguments at any time. This module does not know token ids or dialects.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib
import inspect
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollouts.base.plugins import plugins
from rollouts.errors import ConfigError
from rollouts.renderer.template import ChatTemplate

__all__ = ["ENTRY_POINTS", "PythonTemplate", "template_function"]

ENTRY_POINTS = "rollouts.renderers"
"""The entry point group of chat templates in Python. Each entry point is a function."""

_GIVEN = ("messages", "tools", "add_generation_prompt")

TemplateFunction = Callable[..., Any]
"""``f(messages, tools=None, add_generation_prompt=False, **variables)`` returns text, or a list of its parts. Messages
and tools are in the chat format of transformers' ``apply_chat_template``."""


def template_function(chosen: str | Path | None) -> TemplateFunction | None:
    """The function that ``chat_template`` names: an entry point, or ``package.module:function``; else ``None``.

    Raises:
        ConfigError: it cannot be loaded, or is not a function of messages, tools and add_generation_prompt.
    """
    name = "" if chosen is None else str(chosen)
    if not name or "{" in name or "\n" in name or Path(name).is_file():
        return None
    added = plugins(ENTRY_POINTS)
    module, colon, attribute = name.partition(":")
    if name in added:
        return _checked(name, added[name].load())
    if not colon or not module.replace(".", "").isidentifier() or not attribute.isidentifier():
        return None
    try:
        return _checked(name, getattr(importlib.import_module(module), attribute))
    except ConfigError:
        raise
    except Exception as error:  # an import of foreign code raises any type
        raise ConfigError(f"chat_template {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _checked(name: str, function: Any) -> TemplateFunction:
    try:
        parameters = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = set()
    if not set(_GIVEN) <= parameters:
        raise ConfigError.of(f"chat_template {name!r}", function, f"a function of {', '.join(_GIVEN)}")
    found: TemplateFunction = function
    return found


class PythonTemplate(ChatTemplate):
    """A chat template whose text a function writes.

    Args:
        function: see :data:`TemplateFunction`.
        name: the name in error messages.
        variables: further arguments of the function; others are left out.
        tells_tools: whether the function gets the tools.
        shows_images: whether messages may have images.
    """

    def __init__(
        self,
        function: TemplateFunction,
        *,
        name: str,
        variables: Mapping[str, Any],
        tells_tools: bool = True,
        shows_images: bool = False,
    ) -> None:
        self._function = function
        self.source = _source_of(function)
        self.digest = hashlib.sha256(self.source.encode()).hexdigest()[:12]
        self.name = f"{name} ({self.digest})"
        self._variables = {key: value for key, value in variables.items() if key in self.reads}
        self._tells_tools, self._shows_images = tells_tools, shows_images
        self._set_tools(())
        self.fingerprint = zlib.crc32(repr([self.source, sorted(self._variables.items())]).encode("utf-8", "replace"))

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The arguments of the function that a caller can set."""
        return frozenset(inspect.signature(self._function).parameters) - {*_GIVEN, "kwargs"}

    @functools.cached_property
    def constants(self) -> tuple[str, ...]:
        """The string constants that its module compares or searches for, without white space around them."""
        found = {
            str(node.value).strip()
            for compared in ast.walk(ast.parse(self.source))
            if isinstance(compared, ast.Compare)
            for node in ast.walk(compared)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        return tuple(sorted(text for text in found if len(text) > 1))

    def _write(self, **given: Any) -> str:
        given.pop("documents")
        for name in ("messages", "tools"):  # they share objects with the conversation, and the function may change them
            given[name] = copy.deepcopy(given[name])
        written = self._function(**given)
        return written if isinstance(written, str) else "".join(written)


def _source_of(function: TemplateFunction) -> str:
    """The text of the function's module; without one, its name."""
    module = inspect.getmodule(function)
    try:
        return inspect.getsource(module or function)
    except (OSError, TypeError):
        return f"{function!r}"
