import sys

from agent_tools import KEY, MODEL, URL, bash
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

generator = OpenAIChatGenerator(model=MODEL, api_key=Secret.from_token(KEY), api_base_url=URL)
agent = Agent(chat_generator=generator, tools=[create_tool_from_function(bash)])
agent.run(messages=[ChatMessage.from_user(sys.argv[1])])
