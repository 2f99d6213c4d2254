"""The workloads of the benchmarks: shapes of episodes, and texts, replies and an environment with these shapes.

Every compared loop runs the same :class:`Play`: the same prompts, server replies and observations, so that only the
work of the loop differs.
"""

from __future__ import annotations

import functools
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics  # prose with code in it, on every machine

import attrs
import numpy as np

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult, ToolEnvironment, tool
from rollouts.renderer import Renderer, renderer_for

__all__ = ["WORKLOADS", "Play", "Workload", "default_tokenizer"]

ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class Workload:
    """The shape of one episode, in tokens."""

    turns: int
    reply: int
    prompt: int = 1000
    observation: int = 128
    samples: int = 256
    """Samples in one round."""
    in_flight: int = 64


WORKLOADS = {
    "S": Workload(turns=4, reply=512),
    "L": Workload(turns=1, reply=8192, samples=128),
    "A": Workload(turns=32, reply=64, observation=256, samples=64),
    "H": Workload(turns=16, reply=32, prompt=16_000, observation=64, samples=32, in_flight=32),
}
"""``S``: a short agent; ``L``: one long thought; ``A``: many small turns; ``H``: small turns behind a long history."""


BOOK = "\n".join(topics.values())
_OBSERVATION = "OBSERVATION"
_MOST_TURNS = 32


def _observation(number: int, turn: int, length: int) -> str:
    """The text of one turn of one sample: no other turn or sample has the same."""
    at = length * (_MOST_TURNS * number + turn) % (len(BOOK) - length)
    return f"{number} {BOOK[at : at + length].strip()}"


class Looker(ToolEnvironment):
    """Returns a new text for each call; the episode ends after a given number of replies."""

    def __init__(self, turns: int, length: int) -> None:
        self._turns = turns
        self._length = length
        self._turn = 0

    @tool
    def look(self, at: str) -> str:
        """Looks into a direction and tells what is there."""
        return _observation(self._number, self._turn - 1, self._length)

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        assert prompt.index is not None  # the number of the sample
        self._number = prompt.index
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        self._turn += 1
        if self._turn == self._turns:
            return StepResult(done=True, reward=float(len(reply.content) % 2))
        return await super().step(reply)


@attrs.frozen(eq=False)
class Play:
    """A workload with its texts."""

    workload: Workload
    renderer: Renderer
    prompts: tuple[Prompt, ...]
    length: int
    """Characters of an observation."""
    reply: tuple[int, ...]
    tools: tuple[Tool, ...]
    openings: tuple[str, ...]
    """Each prompt as rendered by the template."""
    around: str
    """The text between two replies, with a mark in the place of the observation."""
    n: int = 1
    """Samples of each prompt; nothing else is shared by two samples."""

    @classmethod
    def of(cls, workload: Workload, renderer: Renderer, n: int = 1) -> Play:
        at = 0

        def text(tokens: int) -> str:
            """The next text of the book, which repeats at its end."""
            nonlocal at
            length = 4 * tokens
            while len(renderer.encode(BOOK[at : at + length])) > tokens:
                length = int(0.97 * length)
            found = BOOK[at : at + length]
            at = (at + length) % (len(BOOK) - 80_000)
            return found

        texts = [f"{number} {text(workload.prompt - 60)}" for number in range(workload.samples // n)]
        prompts = tuple(Prompt(text, index=number) for number, text in enumerate(texts))
        length = len(text(workload.observation - 25))
        call = '<tool_call>\n{"name": "look", "arguments": {"at": "north"}}\n</tool_call>'
        end = [*renderer.encode(call if workload.turns > 1 else ".").tolist(), renderer.stop_token_ids[0]]
        if len(end) > workload.reply:
            raise SystemExit(f"this tokenizer writes a call in {len(end)} tokens; the workload's replies have fewer")
        words = renderer.encode(text(2 * workload.reply)).tolist()
        while len(words) < workload.reply:
            words *= 2
        reply = (*words[: workload.reply - len(end)], *end)
        tools = tuple(Looker(workload.turns, length).tools)
        history = [Message("user", "U"), renderer.parse(reply, tools=tools)]
        result = Message("tool", _OBSERVATION, tool_call_id="call00000", name="look")
        around = renderer.bridge(history, [result], tools=tools, tail=reply)
        return cls(
            workload=workload,
            renderer=renderer,
            prompts=prompts,
            length=length,
            reply=reply,
            tools=tools,
            openings=tuple(renderer.render([Message("user", str(prompt.prompt))], tools) for prompt in prompts),
            around=renderer.decode(around),
            n=n,
        )

    def opening(self, number: int) -> str:
        """The rendered prompt of a sample."""
        return self.openings[number // self.n]

    def bridge(self, number: int, turn: int) -> str:
        """The tokens between two replies of a sample; no two are the same."""
        return self.around.replace(_OBSERVATION, _observation(number, turn, self.length), 1)

    @property
    def environment_cls(self) -> functools.partial[Looker]:
        return functools.partial(Looker, self.workload.turns, self.length)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in one round."""
        return self.workload.samples * self.workload.turns * self.workload.reply

    def expected(self, number: int) -> np.ndarray:
        """The final ids of one sample, equal for every loop."""
        encode = self.renderer.encode
        parts = [encode(self.opening(number)), np.array(self.reply, np.int32)]
        for turn in range(self.workload.turns - 1):
            parts += [encode(self.bridge(number, turn)), np.array(self.reply, np.int32)]
        return np.concatenate(parts)


@functools.cache
def _unpacked(archive: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rollouts-bench-"))
    with tarfile.open(archive, "r:xz") as file:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            file.extractall(folder, filter="data")
        else:
            file.extractall(folder)
    return next(folder.iterdir())


def default_tokenizer() -> Path:
    """Qwen3's tokenizer if the test assets exist, as in ``tests/conftest.py``; else that of the demo model."""
    assets = Path(os.environ.get("ROLLOUTS_TEST_ASSETS") or ROOT.parent / "shared" / "assets")
    archive = assets / "tokenizers" / "qwen3.tar.xz"
    return _unpacked(archive) if archive.is_file() else DEMO_MODEL


def play(name: str, tokenizer: str | Path) -> Play:
    return Play.of(WORKLOADS[name], renderer_for(tokenizer))
