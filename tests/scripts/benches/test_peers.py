"""The loops of ``scripts/bench peers``: what they share, and the commands of their page."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from rollouts.recipe.files import load_recipe
from scripts.benches.peers import peers_options
from scripts.benches.peers_in_process import PEERS, Ours, Retries, Same, compared
from scripts.benches.peers_job import REPLY, TURNS, Job
from scripts.benches.workloads import default_tokenizer
from scripts.servers.trainers import TRAINERS

ROOT = Path(__file__).parents[3]


def test_the_page_has_commands_that_the_parser_takes() -> None:
    """Each command of the page, and each peer by its name and environment."""
    parser = argparse.ArgumentParser()
    peers_options(parser)
    lines = re.findall(r"^scripts/bench peers([^#\n]*)", (ROOT / "docs" / "peers.md").read_text(), flags=re.MULTILINE)
    parsed = [parser.parse_args(line.split()) for line in lines]
    assert [options.in_process for options in parsed] == [None, [], ["trl", "verl"]]
    assert {peer.trainer for peer in PEERS.values()} <= set(TRAINERS)


@pytest.mark.parametrize("environment_cls", [Same, Retries])
def test_both_jobs_are_three_turns_with_a_reward(environment_cls: type[Any]) -> None:
    """Ours on the canned replies, twice: the same rows, of which each turn is trained."""
    job = Job.of(str(default_tokenizer()), calls=environment_cls is Same)
    equal, sizes = compared(Ours(job, environment_cls), Ours(job, environment_cls), "What is (2 + 2) * 2?")
    assert equal == "tokens, mask, logprobs"
    one, other = re.findall(r"1 of (\d+)", sizes)
    assert int(one) == int(other) > TURNS * REPLY


def test_wrong_labels_are_on_problems_like_the_others() -> None:
    """Of the kind ``mislabelled``, 60 % have an answer that no rollout gives; their texts are those of the kind."""
    module = importlib.import_module(load_recipe(Path("calculator_grpo")).__module__)
    trained, mixed = (
        [next(each) for _ in range(500)] for each in (module._problems(kind, 3) for kind in ("trained", "mislabelled"))
    )
    assert [prompt.prompt for prompt in mixed] == [prompt.prompt for prompt in trained]
    wrong = [int(prompt.label) > 500_000 for prompt in mixed]
    assert 0.55 < sum(wrong) / len(wrong) < 0.65
    assert [one.label for one, far in zip(mixed, wrong, strict=True) if not far] == [
        one.label for one, far in zip(trained, wrong, strict=True) if not far
    ]
