"""Two seats with unlike weights on two embedded engines: law 8 holds for each by the name of its seat."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.runs.logprobs import check_logprobs
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run

pytest.importorskip("torch")

RECIPE = """
from rollouts.dtypes import Endpoint
from rollouts.seats import Seat, play_recipe

async def play(seats, prompt):
    white, black, judge = seats.white.chat(), seats.black.chat(), seats.judge.chat()
    said = prompt.prompt
    for _ in range(2):
        said = (await white.ask(said[-100:] or "...")).text
        said = (await black.ask(said[-100:] or "...")).text
    await judge.ask(said[-100:] or "...")
    white.reward, black.reward = float(len(said) % 2), float(len(said) % 3)

def recipe(endpoint, *, other: str = ""):
    old = Endpoint(model=endpoint.model, base_url=other)
    seats = {"white": Seat(), "black": Seat(endpoint=old), "judge": Seat(endpoint=old, trained=False)}
    prompts = [f"What is {number} + 3?" for number in range(20)]
    sizes = {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 12}
    return play_recipe("two", endpoint, play, prompts, seats=seats, keep="all", **sizes)
"""


def other_model(folder: Path) -> Path:
    """The demo model with noise of 0.02."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    moved = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


async def test_logprobs_are_those_of_the_policy_of_each_seat(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No false alarm where both servers name their weights alike, and the wrong weights are found; with ``--long``."""
    if not request.config.getoption("--long"):
        pytest.skip("needs --long")
    (tmp_path / "two.py").write_text(RECIPE)
    other, out = other_model(tmp_path / "other"), tmp_path / "run"
    async with running_server(DEMO_MODEL) as first, running_server(other) as second:
        target = RunTarget(recipe=tmp_path / "two.py", urls=(first,), options={"other": second}, batches=1)
        result = await launch(target, out, "jsonl", False, Console(file=io.StringIO()), resume=False)
    assert result is not None
    assert result.error is None, result.error
    assert verify_run(out).violations == []
    samples = load_run(out)
    assert {sample.seat for sample in samples} == {"white", "black"}
    report = check_logprobs(out, {None: DEMO_MODEL, "black": other})
    assert report.violations == []
    assert sum(one.tokens for one in report.versions) >= sum(sample.sampled_tokens for sample in samples)
    wrong = check_logprobs(out, {None: other, "black": DEMO_MODEL})
    assert sum(one.beyond for one in wrong.versions) > 0.2 * sum(one.tokens for one in wrong.versions)
