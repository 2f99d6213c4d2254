import sys

import dspy
from agent_tools import KEY, MODEL, URL, bash

dspy.configure(lm=dspy.LM("openai/" + MODEL, api_key=KEY, api_base=URL, cache=False))
dspy.ReAct("task -> answer", tools=[bash])(task=sys.argv[1])
