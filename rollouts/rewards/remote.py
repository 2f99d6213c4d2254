"""A reward model behind HTTP, with requests batched.

Wire format: ``POST url`` with ``{"samples": [{"prompt", "response", "messages", "label", "metadata"}, …]}``; the
response is ``{"rewards": [number, …]}`` in the same order.

Invariant: each sample gets its own reward, or all samples of the batch fail with one reason. Cancelling one sample's
scoring does not affect the others of its batch: they are sent again. While a batch waits for its server, the deadlines
of all its samples stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.base.validators import is_int, is_number
from rollouts.concurrency.deadlines import Clocks
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.rewards.http import Poster
from rollouts.training.types import Sample

__all__ = ["RemoteReward", "sample_for_wire"]


def sample_for_wire(sample: Sample) -> dict[str, Any]:
    """The fields of a sample that are sent by default: no tokens."""
    fields = sample.fields_to_dict()
    return {name: fields[name] for name in ("prompt", "response", "messages", "label", "metadata")}


@attrs.define(eq=False)
class _Batch:
    """Samples of one request."""

    bodies: list[msgspec.Raw] = attrs.field(factory=list)
    full: anyio.Event = attrs.field(factory=anyio.Event)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    clocks: list[Clocks] = attrs.field(factory=list)
    """The deadlines of the samples."""
    rewards: Sequence[float] | None = None
    failure: str | None = None
    """Reason of a failure. If rewards and failure are both ``None``, the sending task was cancelled."""


class RemoteReward:
    """A ``reward_fn`` that calls a server; with ``group_rm=True`` use its method :meth:`group`.

    Args:
        url: URL of the reward server.
        batch_size: maximum samples in one request.
        linger_seconds: how long the first sample of a batch waits for others.
        encode: converts a sample to the JSON object that is sent.
        **options: of :class:`~rollouts.rewards.http.Poster`: ``api_key``, ``attempts``,
            ``backoff_seconds``, ``seconds``, ``at_once``, ``rate_limit_seconds``, ``outage_seconds``.

    Raises:
        ConfigError: an invalid option.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 32,
        linger_seconds: float = 0.02,
        encode: Callable[[Sample], Mapping[str, Any]] = sample_for_wire,
        **options: Any,
    ) -> None:
        if not is_int(batch_size, 1):
            raise ConfigError.of("RemoteReward.batch_size", batch_size, "an integer >= 1")
        if not linger_seconds >= 0:
            raise ConfigError.of("RemoteReward.linger_seconds", linger_seconds, "a number of seconds >= 0")
        self._post = Poster(url, **options)
        self._batch_size, self._linger, self._encode = batch_size, linger_seconds, encode
        self._open: _Batch | None = None

    def __repr__(self) -> str:
        return f"<RemoteReward {self._post.place}: {self._post.requests} requests>"

    async def __call__(self, sample: Sample) -> float:
        """Return the reward of one sample; it shares a request with other samples.

        Raises:
            RewardFailure: the sample is not JSON, the server did not answer in time, or its response is not one number
                for each sample.
        """
        body = self._encoded(sample)
        while True:
            batch = self._open
            leads = batch is None
            if batch is None:
                batch = self._open = _Batch()
            place = len(batch.bodies)
            batch.bodies.append(body)
            batch.clocks.append(Clocks())
            if len(batch.bodies) == self._batch_size:
                self._open = None
                batch.full.set()
            if leads:
                await self._send(batch)
            else:
                await batch.ended.wait()
            if batch.failure is not None:
                raise RewardFailure(batch.failure)
            if batch.rewards is not None:
                return batch.rewards[place]

    async def group(self, samples: Sequence[Sample]) -> list[float]:
        """Return the rewards of a whole group, in one separate request; raises as :meth:`__call__`."""
        return list(await self._rewards([self._encoded(sample) for sample in samples]))

    def _encoded(self, sample: Sample) -> msgspec.Raw:
        """Encode one sample, apart from its batch: a sample that is not JSON fails alone."""
        try:
            return msgspec.Raw(msgspec.json.encode(dict(self._encode(sample))))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise RewardFailure(f"remote reward at {self._post.place}: {sample!r} is not JSON: {error}") from error

    async def _send(self, batch: _Batch) -> None:
        try:
            with anyio.move_on_after(self._linger):
                await batch.full.wait()
            if self._open is batch:
                self._open = None
            batch.rewards = await self._rewards(batch.bodies, batch.clocks)
        except RewardFailure as error:
            batch.failure = str(error)
            raise
        finally:
            if self._open is batch:
                self._open = None
            batch.ended.set()

    async def _rewards(self, bodies: Sequence[msgspec.Raw], clocks: Sequence[Clocks] = ()) -> Sequence[float]:
        answer = await self._post({"samples": bodies}, "remote reward", clocks)
        rewards = answer.get("rewards") if isinstance(answer, Mapping) else None
        if not isinstance(rewards, list) or len(rewards) != len(bodies) or not all(map(is_number, rewards)):
            expected = f'{{"rewards": [{len(bodies)} finite numbers]}}'
            raise RewardFailure(f"remote reward at {self._post.place}: got {shortened(answer)}; expected {expected}")
        return [float(reward) for reward in rewards]
