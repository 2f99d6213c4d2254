"""Weight updates of running servers, from a folder on disk.

Invariant: when :func:`update_weights` returns, every server serves the folder and reports ``version``, no server is
paused, and, unless ``while_running`` is ``"in_place"``, no server has K/V of the old weights. When it raises, the error
lists which weights each server has, and no reachable server is paused, except a vLLM server that has begun to load.
Turns of this process do not exceed their deadlines because of the update (``pauses.py``). This module does not know
trainers or tensors.

SGLang: the update request includes a flush, and :func:`update_weights` flushes once more and checks the status. Every
rank of a server answers for the first flush, only one for ``/flush_cache``. But SGLang before 0.5.22 does not report a
failed first flush, and later versions return 400 for it although the weights are new. A flush fails while requests have
K/V, so it is sent while requests are retracted; with ``"retract"`` in the pause of the update itself, so that no
request runs between the new weights and the flush; with ``"abort"`` in a pause that lets none begin. A server with
several HTTP workers (``--tokenizer-worker-num``) is updated by ``"retract"`` whatever ``while_running`` is: a worker
waits for its own requests only, so that those of the others would run from the old weights into the new. Its version is
that of a reply (SGLang 0.5.23, managers/multi_tokenizer_mixin.py).

vLLM: weights and version change in two requests, and neither flushes. So they are sent in a pause for every
``while_running``, and the cache is reset before it ends. A server that fails to load keeps incomplete weights, and its
next request ends it. So the folder is checked first, and a server whose update fails after the load was sent stays
paused until another update succeeds: it would end, or sample under the name of other weights (vLLM 0.32.0).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args, overload

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint
from rollouts.errors import (
    ConfigError,
    EndpointError,
    EndpointRefused,
    EndpointUnavailable,
    RolloutsError,
    without_password,
)
from rollouts.http.answers import loads, message_of
from rollouts.http.client import ConnectFailed, HttpClient
from rollouts.inference.aborts import headers_of, workers_behind
from rollouts.inference.discovery import Routes, http_workers, served_version, text_of
from rollouts.inference.pauses import ordered
from rollouts.inference.prefixes import isolated

__all__ = ["WhileRunning", "update_weights"]

WhileRunning: TypeAlias = Literal["retract", "wait", "abort", "in_place"]
"""Treatment of running requests when weights change.

``retract``: they are interrupted and continue under the new weights, which prefill their tokens again. The logprob of
each token is exactly the logprob under the version of the token.

``wait``: they finish first, under the old weights. An SGLang server is not paused before the weights are new. If it
then fails to flush, as SGLang sometimes does under load, it is flushed at once in a pause that retracts. Tokens sampled
in between have the new version but may have read K/V of the old weights; a warning is logged.

``abort``: they end at once, in a pause; rollouts continue them. SGLang looks once a second whether they have ended.

