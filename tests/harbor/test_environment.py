"""Harbor's environment over our boxes: the files that it takes, and the rungs that it enters; they need Harbor."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.tasks import load_task, prompts_of
from rollouts.harbor.trial import ENVIRONMENT, HarborAgent, _paths_in
from rollouts.harbor.verdict import Rung
from rollouts.programs import ModelServer
from rollouts.sandboxes import SandboxError
from tests.harbor.folders import write_task
from tests.harbor.roots import base_root

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytest.importorskip("harbor")

from rollouts.harbor.environment import _MOST_BYTES, RolloutsEnvironment, _only_file  # noqa: E402 - it imports Harbor

TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\ndocker_image = "base"\n'
STEP = '[[steps]]\nname = "{}"\n'
SERVER = ModelServer("http://127.0.0.1:9", "k" * 32, "m", 1000, "/")


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Any]:
    """A started environment, whose task has one file."""
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    task = write_task(tmp_path / "task", {"environment/Dockerfile": None, "environment/note.txt": "x"})
    environment = RolloutsEnvironment(
        environment_dir=task / "environment",
        environment_name="task",
        session_id="task__1__env",
        trial_paths=TrialPaths(trial_dir=tmp_path / "trial"),
        task_env_config=EnvironmentConfig(workdir="/app", docker_image="base"),
        root=base_root(),
        storage_mb=64,
    )
    await environment.start(False)
    yield environment
    await environment.stop(True)


# -- files ------------------------------------------------------------------------------------------------------------


async def test_a_login_of_this_machine_enters_no_box(box: Any, tmp_path: Path) -> None:
    """As Codex asks for with ``CODEX_AUTH_JSON_PATH``: a file, a folder with it, and a link to it are refused."""
    login = tmp_path / "home" / ".codex" / "auth.json"
    login.parent.mkdir(parents=True)
    login.write_text("{}")
    (tmp_path / "task" / "extra").mkdir()
    (tmp_path / "task" / "extra" / "link").symlink_to(login)
    box.sources = (tmp_path / "task", tmp_path / "trial")
    box._began = login.stat().st_ctime + 1  # pytest's folder is a temporary one
    for upload, path in ((box.upload_file, login), (box.upload_dir, login.parent)):
        with pytest.raises(ConfigError, match=r"upload: got '.*\.codex.*'; expected a file of the task or of Harbor"):
            await upload(path, "/app/in")
    with pytest.raises(ConfigError, match="no link to a file that the box must not get"):
        await box.upload_dir(tmp_path / "task" / "extra", "/app/in")
    assert (await box.exec("ls /app")).stdout == "note.txt\n"
    await box.upload_file(tmp_path / "task" / "instruction.md", "/app/in")
    box.sources = (*box.sources, *_paths_in({"files": [str(login), "no path", 3]}))
    await box.upload_file(login, "/app/named")


async def test_a_temporary_file_is_taken_if_it_is_newer_than_the_box(box: Any, tmp_path: Path) -> None:
    """Harbor writes the settings of agents to such files; an older one may be anything."""
    box.sources = ()
    made = tmp_path / "settings.json"
    made.write_text("{}")
    await box.upload_file(made, "/app/settings.json")
    box._began = made.stat().st_ctime + 1
    with pytest.raises(ConfigError, match="upload: got"):
        await box.upload_file(made, "/app/settings.json")


async def test_no_file_with_a_secret_enters_a_box(box: Any, tmp_path: Path) -> None:
    """Wherever it is; the error names the variable and not the value."""
    box.secrets = {"sk-123456789": "SOME_API_KEY"}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "c.toml").write_text('key = "sk-123456789"')
    for upload, path in ((box.upload_file, tmp_path / "config/c.toml"), (box.upload_dir, tmp_path / "config")):
        with pytest.raises(ConfigError, match="SOME_API_KEY") as caught:
            await upload(path, "/app/in")
        assert "sk-123" not in str(caught.value)


@pytest.mark.parametrize("link", [True, False])
async def test_no_name_with_a_secret_enters_a_box(box: Any, tmp_path: Path, link: bool) -> None:
    """Of a file, or of what a link leads to."""
    box.secrets = {"sk-123456789": "SOME_API_KEY"}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / ("key" if link else "sk-123456789")).symlink_to("of sk-123456789" if link else "nothing")
    with pytest.raises(ConfigError, match="SOME_API_KEY"):
        await box.upload_dir(tmp_path / "config", "/app/in")


@pytest.mark.timeout(60)
async def test_a_deep_folder_is_downloaded_soon_without_what_is_too_deep(box: Any, tmp_path: Path) -> None:
    """An agent makes one in its logs in a second: the process of the run must not be busy with it for minutes."""
    deep = "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]; os.chdir('/logs/agent'); open('f', 'w')"
    done = await box.exec(f'python3 -c "{deep}"', cwd="/logs/agent")
    assert done.return_code == 0, done.stderr
    await box.download_dir("/logs/agent", tmp_path / "logs")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["d", "f"]
    assert (tmp_path / "logs" / "/".join("d" * 64)).is_dir()
    assert not (tmp_path / "logs" / "/".join("d" * 65)).exists()


async def test_a_working_folder_that_is_none_is_made_again_in_the_fresh_box(box: Any) -> None:
    """Also where an artifact above it is carried: without it no test would run."""
    await box.exec("rm -rf /app; echo 42 > /app", cwd="/")
    box.carried = ("/app",)
    await box.enter_rung("carry")
    assert (await box.exec("pwd")).stdout == "/app\n"


def test_a_file_that_is_copied_through_memory_has_a_limit(tmp_path: Path) -> None:
    """Its size is known before it is read."""
    (tmp_path / "large").touch()
    for size, most in ((5, True), (_MOST_BYTES + 1, False)):
        with (tmp_path / "large").open("r+b") as file:
            file.truncate(size)
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            archive.add(tmp_path / "large", "large")
        if most:
            assert _only_file(str(tmp_path / "a.tar")) == bytes(5)
            continue
        with pytest.raises(SandboxError, match=rf"large has {size:,} bytes; expected at most {_MOST_BYTES:,}"):
            _only_file(str(tmp_path / "a.tar"))


# -- rungs ------------------------------------------------------------------------------------------------------------

LEFT = (
    "setsid nohup bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.05; done' >/dev/null 2>&1 & "
    "rm -rf /tests /logs/verifier; ln -s /app /tests; ln -s /app /logs/verifier; echo mine > /app/test.sh; "
    "echo 42 > /app/answer.txt; echo tool > /usr/bin/cat; sleep 0.2"
)


@pytest.mark.parametrize(("rung", "tool"), [("kill", "tool"), ("carry", "")])
async def test_a_rung_is_entered(box: Any, rung: Rung, tool: str) -> None:
    """No process lives on, the folders of the tests are new and empty, the work is there; ``carry`` has new tools."""
    await box.exec(LEFT)
    await box.enter_rung(rung)
    look = "for f in /proc/[0-9]*; do read -d '' -r name < $f/cmdline; echo $name; done 2>/dev/null; echo"
    assert "setsid" not in (await box.exec(look)).stdout
    look = "test ! -L /logs/verifier && test -d /logs/verifier && ls -A /logs/verifier && ls -A /tests; true"
    assert (await box.exec(look)).stdout.strip() == ""
    assert (await box.exec("echo $(< /app/answer.txt)")).stdout == "42\n"
    assert (await box.exec("read -r head < /usr/bin/cat; [ $head = tool ] && echo tool; true")).stdout.strip() == tool


async def test_no_link_of_the_agent_is_on_the_way_of_what_is_carried(box: Any) -> None:
    """An artifact below a folder that the agent made a link to the tests is refused, and not unpacked there."""
    box.carried = ("/app/out/result.txt", "/data/result.txt")
    await box.exec("mkdir -p /data; echo x > /data/result.txt; mkdir /app/deep; ln -s /tests /app/out")
    await box.enter_rung("carry")
    assert (await box.exec("cat /data/result.txt; ls -A /tests 2>/dev/null; test -L /app/out || echo none")).stdout == (
        "x\nnone\n"
    )


FORGED = {
    "environment/Dockerfile": None,
    "environment/note.txt": "x",
    "tests/test.sh": "grade > /logs/verifier/reward.txt\n",
}


@pytest.mark.parametrize(("mode", "reward"), [("shared", 1.0), ("separate", None)])
async def test_a_layer_is_not_in_the_box_of_a_trials_separate_verifier(
    tmp_path: Path, mode: str, reward: float | None
) -> None:
    """The command of the agent's layer that gives the reward is found only where the tests share the agent's box."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    tool = tmp_path / "layer/usr/local/bin/grade"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/bash\necho 1\n")
    tool.chmod(0o755)
    (tmp_path / "layer").chmod(0o755)
    toml = f'{TOML}[verifier]\nenvironment_mode = "{mode}"\n'
    options = {"root": base_root(), "layers": [str(tmp_path / "layer")]}
    config = TrialConfig(
        task=TaskConfig(path=write_task(tmp_path / "task", FORGED, toml=toml)),
        trials_dir=tmp_path / "trials",
        trial_name="a__env",  # begins as the agent's box is named
        agent=AgentConfig(name="nop"),
        environment=EnvironmentConfig(import_path=ENVIRONMENT, kwargs=options),
    )
    result = await (await Trial.create(config)).run()
    assert (None if result.verifier_result is None else result.verifier_result.rewards["reward"]) == reward


# -- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
async def test_the_session_is_over_before_the_tests_of_the_last_step(steps: int, tmp_path: Path) -> None:
    """The model answers neither the tests nor a process that the agent left running."""
    import anyio

    files: dict[str, str | None] = {"environment/Dockerfile": None, "environment/note.txt": "x"}
    for name in ("a", "b")[:steps]:
        files |= {f"steps/{name}/instruction.md": "Do.", f"steps/{name}/tests/test.sh": "echo 1 > $R/reward.txt\n"}
    toml = TOML + "".join(map(STEP.format, ("a", "b")[:steps])) + '[verifier.env]\nR = "/logs/verifier"\n'
    task = load_task(write_task(tmp_path / "task", files, toml=toml))
    calls: list[str] = []

    async def play(agent: HarborAgent, prompt: Prompt) -> None:
        await agent(SERVER, prompt, anyio.Event(), lambda: calls.append("done"))

    await play(HarborAgent("nop", {task.name: task}, BoxOptions(root=base_root())), prompts_of([task])[0])
    assert calls == ["done"]
