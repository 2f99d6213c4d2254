"""ReTool in one assistant turn: programs between tags, and their output as text of the same turn.

Invariant: a program is read in the forms of slime's example ``retool``, and its output is written as there. Each
program runs in a fresh interpreter; an answer in a box ends the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from rollouts.dtypes import Message, Tool
from rollouts.environments.base import StepResult
from rollouts.environments.python_tool import (
    REQUIRED,
    Execution,
    PythonLimits,
    PythonToolEnvironment,
    notes,
    run_python,
)

__all__ = ["STOP", "CodeTagsEnvironment"]

STOP = ("</code>", "</tool_call>")
"""The stop strings of a completion."""

_INVALID = (
    "\nMy previous action is invalid. If I want to execute code, I should put the code between <code> and </code>. If "
    "I want to give the final answer, I should use the format 'Answer: \\boxed{answer}'. Let me try again.\n"
)
_NO_CODE = "\n\n<interpreter>\nError: No Python code found\n</interpreter>\n\n"
_ANSWER = re.compile(r"Answer:\s*\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", re.DOTALL)
_CODE = (("<code>", "</code>"), ("```python", "```"))


class CodeTagsEnvironment(PythonToolEnvironment):
    """Programs in ``<code>`` tags, ``<tool_call>`` tags or fenced blocks; ``Answer: \\boxed{…}`` is the answer.

    Arguments and errors are those of :class:`~rollouts.environments.python_tool.PythonToolEnvironment`, without
    ``images``: the output is text of the model's turn.
    """

    def __init__(
        self,
        *,
        limits: PythonLimits | None = None,
        require: Collection[str] | Literal["all"] = REQUIRED,
        paths: Sequence[str] = (),
    ) -> None:
        super().__init__(limits=limits, require=require, paths=paths)

    system_prompt = (
        "You are a helpful assistant that can use Python tools to solve mathematical problems. When you need to "
        "perform calculations, use the code_interpreter tool to execute code and get results.\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        '{"function": {"description": "A tool for executing Python code in a safe sandbox environment.", '
        '"name": "code_interpreter", "parameters": {"properties": {"code": {"description": "The Python code to '
        'execute", "type": "string"}}, "required": ["code"], "type": "object"}}, "type": "function"}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    """The prompt of slime's example: the model was tuned with it."""

    @property
    def tools(self) -> Sequence[Tool]:
        """None: the system prompt describes the interpreter, and a program is text."""
        return ()

    async def step(self, reply: Message) -> StepResult:
        text = f"{reply.reasoning or ''}{reply.text}"
        if _ANSWER.search(text):
            return StepResult(done=True)
        code = _program(text)
        if code is None:
            return StepResult(continuation=_INVALID, metrics={"invalid_actions": 1})
        if not code:
            return StepResult(continuation=_NO_CODE, metrics={"invalid_actions": 1})
        done = await run_python(code, limits=self.limits, paths=self.paths, require=self.require)
        text = f"\n\n<interpreter>\n{self._shown(done)}\n</interpreter>\n\n"
        return StepResult(continuation=text, metrics={"programs": 1})

    def _shown(self, done: Execution) -> str:
        """The output as slime's example writes it, then notes on truncation, timeout and exit code."""
        output = f"Output:\n{done.stdout}" if done.stdout else ""
        errors = f"\nErrors:\n{done.stderr}" if done.stderr else ""
        return "\n".join([f"{output}{errors}".strip(), *notes(done, self.limits)])


def _program(text: str) -> str | None:
    """The program of a reply, ``""`` if it is empty, ``None`` if there is none: a call counts before tags."""
    call = next((call for call in _between(text, "<tool_call>", "</tool_call>") if call[:1] + call[-1:] == "{}"), None)
    code = _called_program(call) if call is not None else ""
    if code:
        return code
    return next((code for tags in _CODE for code in _between(text, *tags)), None)


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """The texts between tags, without spaces around them; each character is read once, also of a reply of megabytes."""
    start = end = 0
    while (start := text.find(opening, start) + len(opening)) >= len(opening):
        end = end if end >= start else text.find(closing, start)
        if end < 0:
            return
        yield text[start:end].strip()


def _called_program(text: str) -> str:
    """The program of a call of the interpreter, ``""`` if the call has none. Lines may end inside its strings."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    arguments = call.get("arguments") if isinstance(call, dict) and call.get("name") == "code_interpreter" else None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    return code.strip() if isinstance(code, str) else ""
