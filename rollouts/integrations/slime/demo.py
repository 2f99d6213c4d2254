"""A launch without a trainer: the demo model on the embedded engine, for calls with ``args=None``.

Invariant: all code between the data source and the batch is that of a real launch; only the namespace is created here.
slime's contract test calls it and replaces transformers with an empty module (slime 0.3.1, tests/plugin_contracts),
so the engine runs in its own process, and the tokenizer is loaded without transformers.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import Recipe, agent_recipe
from rollouts.training.types import Sample

__all__ = ["args", "recipe"]

_GROUPS, _EVAL_ROWS, _REPLY = 2, 4, 48


def recipe(endpoint: Endpoint) -> Recipe:
    """The recipe of the demo: calculator agents, scored by the exact final sentence."""
    options: dict[str, Any] = {"tokenizer": _DemoTokenizer(DEMO_MODEL), "reward_fn": _answered, "max_turns": 3}
    return agent_recipe("demo", endpoint, CalculatorEnvironment, islice(calculator_prompts(0), _EVAL_ROWS), **options)


def _answered(sample: Sample) -> float:
    return float(sample.label is not None and f"The answer is {sample.label}." in sample.response)


def args(data_source: Any) -> Namespace:
    """slime's namespace for the demo; its group size is that of the data source."""
    url = urlsplit(_server())
    return Namespace(
        rollout_batch_size=_GROUPS,
        n_samples_per_prompt=int(getattr(data_source, "n_samples_per_prompt", 2)),
        rollout_max_response_len=_REPLY,
        hf_checkpoint=str(DEMO_MODEL),
        sglang_router_ip=url.hostname,
        sglang_router_port=url.port,
        rollouts_recipe=f"{__name__}.recipe",
        eval_datasets=[_eval_set()],
    )


@functools.cache
def _server() -> str:
    """The URL of an embedded engine that runs until Python exits."""
    portal = start_blocking_portal(name="rollouts demo engine")
    log = Path(tempfile.mkdtemp(prefix="rollouts-demo-")) / "engine.log"
    engine = portal.__enter__().wrap_async_context_manager(engine_process(DEMO_MODEL, log))
    url = engine.__enter__().url
    atexit.register(portal.__exit__, None, None, None)
    atexit.register(engine.__exit__, None, None, None)
    return url


class _DemoTokenizer:
    """The demo model's tokenizer, with the attributes that a renderer reads."""

    def __init__(self, folder: Path) -> None:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
        self.name_or_path = str(folder)
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self.special_tokens_map = {name: config[name] for name in ("eos_token", "pad_token")}
        self.all_special_ids = [self.backend_tokenizer.token_to_id(text) for text in self.special_tokens_map.values()]
        self.all_special_tokens = [*self.special_tokens_map.values()]
        self.eos_token_id = self.backend_tokenizer.token_to_id(config["eos_token"])
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


@functools.cache
def _eval_set() -> Namespace:
    path = Path(tempfile.mkdtemp(prefix="rollouts-demo-")) / "calculator.jsonl"
    rows = [{"prompt": prompt.prompt, "label": prompt.label} for prompt in islice(calculator_prompts(1), _EVAL_ROWS)]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return Namespace(name="calculator", path=str(path), input_key="prompt", label_key="label", metadata_key="metadata")