``in_place``: they continue at once on the K/V of the old weights; their later logprobs do not belong to a single
version. The cache is flushed only if no request has K/V. New conversations of this process are exact anyway: their
requests have an ``extra_key`` with the version, so that they do not read K/V of the old weights (``prefixes.py``). New
conversations of other clients are not exact until the cache is flushed: a conversation that shares a prefix with an
older one (a system prompt) reads K/V of the old weights under the new version. A warning is logged.
"""

CONTINUE_SECONDS = 30.0
"""Time limit for retries of ``/continue_generation``."""
FLUSH_SECONDS = 60.0
"""Time limit for retries of a failed flush, each in a new pause."""
RETRY_SECONDS = 0.1
_LIST_SECONDS = 10.0

_LOG = logging.getLogger(__name__)


@overload
async def update_weights(
    endpoint: Endpoint,
    folder: str | Path,
    version: str,
    *,
    while_running: WhileRunning = "retract",
    seconds: float = 600.0,
) -> None: ...


@overload
async def update_weights(
    endpoint: Endpoint,
    *,
    lora: str | Path,
    name: str,
    while_running: Literal["finish", "switch"] = "finish",
    seconds: float = 600.0,
) -> None: ...


async def update_weights(
    endpoint: Endpoint,
    folder: str | Path | None = None,
    version: str | None = None,
    *,
    lora: str | Path | None = None,
    name: str | None = None,
    while_running: Any = None,
    seconds: float = 600.0,
) -> None:
    """Load the weights of ``folder``, or the LoRA adapter of ``lora``, on all servers of the endpoint concurrently.

    Of a router, on all its workers.

    An adapter is a version by itself: it is loaded next to the adapters before it, and no server is paused.

    Args:
        endpoint: URLs and keys of the servers.
        folder: model folder that the servers can read.
        version: weight version that later tokens carry.
        lora: folder of an adapter in PEFT's format that this process and the servers can read, and that never changes.
        name: name of the adapter, which later tokens carry as their version: ``Endpoint.lora`` and ``-vN`` with a
            rising number.
        while_running: treatment of running requests, see :data:`WhileRunning`; ``"retract"`` by default. With ``lora``
            of the rollouts that began with an older adapter, see
            :data:`~rollouts.inference.adapter_updates.WhileLoaded`; ``"finish"`` by default.
        seconds: deadline of the whole update.

    Raises:
        ConfigError: an unknown ``while_running``, or ``folder`` or ``lora`` cannot be used; nothing was sent.
        EndpointRefused: a server refused; the message lists which weights each server has.
        EndpointUnavailable: a server did not answer, or could not flush its cache; the message lists which weights each
            server has, and whether its cache still contains K/V of the old ones.
    """
    if lora is not None and name is not None and folder is None and version is None:
        from rollouts.inference.adapter_updates import update_adapter  # here: few runs have adapters

        await update_adapter(endpoint, lora, name, while_running=while_running or "finish", seconds=seconds)
        return
    if folder is None or version is None or lora is not None or name is not None:
        named = {"folder": folder, "version": version, "lora": lora, "name": name}
        got = " and ".join(key for key, value in named.items() if value is not None)
        raise ConfigError.of("update_weights", got or "nothing", "folder and version, or lora and name")
    if endpoint.lora is not None:
        expected = (
            "None for new weights of the base model: the adapters of an endpoint belong to the weights before them"
        )
        raise ConfigError.of("Endpoint.lora", endpoint.lora, expected)
    while_running = while_running or "retract"
    if while_running not in get_args(WhileRunning):
        raise ConfigError.of("while_running", while_running, f"one of {get_args(WhileRunning)}")
    path = os.path.abspath(folder)  # noqa: ASYNC240 - does not access the disk
    headers, admin_headers = headers_of(endpoint), headers_of(endpoint, admin=True)
    transport = HttpClient(connect_seconds=endpoint.connect_seconds)
    try:
        with contextlib.ExitStack() as stack:
            if while_running == "in_place":
                stack.enter_context(isolated(endpoint.base_url, version))
            urls = await _servers_of(endpoint, transport, headers)
            for router in set(endpoint.base_url).difference(urls):
                stack.enter_context(ordered(router))
            if endpoint.provider == "vllm":
                await anyio.to_thread.run_sync(_check_folder, Path(path))
            kind = {"sglang": _SGLangServer, "vllm": _VLLMServer}[endpoint.provider]
            servers = [kind(transport, headers, admin_headers, url, version) for url in urls]
            async with anyio.create_task_group() as tasks:
                for server in servers:
                    tasks.start_soon(server.update, path, while_running, seconds)
    finally:
        with anyio.CancelScope(shield=True):
            await transport.aclose()
    _raise_if_any_failed(servers, version)


async def _servers_of(endpoint: Endpoint, transport: HttpClient, headers: dict[str, str]) -> list[str]:
    """The URLs of all servers of the endpoint; a router, which lacks control routes, is replaced by its workers."""
    servers: dict[str, None] = {}
    for url in endpoint.base_url:
        workers: Sequence[str] = ()
        with contextlib.suppress(EndpointUnavailable), anyio.move_on_after(_LIST_SECONDS):
            workers = await workers_behind(transport, url, headers)
        servers.update(dict.fromkeys(workers or (url,)))
    return list(servers)


@attrs.define
class _Server(abc.ABC):
    """One server, with the known state of its weights, cache and pause."""

    PAUSE: ClassVar[str]
    CONTINUE: ClassVar[str]

    _transport: HttpClient
    _headers: dict[str, str]
    _admin_headers: dict[str, str]
    """For control routes; a server with two keys refuses it elsewhere."""
    _url: str
    _version: str
    updated: bool | None = False
    """Whether it has the new weights; ``None`` if unknown."""
    complete: bool = False
    """Whether the server reported success of the update, including its flush."""
    flushed: bool = False
    """Whether a ``/flush_cache`` succeeded."""
    paused: bool = False
    held: bool = False
    """Whether it must stay paused: its weights and their version may not belong together."""
    _keeps_connection: bool = attrs.field(default=False, init=False)
    """Whether the requests of an update use one connection, so that one HTTP worker answers them. Another may not know
    of the pause yet, and would wait for requests that the pause holds."""
    error: RolloutsError | None = None

    @property
    def name(self) -> str:
        return without_password(self._url)

    @property
    def state(self) -> str:
        """Sentence about its weights, for messages."""
        if self.updated is None:
            text = f"{self.name} may have the old weights or the new"
        elif not self.updated:
            text = f"{self.name} keeps the weights that it had"
        elif self.flushed:
            text = f"{self.name} has the weights {self._version!r}"
        else:
            text = (
                f"{self.name} has the weights {self._version!r}, but its prefix cache"
                f" {'may contain' if self.complete else 'contains'} K/V of the old weights:"
                " new replies that read it carry the new version, but their logprobs are of neither"
            )
        if self.held and self.paused:
            return f"{text}, incomplete, or under another version: it stays paused until an update succeeds"
        return f"{text}; it may still be paused: POST {{}} to its {self.CONTINUE}" if self.paused else text

    async def update(self, folder: str, while_running: WhileRunning, seconds: float) -> None:
        """Update this server; a failure is stored in ``error`` and does not stop other servers."""
        try:
            with (
                boundary(EndpointUnavailable, f"updating {self.name} to weights {self._version!r}", seconds=seconds),
                ordered(self._url),
            ):
                await self._update(folder, while_running)
        except RolloutsError as error:
            self.error = error

    @abc.abstractmethod
    async def _update(self, folder: str, while_running: WhileRunning) -> None:
        """Update this server."""

    @contextlib.asynccontextmanager
    async def _while_paused(self, body: dict[str, Any], query: str = "") -> AsyncIterator[None]:
        self.paused = True
        try:
            try:
                await self._post(self.PAUSE + query, body)
            except (EndpointRefused, ConnectFailed):
                self.paused = False
                raise
            yield
        finally:
            if self.paused and not self.held:
                await self._continue()
        if self.paused:
            raise EndpointUnavailable(f"{self.name}{self.CONTINUE}: no answer within {CONTINUE_SECONDS:g} s")

    async def _continue(self) -> None:
        with anyio.move_on_after(CONTINUE_SECONDS, shield=True):
            while self.paused:
                try:
                    await self._post(self.CONTINUE, {})
                    self.paused = False
                except EndpointError as error:
                    if isinstance(error, ConnectFailed) and error.refused:
                        self.paused = False  # a restarted server is not paused
                    else:
                        await anyio.sleep(RETRY_SECONDS)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        status, payload = await self._send(path, body)
        if status != 200:
            raise self._error(path, status, payload)

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        # A new connection: the server may be closing an idle one at this moment.
        fresh = not self._keeps_connection
        return await self._transport.post(
            self._url + path, msgspec.json.encode(body), self._admin_headers, new_connection=fresh
        )

    def _error(self, path: str, status: int, payload: bytes) -> EndpointError:
        kind = EndpointUnavailable if status >= 500 else EndpointRefused
        return kind(f"{self.name}{path}: {status}: {message_of(payload)}")


@attrs.define
class _SGLangServer(_Server):
    """A server of SGLang."""

    PAUSE = "/pause_generation"
    CONTINUE = "/continue_generation"

    async def _update(self, folder: str, while_running: WhileRunning) -> None:
        workers = await http_workers(self._transport, self._url, self._headers)
        if workers > 1 and while_running in ("wait", "abort"):
            _LOG.warning(
                "%s has --tokenizer-worker-num %d, and each HTTP worker waits for its own requests only: instead of"
                " while_running=%r, requests are retracted, and continue under the new weights",
                self.name,
                workers,
                while_running,
            )
            while_running = "retract"
        self._keeps_connection = workers > 1
        body = {
            "model_path": folder,
            "weight_version": self._version,
            "flush_cache": while_running != "in_place",
            "abort_all_requests": while_running == "abort",
        }
        async with contextlib.AsyncExitStack() as stack:
            if while_running != "wait":
                await stack.enter_async_context(self._while_paused({"mode": while_running}))
            has_version = await self._load(body)
            self.complete = has_version and while_running != "in_place"
            await self._flush()
        if while_running == "in_place":
            if not self.flushed:
                _LOG.warning("%s. Flush it while no request runs, or update with while_running='retract'", self.state)
        elif not self.flushed:
            if not self.complete or while_running != "wait":
                _LOG.warning("%s. It is flushed now; current replies may be inexact", self.state)
            await self._flush_under_pauses()
        await self._check(has_version=has_version)

    async def _load(self, body: dict[str, Any]) -> bool:
        """Load the weights; returns false if they were loaded, but the cache and the version are still the old ones."""
        self.updated = None
        try:
            status, payload = await self._send("/update_weights_from_disk", body)
        except ConnectFailed:
            self.updated = False
            raise
        response = loads(payload)
        if status == 200 and not (isinstance(response, dict) and response.get("success") is False):
            self.updated = True
            return True
        if status < 500:
            self.updated = _has_updated(message_of(payload))
        if not self.updated:
            raise self._error("/update_weights_from_disk", status, payload)
        return False

    async def _flush(self) -> None:
        status, payload = await self._send("/flush_cache", {})
        if status not in (200, 400):
            raise self._error("/flush_cache", status, payload)
        self.flushed = status == 200

    async def _flush_under_pauses(self) -> None:
        """Flush while requests are retracted; retry, since requests that block the flush may end between two pauses."""
        delay = RETRY_SECONDS
        with anyio.move_on_after(FLUSH_SECONDS):
            while not self.flushed:
                async with self._while_paused({"mode": "retract"}):
                    await self._flush()
                if not self.flushed:
                    await anyio.sleep(delay)
                    delay = min(2 * delay, 2.0)
        if not self.flushed:
            raise EndpointUnavailable(f"{self.name}/flush_cache failed for {FLUSH_SECONDS:g} s, under pauses as well")

    async def _check(self, *, has_version: bool) -> None:
        """Check the weight version that the server reports."""
        if not has_version:  # an update that could not flush does not change the version that the server reports
            await self._post("/update_weight_version", {"new_version": self._version, "abort_all_requests": False})
        served = await served_version(self._transport, self._url, self._headers)
        if served != self._version:
            raise EndpointRefused(
                f"{self.name}: weight_version {served!r}; expected {self._version!r}, which was just loaded"
            )


@attrs.define
class _VLLMServer(_Server):
    """A server of vLLM, with ``VLLM_SERVER_DEV_MODE=1``: its control routes exist only there."""

    PAUSE = "/pause"
    CONTINUE = "/resume"

    async def _update(self, folder: str, while_running: WhileRunning) -> None:
        await self._check_head(folder)
        in_place = while_running == "in_place"
        mode = while_running if while_running in ("wait", "abort") else "keep"
        async with self._while_paused({}, f"?mode={mode}&clear_cache={str(not in_place).lower()}"):
            await self._load(folder)
            await self._post("/update_weight_version", {"new_version": self._version})
            self.complete = not in_place
            if not in_place:
                await self._reset()
            self.held = False
        if in_place:
            _LOG.warning("%s. Update with while_running='retract' instead", self.state)
        response = await Routes(self._transport, self._url, self._headers, "a vLLM server").first("/weight_info")
        served = text_of(response.get("weight_version"))
        if served != self._version:
            raise EndpointRefused(
                f"{self.name}/weight_info: weight_version {served!r}; expected {self._version!r}, which was just loaded"
            )

    async def _check_head(self, folder: str) -> None:
        """Refuse a model without a separate output head on a CPU, where vLLM 0.32.0 would keep the old head."""
        config = await Routes(self._transport, self._url, self._headers, "a vLLM server").first("/server_info")
        if "device_config=cpu" not in str(config.get("vllm_config")):
            return
        if "lm_head.weight" not in await anyio.to_thread.run_sync(_check_folder, Path(folder)):
            raise EndpointRefused(
                f"{self.name} serves on a CPU, where vLLM keeps the old output head of tied embeddings: {folder} has no"
                " lm_head.weight. Save the model with tie_word_embeddings false"
            )

    async def _load(self, folder: str) -> None:
        self.updated, self.held = None, True
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._post("/collective_rpc", body)
        except (EndpointRefused, ConnectFailed):
            self.updated, self.held = False, False
            raise
        self.updated = True

    async def _reset(self) -> None:
        """Discard all cached K/V, of running requests too: they compute theirs again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        status, payload = await self._send(path, {})
        response = loads(payload)
        if status != 200 or (isinstance(response, dict) and response.get("success") is False):
            raise self._error(path, status, payload)
        self.flushed = True

    def _error(self, path: str, status: int, payload: bytes) -> EndpointError:
        error = super()._error(path, status, payload)
        if status == 404:
            hint = "start vLLM with VLLM_SERVER_DEV_MODE=1, which enables its control routes"
            return EndpointRefused(f"{error}: {hint}")
        return error


