"""A fake of the Docker daemon at a unix socket. It refuses every request that the API's description does not allow.

A container is a folder; a command runs in it under bubblewrap, with the machine's programs. Commands of one container
share no process namespace: ``kill -9 -1`` is what the fake does itself.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
from aiohttp import web

__all__ = ["Daemon", "daemon"]

_CREATE = {"Image", "Entrypoint", "Cmd", "User", "WorkingDir", "Labels", "NetworkDisabled", "HostConfig"}
_HOST = {"NetworkMode", "Memory", "PidsLimit", "CapDrop", "SecurityOpt", "Ulimits", "ExtraHosts"}
_EXEC = {"AttachStdin", "AttachStdout", "AttachStderr", "Tty", "Cmd", "Env", "WorkingDir", "User"}


@attrs.define
class Container:
    folder: Path
    created: dict[str, Any]
    running: bool = False
    processes: list[asyncio.subprocess.Process] = attrs.Factory(list)


@attrs.define
class Daemon:
    """The requests and the state of the fake."""

    folder: Path
    pid: int = 0
    """The number that it reports as process 1 of each container."""
    containers: dict[str, Container] = attrs.Factory(dict)
    execs: dict[str, tuple[Container, dict[str, Any]]] = attrs.Factory(dict)
    codes: dict[str, int] = attrs.Factory(dict)
    removed: list[str] = attrs.Factory(list)
    count: int = 0
    hold: asyncio.Event | None = None
    """The event that the answer to the creation of a container waits for."""

    @property
    def socket(self) -> str:
        return str(self.folder / "docker.sock")


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


@asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    """Serve the fake in a folder."""
    state = Daemon(folder)
    routes = web.RouteTableDef()

    def container(request: web.Request) -> Container:
        found = state.containers.get(request.match_info["id"])
        if found is None:
            text = f'{{"message":"No such container: {request.match_info["id"]}"}}'
            raise web.HTTPNotFound(text=text, content_type="application/json")
        return found

    async def document(request: web.Request, fields: set[str]) -> dict[str, Any]:
        body: dict[str, Any] = await request.json() if request.content_type == "application/json" else {}
        if not body or not body.keys() <= fields:
            text = f'{{"message":"invalid body: {sorted(body.keys() - fields)}"}}'
            raise web.HTTPBadRequest(text=text, content_type="application/json")
        return body

    @routes.post("/v1.41/containers/create")
    async def create(request: web.Request) -> web.Response:
        body = await document(request, _CREATE)
        if not body["HostConfig"].keys() <= _HOST:
            return _refuse(400, f"invalid HostConfig: {sorted(body['HostConfig'])}")
        if body["Image"] != "small:1":
            return _refuse(404, f"No such image: {body['Image']}")
        state.count += 1
        identity = f"{state.count:064x}"
        state.containers[identity] = Container(state.folder / identity, body)
        for name in ("tmp", "home", "etc"):
            (state.folder / identity / name).mkdir(parents=True)
        for path in filter(os.path.islink, ("/bin", "/lib", "/lib64", "/sbin")):
            (state.folder / identity / path[1:]).symlink_to(os.readlink(path))
        if state.hold is not None:
            await state.hold.wait()
        return web.json_response({"Id": identity, "Warnings": []}, status=201)

    @routes.post("/v1.41/containers/{id}/start")
    async def start(request: web.Request) -> web.Response:
        container(request).running = True
        return web.Response(status=204)

    @routes.get("/v1.41/containers/{id}/json")
    async def inspect(request: web.Request) -> web.Response:
        return web.json_response({"State": {"Running": container(request).running, "Pid": state.pid}})

    @routes.put("/v1.41/containers/{id}/archive")
    async def put(request: web.Request) -> web.Response:
        place = container(request).folder / request.query["path"].lstrip("/")
        if not place.is_dir():
            return _refuse(404, f"Could not find the file {request.query['path']} in container")
        if request.content_type != "application/x-tar":
            return _refuse(400, "expected a tar archive")
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as archive:
            archive.extractall(place, filter="fully_trusted")
        return web.Response()

    @routes.get("/v1.41/containers/{id}/archive")
    async def get(request: web.Request) -> web.Response:
        place = container(request).folder / request.query["path"].lstrip("/")
        if not place.exists():
            return _refuse(404, f"Could not find the file {request.query['path']} in container")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(place, place.name)
        return web.Response(body=buffer.getvalue(), content_type="application/x-tar")

    @routes.post("/v1.41/containers/{id}/exec")
    async def create_exec(request: web.Request) -> web.Response:
        body = await document(request, _EXEC)
        if not container(request).running:
            return _refuse(409, "container is not running")
        state.count += 1
        state.execs[f"{state.count:064x}"] = (container(request), body)
        return web.json_response({"Id": f"{state.count:064x}"}, status=201)

    @routes.post("/v1.41/exec/{id}/start")
    async def start_exec(request: web.Request) -> web.StreamResponse:
        await document(request, {"Detach", "Tty"})
        identity = request.match_info["id"]
        holder, body = state.execs[identity]
        answer = web.StreamResponse(headers={"Content-Type": "application/vnd.docker.raw-stream"})
        if body["Cmd"] == ["sh", "-c", "kill -9 -1"]:
            for process in holder.processes:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            state.codes[identity] = 0
            await answer.prepare(request)
            return answer
        search = body["Cmd"][0].startswith("/") or shutil.which(body["Cmd"][0])
        if not search or body["Cmd"][0] == "/":
            kind = "executable file not found in $PATH" if not search else "permission denied"
            return _refuse(400, f'OCI runtime exec failed: exec: "{body["Cmd"][0]}": {kind}')
        line = ["bwrap", "--bind", str(holder.folder), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc"]
        line += ["--dev", "/dev", "--unshare-pid", "--die-with-parent", "--chdir", body["WorkingDir"], "--"]
        process = await asyncio.create_subprocess_exec(
            *line,
            *body["Cmd"],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", **dict(entry.split("=", 1) for entry in body["Env"])},
            start_new_session=True,
        )
        holder.processes.append(process)
        await answer.prepare(request)

        async def copy(source: asyncio.StreamReader | None, which: int) -> None:
            assert source is not None
            while data := await source.read(4096):
                await answer.write(bytes([which, 0, 0, 0]) + len(data).to_bytes(4, "big") + data)

        async with asyncio.TaskGroup() as group:
            group.create_task(copy(process.stdout, 1))
            group.create_task(copy(process.stderr, 2))
        state.codes[identity] = await process.wait()
        if state.codes[identity] < 0:
            state.codes[identity] = 128 - state.codes[identity]
        return answer

    @routes.get("/v1.41/exec/{id}/json")
    async def inspect_exec(request: web.Request) -> web.Response:
        code = state.codes.get(request.match_info["id"])
        return web.json_response({"ExitCode": code, "Running": code is None})

    @routes.delete("/v1.41/containers/{id}")
    async def remove(request: web.Request) -> web.Response:
        holder = container(request)
        if request.query.get("force") != "1":
            return _refuse(409, "You cannot remove a running container")
        for process in holder.processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(holder.folder)
        state.removed.append(request.match_info["id"])
        del state.containers[request.match_info["id"]]
        return web.Response(status=204)

    application = web.Application(client_max_size=1 << 30)
    application.add_routes(routes)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.UnixSite(runner, state.socket).start()
        yield state
    finally:
        await runner.cleanup()
