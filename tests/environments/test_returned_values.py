"""Return values of start, step and tools are validated in one place; a failure names environment, tool and line.

Numbers with N are rows of wrong inputs: N5 a tool that raises, N6 a tool that returns None, N7 a result of megabytes,
N8 a tool that returns objects, N9 and N10 a step that returns no StepResult, N26 a start that returns a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import PIL.Image
import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Image, Limits, Message, Prompt, SamplingParams, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments import StepResult, ToolEnvironment, tool
from rollouts.environments.base import sound_step
from rollouts.errors import EnvironmentFailure
from rollouts.renderer import renderer_for
from rollouts.testing.environment_check import CheckOptions, examine
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


class Shop(ToolEnvironment):
    """An environment whose start, step and tool return what the test sets."""

    result: Any = "three plums"
    opening: Any = None
    answered: Any = None

    @tool
    def look(self) -> Any:
        """Look around."""
        return self.result() if callable(self.result) else self.result

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages if self.opening is None else self.opening  # type: ignore[no-any-return]

    async def step(self, reply: Message) -> StepResult:
        return await super().step(reply) if self.answered is None else self.answered  # type: ignore[no-any-return]


async def played(limits: Limits | None = None, **values: Any) -> Trajectory:
    """Play one call of the tool, then an answer."""
    renderer = renderer_for(str(DEMO_MODEL))
    policy = ScriptedPolicy([renderer.encode(f"{text}<|im_end|>") for text in (CALL, "Well.")])
    kind = type(
        "Shop", (Shop,), {name: staticmethod(value) if callable(value) else value for name, value in values.items()}
    )
    return await run_agent(
        Prompt("What is there?", index=0), kind, policy, renderer, sampling=SamplingParams(), limits=limits
    )


async def failure_of(**values: Any) -> str:
    trajectory = await played(**values)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvironmentFailure"
    return trajectory.failure.message


@pytest.mark.parametrize(
    "value", [None, b"plums", object(), ["plum"], {"plum": 1}], ids=lambda value: type(value).__name__
)
async def test_n06_n08_a_tool_returns_a_text_or_a_number(value: Any) -> None:
    """N6, N8: any other value fails the rollout and names the tool and its line, as the model would read its repr."""
    line = f"{__file__}:{Shop.look.__code__.co_firstlineno}"
    expected = "expected a string, a number, an image, or a list of strings and images, which the model reads"
    message = await failure_of(result=value)
    assert message.startswith(f"Shop.step: tool look ({line}): got ")
    assert message.endswith(expected)


@pytest.mark.parametrize(("value", "read"), [(3, "3"), (0.5, "0.5"), (True, "True"), ("plum", "plum")])
async def test_n08_a_number_is_read_as_its_text(value: Any, read: str) -> None:
    """N8: the model reads strings and numbers."""
    trajectory = await played(result=value)
    assert [message.content for message in trajectory.messages if message.role == "tool"] == [read]


async def test_n05_a_tool_that_raises_is_named_with_its_line() -> None:
    """N5: the message has the exception, the file, the line and the function."""

    def raises() -> None:
        raise KeyError("plum")

    line = f"{__file__}:{raises.__code__.co_firstlineno + 1} in raises"
    assert await failure_of(result=raises) == f"Shop.step raised KeyError: 'plum' ({line})"


async def test_n07_a_long_result_is_cut() -> None:
    """N7: the model reads the beginning and that it was truncated; a metric counts it; the limit can be set."""
    trajectory = await played(Limits(max_message_bytes=10), result="déjà " * 1000)
    (content,) = [message.content for message in trajectory.messages if message.role == "tool"]
    assert content == "déjà dé\n[truncated: the first 10 of 7000 bytes]"
    assert trajectory.metrics["truncated_messages"] == 1
    whole = await played(result="déjà")
    assert "truncated_messages" not in whole.metrics


def test_n07_the_default_limit_is_64_kib() -> None:
    """N7: a message of 64 KiB is kept as it is."""
    kept = StepResult([Message("user", "x" * 65536)])
    assert sound_step(kept, "Shop.step").messages[0].content == "x" * 65536
    cut = sound_step(StepResult([Message("user", "x" * 65537)], metrics={"truncated_messages": 1}), "Shop.step")
    assert cut.messages[0].content.endswith("x\n[truncated: the first 65536 of 65537 bytes]")
    assert cut.metrics == {"truncated_messages": 2}


@pytest.mark.parametrize(
    ("answered", "message"),
    [
        ({"messages": []}, "got {'messages': []}; expected a StepResult"),
        ("done", "got 'done'; expected a StepResult"),
        (StepResult("plums"), "StepResult.messages: got 'plums'; expected a sequence of messages"),  # type: ignore[arg-type]
        (StepResult([3]), "prompt: got 3; expected a message"),  # type: ignore[list-item]
        (StepResult(None), "StepResult.messages: got None; expected a sequence of messages"),  # type: ignore[arg-type]
        (StepResult([Message("user", "a\ud800")]), r"content of a user message: got 'a\ud800'; expected a string"),
        (StepResult(done="yes"), "StepResult.done: got 'yes'; expected True or False"),  # type: ignore[arg-type]
        (StepResult(done=True, reward="0.1"), "StepResult.reward: got '0.1'; expected a finite number"),  # type: ignore[arg-type]
        (StepResult(done=True, metrics={"n": None}), "StepResult.metrics['n']: got None"),  # type: ignore[dict-item]
        (StepResult(continuation="a\ud800"), "StepResult.continuation: got 'a\\ud800'; expected a string without lone"),
        (StepResult(continuation=None), "StepResult.continuation: got None; expected a string"),  # type: ignore[arg-type]
        (
            StepResult([Message("user", "go")], continuation="on"),
            "StepResult.continuation: got 'on'; expected none with messages",
        ),
        (StepResult(done=True, continuation="on"), "StepResult.continuation: got 'on'; expected none with done=True"),
    ],
)
async def test_n09_n11_n30_n32_every_field_of_a_step_is_checked(answered: Any, message: str) -> None:
    """N9 to N11, N30, N32: a wrong field fails the rollout in the name of the step."""
    assert (await failure_of(answered=answered)).startswith(f"Shop.step: {message}")


def test_n07_a_long_continuation_is_cut() -> None:
    """N7: as a message, with the same note and the same metric."""
    step = sound_step(StepResult(continuation="déjà " * 1000), "Shop.step", max_bytes=10)
    assert step.continuation == "déjà dé\n[truncated: the first 10 of 7000 bytes]"
    assert step.metrics == {"truncated_messages": 1}


@pytest.mark.parametrize("opening", ["hello", b"hello", [], 3, {"role": "user"}], ids=repr)
async def test_n26_start_returns_messages(opening: Any) -> None:
    """N26: a string would take the place of the prompt; an episode does not begin without messages."""
    message = await failure_of(opening=opening)
    assert message.startswith("Shop.start: ")
    assert "expected" in message


async def test_n26_check_env_says_that_start_drops_the_prompt() -> None:
    """N26: an environment may replace the prompt, but not without a word."""
    kind = type("Shop", (Shop,), {"opening": (Message("user", "hello"),)})
    findings = await examine(kind, [Prompt("What is there?")], CheckOptions(turns=2))
    assert [(f.about, f.verdict) for f in findings if f.about == "prompt"] == [("prompt", "note")]
    sound = await examine(Shop, [Prompt("What is there?")], CheckOptions(turns=2))
    assert not [finding for finding in sound if finding.about == "prompt"]


@pytest.mark.parametrize(
    ("value", "about"), [(None, "episodes"), ("x" * 100_000, "long answers")], ids=["none", "long"]
)
async def test_n06_n07_check_env_finds_it(value: Any, about: str) -> None:
    """N6, N7: check-env reports what the run would refuse or cut."""
    findings = await examine(type("Shop", (Shop,), {"result": value}), [Prompt("What?")] * 4, CheckOptions(turns=4))
    assert "bad" in {finding.verdict for finding in findings if finding.about == about}


async def test_n34_messages_may_be_chat_dicts() -> None:
    """They become messages in the same place."""
    step = StepResult([{"role": "user", "content": "again"}])  # type: ignore[list-item]
    assert sound_step(step, "Shop.step").messages == (Message("user", "again"),)
    assert attrs.evolve(step, messages=()).messages == ()


async def test_a_direct_caller_sees_the_failure_too() -> None:
    """The check of a tool's result is part of the environment."""
    reply = Message("assistant", tool_calls=(ToolCall("look", {}, id="1"),))
    with pytest.raises(EnvironmentFailure, match="tool look"):
        await type("Shop", (Shop,), {"result": None})().step(reply)


def test_n07_the_texts_of_a_message_with_images_are_cut_together() -> None:
    """Images do not count as text, and stay."""
    image = Image.of(PIL.Image.new("RGB", (4, 4)))
    step = sound_step(StepResult([Message("user", ["déjà ", image, "d" * 7000])]), "Shop.step", max_bytes=10)
    cut = "ddd\n[truncated: the first 3 of 7000 bytes]"
    assert step.messages[0].content == ("déjà ", image, cut)
    assert step.metrics["truncated_messages"] == 1
