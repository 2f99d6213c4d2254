import json
import sys

import litellm
from agent_tools import KEY, MODEL, URL, bash

bash_tool = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    reply = litellm.completion(
        model="openai/" + MODEL,
        api_key=KEY,
        api_base=URL,
        messages=messages,
        tools=[{"type": "function", "function": bash_tool}],
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    ids, logprobs = choice.provider_specific_fields["token_ids"], choice.logprobs.content
    assert len(ids) == len(logprobs) > 0, "as Harbor's collector reads them"
    assert len(reply.prompt_token_ids) > 0
    messages.append(choice.message.model_dump())
    if not choice.message.tool_calls:
        break
    for call in choice.message.tool_calls:
        output = bash(json.loads(call.function.arguments)["command"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
