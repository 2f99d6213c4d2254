"""Calls as each dialect writes them, sound and broken."""

from rollouts.dtypes import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "free": {},
        "open": {"type": "boolean"},
    },
}
TOOLS = [Tool("weather", "Tells the weather.", SCHEMA), Tool("now", "Tells the time.")]

_NS = "]<]minimax[>["
_LIST = '[{"name": "weather", "arguments": {"city": "Köln", "days": 2}}, {"name": "now", "arguments": {}}]'

# dialect: two calls, weather(city="Köln", days=2) and now()
WRITTEN: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
    "llama_json": '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}; {"name": "now", "parameters": {}}',
    "llama_pythonic": '[weather(city="Köln", days=2), now()]',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "gemma": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Köln", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "hunyuan_v3": "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Köln</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n"
    "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "olmo3": '<function_calls>\nweather(city="Köln", days=2)\nnow()\n</function_calls>',
    "minimax_m1": '<tool_calls>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '{"name": "now", "arguments": {}}\n</tool_calls>',
    "minimax_m3": _NS
    + "<tool_call>\n"
    + _NS
    + '<invoke name="weather">'
    + _NS
    + "<city>Köln"
    + _NS
    + "</city>"
    + _NS
    + "<days>2"
    + _NS
    + "</days>"
    + _NS
    + "</invoke>\n"
    + _NS
    + '<invoke name="now">'
    + _NS
    + "</invoke>\n"
    + _NS
    + "</tool_call>",
    "minicpm": '<function name="weather"><param name="city">Köln</param><param name="days">2</param></function>\n'
    '<function name="now"></function>',
    "hunyuan": f"<tool_calls>{_LIST}</tool_calls>",
    "apriel": f"<tool_calls>{_LIST}</tool_calls>",
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Köln", "days": 2}}, {"now": {}}]<|tools_suffix|>',
    "nemotron_v2": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "phi4_mini": f"functools{_LIST}",
    "command_r": 'Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Köln", '
    '"days": 2}\n    },\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```',
    "command_r7b": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    '{"city": "Köln", "days": 2}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "gigachat": '<|function_call|>{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
    '<|function_call|>{"name": "now", "arguments": {}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
    '<|action_end|><|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
    "xlam": _LIST,
    "granite_20b": '<function_call> {"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '<function_call> {"name": "now", "arguments": {}}',
    "functionary_v3_1": '<function=weather>{"city": "Köln", "days": 2}</function><function=now>{}</function>',
    "functionary_v3_2": 'weather\n{"city": "Köln", "days": 2}>>>now\n{}',
    "solar": "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>weather<|tool_call:args|>"
    '{"city": "Köln", "days": 2}<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>now<|tool_call:args|>{}'
    "<|tool_call:end|>",
}

_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_NAME = "{{ c.function.name }}"
_JSON = '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}"
_COHERE = '{"tool_name": "' + _NAME + '", "parameters": ' + _ARGUMENTS + "}"
_PAIRS = "{% for k, v in c.function.arguments.items() %}"
_BARE = "{{ v if v is string else v | tojson }}"


def _template(calls: str, *, with_text: bool = True, family: str = "") -> str:
    """A minimal template: turns between ``<|im_start|>`` and ``<|im_end|>``, calls after the text of their turn or
    instead of it. ``family`` is a comment with the other marks of the family's published template.
    """
    content = "{{ m.content }}" if with_text else "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    return (
        f"{{# {family} #}}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first and tools %}{{ tools | tojson }}\n"
        "{% endif %}" + content + "{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _each(call: str, between: str = "") -> str:
    comma = "{{ '" + between + "' if not loop.last }}" if between else ""
    return "{% for c in m.tool_calls %}" + call + comma + "{% endfor %}"


