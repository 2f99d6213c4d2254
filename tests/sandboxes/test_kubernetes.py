"""The kind ``kubernetes``: the real client against a strict fake of the API. A cluster was never asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxError, opened
from rollouts.sandboxes.kubernetes import KubernetesSandbox
from tests.sandboxes.kinds import needs_a_machine
from tests.sandboxes.services.kubernetes import KubernetesService
from tests.sandboxes.services.kubernetes import service as served


@pytest.fixture
async def service() -> AsyncIterator[KubernetesService]:
    pytest.importorskip("kubernetes_asyncio")
    async with served() as state:
        yield state


@pytest.mark.extra
@needs_a_machine
async def test_a_pod_is_created_as_asked_and_deleted(service: KubernetesService) -> None:
    """With its limits, without an account and capabilities; nothing of it is left."""
    kind = service.kind(lifetime=90.5, pod={"nodeSelector": {"a": "b"}})
    async with opened(kind) as sandbox:
        assert (await sandbox.exec(["true"])).code == 0
        (body,) = service.created
        spec, (container,) = body["spec"], body["spec"]["containers"]
        assert (spec["activeDeadlineSeconds"], spec["automountServiceAccountToken"]) == (91, False)
        assert (spec["nodeSelector"], spec["securityContext"]["runAsUser"]) == ({"a": "b"}, 1000)
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["resources"]["limits"]["memory"] == str(kind.limits.memory_bytes)
        assert body["metadata"]["labels"] == {"rollouts.sandbox": "1"}
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
async def test_the_log_of_the_cluster_has_no_secret(service: KubernetesService) -> None:
    """The URL of a request for a command has neither the program's words nor its variables."""
    async with opened(service.kind()) as sandbox:
        await sandbox.run(["echo", "a-word"], {"KEY": "a-secret"}, seconds=20)
        await sandbox.write("file", b"a-secret")
    assert service.paths
    assert not [path for path in service.paths if "a-word" in path or "a-secret" in path]


@pytest.mark.extra
@needs_a_machine
async def test_a_connection_that_is_closed_early_is_no_end(service: KubernetesService) -> None:
    """The start of a command is asked for again; what was read of a file is not taken for the file."""
    async with opened(service.kind()) as sandbox:
        await sandbox.write("a", b"text")
        service.cut = True
        with pytest.raises(SandboxError, match="the connection was closed before the command ended"):
            await sandbox.read("a")
        assert await sandbox.read("a") == b"text"


@pytest.mark.extra
@needs_a_machine
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": "none:1"}, r"pod rollouts-.* does not start: Pending: ErrImagePull: none:1"),
        ({"namespace": "other"}, r"KubernetesSandbox.open: namespace 'other': HTTP 403: pods is forbidden"),
        ({"context": "none"}, r"KubernetesSandbox.open: ConfigException: .*none"),
        ({"kubeconfig": "/no/such"}, r"KubernetesSandbox.open: ConfigException: "),
        ({"pod": {"nodeNames": 1}}, r"KubernetesSandbox.open: .*HTTP 422: .*unknown fields \['nodeNames'\]"),
    ],
)
async def test_what_the_cluster_refuses_is_an_error(
    service: KubernetesService, options: dict[str, Any], words: str
) -> None:
    """With its words; no pod is left."""
    with pytest.raises(SandboxError, match=words):
        await service.kind(**options).open()
    assert service.machines == {}


def test_the_containment_names_the_network_and_the_user() -> None:
    """The network is the cluster's; the program is not root."""
    containment = KubernetesSandbox("a").containment()
    assert sorted(containment.not_enforced) == ["cpu_seconds", "network", "processes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": ""}, r"KubernetesSandbox.image: got ''; expected a non-empty string"),
        ({"image": "a", "user": 0}, r"KubernetesSandbox.user: got 0; expected an integer >= 1"),
        (
            {"image": "a", "pod": {"volumes": []}},
            r"KubernetesSandbox.pod: got .*; expected fields of a pod's spec",
        ),
        ({"image": "a", "pod": 5}, r"KubernetesSandbox.pod: got 5; expected fields"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        KubernetesSandbox(**arguments)
