"""The client of Docker's API: frames, refusals, and invalid answers."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import anyio
import pytest

from rollouts.sandboxes import SandboxError
from rollouts.sandboxes.docker_api import DockerApi, DockerError, Request


async def _ask(answer: list[bytes], max_bytes: int = 1000) -> tuple[bytes, bytes]:
    """Send a request to a daemon that answers with these packets; return the request and the answer's body."""
    requests = []
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        path = str(Path(folder) / "s")
        listener = await anyio.create_unix_listener(path)

        async def serve(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                requests.append(await stream.receive())
                for packet in answer:
                    await stream.send(packet)

        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, serve)
            body = await DockerApi(path).send(Request("GET", "/a", {"path": "/x y"}), max_bytes=max_bytes)
            group.cancel_scope.cancel()
    return requests[0], body


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        [OK + b"Content-Length: 4\r\n\r\n", b"ab", b"cd"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"],
        [OK + b"Content-Type: application/vnd.docker.raw-stream\r\n\r\nab", b"cd"],
    ],
)
async def test_bodies_of_every_kind(answer: list[bytes]) -> None:
    """With a length, in chunks, or until the connection ends; the query is encoded."""
    request, body = await _ask(answer)
    assert body == b"abcd"
    assert request.startswith(b"GET /v1.41/a?path=%2Fx+y HTTP/1.1\r\nHost: docker\r\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "the daemon closed the connection"),
        ([OK + b"Content-Length: 4\r\n\r\n", b"ab"], "the daemon closed the connection"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"], "the daemon closed the connection"),
        ([b"nonsense\r\n\r\n"], "HttpParserInvalidStatusLineError|HttpParserError"),
        ([b"HTTP/1.1 500 X\r\nContent-Length: 17\r\n\r\n" + b'{"message":"why"}'], "HTTP 500: why"),
        ([b"HTTP/1.1 502 X\r\n\r\nplain"], "HTTP 502: plain"),
        ([OK + b"Content-Length: 1001\r\n\r\n" + bytes(1001)], "got more than 1,000 bytes"),
    ],
)
async def test_an_invalid_answer_is_an_error(answer: list[bytes], words: str) -> None:
    """With the request that got it."""
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match=f"GET /a at .*: ({words})")):
        await _ask(answer)


async def test_a_refusal_has_its_status() -> None:
    """A missing file is not a broken daemon."""
    with pytest.RaisesGroup(pytest.RaisesExc(DockerError, check=lambda error: error.status == 404)):
        await _ask([b"HTTP/1.1 404 X\r\nContent-Length: 2\r\n\r\n{}"])


async def test_a_daemon_that_does_not_answer_is_an_error() -> None:
    """A request has a deadline: a command that waits for it would have none."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:
        path = str(Path(folder) / "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            with anyio.fail_after(5), pytest.raises(SandboxError, match=r"GET /a at .*: no answer within 0\.05 s"):
                await DockerApi(path, seconds=0.05).json("GET", "/a")
