"""A new version of a LoRA adapter on running servers, without a pause.

Invariant: when :func:`update_adapter` returns, every server has the adapter, and rollouts that begin get it. When it
raises, the adapter before it stays the newest, and the error lists which servers have the new one. Both stay loaded
until no rollout of this process names the old one; it is unloaded by the first update after that.

A server may read a folder again: SGLang 0.5.23 for a request that names an unloaded adapter
(managers/tokenizer_manager.py: _resolve_lora_path), vLLM 0.32.0 for an adapter that its cache has dropped
(lora/worker_manager.py: LRUCacheWorkerLoRAManager). So each version needs a folder that never changes, and a folder
that was used before is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import anyio
import anyio.to_thread

from rollouts.base.peft import PeftAdapter, checksum_of, read_adapter
from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, EndpointError, EndpointRefused, EndpointUnavailable, without_password
from rollouts.http.client import HttpClient
from rollouts.inference.aborts import abort_generation, headers_of
from rollouts.inference.adapter_routes import AdapterRoutes
from rollouts.inference.adapters import AdapterVersion, Family, family_of

__all__ = ["WhileLoaded", "update_adapter"]

WhileLoaded: TypeAlias = Literal["finish", "switch"]
"""Treatment of the rollouts of this process that began with an older adapter.

