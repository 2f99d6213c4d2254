"""Programs of ours on Harbor tasks: check, grading and rewards in boxes over a small root."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions, TaskBoxes
from rollouts.harbor.check import CHECKED, check_tasks, load_checks, save_checks, stored_rungs
from rollouts.harbor.recipe import harbor_recipe, harbor_rollout_to_samples
from rollouts.harbor.tasks import HarborTask, load_task, load_tasks, prompts_of
from rollouts.harbor.workspace import HarborWorkspace, check_playable
from rollouts.programs import script
from rollouts.programs.gateway.session import SessionLimits
from rollouts.recipes.environments.harbor_tasks.tasks import SPECIAL, write_tasks
from rollouts.runs.verify import check_sample
from rollouts.sandboxes import SandboxError, opened
from rollouts.sandboxes.image import ImageSandbox
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Sample, Status
from tests.harbor.folders import write_task
from tests.harbor.roots import base_root
from tests.programs.gateway.programs import demo_renderer, replies

TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
ASK = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(text + "\\n")
"""


@pytest.fixture
async def boxes() -> TaskBoxes:
    """Boxes over a small root; skips the test where this machine opens none."""
    try:
        async with opened(ImageSandbox(base_root())):
            return TaskBoxes(BoxOptions(root=base_root(), storage_mb=64))
    except SandboxError as error:
        pytest.skip(f"this machine opens no box: {error}")


async def rollout(
    boxes: TaskBoxes,
    folder: Path,
    *,
    files: Mapping[str, str] | None = None,
    said: str = "42",
    toml: str = TOML,
    ask: str = ASK,
    **given: Any,
) -> Sample:
    """One rollout of a script that writes the model's reply to ``answer.txt``."""
    task = load_task(write_task(folder / "task", files, toml=toml))
    (folder / "ask.py").write_text(ask)
    workspace = HarborWorkspace({task.name: task}, boxes, {task.name: given.pop("rung", "carry")})
    [sample] = await harbor_rollout_to_samples(
        prompts_of([task])[0],
        workspace=workspace,
        program=functools.partial(script, path=folder / "ask.py"),
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=ScriptedPolicy(replies(said), max_context=4096),
        **given,
    )
    return sample


@pytest.mark.parametrize(("said", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_a_program_gets_the_reward_of_the_tests(
    boxes: TaskBoxes, tmp_path: Path, said: str, reward: float
) -> None:
    """In its box it reaches the gateway; the sample names the rung, and its tokens keep the laws."""
    sample = await rollout(boxes, tmp_path, said=said)
    assert sample.reward == reward
    assert sample.metadata["verdict"]["rewards"] == {"reward": reward}
    assert sample.metadata["verdict"]["rung"] == "carry"
    assert sample.sampled_tokens > 0
    assert check_sample(sample) == []


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("true\n", "missing"),
        ("touch /logs/verifier/reward.txt\n", "empty"),
        ("echo nan > /logs/verifier/reward.txt\n", "unreadable"),
        ("printf '%2000000s' 1 > /logs/verifier/reward.txt\n", "unreadable"),
        ("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt\n", "not_a_file"),
        ("ln -s /app/answer.txt /logs/verifier/reward.txt\n", "not_a_file"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "no_reward"),
        ("sleep 60\n", "timeout"),
    ],
)
async def test_no_verdict_is_a_failure_of_the_verifier(
    boxes: TaskBoxes, tmp_path: Path, test: str, reason: str
) -> None:
    """Whatever the tests do, no number is made up; the reason is in the message."""
    toml = TOML + "[verifier]\ntimeout_sec = 1.5\n"
    sample = await rollout(boxes, tmp_path, files={"tests/test.sh": test}, toml=toml, rung="kill")
    assert sample.status is Status.FAILED
    assert sample.reward is None
    assert sample.failure is not None
    assert (sample.failure.cause, sample.failure.kind) == ("verifier", "NoVerdict")
    assert sample.failure.message.startswith(f"no verdict ({reason}) of task task at rung kill")


@attrs.frozen
class Changed:
    """A kind whose boxes are changed as they open."""

    kind: Any
    limits: Any
    abilities: Any
    change: Any

    def containment(self) -> Any:
        return self.kind.containment()

    async def open(self) -> Any:
        place = await self.kind.open()
        self.change(place)
        return place


