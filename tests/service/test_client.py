"""The client of one file: batches until the end of the data, over lost answers and restarts of the service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import rollouts.service.client
from rollouts.service import Leases, Rollouts, ServiceError
from rollouts.service.client import Batch, LeaseLost, _unpacked
from rollouts.service.server import Service, serving
from rollouts.service.wire import lease_bytes, read_lease
from rollouts.testing.json_server import Asked, JsonServer
from tests.processors import picture
from tests.service.test_lease_laws import groups, taken
from tests.service.test_server import service_of


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *arguments)


@pytest.mark.parametrize("decoder", [msgspec, None], ids=["msgspec", "standard library"])
async def test_a_loop_takes_trains_and_acknowledges_every_group(
    decoder: ModuleType | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch has the rest; the columns are those of the samples, without a copy."""
    monkeypatch.setattr(rollouts.service.client, "msgspec", decoder)
    async with service_of(tmp_path, 0, 1, 2, 3, 4) as (leases, url):
        leases.finish()

        def train() -> list[tuple[int, ...]]:
            seen = []
            with Rollouts(url, consumer="trainer") as service:
                for step, batch in enumerate(service.batches(groups=2)):
                    assert [row["groups"] for row in service.held()] == [list(batch.groups)]
                    for sample, known in zip(batch.samples, read_lease(batch.body).samples, strict=True):
                        assert np.array_equal(np.asarray(sample.tokens), known.token_column)
                        assert np.array_equal(np.asarray(sample.loss_mask), known.mask_column)
                        assert sample.rollout_log_probs is not None
                        assert np.array_equal(np.asarray(sample.rollout_log_probs), known.logprob_column)
                        assert (sample.reward, sample.group_index) == (known.reward, known.group_index)
                        assert sample.fields == known.fields_to_dict()
                    batch.ack(step=step)
                    seen.append(batch.groups)
                assert service.state()["groups_acknowledged"] == 5
            return seen

        assert await in_thread(train) == [(0, 1), (2, 3), (4,)]


def test_the_client_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """A copy of the file is imported by an interpreter without packages."""
    copy = tmp_path / "client.py"
    copy.write_text(Path(rollouts.service.client.__file__).read_text())
    code = "import client; client.Rollouts('http://localhost:1')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = ['{tmp_path}']; {code}"])
    assert done.returncode == 0


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -1, -32, -33, -128, -129,
        -32769, -(2**31) - 1, -(2**63), 0.1, float("inf"), "", "ä" * 15, "a" * 31, "a" * 32, "a" * 300, "a" * 70_000,
        b"", b"x" * 300, b"x" * 70_000, [], list(range(15)), list(range(70_000)), {}, {str(n): [n] for n in range(20)},
        {str(n): n for n in range(70_000)}, {1: None},
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:8]} {len(value) if hasattr(value, '__len__') else ''}",
)  # fmt: skip
def test_values_are_decoded_as_by_msgspec(value: Any) -> None:
    """Every type and length of MessagePack that the service writes."""
    data = msgspec.msgpack.encode(value)
    assert _unpacked(memoryview(data + b"rest"), 0) == (value, len(data))


async def test_images_arrive_once(tmp_path: Path) -> None:
    """An image that several samples name has its bytes in the message once; a batch without images has none."""
    image = picture(8, 9)
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        seen = groups(0)
        for sample in seen[0]:
            sample.named_images = {image.sha256: image}
        leases.add(seen)
        body = lease_bytes(await taken(leases, 1))
        assert Batch(Rollouts("http://localhost:1"), body).images == {image.sha256: image.data}
        assert body.count(image.data) == 1
        leases.add(groups(1))
        assert Batch(Rollouts("http://localhost:1"), lease_bytes(await taken(leases, 1))).images == {}


async def test_lost_answers_are_asked_for_again() -> None:
    """Answers of a proxy whose service restarts are repeated; a refusal is raised at once, with its text."""
    answers: list[Any] = [(503, {}), (502, {}), (504, {}), (200, {"leases": []}), (422, {"error": {"message": "no"}})]

    def answer(asked: Asked) -> Any:
        return answers.pop(0)

    async with JsonServer(answer) as server:

        def ask() -> None:
            with Rollouts(server.url) as service:
                assert service.held() == []
                with pytest.raises(ServiceError, match=r"^no$"):
                    service.held()

        await in_thread(ask)


async def test_a_wait_is_as_long_as_the_caller_says(tmp_path: Path) -> None:
    """Also where the service ends its wait sooner; without a wait, it is asked once."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0))
        answers: list[Any] = [(204, b""), (204, b""), (200, lease_bytes(await taken(leases, 1))), (204, b"")]
    async with JsonServer(lambda asked: answers.pop(0)) as server:

        def ask() -> None:
            with Rollouts(server.url) as service:
                batch = service.take(1, wait_seconds=60)
                assert batch is not None
                assert batch.groups == (0,)
                assert service.take(1) is None

        await in_thread(ask)
    waits = [asked.body["wait_s"] for asked in server.asked]
    assert waits == sorted(waits, reverse=True)
    assert len(waits) == 4


async def test_patience_ends(tmp_path: Path) -> None:
    """A service that never answers is an error that names its address."""

    def ask() -> None:
        with pytest.raises(ServiceError, match=r"http://127.0.0.1:9 did not answer for 0.2 s: ConnectionRefused"):
            Rollouts("http://127.0.0.1:9", patience=0.2).state()

    await in_thread(ask)


async def test_a_restart_ends_a_lease_and_keeps_acknowledgements(tmp_path: Path) -> None:
    """The loop waits for the service; the batch in its hands is lost, an acknowledged batch is not."""
    port = 0
    state: dict[str, Any] = {}

    async def lived(*steps: Callable[[], Any]) -> None:
        nonlocal port
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.restore(groups(0, 1))
            async with serving(Service(leases), port=port) as url:
                port = int(url.rpartition(":")[2])
                state.setdefault("service", Rollouts(url, consumer="trainer"))
                for step in steps:
                    await in_thread(step)

    def take_both() -> None:
        state["first"], state["second"] = (state["service"].take(1) for _ in range(2))
        state["first"].ack()

    def acknowledge_again() -> None:
        state["first"].ack()
        with pytest.raises(LeaseLost):
            state["second"].ack()
        state["second"].release()
        assert state["service"].held() == []
        assert state["service"].take(1).groups == state["second"].groups
        state["service"].close()

    await lived(take_both)
    await lived(acknowledge_again)


def test_an_address_that_is_not_http_is_refused() -> None:
    """Its text is in the error."""
    with pytest.raises(ValueError, match=r"url: got 'localhost:8700'; expected http://HOST:PORT"):
        Rollouts("localhost:8700")
