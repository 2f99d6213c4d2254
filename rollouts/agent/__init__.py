"""The agent loop: one episode of an environment and a policy, turn by turn."""

from rollouts.agent.episode import OnStep, Past
from rollouts.agent.loop import run_agent, run_branches

__all__ = ["OnStep", "Past", "run_agent", "run_branches"]
