"""A fake of Modal's control plane and of the command router of its sandboxes, on one port. Both speak gRPC.

It refuses every call, field and option that the SDK need not send. Commands run in
:class:`~tests.sandboxes.machines.Folder`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import anyio
import anyio.abc
import attrs

from rollouts.sandboxes.modal import ModalSandbox
from tests.sandboxes.machines import Folder, new_folder

__all__ = ["ModalService", "service"]

_KEY, _SECRET = "ak-key", "as-secret"
_TOKEN = f"e30.{base64.urlsafe_b64encode(json.dumps({'exp': 1 << 40}).encode()).decode()}.signature"
_CHUNK = 1 << 15


@attrs.define
class _Command:
    """A command of the router, whose outputs are read from any offset."""

    process: anyio.abc.Process
    out: bytearray = attrs.Factory(bytearray)
    written: int = 0


@attrs.define
class ModalService:
    """The requests and the state of the fake."""

    key: str = _KEY
    """The key that it expects."""
    apps: list[str] = attrs.Factory(list)
    created: list[Any] = attrs.Factory(list)
    """Requests for sandboxes."""
    machines: dict[str, Folder] = attrs.Factory(dict)
    lines: list[list[str]] = attrs.Factory(list)
    """Commands, as the router starts them."""

    def kind(self, **options: Any) -> ModalSandbox:
        """The kind that speaks with the fake, as the environment names it."""
        return ModalSandbox(**options)


@asynccontextmanager
async def service() -> AsyncIterator[ModalService]:
    """Serve the fake, and let the environment name it to the SDK."""
    import modal
    from google.protobuf.message_factory import GetMessageClass
    from grpclib import GRPCError, Status
    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server, Stream
    from modal_proto import api_pb2 as api
    from modal_proto import task_command_router_pb2 as router

    state = ModalService()
    commands: dict[str, _Command] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    calls: dict[str, Handler] = {}
    services = {api: "ModalClient", router: "TaskCommandRouter"}

    def served(proto: Any) -> Callable[[Callable[..., Awaitable[Any]]], None]:
        """Serve a function as the call of its name. One without an answer sends its own."""

        def register(function: Callable[..., Awaitable[Any]]) -> None:
            method = proto.DESCRIPTOR.services_by_name[services[proto]].methods_by_name[function.__name__]

            async def handle(stream: Stream[Any, Any]) -> None:
                sent = stream.metadata
                if proto is router:
                    allowed = sent.get("authorization") == f"Bearer {_TOKEN}"
                else:
                    allowed = (sent.get("x-modal-token-id"), sent.get("x-modal-token-secret")) == (state.key, _SECRET)
                    allowed &= not method.name.endswith("V2") or sent.get("x-modal-auth-token") == _TOKEN
                if not allowed:
                    raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
                answer = await function(await stream.recv_message(), stream)
                if answer is not None:
                    await stream.send_message(answer)

            cardinality = Cardinality.UNARY_STREAM if method.server_streaming else Cardinality.UNARY_UNARY
            types = (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
            calls[f"/{method.containing_service.full_name}/{method.name}"] = Handler(handle, cardinality, *types)

        return register

    def only(message: Any, *names: str) -> None:
        """Refuse a message that has other fields."""
        others = sorted({field.name for field, _ in message.ListFields()} - {*names})
        if others:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{message.DESCRIPTOR.name}: unexpected fields: {others}")

    def found(table: dict[str, Any], what: str, name: str) -> Any:
        if name not in table:
            raise GRPCError(Status.NOT_FOUND, f"{what} {name!r} not found")
        return table[name]

    @served(api)
    async def AuthTokenGet(request: Any, _: Any) -> Any:  # noqa: N802
        return api.AuthTokenGetResponse(token=_TOKEN)

    @served(api)
    async def AppGetOrCreate(request: Any, _: Any) -> Any:  # noqa: N802
        if request.object_creation_type != api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found")
        state.apps.append(request.app_name)
        return api.AppGetOrCreateResponse(app_id="ap-1")

    @served(api)
    async def EnvironmentGetOrCreate(request: Any, _: Any) -> Any:  # noqa: N802
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    @served(api)
    async def ImageGetOrCreate(request: Any, _: Any) -> Any:  # noqa: N802
        only(request.image, "dockerfile_commands", "gpu_config", "image_registry_config")
        (line,) = request.image.dockerfile_commands
        word, name = line.split()
        result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        if word != "FROM" or name == "none:1":
            result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_FAILURE, exception=f"{name}: not found")
        return api.ImageGetOrCreateResponse(image_id=f"im-{name}", result=result)

    @served(api)
    async def ImageFromId(request: Any, _: Any) -> Any:  # noqa: N802
        if request.image_id != "im-built":
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id!r} not found")
        return api.ImageFromIdResponse(image_id=request.image_id)

    @served(api)
    async def SandboxCreateV2(request: Any, _: Any) -> Any:  # noqa: N802
        only(request, "app_id", "definition", "tags")
        names = ("entrypoint_args", "image_id", "network_access", "open_ports", "resources", "timeout_secs")
        only(request.definition, *names)
        only(request.definition.resources, "gpu_config", "memory_mb", "memory_mb_max")
        if not 0 < request.definition.timeout_secs <= 86400:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be at most 24 hours")
        name = f"ta-{len(state.created)}V"
        state.created.append(request)
        state.machines[name] = new_folder()
        access = api.CommandRouterAccess(jwt=_TOKEN, url=url)
        return api.SandboxCreateV2Response(sandbox_id=f"sb-{name}", task_id=name, command_router_access=access)

    @served(api)
    async def SandboxTerminateV2(request: Any, _: Any) -> Any:  # noqa: N802
        found(state.machines, "Sandbox", request.sandbox_id.removeprefix("sb-")).delete()
        del state.machines[request.sandbox_id.removeprefix("sb-")]
        return api.SandboxTerminateResponse()

    @served(router)
    async def TaskExecStart(request: Any, _: Any) -> Any:  # noqa: N802
        folder = found(state.machines, "Task", request.task_id)
        only(request, "task_id", "exec_id", "command_args", "stdout_config", "stderr_config", "timeout_secs", "workdir")
        if state.created[-1].definition.image_id == "im-broken:1":
            raise GRPCError(Status.FAILED_PRECONDITION, "the container has crashed")
        if request.workdir != "/" or request.stderr_config != router.TASK_EXEC_STDERR_CONFIG_DEVNULL:
            raise GRPCError(Status.INVALID_ARGUMENT, "expected a command in / without standard error")
        state.lines.append([*request.command_args])
        line = folder.line(request.command_args)

        async def start() -> None:
            process = await anyio.open_process(
                line, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"}, start_new_session=True
            )
            commands[request.exec_id] = _Command(process)

        await asyncio.shield(start())  # asyncio loses the pipes of a process whose start is cancelled
        return router.TaskExecStartResponse()

    @served(router)
    async def TaskExecStdinWrite(request: Any, _: Any) -> Any:  # noqa: N802
        command = found(commands, "Exec", request.exec_id)
        if request.offset != command.written:
            raise GRPCError(Status.OUT_OF_RANGE, f"offset: got {request.offset}; expected {command.written}")
        command.written += len(request.data)
        if command.process.returncode is not None:
            raise GRPCError(Status.FAILED_PRECONDITION, "the command has ended")
        await command.process.stdin.send(request.data)
        if request.eof:
            await command.process.stdin.aclose()
        return router.TaskExecStdinWriteResponse()

    @served(router)
    async def TaskExecStdioRead(request: Any, stream: Any) -> None:  # noqa: N802
        command = found(commands, "Exec", request.exec_id)
        if request.file_descriptor != router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT:
            raise GRPCError(Status.INVALID_ARGUMENT, "standard error is not kept")
        sent = request.offset
        while True:
            while sent < len(command.out):
                data = bytes(command.out[sent : sent + _CHUNK])
                await stream.send_message(router.TaskExecStdioReadResponse(data=data))
                sent += len(data)
            try:
                command.out += await command.process.stdout.receive()
            except anyio.EndOfStream:
                return

    class Calls:
        def __mapping__(self) -> dict[str, Handler]:
            return calls

    server = Server([Calls()])
    await server.start(sock=listener)
    try:
        with patch.dict(os.environ, MODAL_SERVER_URL=url, MODAL_TOKEN_ID=_KEY, MODAL_TOKEN_SECRET=_SECRET):
            try:
                yield state
            finally:  # the SDK keeps its client for the next one, which is another service
                await (await modal.Client.from_env.aio()).close.aio()
    finally:
        server.close()
        await server.wait_closed()
        for folder in state.machines.values():
            folder.delete()
        for command in commands.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
            async for _ in command.process.stdout:  # its pipe is closed when all that have it have ended
                pass
            await command.process.aclose()
