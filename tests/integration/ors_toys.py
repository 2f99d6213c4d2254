"""Toy environments on the servers of two SDKs: ``python ors_toys.py openreward|ors`` prints its URL.

``Adder``: get from ``start`` to ``target``. ``Writer``: reply in text; it has a terminal tool, tools of its task, a
conversation as prompt, secrets and group scores.
"""

import importlib
import os
import socket
import sys
from typing import Any

import uvicorn
from pydantic import BaseModel

from tests.integration.ors_words import LONG, PICTURE

kind = sys.argv[1]
os.environ["OPENREWARD_DISABLE_UPDATE_CHECK"] = "1"
if kind == "openreward":
    ors: Any = importlib.import_module("openreward.environments")
    Server = ors.Server
else:
    ors = importlib.import_module("ors")
    Server = importlib.import_module("ors.server").Server
Environment, tool, ToolOutput, TextBlock, ImageBlock = (
    ors.Environment,
    ors.tool,
    ors.ToolOutput,
    ors.TextBlock,
    ors.ImageBlock,
)

TASKS = [{"start": number, "target": number + 5} for number in range(8)]


class Amount(BaseModel):
    amount: int


class Adder(Environment):
    def __init__(self, task_spec: Any = {}, secrets: Any = {}) -> None:  # noqa: B006 - as the SDK has it
        super().__init__(task_spec=task_spec, secrets=secrets)
        self.secrets = secrets
        self.value = task_spec["start"]

    @classmethod
    def list_splits(cls) -> Any:
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return TASKS if split == "train" else TASKS[:2]

    def get_prompt(self) -> Any:
        return [TextBlock(text=f"Get from {self.value} to {self.task_spec['target']}.")]

    @tool
    async def add(self, params: Amount) -> ToolOutput:
        """Add to the number."""
        self.value += params.amount
        return ToolOutput(blocks=[TextBlock(text=str(self.value))], reward=-0.25, finished=False)

    @tool
    async def submit(self) -> ToolOutput:
        """Hand the number in."""
        right = self.value == self.task_spec["target"]
        return ToolOutput(blocks=[TextBlock(text="thanks")], reward=float(right), finished=True)

    @tool
    async def explode(self) -> ToolOutput:
        """Break."""
        raise RuntimeError(f"boom, and the key is {self.secrets.get('openai_api_key')}")

    @tool
    async def long(self) -> ToolOutput:
        """Say much."""
        return ToolOutput(blocks=[TextBlock(text=LONG)])

    @tool
    async def picture(self) -> ToolOutput:
        """Show a picture."""
        images = [ImageBlock(data=data, mimeType="image/png") for data in (PICTURE, "AAAA")]
        return ToolOutput(blocks=[TextBlock(text="see "), *images])

    @tool
    async def secret(self) -> ToolOutput:
        """Which secrets are there."""
        return ToolOutput(blocks=[TextBlock(text=",".join(sorted(self.secrets)))])


environments = [Adder]
if kind == "openreward":
    Message = ors.Message

    class Answer(BaseModel):
        text: str

    class Writer(Environment):
        @classmethod
        def list_splits(cls) -> Any:
            return ["train"]

        @classmethod
        def list_tasks(cls, split: str) -> Any:
            raise NotImplementedError

        @classmethod
        async def num_tasks(cls, split: str) -> int:
            return 3

        @classmethod
        async def get_task(cls, split: str, index: int) -> Any:
            return {"word": ["a", "b", "c"][index]}

        def get_messages(self) -> Any:
            return [
                Message(role="system", blocks=[TextBlock(text="Be brief.")]),
                Message(role="user", blocks=[TextBlock(text=f"Say {self.task_spec['word']}.")]),
            ]

        @ors.terminal
        @tool
        async def submit(self, params: Answer) -> ToolOutput:
            """Take the answer."""
            right = params.text == self.task_spec["word"]
            return ToolOutput(blocks=[TextBlock(text="ok")], reward=float(right), finished=True)

        @tool(shared=False)
        async def hint(self) -> ToolOutput:
            """Only for some tasks."""
            return ToolOutput(blocks=[TextBlock(text=self.task_spec["word"])])

        def list_task_tools(self) -> Any:
            specs = [ors.ToolSpec(name="hint", description="A hint.", input_schema=None)]
            return ors.ListToolsOutput(tools=specs if self.task_spec["word"] == "b" else [])

        async def score_group(self, candidates: Any) -> Any:
            return [float(len(candidate.messages[-1].blocks[-1].text)) for candidate in candidates]

    environments.append(Writer)

server = Server(environments)
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(4096)
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the servers' log of each request is not needed
config = uvicorn.Config(server.app, log_level="critical", access_log=False, timeout_keep_alive=60)
uvicorn.Server(config).run(sockets=[listening])
