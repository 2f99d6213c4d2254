"""A program that asks the model once, about its task and a file, and writes the reply to a file. Standard library only.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py "Grade the answer."

It reads input.txt where there is one, and writes output.txt.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import http.client
import json
import os
import sys
from urllib.parse import urlsplit


def ask(text):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        sys.exit(f"{response.status}: {answer['error']['message']}")
    return answer["choices"][0]["message"].get("content") or ""


def main(task):
    if os.path.exists("input.txt"):
        with open("input.txt") as file:
            task = f"{task}\n\n{file.read()}"
    with open("output.txt", "w") as file:
        file.write(ask(task))


if __name__ == "__main__":
    main(sys.argv[1])
