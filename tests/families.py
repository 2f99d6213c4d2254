"""Model families for tests: real chat templates from the assets, and small ones with the quirks of other families.

The small templates are written from published descriptions of the formats; they are not copies of the hub's templates.
Their tokenizer is the demo model's, with the family's marks added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from rollouts.dtypes import Tool
from rollouts.engine import DEMO_MODEL
from rollouts.renderer import Renderer, load_tokenizer

TOOLS = (
    Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}}),
    Tool("leap", "Leaps.", {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}}),
)


@attrs.frozen
class Family:
    """The renderer of a family, and what its template supports."""

    make: Callable[..., Renderer]
    """Build the renderer from pytest's ``request``, which has the fixtures of the assets."""
    verdicts: tuple[str, ...]
    """The verdicts of the self-test with two tools: the opening, two rounds of tools, two user turns."""
    dialect: str
    quirk: str
    parallel: int = 3
    """The largest number of calls in one turn."""
    calls: bool = True
    """Whether the template writes calls in the history."""
    thinks: bool = False
    text_and_calls: bool = True
    """Whether a turn may have both text and calls."""
    system: bool = True
    """Whether the template takes a system prompt."""
    stopless: bool = False
    """Whether the template writes no stop token, so that only the sampled ids have one."""
    ids: str = "c{:08d}"
    """The format of call ids, if the template requires one."""


# -- real templates ---------------------------------------------------------------------------------------------------

GLM = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>", "<think>", "</think>")
GLM += ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MARKS = (*GLM, *GRANITE, *PHI)
"""Of the families that replace their tokenizer with Qwen3's: loaded once for all of them."""


def _real(name: str, tokenizer: str = "qwen3", marks: tuple[str, ...] = (), stops: tuple[str, ...] = ()) -> Any:
    def make(request: Any, **options: Any) -> Renderer:
        source = request.getfixturevalue("chat_template")(name)
        found = request.getfixturevalue("small_tokenizer")(tokenizer, *marks)
        return Renderer(found, **{"chat_template": source, "stop_token_ids": _ids(found, stops), **options})

    return make


def _ids(tokenizer: Any, stops: tuple[str, ...]) -> list[int] | None:
    return [tokenizer.convert_tokens_to_ids(stop) for stop in stops] or None