# dialect: a small chat template that writes it
TEMPLATES: dict[str, str] = {
    "hermes": _template(_each(f"<tool_call>{_JSON}</tool_call>")),
    "qwen3_coder": _template(
        _each(
            f"<tool_call>\n<function={_NAME}>\n{_PAIRS}<parameter={{{{ k }}}}>\n{_BARE}\n</parameter>\n{{% endfor %}}"
            "</function>\n</tool_call>"
        )
    ),
    "glm": _template(
        _each(
            f"<tool_call>{_NAME}\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_BARE}</arg_value>\n"
            "{% endfor %}</tool_call>"
        )
    ),
    "llama_json": _template(_each(_JSON.replace('arguments":', 'parameters":'), "; "), with_text=False),
    "llama_pythonic": _template(
        "["
        + _each(
            _NAME + "(" + _PAIRS + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})",
            ", ",
        )
        + "]",
        with_text=False,
    ),
    "mistral": _template(_each(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}")),
    "deepseek_v3": _template(
        "<｜tool▁calls▁begin｜>"
        + _each(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>", "\\n"
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": _template(
        "<｜tool▁calls▁begin｜>"
        + _each(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_2": _template(
        "<｜DSML｜function_calls>\n"
        + _each(
            f'<｜DSML｜invoke name="{_NAME}">\n{_PAIRS}<｜DSML｜parameter name="{{{{ k }}}}" '
            f"string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_BARE}</｜DSML｜parameter>\n{{% endfor %}}"
            "</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>"
    ),
    "kimi_k2": _template(
        "<|tool_calls_section_begin|>"
        + _each(f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>")
        + "<|tool_calls_section_end|>"
    ),
    "minimax": _template(
        "<minimax:tool_call>\n"
        + _each(
            f'<invoke name="{_NAME}">\n{_PAIRS}<parameter name="{{{{ k }}}}">{_BARE}</parameter>\n{{% endfor %}}'
            "</invoke>\n"
        )
        + "</minimax:tool_call>"
    ),
    "granite": _template("<|tool_call|>[" + _each(_JSON, ", ") + "]"),
    "gemma": _template(
        _each(
            f"<|tool_call>call:{_NAME}{{{{ '{{' }}}}{_PAIRS}{{{{ k }}}}:"
            '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}'
            '{name:<|"|>{{ v.name }}<|"|>,at:{{ v.at | tojson }}}{% endif %}'
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
        )
    ),
    "harmony": _template(
        _each(
            f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>{_ARGUMENTS}",
            "<|call|><|start|>assistant",
        ),
        with_text=False,
    ),
    "seed_oss": _template(
        _each(
            f"<seed:tool_call>\n<function={_NAME}>\n{_PAIRS}<parameter={{{{ k }}}}>{{{{ v }}}}</parameter>\n"
            "{% endfor %}</function>\n</seed:tool_call>\n"
        )
    ),
    "hunyuan_v3": _template(
        "<tool_calls:opensource>\n"
        + _each(
            f"<tool_call:opensource>{_NAME}<tool_sep:opensource>\n{_PAIRS}<arg_key:opensource>{{{{ k }}}}"
            f"</arg_key:opensource>\n<arg_value:opensource>{_BARE}</arg_value:opensource>\n{{% endfor %}}"
            "</tool_call:opensource>\n"
        )
        + "</tool_calls:opensource>"
    ),
    "olmo3": _template(
        "<function_calls>"
        + _each(_NAME + "(" + _PAIRS + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})", "\\n")
        + "</function_calls>"
    ),
    "minimax_m1": _template("<tool_calls>\n" + _each(f"{_JSON}\n") + "</tool_calls>", family="<beginning_of_sentence>"),
    "minimax_m3": _template(
        f"{_NS}<tool_call>\n"
        + _each(
            f'{_NS}<invoke name="{_NAME}">{_PAIRS}{_NS}<{{{{ k }}}}>'
            "{% if v is string %}{{ v }}{% else %}"
            f"{_NS}<name>{{{{ v.name }}}}{_NS}</name>{_NS}<at>"
            f"{{% for n in v.at %}}{_NS}<item>{{{{ n }}}}{_NS}</item>{{% endfor %}}{_NS}</at>{{% endif %}}"
            f"{_NS}</{{{{ k }}}}>{{% endfor %}}{_NS}</invoke>\n"
        )
        + f"{_NS}</tool_call>"
    ),
    "minicpm": _template(
        _each(
            f'<function name="{_NAME}">{_PAIRS}<param name="{{{{ k }}}}">{{{{ v }}}}</param>{{% endfor %}}</function>\n'
        )
    ),
    "hunyuan": _template("<tool_calls>[" + _each(_JSON, ", ") + "]</tool_calls>"),
    "apriel": _template("<tool_calls>[" + _each(_JSON, ", ") + "]</tool_calls>", family="[BEGIN FINAL RESPONSE]"),
    "apertus": _template(
        "<|tools_prefix|>[" + _each('{"' + _NAME + '": ' + _ARGUMENTS + "}", ", ") + "]<|tools_suffix|>"
    ),
    "nemotron_v2": _template("<TOOLCALL>[" + _each(_JSON, ", ") + "]</TOOLCALL>"),
    "phi4_mini": _template("functools[" + _each(_JSON, ", ") + "]"),
    "command_r": _template("\nAction:\n```json\n[\n" + _each(_COHERE, ",\\n") + "\n]```"),
    "command_r7b": _template("<|START_ACTION|>[\n" + _each(_COHERE, ",\\n") + "\n]<|END_ACTION|>"),
    "gigachat": _template(_each("<|function_call|>" + _JSON), family="<|role_sep|>"),
    "internlm": _template(_each("<|action_start|><|plugin|>\n" + _JSON + "<|action_end|>")),
    "xlam": _template("[" + _each(_JSON, ", ") + "]", family='[{"name": '),
    "granite_20b": _template(_each("<function_call> " + _JSON + "\n")),
    "functionary_v3_1": _template(_each(f"<function={_NAME}>{_ARGUMENTS}</function>")),
    "functionary_v3_2": _template(_each(f">>>{_NAME}\n{_ARGUMENTS}"), family=">>>all"),
    "solar": _template(
        "<|tool_calls|>"
        + _each(
            "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
            + _NAME
            + "<|tool_call:args|>"
            + _ARGUMENTS
            + "<|tool_call:end|>"
        )
    ),
}

# dialect: one broken call, its fault, words of the reason
MALFORMED = {
    "hermes": [
        ('<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>', "string_arguments", "is a string"),
        ('<tool_call>{"name": "weather", "arguments": {}', "unclosed", "</tool_call> is missing"),
        ('<tool_call>{"name": "weather", "arguments": {}</tool_call>', "not_json", "not valid JSON"),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "bad_arguments", "not an array"),
        ('<tool_call>{"name": "weather"}</tool_call>', "no_arguments", '"arguments" is missing'),
        ('<tool_call>{"arguments": {}}</tool_call>', "no_name", '"name" is missing'),
        ('<tool_call>"weather"</tool_call>', "bad_form", "one JSON object"),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=days>\ntwo\n</parameter>\n</function>\n</tool_call>",
            "bad_arguments",
            "integer",
        ),
        ("<tool_call>{}</tool_call>", "bad_form", "<function=name>"),
        ("<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>", "bad_form", "<tool_call> before"),
        ("<tool_call><function=weather>Köln</function></tool_call>", "bad_arguments", "not an argument with its tags"),
        (
            "<tool_call><function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function>"
            "</tool_call>",
            "bad_arguments",
            "more than once",
        ),
        ("<tool_call><function=now></function>", "unclosed", "</tool_call> is missing"),
        (
            "<tool_call><function=weather><parameter=city>a<parameter=unit>b</parameter></function></tool_call>",
            "bad_arguments",
            "</parameter> is missing",
        ),
    ],
    "glm": [
        ("<tool_call><arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>", "no_name", "name of a tool"),
        (
            "<tool_call>weather\n<arg_key>days</arg_key><arg_value>two</arg_value></tool_call>",
            "bad_arguments",
            "integer",
        ),
        ("<tool_call>weather\n<arg_key>city</arg_key></tool_call>", "bad_arguments", "not an argument with its tags"),
        (
            "<tool_call>weather<arg_key>city</arg_key><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
            "bad_arguments",
            "not an argument with its tags",
        ),
        ("<tool_call>now", "unclosed", "</tool_call> is missing"),
    ],
    "llama_json": [
        ('{"name": "weather", "parameters": "{}"}', "string_arguments", "is a string"),
        ('{"name": "weather"}', "no_arguments", '"parameters" is missing'),
        ("<|python_tag|>weather.call(city=1)", "not_json", "not valid JSON"),
    ],
    "llama_pythonic": [
        ("[weather('Köln')]", "bad_arguments", "not an argument with its name"),
        ("[weather(city=Köln)]", "bad_arguments", "not a literal value"),
        ("[weather(days=__import__('os').getpid())]", "bad_arguments", "not a literal value"),
        ("[weather(days=1+1)]", "bad_form", "where ) or , should be"),
        ("[weather(city='a', city='b')]", "bad_arguments", "more than once"),
        ("[weather(city='Kö", "unclosed", "is missing"),
        ("[weather(city='Köln'", "unclosed", "is missing"),
        ("[weather(city='Köln')", "unclosed", "is missing"),
        ("[weather(city='Köln') now()]", "bad_form", "where ] or , should be"),
        ("[weather(city='\\x4')]", "bad_arguments", "is not a character"),
        ("[weather(days=" + "9" * 5000 + ")]", "bad_arguments", "not a number"),
        ("[weather(tags=" + "[" * 5000, "bad_arguments", "deep"),
        ("<|python_start|>[5]<|python_end|>", "no_name", "name of a tool"),
        ("<|python_start|>[]<|python_end|>", "bad_form", "no call"),
        ("<|python_start|>", "unclosed", "is missing"),
        ('<|tool_call_start|>[{"name": "weather"}]<|tool_call_end|>', "no_arguments", '"parameters" is missing'),
        ('<|tool_call_start|>[{"name": "weather", "parameters": {', "not_json", "not valid JSON"),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": "{}"}]', "string_arguments", "is a string"),
        ('[TOOL_CALLS]weather[ARGS]"{}"', "string_arguments", "is a string"),
        ('[TOOL_CALLS]weather[ARGS]{"city": ', "not_json", "not valid JSON"),
        ("[TOOL_CALLS][]", "bad_form", "no call"),
        ("[TOOL_CALLS]weather", "not_json", "not valid JSON"),
        ("[TOOL_CALLS]", "not_json", "not valid JSON"),
    ],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "bad_form", "no call in it"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{}<｜tool▁call▁end｜>", "bad_form", "```json"),
        (
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"{}"\n```<｜tool▁call▁end｜>',
            "string_arguments",
            "is a string",
        ),
    ],
    "deepseek_v3_1": [
        ("<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", "no_name", "<｜tool▁sep｜>"),
        ("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "bad_arguments", "not an array"),
        ('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>"{}"<｜tool▁call▁end｜>', "string_arguments", "is a string"),
        ("<｜tool▁calls▁begin｜>Köln<｜tool▁calls▁end｜>", "bad_form", "between the calls"),
        ("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}", "unclosed", "<｜tool▁call▁end｜> is missing"),
    ],
    "deepseek_v3_2": [
        (
            '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="days" string="false">two</｜DSML｜parameter>'
            "</｜DSML｜invoke>",
            "not_json",
            "not valid JSON",
        ),
        ('<｜DSML｜invoke name=""></｜DSML｜invoke>', "no_name", "name of a tool"),
        ('<｜DSML｜invoke name="now">', "unclosed", "is missing"),
    ],
    "kimi_k2": [
        (
            "<|tool_call_begin|>weather<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "no_name",
            "name:index",
        ),
        ("<|tool_call_begin|>functions.weather:0<|tool_call_end|>", "no_arguments", "arguments are missing"),
        (
            '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"{}"<|tool_call_end|>',
            "string_arguments",
            "is a string",
        ),
    ],
    "minimax": [
        ('<invoke name="weather"><parameter name="days">two</parameter></invoke>', "bad_arguments", "integer"),
        ('<invoke name=""></invoke>', "no_name", "name of a tool"),
        ('<invoke name="now">', "unclosed", "</invoke> is missing"),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "weather", "arguments": "{}"}]', "string_arguments", "is a string"),
        ("<|tool_call|>[]", "bad_form", "no call"),
        ('<|tool_call|>[{"name": "weather", "arguments": {}}', "not_json", "not valid JSON"),
        ("<|tool_call|>[5]", "bad_form", "one JSON object"),
        ('<tool_call>{"name": "now", "arguments": {}}', "bad_form", "one JSON array"),
        ('<tool_call> [{"name": "now", "arguments": 5}]', "bad_arguments", "not a number"),
    ],
    "gemma": [
        ("<|tool_call>weather{}<tool_call|>", "no_name", "call:name"),
        ('<|tool_call>call:weather<|"|>{}<|"|><tool_call|>', "string_arguments", "are a string"),
        ("<|tool_call>call:weather<tool_call|>", "no_arguments", "arguments are missing"),
        ('<|tool_call>call:weather{city:"Köln"}<tool_call|>', "bad_arguments", "not between quotation marks"),
        ("<|tool_call>call:weather{city:Köln}<tool_call|>", "bad_arguments", "'Köln' is not a value"),
        ('<|tool_call>call:weather{city:<|"|>Köln}<tool_call|>', "bad_arguments", "missing behind a string"),
        ("<|tool_call>call:weather{days:1,days:2}<tool_call|>", "bad_arguments", "more than once"),
        ("<|tool_call>call:weather{days:1 tags:[]}<tool_call|>", "bad_arguments", "a comma or }"),
        ("<|tool_call>call:weather{days:1}!<tool_call|>", "bad_arguments", "nothing may stand"),
        ("<|tool_call>call:weather{:1}<tool_call|>", "bad_arguments", "key:value"),
        ("<|tool_call>call:weather{tags:" + "[" * 200 + "<tool_call|>", "bad_arguments", "nested deeper"),
        ("<|tool_call>call:weather{}", "unclosed", "<tool_call|> is missing"),
    ],
    "harmony": [
        ("<|channel|>commentary to=functions.weather<|message|>{", "not_json", "not valid JSON"),
        ('<|channel|>commentary to=functions.weather<|message|>"{}"', "string_arguments", "is a string"),
        ("<|channel|>commentary to=functions.weather<|message|>[1]", "bad_arguments", "not an array"),
    ],
    "seed_oss": [
        (
            "<seed:tool_call><function=weather><parameter=days>two</parameter></function></seed:tool_call>",
            "bad_arguments",
            "integer",
        ),
        ("<function=now></function>", "bad_form", "<seed:tool_call> before"),
        ("<seed:tool_call><function=now></function>", "unclosed", "</seed:tool_call> is missing"),
    ],
    "hunyuan_v3": [
        ("<tool_call:opensource>now</tool_call:opensource>", "no_name", "<tool_sep>"),
        (
            "<tool_call:opensource>now<tool_sep:opensource>Köln</tool_call:opensource>",
            "bad_arguments",
            "not an argument",
        ),
        ("<tool_call:opensource>now<tool_sep:opensource>", "unclosed", "</tool_call> is missing"),
        ("<tool_calls:opensource></tool_calls:opensource>", "bad_form", "no call in it"),
    ],
    "olmo3": [
        ("<function_calls>\nweather('Köln')\n</function_calls>", "bad_arguments", "not an argument with its name"),
        ("<function_calls></function_calls>", "bad_form", "no call in it"),
        ("<function_calls>now(", "unclosed", "</function_calls> is missing"),
        ("<function_calls>Köln.</function_calls>", "bad_form", "should be"),
    ],
    "minimax_m1": [
        ('<tool_calls>\n{"name": "now", "arguments": {}}', "unclosed", "</tool_calls> is missing"),
        ('<tool_calls>\n{"name": "weather", "arguments": "{}"}\n</tool_calls>', "string_arguments", "is a string"),
        ('<tool_calls>\n{"name": "now", "arguments": {}}, 5\n</tool_calls>', "bad_form", "between the JSON"),
        ("<tool_calls>\n</tool_calls>", "not_json", "not valid JSON"),
    ],
    "minimax_m3": [
        (f'{_NS}<invoke name="weather">{_NS}<days>two{_NS}</days>{_NS}</invoke>', "bad_arguments", "integer"),
        (f'{_NS}<invoke name="weather">{_NS}<days>2{_NS}</city>{_NS}</invoke>', "bad_arguments", "closes no open tag"),
        (f'{_NS}<invoke name="weather">{_NS}<days>2{_NS}</invoke>', "bad_arguments", "is missing"),
        (f'{_NS}<invoke name="weather">Köln{_NS}</invoke>', "bad_arguments", "belongs to no argument"),
        (f'{_NS}<invoke name="weather">!{_NS}<city>a{_NS}</city>{_NS}</invoke>', "bad_arguments", "text between tags"),
        (
            f'{_NS}<invoke name="weather">{_NS}<city>a{_NS}</city>{_NS}<city>b{_NS}</city>{_NS}</invoke>',
            "bad_arguments",
            "more than once",
        ),
        (f'{_NS}<invoke name="now">' + f"{_NS}<a>" * 100 + f"{_NS}</invoke>", "bad_arguments", "nested deeper"),
        (f'{_NS}<invoke name="">{_NS}</invoke>', "no_name", "name of a tool"),
        (f'{_NS}<invoke name="now">', "unclosed", "</invoke> is missing"),
    ],
    "minicpm": [
        ('<function name="weather"><param name="days">two</param></function>', "bad_arguments", "integer"),
        ('<function name="weather">Köln</function>', "bad_arguments", "not an argument with its tags"),
        ("<function weather></function>", "no_name", "must begin with"),
        ('<function name="now">', "unclosed", "</function> is missing"),
    ],
    "hunyuan": [
        ('<tool_calls>[{"name": "weather", "arguments": "{}"}]</tool_calls>', "string_arguments", "is a string"),
        ('<tool_calls>[{"name": "weather", "arguments": {}]</tool_calls>', "not_json", "not valid JSON"),
        ('<tool_calls>[{"name": "now", "arguments": {}}]', "unclosed", "</tool_calls> is missing"),
        ('<tool_calls>[{"name": "now", "arguments": {}}] [1]</tool_calls>', "bad_form", "between the JSON"),
        ("<tool_calls>[]</tool_calls>", "bad_form", "no call"),
    ],
    "apriel": [
        ('<tool_calls>[{"name": "weather", "arguments": "{}"}]</tool_calls>', "string_arguments", "is a string"),
        ("<tool_calls>[", "unclosed", "</tool_calls> is missing"),
    ],
    "apertus": [
        ('<|tools_prefix|>[{"weather": "{}"}]<|tools_suffix|>', "string_arguments", "is a string"),
        ('<|tools_prefix|>[{"weather": {}, "now": {}}]<|tools_suffix|>', "bad_form", "only key"),
        ('<|tools_prefix|>[{"weather": {}}', "unclosed", "<|tools_suffix|> is missing"),
    ],
    "nemotron_v2": [
        ('<TOOLCALL>[{"name": "weather", "arguments": "{}"}]</TOOLCALL>', "string_arguments", "is a string"),
        ("<TOOLCALL>[{]</TOOLCALL>", "not_json", "not valid JSON"),
        ("<TOOLCALL>[]", "unclosed", "</TOOLCALL> is missing"),
    ],
    "phi4_mini": [
        ('functools[{"name": "weather", "arguments": "{}"}]', "string_arguments", "is a string"),
        ('functools[{"name": "weather"}]', "no_arguments", "is missing"),
        ("functools[{", "not_json", "not valid JSON"),
        ("<|tool_call|>[]<|/tool_call|>", "bad_form", "no call"),
    ],
    "command_r": [
        ('Action: ```json\n[{"tool_name": "weather", "parameters": "{}"}]\n```', "string_arguments", "is a string"),
        ('Action: ```json\n[{"tool_name": "weather"}]\n```', "no_arguments", '"parameters" is missing'),
        ('Action: ```json\n[{"tool_name": "now", "parameters": {}}]', "unclosed", "``` is missing"),
    ],
    "command_r7b": [
        (
            '<|START_ACTION|>[{"tool_name": "weather", "parameters": "{}"}]<|END_ACTION|>',
            "string_arguments",
            "is a string",
        ),
        ('<|START_ACTION|>[{"name": "weather", "parameters": {}}]<|END_ACTION|>', "no_name", '"tool_name" is missing'),
        ("<|START_ACTION|>[", "unclosed", "<|END_ACTION|> is missing"),
    ],
    "gigachat": [
        ('<|function_call|>{"name": "weather", "arguments": "{}"}', "string_arguments", "is a string"),
        ('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather"}', "no_arguments", "is missing"),
        ("<|function_call|>{", "not_json", "not valid JSON"),
    ],
    "internlm": [
        (
            '<|action_start|><|plugin|>{"name": "weather", "parameters": "{}"}<|action_end|>',
            "string_arguments",
            "is a string",
        ),
        (
            '<|action_start|><|plugin|>{"name": "now", "parameters": {}, "arguments": {}}<|action_end|>',
            "bad_arguments",
            "only one of",
        ),
        ('<|action_start|> <|plugin|>{"name": "now", "parameters": {}}', "unclosed", "<|action_end|> is missing"),
    ],
    "xlam": [
        ('[{"name": "weather", "arguments": "{}"}]', "string_arguments", "is a string"),
        ('[{"name": "weather"}]', "no_arguments", "is missing"),
        ('Well: ```json\n[{"name": "weather", "arguments": {}}', "not_json", "not valid JSON"),
    ],
    "granite_20b": [
        ('<function_call> {"name": "weather", "arguments": "{}"}', "string_arguments", "is a string"),
        ("<function_call> weather()", "not_json", "not valid JSON"),
    ],
    "functionary_v3_1": [
        ('<function=weather>"{}"</function>', "string_arguments", "is a string"),
        ("<function=weather>{</function>", "not_json", "not valid JSON"),
        ("<function=weather>{} {}</function>", "bad_arguments", "between the arguments"),
        ("<function=>{}</function>", "no_name", "name of a tool"),
        ("<function=now>{}", "unclosed", "</function> is missing"),
    ],
    "functionary_v3_2": [
        ('>>>weather\n"{}"', "string_arguments", "is a string"),
        ("weather\n{", "not_json", "not valid JSON"),
        (">>>all\nI look.>>>", "no_name", "name of a tool"),
    ],
    "solar": [
        (
            '<|tool_call:begin|>a<|tool_call:name|>weather<|tool_call:args|>"{}"<|tool_call:end|>',
            "string_arguments",
            "is a string",
        ),
        ("<|tool_call:begin|>a<|tool_call:end|>", "no_name", "<|tool_call:name|>"),
        ("<|tool_call:begin|>a<|tool_call:name|>now<|tool_call:end|>", "no_arguments", "are missing"),
        ("<|tool_call:begin|>a<|tool_call:name|>now", "unclosed", "<|tool_call:end|> is missing"),
    ],
}

