"""Dumps that slime's own rollout function and ``save_debug_rollout_data`` write, without our door: no alarm.

Skipped unless ``SLIME_PATH`` names a checkout.
"""

from __future__ import annotations

import importlib
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.audit import Weights, audit, reader_of
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import calculator_prompts
from rollouts.integrations.slime.convert import leaves
from rollouts.renderer import Renderer
from rollouts.renderer.tokenizer import load_tokenizer
from rollouts.testing.json_server import Asked, JsonServer
from tests.audit.dumps import model_tokens, said
from tests.integrations.slime.sandboxes import sandboxes
from tests.integrations.slime.test_examples import FLAGS, NEEDS, ROWS, Questions
from tests.integrations.slime.test_examples import server as examples_server
from tests.integrations.slime.test_parity import DEFAULTS, start_slime

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]

HERE = __name__
HEADERS = {"content-type": "application/json"}
server = examples_server


async def names_the_label(args: Any, given: Any, **_: Any) -> Any:
    """``--custom-rm-path``: whether the reply has the answer."""
    if isinstance(given, list):
        return [float(f"is {sample.label}." in sample.response) for sample in given]
    return float(f"is {given.label}." in given.response)


def dumped(args: Namespace, folder: Path, *, evaluation: bool, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    """Play slime's own rollout function once, and write its samples as ``RolloutManager.generate`` and ``eval`` do."""

    class Rows(Questions):
        pass

    Rows.rows = rows
    data = folder / "rows.jsonl"
    data.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    build = importlib.import_module("slime.utils.eval_config").build_eval_dataset_configs
    args.eval_datasets = build(args, [{"name": "one", "path": str(data)}], {})
    start_slime(args)
    play = importlib.import_module("slime.rollout.sglang_rollout").generate_rollout
    output = play(args, 0, Rows(args.n_samples_per_prompt), evaluation=evaluation)
    save = importlib.import_module("slime.observability.rollout_data_utils").save_debug_rollout_data
    samples = output.data if evaluation else list(leaves(output.samples))
    save(str(folder / "dump" / "{rollout_id}.pt"), samples, rollout_id=0, evaluation=evaluation)
    return folder / "dump"


def kind(evaluation: bool) -> str:
    return "evaluation" if evaluation else "training"


def address(url: str, model: Path) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    return {"hf_checkpoint": str(model), "sglang_router_ip": host, "sglang_router_port": int(port)}


@pytest.fixture
def router(engine: str) -> Iterator[str]:
    """The routes that slime asks a router for, in front of the embedded engine."""

    def answer(asked: Asked) -> Any:
        if asked.path == "/workers":
            return {"workers": []}
        request = urllib.request.Request(engine + asked.path, msgspec.json.encode(asked.body), HEADERS)
        with urllib.request.urlopen(request, timeout=60) as response:
            return msgspec.json.decode(response.read())

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(JsonServer(answer)) as server:
        yield server.url


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
def test_a_dump_of_single_turns_agrees_with_the_weights(
    slime_path: Path, router: str, text_model: Path, evaluation: bool, tmp_path: Path
) -> None:
    """slime's own generate function on the embedded engine: also each logprob is that of the model."""
    renderer = Renderer(load_tokenizer(DEMO_MODEL))
    rows = [
        {"q": renderer.render(one.messages), "a": one.label, "metadata": {}}
        for _, one in zip(range(4), calculator_prompts(3), strict=False)
    ]
    flags = {"custom_rm_path": f"{HERE}.names_the_label", "rollout_batch_size": 4, "over_sampling_batch_size": 4}
    args = Namespace(**{**DEFAULTS, **address(router, text_model), **flags})
    dump = dumped(args, tmp_path, evaluation=evaluation, rows=rows)
    weights = Weights(DEMO_MODEL, None, 1.0)
    report = audit(dump, reader_of("slime-pt"), model_tokens=model_tokens(), weights=weights)
    assert said(f"slime, single turn, {kind(evaluation)}", report) == []
    assert report.judged["weights"] == report.rows >= 4


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("example", FLAGS)
def test_a_dump_of_an_example_raises_no_alarm(
    server: tuple[JsonServer, Namespace], text_model: Path, example: str, evaluation: bool, tmp_path: Path
) -> None:
    """slime's examples of several turns, several agents and several conversations, unmodified."""
    for package in NEEDS.get(example, ()):
        pytest.importorskip(package, reason=f"slime's example {example} imports it")
    stub, which = server
    which.example = example
    if example == "search-r1":
        search = importlib.import_module("generate_with_search")
        search.SEARCH_R1_CONFIGS["local"]["search_url"] = f"{stub.url}/retrieve"
    if example == "strands_sglang":
        importlib.import_module("strands_sglang").get_client.cache_clear()  # it is one event loop's
    flags = {"rollout_max_context_len": 4000, "eval_max_context_len": 4000, **FLAGS[example]}
    args = Namespace(**{**DEFAULTS, **address(stub.url, text_model), **flags})
    with sandboxes(tmp_path):
        dump = dumped(args, tmp_path, evaluation=evaluation)
    report = audit(dump, reader_of("slime-pt"), model_tokens=model_tokens())
    assert said(f"slime, {example}, {kind(evaluation)}", report) == []
    assert report.rows >= 4
