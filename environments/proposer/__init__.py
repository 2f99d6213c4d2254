"""A proposer writes sums, and four solvers solve each."""

from rollouts.recipes.environments.proposer.task import play, proposals

__all__ = ["play", "proposals"]
