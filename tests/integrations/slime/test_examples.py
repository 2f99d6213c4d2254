"""slime's own examples, unmodified: as custom generate functions behind our rollout function and behind slime's.

Skipped unless ``SLIME_PATH`` names a checkout.
"""

from __future__ import annotations

import gc
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import attrs
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.recipe import Recipe
from rollouts.recipes.configs import retool, search_r1
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.rewards import score
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.training import Prompt, Sample
from tests.integrations.slime.launches import Source
from tests.integrations.slime.sandboxes import SOLVES, sandboxes
from tests.integrations.slime.test_parity import DEFAULTS, start_slime

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]

ROWS = [
    {
        "q": f"question {row}",
        "a": {"ground_truth": {"target": ["4"]}},
        "metadata": {"instance_id": f"issue-{row}", "image": "i", "workdir": "/w", "eval_cmd": command},
    }
    for row, command in enumerate([SOLVES, "make check"])
]

REPLIES: dict[str, Callable[[str], str]] = {
    "search-r1": lambda text: "<answer>4</answer>" if "<information>" in text else "<search>2 + 2</search>",
    "retool": lambda text: "Answer: \\boxed{4}" if "<interpreter>\n" in text else "<code>print(2 + 2)</code>",
    "multi_agent": lambda text: "<think> so </think> Judgment: 1",
    "strands_sglang": lambda text: "It is \\boxed{4}.<|im_end|>" if "<tool_response>" in text else PYTHON,
    "coding_agent_rl": lambda text: f"Part {text.count('<|im_start|>assistant')}.<|im_end|>",
}
"""The replies of the model, by example and by the prompt."""

PYTHON = '<tool_call>\n{"name": "execute_python_code", "arguments": {"code": "print(2 + 2)"}}\n</tool_call><|im_end|>'

TURNS: dict[str, list[list[str]]] = {
    "search-r1": [
        [
            "<think>So.</think><search>2 + 2</search>",
            "<think>Well.</think> <search> 4 </search>",
            "<answer> 4 </answer>",
        ],
        ["hm<|im_end|>", "<search>2</search>", "<answer>5</answer>"],
    ],
    "retool": [
        [
            "<code>print(2 + 2)</code>",
            '<tool_call>{"name": "code_interpreter", "arguments": {"code": "x = 1\\nprint(x)"}}</tool_call><|im_end|>',
            "Answer: \\boxed{4}",
        ],
        ["hm<|im_end|>", "So\n```python\nx = 5\n```", "Answer: \\boxed{5}"],
    ],
}
"""The replies in the turns of question 0 and of question 1, to both the example and our recipe."""


def said(example: str) -> Callable[[str], str]:
    def reply(text: str) -> str:
        question, turn = text.split("<|im_start|>assistant")
        spoken = turn.count("</information>") + turn.count("</interpreter>") + turn.count("action is invalid")
        return TURNS[example]["question 1" in question][spoken]

    return reply


REPLIES |= {f"{example} as ours": said(example) for example in TURNS}

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
    "strands_sglang": {
        "custom_generate_function_path": "examples.strands_sglang.generate_with_strands.generate",
        "custom_rm_path": f"{__name__}.tool_iterations",
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
    },
    "coding_agent_rl": {
        "custom_generate_function_path": "examples.coding_agent_rl.generate.generate",
        "custom_rm_path": f"{__name__}.never",
    },
}

NEEDS = {"retool": ["psutil"], "strands_sglang": ["strands_sglang"], "coding_agent_rl": ["aiohttp"]}
"""The imports of an example: retool for its sandbox, strands_sglang for its agent."""


async def tool_calls(args: Any, sample: Any, **_: Any) -> Any:
    """As retool's own reward, it reads an attribute that the generate function set."""
    return {"score": 1.0 + sample.tool_call_count, "pred": "4"}


async def tool_iterations(args: Any, sample: Any, **_: Any) -> Any:
    """As the example's own reward, it reads attributes that the generate function set."""
    return float(sample.tool_iters) + 10 * sample.tool_calls


