"""strands-env's names over ours, of every generation: tasks and actions, results, rewards, and the environment.

Invariant: an environment plays one task with one fresh model and agent; whatever ends it becomes a reason, and the
error is kept beside it. A concept that was renamed is one object here, so code of any generation runs unchanged.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import attrs
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.handlers.callback_handler import PrintingCallbackHandler
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from rollouts.compat.strands_sglang import (
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    Rollout,
    SGLangModel,
    ToolLimiter,
    get_client_from_slime_args,
)
from rollouts.errors import ConfigError, TokenMismatchError

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

# -- tasks ------------------------------------------------------------------------------------------------------------


class TaskContext(BaseModel):  # type: ignore[misc]  # typed by pydantic where it is installed
    """What the reward is told of a task; further fields are kept."""

    model_config = ConfigDict(extra="allow")

    ground_truth: Any = None
    conversation_history: list[Any] = Field(default_factory=list)


class Task(BaseModel):  # type: ignore[misc]
    """One task: a message, text or Strands' own, and its context."""

    model_config = ConfigDict(populate_by_name=True)

    id: str = Field(default_factory=lambda: str(uuid.uuid4()))
    message: Any
    context: TaskContext = Field(default_factory=TaskContext, validation_alias=AliasChoices("context", "task_context"))

    @property
    def task_context(self) -> TaskContext:
        """The older name of ``context``."""
        return self.context


Action = Task

# -- results ----------------------------------------------------------------------------------------------------------


class RewardResult(BaseModel):  # type: ignore[misc]
    """A reward, and what there is to say about it."""

    reward: float
    info: dict[str, Any] = Field(default_factory=dict)


class RewardFunction(ABC):
    """Scores a result; the arguments are called ``task, result``, or ``action, step_result``."""

    @abstractmethod
    async def compute(self, action: Any, step_result: Any) -> RewardResult:
        """Score."""


class TerminationReason(StrEnum):
    """Why an episode ended; the values are strands-env's."""

    NOT_TERMINATED = "not_terminated"
    TASK_COMPLETE = "task_complete"
    MAX_TOKENS_REACHED = "max_tokens_reached"
    CONTEXT_WINDOW_OVERFLOW = "context_window_overflow"
    MAX_TOOL_ITERATIONS_REACHED = "max_tool_iterations_reached"
    MAX_TOOL_CALLS_REACHED = "max_tool_calls_reached"
    MAX_MESSAGES_REACHED = "max_messages_reached"
    RECURSION_DEPTH_EXCEEDED = "recursion_depth_exceeded"
    TIMEOUT = "timeout"
    CONNECTION_ERROR = "connection_error"
    UNCLASSIFIED_ERROR = "unclassified_error"
    AGENT_ERROR = "unclassified_error"

    @classmethod
    def from_error(cls, error: BaseException | None) -> TerminationReason:
        """The reason that an error stands for, by its chain of causes."""
        if error is None:
            return cls.TASK_COMPLETE
        chain = list(_causes(error))
        for kind, reason in _REASONS.items():
            if any(isinstance(cause, kind) for cause in chain):
                return cls(reason)
        names = " ".join(type(cause).__name__.lower() for cause in chain)
        if "timeout" in names:
            return cls.TIMEOUT
        if "connection" in names or "disconnected" in names:
            return cls.CONNECTION_ERROR
        return cls.UNCLASSIFIED_ERROR


_REASONS: dict[type[BaseException], str] = {
    MaxTokensReachedException: "max_tokens_reached",
    ContextWindowOverflowException: "context_window_overflow",
    MaxToolIterationsReachedError: "max_tool_iterations_reached",
    MaxToolCallsReachedError: "max_tool_calls_reached",
    MaxMessagesReachedError: "max_messages_reached",
    RecursionError: "recursion_depth_exceeded",
}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@attrs.define
class TokenObservation:
    """Tokens of an episode; the columns are as wide as ``token_ids``, the ``rollout_*`` ones begin after the prompt."""

    token_ids: list[int] = attrs.field(factory=list)
    prompt_length: int = 0
    loss_mask: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)

    @classmethod
    def from_token_manager(cls, rollout: Rollout) -> TokenObservation | None:
        """``None`` where there are no tokens."""
        if not len(rollout):
            return None
        return cls(rollout.token_ids, rollout.initial_prompt_length, rollout.loss_mask, rollout.logprobs)

    @property
    def initial_prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.prompt_length]

    @property
    def rollout_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def rollout_loss_mask(self) -> list[int]:
        return self.loss_mask[self.prompt_length :]

    @property
    def rollout_logprobs(self) -> list[float]:
        return self.logprobs[self.prompt_length :]


