"""Sockets: which address is taken, and what a failure says."""

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


def at(*ports: int) -> Host:
    """A name whose addresses differ in their ports."""
    host = Host("several.invalid", 0)
    host._addresses = [(socket.AF_INET, (LOCAL, port)) for port in ports]
    host._known_until = float("inf")
    return host


async def port_of(host: Host) -> int:
    with await host.connect() as dialled:
        return int(dialled.getpeername()[1])


@pytest.fixture
def nobody() -> int:
    with listener() as port:
        return port


async def test_addresses_of_a_name_take_turns() -> None:
    """Servers behind one name share the connections."""
    with listener() as first, listener() as second:
        host = at(first, second)
        assert [await port_of(host) for _ in range(4)] == [first, second, first, second]


async def test_one_that_fails_or_is_silent_gives_way_to_the_next(nobody: int) -> None:
    """At once, or after a while; what was begun with the others is closed."""
    with listener() as port, full_backlog() as silent:
        assert await port_of(at(nobody, port)) == port
        assert await port_of(at(silent, nobody, port)) == port
    gc.collect()


async def test_nobody_listens_where_every_address_says_so(nobody: int) -> None:
    """One that says nothing may still have somebody."""
    with listener() as other:
        pass
    for ports in ((nobody,), (nobody, other)):
        with pytest.raises(ConnectionRefusedError):
            await at(*ports).connect()
    both = at(nobody)
    both._addresses.append((socket.AF_INET, ("255.255.255.255", 1)))
    with pytest.raises(OSError, match="; ") as raised:
        await both.connect()
    assert not isinstance(raised.value, ConnectionRefusedError)


async def test_who_gives_up_leaves_no_socket(nobody: int) -> None:
    """An unclosed one would warn, which is an error here."""
    with full_backlog() as silent:
        for ports in ((silent,), (silent, silent), (nobody, silent)):
            with anyio.move_on_after(0.01) as scope:
                await at(*ports).connect()
            assert scope.cancelled_caught
    gc.collect()


async def test_an_address_is_itself() -> None:
    """Of either kind; and a name is looked up again once its addresses fail."""
    for address in (LOCAL, "::1"):
        try:
            with listener(address) as port:
                assert await port_of(Host(address, port)) == port
        except OSError:  # a machine without the newer kind
            assert address == "::1"
    with listener() as port:
        host = Host("localhost", port)
        assert await port_of(host) == port
        host._addresses = [(socket.AF_INET, (LOCAL, 1))]
        with pytest.raises(ConnectionRefusedError):
            await host.connect()
        assert await port_of(host) == port


async def test_a_name_that_nobody_knows() -> None:
    """Is an error of the network, for all that ask at the same time."""
    host, told = Host("nowhere.invalid", 80), []

    async def ask() -> None:
        try:
            await host.connect()
        except OSError as error:
            told.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
    assert len(told) == 3
