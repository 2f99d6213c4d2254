import asyncio
import sys

from agent_tools import KEY, MODEL, URL, bash
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_key=KEY, api_base=URL, is_chat_model=True, is_function_calling_model=True, context_window=30000
)


async def main():
    await FunctionAgent(tools=[bash], llm=llm).run(sys.argv[1])


asyncio.run(main())
