"""Claude Code (npm ``@anthropic-ai/claude-code``), as run with version 2.1.197: the Messages API, with streaming.

It has no option for the context window; the server's error ``prompt is too long`` starts its compaction. It has no
limit of turns; the server limits the calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.programs.launchers.base import Launch, ModelServer, check_task

__all__ = ["claude_code"]


def claude_code(task: str, server: ModelServer, *, command: Sequence[str] = ("claude",), bare: bool = False) -> Launch:
    """Start Claude Code without questions, telemetry, updates and stored sessions.

    Args:
        command: how it is started inside, e.g. ``("node", "/opt/claude/cli.js")``.
        bare: the short system prompt with four tools, 4.6 KB instead of 78 KB.
    """
    check_task(task)
    line = [*command, "-p", task, "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"]
    line += ["--no-session-persistence"]
    if bare:
        line += ["--bare", "--tools", "Bash,Read,Edit,Write"]
    env = {
        "ANTHROPIC_BASE_URL": server.base_url,
        "ANTHROPIC_API_KEY": server.api_key,
        "ANTHROPIC_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # also the call for a title
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # or it refuses to skip permissions as root
    }
    return Launch(tuple(line), env)