@attrs.define
class Observation:
    """What an episode said and counted."""

    messages: list[Any] = attrs.field(factory=list)
    tokens: TokenObservation | None = None
    metrics: dict[str, Any] = attrs.field(factory=dict)

    @property
    def final_response(self) -> str | None:
        """The last text of the last message, without its thoughts; ``None`` where it is not the model's."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        texts = [block["text"] for block in self.messages[-1]["content"] if "text" in block]
        return texts[-1].rpartition("</think>")[2].lstrip() or None if texts else None


@attrs.define
class RolloutResult:
    """One episode."""

    messages: list[Any] = attrs.field(factory=list)
    rollout: Rollout | None = None
    metrics: dict[str, Any] = attrs.field(factory=dict)
    reward_result: RewardResult | None = None
    termination_reason: TerminationReason = TerminationReason.NOT_TERMINATED
    error: BaseException | None = None
    """What ended it, where something did."""

    @property
    def observation(self) -> Observation:
        """The older view."""
        tokens = None if self.rollout is None else TokenObservation.from_token_manager(self.rollout)
        return Observation(self.messages, tokens, self.metrics)

    @property
    def final_response(self) -> str | None:
        return self.observation.final_response

    @property
    def reward(self) -> RewardResult | None:
        """The older name of ``reward_result``."""
        return self.reward_result

    @reward.setter
    def reward(self, value: RewardResult | None) -> None:
        self.reward_result = value


StepResult = RolloutResult

# -- the environment --------------------------------------------------------------------------------------------------

ModelFactory = Callable[[], Any]


def sglang_model_factory(
    *,
    client: Any,
    tokenizer: Any,
    tool_parser: Any = None,
    sampling_params: dict[str, Any] | None = None,
    model_id: str | None = None,
    **options: Any,
) -> ModelFactory:
    """Makes a fresh :class:`SGLangModel` for each episode; ``model_id`` was the first generation's."""

    def factory() -> SGLangModel:
        params = {"max_new_tokens": 16384, **(sampling_params or {})}
        return SGLangModel(
            client=client, tokenizer=tokenizer, tool_parser=tool_parser, sampling_params=params, **options
        )

    return factory


class Environment:
    """Plays tasks with a Strands agent: override tools, hooks, and what is set up and torn down."""

    default_system_prompt_path: ClassVar[Path | None] = None

    def __init__(self, *, model_factory: ModelFactory, reward_fn: RewardFunction | None = None, **config: Any) -> None:
        unknown = config.keys() - _CONFIG
        if unknown:
            raise ConfigError.of("Environment", sorted(unknown), f"some of {', '.join(sorted(_CONFIG))}")
        self.model_factory = model_factory
        self.reward_fn = reward_fn
        self.config = config
        self.max_tool_iters = config.get("max_tool_iters", config.get("max_tool_iterations"))
        self.max_tool_calls = config.get("max_tool_calls")
        self.max_parallel_tool_calls = config.get("max_parallel_tool_calls")
        self.max_messages = config.get("max_messages")
        self.verbose = config.get("verbose", False)
        path = self.default_system_prompt_path
        self.system_prompt = config.get("system_prompt") or (path.read_text().strip() if path is not None else None)

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
        """Play one task."""
        history = list(task.context.conversation_history)
        limiter = ToolLimiter(self.max_tool_iters, self.max_tool_calls, self.max_parallel_tool_calls, self.max_messages)
        agent = Agent(
            model=self.model_factory(),
            messages=list(history),
            tools=list(self.get_tools()),
            system_prompt=self.system_prompt,
            hooks=[limiter, *self.get_hooks()],
            conversation_manager=self.get_conversation_manager(),
            callback_handler=PrintingCallbackHandler() if self.verbose else None,
            trace_attributes=self.config.get("trace_attributes"),
            name=self.config.get("agent_name"),
        )
        error: Exception | None = None
        try:
            await agent.invoke_async(task.message if isinstance(task.message, str) else task.message["content"])
        except Exception as raised:
            broken = next((cause for cause in _causes(raised) if isinstance(cause, TokenMismatchError)), None)
            if broken is not None:
                raise broken from raised
            error = raised
            _LOGGER.warning("the rollout ended: %s", raised)
        result = RolloutResult(
            messages=list(agent.messages)[len(history) :],
            rollout=getattr(agent.model, "rollout", None),
            termination_reason=TerminationReason.from_error(error),
            error=error,
        )
        result.metrics = {
            "message_count": len(result.messages),
            "tool_iters": limiter.tool_iter_count,
            "tool_calls": limiter.tool_call_count,
            "cancelled_tool_calls": limiter.cancelled_tool_call_count,
            **self.compute_metrics(agent.event_loop_metrics, getattr(agent.model, "tool_parse_errors", None)),
        }
        if self.reward_fn is not None:
            began = time.perf_counter()
            result.reward_result = await self.reward_fn.compute(task, result)
            result.metrics["reward_latency_s"] = time.perf_counter() - began
        return result

    async def step(self, action: Action) -> StepResult:
        """The older name of :meth:`rollout`."""
        return await self.rollout(action)

    def compute_metrics(
        self, event_loop_metrics: Any, tool_parse_errors: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Counts of the loop and of each tool."""
        usage = event_loop_metrics.accumulated_usage
        tools = {
            name: {
                "calls": tool.call_count,
                "successes": tool.success_count,
                "errors": tool.error_count,
                "parse_errors": (tool_parse_errors or {}).get(name, 0),
                "latency_s": tool.total_time,
            }
            for name, tool in event_loop_metrics.tool_metrics.items()
        }
        return {
            "model_calls": event_loop_metrics.cycle_count,
            "input_tokens": usage["inputTokens"],
            "output_tokens": usage["outputTokens"],
            "total_tokens": usage["totalTokens"],
            "per_tool_metrics": tools or None,
        }


_CONFIG = {
    "agent_name",
    "max_messages",
    "max_parallel_tool_calls",
    "max_tool_calls",
    "max_tool_iterations",
    "max_tool_iters",
    "system_prompt",
    "trace_attributes",
    "verbose",
}
