"""A launch without any of our own keys, over five updates of the weights: slime's rollout function and ours.

The server's replies name its weights: each token of a reply is the number of the last update.
"""

from __future__ import annotations

import importlib
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import attrs
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.engine import DEMO_MODEL
from rollouts.integrations.slime import close_rollouts
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from tests.integration.routers import router, until_ready
from tests.integrations.slime.launches import Source
from tests.integrations.slime.test_parity import DEFAULTS, start_slime
from tests.integrations.slime.test_returned_samples import filled

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]

HERE = __name__
UPDATES = 5
GROUPS = 4
OVER_SAMPLED = {"over_sampling_batch_size": 6}


class Weights:
    """The number of the last update, in place of a model; some prompts are answered at their second attempt only."""

    def __init__(self) -> None:
        self.codec = Codec(load_tokenizer(DEMO_MODEL))
        self.info: dict[str, Any] = {"model_path": "stub"}
        self.begin(has_slow=False)

    def begin(self, *, has_slow: bool) -> None:
        self.has_slow, self.slow = has_slow, 0
        self.asked: set[int] = set()
        self.update(1)

    def update(self, version: int) -> None:
        self.version = version
        self.info["weight_version"] = str(version)

    def reply(self, input_ids: list[int], params: dict[str, Any]) -> list[int]:
        return [self.version] * 6

    def number(self, request: Request) -> int:
        """Of the prompt; a resumed request has more tokens."""
        found = re.search(r"\d+", self.codec.decode(list(request.input_ids)))
        assert found is not None
        return int(found[0])

    async def latency(self, request: Request) -> None:
        number = self.number(request)
        if self.has_slow and number % 3 == 2 and number not in self.asked:
            self.slow += 1
            await anyio.sleep_forever()

    def stale(self, sample: Any) -> int:
        """The trained tokens of other weights."""
        tokens = sample.tokens[-sample.response_length :]
        return sum(bool(bit) and token != self.version for bit, token in zip(sample.loss_mask, tokens, strict=True))


@attrs.frozen
class Served:
    """One worker behind slime's real router."""

    worker: StubServer
    router: str
    weights: Weights


@pytest.fixture(scope="module")
def served(slime_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")
    weights = Weights()
    with start_blocking_portal() as portal:
        stub = StubServer(reply=weights.reply, latency=weights.latency, loads=dict, model_info=weights.info)
        with portal.wrap_async_context_manager(stub) as worker:
            with router([worker.url], tmp_path_factory.mktemp("router") / "log") as url:
                portal.call(until_ready, url, 1)
                yield Served(worker, url, weights)
                close_rollouts()


async def one_request(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A custom generate function that sends one request, as slime's examples do."""
    state = importlib.import_module("slime.rollout.sglang_rollout").GenerateState(args)
    ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession() as session, session.post(url, json={"input_ids": ids}) as response:
        reply = await response.json()
    tokens = reply["output_ids"]
    status = records().sample.Status
    ended = status.ABORTED if reply["meta_info"]["finish_reason"]["type"] == "abort" else status.COMPLETED
    columns = {"tokens": [*ids, *tokens], "response_length": len(tokens), "loss_mask": [1] * len(tokens)}
    columns["weight_versions"] = [reply["meta_info"]["weight_version"]]
    return filled(sample, **columns, rollout_log_probs=[-0.5] * len(tokens), status=ended)


@pytest.mark.parity("equal")
@pytest.mark.parametrize(
    ("flags", "left_over"),
    [
        ({}, False),
        (OVER_SAMPLED, True),
        ({**OVER_SAMPLED, "colocate": True}, True),
        ({**OVER_SAMPLED, "custom_generate_function_path": f"{HERE}.one_request"}, True),
    ],
    ids=["default", "over-sampled", "over-sampled, colocated", "over-sampled, custom generate"],
)
@pytest.mark.parametrize(
    "path",
    ["slime.rollout.sglang_rollout.generate_rollout", "rollouts.integrations.slime.generate_rollout_batch"],
    ids=["slime", "ours"],
)
def test_a_default_launch_has_no_stale_token_and_leaves_no_request(
    served: Served, path: str, flags: dict[str, Any], left_over: bool
) -> None:
    """At each of five returns no request is in flight, and every trained token is of the weights of its call."""
    assert launched(served, path, flags, has_slow=left_over) == [(0, 0)] * UPDATES
    assert bool(served.weights.slow) is left_over


@pytest.mark.parity("equal")
@pytest.mark.parametrize(
    "path",
    ["slime.rollout.sglang_rollout.generate_rollout", "rollouts.integrations.slime.generate_rollout_batch"],
    ids=["slime", "ours"],
)
@pytest.mark.parametrize("function", [None, f"{HERE}.one_request"], ids=["default", "custom generate"])
def test_masked_partial_rollouts_train_no_stale_token(served: Served, path: str, function: str | None) -> None:
    """With ``--mask-offpolicy-in-partial-rollout``; also rollouts that an earlier call completed are masked."""
    flags = {**OVER_SAMPLED, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    found = launched(served, path, {**flags, "custom_generate_function_path": function}, has_slow=True)
    assert found == [(0, 0)] * UPDATES


def test_the_measurement_sees_stale_tokens(served: Served) -> None:
    """With ``rollouts_carry_over`` the same launch trains tokens of older weights; still no request is in flight."""
    flags = {**OVER_SAMPLED, "rollouts_carry_over": True}
    found = launched(served, "rollouts.integrations.slime.generate_rollout_batch", flags, has_slow=True)
    assert [live for _, live in found] == [0] * UPDATES
    assert found[0] == (0, 0)
    assert sum(stale for stale, _ in found[1:]) > 0


def launched(served: Served, path: str, flags: dict[str, Any], *, has_slow: bool) -> list[tuple[int, int]]:
    """The stale tokens of each batch, and the requests in flight when its call returns; then the weights change."""
    weights, worker = served.weights, served.worker
    weights.begin(has_slow=has_slow)
    worker.requests.clear()
    host, port = served.router.removeprefix("http://").split(":")
    place = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port)}
    sizes = {"rollout_batch_size": GROUPS, "over_sampling_batch_size": GROUPS}
    args = Namespace(**{**DEFAULTS, **place, **sizes, "seen": [], **flags})
    start_slime(args)
    rollout_function = importlib.import_module("slime.utils.misc").load_function(path)
    source, found = Source(args.n_samples_per_prompt), []
    for rollout_id in range(UPDATES):
        samples = list(leaves(rollout_function(args, rollout_id, source, evaluation=False).samples))
        assert len(samples) == GROUPS * args.n_samples_per_prompt
        found.append((sum(map(weights.stale, samples)), len(worker.live)))
        weights.asked |= set(map(weights.number, worker.requests))
        weights.update(weights.version + 1)
    return found
