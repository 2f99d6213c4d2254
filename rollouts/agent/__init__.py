"""The agent loop: one episode of an environment and a policy, turn by turn."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.agent.episode import OnStep, Past
    from rollouts.agent.loop import run_agent, run_branches

__all__ = ["OnStep", "Past", "run_agent", "run_branches"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.agent.episode": ("OnStep", "Past"),
        "rollouts.agent.loop": ("run_agent", "run_branches"),
    },
)