async def of_changed_boxes(boxes: TaskBoxes, folder: Path, change: Any) -> tuple[Sample, HarborWorkspace]:
    """A rollout at the rung ``carry``, and its workspace."""

    async def changed(task: HarborTask, separate: bool) -> Any:
        kind = await boxes(task, separate)
        return Changed(kind, kind.limits, kind.abilities, change)

    task = load_task(write_task(folder / "task", toml=TOML))
    (folder / "ask.py").write_text(ASK)
    workspace = HarborWorkspace({task.name: task}, changed, {task.name: "carry"}, checked=True)
    [sample] = await harbor_rollout_to_samples(
        prompts_of([task])[0],
        workspace=workspace,
        program=functools.partial(script, path=folder / "ask.py"),
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=ScriptedPolicy(replies("42"), max_context=4096),
    )
    return sample, workspace


async def test_a_box_that_dies_is_a_lost_verdict(boxes: TaskBoxes, tmp_path: Path) -> None:
    """A policy that learns to end its box is shown like a policy that prevents verdicts in another way."""

    def dies(place: Any) -> None:
        async def run(*args: Any, **options: Any) -> Any:
            place.process.kill()
            return await type(place).run(place, *args, **options)

        place.run = run

    sample, workspace = await of_changed_boxes(boxes, tmp_path, dies)
    assert sample.failure is not None
    assert (sample.failure.cause, sample.reward) == ("environment_step", None)
    assert dict(workspace.lost.lost) == {("task", "died"): 1}


async def test_a_full_disk_of_this_machine_is_no_death_of_the_box(boxes: TaskBoxes, tmp_path: Path) -> None:
    """The verifier's box failed: no verdict, which is counted once and under this reason."""

    def is_full(place: Any) -> None:
        async def pack(*args: Any) -> bool:
            raise OSError("No space left on device")

        place.pack = pack

    sample, workspace = await of_changed_boxes(boxes, tmp_path, is_full)
    assert sample.failure is not None
    assert (sample.failure.cause, sample.reward) == ("verifier", None)
    assert dict(workspace.lost.lost) == {("task", "box"): 1}


NO_FOLDER = {
    "file": "os.chdir('/'); shutil.rmtree('/app'); open('/app', 'w')",
    "gone": "os.chdir('/'); shutil.rmtree('/app')",
    "logs": "os.remove('answer.txt'); shutil.rmtree('/logs'); open('/logs', 'w')",
}


@pytest.mark.parametrize("rung", ["carry", "kill"])
@pytest.mark.parametrize("place", NO_FOLDER)
async def test_an_agent_that_destroys_a_folder_gets_its_verdict(
    boxes: TaskBoxes, tmp_path: Path, place: str, rung: str
) -> None:
    """The working folder is then empty, and that of the logs is made again: a policy is not paid for no verdict."""
    sample = await rollout(boxes, tmp_path, rung=rung, ask=f"{ASK}\nimport shutil; {NO_FOLDER[place]}\n")
    assert (sample.failure, sample.reward) == (None, 0.0)


async def test_the_output_of_the_tests_is_kept_to_its_end(boxes: TaskBoxes, tmp_path: Path) -> None:
    """However much it is: the sample has the last characters of it."""
    test = "yes 0123456789 | head -c 9000000; echo the end; echo 1 > /logs/verifier/reward.txt\n"
    sample = await rollout(boxes, tmp_path, files={"tests/test.sh": test}, rung="kill")
    output = sample.metadata["verdict"]["output"]
    assert (sample.reward, len(output), output[-8:]) == (1.0, 4000, "the end\n")


async def test_the_tests_run_with_the_settings_of_the_task(boxes: TaskBoxes, tmp_path: Path) -> None:
    """Variables, user, working folder and an exit code that is ignored; the box's variables are there, too."""
    toml = TOML + '[environment.env]\nA = "1"\n[verifier]\nuser = "bob"\n[verifier.env]\nB = "${B_:-2}"\n'
    test = 'echo "{\\"reward\\": $A$B, \\"uid\\": $(id -u)}" > /logs/verifier/reward.json\nexit 3\n'
    sample = await rollout(boxes, tmp_path, files={"tests/test.sh": test}, toml=toml)
    assert sample.metadata["verdict"]["rewards"] == {"reward": 12.0, "uid": 1000.0}


