"""The launch line, environment and files of each program, as they were run with the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.programs import (
    aider,
    claude_code,
    cline,
    codex,
    mini_swe_agent,
    opencode,
    openhands,
    pi,
    qwen_code,
    script,
)
from tests.programs.launchers.test_base import KEY, SERVER

URL = "http://127.0.0.1:8080/s/7"


def test_claude_code() -> None:
    """Without ``/v1``; four tools on demand."""
    launch = claude_code("mend it", SERVER, bare=True)
    assert " ".join(launch.argv) == (
        "claude -p mend it --dangerously-skip-permissions --output-format stream-json --verbose "
        "--no-session-persistence --bare --tools Bash,Read,Edit,Write"
    )
    assert launch.env == {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "m-1",
        "CLAUDE_CODE_SUBAGENT_MODEL": "m-1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    assert claude_code("mend it", SERVER, command=("node", "/c.js")).argv[:4] == ("node", "/c.js", "-p", "mend it")


def test_codex() -> None:
    """The Responses API, no calls out, a window with a margin, a home folder that exists."""
    launch = codex("mend it", SERVER)
    assert " ".join(launch.argv) == (
        "codex exec --json --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m m-1 "
        "-c model_provider=g "
        f'-c model_providers.g={{name="g",base_url="{URL}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}} '
        "-c model_context_window=28672 "
        "-c check_for_update_on_startup=false -c analytics.enabled=false -c features.plugins=false "
        "-c features.apps=false -c features.multi_agent=false -c web_search=disabled mend it"
    )
    assert launch.env == {"OPENAI_API_KEY": KEY, "CODEX_HOME": "/tmp/home/.codex"}
    assert launch.files == {"~/.codex/config.toml": b""}


def test_opencode() -> None:
    """Our provider in a file, with the window and without updates."""
    launch = opencode("mend it", SERVER)
    assert launch.argv == ("opencode", "run", "--title", "task", "--format", "json", "mend it")
    assert launch.env == {
        "OPENCODE_CONFIG": "/tmp/home/opencode.json",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    assert json.loads(launch.files["~/opencode.json"]) == {
        "provider": {
            "g": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{URL}/v1", "apiKey": KEY},
                "models": {"m-1": {"limit": {"context": 28672, "output": 7168}}},
            }
        },
        "model": "g/m-1",
        "small_model": "g/m-1",
        "autoupdate": False,
        "share": "disabled",
    }


def test_qwen_code() -> None:
    """Its settings in its home."""
    launch = qwen_code("mend it", SERVER)
    assert launch.argv == ("qwen", "--yolo", "-p", "mend it")
    assert launch.env == {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "m-1"}
    assert json.loads(launch.files["~/.qwen/settings.json"]) == {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True},
        "telemetry": {"enabled": False},
        "model": {"generationConfig": {"contextWindowSize": 28672}},
    }


def test_mini_swe_agent() -> None:
    """LiteLLM's name of an OpenAI server."""
    launch = mini_swe_agent("mend it", SERVER)
    assert launch.argv == ("mini", "-m", "openai/m-1", "-t", "mend it", "-y", "--exit-immediately")
    assert launch.env == {
        "OPENAI_API_BASE": f"{URL}/v1",
        "OPENAI_API_KEY": KEY,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    assert launch.files == {}


def test_pi() -> None:
    """Our provider in its settings, with the window; nothing is asked of other servers."""
    launch = pi("mend it", SERVER)
    assert " ".join(launch.argv) == "pi --offline --no-session --no-extensions --provider g --model m-1 -p mend it"
    assert json.loads(launch.files["~/.pi/agent/models.json"])["providers"]["g"] == {
        "baseUrl": f"{URL}/v1",
        "api": "openai-completions",
        "apiKey": KEY,
        "models": [{"id": "m-1", "contextWindow": 28672, "maxTokens": 7168}],
    }


def test_cline() -> None:
    """Our provider in its settings."""
    launch = cline("mend it", SERVER)
    assert " ".join(launch.argv) == "cline --json -P openai-compatible -m m-1 mend it"
    stored = json.loads(launch.files["~/.cline/data/settings/providers.json"])
    assert stored["providers"]["openai-compatible"]["settings"] == {
        "provider": "openai-compatible",
        "apiKey": KEY,
        "model": "m-1",
        "baseUrl": f"{URL}/v1",
    }


def test_openhands() -> None:
    """A script that is written into its home, and that compiles."""
    launch = openhands("mend it", SERVER, command=("python3.12",))
    assert launch.argv == ("python3.12", "/tmp/home/run_openhands.py", "mend it")
    assert (launch.env["OPENAI_BASE_URL"], launch.env["MODEL_CONTEXT_WINDOW"]) == (f"{URL}/v1", "28672")
    compile(launch.files["~/run_openhands.py"], "run_openhands.py", "exec")


def test_aider() -> None:
    """One message, no commits, the window in a file of LiteLLM's form; files to edit at the end."""
    launch = aider("mend it", SERVER, files=("a.py",))
    assert launch.argv[-3:] == ["--message", "mend it", "a.py"]
    assert {"--yes-always", "--no-auto-commits", "--analytics-disable", "--no-check-update"} <= set(launch.argv)
    limits = {"max_input_tokens": 28672, "max_tokens": 7168, "litellm_provider": "openai"}
    assert json.loads(launch.files["~/aider.json"]) == {"openai/m-1": limits}
    assert launch.env["OPENAI_API_BASE"] == f"{URL}/v1"


def test_script(tmp_path: Path) -> None:
    """The file is copied; both SDKs find the server; a file that is missing is named."""
    (tmp_path / "agent.py").write_text("print(1)")
    launch = script("mend it", SERVER, path=tmp_path / "agent.py")
    assert launch.argv == ("python3", "/tmp/home/agent.py", "mend it")
    assert launch.files == {"~/agent.py": b"print(1)"}
    wanted = {
        "OPENAI_BASE_URL": f"{URL}/v1",
        "ANTHROPIC_BASE_URL": URL,
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_API_KEY": KEY,
    }
    assert wanted.items() <= launch.env.items()
    with pytest.raises(ConfigError, match=r"path: got '/no/such.py'; expected a file that exists"):
        script("mend it", SERVER, path="/no/such.py")