def _check_folder(folder: Path) -> set[str]:
    """Check that a folder has whole weights: vLLM ends at the first request after a failed update.

    Returns:
        The names of its tensors.

    Raises:
        ConfigError: weights that this process can read are missing, or a file of weights is cut.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        expected = "a folder that this process and the server can read, with config.json and *.safetensors"
        raise ConfigError.of("update_weights, folder", str(folder), expected)
    index = folder / "model.safetensors.index.json"
    listed = loads(index.read_bytes()) if index.is_file() else None
    parts = listed.get("weight_map") if isinstance(listed, dict) else None
    missing = set(parts.values()).difference(path.name for path in files) if isinstance(parts, dict) else ()
    if missing:
        expected = f"a folder with all files of {index.name}, also {', '.join(sorted(missing))}"
        raise ConfigError.of("update_weights, folder", str(folder), expected)
    names: set[str] = set()
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = loads(file.read(length)) if length < size else None
        tensors = dict(header) if isinstance(header, dict) else {}
        tensors.pop("__metadata__", None)
        names |= tensors.keys()
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        if 8 + length + max(ends, default=size) != size:
            raise ConfigError.of("update_weights, folder", str(path), "a whole file of safetensors")
    return names


def _has_updated(message: str) -> bool | None:
    """Whether a failed update changed the weights, by the messages of all ranks; ``None`` if only some did."""
    ranks = [part.startswith(("Weights were updated", "Succeeded")) for part in message.split(" | ")]
    return all(ranks) or (None if any(ranks) else False)


def _raise_if_any_failed(servers: Sequence[_Server], version: str) -> None:
    errors = [server.error for server in servers if server.error is not None]
    if not errors:
        return
    for error in errors:
        if not isinstance(error, EndpointError):
            raise error
    unavailable = all(isinstance(error, EndpointUnavailable) for error in errors)
    count = sum(server.updated is True for server in servers)
    fleet = f". {count} of {len(servers)} servers have the weights {version!r}" if len(servers) > 1 else ""
    text = (
        "; ".join(str(error).rstrip(".") for error in errors)
        + fleet
        + ". "
        + ". ".join(server.state for server in servers)
    )
    text += ". Fix the cause and call update_weights again, with while_running='retract', before samples are used"
    raise (EndpointUnavailable if unavailable else EndpointRefused)(text) from errors[0]
