"""Calls in the forms of new families, each with its source.

Only the first is shown by its model's publisher with these values: the card of google/functiongemma-270m-it. LongCat's
card (meituan-longcat/LongCat-Flash-Chat) has the form with placeholders. In tests of others, with these values, are:

- functiongemma, ``days``: a third party's parser; vLLM 0.33's ``test_functiongemma_tool_parser.py`` has other values
- step3: SGLang's ``test_step3_detector_param_values.py``
- iquest: SGLang's ``test_iquest_q1_detector.py``, here without its argument ``items``
- dots: vLLM 0.33's ``tests/tool_parsers/test_dots_tool_parser.py``
- inkling, ``SF``: vLLM 0.33's ``tests/parser/engine/test_inkling.py``
- gigachat3_5: vLLM's ``tests/reasoning/test_gigachat35_reasoning_parser.py``
- kimi_k3 with JSON: RTP-LLM's test of its Kimi K3 renderer
- muse, without the recipient before it, k2_horizon, plamo3, inkling with ``Seoul``: third parties

A user of LongCat-Flash reported longcat_2, with another tool's name. The rest has the form of vLLM's and SGLang's
parsers with our values: longcat, the first of kimi_k3, deepseek_v4_1.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DOCUMENTED"]

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
OBJECT: dict[str, Any] = {"type": "object"}


def _k3(name: str, inside: str) -> str:
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


def _k3_argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def _plamo(name: str, arguments: str) -> str:
    parts = f"<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    parts += f"<|plamo:msg|>{arguments}<|plamo:end_tool_arguments:plamo|>"
    one = f"<|plamo:begin_tool_request:plamo|>{parts}<|plamo:end_tool_request:plamo|>"
    return f"<|plamo:begin_tool_requests:plamo|>{one}<|plamo:end_tool_requests:plamo|>"


def _step3(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in pairs)
    call = f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{inside}</steptml:invoke>'
    return f"<｜tool_calls_begin｜>{call}<｜tool_call_end｜><｜tool_calls_end｜>"


# dialect, its text, the properties of the tool's schema, and the call
DOCUMENTED: list[tuple[str, str, dict[str, Any], tuple[str, dict[str, Any]]]] = [
    (
        "functiongemma",
        "<start_function_call>call:get_current_temperature{location:<escape>London<escape>}<end_function_call>",
        {"location": STRING},
        ("get_current_temperature", {"location": "London"}),
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{location:<escape>Paris<escape>,days:3}<end_function_call>",
        {"location": STRING, "days": INTEGER},
        ("get_weather", {"location": "Paris", "days": 3}),
    ),
    (
        "longcat",
        '<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</longcat_tool_call>',
        {"city": STRING},
        ("weather", {"city": "Rome"}),
    ),
    (
        "longcat_2",
        "<longcat_tool_call>read_file\n<longcat_arg_key>path</longcat_arg_key>\n"
        "<longcat_arg_value>./index.vue</longcat_arg_value>\n</longcat_tool_call>",
        {"path": STRING},
        ("read_file", {"path": "./index.vue"}),
    ),
    (
        "muse",
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="location">San Francisco</atem:parameter>\n'
        '<atem:parameter name="unit">celsius</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        {"location": STRING, "unit": STRING},
        ("get_weather", {"location": "San Francisco", "unit": "celsius"}),
    ),
    (
        "kimi_k3",
        _k3("get_weather", _k3_argument("city", "string", "Hangzhou") + _k3_argument("days", "number", "3")),
        {"city": STRING, "days": INTEGER},
        ("get_weather", {"city": "Hangzhou", "days": 3}),
    ),
    (
        "kimi_k3",
        _k3("get_weather", '<|open|>json type="object"<|sep|>{"city": "北京", "days": 3}<|close|>json<|sep|>'),
        {"city": STRING, "days": INTEGER},
        ("get_weather", {"city": "北京", "days": 3}),
    ),
    (
        "inkling",
        'get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Seoul"}}<|end_message|>',
        {"city": STRING},
        ("get_weather", {"city": "Seoul"}),
    ),
    (
        "inkling",
        '<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"SF"}}<|end_message|>',
        {"city": STRING},
        ("get_weather", {"city": "SF"}),
    ),
    (
        "step3",
        _step3("run_code", ("code", "if a < b: print(a)"), ("lang", "python")),
        {"code": STRING, "lang": STRING},
        ("run_code", {"code": "if a < b: print(a)", "lang": "python"}),
    ),
    (
        "iquest",
        '<iquest_tool_call>run\n<arg_key>code</arg_key><arg_value>  "123"\n</arg_value><arg_key>count</arg_key> '
        "<arg_value>42</arg_value>\n<arg_key>enabled</arg_key><arg_value>true</arg_value></iquest_tool_call>",
        {"code": STRING, "count": INTEGER, "enabled": BOOLEAN},
        ("run", {"code": '  "123"\n', "count": 42, "enabled": True}),
    ),
    (
        "dots",
        '<dots_function_call><invoke name="set_location"><parameter name="location">{"city": "Shanghai"}</parameter>'
        '<parameter name="days">3</parameter><parameter name="include_weather">true</parameter></invoke>'
        "</dots_function_call>",
        {"location": OBJECT, "days": INTEGER, "include_weather": BOOLEAN},
        ("set_location", {"location": {"city": "Shanghai"}, "days": 3, "include_weather": True}),
    ),
    (
        "k2_horizon",
        "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
        "<ifm|arg_value>Seoul</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>",
        {"city": STRING},
        ("get_weather", {"city": "Seoul"}),
    ),
    (
        "plamo3",
        _plamo("read", '{"path":"README.md"}'),
        {"path": STRING},
        ("read", {"path": "README.md"}),
    ),
    (
        "deepseek_v4_1",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="read">\n'
        '<｜DSML｜ parameter name="filePath" string="true">README.md</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="lines" string="false">5</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        {"filePath": STRING, "lines": INTEGER},
        ("read", {"filePath": "README.md", "lines": 5}),
    ),
    (
        "gigachat3_5",
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n'
        '<｜GCML｜parameter name="city" string="true">Москва</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
        {"city": STRING},
        ("get_weather", {"city": "Москва"}),
    ),
]
