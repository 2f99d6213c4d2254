"""Continuous batching: one thread that admits requests to slots, prefills, decodes, and delivers what ended.

Invariant: all state of the engine belongs to this thread; every other thread only posts commands, which run between two
steps, in order. Tokens that are computed in some slot are not computed again for a request that begins with them. A
step decodes all rows with one pending token in one forward pass. Every request that is submitted ends with a reason.

This module knows no HTTP and no tokenizer beyond the ``decode`` that stop strings need.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from rollouts.engine.model import SlotModel
from rollouts.engine.requests import Request
from rollouts.engine.sampler import sample
from rollouts.engine.slots import Ids, Slots

__all__ = ["PauseMode", "Scheduler"]

PauseMode = Literal["abort", "retract", "in_place"]

CHUNK = 64
"""Prompt tokens of one row that one step computes, so that a long prompt does not hold up those that decode."""
SHORT = 16
"""Rows with at most so many pending tokens are prefilled apart, not padded to the long ones."""

_LOG = logging.getLogger(__name__)
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_NEVER_STARTED = {"type": "abort", "message": "Abort in waiting queue"}


class Scheduler:
    """The engine thread. ``deliver`` is called in it with the requests that have news, once a step."""

    def __init__(
        self,
        model: SlotModel,
        deliver: Callable[[list[Request]], None],
        *,
        version: str,
        decode: Callable[[list[int]], str],
    ) -> None:
        self.model = model
        self.slots = Slots(model.slots)
        self.version = version
        self.paused = False
        self.holding = False
        """Nothing is admitted, so that what runs can end."""
        self.generated = 0
        """Tokens sampled so far."""
        self._deliver = deliver
        self._decode = decode
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollouts-engine", daemon=True)
        self._waiting: deque[Request] = deque()
        self._news: list[Request] = []

    def __repr__(self) -> str:
        state = "paused" if self.paused else "running"
        return f"Scheduler({state}, {self.running} running, {self.queued} waiting, weights {self.version!r})"

    # -- any thread ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return int(self.slots.busy.sum())

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread after the step that runs; what is in flight is aborted."""
        self.post(self._stop)
        self._thread.join(seconds)

    def post(self, command: Callable[[], None]) -> None:
        """Run something in the engine thread, between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def submit(self, request: Request) -> None:
        self.post(lambda: self._enqueue(request))

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests now, with what they have so far."""
        chosen = list(requests)
        self.post(lambda: self._abort(chosen))

    # -- commands: engine thread only ---------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; what runs is ended, put back into the queue without its K/V, or kept as it is."""
        self.paused = True
        if mode == "abort":
            self._abort([*self._waiting, *self.slots.running])
        elif mode == "retract":
            for slot in np.flatnonzero(self.slots.busy)[::-1]:
                request = self.slots.leave(int(slot))
                request.retractions += 1
                if not request.logprobs:
                    request.prompt_logprobs.clear()
                self._waiting.appendleft(request)

    def resume(self) -> None:
        self.paused = False

    def hold(self, held: bool) -> None:
        """Admit nothing more, or admit again."""
        self.holding = held

    def flush(self) -> bool:
        """Forget all cached prefixes; refused while requests need theirs."""
        if self.slots.busy.any() or (self._waiting and not (self.paused or self.holding)):
            return False
        self.slots.forget()
        return True

    def set_version(self, version: str) -> None:
        self.version = version
        for request in [*self._waiting, *self.slots.running]:
            request.mark_version(version)

    def replace(self, weights: Any, version: str | None) -> None:
        """Go on with other weights. Cached prefixes stay, with the K/V of the old weights, until :meth:`flush`.

        Raises:
            ConfigError: the weights have other shapes; nothing has changed.
        """
        self.model.replace(weights)
        if version is not None:
            self.set_version(version)

    def _enqueue(self, request: Request) -> None:
        request.mark_version(self.version)
        if self._stopping:
            self._abort([request])
        elif request.rules.limit == 0 and request.score_from < 0:
            self._finish(request, {"type": "length", "length": 0})
        else:
            self._waiting.append(request)

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            if request.finish is not None:
                continue
            if request in self._waiting:
                self._waiting.remove(request)
            if request in self.slots.requests:
                self.slots.leave(self.slots.requests.index(request))
            self._finish(request, dict(_ABORTED if request.started else _NEVER_STARTED))

    def _stop(self) -> None:
        self._stopping = True
        self._abort([*self._waiting, *self.slots.running])

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                while not self._commands and not self._can_step():
                    self._wake.wait(timeout=1.0)
            while self._commands:
                self._commands.popleft()()
            if self._can_step():
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - a step that fails must answer those who wait for it
                    _LOG.exception("a step of the engine failed")
                    self._fail(f"{type(error).__name__}: {error}")
            if self._news:
                news, self._news = self._news, []
                self._deliver(news)

    def _can_step(self) -> bool:
        return not self.paused and bool(self.slots.busy.any() or (self._waiting and not self.holding))

    def _fail(self, message: str) -> None:
        reason = {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
        running = [self.slots.leave(int(slot)) for slot in np.flatnonzero(self.slots.busy)]
        for request in [*running, *self._waiting]:
            self._finish(request, dict(reason))
        self._waiting.clear()
        self.slots.forget()

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        self._news.append(request)

    def _step(self) -> None:
        if self._waiting and not self.holding:
            self._admit()
        pending, scoring = self.slots.pending, self.slots.scoring.copy()
        for slot in np.flatnonzero(scoring):
            self._score(int(slot), int(min(pending[slot], CHUNK)))
        pending[scoring] = 0
        short, long = (pending > 1) & (pending <= SHORT), pending > SHORT
        for rows in map(np.flatnonzero, (short, long, pending == 1)):
            if len(rows):
                self._forward(rows, np.minimum(pending[rows], CHUNK))

    def _admit(self) -> None:
        for request in list(islice(self._waiting, 2 * self.model.slots)):
            if self.slots.busy.all():
                return
            place = self.slots.find(request)
            if place is None:
                continue
            if place.cached and place.slot != place.donor:
                self.model.copy(place.donor, place.slot, place.cached)
            self.slots.take(place, request)
            self._waiting.remove(request)
            if not request.started:
                request.started, request.cached_tokens = True, place.cached

    # -- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, rows: Ids, lengths: Ids) -> None:
        """Compute some pending tokens of some rows, and sample for those that have none left."""
        slots = self.slots
        logits = self.model.forward(rows, slots.length[rows], slots.inputs(rows, lengths), lengths)
        slots.length[rows] += lengths
        ready = slots.length[rows] == slots.total[rows]
        if not ready.all():
            rows, logits = rows[ready], logits[torch.from_numpy(ready).to(logits.device)]
        if len(rows):
            self._extend(rows, logits)

    def _score(self, slot: int, count: int) -> None:
        """Compute some prompt tokens of one row and keep the logprobs of those that follow."""
        slots = self.slots
        request = slots.requests[slot]
        assert request is not None
        start = int(slots.length[slot])
        row, length = np.array([slot]), np.array([count])
        logits = self.model.forward(row, slots.length[row], slots.inputs(row, length), length, every_position=True)
        first = max(start, request.score_from) + 1
        following = request.tokens[first : min(start + count + 1, request.prompt_tokens)]
        scores = logits[0, first - start - 1 :][: len(following)].log_softmax(-1)
        index = torch.tensor(following, dtype=torch.long, device=scores.device)[:, None]
        request.prompt_logprobs.extend(scores.gather(1, index)[:, 0].tolist())
        slots.length[slot] += count
        if slots.length[slot] < slots.total[slot]:
            return
        slots.scoring[slot] = False
        if request.rules.limit == 0:
            slots.leave(slot)
            self._finish(request, {"type": "length", "length": 0})
        else:
            self._extend(row, logits[:, count - 1])

    def _extend(self, rows: Ids, logits: torch.Tensor) -> None:
        """Sample a token for each row and hand it out."""
        numbers: list[int] = rows.tolist()
        requests = [request for slot in numbers if (request := self.slots.requests[slot]) is not None]
        drawn, logprobs = sample(_shaped(logits, requests), self.slots.draws(rows))
        ids = drawn.cpu().numpy()
        self.slots.append(rows, ids)
        self.generated += len(numbers)
        for slot, request, token, logprob in zip(numbers, requests, ids.tolist(), logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            reason = self._reason(request, token, logprob)
            if reason is not None:
                self.slots.leave(slot)
                self._finish(request, reason)
            elif request.stream:
                self._news.append(request)

    def _reason(self, request: Request, token: int, logprob: float) -> dict[str, Any] | None:
        """Why the request ends with this token, in the order in which SGLang looks."""
        rules = request.rules
        if logprob != logprob:
            return {"type": "stop", "matched": "NaN happened"}
        if len(request.logprobs) >= rules.limit:
            return {"type": "length", "length": rules.limit}
        if token in rules.stop_ids:
            return {"type": "stop", "matched": token}
        if rules.stop:
            # A token has a byte at least, so a stop string that ends here lies in so many last tokens.
            reach = max(len(stop.encode()) for stop in rules.stop) + 4
            tail = self._decode(request.tokens[max(request.prompt_tokens, len(request.tokens) - reach) :])
            for stop in rules.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        return None


def _shaped(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Logits after the biases and minimum lengths of the few requests that have them."""
    shaped = logits
    for row, request in enumerate(requests):
        rules = request.rules
        if not rules.shapes_logits:
            continue
        if shaped is logits:
            shaped = logits.clone()
        for token, bias in rules.bias:
            shaped[row, token] += bias
        if len(request.logprobs) < rules.minimum and rules.stop_ids:
            shaped[row, list(rules.stop_ids)] = -torch.inf
    return shaped
