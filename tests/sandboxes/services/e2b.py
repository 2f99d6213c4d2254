"""A fake of E2B's API and of the daemon in its machines. It refuses every request that the SDK need not send.

Commands run in :class:`~tests.sandboxes.machines.Folder`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
from aiohttp import web

from rollouts.sandboxes.e2b import E2BSandbox
from tests.sandboxes.machines import Folder, new_folder
from tests.sandboxes.services.http import served

__all__ = ["KEY", "E2BService", "service"]

KEY = "e2b_" + "0" * 40
_TOKEN = "token-of-a-machine"
_BODY = {"templateID", "timeout", "metadata", "envVars", "network", "autoPause", "allow_internet_access", "autoResume"}


@attrs.define
class E2BService:
    """The requests and the state of the fake."""

    url: str = ""
    created: list[dict[str, Any]] = attrs.Factory(list)
    machines: dict[str, Folder] = attrs.Factory(dict)
    lines: list[list[str]] = attrs.Factory(list)
    """Commands, as the daemon starts them."""

    def kind(self, **options: Any) -> E2BSandbox:
        """The kind that speaks with the fake."""
        connection = {"api_url": self.url, "sandbox_url": self.url, "api_key": KEY, "retries": 0}
        return E2BSandbox(connection={**connection, **options.pop("connection", {})}, **options)


@asynccontextmanager
async def service() -> AsyncIterator[E2BService]:
    """Serve the fake."""
    state = E2BService()
    routes = web.RouteTableDef()

    def refused(status: int, message: str) -> web.Response:
        return web.json_response({"code": status, "message": message}, status=status)

    def machine(request: web.Request) -> Folder:
        name = request.headers.get("E2b-Sandbox-Id", "")
        if request.headers.get("X-Access-Token") != _TOKEN or name not in state.machines:
            raise web.HTTPUnauthorized(text=json.dumps({"code": 401, "message": "no token of a sandbox"}))
        return state.machines[name]

    @routes.post("/v2/sandboxes")
    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        if request.headers.get("X-API-Key") != KEY:
            return refused(401, "invalid API key")
        if not body.keys() <= _BODY:
            return refused(400, f"unknown fields: {sorted(body.keys() - _BODY)}")
        if body["templateID"] != "base":
            return refused(404, f"template '{body['templateID']}' not found")
        if not 0 < body["timeout"] <= 86400:
            return refused(400, "Timeout cannot be greater than 24 hours")
        name = f"machine{len(state.created)}"
        state.created.append(body)
        state.machines[name] = new_folder()
        answer = {"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.7"}
        return web.json_response({**answer, "envdAccessToken": _TOKEN}, status=201)

    @routes.delete("/sandboxes/{name}")
    async def delete(request: web.Request) -> web.Response:
        if request.headers.get("X-API-Key") != KEY:
            return refused(401, "invalid API key")
        found = state.machines.pop(request.match_info["name"], None)
        if found is None:
            return refused(404, "no such sandbox")
        found.delete()
        return web.Response(status=204)

    @routes.post("/process.Process/Start")
    async def start(request: web.Request) -> web.StreamResponse:
        folder, data = machine(request), await request.read()
        if request.content_type != "application/connect+json" or data[0] or int.from_bytes(data[1:5]) != len(data) - 5:
            return refused(400, "expected one message of connect+json")
        body = json.loads(data[5:])
        process = body["process"]
        if body.get("stdin") or process["cmd"] != "/bin/bash" or process["args"][:2] != ["-l", "-c"]:
            return refused(400, "expected a command of a shell without standard input")
        state.lines.append(process["args"])
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)

        async def send(event: dict[str, Any], flag: int = 0) -> None:
            text = json.dumps(event).encode()
            await answer.write(bytes([flag]) + len(text).to_bytes(4) + text)

        await send({"event": {"start": {"pid": 7}}})
        code, out, errors = await folder.run(["bash", *process["args"]])
        for name, data in (("stdout", out), ("stderr", errors)):
            for at in range(0, len(data), 1 << 15):
                await send({"event": {"data": {name: base64.b64encode(data[at : at + (1 << 15)]).decode()}}})
        await send({"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}})
        await send({}, 2)
        return answer

    @routes.post("/files")
    async def write(request: web.Request) -> web.Response:
        place = machine(request).place(request.query["path"])
        part = await (await request.multipart()).next()
        assert part is not None
        place.write_bytes(await part.read(decode=False))  # type: ignore[union-attr]
        return web.json_response([{"name": place.name, "path": request.query["path"], "type": "file"}])

    @routes.get("/files")
    async def read(request: web.Request) -> web.Response:
        place = machine(request).place(request.query["path"])
        if not place.is_file():
            return refused(404, f"path '{request.query['path']}' does not exist")
        return web.Response(body=place.read_bytes(), content_type="application/octet-stream")

    async with served(routes) as state.url:
        yield state
        for folder in state.machines.values():
            folder.delete()
