"""The registry: the dialect of a template, and dialects by name."""

import sys
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.renderer.dialects import DIALECTS, dialect_of_template, get_dialect
from tests.dialects import TEMPLATES

EXPECTED = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "trl-qwen3_instruct_2507": "hermes",
    "trl-qwen3_training": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "GLM-4.6": "glm",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "hfcfg-deepseek_v3": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v3_1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v3_2",
    "openai-gpt-oss-120b": "harmony",
    "HuggingFaceTB-SmolLM3-3B": "plain",
    "microsoft-Phi-3.5-mini-instruct": "plain",
}


@pytest.mark.parametrize(("template", "dialect"), EXPECTED.items())
def test_the_template_tells_the_dialect(template: str, dialect: str, chat_template) -> None:
    """Each real template has the dialect of its model family."""
    assert dialect_of_template(chat_template(template)) == dialect


SHAPES = {
    **{name: [text] for name, text in TEMPLATES.items() if name not in ("llama_json", "llama_pythonic")},
    "llama_pythonic": ["<|tool_list_start|>{{ tools }}<|tool_list_end|>", "<|tool_call_start|>[", "[func_name1(a=1)]"],
    "llama_json": ['{"name": function name, "parameters": dictionary of argument name and its value}'],
    "gigachat": ["{{ role + add_tokens.role_sep }}{# role_sep='<|role_sep|>' #}{'role': 'function call'}"],
    "apriel": [
        "Return calls within <tool_call></tool_call>. [BEGIN FINAL RESPONSE] <tool_calls>[{{ calls }}]</tool_calls>"
    ],
    "minimax_m3": ["{%- set toolcall_begin_token = ']<]minimax[>[' ~ '<tool_call>' -%}"],
    "minicpm": ['<function name="f"><param name="k">v</param></function>{# <tool_sep> between the parts of a text #}'],
    "phi4_mini": ["<|tool|>{{ tools | tojson }}<|/tool|>", "prefix function calls with functools[...]"],
    "command_r": ['Action:\n```json\n[{{ \'"tool_name": "\' + name }}]```'],
    "hermes": ["{%- set xml_tools %}within <tool_call></tool_call> XML tags{% endset %}{# as SmolLM3 #}"],
    "deepseek_v3_2": ["{{ '<｜DSML｜tool_calls>' }}"],
    "plain": ["{{ messages }}", "```json", "<tool_response>", "Action:"],
}
"""dialect: minimal templates with the marks of the families' published ones, in their form."""


@pytest.mark.parametrize(("dialect", "template"), [(name, text) for name in SHAPES for text in SHAPES[name]])
def test_the_marks_of_a_family_tell_its_dialect(dialect: str, template: str) -> None:
    """Minimal templates of the same shape as the published ones of each family."""
    assert dialect_of_template(template) == dialect


def test_every_dialect_is_found_in_a_template() -> None:
    """No dialect can be chosen only by name."""
    assert set(SHAPES) == set(DIALECTS)


OWN = """
from rollouts.renderer.dialects import Reply

class Shout:
    name = "shout"
    def parse(self, text, *, tools=(), reasoning_open=None):
        return Reply(text.upper())

shouting, silent = Shout(), 5
"""


@pytest.fixture
def own_dialects(tmp_path: Path):
    """An installed package with entry points in the group of dialects."""
    (tmp_path / "shouting_dialects.py").write_text(OWN)
    info = tmp_path / "shouting_dialects-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting-dialects\nVersion: 1.0\n")
    points = ["shout = shouting_dialects:Shout", "silent = shouting_dialects:silent", "lost = shouting_dialects:lost"]
    (info / "entry_points.txt").write_text("[rollouts.dialects]\n" + "\n".join(points) + "\n")
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))
    sys.modules.pop("shouting_dialects", None)


@pytest.mark.parametrize("name", ["shout", "shouting_dialects:Shout", "shouting_dialects:shouting"])
def test_a_dialect_of_another_package_has_a_name_or_a_path(name: str, own_dialects: None) -> None:
    """By its entry point, as a class or as an object at a path."""
    assert get_dialect(name).parse("ja").content == "JA"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("silent", "a method parse"),
        ("lost", "cannot be loaded: AttributeError"),
        ("no_module_here:x", "cannot be loaded: ModuleNotFoundError"),
        ("shouts", "shout, silent"),
    ],
)
def test_a_dialect_that_cannot_be_used_is_refused_with_the_reason(name: str, words: str, own_dialects: None) -> None:
    """No dialect, an attribute or a module that is not there, and a wrong name."""
    with pytest.raises(ConfigError, match=words):
        get_dialect(name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The ConfigError contains every name."""
    with pytest.raises(ConfigError) as caught:
        get_dialect("nonsense")
    assert all(name in str(caught.value) for name in DIALECTS)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("text", ["", " ", "Hello.\n", "{a: 1}", "[1, 2]", "x < y"])
def test_text_without_calls_comes_back_unchanged(name: str, text: str) -> None:
    """No dialect finds a call in it."""
    reply = get_dialect(name).parse(text)
    assert (reply.content, reply.tool_calls, reply.reasoning) == (text, (), None)


def test_the_plain_dialect_still_separates_reasoning() -> None:
    """It finds no calls."""
    reply = get_dialect("plain").parse("<think>a</think><tool_call>{}</tool_call>")
    assert (reply.reasoning, reply.content, reply.tool_calls) == ("a", "<tool_call>{}</tool_call>", ())
