"""The loader of task folders."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from rollouts.errors import ConfigError
from rollouts.harbor.ignore import excluded
from rollouts.harbor.tasks import load_task, load_tasks, prompts_of, resolved_env, task_of
from tests.harbor.folders import write_task


def test_a_folder_of_tasks_is_loaded_by_name(tmp_path: Path) -> None:
    """All folders with a ``task.toml`` are tasks, in order; other folders are not, and none is searched further."""
    for name in ("b", "a"):
        write_task(tmp_path / name)
    write_task(tmp_path / "notes" / "deep")
    (tmp_path / "README.md").write_text("no task")
    tasks = load_tasks(tmp_path)
    assert [task.name for task in tasks] == ["a", "b"]
    assert [load_tasks(tmp_path / "a")[0].name, len(load_tasks(tmp_path / "a"))] == ["a", 1]


def test_a_task_has_its_instruction_its_files_and_its_settings(tmp_path: Path) -> None:
    """The instruction lacks its leading canary lines; tests keep their bytes and modes."""
    toml = '[task]\nname = "org/easy"\n[agent]\ntimeout_sec = 30\n[verifier]\nenv = { A = "1" }\n'
    files = {"instruction.md": "<!-- CANARY 1 -->\n# canary 2\n\nDo it.\n# canary 3\n", "tests/data/x.txt": "x"}
    task = load_task(write_task(tmp_path, files, toml=toml))
    assert task.name == "org/easy"
    assert task.instruction == "Do it.\n# canary 3\n"
    assert task.config.agent.timeout_sec == 30
    assert task.config.verifier.timeout_sec == 600
    assert [(file.path, file.mode) for file in task.tests()] == [("data/x.txt", 0o644), ("test.sh", 0o755)]
    [prompt] = prompts_of([task])
    assert task_of(prompt.metadata, {task.name: task}) is task


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agnet]\n", "agnet: got {}; expected a known key"),
        ("[environment]\nmemroy_mb = 5\n", "environment.memroy_mb: got 5; expected a known key"),
        ("[environment]\ngpus = 1\n", "environment.gpus: got 1; expected no value"),
        ('[environment]\nos = "windows"\n', "environment.os: got 'windows'; expected linux"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]\n', "allowed_hosts: got ['a.b']"),
        ('[agent]\nnetwork_mode = "no-network"\n', "agent.network_mode: got 'no-network'; expected public"),
        ("[environment.healthcheck]\nretries = 1\n", "healthcheck.command: got None; expected a value"),
        ('[environment.healthcheck]\ncommand = "x"\nretries = true\n', "retries: got True; expected an integer"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\n', "environment_mode: got 'shared'"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n', "collect[0].service: got 'db'; expected main"),
        ('artifacts = ["../x"]\n', "artifacts[0].source: got '../x'; expected a path without '..'"),
        ('schema_version = "2.0"\n', "schema_version: got '2.0'; expected one of 1.0"),
        ('[[environment.mcp_servers]]\nname = "m"\n', "mcp_servers.url: got None"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 5\n', "environment.memory_mb: got 5; expected 2048"),
        ("[agent]\ntimeout_sec = nan\n", "agent.timeout_sec: got nan; expected a finite number"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', "steps[1].name: got 'A'; expected a name that no other"),
        ('[task]\nname = "bare"\n', "task.name: got 'bare'; expected org/name"),
        ('multi_step_reward_strategy = "mean"\n', "multi_step_reward_strategy: got 'mean'; expected none"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(tmp_path: Path, toml: str, message: str) -> None:
    """An unknown key, a wrong value and a setting without effect are errors that name the task and the field."""
    with pytest.raises(ConfigError) as caught:
        load_task(write_task(tmp_path / "task", toml=toml))
    assert str(caught.value).startswith("task: ")
    assert message in str(caught.value)


def test_old_names_of_fields_mean_their_successors(tmp_path: Path) -> None:
    """``version``, ``memory``, ``storage`` and ``allow_internet`` are read as Harbor reads them."""
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    config = load_task(write_task(tmp_path, toml=toml)).config
    environment = config.environment
    assert (config.schema_version, environment.memory_mb, environment.storage_mb) == ("1.0", 2048, 512)
    assert environment.network_mode == "no-network"


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_an_incomplete_task_is_refused(tmp_path: Path, missing: str) -> None:
    """Each file that the play needs is looked for before any work."""
    with pytest.raises(ConfigError, match=missing.rpartition("/")[2]):
        load_task(write_task(tmp_path, {missing: None}))


def test_all_errors_of_all_tasks_are_in_one_message(tmp_path: Path) -> None:
    """A suite is mended in one go."""
    write_task(tmp_path / "good")
    write_task(tmp_path / "one", toml="[agnet]\n")
    write_task(tmp_path / "two", {"tests/test.sh": None})
    with pytest.raises(ConfigError, match=r"one: agnet.*\n.*two: tests/test\.sh"):
        load_tasks(tmp_path)


def test_a_compose_file_is_refused(tmp_path: Path) -> None:
    """A task with several services would lack all but one."""
    with pytest.raises(ConfigError, match="docker-compose"):
        load_task(write_task(tmp_path, {"environment/docker-compose.yaml": "services: {}\n"}))


def test_a_link_out_of_the_task_is_refused(tmp_path: Path) -> None:
    """The files of a task cannot be those of the machine."""
    folder = write_task(tmp_path / "task")
    (folder / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="tests/passwd"):
        load_task(folder)


def test_an_instruction_that_is_a_link_out_of_the_task_is_refused(tmp_path: Path) -> None:
    """The model would read a file of the machine."""
    folder = write_task(tmp_path / "task", {"instruction.md": None})
    (folder / "instruction.md").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"task: instruction\.md: got '/etc/passwd'; expected a file inside the task"):
        load_task(folder)


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    """It is skipped, as a dead link is; the task is loaded."""
    folder = write_task(tmp_path / "task")
    (folder / "tests" / "loop").symlink_to("loop")
    assert [file.path for file in load_task(folder).tests()] == ["test.sh"]


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
def test_a_file_that_is_not_utf_8_is_named(name: str, tmp_path: Path) -> None:
    """With its task."""
    folder = write_task(tmp_path / "task")
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"task: {name}: expected text in UTF-8"):
        load_task(folder)


def test_ignored_files_are_not_uploaded(tmp_path: Path) -> None:
    """``.harborignore`` applies to tests and solutions, and never to the test script itself."""
    files = {"tests/.harborignore": "*.log\n/big/\n!keep.log\n", "tests/a.log": "", "tests/keep.log": ""}
    task = load_task(write_task(tmp_path / "task", {**files, "tests/big/x": "", "tests/sub/big/y": ""}))
    assert [file.path for file in task.tests()] == ["keep.log", "sub/big/y", "test.sh"]
    with pytest.raises(ConfigError, match="a file that is not ignored"):
        load_task(write_task(tmp_path / "other", {"tests/.harborignore": "*.sh\n"}))


RULES = [
    ("*.txt", "a/b.txt", True),
    ("/a.txt", "b/a.txt", False),
    ("a/", "a", False),
    ("a/", "a/b", True),
    ("a/*/c", "a/b/c", True),
    ("a/*/c", "a/b/x/c", False),
    ("a/**/c", "a/b/x/c", True),
    ("a/**/c", "a/c", True),
    ("**/c", "x/y/c", True),
    ("a/**", "a/b/c", True),
    ("[ab].py", "b.py", True),
    ("[!ab].py", "b.py", False),
    ("?.py", "ab.py", False),
    (r"\#x", "#x", True),
    ("# x", "# x", False),
    ("a.b", "axb", False),
    ("x ", "x", True),
    ("a\n!a/b", "a/b", True),
    ("*\n!*/\n!b.txt", "a/b.txt", False),
]


@pytest.mark.parametrize(("lines", "path", "ignored"), RULES)
def test_ignore_rules_are_those_of_gitignore(lines: str, path: str, ignored: bool) -> None:
    """Anchors, folders, ``**``, sets, negations and comments."""
    root = PurePosixPath(".")
    assert excluded(PurePosixPath(path), lambda folder: lines.split("\n") if folder == root else []) is ignored


def test_random_ignore_rules_match_as_in_git(tmp_path: Path) -> None:
    """``git check-ignore`` is the judge of 1,000 random files of rules."""
    chance = random.Random(0)
    pieces = ["a", "b", "*", "?", "**", "*.txt", "a*", "[ab]", "[!a]"]
    cases = []
    for number in range(1000):
        lines = [
            chance.choice(["", "", "!"])
            + chance.choice(["", "", "/"])
            + "/".join(chance.choice(pieces) for _ in range(chance.randint(1, 3)))
            + chance.choice(["", "", "/"])
            for _ in range(chance.randint(1, 3))
        ]
        path = "/".join(chance.choice(["a", "b", "ab", "a.txt", "x"]) for _ in range(chance.randint(1, 3)))
        cases.append((lines, path))
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / ".gitignore").write_text("\n".join(lines))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    asked = "\n".join(f"{number}/{path}" for number, (_, path) in enumerate(cases))
    line = ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "--stdin"]
    said = set(subprocess.run(line, input=asked, capture_output=True, text=True).stdout.splitlines())
    root = PurePosixPath(".")
    wrong = [
        (lines, path)
        for number, (lines, path) in enumerate(cases)
        if excluded(PurePosixPath(path), lambda folder, lines=lines: lines if folder == root else [])
        is not (f"{number}/{path}" in said)
    ]
    assert wrong == []


def test_templates_read_only_the_variables_that_are_named() -> None:
    """A task cannot read a variable of the host that the user did not name; a default serves without one."""
    env = {"A": "${HOME:-none}", "B": "x${HOME}", "C": "${KEY}"}
    assert resolved_env(env, {"KEY": "k"}, "env") == {"A": "none", "B": "x${HOME}", "C": "k"}
    with pytest.raises(ConfigError, match=r"env\.C: got '\$\{KEY\}'; expected a value of KEY"):
        resolved_env(env, {"HOME": "/root"}, "env")


def test_the_place_of_a_separate_verifier(tmp_path: Path) -> None:
    """Its image is that of ``[verifier.environment]``, of ``tests/Dockerfile``, or the agent's, in this order."""
    shared = load_task(write_task(tmp_path / "shared"))
    assert shared.verifier_place() is None
    copy = load_task(write_task(tmp_path / "copy", toml='[verifier]\nenvironment_mode = "separate"\n'))
    place = copy.verifier_place()
    assert place is not None
    assert (place.folder.name, place.bundled_tests) == ("environment", False)
    toml = '[verifier]\nenvironment_mode = "separate"\n'
    place = load_task(write_task(tmp_path / "own", {"tests/Dockerfile": "FROM x\n"}, toml=toml)).verifier_place()
    assert place is not None
    assert (place.folder.name, place.bundled_tests) == ("tests", True)
    toml = '[verifier.environment]\ndocker_image = "judge:1"\n'
    place = load_task(write_task(tmp_path / "named", {"tests/test.sh": None}, toml=toml)).verifier_place()
    assert place is not None
    assert (place.environment.docker_image, place.bundled_tests) == ("judge:1", True)


def test_a_task_with_steps_has_an_instruction_for_each(tmp_path: Path) -> None:
    """Every step has its folder; its tests are its own or those of the task."""
    toml = '[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\nmin_reward = { reward = 1 }\n'
    files = {"instruction.md": None, "steps/one/instruction.md": "First.\n", "steps/two/instruction.md": "Then.\n"}
    task = load_task(write_task(tmp_path / "task", files, toml=toml))
    assert dict(task.step_instructions) == {"one": "First.\n", "two": "Then.\n"}
    assert prompts_of([task])[0].messages[0].text == "First.\n"
    with pytest.raises(ConfigError, match="steps/two/instruction"):
        load_task(write_task(tmp_path / "other", {**files, "steps/two/instruction.md": None}, toml=toml))
