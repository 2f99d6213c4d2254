"""An agent of Harbor that runs one command line; it needs Harbor."""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent


class ScriptAgent(BaseAgent):  # type: ignore[misc]
    def __init__(self, *args: Any, command: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.command = command

    @staticmethod
    def name() -> str:
        return "script"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(self.command)
