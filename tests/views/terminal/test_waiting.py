"""The words for what rollouts wait for: the innermost wait of each task, counted by kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from rollouts.concurrency.boundary import boundary, call_foreign
from rollouts.concurrency.deadlines import listed_pause
from rollouts.errors import EndpointUnavailable, EnvironmentFailure, GenerateFailure, RewardFailure, at
from rollouts.views.terminal.waiting import duration, waiting_lines


async def while_waiting(*rollouts: Callable[[anyio.Event], Awaitable[None]], count: int = 2) -> list[str]:
    """The lines while these rollouts wait for an event, each in its own task."""
    event = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for number, rollout in enumerate(rollouts):
            with at(f"group 0 · sample {number}"):
                tasks.start_soon(rollout, event)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        lines = waiting_lines(count)
        event.set()
    return lines


async def for_the_model(event: anyio.Event) -> None:
    with boundary(GenerateFailure, "generate_fn generate"), boundary(EndpointUnavailable, "POST", shown="the model"):
        await event.wait()


async def lookup(event: anyio.Event) -> None:
    await event.wait()  # the line of the tool


async def for_a_tool(event: anyio.Event) -> None:
    with boundary(GenerateFailure, "generate_fn generate"):
        await call_foreign(EnvironmentFailure, "World.step", lookup, event, seconds=60, shown="tool lookup")


async def for_the_reward(event: anyio.Event) -> None:
    await call_foreign(RewardFailure, "reward exact", lookup, event, seconds=60)


async def test_a_rollout_waits_for_its_innermost_wait() -> None:
    """The model is named, not the generate function around it."""
    (line,) = await while_waiting(for_the_model)
    assert line.startswith("group 0 · sample 0 waits for the model 0.0 s, in tests/views/terminal/test_waiting.py:")


async def test_waits_of_one_kind_are_counted_together() -> None:
    """With the time of the longest; a tool and a reward have the line of the user's code."""
    lines = await while_waiting(for_the_model, for_a_tool, for_the_model, for_the_reward, count=3)
    assert lines[0].startswith("2 wait for the model, up to 0.0 s")
    assert lines[1].startswith(
        "group 0 · sample 1 waits for tool lookup 0.0 s, in tests/views/terminal/test_waiting.py:"
    )
    assert lines[1].endswith(" in lookup")
    assert lines[2].startswith("group 0 · sample 3 waits for reward exact 0.0 s")
    assert waiting_lines() == []


async def test_a_pause_comes_first() -> None:
    """It is the reason for the waits."""
    with listed_pause("no server answers", lambda: 2):
        lines = await while_waiting(for_the_model)
    assert lines[0].startswith("no server answers for 0.0 s, 2 turns wait")
    assert "the model" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (4320, "1 h 12 min")]
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    """Seconds, minutes and seconds, or hours and minutes."""
    assert duration(seconds) == text
