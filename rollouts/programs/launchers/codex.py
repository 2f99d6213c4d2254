"""Codex (npm ``@openai/codex``), as run with version 0.169.0: the Responses API, with streaming; it refuses chat."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["codex"]

_QUIET = (
    "check_for_update_on_startup=false",
    "analytics.enabled=false",
    "features.plugins=false",
    "features.apps=false",
    "features.multi_agent=false",
    "web_search=disabled",
)


def codex(task: str, server: ModelServer, *, command: Sequence[str] = ("codex",)) -> Launch:
    """Start ``codex exec`` without questions, its own sandbox, telemetry and updates.

    It ends with exit code 1 at a context overflow, so it is given a window with a margin.
    """
    check_task(task)
    url = json.dumps(server.openai_url)  # a JSON string is a TOML string
    provider = f'{{name="g",base_url={url},env_key="OPENAI_API_KEY",wire_api="responses"}}'
    settings = ["model_provider=g", f"model_providers.g={provider}", f"model_context_window={server.window}", *_QUIET]
    line = [*command, "exec", "--json", "--ephemeral", "--skip-git-repo-check"]
    line += ["--dangerously-bypass-approvals-and-sandbox", "-m", server.model]
    for setting in settings:
        line += ["-c", setting]
    env = {"OPENAI_API_KEY": server.api_key, "CODEX_HOME": f"{server.home}/.codex"}
    return Launch((*line, task), env, {"~/.codex/config.toml": b""})  # the folder must exist
