"""Environments: the protocol, a base class for tools, and small ready-made environments."""

from rollouts.environments.base import (
    Environment,
    EnvironmentFactory,
    Resumable,
    StepResult,
    ToolEnvironment,
    ToolResult,
    tool,
)
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.environments.mixed import MixedEnvironment
from rollouts.environments.simulated_user import SimulatedUser, UserFn
from rollouts.environments.single_turn import SingleTurnEnvironment

__all__ = [
    "CalculatorEnvironment",
    "Environment",
    "EnvironmentFactory",
    "MixedEnvironment",
    "Resumable",
    "SimulatedUser",
    "SingleTurnEnvironment",
    "StepResult",
    "ToolEnvironment",
    "ToolResult",
    "UserFn",
    "tool",
]