# dialect: a call whose object is written as a JSON text where its own tags hold the arguments
IN_TAGS = {
    "qwen3_coder": '<tool_call><function=weather><parameter=tags>"[]"</parameter></function></tool_call>',
    "glm": '<tool_call>weather<arg_key>tags</arg_key><arg_value>"[]"</arg_value></tool_call>',
    "minimax": '<minimax:tool_call><invoke name="weather"><parameter name="tags">"[]"</parameter></invoke>'
    "</minimax:tool_call>",
    "deepseek_v3_2": '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="tags" string="true">[]'
    "</｜DSML｜parameter></｜DSML｜invoke>",
    "seed_oss": "<seed:tool_call><function=weather><parameter=tags>'[]'</parameter></function></seed:tool_call>",
    "hunyuan_v3": "<tool_call:opensource>weather<tool_sep:opensource><arg_key:opensource>tags</arg_key:opensource>"
    '<arg_value:opensource>"[]"</arg_value:opensource></tool_call:opensource>',
    "minimax_m3": f'{_NS}<invoke name="weather">{_NS}<tags>"[]"{_NS}</tags>{_NS}</invoke>',
    "minicpm": '<function name="weather"><param name="tags">"[]"</param></function>',
}

# -- other spellings of dialects above, and dialects of messages ------------------------------------------------------

