"""The registry: the dialect of a template, and dialects by name."""

import pytest

from rollouts.errors import ConfigError
from rollouts.tool_calls import DIALECTS, dialect_of_template, get_dialect

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
