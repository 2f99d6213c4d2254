"""Small chat templates with structures of further model families; none is a copy of a real template.

Each is written from published descriptions of the format and is as short as possible.
"""

from __future__ import annotations

from tests.families import Family, small

E, F, R = "exact", "forks", "refused"

_ALTERNATING = """
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_FOLDED = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content if loop.first and system else m.content %}
{{- '<s>[INST] ' + text | trim + ' [/INST]' if m.role == 'user' else ' ' + m.content | trim + ' </s>' }}
{%- endfor %}"""

_TOOL_ROLE = """
{%- if tools %}
{{- '<|start_of_role|>tools<|end_of_role|>After <|tool_call|> write a JSON list.' }}
{{- tools | tojson + '<|end_of_text|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- set role = 'tool_response' if m.role == 'tool' else m.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + (m.content or '') }}
{%- if m.tool_calls %}<|tool_call|>[
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}]{% endif %}
{{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

_ROLES_ONLY = """
{%- if tools %}
{{- '<|start_of_role|>available_tools<|end_of_role|>Respond with <|tool_call|> and a JSON list.' }}
{{- tools | tojson + '<|end_of_text|>\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

_PYTHONIC = """
{{- '<|begin_of_text|>' }}
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- head('system') + 'Today is ' + strftime_now('%d %b %Y') + '. ' }}
{%- if tools %}{{ 'Call with [func_name1(a=1), func_name2()].' + tools | tojson(indent=4) }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
{%- if m.tool_calls %}
{{- head('assistant') + '[' }}
{%- for c in m.tool_calls %}
{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{ k + '=' + v | tojson + ('' if loop.last else ', ') }}{% endfor %}
{{- ')' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ head('ipython') + {'output': m.content} | tojson + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

_PARTS = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- for part in m.content %}
{{- '<|vision_start|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_MARKED = """
{{- '<s>' }}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_BARE = """
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ raise_exception('there are no tools') }}{% endif %}
{{- {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] + m.content | trim + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

_EOS_BETWEEN = """
{{- '<bos>' }}
{%- for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' %}{{ '<eos>' + ('' if loop.last else '\n') }}{% else %}{{ '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

_LAST_PLAIN = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content | default('', true) if loop.index0 >= ns.last else '' %}
{{- '<think>' + thought + '</think>' }}{% endif %}
{{- ('## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' else '') + (m.content or '') }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}<|tool_calls_section_end|>{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

_RAISES = """
{%- if tools %}{{ raise_exception('this model has no tools') }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""

_ENDS_OF_CALLS = """
{{- '<|begin_of_text|>' }}
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- if tools %}{{ head('system') + 'Call <function=name>{}</function>. ' + tools | tojson + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{{- head('ipython' if m.role == 'tool' else m.role) + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '<function=' + c.function.name + '>' + c.function.arguments | tojson + '</function>' }}
{%- endfor %}
{{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

_ONE_TURN = """
{{- '<s>' }}
{%- set ns = namespace(open=false) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '' if ns.open else '<|assistant_start|>' }}
{%- set ns.open = m.tool_calls | default([], true) | length > 0 %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<|tools_prefix|>[' if loop.first else ', ' }}
{{- '{"' + c.function.name + '": ' + c.function.arguments | tojson + '}' + (']<|tools_suffix|>' if loop.last else '') }}
{%- endfor %}
{{- '' if ns.open else '<|assistant_end|>' }}
{%- elif m.role == 'tool' %}
{{- ('[' if loop.previtem.role != 'tool' else ', ') + m.content }}
{{- ']' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- else %}
{{- '<|assistant_end|>' if ns.open else '' }}
{%- set ns.open = false %}
{{- '<|' + m.role + '_start|>' + m.content + (tools | tojson if tools and m.role == 'system' else '') }}
{{- '<|' + m.role + '_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}<|assistant_start|>{% endif %}"""

_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<bos>", "<eos>")
_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_start|>")
_KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<think>", "</think>")
_KIMI += ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
_KIMI += ("<|tool_call_end|>", "<|tool_call_argument_begin|>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
_ONE_TURN_MARKS = ("<s>", "<|assistant_start|>", "<|assistant_end|>", "<|tools_prefix|>", "<|tools_suffix|>")
_ONE_TURN_MARKS += ("<|system_start|>", "<|system_end|>", "<|user_start|>", "<|user_end|>")

STRUCTURES = {
    "Gemma 2": Family(
        small(_ALTERNATING, _TURNS, ("<end_of_turn>",)),
        (E, R, R, R, R),
        "plain",
        "no system role, user and model alternate strictly",
        calls=False,
        system=False,
    ),
    "Llama 2": Family(
        small(_FOLDED, ("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",)),
        (E, R, R, R, R),
        "plain",
        "the system prompt is part of the first user turn, a BOS before each",
        calls=False,
    ),
    "Granite 3": Family(
        small(_TOOL_ROLE, _GRANITE, ("<|end_of_text|>",)), (E,) * 5, "granite", "tools in a turn of their own"
    ),
    "Granite 3.3": Family(
        small(_ROLES_ONLY, _GRANITE, ("<|end_of_text|>",)),
        (E, F, F, E, E),
        "granite",
        "the same turn for every role; leaves calls out",
        calls=False,
    ),
    "Llama, pythonic": Family(
        small(_PYTHONIC, _LLAMA, ("<|eot_id|>",)),
        (E,) * 5,
        "llama_pythonic",
        "calls as a list in Python, a date in the system block",
        text_and_calls=False,
    ),
    "content in parts": Family(
        small(_PARTS, ("<|vision_start|>", "<|vision_end|>"), ("<|im_end|>",)),
        (E, F, F, E, E),
        "plain",
        "models that see: content is a list of parts; leaves calls out",
        calls=False,
    ),
    "marks for training": Family(
        small(_MARKED, ("<s>",), ("<|im_end|>",)),
        (E, F, F, E, E),
        "plain",
        "generation marks; leaves calls out, tells of no tools",
        calls=False,
    ),
    "no marks": Family(
        small(_BARE, ("<eos>",), ("<eos>",)),
        (E, R, R, R, R),
        "plain",
        "names before the turns; no stop token in the history: the sampled one stands",
        calls=False,
        stopless=True,
    ),
    "OLMo": Family(
        small(_EOS_BETWEEN, _ROLES, ("<eos>",)),
        (E, F, F, E, E),
        "plain",
        "a newline after replies that are not the last; leaves calls out",
        calls=False,
    ),
    "Kimi-K2-Thinking": Family(
        small(_LAST_PLAIN, _KIMI, ("<|im_end|>",)),
        (E, E, E, F, F),
        "kimi_k2",
        "an answer without calls empties the thoughts before it",
        thinks=True,
        ids="functions.{name}:{}",
    ),
    "Phi-4": Family(
        small(_RAISES, _ROLES, ("<|end|>",)),
        (R,),
        "plain",
        "refuses tools; an end of text only where nothing is asked",
        calls=False,
    ),
    "Functionary 3.1": Family(
        small(_ENDS_OF_CALLS, (*_LLAMA, "<|eom_id|>"), ("<|eot_id|>", "<|eom_id|>")),
        (E,) * 5,
        "functionary_v3_1",
        "a turn of calls ends with another stop token than an answer",
    ),
    "Apertus": Family(
        small(_ONE_TURN, _ONE_TURN_MARKS, ("<|assistant_end|>", "<|tools_suffix|>")),
        (E,) * 5,
        "apertus",
        "results are written into the turn that called; the mark that closes calls is a stop token",
        text_and_calls=False,
    ),
}
