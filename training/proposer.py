"""A proposer writes problems, and four solvers with the same policy solve each: ``scripts/learn --proposer``.

    python -m training.proposer --out runs/proposer

The proposer sees a problem as an example and answers with one call of a tool, which is its own problem. It earns most
where half of the solvers are right, and nothing without a call, or with numbers from 60 on. Solvers of one problem are
compared with each other, proposers by group.

Invariant: the solver trains on proposals alone. The kinds of ``HELD_OUT_KINDS`` are problems of the calculator, which
one solver gets; their numbers are from 60 on, which no proposal has.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, Literal, Unpack

from rollouts.dtypes import Endpoint, Limits, Prompt
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.configs.calculator_grpo import KINDS
from rollouts.seats import Seat, Seats, gather, play_recipe
from training.learn import learn, main_of_seats

__all__ = ["play", "proposal", "recipe"]

_SOLVERS = 4
_OPERATIONS = {
    "add": (int.__add__, ("What is {a} + {b}?", "Add {a} and {b}.", "Increase {a} by {b}.")),
    "subtract": (int.__sub__, ("What is {a} - {b}?", "Subtract {b} from {a}.", "Decrease {a} by {b}.")),
    "multiply": (int.__mul__, ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?")),
}
"""By name of the tool: its result, and phrases for the solver. The start model misreads the last ones."""


def proposal(messages: Sequence[Mapping[str, Any]]) -> Prompt | None:
    """The problem of a proposer's call, ``None`` without one; its phrase depends on the numbers alone."""
    call = next((call for message in messages for call in message.get("tool_calls") or ()), None)
    if call is None or call["function"]["name"] not in _OPERATIONS:
        return None
    given = call["function"]["arguments"]
    try:
        numbers = json.loads(given) if isinstance(given, str) else given
        a, b = numbers["a"], numbers["b"]
    except (ValueError, LookupError, TypeError):
        return None
    low, high = KINDS["trained"]["numbers"]
    if not all(type(number) is int and low <= number <= high for number in (a, b)):
        return None
    apply, phrases = _OPERATIONS[call["function"]["name"]]
    text = random.Random(f"{a} {b}").choice(phrases).format(a=a, b=b)
    return Prompt(text, label=str(apply(a, b)))


async def play(seats: Seats, prompt: Prompt) -> None:
    """A problem that is held out is solved once, and no proposer is asked."""
    if prompt.metadata["held_out"]:
        solver = await seats.solver.run()
        solver.reward = _is_right(solver.text, prompt)
        return
    proposer = await seats.proposer.run()
    problem = proposal(proposer.messages)
    if problem is None:
        proposer.reward = 0.0
        return
    solvers = await gather(*(seats.solver.run(problem) for _ in range(_SOLVERS)))
    for one in solvers:
        one.reward = _is_right(one.text, problem)
    rate = fmean(one.reward or 0.0 for one in solvers)
    proposer.reward = 4 * rate * (1 - rate)


def _is_right(text: str, problem: Prompt) -> float:
    return float(text == f"The answer is {problem.label}.")


@recipe_defaults(batch_size=8, n_samples_per_prompt=4, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    kind: Literal["trained", "one_step_60_99", "unseen_pairs_60_99"] = "trained",
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Examples for the proposer, or held-out problems for the solver."""
    seats = {
        "proposer": Seat(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=1)),
        "solver": Seat(environment_cls=CalculatorEnvironment, limits=Limits(max_turns=4)),
    }
    held_out = {"held_out": kind != "trained"}
    problems = (
        Prompt(one.prompt, label=one.label, metadata=held_out)
        for one in islice(calculator_prompts(seed, **KINDS[kind]), prompts)
    )
    return play_recipe(
        "proposer", endpoint, play, problems, seats=seats, by={"solver": "episode"}, seed=seed, **options
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main_of_seats(__file__, __doc__, learn, sys.argv[1:], steps=16, rollouts="8 x 4"))
