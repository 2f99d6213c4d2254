"""Connected sockets: the choice of an address, and failures."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator

import anyio
import pytest

from rollouts.http.connect import Host
from tests.raw_server import full_backlog

LOCAL = "127.0.0.1"


@contextlib.contextmanager
def listener(host: str = LOCAL) -> Iterator[int]:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        yield listening.getsockname()[1]


def host_at(*ports: int) -> Host:
    """A host name whose addresses differ in their ports."""
    host = Host("several.invalid", 0)
    host._addresses = [(socket.AF_INET, (LOCAL, port)) for port in ports]
    host._cached_until = float("inf")
    return host


async def port_of(host: Host) -> int:
    with await host.connect() as sock:
        return int(sock.getpeername()[1])


@pytest.fixture
def refusing() -> int:
    with listener() as port:
        return port


async def test_addresses_of_a_name_are_used_in_rotation() -> None:
    """Servers behind one name share the connections."""
    with listener() as first, listener() as second:
        host = host_at(first, second)
        assert [await port_of(host) for _ in range(4)] == [first, second, first, second]


async def test_the_next_address_is_tried_after_a_failure_or_a_delay(refusing: int) -> None:
    """The sockets of the other attempts are closed."""
    with listener() as port, full_backlog() as silent:
        assert await port_of(host_at(refusing, port)) == port
        assert await port_of(host_at(silent, refusing, port)) == port
    gc.collect()


async def test_a_host_refuses_if_every_address_refuses(refusing: int) -> None:
    """A server may listen on an address that fails in another way."""
    with listener() as other:
        pass
    for ports in ((refusing,), (refusing, other)):
        with pytest.raises(ConnectionRefusedError):
            await host_at(*ports).connect()
    both = host_at(refusing)
    both._addresses.append((socket.AF_INET, ("255.255.255.255", 1)))
    with pytest.raises(OSError, match="; ") as raised:
        await both.connect()
    assert not isinstance(raised.value, ConnectionRefusedError)


async def test_a_cancelled_connect_leaves_no_socket(refusing: int) -> None:
    """An unclosed one would warn, which is an error in the tests."""
    with full_backlog() as silent:
        for ports in ((silent,), (silent, silent), (refusing, silent)):
            with anyio.move_on_after(0.01) as scope:
                await host_at(*ports).connect()
            assert scope.cancelled_caught
    gc.collect()


async def test_an_ip_address_needs_no_lookup() -> None:
    """IPv4 or IPv6; a name is looked up again once its addresses fail."""
    for address in (LOCAL, "::1"):
        try:
            with listener(address) as port:
                assert await port_of(Host(address, port)) == port
        except OSError:  # no IPv6 on this machine
            assert address == "::1"
    with listener() as port:
        host = Host("localhost", port)
        assert await port_of(host) == port
        host._addresses = [(socket.AF_INET, (LOCAL, 1))]
        with pytest.raises(ConnectionRefusedError):
            await host.connect()
        assert await port_of(host) == port


async def test_an_unknown_name_is_a_network_error() -> None:
    """For all concurrent calls."""
    host, errors = Host("nowhere.invalid", 80), []

    async def connect() -> None:
        try:
            await host.connect()
        except OSError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(connect)
    assert len(errors) == 3
