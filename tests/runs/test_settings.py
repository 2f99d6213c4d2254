"""A resumed run keeps its settings, or records what changed (finding 6); what run.json says of its end is true."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, RolloutsError
from rollouts.runs.info import read_info
from rollouts.runs.run import RunResult
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer

RECIPE = """
from pathlib import Path
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment
from rollouts.recipe import agent_recipe
from rollouts.recipe.files import import_file

scores = import_file(Path(__file__).parent / "scores.py")

def recipe(endpoint, *, temperature: float = 1.0, data: str = "", base: str = "calculator", sampler: str = "uniform",
           in_flight: int | None = None, tests: int = 0):
    prompts = [{"prompt": f"question {number}", "metadata": {"tests": tests}} for number in range(40)]
    sizes = {"batch_size": 2, "n_samples_per_prompt": 2, "max_turns": 1, "max_new_tokens": 4}
    world = CalculatorEnvironment if base == "calculator" else SingleTurnEnvironment
    return agent_recipe("small", endpoint, world, prompts, reward_fn=scores.length, keep="all",
                        temperature=temperature, sampler=sampler, in_flight=in_flight, **sizes)
"""
SCORES = """
def length(sample):
    return float(len(sample.response))
"""


def folder_of(path: Path) -> Path:
    (path / "small.py").write_text(RECIPE)
    (path / "scores.py").write_text(SCORES)
    return path


async def play(target: RunTarget, out: Path, **options: Any) -> tuple[RunResult, str]:
    console = Console(file=io.StringIO(), width=400)
    result = await launch(target, out, "jsonl", False, console, **options)
    assert result is not None
    assert result.error is None, result.error
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe with a run of one batch."""
    path = folder_of(tmp_path_factory.mktemp("settings"))
    (path / "model").symlink_to(DEMO_MODEL)

    async def store() -> None:
        async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
            await play(RunTarget(recipe=path / "small.py", batches=1, urls=(server.url,)), path / "run")

    anyio.run(store)
    return path


@pytest.fixture
def place(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "place", symlinks=True))


async def resume(place: Path, *, model: str = str(DEMO_MODEL), **options: Any) -> tuple[RunResult, str]:
    target = RunTarget(recipe=place / "small.py", batches=2, options=options.pop("options", {}))
    async with StubServer(model_info={"model_path": model, "weight_version": "v1"}) as server:
        target = attrs.evolve(target, urls=(server.url,), model=options.pop("tokenizer", None))
        return await play(target, place / "run", resume=True, **options)


def edit(name: str, old: str, new: str) -> Callable[[Path], dict[str, Any]]:
    """Change a file of the recipe."""

    def change(place: Path) -> dict[str, Any]:
        text = (place / name).read_text()
        assert old in text
        (place / name).write_text(text.replace(old, new))
        return {}

    return change


def other_tokenizer(place: Path) -> dict[str, Any]:
    """A copy of the model with its merge rules in another order, and the same vocabulary size."""
    shutil.copytree(DEMO_MODEL, place / "other")
    file = place / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].reverse()
    file.write_text(json.dumps(content))
    return {"tokenizer": str(place / "other")}


def other_template(place: Path) -> dict[str, Any]:
    shutil.copytree(DEMO_MODEL, place / "other")
    for file in (place / "other").iterdir():
        if file.name == "chat_template.jinja":
            file.write_text("{# another #}" + file.read_text())
        if file.name == "tokenizer_config.json" and "chat_template" in json.loads(file.read_text()):
            content = json.loads(file.read_text())
            content["chat_template"] = "{# another #}" + content["chat_template"]
            file.write_text(json.dumps(content))
    return {"tokenizer": str(place / "other")}


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sampling.temperature": lambda place: {"options": {"temperature": "0.5"}},
    "options.base": lambda place: {"options": {"base": "single"}},
    "data.metadata": lambda place: {"options": {"tests": "1"}},
    "sampler.name": lambda place: {"options": {"sampler": "pass_rate"}},
    "recipe.text": edit("small.py", "from pathlib", "# another line\nfrom pathlib"),
    "reward.code": edit("scores.py", "float(", "-float("),
    "reward.function": edit("small.py", "scores.length", "(lambda sample: 1.0)"),
    "tokenizer.text": other_tokenizer,
    "template.text": other_template,
    "model.name": lambda place: {"model": "another/model", "tokenizer": str(DEMO_MODEL)},
}


@pytest.mark.parametrize("name", CHANGES)
async def test_6_another_setting_is_refused(place: Path, name: str) -> None:
    """The error names the setting, and nothing in the folder changes."""
    changed = CHANGES[name](place)
    before = (place / "run" / "run.json").read_bytes()
    words = "server.model" if name == "model.name" else rf"--resume, settings: .*{name}: got .*--allow-changes"
    with pytest.raises(ConfigError, match=words):
        await resume(place, **changed)
    assert (place / "run" / "run.json").read_bytes() == before


