"""strands-env's API, of all its versions: data classes, model factory and environment.

Invariant: each task is played by a new model and agent; an error that ends it becomes a termination reason, and the
result stores the error. Code for any version runs unchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.handlers.callback_handler import PrintingCallbackHandler

from rollouts.errors import ConfigError, TokenMismatchError
from rollouts.integrations.compat.strands_limiter import ToolLimiter
from rollouts.integrations.compat.strands_results import (
    Action,
    Observation,
    RewardFunction,
    RewardResult,
    RolloutResult,
    StepResult,
    Task,
    TaskContext,
    TerminationReason,
    TokenObservation,
    causes,
)
from rollouts.integrations.compat.strands_sglang import SGLangModel, get_client_from_slime_args

__all__ = [
    "Action",
    "Environment",
    "ModelFactory",
    "Observation",
    "RewardFunction",
    "RewardResult",
    "RolloutResult",
    "StepResult",
    "Task",
    "TaskContext",
    "TerminationReason",
    "TokenObservation",
    "get_cached_client_from_slime_args",
    "sglang_model_factory",
]

_LOGGER = logging.getLogger(__name__)

get_cached_client_from_slime_args = get_client_from_slime_args

ModelFactory = Callable[[], Any]

_LIMITS = {
    "max_tool_iters": ("max_tool_iters", "max_tool_iterations"),
    "max_tool_calls": ("max_tool_calls",),
    "max_parallel_tool_calls": ("max_parallel_tool_calls",),
    "max_messages": ("max_messages",),
}
"""Attributes of an environment, and the names of their options in all versions."""
_OPTIONS = {name for names in _LIMITS.values() for name in names} | {
    "agent_name",
    "system_prompt",
    "trace_attributes",
    "verbose",
}


def sglang_model_factory(
    *,
    client: Any,
    tokenizer: Any,
    tool_parser: Any = None,
    sampling_params: dict[str, Any] | None = None,
    model_id: str | None = None,
    **options: Any,
) -> ModelFactory:
    """Return a factory of one :class:`SGLangModel` per episode; ``model_id`` (first API version) is ignored."""
    options["sampling_params"] = {"max_new_tokens": 16384} | (sampling_params or {})
    return lambda: SGLangModel(client=client, tokenizer=tokenizer, tool_parser=tool_parser, **options)


class Environment:
    """Plays tasks with a Strands agent. Override tools, hooks, set-up and tear-down.

    Raises:
        ConfigError: an option is unknown.
    """

    default_system_prompt_path: ClassVar[Path | None] = None

    def __init__(self, *, model_factory: ModelFactory, reward_fn: RewardFunction | None = None, **config: Any) -> None:
        unknown = config.keys() - _OPTIONS
        if unknown:
            raise ConfigError.of("Environment", sorted(unknown), f"some of {', '.join(sorted(_OPTIONS))}")
        self.model_factory, self.reward_fn, self.config = model_factory, reward_fn, config
        self.verbose = bool(config.get("verbose"))
        for attribute, names in _LIMITS.items():
            setattr(self, attribute, next((config[name] for name in names if config.get(name) is not None), None))
        self.system_prompt = config.get("system_prompt")
        if not self.system_prompt and self.default_system_prompt_path is not None:
            self.system_prompt = self.default_system_prompt_path.read_text(encoding="utf-8").strip()

    async def reset(self) -> None:
        """Set up."""

    async def cleanup(self) -> None:
        """Tear down."""

    def get_tools(self) -> list[Any]:
        return []

    def get_hooks(self) -> list[Any]:
        return []

    def get_conversation_manager(self) -> Any:
        return NullConversationManager()

    async def rollout(self, task: Task) -> RolloutResult:
        """Play one task.

        Raises:
            TokenMismatchError: a law was broken. Other errors become the termination reason of the result.
        """
        limiter = ToolLimiter(**{attribute: getattr(self, attribute) for attribute in _LIMITS})
        agent = self._agent(task, limiter)
        before = len(agent.messages)
        error: Exception | None = None
        try:
            await agent.invoke_async(task.message if isinstance(task.message, str) else task.message["content"])
        except Exception as raised:  # of the agent, its tools or its model; the result stores it
            for cause in causes(raised):
                if isinstance(cause, TokenMismatchError):
                    raise cause from raised
            error = raised
            _LOGGER.warning("the rollout ended: %s", raised)
        result = RolloutResult(
            messages=agent.messages[before:],
            rollout=getattr(agent.model, "rollout", None),
            metrics=self._counts(agent, limiter),
            termination_reason=TerminationReason.from_error(error),
            error=error,
        )
        result.metrics["message_count"] = len(result.messages)
        if self.reward_fn is not None:
            clock = time.perf_counter()
            result.reward_result = await self.reward_fn.compute(task, result)
            result.metrics["reward_latency_s"] = time.perf_counter() - clock
        return result

    async def step(self, action: Action) -> StepResult:
        """The older name of :meth:`rollout`."""
        return await self.rollout(action)

    def _agent(self, task: Task, limiter: ToolLimiter) -> Agent:
        """Create an agent with the conversation history of the task."""
        options: dict[str, Any] = {
            "hooks": [limiter, *self.get_hooks()],
            "messages": list(task.context.conversation_history),
            "tools": self.get_tools(),
            "conversation_manager": self.get_conversation_manager(),
            "callback_handler": PrintingCallbackHandler() if self.verbose else None,
        }
        named = {"name": self.config.get("agent_name"), "trace_attributes": self.config.get("trace_attributes")}
        return Agent(self.model_factory(), system_prompt=self.system_prompt, **options, **named)

    def _counts(self, agent: Agent, limiter: ToolLimiter) -> dict[str, Any]:
        counters = {"tool_iters": "tool_iter_count", "tool_calls": "tool_call_count"}
        counters["cancelled_tool_calls"] = "cancelled_tool_call_count"
        loop_metrics = self.compute_metrics(agent.event_loop_metrics, getattr(agent.model, "tool_parse_errors", None))
        return {name: getattr(limiter, attribute) for name, attribute in counters.items()} | loop_metrics

    def compute_metrics(
        self, event_loop_metrics: Any, tool_parse_errors: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Metrics of the loop and of each tool."""
        parse_errors = tool_parse_errors or {}
        per_tool: dict[str, dict[str, Any]] = {}
        for name, metrics in event_loop_metrics.tool_metrics.items():
            per_tool[name] = {
                "calls": metrics.call_count,
                "successes": metrics.success_count,
                "errors": metrics.error_count,
                "latency_s": metrics.total_time,
                "parse_errors": parse_errors.get(name, 0),
            }
        tokens = event_loop_metrics.accumulated_usage
        usage: dict[str, Any] = {f"{kind}_tokens": tokens[f"{kind}Tokens"] for kind in ("input", "output", "total")}
        return usage | {"model_calls": event_loop_metrics.cycle_count, "per_tool_metrics": per_tool or None}
