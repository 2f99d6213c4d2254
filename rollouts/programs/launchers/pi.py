"""pi (npm ``@mariozechner/pi-coding-agent``), as run with version 0.73.1: the chat API, with streaming."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["pi"]


def pi(task: str, server: ModelServer, *, command: Sequence[str] = ("pi",)) -> Launch:
    """Start ``pi`` with our provider, and without sessions, extensions and requests at the start."""
    check_task(task)
    model = {"id": server.model, "contextWindow": server.window, "maxTokens": server.window // 4}
    provider = {
        "baseUrl": server.openai_url,
        "api": "openai-completions",
        "apiKey": server.api_key,
        "models": [model],
    }
    files = {"~/.pi/agent/models.json": json.dumps({"providers": {"g": provider}}, indent=1).encode()}
    line = (*command, "--offline", "--no-session", "--no-extensions", "--provider", "g", "--model", server.model)
    return Launch((*line, "-p", task), {"PI_OFFLINE": "1"}, files)
