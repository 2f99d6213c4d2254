"""The state of each slot: its request, if any, its tokens, and the number of computed tokens.

Invariant: of a slot's ``total`` tokens the first ``length`` have their K/V in the model. An idle slot has ``length``
equal to ``total`` and stays available as a cached prefix. All columns are arrays over slots, so that a step needs no
Python per token until the tokens are delivered.

This module does not know tensors or time.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.engine.adapters import Adapter
from rollouts.engine.requests import Request
from rollouts.engine.sampler import Draws

__all__ = ["Ids", "Placement", "Slots"]

Ids = npt.NDArray[np.int64]

WORTH_WAITING = 8
"""A request waits a step for a prefix that another request computes, if this saves more tokens than that."""


@attrs.frozen
class Placement:
    """The slot for a request, and the ``donor`` slot with the K/V of its first ``cached`` tokens."""

    slot: int
    donor: int
    cached: int


class Slots:
    """The columns of all slots; used by the engine thread only."""

    def __init__(self, count: int) -> None:
        self.requests: list[Request | None] = [None] * count
        self.busy = np.zeros(count, dtype=bool)
        self.length = np.zeros(count, dtype=np.int64)
        self.total = np.zeros(count, dtype=np.int64)
        self.scoring = np.zeros(count, dtype=bool)
        """The request wants logprobs of its prompt, and the prompt is not fully computed."""
        self._tokens = np.zeros((count, 256), dtype=np.int64)
        self._namespace = np.full(count, "", dtype=object)
        self._last_used = np.zeros(count, dtype=np.int64)
        self._clock = 0
        self._draws = Draws(
            temperature=np.ones(count, dtype=np.float32),
            top_p=np.ones(count, dtype=np.float32),
            top_k=np.full(count, -1, dtype=np.int64),
            min_p=np.zeros(count, dtype=np.float32),
            seed=np.zeros(count, dtype=np.uint64),
            position=np.zeros(count, dtype=np.int64),
        )

    def __repr__(self) -> str:
        return f"Slots({int(self.busy.sum())} of {len(self.busy)} busy, {int(self.length.sum())} tokens computed)"

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request is not None]

    # -- admission ----------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Placement | None:
        """Find the best free slot for a request; at least one must be free. The last token is never taken from a cache.

        Prefers a slot whose whole content is the longest shared prefix; otherwise the least recently used slot, into
        which that prefix is copied. ``None``: wait, another request is computing a much longer shared prefix.
        """
        tokens = np.array(request.tokens, dtype=np.int64)
        self._widen(len(tokens))
        usable = min(len(tokens) - 1, request.score_from) if request.scores_prompt else len(tokens) - 1
        differs = self._tokens[:, :usable] != tokens[:usable]
        shared = np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros_like(self.length)
        shared[self._namespace != request.namespace] = 0
        computed = np.minimum(shared, self.length)
        donor = int(computed.argmax())
        cached = int(computed[donor])
        if int(np.minimum(shared, self.total).max()) > cached + WORTH_WAITING:
            return None
        free = np.flatnonzero(~self.busy)
        whole = free[(computed[free] == cached) & (self.length[free] == cached)]
        if len(whole):
            return Placement(int(whole[0]), int(whole[0]), cached)
        return Placement(int(free[self._last_used[free].argmin()]), donor, cached)

    def assign(self, placement: Placement, request: Request) -> None:
        """Put a request into its slot."""
        slot, count = placement.slot, len(request.tokens)
        self._tokens[slot, :count] = request.tokens
        self.length[slot], self.total[slot] = placement.cached, count
        self._namespace[slot] = request.namespace
        self.requests[slot], self.busy[slot] = request, True
        self.scoring[slot] = request.scores_prompt
        rules, draws = request.rules, self._draws
        draws.temperature[slot], draws.top_p[slot] = rules.temperature, rules.top_p
        draws.top_k[slot], draws.min_p[slot] = rules.top_k, rules.min_p
        draws.seed[slot], draws.position[slot] = rules.seed, len(request.logprobs)

    def release(self, slot: int) -> Request:
        """Free a slot."""
        request = self.requests[slot]
        assert request is not None
        self.requests[slot], self.busy[slot] = None, False
        self.scoring[slot] = False
        self.total[slot] = self.length[slot]
        self._clock += 1
        self._last_used[slot] = self._clock
        return request

    def clear_idle(self) -> None:
        """Discard the cached prefixes of idle slots."""
        idle = ~self.busy
        self.length[idle] = self.total[idle] = 0

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> Ids:
        """Number of tokens of each slot that are not computed yet."""
        return np.where(self.busy, self.total - self.length, 0)

    def inputs(self, rows: Ids, lengths: Ids) -> Ids:
        """The next tokens of some slots, ``(rows, longest)``; ids after the length of a row are arbitrary."""
        columns = self.length[rows][:, None] + np.arange(lengths.max())
        return self._tokens[rows[:, None], np.minimum(columns, self._tokens.shape[1] - 1)]

    def draws(self, rows: Ids) -> Draws:
        """The sampling parameters of some slots for their next tokens."""
        draws = self._draws
        return Draws(
            draws.temperature[rows],
            draws.top_p[rows],
            draws.top_k[rows],
            draws.min_p[rows],
            draws.seed[rows],
            draws.position[rows],
        )

    def adapters(self, rows: Ids) -> list[Adapter | None]:
        """The adapter of each of some slots."""
        return [request.adapter for slot in rows.tolist() if (request := self.requests[slot]) is not None]

    def append(self, rows: Ids, ids: Ids) -> None:
        """Add a sampled token to each of some slots."""
        self._widen(int(self.total[rows].max()) + 1)
        self._tokens[rows, self.total[rows]] = ids
        self.total[rows] += 1
        self._draws.position[rows] += 1

    def _widen(self, tokens: int) -> None:
        width = self._tokens.shape[1]
        if tokens > width:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(width, tokens - width))))
