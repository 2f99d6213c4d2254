"""mini-swe-agent (PyPI ``mini-swe-agent``), as run with version 2.4.6: the chat API through LiteLLM, without streaming.

It has no option for the context window, and does not compact. Its exit code is 0 also without a submission.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["mini_swe_agent"]


def mini_swe_agent(task: str, server: ModelServer, *, command: Sequence[str] = ("mini",)) -> Launch:
    """Start ``mini`` without questions, cost tracking and the download of LiteLLM's price list."""
    check_task(task)
    env = {
        "OPENAI_API_BASE": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Launch((*command, "-m", f"openai/{server.model}", "-t", task, "-y", "--exit-immediately"), env)