_SPELLINGS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "kimi_vl": ("hermes", ()),
    "longcat": ("hermes", (("tool_call>", "longcat_tool_call>"),)),
    "iquest": ("glm", (("tool_call>", "iquest_tool_call>"),)),
    "longcat_2": ("glm", (("tool_call>", "longcat_tool_call>"), ("arg_", "longcat_arg_"))),
    "hunyuan_v4": ("hunyuan_v3", (("<tool_sep:opensource>", ""), (":opensource", ":abc"))),
    "granite_3_2": ("granite", ()),
    "dots": ("minimax", (("minimax:tool_call", "dots_function_call"),)),
    "step3": (
        "minimax",
        (
            ("</minimax:tool_call>", "<｜tool_calls_end｜>"),
            ("<minimax:tool_call>", "<｜tool_calls_begin｜>"),
            ("<invoke", "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke"),
            ("</invoke>", "</steptml:invoke><｜tool_call_end｜>"),
            ("<parameter", "<steptml:parameter"),
            ("</parameter", "</steptml:parameter"),
        ),
    ),
    "deepseek_v4_1": (
        "deepseek_v3_2",
        (("｜function_calls", "｜ calls"), ("｜invoke", "｜ invoke"), ("｜param", "｜ param")),
    ),
    "gigachat3_5": ("deepseek_v3_2", (("DSML｜function_calls", "GCML｜tool_calls"), ("DSML", "GCML"))),
    "functiongemma": (
        "gemma",
        (("<|tool_call>", "<start_function_call>"), ("<tool_call|>", "<end_function_call>"), ('<|"|>', "<escape>")),
    ),
}
"""Dialect: the dialect that it spells otherwise, and the replacements."""


