"""The tools of an environment, each called with arguments that fit its schema, before any work.

Invariant: a tool is refused only if each of its calls fails for the same reason; one sound call ends its test. Every
call has a new environment, which is closed after it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence

from rollouts.agent.guarded_environment import GuardedEnvironment
from rollouts.dtypes import Limits, Message, Prompt, Tool, ToolCall
from rollouts.environments.base import EnvironmentFactory, ToolEnvironment
from rollouts.errors import ConfigError, EnvironmentFailure, Failure, GenerateFailure
from rollouts.testing.random_replies import example
from rollouts.training.failures import same_cause
from rollouts.trajectory import Trajectory

__all__ = ["check_tools"]

_CALLS = 3


async def check_tools(environment_cls: EnvironmentFactory, prompts: Sequence[Prompt], limits: Limits | None) -> None:
    """Call each tool that the environments of some prompts have.

    Args:
        environment_cls: creates an environment; if it does not start, it is not tested.
        prompts: one episode begins with each.
        limits: of an episode, with the deadline of a step.

    Raises:
        GenerateFailure: a tool failed for the same reason in each of three calls with other arguments.
        ConfigError: a tool that is a method has no docstring, which is all that the model reads about it; or an
            environment without tools has methods that only lack the mark of a tool.
    """
    called: set[str] = set()
    for prompt in prompts:
        for tool in await _tools_of(environment_cls, prompt, limits):
            if tool.name in called:
                continue
            called.add(tool.name)
            await _check(tool, environment_cls, prompt, limits)


@contextlib.asynccontextmanager
async def _started(
    environment_cls: EnvironmentFactory, prompt: Prompt, limits: Limits | None
) -> AsyncIterator[tuple[GuardedEnvironment, Trajectory]]:
    """A new environment that has started with a prompt; it is closed at the end."""
    trajectory, world = Trajectory(), GuardedEnvironment.create(environment_cls, limits or Limits())
    try:
        await world.open(prompt, trajectory)
        yield world, trajectory
    finally:
        await world.close(trajectory)


async def _tools_of(environment_cls: EnvironmentFactory, prompt: Prompt, limits: Limits | None) -> tuple[Tool, ...]:
    try:
        async with _started(environment_cls, prompt, limits) as (world, _):
            tools = world.tools()
    except EnvironmentFailure:  # of this prompt; the episodes of the rehearsal judge it
        return ()
    if not tools:
        from rollouts.commands.unmarked_tools import check_marks  # here: most environments have tools

        check_marks(world.environment, world.name)
    for tool in tools:
        if isinstance(world.environment, ToolEnvironment) and not tool.description.strip():
            expected = "a docstring: the model reads its first line as the description of the tool"
            raise ConfigError.of(f"{world.name}.{tool.name}", "no docstring", expected)
    return tools


async def _check(tool: Tool, environment_cls: EnvironmentFactory, prompt: Prompt, limits: Limits | None) -> None:
    failures: list[Failure] = []
    for seed in range(_CALLS):
        call = ToolCall(tool.name, example(tool.parameters, random.Random(seed)) or {}, id="call_00000")
        try:
            async with _started(environment_cls, prompt, limits) as (world, trajectory):
                await world.step(Message("assistant", "", [call]), trajectory, has_tools=True)
        except EnvironmentFailure as error:
            failures.append(Failure.of(error))
        else:
            return
    if len({same_cause(failure) for failure in failures}) > 1:
        return
    raise GenerateFailure(
        f"{_CALLS} of {_CALLS} calls of the tool {tool.name}, with arguments that fit its schema, failed alike: "
        f"{failures[0].message}. A ValueError is an answer that the model reads; any other error fails the rollout. "
        "No prompt was taken; --no-rehearsal starts the run nevertheless"
    )
