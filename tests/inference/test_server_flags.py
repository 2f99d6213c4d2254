"""The flags of a server that change what a run may ask of it."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError
from rollouts.inference.base import ServerInfo
from rollouts.inference.server_flags import check_flags
from rollouts.testing.server import StubServer
from tests.inference.client import Client


@pytest.mark.parametrize(
    ("flags", "info"),
    [
        ({}, {}),
        ({"tokenizer_worker_num": 1}, {"http_workers": 1}),
        ({"skip_tokenizer_init": True}, {"has_tokenizer": False}),
        ({"enable_deterministic_inference": False}, {"honours_seeds": False}),
        ({"grammar_backend": "none"}, {"has_grammars": False, "has_structural_tags": False}),
        ({"grammar_backend": "outlines"}, {"has_grammars": True, "has_structural_tags": False}),
        ({"grammar_backend": "xgrammar"}, {"has_grammars": True, "has_structural_tags": True}),
        ({"enable_deterministic_inference": True, "skip_tokenizer_init": "no"}, {"honours_seeds": True}),
    ],
)
async def test_the_description_has_the_flags(client: Client, flags: dict[str, Any], info: dict[str, Any]) -> None:
    """As ``/server_info`` has them; a server that lacks a field, or has another type, says nothing."""
    served = {"model_path": "stub", "weight_version": "v1", **flags}
    async with StubServer(max_context=99, model_info=served) as server, client.policy(server.url) as policy:
        assert await policy.describe() == ServerInfo("0.5.23", "stub", "v1", 99, **info)


@pytest.mark.parametrize(("name", "value"), [("stop", ("END",)), ("min_new_tokens", 3)])
def test_what_needs_a_tokenizer_is_refused_without(name: str, value: Any) -> None:
    """SGLang would refuse the first request of the run."""
    sampling = SamplingParams(**{name: value})
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{name}: got .*; expected none: .*--skip-tokenizer-init"):
        check_flags(ServerInfo(has_tokenizer=False), sampling)
    check_flags(ServerInfo(has_tokenizer=True), sampling)
    check_flags(ServerInfo(has_tokenizer=False), SamplingParams())


@pytest.mark.parametrize(
    ("info", "logged"),
    [
        (ServerInfo(http_workers=2), "--tokenizer-worker-num 2: weight updates retract"),
        (ServerInfo(version="0.5.21"), "the server is SGLang 0.5.21; expected at least 0.5.22"),
        (ServerInfo(version="0.5.23", http_workers=1, has_tokenizer=True, honours_seeds=False), ""),
    ],
)
def test_what_a_flag_changes_is_logged(info: ServerInfo, logged: str, caplog: pytest.LogCaptureFixture) -> None:
    """Several HTTP workers, and an old version."""
    check_flags(info, SamplingParams())
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.records)
