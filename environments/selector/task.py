"""The play: four solvers answer the prompt at once, and the selector earns the reward of the answer that it picks."""

from __future__ import annotations

import re

from rollouts.dtypes import Prompt
from rollouts.seats import Seats, gather

__all__ = ["play"]

PICK = "You get a question and several answers. Reply with the number of the best answer."


async def play(seats: Seats, prompt: Prompt) -> None:
    """Four tries and a choice; a choice without a number earns 0."""
    tries = await gather(*(seats.solver.run() for _ in range(4)))
    for one in tries:
        numbers = re.findall(r"-?\d+", one.text)
        one.reward = float(numbers[-1:] == [str(prompt.label)])
    listed = [f"Answer {number}: {one.text}" for number, one in enumerate(tries)]
    selector = seats.selector.chat(PICK)
    picked = re.search(r"\d", (await selector.ask("\n\n".join([prompt.messages[-1].text, *listed]))).text)
    chosen = int(picked[0]) if picked else len(tries)
    selector.reward = tries[chosen].reward if chosen < len(tries) else 0.0
