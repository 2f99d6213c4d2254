"""A generated world: documents that no model has seen, and questions that need one or two of them.

Invariant: everything follows from the seed; each question has one answer, which the documents contain.
"""

from __future__ import annotations

import random

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.recipes.environments.search.index import Document

__all__ = ["made_up_world"]

_STARTS = (
    "Bel",
    "Cor",
    "Dra",
    "Fen",
    "Gal",
    "Hol",
    "Jas",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Pel",
    "Quin",
    "Ros",
    "Tal",
    "Ven",
)
_ENDS = (
    "ada",
    "brin",
    "cott",
    "dale",
    "enna",
    "ford",
    "gard",
    "holm",
    "ia",
    "mere",
    "nock",
    "ova",
    "rick",
    "ston",
    "wyn",
)
_MOST = 150
_TRADES = ("glass", "clocks", "paper", "bells", "maps", "tea", "violins", "ropes", "lenses", "salt", "ink", "kites")


def made_up_world(seed: int, *, people: int = 40) -> tuple[list[Document], list[Prompt]]:
    """Generate documents about people, their employers and towns, and questions in a fixed order.

    Raises:
        ConfigError: more people than names, or too few people.
    """
    if not 4 <= people <= _MOST:
        raise ConfigError.of("people", people, f"4 to {_MOST}")
    rng = random.Random(seed)
    every = [start + end for start in _STARTS for end in _ENDS]
    rng.shuffle(every)
    towns, firms = every[: people // 4 + 1], every[people // 4 + 1 : people // 2 + 2]
    names = [f"{first} {rng.choice(_ENDS).title()}" for first in every[-people:]]
    documents, prompts = [], []
    at = {firm: rng.choice(towns) for firm in firms}
    makes = {firm: rng.choice(_TRADES) for firm in firms}
    founded = {firm: rng.randint(1700, 1990) for firm in firms}
    for firm in firms:
        text = f"{firm} Works is a maker of {makes[firm]} in the town of {at[firm]}. It was founded in {founded[firm]}."
        documents.append(Document(f"firm-{firm.lower()}", f"{firm} Works", text))
    for town in towns:
        text = f"{town} is a town of {rng.randint(2, 90)} thousand people on the river {rng.choice(every)}."
        documents.append(Document(f"town-{town.lower()}", town, text))
    for name in names:
        firm = rng.choice(firms)
        text = f"{name} was born in {rng.choice(towns)} and works for {firm} Works."
        documents.append(Document(f"person-{name.lower().replace(' ', '-')}", name, text))
        asked = [
            (f"Who does {name} work for?", f"{firm} Works", 1),
            (f"In which town is the employer of {name}?", at[firm], 2),
            (f"What does the employer of {name} make?", makes[firm], 2),
            (f"In which year was the employer of {name} founded?", str(founded[firm]), 2),
        ]
        for question, answer, steps in asked:
            prompts.append(Prompt(question, label=answer, metadata={"steps": steps}))
    rng.shuffle(documents)
    rng.shuffle(prompts)
    return documents, prompts
