"""Random conversations for tests: an environment with random messages, and a model with unusual tokenization."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import StepResult

TOOL = Tool(
    "look",
    "Look at something.",
    {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}, "required": ["at"]},
)
_WORDS = [
    "yes",
    "naïve",
    "ﬁ",
    "e\u0301",
    "日本語",
    "🙂",
    "  ",
    "\n",
    "\t",
    "<b>",
    '"',
    "\\",
    "{}",
    "1234567",
    "a" * 30,
    "ﷺ",
]


def some_text(rng: random.Random, most: int = 12) -> str:
    """Text with spaces, scripts, quotes and control characters in odd places."""
    return "".join(rng.choice(_WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(1, most)))


class RandomWorld:
    """Returns random tool results in the order of the calls, and user messages to plain replies until a random end."""

    def __init__(self, seed: int, turns: int = 4) -> None:
        self.rng = random.Random(seed)
        self.left = turns

    @property
    def tools(self) -> Sequence[Tool]:
        return (TOOL,)

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return (Message("system", f"Be brief. {some_text(self.rng)}"), *prompt.messages)

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        if self.left < 0:
            return StepResult(done=True, reward=self.rng.choice([0.0, 1.0]))
        if reply.tool_calls:
            return StepResult([Message("tool", some_text(self.rng), tool_call_id=call.id) for call in reply.tool_calls])
        return StepResult([Message("user", some_text(self.rng))])

    async def close(self) -> None:
        return None


class Speller:
    """A model with random replies, in tokens that no tokenizer would choose."""

    def __init__(self, tokenizer: Any, stop: int, seed: int, *, odd: float = 0.5) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.rng = random.Random(seed)
        self.odd = odd

    def reply(self) -> list[int]:
        """Ids of one reply, its stop id included."""
        parts = [some_text(self.rng)] if self.rng.random() < 0.7 else []
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            call = {"name": self.rng.choice(["look", "look", "fly"]), "arguments": {"at": some_text(self.rng, 3)}}
            text = msgspec.json.encode(call).decode()
            broken = self.rng.random() < 0.15
            parts.append(f"<tool_call>\n{text[:-1] if broken else text}\n</tool_call>")
        return [*self.spell("\n".join(parts) or "ok"), self.stop]

    def spell(self, text: str) -> list[int]:
        """Encode, then split some tokens into ids of their parts: the same text in other ids."""
        ids: list[int] = []
        for token in self._encode(text):
            piece = self.tokenizer.decode([token])
            parts = [part for character in piece for part in self._encode(character)]
            same = "\ufffd" not in piece and self.tokenizer.decode(parts) == piece
            ids += parts if same and len(piece) > 1 and self.rng.random() < self.odd else [token]
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
