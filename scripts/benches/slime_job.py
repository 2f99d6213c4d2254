"""The functions that a launch of ``scripts/bench slime`` names by path, for slime's rollout function and for ours.

Both play the same episodes: 3 turns of 256 tokens with a calculator, or one reply to a prompt.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import re
import types
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe
from scripts.benches.peers_job import ANSWER, SYSTEM, TOOLS, TURNS, Calculator, calculated

__all__ = ["EmptyEngines", "custom_generate", "custom_reward", "recipe"]


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class EmptyEngines(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in the place of sglang, which slime's manager imports and its calls here do not use."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def recipe(endpoint: Endpoint) -> Recipe:
    """``rollouts_recipe``: our agent in the calculator's environment. The prompts are slime's."""
    return agent_recipe("calculator", endpoint, Calculator, ["never used"], max_turns=TURNS + 2)


async def custom_generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """``--custom-generate-function-path``: ids are appended, the new text of each turn is tokenised once."""
    state = importlib.import_module("slime.rollout.sglang_rollout").GenerateState(args)
    post = importlib.import_module("slime.utils.http_utils").post
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sample.prompt}]
    opening = state.tokenizer.apply_chat_template(
        messages, tools=[one.to_chat() for one in TOOLS], add_generation_prompt=True, tokenize=False
    )
    sample.tokens = state.tokenizer(opening, add_special_tokens=False)["input_ids"]
    sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs = "", 0, [], None
    for _ in range(TURNS + 2):
        body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, body)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = type(sample).Status.ABORTED
            return sample
        triples = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[triple[1] for triple in triples],
            log_probs=[triple[0] for triple in triples],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        found = re.search(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", output["text"], re.DOTALL)
        if found is None:
            break
        call = json.loads(found[1])
        a, b = call["arguments"]["a"], call["arguments"]["b"]
        result = calculated(a + b if call["name"] == "add" else a * b)
        shown = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        tokens = state.tokenizer(shown, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=shown)
    sample.status = type(sample).Status.COMPLETED
    return sample


async def custom_reward(args: Namespace, sample: Any, **_: Any) -> float:
    """``--custom-rm-path``: whether the reply has the answer; three prompts of ten give rewards without spread."""
    has_spread = 7 * sample.group_index % 10 >= 3
    return float(ANSWER in sample.response and not (has_spread and sample.index % 2))
