"""Legal parts of a recipe that are mistakes more often than not, each as a line of the rehearsal.

Invariant: nothing is refused or changed here. Only the first prompts are read, and only where the rehearsal showed that
the environment begins with them. A list or dict of a class counts as shared if its length changed during the rehearsal
and it is not declared as shared, by ``ClassVar``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Prompt, chat_text
from rollouts.recipe import Recipe
from rollouts.training import Sample

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
        if isinstance(value, list | dict | set) and not name.startswith("__") and not _is_declared_shared(base, name)
    }


def _is_declared_shared(base: type, name: str) -> bool:
    try:
        return "ClassVar" in str(inspect.get_annotations(base).get(name))
    except NameError:  # from Python 3.14 on, of a name that only type checkers import
        return False


def doubts_of(
    recipe: Recipe,
    played: Sample | None,
    stop_texts: Sequence[str],
    before: Mapping[str, int],
    after: Mapping[str, int],
) -> list[str]:
    """The doubtful points of a recipe.

    Args:
        recipe: after its rehearsal.
        played: the sample of an episode; ``None`` if none went well.
        stop_texts: the texts of the tokens that end a turn of its model.
        before: :func:`shared_lengths` of its environment before the rehearsal.
        after: the same after it.
    """
    prompts, size = recipe.data_buffer.prompts, recipe.config.batch_size
    doubts = [
        f"{name}: a rollout changed it, and it is one object for all rollouts; expected self.{name.partition('.')[2]} "
        "= ... in start, or ClassVar where they share it"
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
    shown = prompts[:_PROMPTS] if played is not None and _begins_with_its_prompt(played) else ()
    for number, prompt in enumerate(shown):
        if doubt := _doubt_of_prompt(prompt, stop_texts):
            return [*doubts, f"prompts[{number}]: {doubt}"]
    return doubts


def _begins_with_its_prompt(sample: Sample) -> bool:
    """Whether the first reply follows the messages of the prompt, perhaps behind a system prompt, or continues them."""
    given = [(message.role, message.text) for message in Prompt(sample.prompt).messages]
    if given and given[-1][0] == "assistant":
        given.pop()  # the reply is in the same message
    shown = [(one["role"], chat_text(one.get("content"))) for one in sample.messages]
    replies = sum(role == "assistant" for role, _ in shown) - sum(role == "assistant" for role, _ in given)
    return replies == sample.turns and given in (shown[: len(given)], shown[1 : len(given) + 1])


def _doubt_of_prompt(prompt: Prompt, stop_texts: Sequence[str]) -> str:
    last = prompt.messages[-1] if prompt.messages else None
    if last is not None and last.role == "assistant" and _is_answer(last.text, prompt.label):
        expected = "the user's, or the begin of a reply"
        return f"the last message is the assistant's, with the answer, which the reply continues; expected {expected}"
    rendered = next((text for text in stop_texts if any(text in message.text for message in prompt.messages)), None)
    if rendered is not None:
        expected = "text or messages without a chat template's tokens, which the run adds"
        return f"got text with {rendered!r}; expected {expected}"
    return ""


def _is_answer(text: str, label: Any) -> bool:
    """Whether the text ends with the label; without one, any text may be the answer."""
    labels = label if isinstance(label, list | tuple) else [label]
    return any(one is None or text.rstrip(" .\n").endswith(str(one)) for one in labels)


def _reads_label(reward_fn: Any) -> bool:
    """Whether the code of the function itself names ``label``."""
    while isinstance(reward_fn, functools.partial):
        reward_fn = reward_fn.func
    code = getattr(inspect.unwrap(reward_fn), "__code__", None) if callable(reward_fn) else None
    return code is not None and "label" in code.co_names
