"""The play: two seats, one deal a prompt. A reply without a legal word loses the hand."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from rollouts.dtypes import Prompt
from rollouts.recipes.environments.kuhn.game import ACTIONS, CARDS, TO_ACT, net
from rollouts.seats import Seats

__all__ = ["kuhn_deals", "play"]

RULES = (
    "Kuhn poker. The cards are J, Q and K; K is the highest. Each player has one card and has paid 1. "
    "You are player {n} and hold {card}. Answer with one of the legal words."
)


async def play(seats: Seats, prompt: Prompt) -> None:
    """Play one hand; the rewards of the two seats add up to 0."""
    cards = "".join(random.Random(prompt.metadata["seed"]).sample(CARDS, 2))
    chats = [seats[f"player{n}"].chat(RULES.format(n=n, card=cards[n])) for n in (0, 1)]
    history, loser = "", None
    while history in TO_ACT and loser is None:
        mover, legal = TO_ACT[history], ACTIONS[history]
        reply = await chats[mover].ask(f"So far: {history or 'nothing'}. Legal: {' '.join(legal)}.")
        said = re.findall(r"\w+", reply.text)
        move = next((action for action, word in zip("pb", legal, strict=True) if word in said), None)
        history, loser = (history + move, None) if move else (history, mover)
    won = net(history, cards) if loser is None else (1, -1)[loser == 0]
    chats[0].reward, chats[1].reward = float(won), float(-won)


def kuhn_deals(seed: int) -> Iterator[Prompt]:
    """Yield deals without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        number = rng.randrange(1 << 30)
        yield Prompt(f"deal {number}", metadata={"seed": number})
