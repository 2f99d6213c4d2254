import asyncio
import sys

from agent_tools import KEY, MODEL, URL, bash
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

info = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


async def main():
    client = OpenAIChatCompletionClient(model=MODEL, api_key=KEY, base_url=URL, model_info=info)
    agent = AssistantAgent("worker", client, tools=[bash], max_tool_iterations=10)
    await agent.run(task=sys.argv[1])


asyncio.run(main())
