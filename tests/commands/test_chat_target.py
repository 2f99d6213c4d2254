"""The verbs with ``--provider openai``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.commands import main
from rollouts.commands.chat_target import extra_body
from rollouts.commands.evaluate import load_evaluation
from rollouts.errors import ConfigError
from rollouts.runs.reader import load_run
from rollouts.testing.chat_server import ChatServer
from tests.chat_api.sums import FILE, KEY, false_scores, solve

SMALL = ["--set", "tasks=12", "--set", "batch_size=3", "--set", "n_samples_per_prompt=2", "--batches", "2"]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_KEY", KEY)


def provider(url: str, *more: str) -> list[str]:
    return ["--provider", "openai", "--base-url", url, "--model", "stub", "--api-key-env", "STUB_KEY", *more]


@contextlib.contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[ChatServer]:
    """The stub in a thread of its loop: a command runs in the main thread, which takes its signals."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ChatServer(*arguments, **options)) as one:
        yield one


def texts_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_an_evaluation_has_pass_rates_and_a_cost_and_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy, as the recipe asks; a refusal is counted, and no failure. The key is in no file and no output."""
    out = tmp_path / "exam"
    faults = {0: "refusal", 3: "server_error", 5: "rate_limit"}
    with serving(solve, fault=lambda number: faults.get(number)) as server:  # type: ignore[arg-type]
        prices = ["--price-in", "1", "--price-out", "2"]
        assert main(["eval", FILE, "--set", "tasks=9", *provider(server.url, *prices), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "9 tasks, 9 rollouts\n" in printed.out.replace(" \n", "\n")
    assert f"chat API: {len(server.asked)} requests, 2 of them retries, 1 refusals, $" in printed.out
    assert {(score.rollouts, score.failed) for score in load_evaluation(out)} == {(1, 0)}
    assert KEY not in printed.out + printed.err
    assert KEY.encode() not in texts_of(out)


@pytest.mark.parametrize(("given", "words"), [("0.5", "temperature 0.5"), ("null", "temperature of the API")])
def test_a_temperature_of_the_body_is_the_one_that_is_printed(
    given: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It replaces that of greedy rollouts, too, so that there are none."""
    out = tmp_path / "exam"
    with serving(solve) as server:
        command = ["eval", FILE, "--set", "tasks=2", "--set", "temperature=1.0", "--body", f"temperature={given}"]
        assert main([*command, *provider(server.url), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert "no greedy rollouts: --body sets the temperature" in printed
    assert not (out / "greedy.jsonl").exists()
    assert {one.body.get("temperature") for one in server.asked} == {None if given == "null" else 0.5}


def test_another_model_does_not_resume_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do other fields of the requests."""
    out = tmp_path / "exam"
    with serving(solve) as server:
        command = ["eval", FILE, "--set", "tasks=2", *provider(server.url)]
        assert main([*command, "--out", str(out)]) == 0
        assert main([*command, "--body", "reasoning_effort=low", "--resume", str(out)]) == 2
        assert "generate: got {" in capsys.readouterr().err
        command += ["--at-once", "2", "--budget", "1", "--price-in", "1", "--price-out", "1"]
        assert main([*command, "--resume", str(out)]) == 0


def test_another_api_with_a_model_of_the_same_name_resumes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither an evaluation nor a run without --allow-changes: a rate is of one model."""
    exam, run = tmp_path / "exam", tmp_path / "run"
    with serving(solve) as first, serving(solve) as other:
        evaluation = ["eval", FILE, "--set", "tasks=4"]
        assert main([*evaluation, *provider(first.url), "--tasks", "2", "--out", str(exam)]) == 0
        assert main([*evaluation, *provider(other.url), "--resume", str(exam)]) == 2
        assert "api: got" in capsys.readouterr().err
        prices = ["--price-in", "2", "--price-out", "8", "--budget", "0.02"]
        main(["run", FILE, *SMALL, *provider(first.url, *prices), "--text", "--out", str(run)])
        resumed = ["run", "--resume", str(run), "--provider", "openai", "--base-url"]
        assert main([*resumed, other.url]) == 2
        assert "another API may have another model of this name" in capsys.readouterr().err
        assert other.asked == []
        assert main([*resumed, f"{first.url}/", "--batches", "1"]) == 0
        assert main([*resumed, other.url, "--allow-changes", "--batches", "2"]) == 0
        assert other.asked


def test_text_is_stored_and_curated_and_no_trainer_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``run --text`` without a filter, ``check-run`` that judges what it can, ``curate``, ``show``, ``export``."""
    out = tmp_path / "run"
    with serving(solve) as server:
        assert main(["run", FILE, *SMALL, *provider(server.url), "--text", "--out", str(out)]) == 0
    samples = list(load_run(out))
    assert len(samples) == 12
    assert false_scores(samples) == []
    assert {sample.reward for sample in samples} == {0.0, 1.0}, "groups of equal rewards are kept"
    assert KEY.encode() not in texts_of(out)
    info = msgspec.json.decode((out / "run.json").read_bytes())
    assert (info["endpoint"]["provider"], info["tokenizer"], info["vocab_size"]) == ("openai", None, None)
    capsys.readouterr()
    assert main(["check-run", str(out)]) == 0
    report = capsys.readouterr().out
    assert "law 1 (tokens): not judged" in report
    assert "laws 1, 2, 3 and 8 cannot be judged" in report
    assert main(["show", str(out), "--group", "0", "--sample", "0"]) == 0
    assert "The answer is" in capsys.readouterr().out
    assert main(["curate", str(out), "--to", "chat", "--dry-run"]) == 0
    assert main(["export", str(out), "--to", "skyrl", str(tmp_path / "skyrl")]) == 2
    assert "with logprobs; this API has none" in capsys.readouterr().err


def test_a_stopped_run_of_text_resumes_without_repeating_a_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The URL, the prices and the variable of the key are those of the run; a budget is of one command."""
    out = tmp_path / "run"
    prices = ["--price-in", "2", "--price-out", "8", "--at-once", "2"]
    with serving(solve) as server:
        command = ["run", FILE, *SMALL, *provider(server.url, *prices), "--text", "--out", str(out)]
        assert main([*command, "--budget", "0.02"]) != 0
        first = Counter(final_requests(server))
        assert sum(first.values()) > 0
        assert main(["run", "--resume", str(out), "--provider", "vllm"]) == 2
        assert main(["run", "--resume", str(out), "--provider", "openai"]) == 0
    samples = list(load_run(out, "all"))
    assert len(list(load_run(out))) == 12
    assert len(samples) == sum(final_requests(server).values()), "each complete rollout is stored, and was played once"
    assert "a run has token ids, or text of a chat API" in capsys.readouterr().err


def final_requests(server: ChatServer) -> Counter[str]:
    bodies = [one.body for one in server.asked]
    return Counter(body["messages"][1]["content"] for body in bodies if body["messages"][-1]["role"] == "tool")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", FILE, "--provider", "openai", "--model", "m", "--out", "x"], "rollouts run --text stores"),
        (["up", FILE, "--provider", "openai", "--model", "m", "--out", "x"], "this API has none"),
        (["run", FILE, "--text", "--out", "x"], "--provider openai with it"),
        (["eval", FILE, "--provider", "openai", "--out", "x"], "--model: got None"),
        (["eval", FILE, "--budget", "1", "--out", "x"], "none without --provider openai"),
        (["eval", FILE, "--provider", "openai", "--model", "m", "--budget", "1", "--out", "x"], "--price-in and"),
        (["eval", FILE, "--provider", "openai", "--model", "m", "--price-in", "1", "--out", "x"], "both, or none"),
        (
            ["eval", FILE, "--provider", "openai", "--model", "m", "--api-key-env", "NO_SUCH_KEY", "--out", "x"],
            "NO_SUCH_KEY'; expected an environment variable that is set",
        ),
        (["eval", FILE, "--provider", "openai", "--endpoint", "http://x", "--out", "x"], "--base-url is the API"),
        (["eval", FILE, "--provider", "openai", "--model", "m", "--dialect", "hermes", "--out", "x"], "dialect"),
        (["eval", "debate", "--provider", "openai", "--model", "m", "--out", "x"], "plays no programs, seats"),
        (["run", FILE, "--provider", "openai", "--model", "m", "--text", "--record", "--out", "x"], "--record"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Before a request is sent and before a folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_key_ends_the_run_with_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with a failed rollout for each task."""
    with serving(solve, key="sk-other") as server:
        command = ["eval", FILE, *provider(server.url, "--at-once", "1"), "--out", str(tmp_path / "exam")]
        assert main([*command]) == 2
    assert "expected a key in STUB_KEY that the API accepts" in capsys.readouterr().err
    assert len(server.asked) == 1


def test_play_and_check_env_show_what_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``play`` prints the messages, ``check-env`` an episode of each prompt after the random ones."""
    with serving(solve) as server:
        assert main(["play", FILE, *provider(server.url)]) == 0
        printed = capsys.readouterr().out
        assert "The answer is" in printed
        assert "chat API: 2 requests" in printed
        assert main(["check-env", FILE, *provider(server.url), "--tasks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "stub, prompt 1" in printed
    assert "task_completed; 2 replies, 1 tool calls" in " ".join(printed.split())


@pytest.mark.parametrize("text", ["reasoning_effort", "=1", "messages=[]", "n=2", "stream=true"])
def test_a_field_that_the_episode_sets_is_refused(text: str) -> None:
    """``--body`` adds fields that the episode does not read; others would change what a reply is."""
    with pytest.raises(ConfigError, match="--body"):
        extra_body([text])


def test_a_field_is_json_or_text() -> None:
    assert extra_body(["a=low", 'b={"x": 1}', "c=null", "d=0.5"]) == {"a": "low", "b": {"x": 1}, "c": None, "d": 0.5}
