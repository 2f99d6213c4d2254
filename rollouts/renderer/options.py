"""The options of a renderer that a run sets, and the options in the metadata of a prompt.

Invariant: an option has one name wherever it is set: here, in a recipe, on the command line and in the metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from rollouts.errors import ConfigError
from rollouts.renderer.call_check import CallCheck
from rollouts.renderer.dialects import Dialect
from rollouts.renderer.special_text import SpecialText

__all__ = ["TEMPLATE_KWARGS", "RendererOptions", "with_prompt_options"]

TEMPLATE_KWARGS = "template_kwargs"
"""The option that a prompt may set too: the key in its metadata."""


class RendererOptions(TypedDict, total=False):
    """Arguments of :class:`~rollouts.renderer.Renderer`; an option that is absent or ``None`` has its default there."""

    chat_template: str | Path | None
    """Template text, the name of one of the tokenizer's templates, or a path of a file with template text."""
    template_kwargs: Mapping[str, Any] | None
    """Variables that the template reads, e.g. ``{"enable_thinking": False}``."""
    dialect: str | Dialect | None
    """The notation of tool calls."""
    calls: CallCheck
    """``"unchecked"`` plays a family whose template writes other calls than the named dialect reads."""
    stop_token_ids: Iterable[int] | None
    """Ids that end a turn."""
    special_text: SpecialText
    """The treatment of special tokens in the text of user and tool messages."""
    images: Any
    """The model's processor for messages with images: ``True`` for the processor in the tokenizer's folder, another
    folder, or a processor. By default images are refused."""


def with_prompt_options(options: RendererOptions, metadata: Mapping[str, Any]) -> RendererOptions:
    """The options, in which the ``metadata["template_kwargs"]`` of a prompt override single variables.

    Raises:
        ConfigError: the value of this key is not a mapping.
    """
    variables = metadata.get(TEMPLATE_KWARGS)
    if variables is None:
        return options
    if not isinstance(variables, Mapping):
        name = f"Prompt.metadata[{TEMPLATE_KWARGS!r}]"
        raise ConfigError.of(name, variables, "a mapping of variables of the template")
    return {**options, "template_kwargs": {**(options.get("template_kwargs") or {}), **variables}}