async def test_the_time_of_the_agent_is_that_of_the_task(boxes: TaskBoxes, tmp_path: Path) -> None:
    """At ``[agent].timeout_sec`` the program is killed, and the task is graded."""
    toml = TOML + "[agent]\ntimeout_sec = 4\n"
    slow = ASK + "\nimport time\ntime.sleep(300)\n"
    task = load_task(write_task(tmp_path / "task", toml=toml))
    (tmp_path / "slow.py").write_text(slow)
    [sample] = await harbor_rollout_to_samples(
        prompts_of([task])[0],
        workspace=HarborWorkspace({task.name: task}, boxes, {task.name: "carry"}),
        program=functools.partial(script, path=tmp_path / "slow.py"),
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=ScriptedPolicy(replies("42"), max_context=4096),
        limits=SessionLimits(max_seconds=600),
    )
    assert sample.status is Status.TRUNCATED
    assert sample.reward == 1.0


async def test_a_healthcheck_that_fails_is_a_failure_of_the_start(boxes: TaskBoxes, tmp_path: Path) -> None:
    """After its retries, before the program starts."""
    toml = TOML + '[environment.healthcheck]\ncommand = "false"\nretries = 2\ninterval_sec = 0.05\n'
    sample = await rollout(boxes, tmp_path, toml=toml)
    assert sample.failure is not None
    assert sample.failure.cause == "environment_start"
    assert "the healthcheck 'false' failed" in sample.failure.message


async def test_the_strictest_rung_that_serves_is_stored(boxes: TaskBoxes, tmp_path: Path) -> None:
    """A task with a file is carried, a server needs its processes, a separate one is separate, steps are Harbor's."""
    write_tasks(tmp_path, "base")
    names = ("slug", "server", "separate", "collect", "steps")
    tasks = [task for task in load_tasks(tmp_path) if task.name in names]
    checks = await check_tasks(tasks, boxes)
    found = {check.task: check.rung for check in checks}
    assert found == {"slug": "carry", "server": "keep", "separate": "separate", "collect": "carry", "steps": None}
    save_checks(tmp_path / CHECKED, checks)
    playable = [task for task in tasks if task.name != "steps"]
    assert stored_rungs(playable, tmp_path / CHECKED)["slug"] == "carry"
    (tmp_path / "slug" / "tests" / "run.py").write_text("print(1)\n")
    with pytest.raises(ConfigError, match="slug: checked with other files"):
        stored_rungs(playable, tmp_path / CHECKED)


async def test_a_task_that_trains_nothing_is_bad(boxes: TaskBoxes, tmp_path: Path) -> None:
    """The solution gets no more than an agent that does nothing, or no verdict."""
    always = {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}
    never = {"tests/test.sh": "true\n"}
    for name, files in (("always", always), ("never", never)):
        write_task(tmp_path / name, files, toml=TOML)
    checks = await check_tasks(load_tasks(tmp_path), boxes)
    assert [check.rung for check in checks] == [None, None]
    assert checks[0].note == "the solution gets {'reward': 1.0}, and an agent that does nothing {'reward': 1.0}"
    assert checks[1].note.startswith("the solution gets no verdict: NoVerdict: no verdict (missing)")
    save_checks(tmp_path / CHECKED, checks)
    with pytest.raises(ConfigError, match="no rung serves"):
        stored_rungs(load_tasks(tmp_path), tmp_path / CHECKED)


# -- before work starts -----------------------------------------------------------------------------------------------


def test_a_task_for_the_trial_is_refused_by_name(tmp_path: Path) -> None:
    """A program of ours gets no steps, no MCP servers and no skills."""
    for toml, name in (
        ('[environment]\nskills_dir = "/skills"\n', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "m"\nurl = "http://m"\n', "environment.mcp_servers"),
    ):
        with pytest.raises(ConfigError, match=f"task: {name}"):
            check_playable(load_task(write_task(tmp_path / name / "task", toml=toml)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "agent, program"),
        ({"program": script, "grade": "auto"}, "results of rollouts check-task"),
        ({"program": script, "grade": "carry", "variables": ("NO_SUCH_VARIABLE",)}, "a variable that is set"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """Before a task is played."""
    write_task(tmp_path / "task", toml=TOML)
    with pytest.raises(ConfigError, match=message):
        harbor_recipe("h", Endpoint(model="m"), tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"network": "all"}, "BoxOptions.network"),
        ({"ignore": "gpus"}, "BoxOptions.ignore"),
        ({"layers": "/no/such"}, "BoxOptions.layers"),
        ({"memory_mb": "0"}, "BoxOptions.memory_mb"),
        ({"rot": "/x"}, "BoxOptions: got"),
    ],
)
def test_options_of_boxes_are_checked(given: dict[str, Any], message: str) -> None:
    """As a command line gives them."""
    with pytest.raises(ConfigError, match=message):
        BoxOptions.of(given)


