"""Environments with the interface of Gymnasium, e.g. of Gymnasium itself and of GEM, in text and images.

Invariant: ``reset`` is called once, with the seed of the prompt, so that all rollouts of a prompt start alike; each
reply is one ``step``. The environment's synchronous code runs in worker threads, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollouts.dtypes import Content, Message, Prompt, Tool
from rollouts.environments.adapters.calls import in_thread, with_content
from rollouts.environments.base import StepResult, as_content
from rollouts.errors import ConfigError

__all__ = ["GymnasiumEnvironment"]


def _shown(observe: Callable[[Any], Any], observation: Any) -> Content:
    shown = observe(observation)
    try:
        return as_content(shown)
    except ConfigError:
        expected = "a string, an image, or a list of these; observe=… converts other observations"
        raise ConfigError.of("GymnasiumEnvironment.observation", shown, expected) from None


def _same(observation: Any) -> Any:
    return observation


class GymnasiumEnvironment:
    """An environment with ``reset(seed=…)`` and ``step(action)``. Bind it with ``functools.partial``.

    The prompt's ``metadata["seed"]`` is compulsory, ``metadata["options"]`` is passed to ``reset`` if it is there. The
    first observation follows the text of the prompt in the same user message.

    Args:
        make: creates the environment of one episode, e.g. ``partial(gymnasium.make, "TextWorld-v0")``.
        action: maps the text of a reply to the action; its ``ValueError`` is a message to the model, and counted.
        observe: maps an observation to the content of a user message: a string, an image (e.g.
            ``PIL.Image.fromarray(array)``), or a list of these.
    """

    tools: Sequence[Tool] = ()

    def __init__(
        self, make: Callable[[], Any], *, action: Callable[[str], Any] = str, observe: Callable[[Any], Any] = _same
    ) -> None:
        self._make, self._action, self._observe = make, action, observe
        self._inner: Any = None

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        seed = prompt.metadata.get("seed")
        if type(seed) is not int:
            expected = "an integer: all rollouts of a prompt start from one state"
            raise ConfigError.of("metadata['seed']", seed, expected)
        options = {"options": prompt.metadata["options"]} if "options" in prompt.metadata else {}
        self._inner = await in_thread(self._make)
        observation, _ = await in_thread(self._inner.reset, seed=seed, **options)
        return with_content(prompt.messages, await in_thread(_shown, self._observe, observation))

    async def step(self, reply: Message) -> StepResult:
        try:
            action = self._action(reply.text)
        except ValueError as error:
            return StepResult([Message("user", f"Error: {error}")], metrics={"invalid_actions": 1})
        observation, reward, terminated, truncated, _ = await in_thread(self._inner.step, action)
        done, metrics = bool(terminated or truncated), {"invalid_actions": 0}
        if done:
            return StepResult(done=True, reward=float(reward), metrics=metrics)
        shown = await in_thread(_shown, self._observe, observation)
        return StepResult([Message("user", shown)], reward=float(reward), metrics=metrics)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if hasattr(inner, "close"):  # GEM's environments have none
            await in_thread(inner.close)
