"""Evaluations on disk: resumed, separated, and compared."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.evaluate import EvalOptions, compare_evaluations, load_evaluation, scores_table
from rollouts.errors import ConfigError
from rollouts.runs.locks import take_lock
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample

ROOT = Path(__file__).parents[2]
CALCULATOR = str(ROOT / "configs" / "calculator.py")


def rows(path: Path) -> list[bytes]:
    return (path / "rollouts.jsonl").read_bytes().splitlines()


def test_a_stopped_evaluation_resumes(engine_url: str, tmp_path: Path) -> None:
    """Rollouts on disk stay and are not played again, except one whose line was cut off; what is added repeats none."""
    out = tmp_path / "exam"
    line = ["eval", CALCULATOR, "--endpoint", engine_url, "--tasks", "3", "--k", "1,2"]
    assert main([*line, "--out", str(out)]) == 0
    line += ["--resume", str(out)]
    first = rows(out)
    assert len(first) == 6
    assert {(score.rollouts, score.failed) for score in load_evaluation(out)} == {(2, 0)}
    (out / "rollouts.jsonl").write_bytes(b"\n".join(first[:3]) + b"\n" + first[3][:40])
    assert main([*line, "--rollouts", "4"]) == 0
    assert rows(out)[:3] == first[:3]
    assert len(rows(out)) == 12
    stored = [msgspec.json.decode(row) for row in rows(out)]
    assert len({row["index"] for row in stored}) == 12, "their own index, so that a seed repeats no rollout"
    assert {score.rollouts for score in load_evaluation(out)} == {4}
    assert set(msgspec.json.decode((out / "eval.json").read_bytes())["estimates"]) == {
        "pass@1", "pass@2", "reward", "greedy pass@1", "greedy reward",
    }  # fmt: skip


FAILING = """
import attrs
from rollouts.recipes.configs import calculator

async def fails(prompts):
    raise ValueError("no key")

def recipe(endpoint):
    sound = calculator.recipe(endpoint)
    return attrs.evolve(sound, config=attrs.evolve(sound.config, generate_fn=fails))
"""


def test_an_evaluation_whose_rollouts_all_fail_ends_with_the_reason(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, without the traceback of an exception group."""
    failing = tmp_path / "failing.py"
    failing.write_text(FAILING)
    line = [
        "eval",
        str(failing),
        "--endpoint",
        engine_url,
        "--tasks",
        "20",
        "--k",
        "1",
        "--out",
        str(tmp_path / "exam"),
    ]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "ValueError: no key" in error
    assert "Traceback" not in error


ODD = """
import attrs
from rollouts.recipes.configs import calculator

class Node:
    def __repr__(self):
        raise RuntimeError("no text")

def odd(sample):
    sample.metadata["odd"] = ["half \\ud800", Node()]
    return 1.0

def recipe(endpoint):
    sound = calculator.recipe(endpoint)
    return attrs.evolve(sound, config=attrs.evolve(sound.config, reward_fn=odd))
"""


def test_no_object_of_a_reward_ends_an_evaluation(engine_url: str, tmp_path: Path) -> None:
    """Metadata that a reward stores are written as a run writes them, and the evaluation resumes."""
    recipe, out = tmp_path / "odd.py", tmp_path / "exam"
    recipe.write_text(ODD)
    line = ["eval", str(recipe), "--endpoint", engine_url, "--tasks", "1", "--no-greedy"]
    assert main([*line, "--rollouts", "1", "--out", str(out)]) == 0
    assert main([*line, "--rollouts", "2", "--resume", str(out)]) == 0
    odd = [msgspec.json.decode(row)["metadata"]["odd"] for row in rows(out)]
    assert odd == [["half ?", "<Node that cannot be printed>"]] * 2


