"""The points against a server of vLLM's protocol, in both modes of its logprobs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointRefused
from rollouts.inference.conformance.points import ask_all
from rollouts.inference.conformance.probe import opened
from rollouts.inference.conformance.sglang import POINTS
from rollouts.inference.conformance.vllm import VLLM_POINTS, VLLMProbe, vllm_conformance_of
from tests.vllm_server import VLLMServer, vllm_server


async def verdicts(server: VLLMServer, *names: str) -> dict[str, str]:
    """The verdicts of some points."""
    points = [point for point in VLLM_POINTS if point.name in names]
    async with opened(VLLMProbe, Endpoint(provider="vllm", base_url=server.url)) as probe:
        return {result.name: result.verdict for result in await ask_all(points, probe)}


async def test_the_stand_in_conforms() -> None:
    """No point fails on which a feature relies; the server scores its replies. More than 2 s of CPU: all points."""
    async with vllm_server() as server:
        endpoint = Endpoint(provider="vllm", base_url=server.url)
        report = await vllm_conformance_of(endpoint, unsafe=True, idle_seconds=0.1)
    assert report.failed == [], str(report)
    no = {result.name for result in report.results if result.verdict == "no"}
    assert no == {"a rid twice", "an unknown field", "top_k does not renormalise"}
    assert (report.server, report.results[-1].came) == ("vLLM 0.32.0", "processed")


async def test_the_other_mode_is_reported() -> None:
    """Raw logprobs are not tempered and not renormalised: the client refuses the parameters for which that matters."""
    async with vllm_server(mode="raw") as server:
        names = ("own score, cold", "temperature scales logprobs", "top_k does not renormalise")
        assert [*(await verdicts(server, *names)).values()] == ["yes", "no", "yes"]


async def test_a_server_without_control_routes_fails_by_name() -> None:
    """Without the development mode there are no pauses and updates: those points fail."""
    async with vllm_server(dev=False) as server:
        found = await verdicts(server, "pause", "prefixes after an update in place")
    assert [*found.values()] == ["FAIL", "FAIL"]


async def test_a_server_of_another_protocol_is_refused(engine_url: str) -> None:
    """Before any point is asked."""
    with pytest.raises(EndpointRefused, match="is not a vLLM server"):
        await vllm_conformance_of(Endpoint(provider="vllm", base_url=engine_url))


def test_the_points_have_the_names_of_sglangs() -> None:
    """One row of the table compares all servers."""
    names = {point.name for point in VLLM_POINTS}
    assert [point.name for point in VLLM_POINTS[:-1]] == [point.name for point in POINTS if point.name in names]
