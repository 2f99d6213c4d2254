"""The policies of an event loop, one for each endpoint, by the protocol that the endpoint names."""

from __future__ import annotations

import asyncio
import importlib
import weakref

import attrs

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.dtypes.inference import NEEDS_TOKEN_IDS
from rollouts.errors import ConfigError
from rollouts.inference.policy import ServerPolicy, VocabSize

__all__ = ["policy_of", "shared_policies", "shared_policy"]

_POLICIES = {
    "sglang": ("rollouts.inference.sglang", "SGLangPolicy"),
    "vllm": ("rollouts.inference.vllm", "VLLMPolicy"),
}
"""Module and class by ``Endpoint.provider``; a protocol is imported when an endpoint names it."""
_ANY_SAMPLING = SamplingParams()
_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Endpoint, VocabSize], ServerPolicy]] = (
    weakref.WeakKeyDictionary()
)


def policy_of(endpoint: Endpoint, vocab_size: VocabSize = None) -> ServerPolicy:
    """Create a policy of the endpoint's protocol; arguments as :class:`ServerPolicy`.

    Raises:
        ConfigError: the protocol has no token ids.
    """
    if endpoint.provider not in _POLICIES:
        raise ConfigError.of("Endpoint.provider", endpoint.provider, f'"sglang" or "vllm": {NEEDS_TOKEN_IDS}')
    module, name = _POLICIES[endpoint.provider]
    kind: type[ServerPolicy] = getattr(importlib.import_module(module), name)
    return kind(endpoint, vocab_size=vocab_size)


def shared_policy(endpoint: Endpoint, vocab_size: VocabSize = None) -> ServerPolicy:
    """Return the policy of this endpoint in the running event loop, created at the first call.

    Endpoints that differ only in their sampling share one policy. It is closed when the loop shuts down.

    Raises:
        RuntimeError: no event loop is running.
    """
    policies = _SHARED.setdefault(asyncio.get_running_loop(), {})
    key = (attrs.evolve(endpoint, sampling=_ANY_SAMPLING), vocab_size)
    policy = policies.get(key)
    if policy is None:
        policy = policies[key] = policy_of(endpoint, vocab_size)
    return policy


def shared_policies() -> list[ServerPolicy]:
    """Return all shared policies of the running event loop."""
    return list(_SHARED.get(asyncio.get_running_loop(), {}).values())
