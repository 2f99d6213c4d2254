"""Continuous batching: one thread that admits requests to slots, prefills, decodes, and delivers what ended.

Invariant: all state of the engine belongs to this thread; every other thread only posts commands, which run between two
steps, in order. A slot's first ``length`` tokens are computed; a request whose prompt begins with tokens that are
computed in some slot does not compute them again. A step decodes all rows with one pending token in one forward pass.

This module knows no HTTP and no tokenizer beyond the ``decode`` that stop strings need.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rollouts.engine.model import SlotModel
from rollouts.engine.requests import Request
from rollouts.engine.sampler import Draws, sample

__all__ = ["PauseMode", "Scheduler"]

PauseMode = Literal["abort", "retract", "in_place"]
Ids = npt.NDArray[np.int64]

CHUNK = 64
"""Prompt tokens of one row that one step computes, so that a long prompt does not hold up those that decode."""
SHORT = 16
"""Rows with at most so many pending tokens are prefilled apart, not padded to the long ones."""
WORTH_WAITING = 8
"""A request waits a step for a prefix that is being computed, if that saves more than so many tokens."""

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
        slots = model.slots
        self.model = model
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
        self._active: list[Request | None] = [None] * slots
        self._busy = np.zeros(slots, dtype=bool)
        self._content = np.zeros((slots, 256), dtype=np.int64)
        self._length = np.zeros(slots, dtype=np.int64)
        self._total = np.zeros(slots, dtype=np.int64)
        self._namespace = np.full(slots, "", dtype=object)
        self._used = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._rules = Draws(
            temperature=np.ones(slots, dtype=np.float32),
            top_p=np.ones(slots, dtype=np.float32),
            top_k=np.full(slots, -1, dtype=np.int64),
            min_p=np.zeros(slots, dtype=np.float32),
            seed=np.zeros(slots, dtype=np.uint64),
            position=np.zeros(slots, dtype=np.int64),
        )

    def __repr__(self) -> str:
        state = "paused" if self.paused else "running"
        return f"Scheduler({state}, {self.running} running, {self.queued} waiting, weights {self.version!r})"

    # -- any thread ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return int(self._busy.sum())

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
            self._abort([*self._waiting, *(request for request in self._active if request is not None)])
        elif mode == "retract":
            for slot in np.flatnonzero(self._busy)[::-1]:
                request = self._leave(int(slot))
                request.retractions += 1
                if not request.logprobs:
                    request.prompt_logprobs.clear()
                self._length[slot] = self._total[slot] = 0
                self._waiting.appendleft(request)

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Forget all cached prefixes; refused while requests need theirs."""
        if self._busy.any() or (self._waiting and not (self.paused or self.holding)):
            return False
        self._length[:] = self._total[:] = 0
        return True

    def set_version(self, version: str) -> None:
        self.version = version
        for request in [*self._waiting, *self._active]:
            if request is not None:
                request.mark_version(version)

    def replace(self, weights: Any, version: str | None) -> None:
        """Go on with other weights. Prefixes that nobody is using are forgotten: they are of the old ones.

        Raises:
            ConfigError: the weights have other shapes; nothing has changed.
        """
        self.model.replace(weights)
        idle = ~self._busy
        self._length[idle] = self._total[idle] = 0
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
            if request in self._active:
                self._leave(self._active.index(request))
            self._finish(request, dict(_ABORTED if request.started else _NEVER_STARTED))

    def _stop(self) -> None:
        self._stopping = True
        self._abort([*self._waiting, *(request for request in self._active if request is not None)])

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
        return not self.paused and bool(self._busy.any() or (self._waiting and not self.holding))

    def _fail(self, message: str) -> None:
        reason = {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
        running = [self._leave(int(slot)) for slot in np.flatnonzero(self._busy)]
        for request in [*running, *self._waiting]:
            self._finish(request, dict(reason))
        self._waiting.clear()
        self._length[:] = self._total[:] = 0

    def _step(self) -> None:
        if self._waiting and not self.holding:
            self._admit()
        pending = np.where(self._busy, self._total - self._length, 0)
        if pending.max() > 1:
            scored = np.array([request is not None and self._scores(request) for request in self._active])
            for slot in np.flatnonzero((pending > 0) & scored):
                self._score(int(slot), int(min(pending[slot], CHUNK)))
            prompts = (pending > 1) & ~scored
            for rows in (np.flatnonzero(prompts & (pending <= SHORT)), np.flatnonzero(prompts & (pending > SHORT))):
                if len(rows):
                    self._forward(rows, np.minimum(pending[rows], CHUNK))
        rows = np.flatnonzero(self._busy & (self._total - self._length == 1) & (pending <= 1))
        if len(rows):
            self._forward(rows, np.ones(len(rows), dtype=np.int64))

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for request in list(self._waiting):
            if self._busy.all():
                return
            if self._place(request):
                self._waiting.remove(request)

    def _place(self, request: Request) -> bool:
        """Give the request a slot and what is cached of its prefix, or let it wait for a prefix that is on its way."""
        tokens = np.array(request.tokens, dtype=np.int64)
        self._widen(len(tokens))
        usable = len(tokens) - 1
        if self._scores(request):
            usable = min(usable, request.score_from)
        differs = self._content[:, :usable] != tokens[:usable]
        shared = (
            np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros(len(differs), dtype=np.int64)
        )
        shared[self._namespace != request.namespace] = 0
        computed = np.minimum(shared, self._length)
        donor = int(computed.argmax())
        cached = int(computed[donor])
        if int(np.minimum(shared, self._total).max()) > cached + WORTH_WAITING:
            return False
        free = np.flatnonzero(~self._busy)
        whole = free[(computed[free] == cached) & (self._length[free] == cached)]
        slot = int(whole[0]) if len(whole) else int(free[self._used[free].argmin()])
        if not len(whole) and cached and slot != donor:
            self.model.copy(donor, slot, cached)
        self._content[slot, : len(tokens)] = tokens
        self._length[slot], self._total[slot] = cached, len(tokens)
        self._namespace[slot] = request.namespace
        self._active[slot], self._busy[slot] = request, True
        if not request.started:
            request.started, request.cached_tokens = True, cached
        rules, given = request.rules, self._rules
        given.temperature[slot], given.top_p[slot] = rules.temperature, rules.top_p
        given.top_k[slot], given.min_p[slot] = rules.top_k, rules.min_p
        given.seed[slot], given.position[slot] = rules.seed, len(request.logprobs)
        return True

    def _widen(self, tokens: int) -> None:
        width = self._content.shape[1]
        if tokens >= width:
            self._content = np.pad(self._content, ((0, 0), (0, max(width, tokens + 1 - width))))

    def _leave(self, slot: int) -> Request:
        """Free a slot; its computed tokens stay for whoever shares them."""
        request = self._active[slot]
        assert request is not None
        self._active[slot], self._busy[slot] = None, False
        self._total[slot] = self._length[slot]
        self._clock += 1
        self._used[slot] = self._clock
        return request

    # -- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, rows: Ids, lengths: Ids) -> None:
        """Compute some pending tokens of some rows, and sample for those that have none left."""
        starts = self._length[rows]
        columns = starts[:, None] + np.arange(lengths.max())
        inputs = self._content[rows[:, None], np.minimum(columns, self._content.shape[1] - 1)]
        logits = self.model.forward(rows, starts, inputs, lengths)
        self._length[rows] += lengths
        ready = self._length[rows] == self._total[rows]
        if not ready.all():
            rows, logits = rows[ready], logits[torch.from_numpy(ready).to(logits.device)]
        if len(rows):
            self._extend(rows, logits)

    def _extend(self, rows: Ids, logits: torch.Tensor) -> None:
        slots: list[int] = rows.tolist()
        requests = [request for slot in slots if (request := self._active[slot]) is not None]
        logits = _shaped(logits, requests)
        given = self._rules
        drawn, logprobs = sample(
            logits,
            Draws(
                given.temperature[rows], given.top_p[rows], given.top_k[rows], given.min_p[rows],
                given.seed[rows], given.position[rows],
            ),
        )  # fmt: skip
        ids = drawn.cpu().numpy()
        self._widen(int(self._total[rows].max()) + 1)
        self._content[rows, self._total[rows]] = ids
        self._total[rows] += 1
        given.position[rows] += 1
        self.generated += len(slots)
        for slot, request, token, logprob in zip(slots, requests, ids.tolist(), logprobs.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            reason = self._reason(request, token, logprob)
            if reason is not None:
                self._leave(slot)
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

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        self._news.append(request)

    # -- scoring ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _scores(request: Request) -> bool:
        return request.score_from >= 0 and not request.logprobs

    def _score(self, slot: int, count: int) -> None:
        """Compute some prompt tokens of one row and keep the logprobs of those that follow."""
        request = self._active[slot]
        assert request is not None
        start = int(self._length[slot])
        row = np.array([slot])
        inputs = self._content[slot, start : start + count][None]
        logits = self.model.forward(row, np.array([start]), inputs, np.array([count]), every_position=True)
        first = max(start, request.score_from) + 1
        following = request.tokens[first : min(start + count + 1, request.prompt_tokens)]
        scores = logits[0, first - start - 1 :][: len(following)].log_softmax(-1)
        index = torch.tensor(following, dtype=torch.long, device=scores.device)[:, None]
        request.prompt_logprobs.extend(scores.gather(1, index)[:, 0].tolist())
        self._length[slot] += count
        if self._length[slot] < self._total[slot]:
            return
        if request.rules.limit == 0:
            self._leave(slot)
            self._finish(request, {"type": "length", "length": 0})
        else:
            self._extend(row, logits[:, count - 1])


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
