"""slime's own examples, unmodified: as custom generate functions behind our rollout function and behind slime's.

Skipped unless ``SLIME_PATH`` names a checkout.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.engine import DEMO_MODEL
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.json_server import Asked, JsonServer
from tests.integrations.slime.launches import Source
from tests.integrations.slime.test_parity import DEFAULTS, start_slime

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]

ROWS = [{"q": f"question {row}", "a": {"ground_truth": {"target": ["4"]}}} for row in range(2)]

REPLIES: dict[str, Callable[[str], str]] = {
    "search-r1": lambda text: "<answer>4</answer>" if "<information>" in text else "<search>2 + 2</search>",
    "retool": lambda text: "Answer: \\boxed{4}" if "<interpreter>\n" in text else "<code>print(2 + 2)</code>",
    "multi_agent": lambda text: "<think> so </think> Judgment: 1",
}
"""What the model says, by example and by what it has read."""

FLAGS: dict[str, dict[str, Any]] = {
    "search-r1": {
        "custom_generate_function_path": "generate_with_search.generate",
        "custom_rm_path": "generate_with_search.reward_func",
    },
    "retool": {
        "custom_generate_function_path": "generate_with_retool.generate",
        "custom_rm_path": f"{__name__}.tool_calls",
        "reward_key": "score",
    },
    "multi_agent": {
        "custom_generate_function_path": "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
        "custom_rm_path": f"{__name__}.half",
    },
}


async def tool_calls(args: Any, sample: Any, **_: Any) -> Any:
    """As retool's own reward, it reads an attribute that the generate function set."""
    return {"score": 1.0 + sample.tool_call_count, "pred": "4"}


async def half(args: Any, given: Any, **_: Any) -> Any:
    return [0.5] * len(given) if isinstance(given, list) else 0.5


class Questions(Source):
    """The rows as slime's data source would give them."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            row = ROWS[sample.group_index % len(ROWS)]
            sample.prompt, sample.label = row["q"], row["a"]
        return groups


@pytest.fixture(scope="module")
def server(slime_path: Path) -> Iterator[tuple[JsonServer, Namespace]]:
    """Router, worker and retrieval server in one; the namespace says which example is played."""
    codec, played = Codec(load_tokenizer(DEMO_MODEL)), Namespace(example="")
    for name in FLAGS:
        if str(slime_path / "examples" / name) not in sys.path:
            sys.path.append(str(slime_path / "examples" / name))

    def answer(asked: Asked) -> Any:
        if asked.path == "/workers":
            return {"workers": [{"url": server.url}]}
        if asked.path == "/v1/loads":
            return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        if asked.path == "/retrieve":
            return {"result": [[{"contents": '"Sums"\nTwo and two are 4.'}]]}
        if asked.path != "/generate":
            return {}
        body = asked.body
        read = body["text"] if "text" in body else codec.decode(body["input_ids"])
        ids = codec.encode(REPLIES[played.example](read)).tolist()
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(codec.encode(read)),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": codec.decode(ids), "output_ids": ids, "meta_info": meta}

    with start_blocking_portal() as portal:
        server = JsonServer(answer)
        with portal.wrap_async_context_manager(server):
            yield server, played
            close_rollouts()


def played(function: Any, args: Namespace, *, evaluation: bool) -> list[Any]:
    """The samples of one call, in an order of their own: multi_agent shuffles those of a rollout."""
    start_slime(args)
    output = function(args, 0, Questions(args.n_samples_per_prompt), evaluation=evaluation)
    samples = output.data["one"]["samples"] if evaluation else list(leaves(output.samples))
    found = []
    for sample in samples:
        values = {name: value for name, value in vars(sample).items() if name not in ("session_id", "trace")}
        found.append({**values, "rollout_id": sample.index if sample.rollout_id is None else sample.rollout_id})
    return sorted(found, key=lambda values: (values["index"], values["tokens"], values["reward"] or 0.0))


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("example", FLAGS)
def test_an_example_gives_the_same_samples(
    server: tuple[JsonServer, Namespace], example: str, evaluation: bool, tmp_path: Path
) -> None:
    """Every field and attribute, tokens included, equals that of slime's own rollout function."""
    if example == "retool":
        pytest.importorskip("psutil", reason="the sandbox of slime's retool example needs psutil")
    stub, which = server
    which.example = example
    if example == "search-r1":
        search = importlib.import_module("generate_with_search")
        search.SEARCH_R1_CONFIGS["local"]["search_url"] = f"{stub.url}/retrieve"
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port)}
    flags |= {"rollout_max_context_len": 4000, "eval_max_context_len": 4000, **FLAGS[example]}
    module = importlib.import_module("slime.rollout.sglang_rollout")
    build = importlib.import_module("slime.utils.eval_config").build_eval_dataset_configs
    both = []
    for function in (module.generate_rollout, generate_rollout_batch):
        args = Namespace(**{**DEFAULTS, **flags})
        args.eval_datasets = build(args, [{"name": "one", "path": str(rows)}], {})
        both.append(played(function, args, evaluation=evaluation))
    theirs, ours = both
    assert len(theirs) >= 4
    assert all(values["response_length"] > 0 for values in theirs)
    assert ours == theirs
