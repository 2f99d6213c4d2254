"""The kind ``e2b``: the real SDK against a strict fake of the API. E2B itself was never asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxError, opened
from rollouts.sandboxes.e2b import E2BSandbox
from tests.sandboxes.kinds import needs_a_machine
from tests.sandboxes.services.e2b import E2BService
from tests.sandboxes.services.e2b import service as served


@pytest.fixture
async def service() -> AsyncIterator[E2BService]:
    pytest.importorskip("e2b")
    async with served() as state:
        yield state


@pytest.mark.extra
@needs_a_machine
async def test_a_machine_is_created_as_asked_and_deleted(service: E2BService) -> None:
    """With its template, its lifetime, a label and its firewall; nothing of it is left."""
    kind = service.kind(lifetime=90.5, hosts=["gateway.example.org"])
    async with opened(kind) as sandbox:
        assert (await sandbox.exec(["true"])).code == 0
        (body,) = service.created
        assert (body["templateID"], body["timeout"], body["metadata"]) == ("base", 91, {"rollouts.sandbox": "1"})
        assert (body["network"]["allowOut"], body["network"]["denyOut"]) == (["gateway.example.org"], ["0.0.0.0/0"])
        service.machines.popitem()[1].delete()  # as at the end of its lifetime
    assert service.machines == {}


@pytest.mark.extra
@needs_a_machine
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": "none"}, r"E2BSandbox.open: .*: \"404: template 'none' not found\""),
        ({"lifetime": 90000}, r"E2BSandbox.open: .*Timeout cannot be greater than 24 hours"),
        ({"connection": {"api_key": "e2b_" + "1" * 40}}, r"E2BSandbox.open: .*invalid API key"),
        ({"connection": {"api_url": "http://127.0.0.1:9"}}, r"E2BSandbox.open: "),
    ],
)
async def test_what_e2b_refuses_is_an_error(service: E2BService, options: dict[str, Any], words: str) -> None:
    """With its words; and so is a service that is not there."""
    with pytest.raises(SandboxError, match=words):
        await service.kind(**options).open()


@pytest.mark.extra
@needs_a_machine
async def test_a_machine_that_is_gone_is_an_error(service: E2BService) -> None:
    """An error of the sandbox, never an end of the program; closing it is not an error."""
    async with opened(service.kind()) as sandbox:
        service.machines.popitem()[1].delete()
        with pytest.raises(SandboxError, match=r"E2BSandbox.write: .*no token of a sandbox"):
            await sandbox.run(["true"], seconds=20)


def test_the_containment_names_the_network() -> None:
    """The internet, or what the firewall allows; the key is not shown."""
    assert E2BSandbox().containment().not_enforced["network"] == "the internet"
    kind = E2BSandbox(hosts="a.example", networks=["10.0.0.0/8"], connection={"api_key": "secret"})
    assert kind.containment().enforced["network"] == "the service's firewall; allowed: a.example, 10.0.0.0/8"
    assert "secret" not in repr(kind)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"template": ""}, r"E2BSandbox.template: got ''; expected a non-empty string"),
        ({"hosts": ["a b"]}, r"E2BSandbox.hosts: got \('a b',\); expected names of hosts"),
        ({"hosts": ["https://a"]}, r"E2BSandbox.hosts: got .*; expected names of hosts"),
        ({"networks": 5}, r"E2BSandbox.networks: got 5; expected networks as"),
        ({"networks": "a.example"}, r"E2BSandbox.networks: got .*; expected networks as"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        E2BSandbox(**arguments)
