"""opencode (npm ``opencode-ai``), as run with version 1.18.33: the chat API, with streaming.

It ends with exit code 1 after an overflow from which it recovered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["opencode"]


def opencode(task: str, server: ModelServer, *, command: Sequence[str] = ("opencode",)) -> Launch:
    """Start ``opencode run`` with our provider only, and without the call for a title, updates and shared sessions."""
    check_task(task)
    limit = {"context": server.window, "output": server.window // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": server.openai_url, "apiKey": server.api_key},
        "models": {server.model: {"limit": limit}},
    }
    settings = {
        "provider": {"g": provider},
        "model": f"g/{server.model}",
        "small_model": f"g/{server.model}",
        "autoupdate": False,
        "share": "disabled",
    }
    env = {
        "OPENCODE_CONFIG": f"{server.home}/opencode.json",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    line = (*command, "run", "--title", "task", "--format", "json", task)
    return Launch(line, env, {"~/opencode.json": json.dumps(settings, indent=1).encode()})
