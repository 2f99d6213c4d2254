"""Legal parts of a recipe that are mistakes more often than not, each as a line of the rehearsal.

Invariant: nothing is refused or changed here. Only the first prompts are read, and a list or dict of a class counts as
shared only if its length changed during the rehearsal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Prompt
from rollouts.recipe import Recipe

__all__ = ["doubts_of", "shared_lengths"]

_PROMPTS = 100
"""The prompts that are read."""


def shared_lengths(factory: Callable[..., Any]) -> Mapping[str, int]:
    """The length of each list, dict and set that is an attribute of an environment's class, by its name."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    bases = reversed(factory.__mro__) if inspect.isclass(factory) else ()
    return {
        f"{base.__name__}.{name}": len(value)
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, list | dict | set) and not name.startswith("__")
    }


def doubts_of(
    recipe: Recipe, stop_texts: Sequence[str], before: Mapping[str, int], after: Mapping[str, int]
) -> list[str]:
    """The doubtful points of a recipe.

    Args:
        recipe: after its rehearsal.
        stop_texts: the texts of the tokens that end a turn of its model.
        before: :func:`shared_lengths` of its environment before the rehearsal.
        after: the same after it.
    """
    prompts, size = recipe.data_buffer.prompts, recipe.config.batch_size
    doubts = [
        f"{name}: a rollout changed it, and it is one object for all rollouts; expected self.{name.partition('.')[2]} "
        "= ... in start, or a constant"
        for name, length in after.items()
        if length != before.get(name, length)
    ]
    if size > len(prompts):
        doubts.append(
            f"batch_size: got {size} with {len(prompts)} prompts; expected at most that many: "
            "a batch now plays some prompt more than once"
        )
    if _reads_label(recipe.config.reward_fn) and all(prompt.label is None for prompt in prompts):
        name = function_name(recipe.config.reward_fn)
        doubts.append(f"prompts[0].label: got None, as {len(prompts)} of {len(prompts)} prompts; {name} reads it")
    for number, prompt in enumerate(prompts[:_PROMPTS]):
        if doubt := _doubt_of_prompt(prompt, stop_texts):
            return [*doubts, f"prompts[{number}]: {doubt}"]
    return doubts


def _doubt_of_prompt(prompt: Prompt, stop_texts: Sequence[str]) -> str:
    if prompt.messages and prompt.messages[-1].role == "assistant":
        return "the last message is the assistant's; expected the user's: the model reads that answer before its own"
    rendered = next((text for text in stop_texts if any(text in message.text for message in prompt.messages)), None)
    if rendered is not None:
        expected = "text or messages without a chat template's tokens, which the run adds"
        return f"got text with {rendered!r}; expected {expected}"
    return ""


def _reads_label(reward_fn: Any) -> bool:
    """Whether the code of the function itself names ``label``."""
    while isinstance(reward_fn, functools.partial):
        reward_fn = reward_fn.func
    code = getattr(inspect.unwrap(reward_fn), "__code__", None) if callable(reward_fn) else None
    return code is not None and "label" in code.co_names
