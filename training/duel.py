"""Two seats solve the same problem, one of them frozen: a recipe, and ``scripts/learn --duel``.

    python -m training.duel --out runs/duel

The seat ``solver`` is trained from the start model; the seat ``rival`` keeps the start model's weights, on another
engine. A rollout is worth 1 to the solver if only it is right, -1 if only the rival is, else 0: at most the share of
problems that the rival does not solve, and 0 on average while both have the same weights.

Invariant: no token of the rival is trained. Held-out problems have numbers from 60 on, which no training problem has.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from typing import Any, Literal, Unpack

import attrs

from rollouts.dtypes import Endpoint, Limits, Prompt
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.configs.calculator_grpo import KINDS
from rollouts.seats import Seat, Seats, gather, play_recipe
from rollouts.views.terminal.console import SafeConsole
from training.learn import Lesson, learn, main_of_seats

__all__ = ["duel", "play", "recipe"]


async def play(seats: Seats, prompt: Prompt) -> None:
    """Both answer at once."""
    solver, rival = await gather(seats.solver.run(), seats.rival.run())
    right = f"The answer is {prompt.label}."
    solver.reward = float(solver.text == right) - float(rival.text == right)


@recipe_defaults(batch_size=16, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    rival: str = "",
    kind: Literal["trained", "one_step_60_99", "unseen_pairs_60_99"] = "trained",
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """``rival`` is the URL of the rival's server; without one it plays with the weights of the solver."""
    solver = Seat(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=4))
    served = attrs.evolve(endpoint, base_url=rival) if rival else None
    seats = {"solver": solver, "rival": attrs.evolve(solver, endpoint=served, trained=False)}
    problems = islice(calculator_prompts(seed, **KINDS[kind]), prompts)
    return play_recipe("duel", endpoint, play, problems, seats=seats, seed=seed, **options)


async def duel(lesson: Lesson, console: SafeConsole) -> dict[str, Any]:
    """Train against the model that training starts from; returns the content of ``result.json``."""
    lesson.out.mkdir(parents=True, exist_ok=True)
    async with engine_process(lesson.model, lesson.out / "rival.log", slots=lesson.slots) as rival:
        return await learn(attrs.evolve(lesson, options={**lesson.options, "rival": rival.url}), console)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main_of_seats(__file__, __doc__, duel, sys.argv[1:], steps=12, rollouts="16 x 8"))
