"""Best of four: solvers, and a selector that picks one of their answers."""

from rollouts.recipes.environments.selector.task import play

__all__ = ["play"]