def test_another_reward_is_another_evaluation(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed reward function is refused by name, so that one table has one score; ``--allow-changes`` accepts it."""
    recipe, out = tmp_path / "odd.py", tmp_path / "exam"
    recipe.write_text(ODD)
    line = ["eval", str(recipe), "--endpoint", engine_url, "--tasks", "1", "--no-greedy"]
    assert main([*line, "--out", str(out)]) == 0
    recipe.write_text(ODD.replace("return 1.0", "return 0.25"))
    assert main([*line, "--resume", str(out)]) == 2
    error = capsys.readouterr().err
    assert "reward.code: got " in error
    assert "--allow-changes" in error
    assert main([*line, "--resume", str(out), "--allow-changes"]) == 0
    assert main([*line, "--resume", str(out)]) == 0, "the settings of the last part are stored"


def test_greedy_rollouts_are_scored_next_to_the_sampled_ones(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rollout a task at temperature 0, in a separate file; a resumed evaluation does not play it again."""
    out = tmp_path / "exam"
    line = ["eval", CALCULATOR, "--endpoint", engine_url, "--tasks", "3", "--k", "1,2"]
    assert main([*line, "--out", str(out)]) == 0
    heads, ones, twos, rewards = capsys.readouterr().out.splitlines()[-5:-1]
    assert heads.split() == ["temperature", "1", "greedy"]
    assert [len(row.split("[")) for row in (ones, twos, rewards)] == [3, 2, 3]
    first = (out / "greedy.jsonl").read_bytes()
    samples = [Sample.from_dict(msgspec.json.decode(row)) for row in first.splitlines()]
    assert len({sample.prompt for sample in samples}) == len(samples) == 3
    estimates = msgspec.json.decode((out / "eval.json").read_bytes())["estimates"]
    assert estimates["greedy reward"]["value"] == sum(sample.reward or 0 for sample in samples) / 3
    assert main([*line, "--resume", str(out)]) == 0
    assert (out / "greedy.jsonl").read_bytes() == first


@pytest.mark.parametrize("arguments", [["--no-greedy"], ["--set", "temperature=0"]])
def test_an_evaluation_is_greedy_once_or_not_at_all(engine_url: str, tmp_path: Path, arguments: list[str]) -> None:
    """``--no-greedy`` omits the greedy rollouts; at temperature 0 the sampled ones are greedy."""
    out = tmp_path / "exam"
    assert main(["eval", CALCULATOR, "--endpoint", engine_url, "--tasks", "1", "--out", str(out), *arguments]) == 0
    assert not (out / "greedy.jsonl").exists()
    assert set(msgspec.json.decode((out / "eval.json").read_bytes())["estimates"]) == {"pass@1", "reward"}


def test_another_sampling_is_another_evaluation(
    engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder never mixes rollouts of two temperatures; ``--overwrite`` replaces its rollouts."""
    out = tmp_path / "exam"
    line = ["eval", CALCULATOR, "--endpoint", engine_url, "--tasks", "1"]
    assert main([*line, "--out", str(out)]) == 0
    stored = rows(out)
    assert main([*line, "--resume", str(out), "--set", "temperature=0.5"]) == 2
    assert "as in its first part" in capsys.readouterr().err
    assert rows(out) == stored
    assert main([*line, "--out", str(out), "--overwrite", "--set", "temperature=0.5"]) == 0
    assert len(rows(out)) == 1
    assert rows(out) != stored
    assert msgspec.json.decode((out / "eval.json").read_bytes())["sampling"]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("present", "arguments", "message"),
    [
        (True, ["--out"], "--out: got '{out}'; expected a folder without an evaluation in it; it has eval.json"),
        (False, ["--resume"], "--resume: got '{out}'; expected the folder of an evaluation: it holds eval.json"),
        (True, ["--overwrite", "--resume"], "--overwrite: got True; expected --out DIR with it"),
    ],
    ids=["existing", "missing", "both"],
)
def test_an_existing_evaluation_is_neither_extended_nor_replaced_unasked(
    present: bool, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--resume`` continues it, ``--overwrite`` replaces it, as a run; the error comes before the first request."""
    out = tmp_path / "exam"
    if present:
        store(out, {"a": [0]})
    assert main(["eval", CALCULATOR, "--endpoint", "http://127.0.0.1:9", *arguments, str(out)]) == 2
    assert message.format(out=out) in capsys.readouterr().err
    assert len(rows(out)) == 1 if present else not out.exists()


@pytest.mark.parametrize("arguments", [["--overwrite", "--out"], ["--resume"]])
def test_an_evaluation_has_one_writer(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second process would play the same rollouts and cut off a line that the first is writing; no reader does."""
    out = store(tmp_path / "exam", {"a": [0]})
    lock = take_lock(out / ".lock")
    assert lock is not None
    with (out / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"half of')
    before = (out / "rollouts.jsonl").read_bytes()
    assert main(["eval", CALCULATOR, "--endpoint", "http://127.0.0.1:9", *arguments, str(out)]) == 2
    assert "expected an evaluation that no other process is writing to" in capsys.readouterr().err
    assert [score.rollouts for score in load_evaluation(out)] == [1]
    assert (out / "rollouts.jsonl").read_bytes() == before
    os.close(lock)


def store(path: Path, rewards: dict[str, list[float]]) -> Path:
    """Write an evaluation as it is stored on disk."""
    path.mkdir()
    samples = [Sample(prompt=prompt, reward=reward) for prompt, group in rewards.items() for reward in group]
    lines = [
        msgspec.json.encode({**sample.to_dict(), "rollout_id": number}) + b"\n" for number, sample in enumerate(samples)
    ]
    (path / "rollouts.jsonl").write_bytes(b"".join(lines))
    (path / "eval.json").write_bytes(b'{"threshold": 1.0}')
    return path


def test_two_evaluations_are_compared_on_their_common_tasks(tmp_path: Path) -> None:
    """Tasks of only one do not count; better and worse count tasks."""
    before = store(tmp_path / "before", {"a": [0, 0], "b": [1, 0], "only before": [1, 1]})
    after = store(tmp_path / "after", {"a": [1, 1], "b": [0, 0], "only after": [0, 0]})
    console = Console(width=200, record=True)
    compare_evaluations(before, after, (1,), console)
    row = next(line for line in console.export_text().splitlines() if "pass@1" in line).split()
    assert row[:4] == ["pass@1", "0.250", "0.500", "+0.250"]
    assert row[-3:] == ["2", "1", "1"]


def test_names_of_folders_and_tasks_are_text(tmp_path: Path) -> None:
    """Not markup or emoji codes: the column headers are the paths as typed."""
    before, after = (store(tmp_path / name, {"[/INST] a": [0, 1]}) for name in ("[x]", ":smile:"))
    console = Console(width=400, record=True)
    compare_evaluations(before, after, (1,), console)
    text = console.export_text()
    assert f"{before}" in text
    assert f"{after}" in text


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    """The error names the expected file."""
    with pytest.raises(ConfigError, match=r"it holds eval\.json"):
        load_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("inside", "words"),
    [(".", "a folder without a run in it"), ("batches/exam", "a place outside the files of the run")],
)
def test_an_evaluation_is_not_written_into_a_run(
    tmp_path: Path, inside: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine's log would replace the run's; the error comes before the first request."""
    RunWriter(tmp_path / "run").finish("finished")
    before = sorted((tmp_path / "run").rglob("*"))
    out = tmp_path / "run" / inside
    assert main(["eval", CALCULATOR, "--endpoint", "http://127.0.0.1:9", "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_a_damaged_rollout_is_named(tmp_path: Path) -> None:
    """By file and line."""
    out = store(tmp_path / "exam", {"a": [1]})
    (out / "rollouts.jsonl").write_bytes(b"{}\n[]\n")
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl, line 2"):
        load_evaluation(out)


def test_a_threshold_is_a_number(tmp_path: Path) -> None:
    """No reward is at least NaN: every rollout would have failed."""
    for threshold in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--threshold: got (nan|inf); expected a finite number"):
            EvalOptions(out=tmp_path, threshold=threshold)


def test_k_is_at_most_the_rollouts_of_a_task(tmp_path: Path) -> None:
    """pass@8 of four rollouts has no unbiased estimate."""
    with pytest.raises(ConfigError, match="1 to 4"):
        EvalOptions(out=tmp_path, ks=(1, 8), rollouts=4)


def test_the_scores_can_be_read_at_80_columns(tmp_path: Path) -> None:
    """The prompt becomes narrower; no number and no header is cut."""
    out = store(tmp_path / "exam", {f"{number} {'long ' * 30}": [1.0] * 8 for number in range(3)})
    console = Console(width=80, record=True)
    console.print(scores_table(load_evaluation(out), EvalOptions(out=out, ks=(1, 8), rollouts=8)))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["task", "prompt", "passed", "failed", "pass@1", "pass@8", "reward"]
    assert len(lines) == 4
    assert lines[1].split()[-4:] == ["8/8", "1.00", "1.00", "1.00"]
