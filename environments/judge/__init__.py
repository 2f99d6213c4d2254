"""A solver and a judge that are programs, each in a fresh sandbox; only the artefact travels."""

from rollouts.recipes.environments.judge.task import play

__all__ = ["play"]
