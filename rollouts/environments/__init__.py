"""Environments: the protocol, a base for tool users, and the ready-made small ones."""

from rollouts.environments.base import Environment, EnvironmentFactory, Resumable, StepResult, ToolEnvironment, tool
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
    "UserFn",
    "tool",
]
