"""An agent with a calculator, on the chat completions API of OpenAI. It uses the standard library only.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py "What is 5 + 3?"

It writes its last reply to answer.txt.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

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


def ask(messages):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        sys.exit(f"{response.status}: {answer['error']['message']}")
    return answer["choices"][0]["message"]


def result_of(call):
    try:
        arguments = json.loads(call["arguments"])
        value = FUNCTIONS[call["name"]][1](float(arguments["a"]), float(arguments["b"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"Error: {error}"
    return str(int(value)) if value == int(value) else repr(value)


def main(task, turns=4):
    messages = [{"role": "system", "content": "Use the tools. Finish with: The answer is N."}]
    messages.append({"role": "user", "content": task})
    for _ in range(turns):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = result_of(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    with open("answer.txt", "w") as file:
        file.write(message.get("content") or "")


if __name__ == "__main__":
    main(sys.argv[1])
