"""A chat template in Python is chosen by name and judged by the same self-test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.renderer.python_template import ENTRY_POINTS
from tests.families import TOOLS

HERE = "tests.renderer.test_python_template"


def render(messages: Any, tools: Any = None, add_generation_prompt: bool = False, loud: bool = False) -> list[str]:
    """ChatML with hermes calls, as a list of parts; it empties the tools and the objects that it is given."""
    parts = []
    for message in messages:
        content = message["content"] or ""
        if message["role"] == "user" and content == "/quiet":
            content = "hush"
        text = f"<|im_start|>{message['role']}\n{content}"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = __import__("json").dumps(function["arguments"])
            for value in function["arguments"].values():
                _ = value.clear() if isinstance(value, dict) else None
            text += f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'
        parts.append(text + "<|im_end|>\n")
    if tools:
        parts.insert(0, f"<tools>{[tool['function']['name'] for tool in tools]}</tools>")
        tools.clear()
    return [*parts, "<|im_start|>assistant\n" if add_generation_prompt else "", "LOUD" if loud else ""]


def lossy(messages: Any, tools: Any = None, add_generation_prompt: bool = False) -> str:
    """A template that leaves tool messages out."""
    return "".join(render([message for message in messages if message["role"] != "tool"], tools, add_generation_prompt))


def renderer_with(template: str, **options: Any) -> Renderer:
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer.chat_template = None
    return Renderer(tokenizer, chat_template=template, **options)


def test_a_function_is_judged_as_a_template() -> None:
    """Openings, calls and bridges are those of the function; a lossy one is refused."""
    renderer = renderer_with(f"{HERE}:render")
    found = renderer.self_test(TOOLS)
    assert (found.verdict, found.calls, renderer.dialect.name) == ("exact", "read", "hermes")
    history = [Message("user", "Well?")]
    expected = "<tools>['look', 'leap']</tools><|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(renderer.opening(history, TOOLS)) == expected
    assert renderer.render(history, TOOLS) == expected
    history.append(Message("assistant", tool_calls=[ToolCall("look", {"at": {"x": 1}})]))
    assert '{"at": {"x": 1}}' in renderer.render(history) == renderer.render(history)
    with pytest.raises(ConfigError, match="leaves out tool messages"):
        renderer_with(f"{HERE}:lossy").self_test(TOOLS).raise_if_refused()


def test_its_arguments_are_variables_and_its_comparisons_switches() -> None:
    """A variable that it does not take is refused; its text is part of the fingerprint."""
    renderer = renderer_with(f"{HERE}:render", template_kwargs={"loud": True})
    assert renderer.render([Message("user", "Well?")]).endswith("LOUD")
    assert renderer.template_variables == {"loud"}
    assert renderer.fingerprints() != renderer_with(f"{HERE}:render").fingerprints()
    assert "/quiet" in renderer._model.template.constants
    with pytest.raises(ConfigError, match="a variable that"):
        renderer_with(f"{HERE}:render", template_kwargs={"quiet": True})


def test_a_function_that_cannot_be_used_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not importable, no function of messages; an entry point is found by its name."""
    with pytest.raises(ConfigError, match=r"nowhere\.at_all:f' cannot be loaded: ModuleNotFoundError"):
        renderer_with("nowhere.at_all:f")
    with pytest.raises(ConfigError, match="a function of messages, tools, add_generation_prompt"):
        renderer_with(f"{HERE}:renderer_with")
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nours = {HERE}:render\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert renderer_with("ours").self_test(TOOLS).verdict == "exact"