def test_a_layer_that_closes_the_box_is_refused(tmp_path: Path) -> None:
    """Its rights are those of the root folder, where users of the image then find nothing."""
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"BoxOptions\.layers: .* that all users can read and enter"):
        BoxOptions(layers=(str(tmp_path),))


async def test_a_layer_lies_over_the_image_of_every_task(boxes: TaskBoxes, tmp_path: Path) -> None:
    """With a program that is installed there; the image's files stay, and the layer is not written."""
    place = tmp_path / "layer/usr/local/bin/agent"
    place.parent.mkdir(parents=True)
    place.write_text("#!/bin/bash\necho of the layer; echo x > /usr/local/bin/new\n")
    place.chmod(0o755)
    (tmp_path / "layer").chmod(0o755)
    options = BoxOptions.of({**attrs.asdict(boxes.options), "layers": str(tmp_path / "layer")})
    kind = await TaskBoxes(options)(load_task(write_task(tmp_path / "task", toml=TOML)), False)
    async with opened(kind) as box:
        assert (await box.exec(["bash", "-c", "agent; python3 -c 'print(2)'"])).stdout == "of the layer\n2\n"
    assert [path.name for path in place.parent.iterdir()] == ["agent"]


@pytest.mark.parametrize(("mode", "reward"), [("shared", 1.0), ("separate", 0.0)])
async def test_the_layer_of_the_agent_is_not_in_the_box_of_a_separate_verifier(
    boxes: TaskBoxes, tmp_path: Path, mode: str, reward: float
) -> None:
    """A tool there would judge its agent: another ``grep`` finds the answer only where the tests share the box."""
    forged = tmp_path / "layer/usr/local/bin/grep"
    forged.parent.mkdir(parents=True)
    forged.write_text("#!/bin/bash\nexit 0\n")
    forged.chmod(0o755)
    (tmp_path / "layer").chmod(0o755)
    options = BoxOptions.of({**attrs.asdict(boxes.options), "layers": str(tmp_path / "layer")})
    toml = f'artifacts = ["answer.txt"]\n{TOML}[verifier]\nenvironment_mode = "{mode}"\n'
    rung = "kill" if mode == "shared" else "separate"
    sample = await rollout(TaskBoxes(options), tmp_path, said="41", toml=toml, rung=rung)
    assert sample.reward == reward, sample.failure


async def test_limits_of_a_task_are_those_of_its_box_unless_they_are_ignored(tmp_path: Path) -> None:
    """Processors and memory of all processes together, and the files that it writes."""
    task = load_task(write_task(tmp_path / "task", toml=TOML + "cpus = 2\nmemory_mb = 64\nstorage_mb = 32\n"))
    kind: Any = await TaskBoxes(BoxOptions(root=str(tmp_path)))(task, False)
    assert (kind.cpus, kind.memory_bytes, kind.limits.disk_bytes) == (2, (64 + 32 + 128) << 20, 32 << 20)
    kind = await TaskBoxes(BoxOptions(root=str(tmp_path), ignore=("cpus", "memory_mb", "storage_mb")))(task, False)
    assert (kind.cpus, kind.memory_bytes, kind.limits.disk_bytes) == (None, None, 4096 << 20)
    assert kind.network == "none"


def test_stored_results_that_are_damaged_are_refused(tmp_path: Path) -> None:
    """By name, also a rung that does not exist."""
    path = tmp_path / CHECKED
    row = {"task": "a", "digest": "", "rewards": {}, "rung": "best", "note": ""}
    for text in ("{", "[]", '{"format": 2, "tasks": {}}', json.dumps({"format": 1, "tasks": {"a": row}})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=CHECKED):
            load_checks(path)


def test_the_sixteen_tasks_are_sound(tmp_path: Path) -> None:
    """Ten repositories and six special ones are loaded."""
    write_tasks(tmp_path, "base")
    assert {task.name for task in load_tasks(tmp_path)} >= set(SPECIAL)
    assert len(load_tasks(tmp_path)) == 16
