"""HTTPS: certificates, and the same HTTP over TLS."""

from __future__ import annotations

import gc
import shutil
import ssl
import subprocess
from pathlib import Path

import anyio
import pytest

from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient
from tests.raw_server import Visit, answer, raw_server

BODY = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate in one file, for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to create a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    key, made, both = folder / "key.pem", folder / "made.pem", folder / "both.pem"
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([openssl, "req", *options.split(), "-keyout", key, "-out", made], check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + made.read_bytes())
    return both


@pytest.fixture
def server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def echo(visit: Visit) -> None:
    while True:
        await visit.say(answer((await visit.request())[1]))


async def refuse(visit: Visit) -> None:
    await visit.something()
    await visit.say(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


async def test_a_trusted_server_is_used(
    certificate: Path, server_side: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``SSL_CERT_FILE`` lists the trusted certificates; the host name must match, and connections are kept."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    transport = HttpClient(connect_seconds=5.0)
    async with raw_server(echo, tls=server_side) as port:
        for _ in range(3):
            assert await transport.post(f"https://localhost:{port}/", BODY, {}) == (200, BODY)
        with pytest.raises(ConnectFailed, match="cannot connect: SSLCertVerificationError") as raised:
            await transport.post(f"https://127.0.0.1:{port}/", BODY, {})
        assert not raised.value.refused
        await transport.aclose()
    gc.collect()


async def test_an_untrusted_server_gets_no_request(server_side: ssl.SSLContext) -> None:
    """Rejected: a self-signed certificate, a server without TLS, and plain HTTP to a TLS server."""
    transport = HttpClient(connect_seconds=5.0)
    async with raw_server(echo, tls=server_side) as port, raw_server(refuse) as plain:
        with pytest.raises(ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await transport.post(f"https://localhost:{port}/", BODY, {})
        with pytest.raises(ConnectFailed, match="cannot connect: SSLError"):
            await transport.post(f"https://127.0.0.1:{plain}/", BODY, {})
        with pytest.raises(ConnectionLost):
            await transport.post(f"http://127.0.0.1:{port}/", BODY, {})
        await transport.aclose()
    gc.collect()


async def test_a_handshake_that_does_not_end_is_given_up() -> None:
    """It ends at the connect deadline, or when the caller is cancelled; the server sees both connections close."""
    ended = 0
    both = anyio.Event()

    async def silent(visit: Visit) -> None:
        nonlocal ended
        await visit.ended()
        ended += 1
        if ended == 2:
            both.set()

    transport = HttpClient(connect_seconds=0.2)
    async with raw_server(silent) as port:
        with pytest.raises(ConnectFailed, match="not within"):
            await transport.post(f"https://127.0.0.1:{port}/", BODY, {})
        with anyio.move_on_after(0.05) as scope:
            await transport.post(f"https://127.0.0.1:{port}/", BODY, {})
        assert scope.cancelled_caught
        with anyio.fail_after(5):
            await both.wait()
        await transport.aclose()
    gc.collect()


async def test_a_body_may_go_on_to_the_end(
    certificate: Path, server_side: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The TLS shutdown ends the body; a cancelled connection is closed at once."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asked, gone = anyio.Event(), anyio.Event()

    async def handle(visit: Visit) -> None:
        _, body = await visit.request()
        if body:
            await visit.say(b"HTTP/1.1 200 OK\r\n\r\n" + body)
            return
        asked.set()
        await visit.ended()
        gone.set()

    transport = HttpClient(connect_seconds=5.0)
    async with raw_server(handle, tls=server_side) as port:
        url = f"https://localhost:{port}/"
        assert await transport.post(url, BODY, {}) == (200, BODY)
        async with anyio.create_task_group() as requests:
            requests.start_soon(transport.post, url, b"", {})
            await asked.wait()
            requests.cancel_scope.cancel()
        with anyio.fail_after(5):
            await gone.wait()
        await transport.aclose()
    gc.collect()
