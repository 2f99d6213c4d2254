"""The kind ``kubernetes``: one pod of a cluster for each rollout, through ``kubernetes_asyncio``.

Invariant: the pod is deleted when the sandbox is closed; after ``lifetime`` the cluster ends its processes, and keeps
the ended pod until its garbage collection. Its workspace is ``/workspace``. The program is a user without
capabilities. The pod is given no account of the cluster.

A pod and not a job: a job would start another pod where one fails. It was tested with the real client against a
strict fake of the API, never against a cluster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs

from rollouts.base.validators import check, integer
from rollouts.errors import shortened
from rollouts.sandboxes.base import FIRST_PROCESS, NON_EMPTY, SandboxError
from rollouts.sandboxes.remote import Machine, RemoteSandbox, sdk

__all__ = ["KubernetesSandbox"]

_FOLDERS = ("/workspace", "/home/agent", "/tmp")
_OURS = (
    "activeDeadlineSeconds",
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "restartPolicy",
    "securityContext",
    "volumes",
)
_BROKEN = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
"""Why a container waits, if waiting longer does not help."""
_POLL_SECONDS = 0.5
_CHUNK = 1 << 16
_STDIN, _STDOUT, _STATUS = 0, 1, 3
"""Channels of the protocol of commands."""


def _is_pod(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and name not in _OURS for name in value)


@attrs.frozen
class KubernetesSandbox(RemoteSandbox):
    """Pods of a cluster."""

    image: str = attrs.field(validator=NON_EMPTY)
    """Name of an image that the cluster can pull."""
    namespace: str = attrs.field(default="default", kw_only=True, validator=NON_EMPTY)
    kubeconfig: str | None = attrs.field(default=None, kw_only=True)
    """A file of kubectl; by default ``KUBECONFIG``, ``~/.kube/config``, or in a pod that of its account."""
    context: str | None = attrs.field(default=None, kw_only=True)
    """The cluster in this file; by default the current one."""
    user: int = attrs.field(default=1000, kw_only=True, validator=integer(1))
    """User and group of the program."""
    pod: Mapping[str, Any] = attrs.field(
        factory=dict,
        kw_only=True,
        validator=check(f"fields of a pod's spec, none of {', '.join(_OURS)}", _is_pod),
    )
    """Further fields of the pod's spec, e.g. ``{"runtimeClassName": "gvisor"}``."""

    async def _create(self) -> Machine:
        stream = await sdk(type(self).__name__, "kubernetes_asyncio.stream", "kubernetes")
        client = await sdk(type(self).__name__, "kubernetes_asyncio.client", "kubernetes")
        refused = client.exceptions.ApiException
        configuration = await self._configuration(client)
        name = f"rollouts-{secrets.token_hex(8)}"
        api, sockets = client.ApiClient(configuration), stream.WsApiClient(configuration, heartbeat=15)
        machine = _Pod(client.CoreV1Api(api), client.CoreV1Api(sockets), name, self.namespace, refused)
        try:
            await machine.api.create_namespaced_pod(self.namespace, self._pod(name))
            await machine.started()
        except BaseException as error:
            with anyio.CancelScope(shield=True), contextlib.suppress(refused):
                await machine.delete()
            if isinstance(error, refused):
                refusal = f"namespace {self.namespace!r}: HTTP {error.status}: {_message(error.body)}"
                raise SandboxError(f"KubernetesSandbox.open: {refusal}") from error
            raise
        return machine

    async def _configuration(self, client: Any) -> Any:
        config = await sdk(type(self).__name__, "kubernetes_asyncio.config", "kubernetes")
        configuration = client.Configuration()
        if self.kubeconfig is None and self.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=self.kubeconfig, context=self.context, client_configuration=configuration
            )
        return configuration

    def _pod(self, name: str) -> dict[str, Any]:
        folders = [(f"folder{number}", path) for number, path in enumerate(_FOLDERS)]
        limits = {
            "memory": str(self.limits.memory_bytes),
            "ephemeral-storage": str(len(_FOLDERS) * self.limits.disk_bytes),
        }
        container = {
            "name": "program",
            "image": self.image,
            "command": list(FIRST_PROCESS),
            "workingDir": "/",
            "resources": {"limits": limits, "requests": {"ephemeral-storage": "0"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in folders],
        }
        size = {"sizeLimit": str(self.limits.disk_bytes)}
        spec = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": math.ceil(self.lifetime),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": self.user,
                "runAsGroup": self.user,
                "fsGroup": self.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": volume, "emptyDir": size} for volume, _ in folders],
            **self.pod,
        }
        labels = {"rollouts.sandbox": "1"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

    def _enforced(self) -> Mapping[str, str]:
        return {
            "memory": "a control group",
            "disk": "the cluster ends a pod that has more",
            "privileges": "no capability, not root",
        }

    def _not_enforced(self) -> Mapping[str, str]:
        return {
            "processes": "what the cluster allows each pod",
            "network": "what the cluster's policies allow pods with the label rollouts.sandbox=1",
        }


def _message(body: Any) -> str:
    """The message of the API: its answers are JSON."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return shortened(body)


@attrs.frozen
class _Pod:
    """A pod, with a client for requests and one for commands."""

    api: Any
    _sockets: Any
    _name: str
    _namespace: str
    _refused: type[Exception]

    async def started(self) -> None:
        """Wait until the container runs."""
        while True:
            status = (await self.api.read_namespaced_pod(self._name, self._namespace)).status
            states = [state.state for state in status.container_statuses or () if state.state is not None]
            if status.phase == "Running" and any(state.running for state in states):
                return
            broken = [state.waiting for state in states if state.waiting and state.waiting.reason in _BROKEN]
            if broken or status.phase in ("Succeeded", "Failed"):
                why = f"{broken[0].reason}: {broken[0].message}" if broken else f"{status.reason}: {status.message}"
                raise SandboxError(f"pod {self._name} does not start: {status.phase}: {why}")
            await anyio.sleep(_POLL_SECONDS)

    async def execute(self, script: str) -> str:
        return (await self._exec(["sh", "-c", script])).decode(errors="replace")

    async def upload(self, path: str, data: bytes) -> None:
        # The protocol cannot close standard input: the size is its end.
        script = 'head -c "$1" > "$2" && wc -c < "$2"'
        written = (await self._exec(["sh", "-c", script, "sh", str(len(data)), path], data)).strip()
        if written != str(len(data)).encode():
            raise SandboxError(f"path {path!r}: {written.decode(errors='replace')} bytes were written, of {len(data)}")

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._exec(["head", "-c", str(max_bytes + 1), path])

    async def delete(self) -> None:
        try:
            await self.api.delete_namespaced_pod(self._name, self._namespace, grace_period_seconds=0)
        except self._refused as error:
            if getattr(error, "status", None) != 404:
                raise
        finally:
            await self.api.api_client.close()
            await self._sockets.api_client.close()

    async def _exec(self, argv: Sequence[str], stdin: bytes = b"") -> bytes:
        """Run a command; return its standard output."""
        opening = await self._sockets.connect_get_namespaced_pod_exec(
            self._name,
            self._namespace,
            command=list(argv),
            container="program",
            stdin=bool(stdin),
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
        out = bytearray()
        async with opening as socket, anyio.create_task_group() as tasks:

            async def send() -> None:
                for start in range(0, len(stdin), _CHUNK):
                    await socket.send_bytes(bytes([_STDIN]) + stdin[start : start + _CHUNK])

            tasks.start_soon(send)
            async for message in socket:
                data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
                if data[:1] == bytes([_STDOUT]):
                    out += data[1:]
                elif data[:1] == bytes([_STATUS]):
                    status = json.loads(data[1:])
                    if status.get("status") != "Success" and status.get("reason") != "NonZeroExitCode":
                        raise SandboxError(f"pod {self._name}: {status.get('message')}")
                    tasks.cancel_scope.cancel()
                    return bytes(out)
        raise SandboxError(f"pod {self._name}: the connection was closed before the command ended")
