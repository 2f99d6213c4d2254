import sys

import instructor
import openai
from agent_tools import KEY, MODEL, URL, bash
from pydantic import BaseModel


class Command(BaseModel):
    """A command to run."""

    command: str


client = instructor.from_openai(openai.OpenAI(api_key=KEY, base_url=URL))
found = client.chat.completions.create(
    model=MODEL, response_model=Command, messages=[{"role": "user", "content": sys.argv[1]}]
)
bash(found.command)
