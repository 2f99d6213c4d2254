"""Kuhn poker: three cards, one each, one bet. The game is small enough to enumerate.

A strategy gives, by card and history, the probability of the second legal action (bet, or call). Values are those of
the first player, in antes. Source: H. W. Kuhn, A simplified two-person poker (1950).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TypeAlias

__all__ = ["ACTIONS", "CARDS", "TO_ACT", "Strategy", "best_value", "equilibrium", "exploitability", "net", "value"]

CARDS = "JQK"
TO_ACT = {"": 0, "p": 1, "b": 1, "pb": 0}
"""The player who acts after each history of passes and bets that is not an end."""
ACTIONS = {"": ("check", "bet"), "p": ("check", "bet"), "b": ("fold", "call"), "pb": ("fold", "call")}
"""The words of pass and bet after each history."""

Strategy: TypeAlias = Mapping[tuple[str, str], float]
"""By card and history, the probability of betting or calling."""


def net(history: str, cards: str) -> int:
    """The win of the first player at the end of a game, in antes: his card is ``cards[0]``."""
    higher = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
    if history in ("bp", "pbp"):
        return 1 if history == "bp" else -1
    return higher * (2 if history.endswith("bb") else 1)


def deals() -> Iterator[str]:
    """The six deals, equally likely."""
    return map("".join, itertools.permutations(CARDS, 2))


def _from(history: str, cards: str, first: Strategy, second: Strategy) -> float:
    if history not in TO_ACT:
        return net(history, cards)
    mover = TO_ACT[history]
    bets = (first, second)[mover][cards[mover], history]
    return (1 - bets) * _from(history + "p", cards, first, second) + bets * _from(history + "b", cards, first, second)


def value(first: Strategy, second: Strategy) -> float:
    """The expected win of the first player."""
    return sum(_from("", cards, first, second) for cards in deals()) / 6


def best_value(player: int, other: Strategy) -> float:
    """The most that a player can win against a strategy: each of his 64 pure strategies is tried."""
    places = [(card, history) for card in CARDS for history, mover in TO_ACT.items() if mover == player]
    values = []
    for choices in itertools.product((0.0, 1.0), repeat=len(places)):
        pure = dict(zip(places, choices, strict=True))
        values.append(value(pure, other) if player == 0 else -value(other, pure))
    return max(values)


def exploitability(strategy: Strategy) -> float:
    """The win of a best response against a strategy, as the mean of both places; 0 at an equilibrium."""
    return (best_value(0, strategy) + best_value(1, strategy)) / 2


def equilibrium(alpha: float = 1 / 3) -> dict[tuple[str, str], float]:
    """An equilibrium, for ``alpha`` from 0 to 1/3, the bluffs with a jack; its value is -1/18."""
    return {
        ("J", ""): alpha, ("Q", ""): 0.0, ("K", ""): 3 * alpha,
        ("J", "pb"): 0.0, ("Q", "pb"): alpha + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0,
        ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip
