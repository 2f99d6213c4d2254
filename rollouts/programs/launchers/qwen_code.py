"""qwen-code (npm ``@qwen-code/qwen-code``), as run with version 0.15.10: the chat API, with streaming.

It ends with exit code 1 at a cut stream, an error in a stream, and a context overflow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["qwen_code"]


def qwen_code(task: str, server: ModelServer, *, command: Sequence[str] = ("qwen",)) -> Launch:
    """Start ``qwen`` without questions, telemetry and updates.

    It does not heed ``NO_PROXY``; a sandbox passes no proxy variable.
    """
    check_task(task)
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": server.window}},
    }
    env = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
    }
    line = (*command, "--yolo", "-p", task)
    return Launch(line, env, {"~/.qwen/settings.json": json.dumps(settings, indent=1).encode()})
