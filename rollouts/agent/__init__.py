"""The agent loop: one episode of an environment and a policy, turn by turn."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.agent.episode import OnStep
    from rollouts.agent.loop import run_agent, run_branches
    from rollouts.agent.prior_turns import PriorTurns

__all__ = ["OnStep", "PriorTurns", "run_agent", "run_branches"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.agent.episode": ("OnStep",),
        "rollouts.agent.loop": ("run_agent", "run_branches"),
        "rollouts.agent.prior_turns": ("PriorTurns",),
    },
)
