"""Two debaters, and a judge that is not trained."""

from rollouts.recipes.environments.debate.task import QUESTIONS, play

__all__ = ["QUESTIONS", "play"]
