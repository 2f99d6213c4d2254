"""Several environments as one: each prompt names its environment in its metadata, under ``ENVIRONMENT``.

Invariant: an episode uses exactly one of them, and every environment that is created is closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.environments.base import Environment, EnvironmentFactory, StepResult
from rollouts.errors import ConfigError

__all__ = ["MixedEnvironment"]


class MixedEnvironment:
    """One of several environments, chosen by the prompt; bind them with ``functools.partial``.

    Args:
        environments: a factory for each name.

    It is resumable if all of them are. Before ``start``, it has the tools of all of them.
    """

    def __init__(self, environments: Mapping[str, EnvironmentFactory]) -> None:
        if not environments:
            raise ConfigError.of("MixedEnvironment.environments", environments, "at least one, by name")
        self._factories = dict(environments)
        self._created: dict[str, Environment] = {}
        self._inner: Environment | None = None
        if all(_is_resumable(factory) for factory in self._factories.values()):
            self.snapshot, self.restore = self._snapshot, self._restore

    def __repr__(self) -> str:
        return f"<MixedEnvironment of {', '.join(self._factories)}: {self._inner!r}>"

    @property
    def tools(self) -> Sequence[Tool]:
        if self._inner is not None:
            return self._inner.tools
        every: dict[str, Tool] = {}
        for name in self._factories:
            for tool in self._create(name).tools:
                every.setdefault(tool.name, tool)
        return tuple(every.values())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return await self._choose(prompt).start(prompt)

    async def step(self, reply: Message) -> StepResult:
        assert self._inner is not None, "step before start"
        return await self._inner.step(reply)

    async def close(self) -> None:
        created, self._created = self._created, {}
        async with contextlib.AsyncExitStack() as stack:  # closes all, also if one raises
            for environment in created.values():
                stack.push_async_callback(environment.close)

    async def _snapshot(self) -> Any:
        inner: Any = self._inner
        return await inner.snapshot()

    async def _restore(self, prompt: Prompt, snapshot: Any) -> None:
        inner: Any = self._choose(prompt)
        await inner.restore(prompt, snapshot)

    def _choose(self, prompt: Prompt) -> Environment:
        name = prompt.metadata.get(ENVIRONMENT)
        if name not in self._factories:
            raise ConfigError.of(f"metadata[{ENVIRONMENT!r}]", name, f"one of {sorted(self._factories)}")
        self._inner = self._create(name)
        return self._inner

    def _create(self, name: str) -> Environment:
        if name not in self._created:
            self._created[name] = self._factories[name]()
        return self._created[name]


def _is_resumable(factory: Any) -> bool:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return hasattr(factory, "snapshot") and hasattr(factory, "restore")
