"""The registry of dialects, and the detection of a chat template's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollouts.errors import ConfigError
from rollouts.tool_calls.base import Dialect
from rollouts.tool_calls.deepseek import DeepSeekV3, DeepSeekV31, DeepSeekV32
from rollouts.tool_calls.gemma import Gemma
from rollouts.tool_calls.glm import Glm
from rollouts.tool_calls.granite import Granite
from rollouts.tool_calls.harmony import Harmony
from rollouts.tool_calls.hermes import Hermes
from rollouts.tool_calls.kimi_k2 import KimiK2
from rollouts.tool_calls.llama_json import LlamaJson
from rollouts.tool_calls.llama_pythonic import LlamaPythonic
from rollouts.tool_calls.minimax import MiniMax
from rollouts.tool_calls.mistral import Mistral
from rollouts.tool_calls.plain import Plain
from rollouts.tool_calls.qwen3_coder import Qwen3Coder

__all__ = ["DIALECTS", "dialect_of_template", "get_dialect"]

_ALL: tuple[Dialect, ...] = (
    Hermes(),
    Qwen3Coder(),
    Glm(),
    LlamaJson(),
    LlamaPythonic(),
    Mistral(),
    DeepSeekV3(),
    DeepSeekV31(),
    DeepSeekV32(),
    KimiK2(),
    MiniMax(),
    Granite(),
    Gemma(),
    Harmony(),
    Plain(),
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType({dialect.name: dialect for dialect in _ALL})
"""Every dialect by its name."""

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3_2", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v3_1", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("minimax", ("minimax:tool_call",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("gemma", ("<|tool_call>call:",)),
    ("llama_pythonic", ("<|tool_call_start|>",)),
    ("llama_pythonic", ("[func_name1(",)),
    ("llama_json", ('{"name": function name, "parameters": dictionary',)),
)
"""A template has the first dialect whose texts it all contains; more specific dialects come first."""


def get_dialect(name: str) -> Dialect:
    """The dialect of this name.

    Raises:
        ConfigError: the name is unknown; the message lists the known names.
    """
    if name not in DIALECTS:
        raise ConfigError.of("dialect", name, f"one of {', '.join(sorted(DIALECTS))}")
    return DIALECTS[name]


def dialect_of_template(template: str) -> str:
    """The name of the dialect of a chat template; ``"plain"`` if it has no known one."""
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), "plain")
