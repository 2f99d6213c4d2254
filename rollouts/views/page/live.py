"""A server for the view of an active run: on the loopback interface, read only.

    GET /             the page, without data
    GET /stamp        a string that changes with the files of the run
    GET /part/NAME    a head, times or a chunk, as in a page that has its data

Invariant: it answers requests for its own address only, so that no web page of another name can read a run through the
browser, and it reads no file but those of the run. The standard library's server is enough for one reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

import attrs

from rollouts.errors import ConfigError, RolloutsError
from rollouts.views.page.page import html_page
from rollouts.views.page.payload import Payload, build_payload
from rollouts.views.page.source import Source

__all__ = ["LiveView", "serving_view"]


@attrs.define
class LiveView:
    """The payloads of sources that change; they are made again when a file has changed.

    Args:
        sources: open the runs, each time they are read.
        decode: from ids to text, or ``None``; one for each run.
    """

    sources: Sequence[Callable[[], Source]]
    decoders: Sequence[Callable[[Any], str] | None]
    _stamp: str = attrs.field(default="", init=False)
    _payloads: list[Payload] = attrs.field(factory=list, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def stamp(self) -> str:
        """A string that changes with the files; makes the payloads of changed files."""
        with self._lock:
            found = [source() for source in self.sources]
            stamp = f"{crc32(repr([source.stamp for source in found]).encode()):08x}"
            if stamp != self._stamp:
                pairs = zip(found, self.decoders, strict=True)
                self._payloads = [build_payload(source, decode) for source, decode in pairs]
                self._stamp = stamp
            return stamp

    def part(self, name: str) -> bytes | None:
        """A head (``head-RUN``), times (``times-RUN``) or a chunk (``chunk-RUN-FIRST``)."""
        if not self._payloads:
            self.stamp()
        for number, payload in enumerate(self._payloads):
            if name == f"head-{number}":
                return payload.head
            if name == f"times-{number}":
                return payload.times
            for chunk in payload.chunks:
                if name == f"chunk-{number}-{chunk.first}":
                    return chunk.data
        return None

    def page(self) -> str:
        """The page without data."""
        return html_page([Payload(b"", [], 0) for _ in self.sources], live=True)


@contextlib.contextmanager
def serving_view(view: LiveView, port: int) -> Iterator[str]:
    """Serve a view on 127.0.0.1; yields its URL.

    Args:
        view: the content.
        port: 0 for a free one.

    Raises:
        ConfigError: the port is in use.
    """
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(view))
    except (OSError, OverflowError) as error:
        raise ConfigError.of("--port", port, f"a free port ({error})") from None
    thread = threading.Thread(target=server.serve_forever, name="rollouts-view", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(view: LiveView) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that the base class calls
            port = self.request.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                self._answer(403, "text/plain", b"this server answers requests for 127.0.0.1 only")
                return
            try:
                self._answer(*self._found())
            except RolloutsError as error:
                self._answer(500, "text/plain; charset=utf-8", str(error).encode())

        def _found(self) -> tuple[int, str, bytes]:
            if self.path == "/":
                return 200, "text/html; charset=utf-8", view.page().encode()
            if self.path == "/stamp":
                return 200, "text/plain", view.stamp().encode()
            part = view.part(self.path.removeprefix("/part/"))
            return (404, "text/plain", b"not found") if part is None else (200, "application/octet-stream", part)

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
            for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a page asks every two seconds."""

    return Handler
