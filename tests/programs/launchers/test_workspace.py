"""Workspaces of programs: what is put in, what is taken out, and that it can be stored."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Endpoint, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.programs import Launch, ModelServer, script
from rollouts.programs.launchers.workspace import FilesWorkspace, RepositoryWorkspace, diff_of
from rollouts.programs.reward import repository_reward
from rollouts.recipes.environments.repositories.tasks import SOLUTIONS, TASKS
from rollouts.sandboxes import ProcessSandbox, opened
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Status, program_rollout_to_samples
from tests.programs.gateway.programs import demo_renderer, replies

LEAP = Prompt(TASKS["leap"].problem, metadata={"task": "leap"})
TREE = RepositoryWorkspace(TASKS)

SOLVER = """
import http.client, json, os, sys
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
body = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
answer = json.load(connection.getresponse())
open("leap.py", "w").write(answer["choices"][0]["message"]["content"])
"""
"""A program that writes the reply of the model to the module."""


async def test_files_go_in_and_come_out_as_texts() -> None:
    """A missing file, or a file that is too large, is ``None``."""
    workspace = FilesWorkspace(["a/in.txt", "big.txt", "none.txt"], most_bytes=10)
    prompt = Prompt("q", metadata={"files": {"a/in.txt": "é"}})
    async with opened(ProcessSandbox()) as place:
        await workspace.fill(prompt, place)
        await place.write("big.txt", b"x" * 11)
        taken = await workspace.take(prompt, place, None)
    assert taken == {"files": {"a/in.txt": "é", "big.txt": None, "none.txt": None}}


async def test_files_that_are_no_texts_are_refused() -> None:
    """By the name of the field."""
    async with opened(ProcessSandbox()) as place:
        with pytest.raises(ConfigError, match=r'Prompt.metadata\["files"\]: got .*; expected strings by path'):
            await FilesWorkspace([]).fill(Prompt("q", metadata={"files": ["a"]}), place)


async def test_a_diff_is_stored_as_it_is() -> None:
    """As text where it is text, else as base64; a diff that is too large is not taken, and says so."""
    async with opened(ProcessSandbox()) as place:
        filled = await TREE.fill(LEAP, place)
        await place.write("leap.py", b"# caf\xe9\n")
        odd = await TREE.take(LEAP, place, filled)
        await place.write("leap.py", SOLUTIONS["leap"].encode())
        text = await TREE.take(LEAP, place, filled)
        small = await RepositoryWorkspace(TASKS, most_bytes=10).take(LEAP, place, filled)
    assert b"caf\xe9" in bytes(diff_of(json.loads(json.dumps(odd))))  # type: ignore[arg-type]  # bytes: it was taken
    assert str(text["diff"]).startswith("diff --git a/leap.py")
    assert diff_of(text) == str(text["diff"]).encode()
    assert "expected at most 10" in str(diff_of(small))
    assert isinstance(diff_of({}), str)


def test_a_task_that_is_not_known_is_refused() -> None:
    """The error has the names of the known tasks."""
    with pytest.raises(ConfigError, match=r'metadata\["task"\]: got \'none\'; expected one of brackets, chunks'):
        TREE.task({"task": "none"})


@pytest.mark.parametrize(("reply", "reward"), [(SOLUTIONS["leap"].strip(), 1.0), ("def leap(year): return 1", 0.0)])
async def test_a_program_is_scored_by_its_workspace_in_a_fresh_sandbox(
    reply: str, reward: float, tmp_path: Path
) -> None:
    """The diff is in the metadata; the reward runs the tests elsewhere, and stores what they said."""
    (tmp_path / "solver.py").write_text(SOLVER)

    def program(task: str, server: ModelServer) -> Launch:
        return script(task, server, path=tmp_path / "solver.py", command=(sys.executable, "-S"))

    options: dict[str, Any] = {"endpoint": Endpoint(model=str(DEMO_MODEL)), "tokenizer": demo_renderer()}
    (sample,) = await program_rollout_to_samples(
        LEAP,
        program=program,
        sandbox=ProcessSandbox(),
        workspace=TREE,
        policy=ScriptedPolicy(replies(reply), max_context=4096),
        **options,
    )
    score = functools.partial(repository_reward, tasks=TASKS, sandbox=ProcessSandbox())
    assert (sample.status, await score(sample)) == (Status.COMPLETED, reward)
    assert sample.metadata["verdict"]["outcome"] == ("resolved" if reward else "tests_failed")
    assert sample.metadata["verdict"]["results"]["tests.test_leap.Tests.test_defect"] == bool(reward)
