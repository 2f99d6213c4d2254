"""cline (npm ``cline``), as run with version 3.0.65: the chat API, with streaming.

Its settings have no context window for another server's model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["cline"]


def cline(task: str, server: ModelServer, *, command: Sequence[str] = ("cline",)) -> Launch:
    """Start ``cline`` with our provider and without questions or telemetry."""
    check_task(task)
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": server.api_key, "model": server.model, "baseUrl": server.openai_url}
    entry = {"settings": settings, "updatedAt": "2024-01-01T00:00:00.000Z", "tokenSource": "manual"}
    stored = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: entry}}
    files = {"~/.cline/data/settings/providers.json": json.dumps(stored, indent=1).encode()}
    env = {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}
    return Launch((*command, "--json", "-P", name, "-m", server.model, task), env, files)
