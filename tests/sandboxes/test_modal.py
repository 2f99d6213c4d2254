"""The kind ``modal``: the real SDK against a strict fake of the API. Modal itself was never asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxError, SandboxLimits, opened
from rollouts.sandboxes.modal import ModalSandbox
from tests.sandboxes.kinds import needs_a_machine
from tests.sandboxes.services.modal import ModalService
from tests.sandboxes.services.modal import service as served


@pytest.fixture
async def service() -> AsyncIterator[ModalService]:
    pytest.importorskip("modal")
    async with served() as state:
        yield state


@pytest.mark.extra
@needs_a_machine
async def test_a_sandbox_is_created_as_asked_and_deleted(service: ModalService) -> None:
    """With its image, memory, lifetime, label and firewall; nothing of it is left."""
    limits = SandboxLimits(memory_bytes=(64 << 20) + 1)
    kind = service.kind(lifetime=90.5, hosts=["a.example"], networks=["10.0.0.0/8"], limits=limits, app="mine")
    async with opened(kind) as sandbox:
        assert (await sandbox.exec(["true"])).code == 0
        (request,) = service.created
        definition, access = request.definition, request.definition.network_access
        assert (service.apps, definition.image_id, definition.timeout_secs) == (["mine"], "im-python:3.12", 91)
        assert (definition.resources.memory_mb, definition.resources.memory_mb_max) == (65, 65)
        assert [(tag.tag_name, tag.tag_value) for tag in request.tags] == [("rollouts.sandbox", "1")]
        assert (access.network_access_type, access.allowed_domains, access.allowed_cidrs) == (
            access.ALLOWLIST,
            ["a.example"],
            ["10.0.0.0/8"],
        )
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
@pytest.mark.parametrize(
    ("hosts", "network"), [(None, "OPEN"), ([], "BLOCKED"), (["gateway.example.org"], "ALLOWLIST")]
)
async def test_the_firewall_is_that_of_the_settings(
    service: ModalService, hosts: list[str] | None, network: str
) -> None:
    """Nothing limited, nothing allowed, or what is allowed; a built image by its id; little memory is reserved."""
    async with opened(service.kind(hosts=hosts, image="im-built")):
        (request,) = service.created
        access = request.definition.network_access
        assert access.network_access_type == access.NetworkAccessType.Value(network)
        assert (access.allowed_domains, access.allowed_cidrs) == (hosts or [], [])
        resources = request.definition.resources
        assert (resources.memory_mb, resources.memory_mb_max) == (128, 8192)  # what is reserved, and the limit
        assert request.definition.image_id == "im-built"


@pytest.mark.extra
@needs_a_machine
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": "none:1"}, r"ModalSandbox.open: ImageBuildError: .*none:1: not found"),
        ({"image": "im-none"}, r"ModalSandbox.open: NotFoundError: .*Image 'im-none' not found"),
        ({"image": "broken:1"}, r"ModalSandbox.open: ConflictError: .*the container has crashed"),
        ({"lifetime": 90000}, r"ModalSandbox.open: .*timeout must be at most 24 hours"),
    ],
)
async def test_what_modal_refuses_is_an_error(service: ModalService, options: dict[str, Any], words: str) -> None:
    """With its words; a sandbox that runs no command is deleted."""
    with pytest.raises(SandboxError, match=words):
        await service.kind(**options).open()
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
async def test_a_wrong_key_is_an_error(service: ModalService) -> None:
    """With Modal's words."""
    service.key = "ak-other"
    with pytest.raises(SandboxError, match=r"ModalSandbox.open: AuthError: 'Token validation failed'"):
        await service.kind().open()


@pytest.mark.extra
@needs_a_machine
async def test_a_sandbox_that_is_gone_is_an_error(service: ModalService) -> None:
    """An error of the sandbox, never an end of the program; closing it is not an error."""
    async with opened(service.kind()) as sandbox:
        service.machines.popitem()[1].delete()
        with pytest.raises(SandboxError, match=r"ModalSandbox.write: NotFoundError: .*Task 'ta-0V' not found"):
            await sandbox.run(["true"], seconds=20)


@pytest.mark.extra
@needs_a_machine
async def test_a_large_file_is_sent_in_pieces(service: ModalService) -> None:
    """And is whole; the command line that writes it names no content."""
    data = bytes(range(256)) * (10 << 10)
    async with opened(service.kind()) as sandbox:
        await sandbox.write("big", data)
        assert await sandbox.read("big") == data
    assert max(len(word) for line in service.lines for word in line) < 10_000


def test_the_containment_names_the_network_and_the_memory() -> None:
    """The internet, or what the firewall allows; a limit of the memory, and none of the disk."""
    assert ModalSandbox().containment().not_enforced["network"] == "the internet"
    containment = ModalSandbox(hosts="a.example").containment()
    assert containment.enforced["network"] == "the service's firewall; allowed: a.example"
    assert "memory" in containment.enforced
    assert "disk" in containment.not_enforced


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": ""}, r"ModalSandbox.image: got ''; expected a non-empty string"),
        ({"app": None}, r"ModalSandbox.app: got None; expected a non-empty string"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        ModalSandbox(**arguments)
