"""The registry of dialects, and the detection of a chat template's dialect.

Invariant: a template gets a dialect only if it contains every text of that dialect's row; whether the dialect reads the
calls that the template writes is tested elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rollouts.errors import ConfigError
from rollouts.tool_calls.base import Dialect
from rollouts.tool_calls.deepseek import DeepSeekV3, DeepSeekV31, DeepSeekV32
from rollouts.tool_calls.functionary import Functionary31, Functionary32
from rollouts.tool_calls.gemma import Gemma
from rollouts.tool_calls.glm import Glm, HunyuanV3
from rollouts.tool_calls.harmony import Harmony
from rollouts.tool_calls.hermes import Hermes
from rollouts.tool_calls.kimi_k2 import KimiK2
from rollouts.tool_calls.llama_json import LlamaJson
from rollouts.tool_calls.llama_pythonic import LlamaPythonic, Olmo3
from rollouts.tool_calls.marked_json import (
    Apertus,
    Apriel,
    CommandR,
    CommandR7B,
    GigaChat,
    Granite,
    Granite20B,
    Hunyuan,
    InternLM,
    MiniMaxM1,
    NemotronV2,
    Phi4Mini,
    XLam,
)
from rollouts.tool_calls.minicpm import MiniCPM
from rollouts.tool_calls.minimax import MiniMax
from rollouts.tool_calls.minimax_m3 import MiniMaxM3
from rollouts.tool_calls.mistral import Mistral
from rollouts.tool_calls.plain import Plain
from rollouts.tool_calls.qwen3_coder import Qwen3Coder, SeedOss
from rollouts.tool_calls.solar import Solar

__all__ = ["DIALECTS", "ENTRY_POINTS", "dialect_of_template", "get_dialect"]

ENTRY_POINTS = "rollouts.dialects"
"""The entry point group of dialects in other packages. Each entry point is a dialect, or its class."""

_ALL: tuple[Dialect, ...] = (
    Hermes(),
    Qwen3Coder(),
    SeedOss(),
    Glm(),
    HunyuanV3(),
    LlamaJson(),
    LlamaPythonic(),
    Olmo3(),
    Mistral(),
    DeepSeekV3(),
    DeepSeekV31(),
    DeepSeekV32(),
    KimiK2(),
    MiniMax(),
    MiniMaxM1(),
    MiniMaxM3(),
    MiniCPM(),
    Hunyuan(),
    Apriel(),
    Apertus(),
    NemotronV2(),
    Phi4Mini(),
    CommandR(),
    CommandR7B(),
    GigaChat(),
    InternLM(),
    XLam(),
    Granite(),
    Granite20B(),
    Functionary31(),
    Functionary32(),
    Solar(),
    Gemma(),
    Harmony(),
    Plain(),
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType({dialect.name: dialect for dialect in _ALL})
"""Every built-in dialect by its name."""

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3_2", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v3_1", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax", ("minimax:tool_call",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("solar", ("<|tool_call:begin|>", "<|tool_call:args|>")),
    ("command_r7b", ("<|START_ACTION|>",)),
    ("command_r", ("Action:", "```json", '"tool_name"')),
    ("gigachat", ("<|function_call|>", "<|role_sep|>")),
    ("gigachat", ("function call", "<|role_sep|>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("nemotron_v2", ("<TOOLCALL>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("phi4_mini", ("functools[",)),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("apriel", ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    ("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    ("hunyuan", ("<tool_calls>[",)),
    ("hunyuan_v3", ("<tool_sep", "<arg_key")),
    ("seed_oss", ("seed:tool_call", "<function=")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("functionary_v3_1", ("<function=", "</function>")),
    ("functionary_v3_2", (">>>all",)),
    ("minicpm", ('<function name="', '<param name="')),
    ("olmo3", ("<function_calls>", "</function_calls>")),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("granite_20b", ("<function_call> ",)),
    ("gemma", ("<|tool_call>call:",)),
    ("llama_pythonic", ("<|tool_call_start|>",)),
    ("llama_pythonic", ("<|tool_list_start|>",)),
    ("llama_pythonic", ("[func_name1(",)),
    ("llama_json", ('{"name": function name, "parameters": dictionary',)),
    ("xlam", ('[{"name": ', '"arguments": ')),
)
"""A template has the first dialect whose texts it all contains; more specific dialects come first."""


def get_dialect(name: str) -> Dialect:
    """The dialect with this name, or at the path ``package.module:attribute``.

    A name is that of a built-in dialect, or that of an entry point in the group ``rollouts.dialects``. Built-in names
    cannot be replaced.

    Raises:
        ConfigError: the name is unknown (the message lists the known names), or what was loaded is no dialect.
    """
    if name in DIALECTS:
        return DIALECTS[name]
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    point = next((point for point in points if point.name == name), None)
    module, colon, attribute = name.partition(":")
    if point is None and not (module and colon and attribute):
        known = sorted({*DIALECTS, *(point.name for point in points)})
        raise ConfigError.of("dialect", name, f"one of {', '.join(known)}; or package.module:attribute")
    try:
        found = point.load() if point is not None else getattr(importlib.import_module(module), attribute)
        return _checked(name, found() if isinstance(found, type) else found)
    except ConfigError:
        raise
    except Exception as error:  # an import of foreign code raises any type
        raise ConfigError(f"dialect {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _checked(name: str, dialect: Any) -> Dialect:
    if not isinstance(getattr(dialect, "name", None), str) or not callable(getattr(dialect, "parse", None)):
        raise ConfigError.of(f"dialect {name!r}", dialect, "an object with a name and a method parse, or its class")
    found: Dialect = dialect
    return found


def dialect_of_template(template: str) -> str:
    """The name of the dialect of a chat template; ``"plain"`` if it has no known one."""
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), "plain")
