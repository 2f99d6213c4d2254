"""The account of a chat API: what its replies cost, and the budget that ends the run.

Invariant: no request begins once the budget is spent. Requests in flight are answered and counted, and their rollouts
are played as far as they need no further request; then the run ends, so that the budget is exceeded at most by what was
in flight. A cost that is not known counts as the most that it can be. This module sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from rollouts.base.validators import is_number
from rollouts.chat_api.endpoint import Prices
from rollouts.errors import ConfigError, EndpointAway

__all__ = ["Account", "BudgetSpent"]

SETTLE_SECONDS = 1.0
"""Between the last reply and the end of the run: rollouts that are complete are scored and stored meanwhile."""


class BudgetSpent(EndpointAway):
    """The budget is spent. It fails no rollout: the run ends, and its prompts are returned."""


class Account:
    """The cost of replies.

    Args:
        prices: of the model; ``None`` if they are unknown.
        budget: dollars that this process may spend; ``None`` for any number.
        settle_seconds: between the last reply and :class:`BudgetSpent`.

    Attributes:
        spent: dollars, of the replies whose cost is known.
        requests: requests that were sent, with retries.
        retries: requests that were sent again.
        refusals: replies that the model refused or a filter cut, which are scored.
        unpriced: requests without a readable cost: errors, lost connections, replies that are cut off.
        most_unpriced: dollars that these can have cost, which the budget counts, too.
        in_flight: requests that are not answered yet.
        refused: the error of a key, a model or a quota that ends the run: no further request begins.

    Raises:
        ConfigError: a budget without prices, or a budget that is not a number above 0.
    """

    def __init__(
        self, prices: Prices | None = None, budget: float | None = None, *, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        if budget is not None and not (is_number(budget) and budget > 0):
            raise ConfigError.of("--budget", budget, "a number > 0, or None")
        if budget is not None and prices is None:
            raise ConfigError.of("--budget", budget, "--price-in and --price-out with it, in dollars a million")
        self.prices, self.budget = prices, budget
        self.spent = self.most_unpriced = 0.0
        self.refused: ConfigError | EndpointAway | None = None
        self.requests = self.retries = self.refusals = self.unpriced = self.in_flight = 0
        self._settle_seconds = settle_seconds
        self._playing = self._blocked = 0
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        return f"<Account {self}>"

    @property
    def exhausted(self) -> bool:
        """Whether no further request may begin."""
        return self.budget is not None and self.spent + self.most_unpriced >= self.budget

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Play one rollout inside."""
        self._playing += 1
        try:
            yield
        finally:
            self._playing -= 1
            self._note()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Send one request inside."""
        self.requests += 1
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._note()

    async def admit(self) -> None:
        """Return at once while there is budget left.

        Raises:
            BudgetSpent: the budget is spent, and no rollout can continue without a further request.
        """
        if not self.exhausted:
            return
        self._blocked += 1
        try:
            self._note()
            while self.in_flight or self._playing > self._blocked:
                await self._changed.wait()
            await anyio.sleep(self._settle_seconds)
        finally:
            self._blocked -= 1
        raise BudgetSpent(f"--budget: ${self.budget:g} is spent (${self.spent:.4f} with what was in flight); {self}")

    def charge(self, dollars: float | None, most: float = 0.0) -> None:
        """Count the cost of one reply; if it is not known (``None``), the most that it can be."""
        if dollars is None:
            self.unpriced += 1
            self.most_unpriced += most
        else:
            self.spent += dollars

    def _note(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def __str__(self) -> str:
        requests = f"{self.requests} requests, {self.retries} of them retries"
        requests += f", {self.refusals} refusals" if self.refusals else ""
        if self.prices is None and not self.spent:
            return requests
        cost = f", ${self.spent:.4f}"
        unknown = f", {self.unpriced} of unknown cost" if self.unpriced else ""
        unknown += f" (at most ${self.most_unpriced:.4f})" if self.most_unpriced else ""
        return f"{requests}{cost}{unknown}"
