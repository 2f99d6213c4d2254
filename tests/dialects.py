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
    },
}
TOOLS = [Tool("weather", "Tells the weather.", SCHEMA), Tool("now", "Tells the time.")]

# dialect: two calls, weather(city="Köln", days=2) and now()
WRITTEN = {
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
}

_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_NAME = "{{ c.function.name }}"
_JSON = '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}"
_PAIRS = "{% for k, v in c.function.arguments.items() %}"
_BARE = "{{ v if v is string else v | tojson }}"


def _template(calls: str, *, with_text: bool = True) -> str:
    """Turns between ``<|im_start|>`` and ``<|im_end|>``; calls stand behind the text of their turn, or instead."""
    content = "{{ m.content }}" if with_text else "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first and tools %}{{ tools | tojson }}\n"
        "{% endif %}" + content + "{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _each(call: str, between: str = "") -> str:
    comma = "{{ '" + between + "' if not loop.last }}" if between else ""
    return "{% for c in m.tool_calls %}" + call + comma + "{% endfor %}"


# dialect: a small chat template that writes it
TEMPLATES = {
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
}

# dialect: one broken call, its fault, words of the reason
MALFORMED = {
    "hermes": [
        ('<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>', "string_arguments", "is a string"),
        ('<tool_call>{"name": "weather", "arguments": {}}', "unclosed", "</tool_call> is missing"),
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
        ("<tool_call><function=weather>Köln</function></tool_call>", "bad_arguments", "no argument with its tags"),
        (
            "<tool_call><function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function>"
            "</tool_call>",
            "bad_arguments",
            "more than once",
        ),
        ("<tool_call><function=now></function>", "unclosed", "</tool_call> is missing"),
    ],
    "glm": [
        ("<tool_call><arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>", "no_name", "name of a tool"),
        (
            "<tool_call>weather\n<arg_key>days</arg_key><arg_value>two</arg_value></tool_call>",
            "bad_arguments",
            "integer",
        ),
        ("<tool_call>weather\n<arg_key>city</arg_key></tool_call>", "bad_arguments", "no argument with its tags"),
        ("<tool_call>now", "unclosed", "</tool_call> is missing"),
    ],
    "llama_json": [
        ('{"name": "weather", "parameters": "{}"}', "string_arguments", "is a string"),
        ('{"name": "weather"}', "no_arguments", '"parameters" is missing'),
        ("<|python_tag|>weather.call(city=1)", "not_json", "not valid JSON"),
    ],
    "llama_pythonic": [
        ("[weather('Köln')]", "bad_arguments", "no argument with its name"),
        ("[weather(city=Köln)]", "bad_arguments", "no literal value"),
        ("[weather(days=__import__('os').getpid())]", "bad_arguments", "no literal value"),
        ("[weather(days=1+1)]", "bad_form", "where ) or , should be"),
        ("[weather(city='a', city='b')]", "bad_arguments", "more than once"),
        ("[weather(city='Kö", "unclosed", "is missing"),
        ("[weather(city='Köln'", "unclosed", "is missing"),
        ("[weather(city='Köln')", "unclosed", "is missing"),
        ("[weather(city='Köln') now()]", "bad_form", "where ] or , should be"),
        ("[weather(city='\\x4')]", "bad_arguments", "is no character"),
        ("[weather(days=" + "9" * 5000 + ")]", "bad_arguments", "no number"),
        ("[weather(tags=" + "[" * 5000, "bad_arguments", "deep"),
        ("<|python_start|>[5]<|python_end|>", "no_name", "name of a tool"),
        ("<|python_start|>[]<|python_end|>", "bad_form", "no call"),
        ("<|python_start|>", "unclosed", "is missing"),
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
            "functions.name:index",
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
    ],
    "gemma": [
        ("<|tool_call>weather{}<tool_call|>", "no_name", "call:name"),
        ('<|tool_call>call:weather<|"|>{}<|"|><tool_call|>', "string_arguments", "are a string"),
        ("<|tool_call>call:weather<tool_call|>", "no_arguments", "arguments are missing"),
        ('<|tool_call>call:weather{city:"Köln"}<tool_call|>', "bad_arguments", "not between quotation marks"),
        ("<|tool_call>call:weather{city:Köln}<tool_call|>", "bad_arguments", "'Köln' is no value"),
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
}

# dialect: a call whose object is written as a JSON text where its own tags hold the arguments
IN_TAGS = {
    "qwen3_coder": '<tool_call><function=weather><parameter=tags>"[]"</parameter></function></tool_call>',
    "glm": '<tool_call>weather<arg_key>tags</arg_key><arg_value>"[]"</arg_value></tool_call>',
    "minimax": '<minimax:tool_call><invoke name="weather"><parameter name="tags">"[]"</parameter></invoke>'
    "</minimax:tool_call>",
    "deepseek_v3_2": '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="tags" string="true">[]'
    "</｜DSML｜parameter></｜DSML｜invoke>",
}
