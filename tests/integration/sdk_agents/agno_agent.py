import os
import sys

from agent_tools import KEY, MODEL, URL, bash
from agno.agent import Agent

api = os.environ["AGENT_API"]
if api == "messages":
    from agno.models.anthropic import Claude

    model = Claude(id=MODEL, api_key=KEY, client_params={"base_url": os.environ["ANTHROPIC_BASE_URL"]})
elif api == "responses":
    from agno.models.openai import OpenAIResponses

    model = OpenAIResponses(id=MODEL, api_key=KEY, base_url=URL)
else:
    from agno.models.openai import OpenAIChat

    model = OpenAIChat(id=MODEL, api_key=KEY, base_url=URL)
agent = Agent(model=model, tools=[bash], telemetry=False)
if api == "chat, stream":
    list(agent.run(sys.argv[1], stream=True))
else:
    agent.run(sys.argv[1])