E, F, R = "exact", "forks", "refused"
REAL = {
    "Qwen2.5": Family(_real("Qwen-Qwen2.5-7B-Instruct", "qwen2_5"), (E,) * 5, "hermes", "a system prompt of its own"),
    "Qwen3": Family(_real("Qwen-Qwen3-0.6B"), (E, E, E, F, F), "hermes", "thoughts go at a user turn", thinks=True),
    "Qwen3 (TRL, instruct 2507)": Family(_real("trl-qwen3_instruct_2507"), (E,) * 5, "hermes", ""),
    "Qwen3 (TRL, training)": Family(_real("trl-qwen3_training"), (E,) * 5, "hermes", "keeps thoughts", thinks=True),
    "Qwen3-Coder": Family(_real("Qwen3-Coder"), (E,) * 5, "qwen3_coder", "arguments in tags"),
    "Qwen3.5": Family(_real("Qwen3.5-4B"), (E, E, E, F, F), "qwen3_coder", "the prompt opens a thought", thinks=True),
    "QwQ": Family(_real("Qwen-QwQ-32B"), (E, F, F, F, F), "hermes", "the history has no thought"),
    "DeepSeek-V3": Family(
        _real("hfcfg-deepseek_v3", "deepseek_v3"),
        (E, F, F, E, E),
        "deepseek_v3",
        "calls only without content, their arguments as text; ends a turn of two calls only, one of three twice",
        parallel=2,
        text_and_calls=False,
    ),
    "DeepSeek-V3.1": Family(
        _real("deepseek-ai-DeepSeek-V3.1", "deepseek_v3"),
        (E,) * 5,
        "deepseek_v3_1",
        "no header after tools",
        text_and_calls=False,
    ),
    "DeepSeek-V3.2": Family(
        _real("deepseek-ai-DeepSeek-V3.2", "deepseek_v3"),
        (E, F, F, F, F),
        "deepseek_v3_2",
        "thoughts opened and closed",
    ),
    "DeepSeek-R1 distill": Family(
        _real("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3"),
        (E, F, F, E, F),
        "deepseek_v3",
        "a switch that the first result flips",
        text_and_calls=False,
    ),
    "GLM-4.6": Family(
        _real("GLM-4.6", "qwen3", MARKS, ("<|endoftext|>", "<|user|>", "<|observation|>")),
        (E, E, E, F, F),
        "glm",
        "no closing mark: the stop token is the next turn's first",
        thinks=True,
    ),
    "gpt-oss": Family(
        _real("openai-gpt-oss-120b", "gptoss", (), ("<|return|>", "<|endoftext|>", "<|call|>")),
        (E, E, E, F, F),
        "harmony",
        "samples <|return|> and <|call|>, writes <|end|>",
        parallel=1,
        thinks=True,
        text_and_calls=False,
    ),
    "Hermes 3": Family(
        _real("NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        (E, E, F, F, E),
        "hermes",
        "a newline after results depends on what follows",
        text_and_calls=False,
    ),
    "SmolLM3": Family(
        _real("HuggingFaceTB-SmolLM3-3B"), (E, F, F, E, E), "plain", "leaves calls out, tells of no tools", calls=False
    ),
    "Granite 4": Family(_real("ibm-granite-granite-4.0", "qwen3", MARKS, ("<|end_of_text|>",)), (E,) * 5, "hermes", ""),
    "Phi-3.5": Family(
        _real("microsoft-Phi-3.5-mini-instruct", "qwen3", MARKS, ("<|end|>",)),
        (E, R, R, E, E),
        "plain",
        "leaves tool messages out",
        calls=False,
    ),
}


# -- small templates with the quirks of others ------------------------------------------------------------------------


def small(source: str, marks: tuple[str, ...], stops: tuple[str, ...], **variables: Any) -> Any:
    """Return a builder of renderers with a small template and the demo model's tokenizer plus the family's marks."""

    @functools.cache
    def tokenizer() -> Any:
        found = load_tokenizer(DEMO_MODEL)
        found.add_tokens(list(marks), special_tokens=True)
        return found

    def make(request: Any, **options: Any) -> Renderer:
        found = tokenizer()
        return Renderer(
            found,
            chat_template=source,
            **{"stop_token_ids": _ids(found, stops), "template_kwargs": variables, **options},
        )

    return make


_LAST_USER = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""

_LLAMA = """
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{{- '<|begin_of_text|>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- head('system') + 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' and tools and loop.first %}
{{- head('user') + 'Respond in the format {"name": function name, "parameters": dictionary of its arguments}.\n' }}
{%- for tool in tools %}{{ tool | tojson }}\n\n{% endfor %}{{ m.content + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ head('ipython') + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

_NEMO = (
    _LAST_USER
    + """
{{- '<s>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{%- set at = loop.index0 + (1 if system else 0) %}
{%- if m.role == 'user' %}
{%- if tools and at == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + (system + '\n\n' if system and at == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('an id has 9 characters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}{{ ']</s>' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""
)

_SMALL = (
    _LAST_USER
    + """
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{%- for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}{{ '</s>' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif not m.content %}{{ raise_exception('a turn needs content or calls') }}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""
)

_KIMI = """
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You are helpful.<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_system|>' + (m.name or 'tool') + '<|im_middle|>## Return of ' + m.tool_call_id + '\n' + m.content }}
{%- else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + (m.content or '') }}{% endif %}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}<|tool_calls_section_end|>{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

_MINIMAX = (
    _LAST_USER
    + """
{{- ']~!b[' }}
{%- set header = '# Tools in <minimax:tool_call>\n' + tools | tojson if tools else '' %}
{{- ']~b]system\n' + (messages[0].content if messages[0].role == 'system' else '') + header + '[e~[\n' }}
{%- set seen = namespace(calls=false) %}
{%- for m in messages if m.role != 'system' %}
{%- set at = loop.index0 + (1 if messages[0].role == 'system' else 0) %}
{%- if m.role == 'assistant' %}
{{- ']~b]ai\n' }}
{%- if m.reasoning_content and at > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}
{%- set seen.calls = m.tool_calls | default([]) | length > 0 %}
{%- if m.tool_calls %}
{{- '\n<minimax:tool_call>\n' }}
{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\n' }}
{%- endfor %}{{ '</invoke>\n' }}
{%- endfor %}{{ '</minimax:tool_call>' }}{% endif %}
{{- '[e~[\n' }}
{%- elif m.role == 'tool' %}
{%- if not seen.calls %}{{ raise_exception('a tool message must follow a call') }}{% endif %}
{%- if loop.previtem.role != 'tool' %}{{ ']~b]tool' }}{% endif %}
{{- '\n<response>' + m.content + '</response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '[e~[\n' }}{% endif %}
{%- else %}{{ ']~b]user\n' + m.content + '[e~[\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"""
)

_NEMOTRON = (
    _LAST_USER
    + """
{%- macro xml(c) %}<tool_call>\n<function={{ c.function.name }}>\n
{%- for k, v in c.function.arguments.items() %}
{{- '\n<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>' }}
{%- endfor %}\n</function>\n</tool_call>{% endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}{{ '\n<tools>' + tools | tojson + '</tools>' }}{% endif %}{{ '<|im_end|>\n' }}
{%- for m in messages if m.role != 'system' %}
{%- set at = loop.index0 + (1 if messages[0].role == 'system' else 0) %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content | default('', true) | trim if at > ns.last else '' %}
{{- '<|im_start|>assistant\n' + ('<think>\n' + thought + '\n</think>\n' if thought else '<think></think>') }}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '\n' + xml(c) }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
)

_GEMMA3 = """
{{- '<bos>' }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}
{%- elif m.role == 'tool' %}{{ raise_exception('roles must alternate user/assistant') }}
{%- else %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.system + m.content | trim }}
{{- '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_GEMMA4 = """
{{- '<bos>' }}
{%- if messages[0].role == 'system' or tools %}
{{- '<start_of_turn>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}{{ 'Write <|tool_call>call:name{}<tool_call|>. ' + tools | tojson }}{% endif %}
{{- '<end_of_turn>\n' }}{% endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' %}
{%- if loop.previtem.role != 'tool' %}{{ '<start_of_turn>model\n' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name + '{' }}
{%- for k, v in c.function.arguments.items() %}{{ k + ':<|"|>' + v + '<|"|>' }}{{ ',' if not loop.last }}{% endfor %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- '<|calls_end|>' if m.tool_calls else '<end_of_turn>\n' }}
{%- elif m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{{ '<start_of_turn>user\n' + m.content + '<end_of_turn>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_COUNTING = """
{%- set ns = namespace(n=0) %}
{%- for m in messages %}
{{- '<|START|>' + m.role + '\n' + (m.content or '') if m.role != 'tool' else '<|START|>tool\n' }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{%- if m.role == 'tool' %}{{ '{"tool_call_id": ' + ns.n | string + ', "result": ' + m.content | tojson + '}' }}
{%- set ns.n = ns.n + 1 %}{% endif %}
{{- '<|END|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START|>assistant\n' }}{% endif %}"""

_NONE_ONLY = """
{{- '<|bos|>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content + (tools | tojson if tools else '') }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}
{%- elif m.tool_calls and m.content is none %}
{{- '' if loop.previtem.role == 'tool' else '<|Assistant|>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif m.tool_calls %}{{ raise_exception('content must be None in a turn with calls') }}
{%- else %}{{ ('' if loop.previtem.role == 'tool' else '<|Assistant|>') + m.content + '<|eos|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|>{% endif %}"""

_LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_MISTRAL_MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_MISTRAL_MARKS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_MISTRAL_MARKS += ("[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]")
_KIMI_MARKS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
_KIMI_MARKS += ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
_KIMI_MARKS += ("<|tool_call_end|>", "<|tool_call_argument_begin|>")
_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<|calls_end|>", "<tool_response>", "</tool_response>")
_TURNS += ("<|tool_call>", "<tool_call|>", '<|"|>')

SMALL = {
    "Llama 3.x": Family(
        small(_LLAMA, _LLAMA_MARKS, ("<|eot_id|>", "<|eom_id|>")),
        (E,) * 5,
        "llama_json",
        "one call a turn, results as JSON, a date in the system block",
        parallel=1,
        text_and_calls=False,
    ),
    "Mistral Nemo": Family(
        small(_NEMO, _MISTRAL_MARKS, ("</s>",)),
        (E, E, E, F, F),
        "mistral",
        "tools and system text move to the last user turn, ids of 9 characters, no header",
        text_and_calls=False,
    ),
    "Mistral Small": Family(
        small(_SMALL, _MISTRAL_MARKS, ("</s>",)),
        (E, E, E, F, F),
        "mistral",
        "tools move to the last user turn; refuses empty turns",
        text_and_calls=False,
    ),
    "Kimi-K2": Family(
        small(_KIMI, _KIMI_MARKS, ("<|im_end|>",)),
        (E,) * 5,
        "kimi_k2",
        "ids of calls are global, a system prompt of its own",
        ids="functions.{name}:{}",
    ),
    "MiniMax-M2": Family(
        small(_MINIMAX, ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"), ("[e~[",)),
        (E, E, E, F, F),
        "minimax",
        "a tool message must follow a call; thoughts go at a user turn",
        thinks=True,
    ),
    "Nemotron-3": Family(
        small(_NEMOTRON, ("<think>", "</think>"), ("<|im_end|>",)),
        (E, E, E, F, F),
        "qwen3_coder",
        "thoughts become <think></think> at a user turn",
        thinks=True,
    ),
    "Gemma 3": Family(
        small(_GEMMA3, _TURNS, ("<end_of_turn>",)),
        (E, R, R, R, R),
        "plain",
        "no tool role; the system prompt is part of the first user turn",
        calls=False,
    ),
    "Gemma 4": Family(
        small(_GEMMA4, _TURNS, ("<end_of_turn>", "<|calls_end|>")),
        (E,) * 5,
        "gemma",
        "the same model turn goes on after results",
        text_and_calls=False,
    ),
    "Command-R": Family(
        small(_COUNTING, ("<|START|>", "<|END|>"), ("<|END|>",)),
        (E, E, R, E, E),
        "hermes",
        "results are numbered over the whole conversation",
    ),
    "GLM-4": Family(
        functools.partial(
            small("rollouts.renderer.glm_4:render", GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
            dialect="rollouts.renderer.glm_4:Glm4",
        ),
        (E,) * 5,
        "glm_4",
        "`rollouts.renderer.glm_4:render`: one call a turn, the stop token is the next turn's first",
        parallel=1,
    ),
    "content must be None": Family(
        small(
            _NONE_ONLY, ("<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>", "<|output|>", "<|/output|>"), ("<|eos|>",)
        ),
        (E,) * 5,
        "deepseek_v3_1",
        "a turn of calls has no content at all, no header after tools",
        text_and_calls=False,
    ),
}

FAMILIES = {**REAL, **SMALL}

UNCHECKED = {"SmolLM3": "hermes", "OLMo": "olmo3", "content in parts": "hermes", "marks for training": "xlam"}
UNCHECKED["Granite 3.3"] = "granite"
"""Families whose templates write no calls, and a dialect that reads replies all the same."""
