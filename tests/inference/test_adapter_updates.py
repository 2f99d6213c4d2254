"""Updates of LoRA adapters: what is refused before a request, and servers that refuse or already have an adapter."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.dtypes import Endpoint
from rollouts.engine import running_server
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.http.client import HttpClient
from rollouts.inference.adapter_routes import AdapterRoutes
from rollouts.inference.adapters import family_of
from rollouts.inference.weights import update_weights
from rollouts.testing.json_server import Asked, JsonServer
from tests.peft_folders import small_model, write_adapter
from tests.vllm_server import vllm_server

NOWHERE = Endpoint(base_url="http://127.0.0.1:9", lora="math")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", 1, base=small_model())


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Endpoint]:
    async with running_server(small_model()) as url:
        yield Endpoint(base_url=url, lora="math")


async def listed(endpoint: Endpoint) -> dict[str, str]:
    transport = HttpClient(connect_seconds=5.0)
    try:
        return await AdapterRoutes(endpoint, transport).listed(endpoint.base_url[0])
    finally:
        await transport.aclose()


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (NOWHERE, {"name": "maths-v1"}, "update_weights, name: got 'maths-v1'; expected math-vN"),
        (NOWHERE, {"name": "math"}, "update_weights, name: got 'math'; expected math-vN"),
        (NOWHERE, {"name": "math-v1", "while_running": "retract"}, "while_running: got 'retract'"),
        (
            NOWHERE,
            {"name": "math-v1", "version": "1"},
            "got 'version and lora and name'; expected folder and",
        ),
        (attrs.evolve(NOWHERE, lora=None), {"name": "math-v1"}, r"Endpoint\.lora: got None; .*Endpoint\(lora='math'\)"),
    ],
)
async def test_wrong_arguments_are_refused(
    folder: Path, endpoint: Endpoint, fields: dict[str, Any], expected: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=expected):
        await update_weights(endpoint, lora=folder, **fields)


async def test_new_base_weights_are_refused_for_an_endpoint_with_adapters(tmp_path: Path) -> None:
    """The names of its adapters would mean other functions."""
    with pytest.raises(ConfigError, match=r"Endpoint\.lora: got 'math'; expected None for new weights"):
        await update_weights(NOWHERE, tmp_path, "1")


async def test_what_is_not_plain_lora_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    """By the name of the field."""
    folder = write_adapter(tmp_path, 1, base=small_model(), use_dora=True)
    with pytest.raises(ConfigError, match=r"update_weights, lora, .*adapter_config\.json, use_dora: got True"):
        await update_weights(NOWHERE, lora=folder, name="math-v1")


async def test_a_version_needs_a_rising_number_and_another_folder(folder: Path, tmp_path: Path) -> None:
    """A server may read a folder again; and the highest number is the newest for all processes."""
    other = write_adapter(tmp_path / "other", 2, base=small_model())
    async with engine() as endpoint:
        await update_weights(endpoint, lora=folder, name="math-v5")
        with pytest.raises(ConfigError, match=r"name: got 'math-v4'; expected a number above 5"):
            await update_weights(endpoint, lora=other, name="math-v4")
        with pytest.raises(ConfigError, match=r"expected another folder than that of 'math-v5'"):
            await update_weights(endpoint, lora=folder, name="math-v6")
        with pytest.raises(ConfigError, match=r"expected the adapter that was loaded as 'math-v5'"):
            await update_weights(endpoint, lora=other, name="math-v5")
        await update_weights(endpoint, lora=folder, name="math-v5")  # the same again changes nothing
        assert await listed(endpoint) == {"math-v5": str(folder)}


async def test_the_adapter_of_an_earlier_process_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    """Its weights are not known, although it has the name; a newer one is not unloaded, but named in the refusal."""
    other = write_adapter(tmp_path / "other", 2, base=small_model())
    async with engine() as endpoint:
        await update_weights(endpoint, lora=other, name="math-v5")
        again = attrs.evolve(endpoint, base_url=endpoint.base_url[0].replace("127.0.0.1", "localhost"))
        with pytest.raises(EndpointRefused, match=r"has the newer adapter 'math-v5'.*no other was loaded"):
            await update_weights(again, lora=folder, name="math-v4")
        await update_weights(again, lora=folder, name="math-v5")
        assert await listed(endpoint) == {"math-v5": str(folder)}


async def test_of_two_servers_one_refuses(folder: Path, tmp_path: Path) -> None:
    """The error names the state of each, the adapter before stays the newest, and the update can be repeated."""
    refuses = True

    def answer(asked: Asked) -> Any:
        if asked.path == "/load_lora_adapter" and refuses:
            return 400, {"success": False, "error_message": "no memory left"}
        return {"/v1/models": {"data": []}, "/server_info": {"engine": "rollouts"}}.get(asked.path, (404, {}))

    async with engine() as good, JsonServer(lambda asked: answer(asked) or {}) as bad:
        endpoint = Endpoint(base_url=(good.base_url[0], bad.url), lora="math")
        with pytest.raises(EndpointRefused, match=r"no memory left.*has 'math-v1'.*does not have 'math-v1'; no other"):
            await update_weights(endpoint, lora=folder, name="math-v1")
        assert family_of(endpoint).current == ""
        with pytest.raises(EndpointRefused):
            await update_weights(endpoint, lora=folder, name="math-v1")
        assert await listed(good) == {"math-v1": str(folder)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"use_rslora": True}, "use_rslora, which SGLang ignores"),
        ({"targets": ["k_proj"]}, r"changes k_proj of .*self_attn alone: SGLang wants q_proj and v_proj too"),
        ({"targets": ["up_proj"]}, r"changes up_proj of .*mlp alone: SGLang wants gate_proj too"),
    ],
)
async def test_an_adapter_that_sglang_computes_otherwise_is_refused(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    """SGLang would load it without a word; the embedded engine, which has its protocol, computes it."""
    folder = write_adapter(tmp_path / "adapter", 1, base=small_model(), **config)
    async with JsonServer(lambda asked: {"version": "0.5.23"}) as server:
        with pytest.raises(EndpointRefused, match=expected):
            await update_weights(Endpoint(base_url=server.url, lora="math"), lora=folder, name="math-v1")
        assert "/load_lora_adapter" not in [asked.path for asked in server.asked]
    async with engine() as endpoint:
        await update_weights(endpoint, lora=folder, name="math-v1")


async def test_a_vllm_without_runtime_updates_is_refused_with_the_variable(folder: Path) -> None:
    """Its routes do not exist without it."""
    async with vllm_server(small_model(), cpu_loras=0) as server:
        endpoint = Endpoint(provider="vllm", base_url=server.url, lora="math")
        with pytest.raises(EndpointRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
            await update_weights(endpoint, lora=folder, name="math-v1")


@pytest.mark.parametrize("name", ["", "math-v1", "a b", "../math", 3])
def test_a_family_has_a_name_without_a_version(name: Any) -> None:
    """The error says what is expected."""
    with pytest.raises(ConfigError, match=r"lora.*without a version"):
        Endpoint(lora=name)
