"""aider (PyPI ``aider-chat``), as run with version 0.86.2: the chat API through LiteLLM, with streaming, without tools.

It edits by the text of a reply. It does not compact beyond a summary of old turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["aider"]

_QUIET = ("--yes-always", "--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--no-gitignore")


def aider(task: str, server: ModelServer, *, command: Sequence[str] = ("aider",), files: Sequence[str] = ()) -> Launch:
    """Start ``aider`` for one message, without questions, updates, telemetry and the calls for commit messages.

    Args:
        files: of the workspace, which it may edit from the start; it adds others that the model names.
    """
    check_task(task)
    model = f"openai/{server.model}"
    limits = {"max_input_tokens": server.window, "max_tokens": server.window // 4, "litellm_provider": "openai"}
    stored = {"~/aider.json": json.dumps({model: limits}).encode()}
    line = [*command, *_QUIET, "--no-auto-commits", "--no-dirty-commits", "--model", model]
    line += ["--model-metadata-file", f"{server.home}/aider.json", "--message", task, *files]
    env = {"OPENAI_API_BASE": server.openai_url, "OPENAI_API_KEY": server.api_key}
    return Launch(line, {**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}, stored)
