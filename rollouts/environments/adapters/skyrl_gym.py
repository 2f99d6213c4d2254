"""Environments of skyrl-gym: registered by an id, text in, messages and a reward out.

Invariant: the model's text is what the environment gets, without the thinking block, and the tokens stay as sampled:
an environment that rewrites the reply (``postprocessed_action``) fails the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool, as_messages
from rollouts.environments.adapters.calls import in_thread, numbers_of
from rollouts.environments.base import StepResult, bad_step
from rollouts.errors import ConfigError

__all__ = ["SkyRLGymEnvironment"]


class SkyRLGymEnvironment:
    """One episode of an environment of skyrl-gym. Bind it with ``functools.partial``.

    The prompt's metadata are the columns of the data set, its ``extras``; without a ``reward_spec`` there, the label is
    its ground truth.

    Args:
        env_id: the id that it is registered with, e.g. ``"gsm8k"``.
        config: its ``env_config``, if it takes one.
        same_turn: whether observations continue the assistant's turn (``use_conversation_multi_turn=false`` of SkyRL).
            By default they are messages.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, env_id: str, *, config: Any = None, same_turn: bool = False) -> None:
        self.env_id, self.config, self.same_turn = env_id, config, same_turn
        self._inner: Any = None

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        import skyrl_gym

        extras = dict(prompt.metadata)
        if "reward_spec" not in extras:
            if prompt.label is None:
                raise ConfigError.of("metadata['reward_spec']", None, "a mapping with ground_truth, or a label")
            extras["reward_spec"] = {"ground_truth": prompt.label}
        options = {} if self.config is None else {"env_config": self.config}
        self._inner = await in_thread(skyrl_gym.make, self.env_id, extras=extras, **options)
        messages, _ = await in_thread(self._inner.init, [message.to_chat() for message in prompt.messages])
        return as_messages(messages)

    async def step(self, reply: Message) -> StepResult:
        output = await in_thread(self._inner.step, reply.text)
        rewritten = output.get("postprocessed_action")
        if rewritten is not None and rewritten != reply.text:
            message = (
                f"postprocessed_action: got {rewritten!r}; expected none, since the tokens of a reply stay as sampled"
            )
            raise bad_step(f"{type(self._inner).__name__}.step", message)
        reward = None if output["reward"] is None else float(output["reward"])
        if output["done"]:
            metrics = numbers_of(self._inner.get_metrics(), f"{type(self._inner).__name__}.get_metrics()")
            return StepResult(done=True, reward=reward, metrics=metrics)
        messages = as_messages(output["observations"])
        if self.same_turn:
            texts = [message.only_text("a message in the same turn") for message in messages]
            return StepResult(continuation="".join(texts), reward=reward)
        return StepResult(messages, reward=reward)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await in_thread(inner.close)