def _respelled(name: str, text: str) -> str:
    for old, new in _SPELLINGS[name][1]:
        text = text.replace(old, new)
    return text


for _name, (_of, _) in _SPELLINGS.items():
    WRITTEN[_name] = _respelled(_name, WRITTEN[_of])
    TEMPLATES[_name] = _respelled(_name, TEMPLATES[_of])
    if _of in IN_TAGS:
        IN_TAGS[_name] = _respelled(_name, IN_TAGS[_of])
    MALFORMED[_name] = [
        (_respelled(_name, text), fault, _respelled(_name, words)) for text, fault, words in MALFORMED[_of]
    ]
for _name, _marks in {"kimi_vl": "◁think▷", "granite_3_2": "Here is my thought process:"}.items():
    TEMPLATES[_name] = TEMPLATES[_name].replace("{#  #}", f"{{# {_marks} #}}")
MALFORMED["hunyuan_v4"] = [
    ("<tool_call:abc>now", "unclosed", "</tool_call> is missing"),
    ("<tool_call:abc></tool_call:abc>", "no_name", "the name of a tool"),
]
MALFORMED["step3"] = [
    ('<｜tool_call_begin｜><steptml:invoke name="now">', "unclosed", "</steptml:invoke> is missing"),
    ('<steptml:invoke name=""></steptml:invoke>', "no_name", "the name of a tool"),
]
MALFORMED["functiongemma"] = [
    ("<start_function_call>call:weather{}", "unclosed", "<end_function_call> is missing"),
    ("<start_function_call>weather{}<end_function_call>", "no_name", "call:name"),
    ("<start_function_call>call:weather{city:Köln}<end_function_call>", "bad_arguments", "<escape>"),
    ("<start_function_call>call:now{} Köln<end_function_call>", "bad_arguments", "nothing may stand"),
    ("<start_function_call>call:weather{days:<escape>two<escape>}<end_function_call>", "bad_arguments", "integer"),
]


