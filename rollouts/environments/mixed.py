"""Several environments as one: each prompt says by name which of them it is for.

Invariant: an episode lives in exactly one of them, and every one that was made is closed. The name stands in the
prompt's metadata, under :data:`ENVIRONMENT`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import Environment, EnvironmentFactory, StepResult
from rollouts.errors import ConfigError

__all__ = ["ENVIRONMENT", "MixedEnvironment"]

ENVIRONMENT = "environment"
"""The key of the prompt's metadata that names its environment."""


class MixedEnvironment:
    """One of several environments, chosen by the prompt; bind them with ``functools.partial``.

    Args:
        environments: a factory for each name.

    It can be resumed where all of them can. Before it has started, its tools are those of all of them.
    """

    def __init__(self, environments: Mapping[str, EnvironmentFactory]) -> None:
        if not environments:
            raise ConfigError.of("MixedEnvironment.environments", environments, "at least one, by name")
        self._factories = dict(environments)
        self._made: dict[str, Environment] = {}
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
            for found in self._make(name).tools:
                every.setdefault(found.name, found)
        return tuple(every.values())

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return await self._choose(prompt).start(prompt)

    async def step(self, reply: Message) -> StepResult:
        assert self._inner is not None, "start comes first"
        return await self._inner.step(reply)

    async def close(self) -> None:
        made, self._made = self._made, {}
        failures = []
        for environment in made.values():
            try:
                await environment.close()
            except Exception as error:  # noqa: BLE001 - the others are closed first; raised below
                failures.append(error)
        if failures:
            raise failures[0]

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
        self._inner = self._make(name)
        return self._inner

    def _make(self, name: str) -> Environment:
        if name not in self._made:
            self._made[name] = self._factories[name]()
        return self._made[name]


def _is_resumable(factory: Any) -> bool:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return hasattr(factory, "snapshot") and hasattr(factory, "restore")
