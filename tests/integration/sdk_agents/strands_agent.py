import sys

from agent_tools import KEY, MODEL, URL, bash
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"api_key": KEY, "base_url": URL}, model_id=MODEL)
Agent(model=model, tools=[tool(bash)])(sys.argv[1])