def _k3(tag: str, text: str) -> str:
    return f"<|open|>{tag}<|sep|>{text}<|close|>{tag.partition(' ')[0]}<|sep|>"


_ATEM = ' to={0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">\n{1}</atem:invoke>\n</atem:function_calls>'
_TYPE = "{{ 'string' if v is string else 'object' }}"
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|>"
)

WRITTEN |= {
    "kimi_k3": _k3(
        "tools",
        _k3(
            'call tool="weather" index="1"',
            _k3('argument key="city" type="string"', "Köln") + _k3('argument key="days" type="number"', "2"),
        )
        + _k3('call tool="now" index="2"', ""),
    ),
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>weather\n<ifm|arg_key>city</ifm|arg_key>"
    "<ifm|arg_value>Köln</ifm|arg_value><ifm|arg_key>days</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
    '<ifm|arg_value>2</ifm|arg_value></ifm|tool_call><ifm|tool_call>{"name": "now", "arguments": {}}</ifm|tool_call>'
    "</ifm|tool_calls>",
    "plamo3": "<|plamo:begin_tool_requests:plamo|>"
    + _PLAMO.format("weather", '{"city": "Köln", "days": 2}')
    + _PLAMO.format("now", "{}")
    + "<|plamo:end_tool_requests:plamo|>",
    "inkling": 'weather<|content_invoke_tool_json|>{"name": "weather", "args": {"city": "Köln", "days": 2}}'
    '<|end_message|><|message_model|>now<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>',
    "muse": _ATEM.format(
        "weather",
        '<atem:parameter name="city">Köln</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n',
    )
    + "<|eom|><|start|>assistant"
    + _ATEM.format("now", ""),
}
TEMPLATES |= {
    "kimi_k3": _template(
        "<|open|>tools<|sep|>"
        + _each(
            f'<|open|>call tool="{_NAME}" index="1"<|sep|>{_PAIRS}<|open|>argument key="{{{{ k }}}}" type="{_TYPE}"'
            f"<|sep|>{_BARE}<|close|>argument<|sep|>{{% endfor %}}<|close|>call<|sep|>"
        )
        + "<|close|>tools<|sep|>"
    ),
    "k2_horizon": _template(
        "<ifm|tool_calls>"
        + _each(
            f"<ifm|tool_call>{_NAME}{_PAIRS}<ifm|arg_key>{{{{ k }}}}</ifm|arg_key><ifm|arg_value>{_BARE}"
            "</ifm|arg_value>{% endfor %}</ifm|tool_call>"
        )
        + "</ifm|tool_calls>"
    ),
    "plamo3": _template(
        "<|plamo:begin_tool_requests:plamo|>"
        + _each(_PLAMO.format(_NAME, _ARGUMENTS))
        + "<|plamo:end_tool_requests:plamo|>"
    ),
    "inkling": _template(
        _each(
            f'<|message_model|>{_NAME}<|content_invoke_tool_json|>{{"name": "{_NAME}", "args": {_ARGUMENTS}}}'
            "<|end_message|>"
        )
    ),
    "muse": _template(
        _each(
            _ATEM.format(_NAME, _PAIRS + '<atem:parameter name="{{ k }}">' + _BARE + "</atem:parameter>\n{% endfor %}"),
            "<|eom|><|start|>assistant",
        )
    ),
}
MALFORMED |= {
    "kimi_k3": [
        (_k3('call index="1"', ""), "no_name", 'tool="..." is missing'),
        ('<|open|>call tool="now" index="1"<|sep|>', "unclosed", "<|close|>call<|sep|> is missing"),
        (_k3('call tool="weather"', _k3('argument key="days" type="number"', "two")), "not_json", "not valid JSON"),
        (_k3('call tool="weather"', _k3('argument key="days" type="number"', '"2"')), "bad_arguments", "type number"),
        (_k3('call tool="weather"', "Köln"), "bad_arguments", "not an argument with its tags"),
        (_k3('call tool="weather"', _k3('json type="object"', '"{}"')), "string_arguments", "is a string"),
    ],
    "k2_horizon": [
        ("<ifm|tool_call>now", "unclosed", "</ifm|tool_call> is missing"),
        ("<ifm|tool_call><ifm|arg_key>a</ifm|arg_key></ifm|tool_call>", "no_name", "the name of a tool"),
        ("<ifm|tool_call>weather<ifm|arg_key>a</ifm|arg_key></ifm|tool_call>", "bad_arguments", "not an argument"),
        ('<ifm|tool_call>{"name": "now", "arguments": "{}"}</ifm|tool_call>', "string_arguments", "is a string"),
    ],
    "plamo3": [
        (_PLAMO.format("", "{}"), "no_name", "the name of a tool"),
        (_PLAMO.format("now", '"{}"'), "string_arguments", "is a string"),
        (_PLAMO.format("now", "{"), "not_json", "not valid JSON"),
        ("<|plamo:begin_tool_request:plamo|>", "unclosed", "<|plamo:end_tool_request:plamo|> is missing"),
    ],
    "inkling": [
        ('now<|content_invoke_tool_json|>{"name": "now", "args": {}}', "unclosed", "<|end_message|> is missing"),
        (
            'now<|content_invoke_tool_json|>{"name": "now", "args": "{}"}<|end_message|>',
            "string_arguments",
            "is a string",
        ),
        ('now<|content_invoke_tool_json|>{"args": {}}<|end_message|>', "no_name", '"name" is missing'),
        ("now<|content_invoke_tool_text|>Now?<|end_message|>", "bad_form", "must be JSON"),
    ],
    "muse": [
        (' to=now<|message|><atem:invoke name="now">', "unclosed", "</atem:invoke> is missing"),
        (' to=now<|message|><atem:invoke name=""></atem:invoke>', "no_name", "the name of a tool"),
        (' to=weather<|message|><atem:invoke name="weather">Köln</atem:invoke>', "bad_arguments", "not an argument"),
    ],
}
OF_MESSAGES = {"harmony", "inkling", "muse"}
"""Dialects whose thoughts and calls are separate messages, so that a thought cannot quote a call with its marks."""
IN_TAGS["functiongemma"] = '<start_function_call>call:weather{tags:<escape>"[]"<escape>}<end_function_call>'
IN_TAGS["muse"] = _ATEM.format("weather", '<atem:parameter name="tags">"[]"</atem:parameter>\n')
