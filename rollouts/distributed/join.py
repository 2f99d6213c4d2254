"""The side of a worker that joins a service over HTTP: play what the service asks for, until it ends or SIGTERM.

Invariant: a request that was not answered is repeated with its number, so nothing is played or counted twice. At
SIGTERM the worker leaves: it finishes its rollouts for a while, the service gives the rest to others, and the process
ends with 0. If the service was restarted, or gave this worker up, it joins again; it joins with what it was built
from, and is built again if the service plays something else now. It joins only while an inference server answers it,
and waits before it joins again if it was ended because no server did. The recipe and its options are those of the
service: a worker joins only a service that may run code here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from rollouts import __version__
from rollouts.concurrency.task_groups import first_error
from rollouts.distributed.dispatch import LEAVE_SECONDS
from rollouts.distributed.messages import MOST_BYTES, PLAIN, broken_record
from rollouts.distributed.worker import ConfigFactory, Player, RecipeConfig, create_config
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, EndpointError, EndpointUnavailable, GenerateFailure
from rollouts.http.client import HttpClient
from rollouts.inference.shared import policy_of
from rollouts.recipe.files import file_of
from rollouts.runs.record_bytes import LENGTH, read_framed
from rollouts.training.config import RolloutConfig

__all__ = ["Facts", "parts_of", "recipe_of", "recipe_sha256", "work"]

_ROLLOUTS_A_MESSAGE = 32
_MESSAGE_BYTES = 1 << 24
"""Of a message with several records; one record may have up to :data:`~rollouts.distributed.messages.MOST_BYTES`."""
_LINGER_SECONDS = 0.1
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 5.0
_CUT_OFF_SECONDS = 60.0
"""Pause of a worker that was ended while it waited for a server: a server may describe itself and serve nothing."""
_ANSWER_SECONDS = 120.0
"""Longest wait for one answer; the longest that the service takes on purpose is 10 s, and a message may be large."""
_LEAVING_SECONDS = LEAVE_SECONDS + 10.0
"""Time for the service to end a worker that leaves."""


class Facts(msgspec.Struct, forbid_unknown_fields=True):
    """The recipe and servers of a worker."""

    version: str
    """Of this package: messages of two versions may differ."""
    recipe: str
    """A name, or the path of a file that is the same on every machine."""
    sha256: str
    """Of the recipe's file, :func:`recipe_sha256`."""
    options: dict[str, str]
    provider: str
    model: str
    base_url: list[str]


def recipe_sha256(recipe: str | Path) -> str:
    """The SHA-256 of a recipe's file as hexadecimal digits; modules that the file imports are not part of it.

    Raises:
        ConfigError: it cannot be read.
    """
    file = file_of(recipe)
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError.of("recipe", str(recipe), f"a file that can be read ({error})") from error


def recipe_of(facts: Facts) -> RecipeConfig:
    """The factory of a service's config; the keys of servers are those of this process.

    Raises:
        ConfigError: the service has another version of this package, or the recipe's file here is not that of the
            service.
    """
    if facts.version != __version__:
        raise ConfigError.of("version of the service", facts.version, f"{__version__}, that of this worker")
    if (sha256 := recipe_sha256(facts.recipe)) != facts.sha256:
        here, there = sha256[:12], facts.sha256[:12]
        expected = f"SHA-256 {there}…, the file of the service; copy that file here, or start the service again"
        raise ConfigError.of(f"recipe {file_of(facts.recipe)}", f"SHA-256 {here}…", expected)
    fields: dict[str, Any] = {"provider": facts.provider, "model": facts.model, "base_url": facts.base_url}
    fields |= {"api_key": os.environ.get("ROLLOUTS_API_KEY"), "admin_key": os.environ.get("ROLLOUTS_ADMIN_KEY")}
    return RecipeConfig(Path(facts.recipe), Endpoint(**fields), facts.options)


