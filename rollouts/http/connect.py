"""Connected sockets to a host name with one or several addresses.

Invariant: every socket is returned or closed, however an attempt ends. Concurrent calls share one name lookup. The
addresses of one name are used in rotation, so that the servers behind it share the connections.

This module sets no deadline and does not know protocols above TCP.
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
"""How long the addresses of a name are cached."""

STAGGER_SECONDS = 0.25
"""Delay before the next address is tried in parallel."""

_Address = tuple[int, Any]
"""Address family, and the argument of ``socket.connect`` for it."""


class Host:
    """A host name or IP address, and a port."""

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port
        self._lookup = anyio.Lock(fast_acquire=True)
        self._addresses: list[_Address] = []
        self._cached_until = -math.inf

    def __repr__(self) -> str:
        return f"<Host {self._name} {self._port}>"

    async def connect(self) -> socket.socket:
        """Return a connected socket.

        Raises:
            OSError: the name does not resolve, or every address fails; a ``ConnectionRefusedError`` if every address
                refuses the connection.
        """
        async with self._lookup:
            if time.monotonic() >= self._cached_until:
                self._addresses = await _look_up(self._name, self._port)
                self._cached_until = time.monotonic() + LOOKUP_SECONDS
            addresses = list(self._addresses)
            self._addresses.append(self._addresses.pop(0))
        try:
            return await _connect_any(addresses) if len(addresses) > 1 else await _connect(addresses[0])
        except OSError:
            self._cached_until = -math.inf  # the host may have moved
            raise


async def _look_up(name: str, port: int) -> list[_Address]:
    try:
        entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name, not an address: its lookup may block
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in entries))


async def _connect(address: _Address) -> socket.socket:
    family, target = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_any(addresses: Sequence[_Address]) -> socket.socket:
    """Connect to the first address that accepts; the next one is tried after a failure or :data:`STAGGER_SECONDS`."""
    connected: list[socket.socket] = []
    errors: list[OSError] = []

    async def attempt(address: _Address, failed: anyio.Event) -> None:
        try:
            sock = await _connect(address)
        except OSError as error:
            errors.append(error)
            failed.set()
        else:
            connected.append(sock)
            attempts.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as attempts:
            for address in addresses:
                failed = anyio.Event()
                attempts.start_soon(attempt, address, failed)
                with anyio.move_on_after(STAGGER_SECONDS):
                    await failed.wait()
    except BaseException:
        _close(connected)
        raise
    if not connected:
        numbers = {error.errno for error in errors}
        message = "; ".join(error.strerror or str(error) for error in errors)
        raise OSError(numbers.pop(), message) if len(numbers) == 1 else OSError(message)
    _close(connected[1:])
    return connected[0]


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
