import sys

from agent_tools import KEY, MODEL, URL, bash
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

llm = LLM(model="openai/" + MODEL, api_key=KEY, base_url=URL)
agent = Agent(role="worker", goal="work", backstory="none", llm=llm, tools=[tool("bash")(bash)])
Crew(agents=[agent], tasks=[Task(description=sys.argv[1], expected_output="a word", agent=agent)]).kickoff()
