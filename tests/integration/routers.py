"""Real routers as processes: sglang-router, and its successor smg."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anyio

__all__ = ["SGLANG_ROUTER", "get", "router", "until_ready"]

READY_SECONDS = 120.0
SGLANG_ROUTER = (sys.executable, "-m", "sglang_router.launch_router")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def router(
    workers: Sequence[str], log: Path, *, policy: str = "manual", command: Sequence[str] = SGLANG_ROUTER
) -> Iterator[str]:
    """Run a router as a process; yields its URL."""
    port, metrics = free_port(), free_port()
    line = [*command, "--host", "127.0.0.1", "--port", str(port)]
    line += ["--prometheus-port", str(metrics), "--policy", policy, "--worker-urls", *workers]
    with log.open("wb") as file, subprocess.Popen(line, stdout=file, stderr=file) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text


async def until_ready(url: str, workers: int) -> None:
    """Wait for ``/readiness``, since ``/health`` returns 200 without any worker."""
    with anyio.fail_after(READY_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await get(f"{url}/readiness")
                listed = (await get(f"{url}/workers"))[1]
                healthy = [worker for worker in listed["workers"] if worker.get("is_healthy", True)]
                if status == 200 and answer and len(healthy) == workers:
                    return
            await anyio.sleep(0.2)
