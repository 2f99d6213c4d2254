"""The recipes of several agents through ``rollouts run`` on the embedded engine: the demo model plays badly, but each
law holds for its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.commands import main
from rollouts.dtypes import Prompt
from rollouts.recipes.environments import debate, judge, kuhn, user
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.training.branches import by_rollout

CONFIGS = Path(__file__).parents[2] / "configs"
SEATS = {
    "kuhn": {"player0", "player1"},
    "proposer": {"proposer", "solver"},
    "debate": {"pro", "con"},
    "user": {"agent"},
    "selector": {"solver", "selector"},
    "judge": {"solver"},
}
"""The seats that have samples."""


@pytest.mark.parametrize("name", SEATS)
def test_it_runs(name: str, engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole groups of whole plays, only seats that are trained, sound laws; ``show`` lists the seats."""
    out = tmp_path / "run"
    options = {"keep": "all", "batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 12}
    arguments = [text for option, value in options.items() for text in ("--set", f"{option}={value}")]
    recipe = str(CONFIGS / f"{name}.py")
    assert main(["run", recipe, "--endpoint", engine_url, "--out", str(out), "--format", "jsonl", *arguments]) == 0
    samples = load_run(out)
    assert len(by_rollout(samples)) == 4
    assert {sample.seat for sample in samples} <= SEATS[name]
    assert all(sample.loss_mask.count(1) > 0 and sample.reward is not None for sample in samples)
    report = verify_run(out)
    assert report.ok, report.violations
    assert report.checked[4]["conversations of seats"] >= len(samples)
    metrics = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert f"seat/{samples[0].seat}/reward/mean" in metrics
    capsys.readouterr()
    assert main(["show", str(out), "--group", str(samples[0].group_index)]) == 0
    assert samples[0].seat in capsys.readouterr().out


def chat_of(*texts: str) -> SimpleNamespace:
    replies: Iterator[str] = iter(texts)

    async def ask(said: str) -> SimpleNamespace:
        return SimpleNamespace(text=next(replies), over=None)

    return SimpleNamespace(seat="", ask=ask, reward=None, over=None)


@pytest.mark.parametrize(("text", "reward"), [("It is 1,420.00 euros.", 1.0), ("14201 euros", 0.0), ("0.1420", 0.0)])
async def test_a_total_is_named_as_a_whole_number(text: str, reward: float) -> None:
    """Digits inside another number are not the total."""
    chats = {"user": chat_of("Hello.", "###DONE###"), "agent": chat_of(text)}
    seats: Any = SimpleNamespace(**{name: SimpleNamespace(chat=lambda _, c=chat: c) for name, chat in chats.items()})
    await user.play(seats, Prompt("an errand", label=1420))
    assert chats["agent"].reward == reward


@pytest.mark.parametrize(
    ("verdict", "reward"), [("YES", 1.0), ("The answer is YES.", 1.0), ("NO", 0.0), ("NO, not YES", 0.0), ("EYES", 0.0)]
)
async def test_a_verdict_is_a_word(verdict: str, reward: float) -> None:
    """Letters inside another word do not count, and a judge that says both does not say YES."""

    def program_of(text: str) -> SimpleNamespace:
        async def run(*_: Any, **__: Any) -> SimpleNamespace:
            return works[text]

        return SimpleNamespace(run=run)

    works = {text: SimpleNamespace(metadata={"files": {"output.txt": text}}, reward=None) for text in ("42", verdict)}
    seats: Any = SimpleNamespace(solver=program_of("42"), judge=program_of(verdict))
    await judge.play(seats, Prompt("a sum", label=42))
    assert works["42"].reward == reward


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [("PRO", 1.0), ("My CONCLUSION: PRO.", 1.0), ("CON", 0.0), ("PRO or CON?", 0.5), ("In CONCLUSION", 0.5)],
)
async def test_the_side_that_a_judge_names_is_a_word(verdict: str, reward: float) -> None:
    """Before, CON won by a conclusion."""
    chats = {"pro": chat_of("a", "b"), "con": chat_of("c", "d"), "judge": chat_of(verdict)}
    seats: Any = Seated({name: SimpleNamespace(chat=lambda _, c=chat: c) for name, chat in chats.items()})
    await debate.play(seats, Prompt("Tea?"))
    assert (chats["pro"].reward, chats["con"].reward) == (reward, 1 - reward)


@pytest.mark.parametrize(("reply", "reward"), [("I bet.", 1.0), ("It is better to wait.", -1.0)])
async def test_a_move_is_a_word(reply: str, reward: float) -> None:
    """Before, "better" was a bet; a reply without a legal word loses the hand."""
    chats = {"player0": chat_of(reply), "player1": chat_of("fold")}
    seats: Any = Seated({name: SimpleNamespace(chat=lambda _, c=chat: c) for name, chat in chats.items()})
    await kuhn.play(seats, Prompt("deal", metadata={"seed": 3}))
    assert (chats["player0"].reward, chats["player1"].reward) == (reward, -reward)


class Seated(dict[str, Any]):
    """Seats by name and as attributes."""

    __getattr__ = dict.__getitem__
