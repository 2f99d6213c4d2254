"""The play: solvers of one rollout solve the problem that its proposer wrote. A problem that half of them solve is the
best."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from statistics import fmean

from rollouts.dtypes import Prompt
from rollouts.seats import Seats, gather

__all__ = ["play", "proposals"]

_PROBLEM = re.compile(r"(\d{1,4}) ?([-+*]) ?(\d{1,4})")
_RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


async def play(seats: Seats, prompt: Prompt) -> None:
    """One proposal; a reply without a problem earns the proposer 0, and no solver is asked."""
    proposer = await seats.proposer.run(prompt)
    found = _PROBLEM.search(proposer.text)
    if found is None:
        proposer.reward = 0.0
        return
    answer = str(_RESULT[found[2]](int(found[1]), int(found[3])))
    question = f"What is {found[0]}? Answer with the number only."
    solvers = await gather(*(seats.solver.run(question) for _ in range(4)))
    for one in solvers:
        one.reward = float(one.text.strip().rstrip(".") == answer)
    rate = fmean(one.reward or 0.0 for one in solvers)
    proposer.reward = 4 * rate * (1 - rate)


def proposals(seed: int) -> Iterator[Prompt]:
    """Yield requests without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        text = (
            f"Write one sum, product or difference of two numbers, such as {rng.randint(2, 99)} + {rng.randint(2, 99)}."
        )
        yield Prompt(f"{text} Write nothing else. It should be hard enough that half of the answers are wrong.")
