"""The play: the user knows the errand, the agent has the tools. The agent's calls never reach the play."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rollouts.dtypes import Prompt
from rollouts.rewards.answers import numbers
from rollouts.seats import Seats

__all__ = ["errands", "play"]

PERSONA = (
    "You are the customer of a shop: {errand} Say so in one short sentence, answer questions, and say ###DONE### when "
    "you have the total."
)
POLICY = "You are the assistant of a shop. Use your tools to compute, and tell the customer the total."


async def play(seats: Seats, prompt: Prompt) -> None:
    """One conversation; the agent earns 1 if it names the total."""
    user, agent = seats.user.chat(PERSONA.format(errand=prompt.prompt)), seats.agent.chat(POLICY)
    said, named = (await user.ask("Hello, how can I help?")).text, False
    for _ in range(6):
        reply = await agent.ask(said or "...")
        named = named or prompt.label in numbers(reply.text)
        if reply.over:
            break
        answer = await user.ask(reply.text or "...")
        if answer.over or "###DONE###" in answer.text:
            break
        said = answer.text
    agent.reward = float(named)


def errands(seed: int) -> Iterator[Prompt]:
    """Yield errands without end, the same for the same seed; the label is the total."""
    rng = random.Random(seed)
    while True:
        count, price = rng.randint(3, 19), rng.randint(11, 99)
        text = f"you buy {count} lamps at {price} euros each and want to know the total."
        yield Prompt(text, label=count * price)