async def never(args: Any, given: Any, **_: Any) -> Any:
    assert given == [], "the generate function has set every reward"
    return []


async def half(args: Any, given: Any, **_: Any) -> Any:
    return [0.5] * len(given) if isinstance(given, list) else 0.5


class Questions(Source):
    """The rows as slime's data source would give them."""

    rows: ClassVar[Sequence[dict[str, Any]]] = ROWS

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            row = self.rows[sample.group_index % len(self.rows)]
            sample.prompt, sample.label = row["q"], row["a"]
            sample.metadata = dict(row.get("metadata", {}))
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
            return {"model_path": str(DEMO_MODEL), "weight_version": "3"}
        body = asked.body
        read = body["text"] if "text" in body else codec.decode(body["input_ids"])
        ids = codec.encode(REPLIES[played.example](read)).tolist()
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"] if "input_ids" in body else codec.encode(read)),
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


def played(
    function: Any, args: Namespace, *, evaluation: bool, questions: type[Questions] = Questions
) -> list[dict[str, Any]]:
    """The samples of one call, sorted: multi_agent shuffles the samples of a rollout."""
    start_slime(args)
    output = function(args, 0, questions(args.n_samples_per_prompt), evaluation=evaluation)
    samples = output.data["one"]["samples"] if evaluation else list(leaves(output.samples))
    found = []
    for sample in samples:
        values = {name: value for name, value in vars(sample).items() if name not in ("session_id", "trace")}
        found.append({**values, "rollout_id": sample.index if sample.rollout_id is None else sample.rollout_id})
    return sorted(found, key=lambda values: (values["index"], values["tokens"], values["reward"] or 0.0))


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("example", FLAGS)
def test_an_example_gives_the_same_samples(
    server: tuple[JsonServer, Namespace], text_model: Path, example: str, evaluation: bool, tmp_path: Path
) -> None:
    """Every field and attribute, tokens included, equals that of slime's own rollout function.

    ``coding_agent_rl`` waits for 20 s in each call (it polls its sandbox every 5 s), without using the CPU.
    """
    for package in NEEDS.get(example, ()):
        pytest.importorskip(package, reason=f"slime's example {example} imports it")
    stub, which = server
    which.example = example
    if example == "search-r1":
        search = importlib.import_module("generate_with_search")
        search.SEARCH_R1_CONFIGS["local"]["search_url"] = f"{stub.url}/retrieve"
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"hf_checkpoint": str(text_model), "sglang_router_ip": host, "sglang_router_port": int(port)}
    flags |= {"rollout_max_context_len": 4000, "eval_max_context_len": 4000, **FLAGS[example]}
    module = importlib.import_module("slime.rollout.sglang_rollout")
    build = importlib.import_module("slime.utils.eval_config").build_eval_dataset_configs
    both = []
    for function in (module.generate_rollout, generate_rollout_batch):
        args = Namespace(**{**DEFAULTS, **flags})
        args.eval_datasets = build(args, [{"name": "one", "path": str(rows)}], {})
        if example == "strands_sglang":
            importlib.import_module("strands_sglang").get_client.cache_clear()  # it is one event loop's
        with sandboxes(tmp_path):
            both.append(played(function, args, evaluation=evaluation))
    theirs, ours = both
    assert len(theirs) >= 4
    assert all(values["response_length"] > 0 for values in theirs)
    if example == "coding_agent_rl":  # two conversations a rollout, of which an evaluation returns the verdict alone
        assert len(theirs) == (4 if evaluation else 8)
        assert [values["reward"] for values in theirs] == [1.0] * (len(theirs) // 2) + [0.0] * (len(theirs) // 2)
    assert ours == theirs


def search_r1_recipe(url: str, rows: Path) -> Recipe:
    rows.write_bytes(b"".join(msgspec.json.encode({"question": row["q"], "answer": "4"}) + b"\n" for row in ROWS))
    endpoint = Endpoint(model=str(DEMO_MODEL), base_url=url)
    return search_r1.recipe(endpoint, data=str(rows), retriever=f"{url}/retrieve", keep="all")


def retool_recipe(url: str, rows: Path) -> Recipe:
    rows.write_bytes(b"".join(msgspec.json.encode({"prompt": row["q"], "label": "4"}) + b"\n" for row in ROWS))
    recipe = retool.recipe(Endpoint(model=str(DEMO_MODEL), base_url=url), data=str(rows), style="tags", require=())
    return recipe.with_options(chat_template=RETOOL_TEMPLATE)


RETOOL_TEMPLATE = (
    "{%- for m in messages %}{{ '' if loop.first else '\n' }}<|im_start|>{{ m.role }}{{ m.content }}"
    "{{ '\n' if m.role == 'system' else '' }}<|im_end|>{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '\n<|im_start|>assistant' }}{%- endif %}"
)
"""The output of the template in slime's example, which is rendered without transformers' options."""

OURS: dict[str, tuple[Callable[[str, Path], Recipe], Callable[[Recipe, Prompt], str], dict[str, Any]]] = {
    "search-r1": (search_r1_recipe, lambda recipe, prompt: recipe.renderer().render(prompt.messages), {}),
    "retool": (
        retool_recipe,
        lambda recipe, prompt: prompt.messages[0].content,
        {"custom_rm_path": "generate_with_retool.reward_func"},
    ),
}
"""The recipe, slime's prompt for a prompt of the recipe, and other flags."""


@pytest.mark.parity("equal")
@pytest.mark.parametrize("example", OURS)
def test_our_recipe_gives_the_same_tokens_as_the_example(
    server: tuple[JsonServer, Namespace], example: str, tmp_path: Path
) -> None:
    """Prompts, ids, masks, logprobs, texts and verdicts of two questions in three parts of a turn are equal."""
    pytest.importorskip("math_verify" if example == "retool" else "rollouts")
    stub, which = server
    which.example = f"{example} as ours"
    make, asked, flags = OURS[example]
    recipe = make(stub.url, tmp_path / "rows.jsonl")
    prompts = list(recipe.data_buffer.prompts)

    class Same(Questions):
        rows: ClassVar = [{"q": asked(recipe, prompt), "a": LABELS[example]} for prompt in prompts]

    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port), **flags}
    args = Namespace(**{**DEFAULTS, "rollout_max_context_len": 4000, **FLAGS[example], **flags})
    if example == "search-r1":
        configs = importlib.import_module("generate_with_search").SEARCH_R1_CONFIGS
        configs["local"]["search_url"], configs["max_turns"] = f"{stub.url}/retrieve", 4
    module = importlib.import_module("slime.rollout.sglang_rollout")
    theirs = played(module.generate_rollout, args, evaluation=False, questions=Same)
    start_slime(args)
    gc.collect()  # the sockets of slime's HTTP client end here, where the warning of it is ignored
    assert {values["group_index"] for values in theirs} == {0, 1}
    samples = anyio.run(scored, recipe, prompts)
    for values in theirs:
        ours = samples[values["group_index"]]
        assert ours.failure is None
        start = len(ours) - ours.response_length
        assert ours.tokens == values["tokens"]
        assert ours.loss_mask[start:] == values["loss_mask"]
        assert ours.rollout_log_probs is not None
        assert list(ours.rollout_log_probs)[start:] == values["rollout_log_probs"]
        assert (ours.response, ours.response_length) == (values["response"], values["response_length"])
        assert len(ours.completions) == 3
        right = values["reward"] if example == "search-r1" else float(values["reward"]["score"] > 0)
        assert ours.reward == right == float(values["group_index"] == 0)


LABELS: dict[str, Any] = {"search-r1": {"ground_truth": {"target": ["4"]}}, "retool": "4"}


async def scored(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Sample]:
    numbered = [attrs.evolve(prompt, index=number, group_index=number) for number, prompt in enumerate(prompts)]
    samples = list(await recipe.config.generate_fn(numbered))
    for sample in samples:
        await score(sample, recipe.config.reward_fn, seconds=60)
    return samples
