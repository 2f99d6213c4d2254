"""Bodies of requests that a server holds in memory, together at most a number of bytes.

Invariant: bytes count when they arrive, not when a client declares them, until :meth:`Bodies.release`. A request for
which there is no room is refused with 503 and ``Retry-After`` and keeps nothing; its client asks again. A body that
does not arrive in time is refused, so that a client that stops sending does not keep the room of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollouts.base.validators import is_int
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["BODY_SECONDS", "Bodies"]

BODY_SECONDS = 120.0
"""Longest time in which a body arrives."""
_RETRY_SECONDS = 1


class Bodies:
    """The bodies of one server.

    Args:
        most: most bytes of all bodies together.
        seconds: longest time in which a body arrives.

    Attributes:
        held: bytes of all bodies now.
        refused: number of requests for which there was no room.
    """

    def __init__(self, most: int, *, seconds: float = BODY_SECONDS) -> None:
        if not is_int(most, 1):
            raise ConfigError.of("Bodies(most)", most, "a number of bytes >= 1")
        self.most = most
        self._seconds = seconds
        self.held = 0
        self.refused = 0

    def __repr__(self) -> str:
        return f"<Bodies: {self.held:,} of {self.most:,} bytes, {self.refused} refused>"

    async def read(self, request: web.Request, most: int) -> bytes:
        """The body of a request; its length counts until it is released.

        Args:
            request: its body is not read yet.
            most: most bytes of this body.

        Raises:
            aiohttp.web.HTTPException: 413 if it is longer; 408 if it does not arrive in time; 503 without room for it;
                400 if the client left.
        """
        from aiohttp import web  # here: a part of an extra

        body = bytearray()
        if (declared := request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=declared)
        try:
            with anyio.fail_after(self._seconds):
                async for chunk in request.content.iter_any():
                    if len(body) + len(chunk) > most:
                        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body) + len(chunk))
                    if self.held + len(chunk) > self.most:
                        self.refused += 1
                        raise _no_room(self.most)
                    self.held += len(chunk)
                    body += chunk
        except TimeoutError:
            self.held -= len(body)
            raise web.HTTPRequestTimeout(text=f"the body did not arrive within {self._seconds:g} s") from None
        except ConnectionResetError:
            self.held -= len(body)
            raise web.HTTPBadRequest(text="the client left before its body was complete") from None
        except BaseException:
            self.held -= len(body)
            raise
        return bytes(body)

    def release(self, size: int) -> None:
        """Bodies with so many bytes are not needed any more."""
        self.held -= size


def _no_room(most: int) -> web.HTTPServiceUnavailable:
    from aiohttp import web

    text = f"requests in work have {most:,} bytes together, the most that this service holds; ask again"
    return web.HTTPServiceUnavailable(text=text, headers={"Retry-After": str(_RETRY_SECONDS)})
