"""A stub server whose replies use unusual token ids, and call an adder twice before the answer."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.testing.server import StubServer
from tests.worlds import Speller


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
async def server(demo_tokenizer: Any) -> AsyncIterator[StubServer]:
    """Two calls, then an answer, in ids that no tokenizer would choose."""
    speller = Speller(demo_tokenizer, renderer_for(demo_tokenizer).stop_token_ids[0], seed=3, odd=1.0)

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        speller.rng = random.Random(len(input_ids))
        turn = demo_tokenizer.decode(input_ids).count("<tool_response>\n")
        said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {turn}, "b": 3}}}}\n</tool_call>'
        return [*speller.spell(said if turn < 2 else "The answer is 8."), speller.stop]

    async with StubServer(reply=reply) as stub:
        yield stub