``finish``: they finish with it. ``switch``: their running replies are interrupted and continue, as all their later
replies, with the new adapter, which prefills their tokens again. In both, the logprob of each token is exactly that of
the adapter that the token names. Rollouts of other processes finish.
"""

UNLOAD_SECONDS = 30.0
POLL_SECONDS = 0.05
_STACKED = (({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}), ({"gate_proj", "up_proj"}, {"gate_proj"}))
"""Modules that SGLang stacks, and those of them that an adapter of any of them must have."""

_LOG = logging.getLogger(__name__)


async def update_adapter(
    endpoint: Endpoint, folder: str | Path, name: str, *, while_running: WhileLoaded, seconds: float
) -> None:
    """Load an adapter as a new version on all servers of the endpoint; see
    :func:`rollouts.inference.weights.update_weights`."""
    if while_running not in get_args(WhileLoaded):
        raise ConfigError.of("while_running", while_running, f"one of {get_args(WhileLoaded)} for a LoRA adapter")
    path = Path(os.path.abspath(folder))  # noqa: ASYNC240 - does not access the disk
    if endpoint.lora is None:
        expected = f"the name of the adapters without its version, e.g. Endpoint(lora={name.rpartition('-v')[0]!r})"
        raise ConfigError.of("Endpoint.lora", None, expected)
    family = family_of(endpoint)
    number = family.number(name)
    if number is None or number < 0:
        raise ConfigError.of("update_weights, name", name, f"{family.name}-vN with a number N (Endpoint.lora)")
    adapter = await anyio.to_thread.run_sync(read_adapter, path, "update_weights, lora")
    version = AdapterVersion(name, str(path), await anyio.to_thread.run_sync(checksum_of, path), loaded_here=True)
    _check_new(family, version, number)
    transport = HttpClient(connect_seconds=endpoint.connect_seconds)
    routes = AdapterRoutes(endpoint, transport)
    what = f"loading the LoRA adapter {name!r}"
    try:
        with boundary(EndpointUnavailable, what, seconds=seconds):
            await _unload_idle(family, endpoint, routes)
            await _load_everywhere(family, endpoint, routes, adapter, version)
            older = {one for one in family.versions if one != name}
            family.current = name
            if while_running == "switch":
                family.superseded |= older
                await _interrupt(family, older, endpoint, transport)
            await _unload_idle(family, endpoint, routes)
    finally:
        with anyio.CancelScope(shield=True):
            await transport.aclose()


def _check_new(family: Family, version: AdapterVersion, number: int) -> None:
    """Check the name and the folder against the versions before it. The same one again is an update that is repeated.

    Raises:
        ConfigError: the number does not rise, or the folder is that of another version.
    """
    known = family.versions.get(version.name)
    if known is not None and known.loaded_here and known.checksum != version.checksum:
        expected = f"the adapter that was loaded as {version.name!r}, or another number"
        raise ConfigError.of("update_weights, lora", version.folder, expected)
    newest = family.number(family.current)
    if newest is not None and number < newest:
        raise ConfigError.of(
            "update_weights, name", version.name, f"a number above {newest}, that of the newest adapter"
        )
    for other in family.versions.values():
        if other.folder == version.folder and other.name != version.name:
            expected = f"another folder than that of {other.name!r}, which a server may read again"
            raise ConfigError.of("update_weights, lora", version.folder, expected)


async def _load_everywhere(
    family: Family, endpoint: Endpoint, routes: AdapterRoutes, adapter: PeftAdapter, version: AdapterVersion
) -> None:
    """Load an adapter on all servers concurrently."""
    errors: dict[str, EndpointError] = {}

    async def load(url: str) -> None:
        try:
            await _load(family, url, routes, adapter, version)
        except EndpointError as error:
            errors[url] = error

    async with anyio.create_task_group() as tasks:
        for url in endpoint.base_url:
            tasks.start_soon(load, url)
    if errors:
        states = [
            f"{without_password(url)} {'does not have' if url in errors else 'has'} {version.name!r}"
            for url in endpoint.base_url
        ]
        unavailable = all(isinstance(error, EndpointUnavailable) for error in errors.values())
        newest = f"{family.current!r} stays the newest" if family.current else "no other was loaded"
        text = f"{'; '.join(str(error).rstrip('.') for error in errors.values())}. {'. '.join(states)}; {newest}"
        raise (EndpointUnavailable if unavailable else EndpointRefused)(text) from next(iter(errors.values()))
    family.versions[version.name] = version


async def _load(family: Family, url: str, routes: AdapterRoutes, adapter: PeftAdapter, version: AdapterVersion) -> None:
    name, known = version.name, family.versions.get(version.name)
    if await routes.is_plain_sglang(url):
        _check_for_sglang(adapter)
    listed = await routes.listed(url)
    newest = family.newest(listed)
    if newest and family.newest([newest, name]) != name:
        raise EndpointRefused(
            f"{without_password(url)} has the newer adapter {newest!r}: unload it, or give this one a higher number"
        )
    loaded_here = known is not None and known.loaded_here
    if name in listed and not loaded_here:
        await routes.unload(url, name)  # perhaps of an earlier run: its weights are not known
    if name not in listed or not loaded_here:
        await routes.load(url, name, version.folder)
    family.present[url].add(name)


def _check_for_sglang(adapter: PeftAdapter) -> None:
    """Refuse an adapter that SGLang 0.5.23 computes otherwise in silence (lora/lora.py: LoRAAdapter).

    Raises:
        EndpointRefused: it is one.
    """
    where = f"the LoRA adapter in {adapter.folder}"
    if adapter.use_rslora and adapter.rank > 1:
        raise EndpointRefused(f"{where} has use_rslora, which SGLang ignores: save it with lora_alpha times sqrt(r)")
    for layer in {module.rpartition(".")[0] for module in adapter.modules}:
        parts = {module.rpartition(".")[2] for module in adapter.modules if module.rpartition(".")[0] == layer}
        for stack, needed in _STACKED:
            if parts & stack and not needed <= parts:
                raise EndpointRefused(
                    f"{where} changes {', '.join(sorted(parts & stack))} of {layer} alone: SGLang wants"
                    f" {' and '.join(sorted(needed))} too"
                )


async def _interrupt(family: Family, older: set[str], endpoint: Endpoint, transport: HttpClient) -> None:
    """Abort the requests of this process that run with older adapters, until none is left.

    A server does not know a request that has not arrived yet.
    """
    headers = headers_of(endpoint, admin=True)
    while True:
        senders = list(family.senders)
        named = [(sender, call) for sender in senders for call in list(sender.calls) if call.adapter in older]
        if not named:
            return
        for sender, call in named:
            if call.running is not None:
                worker, rid = call.running
                with contextlib.suppress(EndpointUnavailable):  # the call itself handles it
                    await abort_generation(transport, worker.url, rid, headers, sender.servers.protocol.ABORTS)
        await anyio.sleep(POLL_SECONDS)


async def _unload_idle(family: Family, endpoint: Endpoint, routes: AdapterRoutes) -> None:
    """Unload the adapters of this process that are not the newest and that no rollout names."""
    in_use = {family.current, *family.in_use()}
    idle = [version.name for version in family.versions.values() if version.loaded_here and version.name not in in_use]
    for name in idle:
        del family.versions[name]
        for url in endpoint.base_url:
            family.present[url].discard(name)
            try:
                with boundary(EndpointUnavailable, f"unloading {name!r}", seconds=UNLOAD_SECONDS):
                    await routes.unload(url, name)
            except EndpointError as error:
                _LOG.warning("the LoRA adapter %r may stay loaded: %s", name, error)
