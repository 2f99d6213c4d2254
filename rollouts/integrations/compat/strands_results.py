"""strands-env's data classes, of all its versions: tasks and actions, rewards, termination reasons, results.

Invariant: a class that strands-env renamed is one object here, so code for any version works. Names, fields and values
are strands-env's. This module plays no episode.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import attrs
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from rollouts.integrations.compat.strands_limiter import (
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)
from rollouts.integrations.compat.strands_rollout import Rollout

__all__ = [
    "Action",
    "Observation",
    "RewardFunction",
    "RewardResult",
    "RolloutResult",
    "StepResult",
    "Task",
    "TaskContext",
    "TerminationReason",
    "TokenObservation",
    "causes",
]

# -- tasks ------------------------------------------------------------------------------------------------------------


class TaskContext(BaseModel):  # type: ignore[misc]  # typed by pydantic where it is installed
    """The context of a task for the reward; extra fields are stored."""

    model_config = ConfigDict(extra="allow")

    ground_truth: Any = None
    conversation_history: list[Any] = Field(default_factory=list)


class Task(BaseModel):  # type: ignore[misc]
    """One task: a message (text or a Strands message) and its context."""

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
    """A reward with further information."""

    reward: float
    info: dict[str, Any] = Field(default_factory=dict)


class RewardFunction(ABC):
    """Scores a result; subclasses name the arguments ``task, result`` or ``action, step_result``."""

    @abstractmethod
    async def compute(self, action: Any, step_result: Any) -> RewardResult:
        """Score the result of a task."""


class TerminationReason(StrEnum):
    """The reason that ended an episode; the values are strands-env's."""

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
        """The reason for an error, from its chain of causes."""
        if error is None:
            return cls.TASK_COMPLETE
        chain = list(causes(error))
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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the chain of its ``__cause__``."""
    while error is not None:
        yield error
        error = error.__cause__


@attrs.define
class TokenObservation:
    """Tokens of an episode: columns as wide as ``token_ids``; the ``rollout_*`` properties start after the prompt."""

    token_ids: list[int] = attrs.field(factory=list)
    prompt_length: int = 0
    loss_mask: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)

    @classmethod
    def from_token_manager(cls, rollout: Rollout) -> TokenObservation | None:
        """The tokens of a rollout; ``None`` if there are none."""
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
    """Messages, tokens and metrics of an episode."""

    messages: list[Any] = attrs.field(factory=list)
    tokens: TokenObservation | None = None
    metrics: dict[str, Any] = attrs.field(factory=dict)

    @property
    def final_response(self) -> str | None:
        """The last text of the last message, without its reasoning; ``None`` if it is not the model's."""
        last: dict[str, Any] = self.messages[-1] if self.messages else {"role": "user"}
        texts = [part["text"] for part in last["content"] if "text" in part] if last["role"] == "assistant" else []
        _, _, answer = texts[-1].rpartition("</think>") if texts else ("", "", "")
        return answer.lstrip() or None


@attrs.define
class RolloutResult:
    """The result of one episode."""

    messages: list[Any] = attrs.field(factory=list)
    rollout: Rollout | None = None
    metrics: dict[str, Any] = attrs.field(factory=dict)
    reward_result: RewardResult | None = None
    termination_reason: TerminationReason = TerminationReason.NOT_TERMINATED
    error: BaseException | None = None
    """The error that ended the episode, if any."""

    @property
    def observation(self) -> Observation:
        """The result as an older ``Observation``."""
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
