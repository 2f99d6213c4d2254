"""A fake of Daytona's API and of the daemon in its sandboxes. It refuses every request that the SDK need not send.

It has no events: the SDK asks for states instead. Commands run in :class:`~tests.sandboxes.machines.Folder`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import attrs
from aiohttp import web

from rollouts.sandboxes.daytona import DaytonaSandbox
from tests.sandboxes.machines import Folder, new_folder
from tests.sandboxes.services.http import served

__all__ = ["DaytonaService", "service"]

_KEY = "dtn_key"
_BODY = {
    "autoDeleteInterval",
    "autoStopInterval",
    "buildInfo",
    "cpu",
    "disk",
    "domainAllowList",
    "env",
    "kvm",
    "labels",
    "memory",
    "name",
    "networkAllowList",
    "networkBlockAll",
    "snapshot",
    "spot",
    "ttlMinutes",
    "volumes",
}


@attrs.define
class DaytonaService:
    """The requests and the state of the fake."""

    url: str = ""
    created: list[dict[str, Any]] = attrs.Factory(list)
    machines: dict[str, Folder] = attrs.Factory(dict)

    def kind(self, **options: Any) -> DaytonaSandbox:
        """The kind that speaks with the fake."""
        connection = {"api_url": f"{self.url}/api", "api_key": _KEY, "target": "us"}
        return DaytonaSandbox(connection={**connection, **options.pop("connection", {})}, **options)


@asynccontextmanager
async def service() -> AsyncIterator[DaytonaService]:
    """Serve the fake."""
    state = DaytonaService()
    routes = web.RouteTableDef()

    def refused(status: int, message: str) -> web.Response:
        return web.json_response({"statusCode": status, "message": message}, status=status)

    def machine(request: web.Request) -> Folder | web.Response:
        if request.headers.get("Authorization") != f"Bearer {_KEY}":
            return refused(401, "Invalid credentials")
        found = state.machines.get(request.match_info["name"])
        return (
            refused(404, f"Sandbox with ID or name {request.match_info['name']} not found") if found is None else found
        )

    def described(name: str, body: dict[str, Any]) -> dict[str, Any]:
        broken = body.get("snapshot") == "broken"
        sizes = {"cpu": 1, "gpu": 0, "memory": body.get("memory", 1), "disk": body.get("disk", 3)}
        shown = {
            "id": name,
            "name": name,
            "organizationId": "o",
            "user": "daytona",
            "env": {},
            "labels": body["labels"],
        }
        shown |= {"public": False, "networkBlockAll": False, "kvm": False, "target": "us", "spot": False, **sizes}
        shown |= {"state": "error" if broken else "started", "errorReason": "no runner" if broken else None}
        return {**shown, "toolboxProxyUrl": f"{state.url}/toolbox"}

    @routes.post("/api/sandbox")
    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        if request.headers.get("Authorization") != f"Bearer {_KEY}":
            return refused(401, "Invalid credentials")
        given = {name for name, value in body.items() if value is not None}
        if not given <= _BODY | {"target"}:
            return refused(400, f"unknown fields: {sorted(given - _BODY)}")
        if body.get("snapshot") == "none":
            return refused(400, "Snapshot none not found")
        state.created.append(body)
        state.machines[body["name"]] = new_folder()
        return web.json_response(described(body["name"], body))

    @routes.get("/api/sandbox/{name}")
    async def read(request: web.Request) -> web.Response:
        found = machine(request)
        return (
            found
            if isinstance(found, web.Response)
            else web.json_response(described(request.match_info["name"], state.created[-1]))
        )

    @routes.delete("/api/sandbox/{name}")
    async def delete(request: web.Request) -> web.Response:
        found = machine(request)
        if isinstance(found, web.Response):
            return found
        found.delete()
        del state.machines[request.match_info["name"]]
        return web.json_response({**described(request.match_info["name"], state.created[-1]), "state": "destroyed"})

    @routes.post("/toolbox/{name}/process/execute")
    async def execute(request: web.Request) -> web.Response:
        found, body = machine(request), await request.json()
        if isinstance(found, web.Response):
            return found
        if not {name for name, value in body.items() if value is not None} <= {"command", "cwd", "timeout"}:
            return refused(400, "variables would be logged")
        code, out, errors = await found.run(["bash", "-c", body["command"]])
        return web.json_response({"exitCode": code, "result": (out + errors).decode(errors="replace")})

    @routes.post("/toolbox/{name}/files/bulk-upload")
    async def write(request: web.Request) -> web.Response:
        found = machine(request)
        if isinstance(found, web.Response):
            return found
        path = ""
        async for part in await request.multipart():
            assert isinstance(part, aiohttp.BodyPartReader)
            if part.name == "files[0].path":
                path = await part.text()
            elif part.name == "files[0].file":
                found.place(path).write_bytes(await part.read(decode=False))
        return web.json_response({})

    @routes.post("/toolbox/{name}/files/bulk-download")
    async def download(request: web.Request) -> web.Response:
        found, body = machine(request), await request.json()
        if isinstance(found, web.Response):
            return found
        (path,) = body["paths"]
        with aiohttp.MultipartWriter("form-data") as writer:
            place = found.place(path)
            part = writer.append(place.read_bytes() if place.is_file() else b"no such file")
            part.set_content_disposition("form-data", name="file" if place.is_file() else "error", filename=path)
        return web.Response(body=writer)

    async with served(routes) as state.url:
        yield state
        for folder in state.machines.values():
            folder.delete()
