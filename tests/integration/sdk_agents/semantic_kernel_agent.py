import asyncio
import sys

from agent_tools import KEY, MODEL, URL, bash
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Shell:
    @kernel_function(description="Runs a command.")
    def bash(self, command: str) -> str:
        return bash(command)


async def main():
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(api_key=KEY, base_url=URL))
    agent = ChatCompletionAgent(service=service, name="worker", plugins=[Shell()])
    await agent.get_response(messages=sys.argv[1])


asyncio.run(main())
