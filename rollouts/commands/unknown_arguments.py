"""Hints for arguments that a verb does not have: the nearest option, or how an option of a recipe is written."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.base.nearest import did_you_mean
from rollouts.recipe import OPTION_DEFAULTS

__all__ = ["hints"]


def hints(words: Sequence[str], known: Sequence[str]) -> str:
    """The end of the error message for unknown arguments; empty without a hint.

    Args:
        words: the unknown arguments.
        known: the options of the verb.
    """
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    options = [option for option in known if option.startswith("--")]
    found = "".join(_of_recipe(name, options) or did_you_mean(name, options) for name in names)
    if found or "--set" not in options:
        return found
    return " (options of the recipe are --set NAME=VALUE)"


def _of_recipe(argument: str, known: Sequence[str]) -> str:
    """A hint for an argument that is an option of every recipe; empty for others, and for verbs without ``--set``."""
    option = argument.removeprefix("--").replace("-", "_")
    if "--set" not in known or option not in OPTION_DEFAULTS:
        return ""
    return f" (an option of the recipe: --set {option}=VALUE)"
