"""``rollouts run harbor`` from the command line: checked tasks, a server with scripted replies, the tests' rewards."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.commands import main
from rollouts.engine import DEMO_MODEL
from rollouts.harbor.trial import secrets_of, weak_secrets_of
from rollouts.runs.folder import read_info, read_rows
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer
from tests.harbor.folders import write_task
from tests.harbor.roots import usable_root
from tests.programs.gateway.programs import spoken

TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
ASK = """#!/usr/bin/python3
import json, os, urllib.request
key, url = os.environ["{key}"], os.environ["{url}"] + "{path}"
body = {{"model": "m", "max_tokens": 64, "messages": [{{"role": "user", "content": "Write 42."}}]}}
headers = {{"Authorization": "Bearer " + key, "x-api-key": key, "Content-Type": "application/json"}}
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    said = json.load(answer)
text = said["content"][0]["text"] if "content" in said else said["choices"][0]["message"]["content"]
open("answer.txt", "w").write(text + "\\n")
"""
OPENAI = ASK.format(key="OPENAI_API_KEY", url="OPENAI_BASE_URL", path="/chat/completions")
ANTHROPIC = ASK.format(key="ANTHROPIC_API_KEY", url="ANTHROPIC_BASE_URL", path="/v1/messages")


@pytest.fixture
def root() -> str:
    return usable_root()


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a server that says 42, 41, 42, 41 and so on."""
    count = 0

    def reply(tokens: Any, params: Any) -> list[int]:
        nonlocal count
        count += 1
        return spoken("42" if count % 2 else "41")

    stub = StubServer(reply, model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}, max_context=4096)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stub) as running:
        yield running.url


def played(tasks: Path, out: Path, url: str, root: str, *options: str) -> list[dict[str, Any]]:
    """Check two tasks and run a batch of them, each four times; returns the rows."""
    for name in ("one", "two"):
        write_task(tasks / name, toml=TOML)
    assert main(["check-task", str(tasks), "--set", f"root={root}"]) == 0
    line = ["run", "harbor", "--data", str(tasks), "--endpoint", url, "--model", str(DEMO_MODEL), "--out", str(out)]
    for option in (f"root={root}", "grade=auto", "batch_size=2", "n_samples_per_prompt=4", "keep=all", *options):
        line += ["--set", option]
    assert main([*line, "--batches", "1", "--format", "jsonl"]) == 0
    return [row.data for row in read_rows(out, "all")]


def check(rows: list[dict[str, Any]], out: Path) -> None:
    """The rewards are those of the replies, each names its rung, and the laws hold."""
    assert [row["status"] for row in rows] == ["completed"] * 8, [row["failure"] for row in rows]
    assert sorted(row["reward"] for row in rows) == [0.0] * 4 + [1.0] * 4
    for row in rows:
        assert ("42" in row["response"]) is (row["reward"] == 1.0)
        assert row["metadata"]["verdict"]["rung"] == "carry"
    report = verify_run(out)
    assert report.violations == []
    assert read_info(out)["accounting"]["taken"] >= 2


def test_a_program_plays_checked_tasks(root: str, server: str, tmp_path: Path) -> None:
    """``--set program=script``, on any Python: check, run, rewards, laws."""
    (tmp_path / "ask.py").write_text(OPENAI)
    out = tmp_path / "run"
    rows = played(tmp_path / "tasks", out, server, root, "program=script", f"path={tmp_path / 'ask.py'}")
    check(rows, out)


@pytest.mark.harbor
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_agent_of_harbor_plays_checked_tasks(root: str, server: str, tmp_path: Path) -> None:
    """``--set agent=claude-code``: Harbor starts ``claude`` of the image, here a script that asks once."""
    if sys.version_info < (3, 12):
        pytest.skip("Harbor needs Python 3.12")
    pytest.importorskip("harbor")
    image = shutil.copytree(root, tmp_path / "image", symlinks=True)
    image.chmod(0o755)
    (image / "usr/local/bin/claude").write_text(ANTHROPIC)
    (image / "usr/local/bin/claude").chmod(0o755)
    out = tmp_path / "run"
    rows = played(tmp_path / "tasks", out, server, str(image), "agent=claude-code")
    check(rows, out)
    assert {row["metadata"]["trial"]["agent"] for row in rows} == {"claude-code"}


def test_a_name_of_an_author_is_no_secret() -> None:
    """It stands in the files of many tasks, which a box may get; a word of authorization is one."""
    named = {"GIT_AUTHOR_NAME": "Jane Doe", "GIT_AUTHOR_EMAIL": "jane@example.org", "AUTHORS": "Jane and Joe"}
    secret = {"HTTP_AUTHORIZATION": "Bearer 123", "SOME_AUTH": "12345-6789", "AUTHOR_TOKEN": "abcdefgh1"}
    assert secrets_of(named | secret) == {value: name for name, value in secret.items()}


def test_a_weak_secret_is_named_and_not_searched_for() -> None:
    """A password that is a word stands in many files of tasks: they are uploaded, and the variable is named."""
    weak = {"DB_PASSWORD": "password", "SOME_TOKEN": "12345678901", "A_KEY": "k-1"}
    strong = {"OTHER_KEY": "abcdefghijklmnopqrst", "SHORT_KEY": "sk-12345"}
    assert secrets_of(weak | strong) == {value: name for name, value in strong.items()}
    assert weak_secrets_of(weak | strong) == [*weak]


def test_a_setting_of_tokenizers_is_no_secret() -> None:
    """Trainers set it for every process: a warning would name it in each run."""
    named = {"TOKENIZERS_PARALLELISM": "false", "TOKENIZER_PATH": "/models/one"}
    assert (secrets_of(named), weak_secrets_of(named)) == ({}, [])
