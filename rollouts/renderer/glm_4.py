"""GLM-4: its chat template as a function, and its dialect. Both are chosen by path.

Invariant: calls, results and openings are written as the publisher's chat template of glm-4-9b-chat and the client of
its repository do (THUDM/GLM-4, composite_demo/src/client.py): the name of a tool follows ``<|assistant|>`` on the same
line, its arguments are the JSON below, and a result is a turn of ``<|observation|>``. No other module imports this one:
``chat_template="rollouts.renderer.glm_4:render", dialect="rollouts.renderer.glm_4:Glm4"``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from rollouts.dtypes import ChatDict, Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect, Reply
from rollouts.renderer.dialects.json import MalformedCallError, checked_arguments, json_prefix, unreadable

__all__ = ["Glm4", "render"]

_TURN = "<|assistant|>"
_INTRODUCTION = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。"
)
_TOOLS, _INSTRUCTION = "# 可用工具", "在调用上述函数时，请使用 Json 格式表示调用的参数。"


def render(
    messages: Sequence[ChatDict],
    tools: Sequence[ChatDict] | None = None,
    add_generation_prompt: bool = False,
    introduction: str = _INTRODUCTION,
) -> list[str]:
    """Write a conversation.

    Args:
        messages: in the chat format of transformers.
        tools: likewise.
        add_generation_prompt: whether a reply follows.
        introduction: the sentence before the tools; checkpoints differ in it.

    Returns:
        The parts of the text.

    Raises:
        ValueError: several calls in one turn.
    """
    parts = ["[gMASK]<sop>"]
    if tools:
        written = [_described(tool["function"]) for tool in tools]
        parts.append("<|system|>\n" + "\n\n".join(filter(None, [introduction, _TOOLS, *written])))
    for message in messages:
        role, content, calls = message["role"], message["content"] or "", message.get("tool_calls") or ()
        if role != "assistant":
            parts.append(f"<|{'observation' if role == 'tool' else role}|>\n{content}")
        elif content or not calls:
            parts.append(f"{_TURN}\n{content}")
        if len(calls) > 1:
            raise ValueError("GLM-4 has one call a turn")
        parts += (f"{_TURN}{call['function']['name']}\n{_json(call['function']['arguments'])}" for call in calls)
    return [*parts, _TURN] if add_generation_prompt else parts


def _described(function: ChatDict) -> str:
    return f"## {function['name']}\n\n{_json(function, indent=4)}\n{_INSTRUCTION}"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Glm4(BlockDialect):
    """The name of the tool in the line of ``<|assistant|>``, the arguments as JSON in those below.

    A first line without a JSON object below is text, as in THUDM/GLM-4, basic_demo/openai_api_server.py.
    """

    name = "glm_4"
    block = re.compile(r"(?:\A|<\|assistant\|>)(?P<name>[\w.-]+)[^\S\n]*\n\s*(?=\{)")
    wrapping = (_TURN,)

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, name = block.string, block["name"]
        following = text.find(_TURN, block.end())
        end = following if following >= 0 else len(text)
        try:
            value, at = json_prefix(text, block.end())
            if text[at:].lstrip() and not text[at:].lstrip().startswith(_TURN):
                raise MalformedCallError("there is text after the JSON of its arguments", "not_json")
            return [ToolCall(name, checked_arguments(value, name), raw=text[block.start("name") : at])], at
        except MalformedCallError as error:
            return [unreadable(text[block.start("name") : end], error, name)], end

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        reply = super().parse(text, tools=tools, reasoning_open=reasoning_open)
        return attrs.evolve(reply, content=reply.content.removeprefix("\n"))
