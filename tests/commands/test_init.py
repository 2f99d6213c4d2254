"""The command line, end to end on the embedded engine: output, exit codes, files and processes that remain."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import __version__
from rollouts.commands import EARLIER, GROUPS, VERBS, main
from rollouts.commands.arguments import tell
from rollouts.engine import DEMO_MODEL
from rollouts.errors import EndpointRefused
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from tests.stored_runs import edit_line, store_run

ROOT = Path(__file__).parents[2]
CALCULATOR = str(ROOT / "configs" / "calculator.py")
SMALL = ["--set", "batch_size=2", "--set", "n_samples_per_prompt=4", "--format", "jsonl"]
SECONDS = 180


def command(*arguments: str, **options: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-u", "-m", "rollouts", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=ROOT, text=True, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Read standard output up to a line that contains ``text``."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"ended without {text!r}: {process.stderr and process.stderr.read()}")


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def server(engine_url: str) -> str:
    return engine_url


@pytest.fixture(scope="module")
def run_folder(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run against that server."""
    path = tmp_path_factory.mktemp("runs") / "calculator"
    assert main(["run", CALCULATOR, "--endpoint", server, "--out", str(path), "--batches", "2", *SMALL]) == 0
    return path


# -- run --


def test_a_run_against_a_server_is_whole(run_folder: Path, server: str) -> None:
    """Two batches of whole groups; run.json contains recipe, server, options and versions; every law holds."""
    info = read_info(run_folder)
    assert (info["status"], info["recipe"], info["batches"]) == ("finished", "calculator", 2)
    assert info["endpoint"]["base_url"] == [server]
    assert info["server"]["model"] == info["tokenizer"] == str(DEMO_MODEL)
    assert info["options"] == {"batch_size": "2", "n_samples_per_prompt": "4"}
    assert info["versions"]["rollouts"] == __version__
    assert len(load_run(run_folder)) == 2 * 2 * 4
    assert verify_run(run_folder).violations == []


