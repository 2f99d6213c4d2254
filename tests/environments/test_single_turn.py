"""One question, one answer."""

from __future__ import annotations

from rollouts.dtypes import Message, Prompt
from rollouts.environments import Environment, SingleTurnEnvironment


async def test_it_opens_with_the_prompt_and_ends_at_the_first_reply() -> None:
    """Without tools, with a system prompt where one is set and the prompt has none."""
    environment = SingleTurnEnvironment("Be brief.")
    assert isinstance(environment, Environment)
    assert environment.tools == ()
    assert [message.role for message in await environment.start(Prompt("hi"))] == ["system", "user"]
    own = Prompt([Message("system", "Be long."), Message("user", "hi")])
    assert await environment.start(own) == own.messages
    assert await SingleTurnEnvironment().start(Prompt("hi")) == (Message("user", "hi"),)
    result = await environment.step(Message("assistant", "ho"))
    assert (result.done, result.messages) == (True, ())
    assert not result.reward
    await environment.close()
