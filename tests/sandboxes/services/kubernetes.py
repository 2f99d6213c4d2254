"""A fake of the API of Kubernetes, as far as pods need it. It refuses a pod that a cluster would not take.

Commands run in :class:`~tests.sandboxes.machines.Folder`.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
from aiohttp import web

from rollouts.sandboxes.kubernetes import KubernetesSandbox
from tests.sandboxes.machines import Folder, new_folder
from tests.sandboxes.services.http import served

__all__ = ["KubernetesService", "service"]

_PODS = "/api/v1/namespaces/{space}/pods"
_TOKEN = "token-of-the-cluster"
_SPEC = {
    "activeDeadlineSeconds",
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "nodeSelector",
    "restartPolicy",
    "securityContext",
    "volumes",
}
_CONTAINER = {"name", "image", "command", "workingDir", "resources", "securityContext", "volumeMounts"}


@attrs.define
class KubernetesService:
    """The requests and the state of the fake."""

    folder: Path
    url: str = ""
    created: list[dict[str, Any]] = attrs.Factory(list)
    machines: dict[str, Folder] = attrs.Factory(dict)
    paths: list[str] = attrs.Factory(list)
    """The requests for commands, as the log of a cluster has them."""
    cut: bool = False
    """Whether the next command's connection is closed before its end."""

    def kind(self, **options: Any) -> KubernetesSandbox:
        """The kind that speaks with the fake."""
        file = self.folder / "kubeconfig"
        named = {"cluster": {"server": self.url}, "name": "c"}
        user, context = (
            {"user": {"token": _TOKEN}, "name": "u"},
            {"context": {"cluster": "c", "user": "u"}, "name": "x"},
        )
        text = {"clusters": [named], "users": [user], "contexts": [context], "current-context": "x"}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **text}))
        return KubernetesSandbox(**{"image": "small:1", "kubeconfig": str(file)} | options)


@asynccontextmanager
async def service() -> AsyncIterator[KubernetesService]:
    """Serve the fake."""
    with tempfile.TemporaryDirectory() as folder:
        state = KubernetesService(Path(folder))
        routes = web.RouteTableDef()

        def refused(status: int, message: str) -> web.HTTPException:
            text = json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": status})
            kinds = {
                401: web.HTTPUnauthorized,
                403: web.HTTPForbidden,
                404: web.HTTPNotFound,
                422: web.HTTPUnprocessableEntity,
            }
            return kinds[status](text=text, content_type="application/json")

        def machine(request: web.Request) -> Folder:
            if request.headers.get("Authorization") != f"Bearer {_TOKEN}":
                raise refused(401, "Unauthorized")
            name = request.match_info["name"]
            if request.match_info["space"] != "default" or name not in state.machines:
                raise refused(404, f'pods "{name}" not found')
            return state.machines[name]

        def described(name: str, image: str) -> dict[str, Any]:
            status: dict[str, Any] = {"phase": "Running"}
            running: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            if image == "none:1":
                status["phase"] = "Pending"
                running = {"waiting": {"reason": "ErrImagePull", "message": "none:1: not found"}}
            described = {"name": "program", "image": image, "imageID": "", "ready": True, "restartCount": 0}
            status["containerStatuses"] = [{**described, "state": running}]
            return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "status": status}

        @routes.post(_PODS)
        async def create(request: web.Request) -> web.Response:
            if request.headers.get("Authorization") != f"Bearer {_TOKEN}":
                raise refused(401, "Unauthorized")
            space, body = request.match_info["space"], await request.json()
            if space != "default":
                raise refused(403, f'pods is forbidden in the namespace "{space}"')
            (container,) = body["spec"]["containers"]
            unknown = sorted((body["spec"].keys() - _SPEC) | (container.keys() - _CONTAINER))
            if unknown:
                raise refused(422, f"strict decoding error: unknown fields {unknown}")
            volumes = {volume["name"] for volume in body["spec"]["volumes"]}
            if {mount["name"] for mount in container["volumeMounts"]} != volumes:
                raise refused(422, "a volume is not mounted or not there")
            name = body["metadata"]["name"]
            state.created.append(body)
            state.machines[name] = new_folder()
            for mount in container["volumeMounts"]:
                state.machines[name].place(mount["mountPath"]).mkdir(parents=True, exist_ok=True)
            return web.json_response(described(name, container["image"]), status=201)

        @routes.get(_PODS + "/{name}")
        async def read(request: web.Request) -> web.Response:
            machine(request)
            body = next(body for body in state.created if body["metadata"]["name"] == request.match_info["name"])
            return web.json_response(described(body["metadata"]["name"], body["spec"]["containers"][0]["image"]))

        @routes.delete(_PODS + "/{name}")
        async def delete(request: web.Request) -> web.Response:
            found = machine(request)
            if request.query.get("gracePeriodSeconds") != "0":
                raise refused(422, "the fake does not wait")
            found.delete()
            return web.json_response(described(state.machines.popitem()[0], ""))

        @routes.get(_PODS + "/{name}/exec")
        async def execute(request: web.Request) -> web.WebSocketResponse:
            folder, argv = machine(request), request.query.getall("command")
            state.paths.append(request.path_qs)
            if request.query.get("tty") != "False" or request.query.get("container") != "program":
                raise refused(422, "expected the container program, without a terminal")
            socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
            await socket.prepare(request)
            process = await anyio.open_process(folder.line(argv), env={"PATH": "/usr/bin:/bin"})
            if state.cut:
                state.cut = False
                await socket.close()
                return socket

            async def send(source: Any, channel: int) -> None:
                async for data in source:
                    await socket.send_bytes(bytes([channel]) + data)

            async def receive() -> None:
                if request.query.get("stdin") == "True":
                    async for message in socket:
                        with contextlib.suppress(anyio.BrokenResourceError):
                            assert message.data[0] == 0
                            await process.stdin.send(message.data[1:])

            async with process, anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                async with anyio.create_task_group() as outputs:
                    outputs.start_soon(send, process.stdout, 1)
                    outputs.start_soon(send, process.stderr, 2)
                code = await process.wait()
                tasks.cancel_scope.cancel()
            status: dict[str, Any] = {"status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(code)}]
                status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            await socket.send_bytes(b"\3" + json.dumps({"metadata": {}, **status}).encode())
            await socket.close()
            return socket

        async with served(routes) as state.url:
            yield state
            for machine_of in state.machines.values():
                machine_of.delete()
