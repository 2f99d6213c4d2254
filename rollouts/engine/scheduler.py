"""Continuous batching: one thread that admits requests to slots, prefills, decodes, and delivers updates.

Invariant: only this thread touches the engine's state. Other threads post commands, which run in order between two
steps. A prefix that is computed in a slot is not computed again for another request. A step decodes all rows with one
pending token in one forward pass. Every submitted request ends with a finish reason.

This module does not know HTTP, and of the tokenizer only ``decode``, for stop strings.
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
from rollouts.engine.sampler import sample, tempered
from rollouts.engine.slots import Ids, Slots

__all__ = ["PauseMode", "Scheduler"]

PauseMode = Literal["abort", "retract", "in_place"]

CHUNK = 64
"""Maximum number of prompt tokens of one row per step, so that a long prompt does not delay decoding."""
SHORT = 16
"""Rows with at most this many pending tokens are prefilled separately, not padded to the long ones."""

_LOG = logging.getLogger(__name__)
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_NEVER_STARTED = {"type": "abort", "message": "Abort in waiting queue"}


class Scheduler:
    """The engine thread. After each step it calls ``deliver`` with the updated requests, if any."""

    def __init__(
        self,
        model: SlotModel,
        deliver: Callable[[list[Request]], None],
        *,
        version: str,
        decode: Callable[[list[int]], str],
        original_logprobs: bool = False,
    ) -> None:
        self.model = model
        self.slots = Slots(model.slots)
        self.version = version
        self.paused = False
        self.draining = False
        """No request is admitted, so that running ones can end."""
        self.generated = 0
        """Tokens sampled so far."""
        self._deliver = deliver
        self._decode = decode
        self._original_logprobs = original_logprobs
        """Whether logprobs are reported before the temperature, a fault for tests."""
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollouts-engine", daemon=True)
        self._waiting: deque[Request] = deque()
        self._updated: list[Request] = []

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
        """End the thread after the current step; requests in flight are aborted."""
        self.post(self._stop)
        self._thread.join(seconds)

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the engine thread, between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def submit(self, request: Request) -> None:
        self.post(lambda: self._enqueue(request))

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests before the next step; they keep the tokens sampled so far."""
        targets = list(requests)
        self.post(lambda: self._abort(targets))

    # -- commands: engine thread only ---------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; running requests are aborted, requeued without their K/V (retract), or left in their slots."""
        self.paused = True
        if mode == "abort":
            self._abort([*self._waiting, *self.slots.running])
        elif mode == "retract":
            for slot in np.flatnonzero(self.slots.busy)[::-1]:
                request = self.slots.release(int(slot))
                request.retractions += 1
                if not request.logprobs:
                    request.prompt_logprobs.clear()
                    request.prompt_tops.clear()
                self._waiting.appendleft(request)

    def resume(self) -> None:
        self.paused = False

    def set_draining(self, draining: bool) -> None:
        """Stop or resume the admission of requests."""
        self.draining = draining

    def flush(self) -> bool:
        """Discard all cached prefixes; returns ``False`` and does nothing while requests need them."""
        if self.slots.busy.any() or (self._waiting and not (self.paused or self.draining)):
            return False
        self.slots.clear_idle()
        return True

    def set_version(self, version: str) -> None:
        self.version = version
        for request in [*self._waiting, *self.slots.running]:
            request.mark_version(version)

    def replace(self, weights: Any, version: str | None) -> None:
        """Replace the weights. Cached prefixes keep the K/V of the old weights until :meth:`flush`.

        Raises:
            ConfigError: the shapes differ; the old weights stay.
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
                self.slots.release(self.slots.requests.index(request))
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
                except Exception as error:  # noqa: BLE001 - a failed step must end all its requests
                    _LOG.exception("a step of the engine failed")
                    self._fail(f"{type(error).__name__}: {error}")
            if self._updated:
                updated, self._updated = self._updated, []
                self._deliver(updated)

    def _can_step(self) -> bool:
        return not self.paused and bool(self.slots.busy.any() or (self._waiting and not self.draining))

    def _fail(self, message: str) -> None:
        reason = {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
        running = [self.slots.release(int(slot)) for slot in np.flatnonzero(self.slots.busy)]
        for request in [*running, *self._waiting]:
            self._finish(request, dict(reason))
        self._waiting.clear()
        self.slots.clear_idle()

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        self._updated.append(request)

    def _step(self) -> None:
        if self._waiting and not self.draining:
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
            placement = self.slots.find(request)
            if placement is None:
                continue
            if placement.cached and placement.slot != placement.donor:
                self.model.copy(placement.donor, placement.slot, placement.cached)
            self.slots.assign(placement, request)
            self._waiting.remove(request)
            if not request.started:
                request.started, request.cached_tokens = True, placement.cached

    # -- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, rows: Ids, lengths: Ids) -> None:
        """Compute pending tokens of some rows; sample for rows without further pending tokens."""
        slots = self.slots
        adapters = slots.adapters(rows)
        logits = self.model.forward(rows, slots.length[rows], slots.inputs(rows, lengths), lengths, adapters=adapters)
        slots.length[rows] += lengths
        ready = slots.length[rows] == slots.total[rows]
        if not ready.all():
            rows, logits = rows[ready], logits[torch.from_numpy(ready).to(logits.device)]
        if len(rows):
            self._extend(rows, logits)

    def _score(self, slot: int, count: int) -> None:
        """Compute ``count`` prompt tokens of one row, and store the logprob of each next prompt token."""
        slots = self.slots
        request = slots.requests[slot]
        assert request is not None
        start = int(slots.length[slot])
        row, length = np.array([slot]), np.array([count])
        logits = self.model.forward(
            row, slots.length[row], slots.inputs(row, length), length, every_position=True, adapters=[request.adapter]
        )
        first = max(start, request.score_from) + 1
        following = request.tokens[first : min(start + count + 1, request.prompt_tokens)]
        scores = logits[0, first - start - 1 :][: len(following)].log_softmax(-1)
        index = torch.tensor(following, dtype=torch.long, device=scores.device)[:, None]
        request.prompt_logprobs.extend(scores.gather(1, index)[:, 0].tolist())
        if request.tops:
            request.prompt_tops += [_tops(request.tops, row) for row in scores]
        slots.length[slot] += count
        if slots.length[slot] < slots.total[slot]:
            return
        slots.scoring[slot] = False
        if request.rules.limit == 0:
            slots.release(slot)
            self._finish(request, {"type": "length", "length": 0})
        else:
            self._extend(row, logits[:, count - 1])

    def _extend(self, rows: Ids, logits: torch.Tensor) -> None:
        """Sample a token for each row and append it to the row's request."""
        slots: list[int] = rows.tolist()
        requests = [request for slot in slots if (request := self.slots.requests[slot]) is not None]
        shaped, draws = _shaped(logits, requests), self.slots.draws(rows)
        drawn, logprobs = sample(shaped, draws)
        if self._original_logprobs or any(request.tops for request in requests):
            reported = shaped.log_softmax(-1) if self._original_logprobs else tempered(shaped, draws)
            logprobs = reported.gather(1, drawn[:, None])[:, 0]
            _append_tops(requests, reported)
        ids = drawn.cpu().numpy()
        self.slots.append(rows, ids)
        self.generated += len(slots)
        for slot, request, token, logprob in zip(slots, requests, ids.tolist(), logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            reason = self._reason(request, token, logprob)
            if reason is not None:
                self.slots.release(slot)
                self._finish(request, reason)
            elif request.stream:
                self._updated.append(request)

    def _reason(self, request: Request, token: int, logprob: float) -> dict[str, Any] | None:
        """The finish reason if the request ends with this token.

        In the order of SGLang 0.5.23 (managers/schedule_batch.py: update_finish_state): string, id, length.
        """
        rules = request.rules
        if logprob != logprob:
            return {"type": "stop", "matched": "NaN happened"}
        if rules.stop:
            # A token has at least one byte, so the last ``reach`` tokens contain any stop string that ends here.
            reach = max(len(stop.encode()) for stop in rules.stop) + 4
            tail = self._decode(request.tokens[max(request.prompt_tokens, len(request.tokens) - reach) :])
            for stop in rules.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        if token in rules.stop_ids:
            return {"type": "stop", "matched": token}
        if len(request.logprobs) >= rules.limit:
            return {"type": "length", "length": rules.limit}
        return None


def _append_tops(requests: list[Request], logprobs: torch.Tensor) -> None:
    """Append the most probable ids to the requests that ask for them."""
    for row, request in enumerate(requests):
        if request.tops:
            request.top_logprobs.append(_tops(request.tops, logprobs[row]))


def _tops(count: int, logprobs: torch.Tensor) -> list[tuple[float, int, None]]:
    """Logprob and id of the most probable ids of one position, descending."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return [(value, id_, None) for value, id_ in zip(values.tolist(), ids.tolist(), strict=True)]


def _shaped(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Apply logit biases and minimum lengths; copies the logits only if a request has either."""
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
