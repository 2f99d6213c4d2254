"""Several environments as one: the prompt chooses, the chosen one plays, all are closed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rollouts.dtypes import Prompt
from rollouts.environments import CalculatorEnvironment, MixedEnvironment, SimulatedUser, SingleTurnEnvironment
from rollouts.environments.base import Resumable, ToolEnvironment, tool
from rollouts.errors import ConfigError
from rollouts.testing.playing import calling, play


class Closes(ToolEnvironment):
    """Counts how often one was closed; cannot be resumed."""

    closed = 0

    @tool
    def add(self, a: int) -> str:
        """Another add."""
        return f"{a}!"

    async def close(self) -> None:
        type(self).closed += 1
        raise OSError("already gone")


def prompt(name: Any) -> Prompt:
    return Prompt("?", metadata={"environment": name})


async def test_the_prompt_chooses() -> None:
    """Tools, steps and end come from the chosen environment."""
    mixed = partial(MixedEnvironment, {"sums": CalculatorEnvironment, "talk": SingleTurnEnvironment})
    environment = mixed()
    played = await play(environment, prompt("sums"), [calling("add", a=1, b=2), "3"])
    assert [message.content for message in played.messages if message.role == "tool"] == ["3"]
    assert played.done
    environment = mixed()
    assert (await play(environment, prompt("talk"), ["hello"])).done
    assert list(environment.tools) == []


async def test_before_the_start_its_tools_are_all_of_them() -> None:
    """So that a template is tested on them; the first of two with one name."""
    environment = MixedEnvironment({"sums": CalculatorEnvironment, "more": Closes})
    assert [found.name for found in environment.tools] == ["add", "subtract", "multiply", "divide"]
    assert environment.tools[0].description == "Add b to a."
    Closes.closed = 0
    with pytest.raises(OSError, match="already gone"):
        await environment.close()
    assert Closes.closed == 1
    await environment.close()
    assert Closes.closed == 1


async def test_it_goes_on_from_a_snapshot_where_all_can() -> None:
    """One environment that is not resumable makes the whole not resumable."""
    resumable = MixedEnvironment({"sums": CalculatorEnvironment, "talk": partial(SingleTurnEnvironment, "Be brief.")})
    assert isinstance(resumable, Resumable)
    await resumable.restore(prompt("sums"), None)
    assert next(iter(resumable.tools)).name == "add"
    assert await resumable.snapshot() is None
    assert not isinstance(MixedEnvironment({"sums": CalculatorEnvironment, "user": SimulatedUser}), Resumable)  # type: ignore[dict-item]


@pytest.mark.parametrize("name", [None, "other", 3])
async def test_a_prompt_for_none_of_them_is_refused(name: Any) -> None:
    """With the existing names."""
    with pytest.raises(ConfigError, match=r"metadata\['environment'\]: got .*expected one of \['sums'\]"):
        await MixedEnvironment({"sums": CalculatorEnvironment}).start(prompt(name))
    with pytest.raises(ConfigError, match="at least one"):
        MixedEnvironment({})
