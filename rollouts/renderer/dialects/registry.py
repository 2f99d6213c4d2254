"""The registry of dialects, and the detection of a chat template's dialect.

Invariant: a template gets a dialect only if it contains every mark in that dialect's row; whether the dialect reads the
calls that the template writes is tested elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from rollouts.base.plugins import plugins
from rollouts.errors import ConfigError
from rollouts.renderer.dialects.base import Dialect

__all__ = ["DIALECTS", "ENTRY_POINTS", "dialect_of_template", "get_dialect"]

ENTRY_POINTS = "rollouts.dialects"
"""The entry point group of dialects in other packages. Each entry point is a dialect, or its class."""

_PLACES: Mapping[str, str] = {
    "hermes": "hermes:Hermes",
    "kimi_vl": "hermes:KimiVL",
    "longcat": "hermes:LongCat",
    "qwen3_coder": "qwen3_coder:Qwen3Coder",
    "seed_oss": "qwen3_coder:SeedOss",
    "glm": "glm:Glm",
    "iquest": "glm:IQuest",
    "longcat_2": "glm:LongCat2",
    "hunyuan_v3": "glm:HunyuanV3",
    "hunyuan_v4": "glm:HunyuanV4",
    "llama_json": "llama_json:LlamaJson",
    "llama_pythonic": "llama_pythonic:LlamaPythonic",
    "olmo3": "llama_pythonic:Olmo3",
    "mistral": "mistral:Mistral",
    "deepseek_v3": "deepseek:DeepSeekV3",
    "deepseek_v3_1": "deepseek:DeepSeekV31",
    "deepseek_v3_2": "deepseek:DeepSeekV32",
    "deepseek_v4_1": "deepseek:DeepSeekV41",
    "gigachat3_5": "deepseek:GigaChat35",
    "kimi_k2": "kimi_k2:KimiK2",
    "kimi_k3": "kimi_k3:KimiK3",
    "k2_horizon": "k2_horizon:K2Horizon",
    "plamo3": "plamo3:Plamo3",
    "inkling": "inkling:Inkling",
    "muse": "muse:Muse",
    "minimax": "minimax:MiniMax",
    "dots": "minimax:Dots",
    "step3": "minimax:Step3",
    "minimax_m1": "marked_json:MiniMaxM1",
    "minimax_m3": "minimax_m3:MiniMaxM3",
    "minicpm": "minicpm:MiniCPM",
    "hunyuan": "marked_json:Hunyuan",
    "apriel": "marked_json:Apriel",
    "apertus": "marked_json:Apertus",
    "nemotron_v2": "marked_json:NemotronV2",
    "phi4_mini": "marked_json:Phi4Mini",
    "command_r": "marked_json:CommandR",
    "command_r7b": "marked_json:CommandR7B",
    "gigachat": "marked_json:GigaChat",
    "internlm": "marked_json:InternLM",
    "xlam": "marked_json:XLam",
    "granite": "marked_json:Granite",
    "granite_3_2": "marked_json:Granite32",
    "granite_20b": "marked_json:Granite20B",
    "functionary_v3_1": "functionary:Functionary31",
    "functionary_v3_2": "functionary:Functionary32",
    "solar": "solar:Solar",
    "gemma": "gemma:Gemma",
    "functiongemma": "functiongemma:FunctionGemma",
    "harmony": "harmony:Harmony",
    "plain": "plain:Plain",
}
"""The module and the class of each built-in dialect, by its name."""


class _BuiltIn(Mapping[str, Dialect]):
    """The built-in dialects by their names; a dialect is imported when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Dialect] = {}

    def __getitem__(self, name: str) -> Dialect:
        if name not in self._loaded:
            module, _, attribute = _PLACES[name].partition(":")
            self._loaded[name] = getattr(importlib.import_module(f"rollouts.renderer.dialects.{module}"), attribute)()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)

    def __contains__(self, name: object) -> bool:
        return name in _PLACES


DIALECTS: Mapping[str, Dialect] = _BuiltIn()
"""Every built-in dialect by its name."""

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("muse", ("atem:function_calls", "<|message|>")),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("k2_horizon", ("<ifm|tool_call>",)),
    ("plamo3", ("begin_tool_request:plamo|>",)),
    ("gigachat3_5", ("｜GCML｜",)),
    ("deepseek_v4_1", ("｜DSML｜ calls",)),
    ("deepseek_v4_1", ("｜DSML｜ invoke",)),
    ("deepseek_v3_2", ("｜DSML｜",)),
    ("step3", ("<steptml:invoke",)),
    ("dots", ("<dots_function_call>",)),
    ("longcat_2", ("<longcat_tool_call>", "<longcat_arg_key>")),
    ("longcat", ("<longcat_tool_call>",)),
    ("iquest", ("<iquest_tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("granite_3_2", ("Here is my thought process:",)),
    ("kimi_vl", ("◁think▷",)),
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
    ("hunyuan_v4", ("<tool_calls", "<tool_call", "<arg_key")),
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
"""A template has the first dialect all of whose marks it contains; more specific dialects come first."""


def get_dialect(name: str) -> Dialect:
    """The dialect with this name, or at the path ``package.module:attribute``.

    A name belongs to a built-in dialect or to an entry point in the group ``rollouts.dialects``. Built-in names
    cannot be replaced.

    Raises:
        ConfigError: the name is unknown (the message lists the known names), or the loaded object is not a dialect.
    """
    if name in DIALECTS:
        return DIALECTS[name]
    added = plugins(ENTRY_POINTS)
    module, colon, attribute = name.partition(":")
    if name not in added and not (module and colon and attribute):
        known = sorted({*DIALECTS, *added})
        raise ConfigError.of("dialect", name, f"one of {', '.join(known)}; or package.module:attribute")
    try:
        found = added[name].load() if name in added else getattr(importlib.import_module(module), attribute)
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
