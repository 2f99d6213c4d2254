"""An agent with a calculator, on the SDK of OpenAI (``pip install openai``).

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent_openai.py "What is 5 + 3?"

It writes its last reply to answer.txt. :func:`solve` is the agent as an async function.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

SYSTEM = {"role": "system", "content": "Use the tools. Finish with: The answer is N."}
FUNCTIONS = {
    "add": ("Add b to a.", lambda a, b: a + b),
    "subtract": ("Subtract b from a.", lambda a, b: a - b),
    "multiply": ("Multiply a by b.", lambda a, b: a * b),
    "divide": ("Divide a by b.", lambda a, b: a / b),
}
NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": PARAMETERS}}
    for name, (text, _) in FUNCTIONS.items()
]


def result_of(call):
    """The result of one call as text."""
    try:
        arguments = json.loads(call.arguments)
        value = FUNCTIONS[call.name][1](float(arguments["a"]), float(arguments["b"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"Error: {error}"
    return str(int(value)) if value == int(value) else repr(value)


async def solve(client: Any, task: str, model: str = "policy", turns: int = 4) -> str:
    """Solve a problem; return the last reply."""
    messages = [SYSTEM, {"role": "user", "content": task}]
    content = ""
    for _ in range(turns):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        content = message.content or ""
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result_of(call.function)} for call in calls]
    return content


async def main(task):
    """Solve the problem of the command line."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI() as client:
        return await solve(client, task, os.environ["OPENAI_MODEL"])


if __name__ == "__main__":
    Path("answer.txt").write_text(asyncio.run(main(sys.argv[1])))
