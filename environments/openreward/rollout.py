"""One rollout of the kit: an environment of an ORS server, with the prompt of the settings.

Invariant: the tokens are as :func:`rollouts.training.agent_rollout_to_samples` returns them; only metadata is added,
under the kit's names. The calls of the last turn run, since they may earn the reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread
import attrs

from rollouts.dtypes import Endpoint, Limits, Message, Prompt, StopReason, Tool
from rollouts.environments.ors import ORSEnvironment, ORSServer
from rollouts.recipes.environments.openreward.config import KitSettings
from rollouts.recipes.environments.openreward.export import Trajectories
from rollouts.renderer import Renderer, RendererOptions, renderer_for
from rollouts.training import Sample, agent_rollout_to_samples

__all__ = ["KitEnvironment", "generate"]

_REASONS = {
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_TOKENS: "max_tokens",
    StopReason.CONTEXT_OVERFLOW: "max_tokens",
    StopReason.FAILED: "error",
}


class KitEnvironment(ORSEnvironment):
    """An ORS environment whose conversation opens with the settings' system prompt."""

    def __init__(self, server: ORSServer, template: str | None = None) -> None:
        super().__init__(server)
        self.template = template

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        messages = await super().start(prompt)
        if self.template is None:
            return messages
        tools = "\n".join(_describe(tool) for tool in self.tools)
        return [Message("system", self.template.format(tools=tools)), *messages]


def _describe(tool: Tool) -> str:
    return json.dumps(
        {"name": tool.name, "arguments_schema": dict(tool.parameters), "description": tool.description},
        ensure_ascii=False,
    )


async def generate(
    prompts: Sequence[Prompt],
    *,
    settings: KitSettings,
    endpoint: Endpoint,
    tokenizer: Any,
    trajectories: Trajectories | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> list[Sample]:
    """Generate the samples of one prompt; the ``generate_fn`` of a recipe, with ``functools.partial``.

    Args:
        prompts: one prompt with the metadata of a row.
        settings: settings of the kit.
        endpoint: the inference endpoint.
        tokenizer: a tokenizer, or the name or folder to load one from.
        trajectories: destination of the exported trajectories.
        limits: limits other than ``max_turns``, which the settings contain.
        **options: as for :func:`rollouts.training.agent_rollout_to_samples`.
    """
    (prompt,) = prompts
    renderer_options = {name: options.pop(name) for name in RendererOptions.__annotations__ if name in options}
    name = prompt.metadata.get("env_name")
    entry = settings.of(name)
    server = settings.server(str(name), prompt.metadata.get("environment_name"))
    made: list[KitEnvironment] = []

    def environment() -> KitEnvironment:
        made.append(KitEnvironment(server, settings.system_prompt_template))
        return made[-1]

    samples = await agent_rollout_to_samples(
        prompt,
        environment_cls=environment,
        endpoint=endpoint,
        tokenizer=await _renderer(tokenizer, settings, renderer_options),
        limits=attrs.evolve(limits or Limits(), max_turns=entry.max_turns, last_calls="run"),
        **options,
    )
    played = made[-1]
    for sample in samples:
        sample.metadata |= _outcome(sample, played)
    if trajectories is not None:
        await trajectories.add(samples[-1], played.calls, run_name=settings.run_name)
    return samples


async def _renderer(tokenizer: Any, settings: KitSettings, options: Mapping[str, Any]) -> Renderer:
    """The renderer of these settings and options, made in a worker thread by the first rollout."""
    key = (tokenizer, repr(options))
    if key not in settings.renderers:
        settings.renderers[key] = await anyio.to_thread.run_sync(_make_renderer, tokenizer, settings, options)
    return settings.renderers[key]


def _make_renderer(tokenizer: Any, settings: KitSettings, options: Mapping[str, Any]) -> Renderer:
    if isinstance(tokenizer, Renderer):
        return renderer_for(tokenizer, **options)
    reads = renderer_for(tokenizer, **{**options, "template_kwargs": None}).template_variables
    thinking = {"enable_thinking": settings.thinking} if "enable_thinking" in reads else {}
    variables = {**thinking, **(options.get("template_kwargs") or {})}
    return renderer_for(
        tokenizer, **{**options, "template_kwargs": variables}, tells_tools=not settings.tools_in_prompt
    )


def _outcome(sample: Sample, played: KitEnvironment) -> dict[str, Any]:
    """The kit's metadata of a rollout."""
    assert sample.stop_reason is not None
    reason = "reached_terminal_state" if played.finished else _REASONS.get(sample.stop_reason, sample.stop_reason.value)
    bad = sample.metrics.get("malformed_tool_calls", 0) + sample.metrics.get("unknown_tool_calls", 0)
    return {
        "rewards": [call.reward for call in played.calls if call.reward is not None],
        "stop_reason": reason,
        "num_tool_calls": len(played.calls),
        "num_failed_tool_calls": int(bad) + sum(call.failed for call in played.calls),
    }
