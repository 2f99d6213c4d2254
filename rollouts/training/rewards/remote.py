"""A reward model behind HTTP: samples go in batches, rewards come back in their order.

The wire: ``POST url`` with ``{"samples": [{"prompt", "response", "messages", "label", "metadata"}, …]}``, answered by
``{"rewards": [number, …]}``.

Invariant: a reward is put on the sample that it was given for, or every sample of the batch fails with the reason. A
sample whose scoring is cancelled takes nobody with it: who waits with it asks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.training.rewards.http import Poster
from rollouts.training.types import Sample

__all__ = ["RemoteReward", "sample_for_wire"]


def sample_for_wire(sample: Sample) -> dict[str, Any]:
    """What a remote reward sees of a sample: no tokens."""
    fields = sample.fields_to_dict()
    return {name: fields[name] for name in ("prompt", "response", "messages", "label", "metadata")}


@attrs.define(eq=False)
class _Batch:
    """Samples that travel together."""

    bodies: list[msgspec.Raw] = attrs.field(factory=list)
    full: anyio.Event = attrs.field(factory=anyio.Event)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    rewards: Sequence[float] | None = None
    failure: str | None = None
    """Why there are no rewards; with neither, whoever was to send it was cancelled."""


class RemoteReward:
    """A ``reward_fn`` that asks a server; with ``group_rm=True`` use its method :meth:`group`.

    Args:
        url: of the reward server.
        batch_size: samples in one request, at most.
        linger_seconds: how long the first sample of a batch waits for others.
        encode: what is sent of a sample.
        **options: of :class:`~rollouts.training.rewards.http.Poster`: ``api_key``, ``attempts``,
            ``backoff_seconds``, ``seconds``, ``at_once``.

    Raises:
        ConfigError: an option that cannot be.
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
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError.of("RemoteReward.batch_size", batch_size, "an integer >= 1")
        if not linger_seconds >= 0:
            raise ConfigError.of("RemoteReward.linger_seconds", linger_seconds, "a number of seconds >= 0")
        self._post = Poster(url, **options)
        self._batch_size, self._linger, self._encode = batch_size, linger_seconds, encode
        self._open: _Batch | None = None

    def __repr__(self) -> str:
        return f"<RemoteReward {self._post.place}: {self._post.requests} requests>"

    async def __call__(self, sample: Sample) -> float:
        """The reward of one sample, asked for together with others.

        Raises:
            RewardFailure: no answer in time, or none that is one number for each sample.
        """
        body = self._encoded(sample)
        while True:
            batch = self._open
            leads = batch is None
            if batch is None:
                batch = self._open = _Batch()
            place = len(batch.bodies)
            batch.bodies.append(body)
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
        """The rewards of a whole group, in one request of its own."""
        return list(await self._rewards([self._encoded(sample) for sample in samples]))

    def _encoded(self, sample: Sample) -> msgspec.Raw:
        """Here, and not with its batch: what cannot be sent costs nobody else a reward."""
        try:
            return msgspec.Raw(msgspec.json.encode(dict(self._encode(sample))))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise RewardFailure(f"remote reward at {self._post.place}: {sample!r} is no JSON: {error}") from error

    async def _send(self, batch: _Batch) -> None:
        try:
            with anyio.move_on_after(self._linger):
                await batch.full.wait()
            if self._open is batch:
                self._open = None
            batch.rewards = await self._rewards(batch.bodies)
        except RewardFailure as error:
            batch.failure = str(error)
            raise
        finally:
            if self._open is batch:
                self._open = None
            batch.ended.set()

    async def _rewards(self, bodies: Sequence[msgspec.Raw]) -> Sequence[float]:
        answer = await self._post({"samples": bodies}, "remote reward")
        rewards = answer.get("rewards") if isinstance(answer, Mapping) else None
        if not isinstance(rewards, list) or len(rewards) != len(bodies) or not all(map(_is_finite, rewards)):
            expected = f'{{"rewards": [{len(bodies)} finite numbers]}}'
            raise RewardFailure(f"remote reward at {self._post.place}: got {shortened(answer)}; expected {expected}")
        return [float(reward) for reward in rewards]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