def test_the_result_of_a_run_is_printed_as_json(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output has one JSON object and nothing else; progress goes to standard error, unless --quiet."""
    line = ["run", CALCULATOR, "--endpoint", server, "--batches", "1", *SMALL, "--json"]
    assert main([*line, "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["status"], found["error"], found["batches"]) == ("finished", None, 1)
    assert found["accounting"]["in_batch"] == 2
    assert found["batch_metrics"][0]["batch"] == 0
    assert "rehearsal: " in printed.err
    assert main([*line, "--out", str(tmp_path / "quiet"), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert (printed.err, json.loads(printed.out)["status"]) == ("", "finished")


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """A recorded run without --endpoint, in its own process: its folder, exit code and output."""
    path = tmp_path_factory.mktemp("own") / "run"
    process = command("run", "calculator", "--out", str(path), "--record", *SMALL)
    out, err = process.communicate(timeout=SECONDS)
    return path, process.returncode, out, err


def test_a_run_starts_its_own_engine(own_run: tuple[Path, int, str, str]) -> None:
    """Without --endpoint the embedded engine serves the run, and ends with it."""
    path, code, out, err = own_run
    assert (code, err) == (0, "")
    assert "prompts taken = 2 in batch + " in out
    assert f"rollouts check-run {path}" in out
    assert verify_run(path).violations == []
    assert read_info(path)["tokenizer"] == str(DEMO_MODEL)


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    """SIGINT ends a run cleanly: exit code 130, a folder that passes verification, no engine left."""
    path = tmp_path / "run"
    process = command("run", CALCULATOR, "--out", str(path), "--batches", "100000", *SMALL)
    line_with(process, " kept")
    (engine,) = children(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (130, "")
    assert "stopped after" in out
    info = read_info(path)
    assert (info["status"], info["error"]) == ("stopped", None)
    assert info["accounting"]["in_batch"] > 0
    assert verify_run(path).violations == []
    assert not is_alive(engine)


def test_an_engine_that_dies_ends_the_run_and_costs_nothing(tmp_path: Path) -> None:
    """If the engine is killed, the run reports it, exits with 1, and keeps finished groups."""
    path = tmp_path / "run"
    process = command("run", CALCULATOR, "--out", str(path), "--batches", "100000", *SMALL)
    line_with(process, " kept")
    (engine,) = children(process)
    os.kill(engine, signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "rollouts: error: the embedded engine ended with exit code -9" in err
    assert read_info(path)["status"] == "failed"
    assert verify_run(path).violations == []


def test_a_killed_run_leaves_no_engine(tmp_path: Path) -> None:
    """The engine ends with its parent, even when the parent had no chance to end it."""
    process = command("run", CALCULATOR, "--out", str(tmp_path / "run"), "--batches", "100000", *SMALL)
    line_with(process, " kept")
    (engine,) = children(process)
    descriptor = os.pidfd_open(engine)
    process.kill()
    process.communicate(timeout=SECONDS)
    with open(descriptor, "rb", closefd=True) as ended:
        assert select.select([ended], [], [], SECONDS)[0]
    assert not is_alive(engine)
    assert read_info(tmp_path / "run")["status"] == "running"


def test_a_run_that_exhausts_its_data_fails_and_keeps_them(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few prompts for a batch: exit code 1, one clear line, and the accepted groups on disk."""
    options = ["--set", "prompts=6", "--set", "epochs=1", *SMALL, "--batches", "9"]
    assert main(["run", CALCULATOR, "--endpoint", server, "--out", str(tmp_path / "run"), *options]) == 1
    assert "no prompt is left" in capsys.readouterr().err
    assert verify_run(tmp_path / "run").violations == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none.py", "--out", "OUT"], "RECIPE: got"),
        (
            ["run", CALCULATOR, "--out", "OUT", "--set", "size=3"],
            "--set: got 'size'; expected an option of the recipe",
        ),
        (["run", CALCULATOR, "--out", "OUT", "--set", "batch_size=x"], "--set batch_size: got 'x'; expected int"),
        (["run", CALCULATOR, "--out", "OUT", "--set", "batch_size"], "--set: got 'batch_size'; expected key=value"),
        (["run", CALCULATOR, "--out", "OUT", "--data", "x.jsonl"], "--data: got 'x.jsonl'; expected no data"),
        (["run", CALCULATOR, "--out", "OUT", "--model", "none"], "--model: got"),
        (["run", CALCULATOR, "--out", "OUT", "--endpoint", "host:1"], "Endpoint.base_url: got ('host:1',)"),
        (
            ["run", CALCULATOR, "--out", "OUT", "--endpoint", "http://127.0.0.1:9", "--quiet"],
            "no server answers at http://127.0.0.1:9",
        ),
        (["verify", "OUT"], "RUN: got"),
        (["show", "OUT"], "RUN: got"),
        (["export", "OUT", "--to", "jsonl", "OUT"], "RUN: got"),
        (["run", "--resume", "OUT"], "--resume: got"),
        (["plan", "OUT"], "RUN: got"),
        (["serve", "--model", "none"], "none"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line with field, value and expectation, nothing on standard output, no folder created."""
    code = main([str(tmp_path / "run") if argument == "OUT" else argument for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("rollouts: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["run", CALCULATOR, "--out", ""], "--out"),
        (["run", "--resume", ""], "--resume"),
        (["run", "", "--out", "OUT"], "RECIPE"),
        (["check-run", ""], "RUN"),
        (["up", CALCULATOR, "--out", ""], "--out"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--out "$OUT"`` with a variable that is not set would write a run among the files of the current folder."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"error: argument {name}: got ''; expected a path" in capsys.readouterr().err


def test_an_option_is_not_completed(capsys: pytest.CaptureFixture[str]) -> None:
    """``--out`` of a verb that has only ``--outcome`` is unknown: what follows it is not taken for an outcome."""
    with pytest.raises(SystemExit):
        main(["export", "run", "--to", "jsonl", "run.jsonl", "--out", "all"])
    assert "unrecognized arguments: --out" in capsys.readouterr().err


def test_a_missing_data_file_is_named(tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of the GSM8K recipe names the missing file."""
    recipe = str(ROOT / "configs" / "gsm8k.py")
    arguments = ["--endpoint", server, "--data", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "run")]
    assert main(["run", recipe, *arguments]) == 2
    assert (
        f"got '{tmp_path / 'none.jsonl'}'; expected a .jsonl, .json, .csv or .parquet file" in capsys.readouterr().err
    )


def test_a_run_is_not_written_over(run_folder: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a run is refused before anything starts, with the option that replaces it."""
    assert main(["run", CALCULATOR, "--endpoint", server, "--out", str(run_folder), *SMALL]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err


def test_an_old_run_survives_an_unreachable_server(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--overwrite deletes nothing before the new run can start."""
    arguments = ["--endpoint", "http://127.0.0.1:9", "--model", str(DEMO_MODEL), "--out", str(run_folder)]
    assert main(["run", CALCULATOR, *arguments, "--overwrite"]) == 2
    assert "no server answers" in capsys.readouterr().err
    assert verify_run(run_folder).ok


def test_a_model_that_does_not_load_shows_the_engines_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The child's standard error is in its log, and its end in the message."""
    (tmp_path / "model").mkdir()
    assert main(["run", CALCULATOR, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "the embedded engine ended with exit code 2; the end of" in err
    assert f"model: got '{tmp_path / 'model'}'; expected a folder" in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Before or after the verb."""
    for arguments in (["--debug", "verify", "none"], ["verify", "none", "--debug"]):
        assert main(arguments) == 2
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("debug", [False, True])
def test_the_text_of_a_server_does_not_control_the_terminal(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, C1 controls and bidirectional overrides of an error are shown, in its traceback too."""
    try:
        raise ValueError("cause \x1b]0;title\x07 \x9b31m")
    except ValueError as cause:
        error = EndpointRefused("refused \x1b[2J \x9b31m \u202e")
        error.__cause__ = cause
    tell(error, debug=debug)
    said = capsys.readouterr().err
    assert said.endswith("rollouts: error: refused ␛[2J <U+009B>31m <U+202E>\n")
    assert ("cause ␛]0;title␇ <U+009B>31m" in said) is debug
    assert not set("\x1b\x07\x9b\u202e") & set(said)


def test_a_recorded_run_is_replayed_without_its_server(
    own_run: tuple[Path, int, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``run --record``, then ``replay`` when the engine is gone; a recipe that has changed is exit code 1."""
    path = str(own_run[0])
    assert main(["replay", path, "--out", str(tmp_path / "played.jsonl")]) == 0
    count = len(load_run(path, "all"))
    assert f"{count} samples in {count // 4} groups are equal" in capsys.readouterr().out
    assert main(["replay", path, "--set", "history=error"]) == 1
    assert "history: got 'error'; expected 'append'" in capsys.readouterr().err


def test_a_run_is_rescored_without_its_server(run_folder: Path, tmp_path: Path) -> None:
    """``rescore`` writes a run of other batches, which keeps the laws."""
    options = ["--set", "batch_size=1", "--set", "n_samples_per_prompt=4", "--format", "jsonl"]
    assert main(["rescore", str(run_folder), "--recipe", CALCULATOR, "--out", str(tmp_path / "new"), *options]) == 0
    assert verify_run(tmp_path / "new").violations == []
    assert read_info(tmp_path / "new")["batches"] >= 4


# -- show, verify, play --


def test_show_lists_the_groups(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of groups with prompt, rewards and outcome, and the next command."""
    assert main(["show", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "batch 0" in out
    assert "batch 1" in out
    assert f"rollouts show {run_folder} --group" in out


def test_show_prints_a_transcript(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample, by its number in a group or by its index: the tokens as text, with their numbers."""
    sample = load_run(run_folder)[1]
    assert main(["show", str(run_folder), "--group", str(sample.group_index), "--sample", "1"]) == 0
    first = capsys.readouterr().out
    assert f"sample {sample.index} · reward" in first
    assert "<|im_start|>user" in first
    assert "sampled" in first
    assert "logprob" in first
    assert f".html#group={sample.group_index}&sample=1" in first
    assert main(["show", str(run_folder), "--sample", str(sample.index)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("arguments", [["--group", "99999"], ["--sample", "99999"]])
def test_show_names_a_missing_group_or_sample(
    run_folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A group or sample that the run does not contain is bad input."""
    assert main(["show", str(run_folder), *arguments]) == 2
    assert f"{arguments[0]}: got 99999" in capsys.readouterr().err


def test_verify_prints_how_much_it_checked(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per law, with samples, completions and tokens; exit code 0."""
    assert main(["verify", str(run_folder)]) == 0
    out, err = capsys.readouterr()
    assert [line[:5] for line in out.splitlines()[:5]] == [f"law {law}" for law in range(1, 6)]
    assert f"{len(load_run(run_folder, 'all'))} samples" in out
    assert err == ""


async def test_a_broken_law_is_exit_code_1(tmp_path: Path) -> None:
    """The precise line goes to standard error."""
    await store_run(tmp_path / "run")
    edit_line(tmp_path / "run" / "batches" / "batch-000001.jsonl", 2, lambda row: row["loss_mask"].reverse())
    process = command("verify", str(tmp_path / "run"))
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "law 2 (mask): 2 violations" in out
    assert "batch-000001.jsonl, line 3 (group " in err
    assert ", loss_mask, position " in err


def test_play_shows_an_episode(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt, turn by turn, and its reward at the end."""
    assert main(["play", CALCULATOR, "--endpoint", server, "--text", "What is 2 + 3?"]) == 0
    out = capsys.readouterr().out
    assert "What is 2 + 3?" in out
    assert "sampled" in out
    assert "reward" in out.splitlines()[-2]


# -- the words themselves --


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints it and exits 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rollouts {__version__}\n"


@pytest.mark.parametrize("verb", ["run", "show", "play", "check-run", "export", "replay", "rescore", "serve"])
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help describes the verb and shows an example command."""
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"Example: rollouts {verb} " in capsys.readouterr().out


# -- start-up --


def loaded_by(*arguments: str) -> set[str]:
    """The top-level modules, and those of the package, that a command line has loaded when it ends."""
    code = "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
    code += "from rollouts.commands import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return {name if name.startswith("rollouts") else name.partition(".")[0] for name in done.stderr.split()}


def test_help_loads_no_verb_and_no_library() -> None:
    """``rollouts --help`` starts in a fraction of the time of a verb."""
    loaded = loaded_by("--help")
    small = {"rollouts.commands", "rollouts.errors", "rollouts.base", "rollouts.base.plugins", "rollouts.base.terminal"}
    small |= {"rollouts.concurrency", "rollouts.concurrency.interrupts"}
    assert {name for name in loaded if name.startswith("rollouts.")} == small
    assert loaded & {"aiohttp", "anyio", "msgspec", "numpy", "rich", "transformers"} == set()


@pytest.mark.parametrize("verb", ["run", "eval", "check-env", "show", "new-env", "export"])
def test_only_verbs_that_serve_load_the_web_server(verb: str) -> None:
    """aiohttp is part of the extras that serve, so that no other verb needs it."""
    assert loaded_by(verb, "--help").isdisjoint({"aiohttp", "torch"})


def test_the_command_alone_shows_the_verbs_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``--help`` does, with exit code 2; each verb once, in at most 80 columns."""
    assert main([]) == 2
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == alone
    lines = alone.splitlines()
    assert [line for line in lines if line.endswith(":")] == [f"{title}:" for title in GROUPS]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == sorted(VERBS)
    assert max(map(len, lines)) <= 80


def test_each_verb_is_in_one_group() -> None:
    """A verb in no group comes last in the help."""
    assert [name for name in VERBS if sum(name in names for names in GROUPS.values()) != 1] == []


@pytest.mark.parametrize(("earlier", "present"), EARLIER.items())
def test_earlier_names_of_verbs_work(earlier: str, present: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after ``--debug``; they are not listed."""
    with pytest.raises(SystemExit) as ended:
        main(["--debug", earlier, "--help"])
    assert ended.value.code == 0
    assert f"usage: rollouts {present} " in capsys.readouterr().out
    assert earlier not in VERBS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rn"], "VERB: got 'rn'; expected a verb of rollouts --help (did you mean run?)"),
        (["check-envs", "x"], "(did you mean check-env?)"),
        (["nonsense"], "VERB: got 'nonsense'; expected a verb of rollouts --help\n"),
        (["run", "x", "--out", "y", "--overwite"], "unrecognized arguments: --overwite (did you mean --overwrite?)"),
        (
            ["run", "x", "--out", "y", "--batch-size", "4"],
            "--batch-size 4 (an option of the recipe: --set batch_size=VALUE)",
        ),
        (
            ["eval", "x", "--out", "y", "--set", "size", "4"],
            "arguments: 4 (options of the recipe are --set NAME=VALUE)",
        ),
        (
            ["gateway", "--endpoint", "http://x", "--provider", "openai"],
            "got 'openai'; expected sglang or vllm: a run sends token",
        ),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verbs and options; exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_of_verbs_agrees_with_the_verbs() -> None:
    """The help of ``rollouts --help``, which loads no verb, is the help that each verb gives itself."""
    for name, verb in VERBS.items():
        verbs = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"rollouts.commands.{verb.module}").add(verbs)
        assert list(verbs.choices) == [name]
        assert [action.help for action in verbs._choices_actions] == [verb.does]


OPTIONS = {
    "--against": "an earlier result to compare with",
    "--allow-changes": "accept what differs from the first part",
    "--api-key-env": "the variable with the key of a chat API",
    "--at-once": "the most requests in flight to a chat API",
    "--base-url": "the URL of a chat API",
    "--batch-size": "groups in a batch",
    "--batches": "number of batches",
    "--body": "further fields of requests to a chat API",
    "--budget": "dollars of a command",
    "--calls": "calls that are not read",
    "--chat-template": "a chat template instead of the model's",
    "--concurrency": "limits of concurrent requests",
    "--data": "the data file of the recipe",
    "--debug": "print tracebacks",
    "--dialect": "notation of tool calls",
    "--dry-run": "write nothing",
    "--dtype": "type of the weights",
    "--endpoint": "URL of a server",
    "--factors": "over-sampling factors",
    "--failures": "kinds of failures",
    "--fed": "prompts come from clients",
    "--format": "file format of batches",
    "--group": "a group of a run",
    "--groups-in-work": "most groups that are ready or leased",
    "--help": "help",
    "--history": "what to do where the template rewrites the history",
    "--host": "address to listen on",
    "--idle-seconds": "how long a connection stays idle",
    "--images": "messages may have images",
    "--in-flight": "rollouts that run at once",
    "--into": "the parent folder",
    "--join": "URL of a service",
    "--json": "print the result as JSON",
    "--k": "the k of pass@k",
    "--latency": "seconds of a rollout",
    "--limit": "rows of the table",
    "--log": "loggers",
    "--lora": "adapters of a base model",
    "--max-context": "most tokens of a sequence",
    "--max-new-tokens": "most tokens of a reply",
    "--max-staleness": "most versions between a token and the current weights",
    "--metrics-port": "port of the Prometheus endpoint",
    "--model": "a model",
    "--near": "similarity of near duplicates",
    "--no-greedy": "no greedy rollouts",
    "--no-rehearsal": "no rehearsal",
    "--no-verify": "do not check the laws",
    "--not-in": "held-out prompts",
    "--out": "where the result is written",
    "--outcome": "groups by outcome",
    "--overwrite": "replace what is there",
    "--pass-rate": "share of kept groups",
    "--passing": "the reward of a rollout that passes",
    "--per-task": "most rollouts of a task",
    "--port": "port to listen on",
    "--patience": "seconds without an answer",
    "--per-worker": "rollouts of one worker",
    "--price-in": "dollars for prompt tokens",
    "--price-out": "dollars for sampled tokens",
    "--provider": "the protocol of the servers",
    "--quiet": "print no progress",
    "--recipe": "a recipe, for what is stored",
    "--record": "record what rollouts receive",
    "--remote-workers": "number of workers of other machines",
    "--reply-seed": "seed of random replies",
    "--resume": "what to continue",
    "--rollouts": "rollouts of each prompt",
    "--sample": "a sample of a run",
    "--seed": "the seed of the recipe",
    "--select": "which rollouts of a task",
    "--send-reasoning": "send thinking back",
    "--serve": "serve the result instead of writing it",
    "--servers": "numbers of servers",
    "--set": "an option of the recipe",
    "--slots": "concurrent requests of the engine",
    "--special-text": "special tokens in texts",
    "--speed": "relative speed of an engine",
    "--split": "the split of a data set",
    "--stop": "ids that end a turn",
    "--stop-with-stdin": "stop at the end of standard input",
    "--table": "a table of stored reports",
    "--task": "the name of one task",
    "--tasks": "the first N prompts",
    "--temperature": "temperature of a trainer",
    "--template-kwargs": "variables of the chat template",
    "--teacher-model": "the weights of teachers, to compare their logprobs with",
    "--text": "the text of a prompt; or: store text, which a chat API has instead of ids",
    "--threshold": "lowest reward that passes",
    "--to": "the output format of an export",
    "--tokenizer": "a tokenizer",
    "--tolerance": "largest difference of a logprob",
    "--tools": "the tools of runs without them",
    "--trace": "spans",
    "--unsafe": "also what may end the server",
    "--version": "the number of the policy version",
    "--where": "a condition on rollouts",
    "--without-source": "leave out a column",
    "--workers": "number of processes",
}
"""The one meaning of each option, in all verbs."""
SEVERAL_KINDS = {"--model", "--out", "--resume", "--provider", "--text"}
"""Options whose value is a folder in one verb and a file or a name in another, is one of more names, or is none."""


def test_an_option_has_one_name_and_one_meaning() -> None:
    """The same meaning has the same name in every verb; a new option is added to the list, or takes a name of it."""
    names: set[str] = set()
    values: dict[str, set[object]] = {}
    for name, verb in VERBS.items():
        verbs = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"rollouts.commands.{verb.module}").add(verbs)
        for action in verbs.choices[name]._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            assert len(long) == bool(action.option_strings), f"{name}: {action.option_strings}"
            names.update(long)
            for option in long:
                values.setdefault(option, set()).add(action.metavar)
    assert names == OPTIONS.keys()
    assert len({*OPTIONS.values()}) == len(OPTIONS)
    assert {option for option, kinds in values.items() if len(kinds) > 1} <= SEVERAL_KINDS
