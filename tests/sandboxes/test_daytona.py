"""The kind ``daytona``: the real SDK against a strict fake of the API. Daytona itself was never asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxError, opened
from rollouts.sandboxes.daytona import DaytonaSandbox
from tests.sandboxes.kinds import needs_a_machine
from tests.sandboxes.services.daytona import DaytonaService
from tests.sandboxes.services.daytona import service as served


@pytest.fixture
async def service() -> AsyncIterator[DaytonaService]:
    pytest.importorskip("daytona")
    async with served() as state:
        yield state


@pytest.mark.extra
@needs_a_machine
async def test_a_sandbox_is_created_as_asked_and_deleted(service: DaytonaService) -> None:
    """With its image, sizes, lifetime and firewall; nothing of it is left."""
    kind = service.kind(image="python:3.12", lifetime=90.5, hosts=["a.example"], networks=["10.0.0.0/8"])
    async with opened(kind) as sandbox:
        assert (await sandbox.exec(["true"])).code == 0
        (body,) = service.created
        assert (body["ttlMinutes"], body["autoStopInterval"], body["autoDeleteInterval"]) == (2, 0, 0)
        assert (body["memory"], body["disk"], body["labels"]["rollouts.sandbox"]) == (8, 3, "1")
        assert (body["domainAllowList"], body["networkAllowList"]) == ("a.example", "10.0.0.0/8")
        assert body["buildInfo"]["dockerfileContent"].strip() == "FROM python:3.12"
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"snapshot": "none"}, r"DaytonaSandbox.open: .*Snapshot none not found"),
        ({"snapshot": "broken"}, r"DaytonaSandbox.open: .*no runner"),
        ({"connection": {"api_key": "other"}}, r"DaytonaSandbox.open: .*Invalid credentials"),
    ],
)
async def test_what_daytona_refuses_is_an_error(service: DaytonaService, options: dict[str, Any], words: str) -> None:
    """With its words; a sandbox that does not start is deleted."""
    with pytest.raises(SandboxError, match=words):
        await service.kind(**options).open()
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
async def test_a_sandbox_that_is_gone_is_an_error(service: DaytonaService) -> None:
    """An error of the sandbox, never an end of the program; closing it is not an error."""
    async with opened(service.kind()) as sandbox:
        service.machines.popitem()[1].delete()
        with pytest.raises(SandboxError, match=r"DaytonaSandbox.write: .*404"):
            await sandbox.run(["true"], seconds=20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": ""}, r"DaytonaSandbox.image: got ''; expected a non-empty string"),
        ({"image": "a", "snapshot": "b"}, r"DaytonaSandbox.image: got 'a'; expected None, as there is a snapshot"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        DaytonaSandbox(**arguments)


def test_an_image_has_the_sizes_of_the_limits() -> None:
    """A snapshot has its own; the key is not shown."""
    assert "memory" in DaytonaSandbox(image="a").containment().enforced
    assert "memory" in DaytonaSandbox().containment().not_enforced
    assert "secret" not in repr(DaytonaSandbox(connection={"api_key": "secret"}))
