"""Environments: the protocol, a base class for tools, and small ready-made environments."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.environments.base": (
            "Environment",
            "EnvironmentFactory",
            "Resumable",
            "StepResult",
            "ToolEnvironment",
            "ToolResult",
            "tool",
        ),
        "rollouts.environments.calculator": ("CalculatorEnvironment",),
        "rollouts.environments.mixed": ("MixedEnvironment",),
        "rollouts.environments.simulated_user": ("SimulatedUser", "UserFn"),
        "rollouts.environments.single_turn": ("SingleTurnEnvironment",),
    },
)
