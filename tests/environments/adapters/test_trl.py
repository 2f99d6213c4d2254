"""Classes written for TRL's ``environment_factory``, by its documented contract; TRL is not needed to play them."""

from __future__ import annotations

from typing import Any

import PIL.Image
import pytest

from rollouts.dtypes import Image, Message, Prompt, ToolCall
from rollouts.environments.adapters.trl import TRLEnvironment
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.testing.playing import calling, play


class Counter:
    """A class as TRL's documentation has it: tools are the public methods."""

    def reset(self, **row: Any) -> str | None:
        self.count = row["start"]
        self.row = row
        return f"The counter is at {self.count}." if row.get("say") else None

    def increment(self, by: int) -> int:
        """
        Increment the counter.

        Args:
            by: How much to add.
        """
        if by < 0:
            raise RuntimeError("only up")
        self.count += by
        return self.count

    async def read(self) -> str:
        """Read the counter."""
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None: ...


def test_tools_are_the_public_methods_with_their_schemas() -> None:
    """The schemas are the ones that TRL renders: of type hints and docstrings."""
    increment, read = TRLEnvironment(Counter).tools
    assert (increment.name, increment.description) == ("increment", "Increment the counter.")
    by = {"type": "integer", "description": "How much to add."}
    assert increment.parameters == {"type": "object", "properties": {"by": by}, "required": ["by"]}
    assert read.name == "read"


async def test_reset_gets_the_row_and_its_text_joins_the_prompt() -> None:
    """As TRL does it: the columns of the data set, and the prompt."""
    environment = TRLEnvironment(Counter)
    opening = await environment.start(Prompt("Count to 5.", metadata={"start": 2, "say": True}))
    assert opening == (Message("user", "Count to 5.\n\nThe counter is at 2."),)
    assert environment._inner.row["prompt"] == [{"role": "user", "content": "Count to 5."}]


async def test_calls_run_and_the_reward_comes_at_the_end() -> None:
    """Synchronous and async tools; ``get_reward`` once, after the reply without a call."""
    prompt = Prompt("Count to 5.", metadata={"start": 2})
    played = await play(TRLEnvironment(Counter), prompt, [calling("increment", by=3), calling("read"), "Done."])
    assert [message.content for message in played.messages if message.role == "tool"] == ["5", "at 5"]
    assert (played.rewards, played.done) == ([5.0], True)


async def test_arguments_and_columns_may_have_any_name() -> None:
    """Also that of a parameter of this package: ``function``, which is a common one of tools."""

    class Plot(Counter):
        async def slope(self, function: str) -> str:
            return f"slope of {function}"

        def plot(self, function: str) -> str:
            return f"plot of {function}"

    replies = [calling("plot", function="x"), calling("slope", function="y"), "Done."]
    prompt = Prompt("Plot.", metadata={"start": 5, "function": "x"})
    played = await play(TRLEnvironment(Plot), prompt, replies)
    assert [message.content for message in played.messages if message.role == "tool"] == ["plot of x", "slope of y"]


async def test_any_exception_of_a_tool_is_a_message_to_the_model() -> None:
    """TRL's form of it, and counted; later calls of the reply run."""
    calls = [ToolCall("increment", {"by": -1}, id="a"), ToolCall("increment", {"by": 1}, id="b")]
    prompt = Prompt("Count.", metadata={"start": 2})
    played = await play(TRLEnvironment(Counter), prompt, [Message("assistant", "", calls), "Done."])
    assert [message.content for message in played.messages[2:4]] == ["{'error': 'only up'}", "3"]
    assert played.steps[0].metrics == {"tool_errors": 1}


class Pictures(Counter):
    """Content blocks, as TRL's documentation has them, from ``reset`` and a tool."""

    blocks: Any = ()

    def reset(self, **row: Any) -> Any:
        return list(self.blocks)

    def read(self) -> Any:  # type: ignore[override]
        """Look."""
        return list(self.blocks)


async def test_content_blocks_are_texts_and_images() -> None:
    """Images of ``reset`` join the prompt, images of a tool are its result."""
    picture = PIL.Image.new("RGB", (4, 3), (9, 9, 9))

    class Shown(Pictures):
        blocks = ({"type": "image", "image": picture}, {"type": "text", "text": "A square."})

    played = await play(TRLEnvironment(Shown), Prompt("What?"), [calling("read")])
    image = Image.of(picture)
    assert played.messages[0].content == ("What?", image, "A square.")
    assert played.messages[2].content == (image, "A square.")


async def test_what_is_no_content_fails_the_rollout() -> None:
    """Blocks that are neither text nor image, from a tool and from ``reset``; and a class without ``reset``."""

    class Wrong(Pictures):
        blocks = ({"type": "image", "image": b""},)

    class Tuple(Counter):
        def reset(self, **row: Any) -> Any:
            return ("a", "b")

    prompt = Prompt("Count.", metadata={"start": 2})
    with pytest.raises(EnvironmentFailure, match=r"Wrong.reset: image: got b''; expected an image that Pillow decodes"):
        await play(TRLEnvironment(Wrong), prompt, [])
    with pytest.raises(
        EnvironmentFailure, match=r"Tuple.reset: got \('a', 'b'\); expected a string, a list of content"
    ):
        await play(TRLEnvironment(Tuple), prompt, [])
    with pytest.raises(ConfigError, match="a class with a method reset"):
        TRLEnvironment(dict)
