"""OpenHands (PyPI ``openhands-sdk`` and ``openhands-tools``), as run with version 1.58.2: chat API, no streaming."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["openhands"]

_SCRIPT = b"""
import os, sys
from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
env = os.environ
model = {"model": "openai/" + env["OPENAI_MODEL"], "base_url": env["OPENAI_BASE_URL"], "api_key": env["OPENAI_API_KEY"]}
llm = LLM(**model, max_input_tokens=int(env["MODEL_CONTEXT_WINDOW"]), usage_id="agent", num_retries=4, retry_min_wait=1)
conversation = Conversation(get_default_agent(llm, cli_mode=True), workspace=os.getcwd(), visualizer=None)
conversation.send_message(sys.argv[1])
conversation.run()
"""


def openhands(task: str, server: ModelServer, *, command: Sequence[str] = ("python3",)) -> Launch:
    """Start the default agent of OpenHands' SDK; ``command`` is a Python with its packages."""
    check_task(task)
    env = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
        "MODEL_CONTEXT_WINDOW": str(server.window),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }
    return Launch((*command, f"{server.home}/run_openhands.py", task), env, {"~/run_openhands.py": _SCRIPT})
