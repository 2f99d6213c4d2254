"""Sockets to a host, by whichever of its addresses answers first.

Invariant: a socket is handed over or closed, however an attempt ends. A name is looked up once for all that ask at the
same time, and several addresses of one name take turns, so that servers behind one name share the connections.

It sets no deadline and knows nothing of what is spoken.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import anyio

__all__ = ["Host"]

LOOKUP_SECONDS = 10.0
"""How long the addresses of a name are taken for its addresses."""

STAGGER_SECONDS = 0.25
"""How long an address may be silent before the next one is tried beside it."""

_Address = tuple[int, Any]
"""The family of an address, and what a socket of this family connects to."""


class Host:
    """A name, or an address, and a port."""

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port
        self._looking = anyio.Lock(fast_acquire=True)
        self._addresses: list[_Address] = []
        self._known_until = -math.inf

    def __repr__(self) -> str:
        return f"<Host {self._name} {self._port}>"

    async def connect(self) -> socket.socket:
        """A socket that is connected.

        Raises:
            OSError: the name has no address, or none of them answers; a ``ConnectionRefusedError`` if the machine says
                at each of them that nobody listens.
        """
        async with self._looking:
            if time.monotonic() >= self._known_until:
                self._addresses = await _look_up(self._name, self._port)
                self._known_until = time.monotonic() + LOOKUP_SECONDS
            addresses = list(self._addresses)
            self._addresses.append(self._addresses.pop(0))
        try:
            return await _first_of(addresses) if len(addresses) > 1 else await _dial(addresses[0])
        except OSError:
            self._known_until = -math.inf  # it may have moved
            raise


async def _look_up(name: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # no address: a name, which takes a while
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


async def _dial(address: _Address) -> socket.socket:
    family, where = address
    dialled = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(dialled, where)
    except BaseException:
        dialled.close()
        raise
    return dialled


async def _first_of(addresses: Sequence[_Address]) -> socket.socket:
    """The first that answers; each is tried once the one before it has failed, or has been silent for long."""
    found: list[socket.socket] = []
    errors: list[OSError] = []

    async def attempt(address: _Address, failed: anyio.Event) -> None:
        try:
            dialled = await _dial(address)
        except OSError as error:
            errors.append(error)
            failed.set()
        else:
            found.append(dialled)
            attempts.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as attempts:
            for address in addresses:
                failed = anyio.Event()
                attempts.start_soon(attempt, address, failed)
                with anyio.move_on_after(STAGGER_SECONDS):
                    await failed.wait()
    except BaseException:
        _close(found)
        raise
    if not found:
        numbers = {error.errno for error in errors}
        told = "; ".join(error.strerror or str(error) for error in errors)
        raise OSError(numbers.pop(), told) if len(numbers) == 1 else OSError(told)
    _close(found[1:])
    return found[0]


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