async def work(
    url: str,
    *,
    key: str | None = None,
    patience: float = 300.0,
    factory: ConfigFactory | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Join a service and play until SIGTERM.

    Args:
        url: of the service.
        key: of the service.
        patience: seconds for which a service, or inference servers, that do not answer are asked again.
        factory: creates the config; by default from what the service says.
        say: called when the worker joined or left.

    Raises:
        ConfigError: the recipe cannot be built here, or the service refuses this worker.
        EndpointUnavailable: the service, or every inference server, did not answer for too long.
        EndpointRefused: an inference server refuses this worker.
    """
    transport = HttpClient(connect_seconds=10.0)
    service = _Service(transport, url.rstrip("/"), key, patience)
    try:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async with first_error() as tasks:
                leaves, built = anyio.Event(), _Built(factory)
                tasks.start_soon(_leave_at, signals, leaves)
                while not leaves.is_set():
                    await _unless(leaves, functools.partial(built.update, service))
                    await _unless(leaves, functools.partial(_wait_for_servers, built, patience, say))
                    if built.config is None or leaves.is_set():
                        continue
                    membership = _Membership(service, built.config, leaves, say, facts=built.facts)
                    await membership.run()
                    if membership.away and not leaves.is_set():
                        say(f"no inference server answered this worker: {membership.away}")
                        await _unless(leaves, functools.partial(anyio.sleep, _CUT_OFF_SECONDS))
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await transport.aclose()


async def _leave_at(signals: AsyncIterator[signal.Signals], leaves: anyio.Event) -> None:
    async for _ in signals:
        leaves.set()


async def _unless(leaves: anyio.Event, work: Callable[[], Awaitable[None]]) -> None:
    """Wait for some work; the worker's leave cancels it."""

    async def cancel() -> None:
        await leaves.wait()
        tasks.cancel_scope.cancel()

    async with first_error() as tasks:
        tasks.start_soon(cancel)
        await work()
        tasks.cancel_scope.cancel()


async def _wait_for_servers(built: _Built, patience: float, say: Callable[[str], None]) -> None:
    """Wait until an inference server answers this process.

    Raises:
        EndpointUnavailable: none did for too long.
        EndpointRefused: one refuses it.
    """
    if built.endpoint is None:
        return
    since, said = anyio.current_time(), False
    async with policy_of(built.endpoint) as policy:
        while True:
            try:
                await policy.describe()
                return
            except EndpointUnavailable as error:
                if anyio.current_time() - since > patience:
                    raise
                if not said:
                    say(f"waits for an inference server before it joins: {error}")
                said = True
            await anyio.sleep(_LONGEST_PAUSE)


class _Built:
    """The config that a worker plays: that of its factory, or of what the service said last."""

    def __init__(self, factory: ConfigFactory | None) -> None:
        self._factory = factory
        self.config: RolloutConfig | None = None
        self.facts = b""
        """The answer of the service that it was built from; empty with a factory."""
        self.endpoint: Endpoint | None = None
        """The inference servers that the service said."""

    async def update(self, service: _Service) -> None:
        """Build the config, again if the service has another recipe, options or servers, e.g. after its restart."""
        facts = b"" if self._factory is not None else await service.facts()
        if self.config is not None and facts == self.facts:
            return
        factory = self._factory
        if factory is None:
            factory = recipe_of(_facts_of(facts, service))
            self.endpoint = factory.endpoint
        self.config, self.facts = await anyio.to_thread.run_sync(create_config, factory), facts


def _facts_of(body: bytes, service: _Service) -> Facts:
    try:
        return msgspec.json.decode(body, type=Facts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{service.url}: expected a service that workers may join ({error})") from None


class _Gone(Exception):
    """The service has ended this worker."""


class _Service:
    """Requests to a service, repeated until they are answered."""

    def __init__(
        self,
        transport: HttpClient,
        url: str,
        key: str | None,
        patience: float,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self._transport, self.url, self._patience = transport, url, patience
        self._answer_seconds = answer_seconds
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def facts(self) -> bytes:
        """:class:`Facts` as JSON."""
        _, _, body = await self.ask("GET", "/v1/workers")
        return body

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request until it is answered; return status, headers by lower-case name, and body.

        Raises:
            _Gone: the service does not know this worker.
            ConfigError: it refuses the request.
            EndpointUnavailable: it did not answer for too long.
        """
        since, pause = anyio.current_time(), _PAUSE_SECONDS
        while True:
            failure = ""
            try:
                sent = {**self._headers, **(headers or {})}
                with anyio.fail_after(self._answer_seconds):  # a machine that was cut off closes no connection
                    async with self._transport.open(method, f"{self.url}{path}", sent, body) as response:
                        status, answer = response.status, await response.read()
                        received = dict(response.headers)
            except EndpointError as error:
                failure = str(error)
            except TimeoutError:
                failure = f"no answer for {self._answer_seconds:g} s"
            else:
                if status == 410:
                    raise _Gone
                if status in (408, 502, 503, 504):
                    failure = f"status {status}: {answer[:200].decode('utf-8', 'replace')}"
                elif status >= 400:
                    text = answer[:500].decode("utf-8", "replace")
                    raise ConfigError(f"{self.url}{path} refused this worker with status {status}: {text}")
                else:
                    return status, received, answer
            if failure.startswith("status 503"):
                since = anyio.current_time()  # it is alive: every slot has a worker, or the run has not begun
            if anyio.current_time() - since > self._patience:
                raise EndpointUnavailable(f"{self.url} did not answer for {self._patience:g} s: {failure}")
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class _Membership:
    """One stay of a worker in a service."""

    def __init__(
        self,
        service: _Service,
        config: RolloutConfig,
        leaves: anyio.Event,
        say: Callable[[str], None],
        *,
        facts: bytes = b"",
    ) -> None:
        self._facts = facts
        self._service, self._leaves, self._say = service, leaves, say
        self._player = Player(config, at_least=_ROLLOUTS_A_MESSAGE, linger=_LINGER_SECONDS, orders=PLAIN)
        self._path = ""

    @property
    def away(self) -> str:
        """Why its rollouts waited for an inference server when it ended; empty if they did not."""
        return self._player.away

    async def run(self) -> None:
        """Join, and play until the service ends this worker; return at once if it plays something else now."""
        with contextlib.suppress(_Gone):
            await _unless(self._leaves, self._join)
        if not self._path:
            return
        self._say("joined")
        async with first_error() as tasks:
            tasks.start_soon(self._player.run)
            await self._player.started.wait()
            tasks.start_soon(self._until_gone, tasks.cancel_scope, self._take_orders)
            tasks.start_soon(self._until_gone, tasks.cancel_scope, self._send_records)
            await self._leaves.wait()
            with anyio.move_on_after(_LEAVING_SECONDS):
                with contextlib.suppress(_Gone):
                    await self._service.ask("DELETE", self._path)
                await anyio.sleep_forever()  # until the service ends this worker
            tasks.cancel_scope.cancel()
        self._say("left" if self._leaves.is_set() else "ended by the service")

    async def _join(self) -> None:
        _, _, body = await self._service.ask("POST", "/v1/workers", self._facts)
        self._path = f"/v1/workers/{msgspec.json.decode(body)['worker']}"

    async def _until_gone(self, scope: anyio.CancelScope, work: Callable[[], Any]) -> None:
        try:
            await work()
        except _Gone:
            scope.cancel()

    async def _take_orders(self) -> None:
        after = 0
        while True:
            body = msgspec.json.encode({"after": after})
            status, headers, orders = await self._service.ask("POST", f"{self._path}/orders", body)
            if status == 200:
                after = int(headers["order"])
                self._player.submit(orders)

    async def _send_records(self) -> None:
        number = 0
        while True:
            for part in parts_of(await self._player.collect(), _MESSAGE_BYTES, MOST_BYTES):
                await self._service.ask("POST", f"{self._path}/records", part, {"Record": str(number)})
                number += 1


def parts_of(records: bytes, most: int, longest: int) -> Iterator[bytes]:
    """Split a message into messages of whole records; only one with a single record is longer than ``most`` bytes.

    In the place of a record of more than ``longest`` bytes, its rollout fails: the service would refuse it from this
    worker, and from each that gets the rollout after it.
    """
    begin = end = 0
    while end < len(records):
        stop = end + LENGTH.size + LENGTH.unpack_from(records, end)[0]
        if stop - begin > most and end > begin:
            yield records[begin:end]
            begin = end
        end = stop
        if end - begin > longest:
            fields, _ = next(read_framed(records[begin:end]))
            error = GenerateFailure(f"its record has {end - begin:,} bytes; expected at most {longest:,}, a message")
            yield broken_record(fields["number"], error)
            begin = end
    if begin < end:
        yield records[begin:]