@pytest.mark.parametrize("in_flight", ["1", "3"])
async def test_another_number_of_slots_is_no_change(place: Path, in_flight: str) -> None:
    """The number suits the machine: a run continues with another one, without --allow-changes, and verifies."""
    result, _ = await resume(place, options={"in_flight": in_flight})
    assert result.batches == 2
    assert read_info(place / "run")["config"]["in_flight"] == int(in_flight)
    assert verify_run(place / "run").ok


@pytest.mark.parametrize("name", ["sampling.temperature", "sampler.name", "recipe.text", "model.name"])
async def test_6_an_allowed_change_is_recorded_and_printed(place: Path, name: str) -> None:
    """run.json has the change and the batch that it begins with; the next resume compares with the new settings."""
    changed = CHANGES[name](place)
    _, printed = await resume(place, allow_changes=True, **changed)
    info = read_info(place / "run")
    segment = info["segments"][-1]
    assert segment["first_batch"] == 1
    assert name in segment["changed"]
    assert f"{name}: got " in printed
    if name == "sampling.temperature":
        assert segment["changed"][name] == [1.0, 0.5]
        assert info["endpoint"]["sampling"]["temperature"] == info["settings"]["sampling"]["temperature"] == 0.5
    assert verify_run(place / "run").ok
    if name == "sampling.temperature":
        _, printed = await resume(place, **changed)
        assert "changed" not in printed


async def test_6_the_same_settings_resume_in_another_folder(place: Path) -> None:
    """Paths are not compared; recipe, reward and run were moved together."""
    _, printed = await resume(place)
    assert "changed" not in printed
    assert read_info(place / "run")["segments"][-1].keys() == {"first_batch", "started"}


# -- the status --


@pytest.mark.parametrize(("ignored", "status"), [(False, "stopped"), (True, "finished")])
async def test_26_a_closed_terminal_stops_a_run(place: Path, tmp_path: Path, ignored: bool, status: str) -> None:
    """SIGHUP keeps finished groups and ends the run as "stopped"; a run under nohup, which ignores it, continues."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda number, frame: None)

    sent: list[int] = []

    def answer(ids: Any, params: Any) -> list[int]:
        if not sent:  # a second signal would end this process
            sent.append(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        return [1, 2, 3]

    try:
        async with StubServer(answer, model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
            target = RunTarget(recipe=place / "small.py", batches=2, urls=(server.url,))
            result, _ = await play(target, tmp_path / "new")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.status, read_info(tmp_path / "new")["status"]) == (status, status)
    assert verify_run(tmp_path / "new").ok


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("output", ["full", "closed"])
async def test_25_an_output_that_takes_nothing_changes_no_run(place: Path, tmp_path: Path, output: str) -> None:
    """The summary is lost; the run is finished, and nothing is raised."""
    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        target = RunTarget(recipe=place / "small.py", batches=1, urls=(server.url,))
        file = Full()
        if output == "closed":
            file.close()
        result = await launch(target, tmp_path / "new", "jsonl", False, Console(file=file))
    assert result is not None
    assert (result.status, read_info(tmp_path / "new")["status"]) == ("finished", "finished")


async def test_a_run_that_fails_before_its_first_rollout_is_failed(place: Path) -> None:
    """run.json has the error, and not "running" for ever."""
    target = RunTarget(recipe=place / "small.py", batches=2)
    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        target = attrs.evolve(target, urls=(server.url,))
        (place / "run" / "recording").write_text("no folder")
        with pytest.raises((RolloutsError, OSError)):
            await play(target, place / "run", resume=True, record=True)
    info = read_info(place / "run")
    assert info["status"] == "failed"
    assert "recording" in info["error"]


async def test_unchecked_calls_are_said_by_run_json_show_and_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with ``calls="unchecked"`` names its dialect wherever it is looked at."""
    options = {"batch_size": "1", "n_samples_per_prompt": "2", "keep": "all", "dialect": "hermes", "calls": "unchecked"}
    target = RunTarget(recipe="calculator", model=str(DEMO_MODEL), options=options, batches=1)
    await play(target, tmp_path / "run")
    info = read_info(tmp_path / "run")
    assert (info["settings"]["template"]["calls"], info["options"]["calls"]) == ("unchecked", "unchecked")
    said = "tool calls: calls=\"unchecked\", dialect 'hermes' read the replies"
    assert verify_run(tmp_path / "run").notes == [said]
    assert main(["show", str(tmp_path / "run")]) == 0
    assert said in capsys.readouterr().out
