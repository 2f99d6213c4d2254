"""Laws C1 to C5 of curation, on random runs with branches, failures and rollouts of an earlier run."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.curation import Selection, Target, curate, write_folder
from rollouts.curation.card import card
from rollouts.curation.curate import Quantiles
from rollouts.curation.rows import IGNORED, LEFT_OUT, NEAR, NO_PARTNER, SAME_TEXT, TARGETS
from rollouts.curation.select import SEVERAL
from rollouts.dtypes import Message, Prompt, StopReason, ToolCall
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.training.evaluation import task_key
from rollouts.training.samples import trajectory_to_samples
from rollouts.trajectory import Trajectory
from tests.curation.branched_runs import TOOLS, copied_run, random_run, reply, write_run

SEEDS = range(4)
SELECTIONS = [
    Selection(select="all"),
    Selection(per_task=2, seed=3),
    Selection(select="best:2", passing=0.25),
    Selection(select="shortest", where="pass_rate in 0.2..0.9 and branches <= 2"),
    Selection(select="all", where='version >= 1 or stop_reason == "max_turns"'),
]


def runs_of(folder: Path, seed: int) -> list[Path]:
    """A random run, one with copies of its rollouts, and another random run."""
    samples = random_run(folder / "a", seed)
    copied_run(folder / "b", samples, seed)
    random_run(folder / "c", seed + 100)
    return [folder / name for name in "abc"]


def stored(runs: list[Path]) -> dict[tuple[str, Any, Any], list[dict[str, Any]]]:
    """The branches of each rollout by run, group and index."""
    found: dict[tuple[str, Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        for row in read_rows(run, "all"):
            found[str(run), row.data["group_index"], row.data["index"]].append(row.data)
    return found


def verdict(branches: list[dict[str, Any]]) -> float | None:
    """The reward of a rollout that has a verdict, as the law says it."""
    if any(branch["failure"] or branch["status"] in ("failed", "aborted") for branch in branches):
        return None
    rewards = [branch["reward"] for branch in branches]
    return None if None in rewards else sum(rewards) / len(rewards)


def figures(rewards: list[float | None]) -> dict[str, float]:
    """The figures of a task that has a rollout with a verdict, from their definition."""
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return {}
    rate, mean = sum(reward >= 1 for reward in known) / len(known), sum(known) / len(known)
    return {"pass_rate": rate, "mean": mean, "n": len(known), "failed": len(rewards) - len(known)}


def key_of(row: dict[str, Any]) -> tuple[str, Any, Any]:
    source = row["source"]
    return source["run"], source["group_index"], source["index"]


def cases(targets: tuple[Target, ...]) -> Iterator[Any]:
    for target, (number, selection) in itertools.product(targets, enumerate(SELECTIONS)):
        if target in ("tokens", "chat") or selection.select in (None, "all"):
            yield pytest.param(target, selection, id=f"{target}-{number}")


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_label_is_an_id_exactly_where_the_policy_sampled_it(selection: Selection, tmp_path: Path) -> None:
    """C1: the labels of a row are the ids under the mask of the branch that ``source`` names, and -100 elsewhere."""
    for seed in SEEDS:
        run = tmp_path / str(seed)
        random_run(run, seed)
        rollouts = stored([run])
        for row in curate(run, "tokens", selection):
            branch = rollouts[key_of(row)][row["source"]["branch"]]
            assert row["source"]["encoded"] == "sampled"
            assert row["input_ids"] == branch["tokens"]
            assert row["labels"] == [
                token if mask else IGNORED for token, mask in zip(branch["tokens"], branch["loss_mask"], strict=True)
            ]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_reply_is_trained_in_one_row_over_branches_and_runs(selection: Selection, tmp_path: Path) -> None:
    """C2: no request's reply has labels in two rows, also where a run has the rollouts of another one."""
    copies = 0
    for seed in SEEDS:
        runs = runs_of(tmp_path / str(seed), seed)
        rollouts = stored(runs)
        trained: Counter[str] = Counter()
        for row in curate(runs, "tokens", selection):
            branch = rollouts[key_of(row)][row["source"]["branch"]]
            for completion in branch["completions"]:
                labels = row["labels"][completion["start"] : completion["stop"]]
                assert len({label == IGNORED for label in labels}) == 1, "a reply is trained as a whole or not"
                trained[completion["request_id"]] += IGNORED not in labels
            copies += row["source"]["run"].endswith("b")
        assert max(trained.values()) == 1
    assert copies or selection.select is not None, "a copy is taken where its first run has another verdict"


def test_a_rollout_of_two_runs_is_judged_once(tmp_path: Path) -> None:
    """C2: a copy with another reward would call one reply both good and bad."""
    for seed in SEEDS:
        runs = runs_of(tmp_path / str(seed), seed)
        rollouts = stored(runs)
        rows = list(curate(runs, "kto"))
        judged = [rollouts[key_of(row)][-1]["completions"][-1]["request_id"] for row in rows]
        assert judged
        assert len(set(judged)) == len(judged)


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_that_is_left_out_of_the_loss_is_in_no_row(target: Target, tmp_path: Path) -> None:
    """C1: ``loss_multiplier=0`` says that no token of a sample is trained."""
    samples = random_run(tmp_path / "all", 3)
    for sample in samples:
        sample.loss_multiplier = 0.0
    write_run(tmp_path / "none", samples)
    curation = curate(tmp_path / "all", target)
    assert list(curation)
    assert curation.account.reweighted == 0
    curation = curate(tmp_path / "none", target)
    assert list(curation) == []
    assert curation.account.refused[LEFT_OUT]


@pytest.mark.parametrize("target", TARGETS)
def test_a_weight_that_no_column_has_is_counted(target: Target, tmp_path: Path) -> None:
    """Rows of samples with another ``loss_multiplier`` than 1 are in the account, and the card says so."""
    samples = random_run(tmp_path / "all", 1)
    for sample in samples:
        sample.loss_multiplier = 0.5
    write_run(tmp_path / "half", samples)
    curation = curate(tmp_path / "half", target)
    rows = list(curation)
    assert (curation.account.reweighted, curation.account.to_dict()["reweighted"]) == (len(rows), len(rows))
    assert f"{len(rows)} rows are of samples whose `loss_multiplier` is not 1" in card(curation, ["data/a.jsonl"])


def test_two_replies_of_one_text_are_no_pair(tmp_path: Path) -> None:
    """A pair row has text: replies whose ids alone differ would be chosen and rejected at once."""
    prompt = Prompt([Message("user", "Q")], group_index=0)
    samples = []
    for index, (ids, reward) in enumerate([([10, 11], 1.0), ([12], 0.0)]):
        branch = Trajectory("fork")
        branch.add_context(np.array([1, 2], np.int32), prompt.messages)
        reply(random.Random(index), branch, ids=ids, text="equal")
        branch.tools = TOOLS
        branch.seal(StopReason.TASK_COMPLETED)
        (sample,) = trajectory_to_samples([branch], attrs.evolve(prompt, index=index), str)
        sample.reward = reward
        samples.append(sample)
    write_run(tmp_path / "run", samples)
    curation = curate(tmp_path / "run", "pairs")
    assert list(curation) == []
    assert curation.account.refused == {SAME_TEXT: 1, NO_PARTNER: 1}


def test_a_near_duplicate_takes_no_place_of_the_pairs_of_a_task(tmp_path: Path) -> None:
    """A pair that ``near`` refuses does not count for ``per_task``, and its rejected rollout is free for another."""
    pytest.importorskip("rensa", reason="rensa is not installed")
    near, new = (" ".join(f"{name}{number}" for number in range(40)) for name in ("n", "w"))
    samples = []
    for group, replies in enumerate([[(near, 1.0), ("no", 0.0)], [(near, 1.0), (new, 1.0), ("no", 0.0)]]):
        for text, reward in replies:
            prompt = Prompt([Message("user", f"question {group}")], group_index=group, index=len(samples))
            branch = Trajectory("fork")
            branch.add_context(np.array([1, 2, group + 3], np.int32), prompt.messages)
            reply(random.Random(0), branch, ids=[10, len(samples)], text=text)
            branch.tools = TOOLS
            branch.seal(StopReason.TASK_COMPLETED)
            (sample,) = trajectory_to_samples([branch], prompt, str)
            sample.reward = reward
            samples.append(sample)
    write_run(tmp_path / "run", samples)
    curation = curate(tmp_path / "run", "pairs", Selection(near=0.8, per_task=1))
    rows = list(curation)
    assert [(row["source"]["index"], row["source"]["rejected_index"]) for row in rows] == [(0, 1), (3, 4)]
    assert curation.account.refused == {NEAR: 1}


def test_thoughts_and_calls_are_compared_too(tmp_path: Path) -> None:
    """A held-out text in a thought or in an argument is found; equal answers after unlike thoughts are not near."""
    rng = random.Random(0)
    leak, *thoughts = (" ".join(f"w{rng.randrange(900)}" for _ in range(60)) for _ in range(4))
    call = ToolCall("run", {"code": f"# {leak}"})
    replies = [Message("assistant", "It is 7.", reasoning=thought) for thought in thoughts]
    replies += [Message("assistant", "It is 7.", reasoning=f"{thoughts[0]} {leak}")]
    replies += [Message("assistant", "", tool_calls=[call])]
    samples = []
    for index, message in enumerate(replies):
        prompt = Prompt([Message("user", "Q")], group_index=0, index=index)
        branch = Trajectory("fork")
        branch.add_context(np.array([1, 2], np.int32), prompt.messages)
        reply(rng, branch, ids=[10, index], message=message)
        branch.tools = TOOLS
        branch.seal(StopReason.TASK_COMPLETED)
        (sample,) = trajectory_to_samples([branch], prompt, str)
        sample.reward = 1.0
        samples.append(sample)
    write_run(tmp_path / "run", samples)
    (tmp_path / "held.txt.jsonl").write_text(json.dumps({"text": leak}) + "\n")
    curation = curate(tmp_path / "run", "tokens", Selection(not_in=[tmp_path / "held.txt.jsonl"]))
    assert [row["source"]["index"] for row in curation] == [0, 1, 2]
    pytest.importorskip("rensa", reason="rensa is not installed")
    near = curate(tmp_path / "run", "tokens", Selection(near=0.8))
    assert [row["source"]["index"] for row in near] == [0, 1, 2, 3, 4]


def test_a_continued_rollout_of_another_run_trains_only_what_is_new(tmp_path: Path) -> None:
    """C2: a rollout that continues one of an earlier run has the earlier reply as context."""
    samples = random_run(tmp_path / "a", 1)
    longer = next(sample for sample in samples if sample.turns >= 2 and sample.failure is None and sample.reward)
    first = longer.completions[0]
    copied_run(tmp_path / "b", [longer], 0)
    shorter = type(longer).from_dict(longer.to_dict())
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(shorter, name, getattr(shorter, name)[: first.stop])
    shorter.completions, shorter.reward = [first], 1.0
    shorter.messages = shorter.messages[:3]
    shorter.versions = [span for span in shorter.versions if span.stop <= first.stop]
    copied_run(tmp_path / "a2", [shorter], 0)
    rows = list(curate([tmp_path / "a2", tmp_path / "b"], "tokens", Selection(select="all")))
    assert len(rows) == 2
    assert set(rows[1]["labels"][: first.stop]) == {IGNORED}
    assert set(rows[1]["labels"][first.stop :]) != {IGNORED}
    chats = curate([tmp_path / "a2", tmp_path / "b"], "chat", Selection(select="all"))
    assert [Path(row["source"]["run"]).name for row in chats] == ["a2"], "a chat row has no mask"


@pytest.mark.parametrize(("target", "selection"), [*cases(("tokens", "chat", "pairs", "kto"))])
def test_every_rollout_is_in_the_data_set_or_refused_for_one_reason(
    target: Target, selection: Selection, tmp_path: Path
) -> None:
    """C3: rollouts read = rollouts of the rows + refused rollouts, counted from the files and from the rows."""
    for seed in SEEDS:
        runs = runs_of(tmp_path / str(seed), seed)
        curation = curate(runs, target, selection)
        rows = list(curation)
        account = curation.account
        written = {key_of(row) for row in rows}
        if target == "pairs":
            written |= {
                (run, group, row["source"]["rejected_index"]) for row in rows for run, group, _ in [key_of(row)]
            }
        assert account.read == len(stored(runs))
        assert account.written == len(written)
        assert account.rows == len(rows)
        assert account.read == account.written + account.refused.total()


@pytest.mark.parametrize("target", TARGETS)
def test_a_failure_is_in_no_pass_rate_and_on_no_side(target: Target, tmp_path: Path) -> None:
    """C4: a task's rate counts its rollouts with a verdict only, each once; no row is of a rollout without one."""
    for seed in SEEDS:
        runs = runs_of(tmp_path / str(seed), seed)
        rollouts = stored(runs)
        rewards: dict[str, list[float | None]] = defaultdict(list)
        counted: set[tuple[str, ...]] = set()
        for branches in rollouts.values():
            requests = tuple(one["request_id"] for branch in branches for one in branch["completions"])
            if requests in counted:
                continue  # a copy of a rollout of the first run
            counted.add(requests)
            rewards[task_key(branches[0]["prompt"], branches[0]["label"])].append(verdict(branches))
        for low in (0.2, 0.5, 0.8):
            for row in curate(runs, target, Selection(where=f"pass_rate > {low}")):
                assert verdict(rollouts[key_of(row)]) is not None
                known = [reward for reward in rewards[row["source"]["task"]] if reward is not None]
                assert sum(reward >= 1 for reward in known) / len(known) > low
                if target == "pairs":
                    run, group, _ = key_of(row)
                    assert verdict(rollouts[run, group, row["source"]["rejected_index"]]) is not None
        for field, value in (("pass_rate", 0.5), ("mean", 0.5), ("n", 6), ("failed", 1)):
            selection = Selection(select="all", where=f"{field} >= {value}")
            taken = {row["source"]["task"] for row in curate(runs, "tokens", selection)}
            assert taken == {task for task in rewards if figures(rewards[task]).get(field, 0) >= value}


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_curation_writes_the_same_bytes(target: Target, tmp_path: Path) -> None:
    """C5: the files, the card and the account of two curations are equal, byte for byte."""
    runs = runs_of(tmp_path, 5)
    selection = Selection(per_task=2, seed=1, near=0.9) if target != "kto" else Selection()
    for out in ("one", "two"):
        write_folder(curate(runs, target, selection), tmp_path / out)
    one, two = (
        {path.relative_to(tmp_path / out): path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file()}
        for out in ("one", "two")
    )
    assert one == two
    assert len(one) == 3


def test_another_seed_takes_other_rollouts_of_a_task(tmp_path: Path) -> None:
    """``--seed`` decides which of a task's rollouts are taken, and the number stays."""
    random_run(tmp_path / "a", 3, groups=24)
    taken = [
        [key_of(row) for row in curate(tmp_path / "a", "tokens", Selection(select="all", per_task=1, seed=seed))]
        for seed in (0, 1)
    ]
    assert taken[0] != taken[1]
    assert len(set(taken[0])) == len(set(taken[1]))


def test_a_pair_is_two_replies_to_one_context(tmp_path: Path) -> None:
    """The prompt is that of both rollouts, their replies differ, and one passed where the other did not."""
    found = 0
    for seed in SEEDS:
        runs = runs_of(tmp_path / str(seed), seed)
        rollouts = stored(runs)
        sides: dict[str, set[str]] = defaultdict(set)
        for row in curate(runs, "pairs"):
            found += 1
            run, group, index = key_of(row)
            right, wrong = rollouts[run, group, index], rollouts[run, group, row["source"]["rejected_index"]]
            assert verdict(right) == 1.0
            assert (verdict(wrong) or 0.0) < 1.0
            assert row["chosen"] != row["rejected"]
            assert len(row["chosen"]) == len(row["rejected"]) == 1
            contents = [message["content"] for message in row["prompt"]]
            assert contents == [message["content"] for message in right[0]["messages"]][: len(contents)]
            assert contents == [message["content"] for message in wrong[0]["messages"]][: len(contents)]
            for side in ("chosen", "rejected"):
                sides[side].add(repr([contents, row[side][0]["content"], row["source"]["task"]]))
        assert not sides["chosen"] & sides["rejected"], "no reply is chosen in one pair and rejected in another"
    assert found > 5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seats", [True, False])
def test_a_rollout_of_several_agents_is_refused(target: Target, seats: bool, tmp_path: Path) -> None:
    """A winner of 2 and a loser of 0 have a mean that passes; also equal rewards of two seats are of no one agent."""
    samples = [sample for sample in random_run(tmp_path / "a", 1) if sample.failure is None]
    parts = [sample for members in _by_rollout(samples) if len(members) > 1 for sample in members]
    for place, sample in enumerate(parts):
        first = place == 0 or parts[place - 1].rollout_id != sample.rollout_id
        sample.reward = 1.0 if seats else 9.0 if first else 0.0
        sample.seat = ("white" if first else "black") if seats else None
    writer = RunWriter(tmp_path / "b", format="jsonl")
    writer.write_batch(parts, {})
    writer.finish("finished")
    rows = curate(tmp_path / "b", target, Selection(select="all"))
    assert list(rows) == []
    number = len({sample.rollout_id for sample in parts})
    assert number > 1
    assert rows.account.refused == {SEVERAL: number}


def _by_rollout(samples: list[Sample]) -> list[list[Sample]]:
    return [list(members) for _, members in itertools.groupby(samples, lambda sample: sample.rollout_id)]


def test_wrong_arguments_are_refused_before_a_row_is_read(tmp_path: Path) -> None:
    """The error names the argument."""
    random_run(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match="--to"):
        curate(tmp_path / "a", "sft")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="each run once"):
        curate([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(ConfigError, match=r"run\.json"):
        curate(tmp_path)
    with pytest.raises(ConfigError, match="--select"):
        curate(tmp_path / "a", "pairs", Selection(select="correct"))
    with pytest.raises(ConfigError, match="--select"):
        Selection(select="best:0")
    with pytest.raises(ConfigError, match="--near"):
        curate(tmp_path / "a", "tokens", Selection(near=1.5))
    with pytest.raises(ConfigError, match="a field that at least one rollout has"):
        list(curate(tmp_path / "a", "tokens", Selection(where="metadata.lvel == 1")))


def test_the_ends_of_quantiles_are_exact() -> None:
    """The others are those of a sample; without a number there are none."""
    numbers = list(range(50_000))
    random.Random(1).shuffle(numbers)
    quantiles = Quantiles()
    assert quantiles.at(0.0, 0.5, 1.0) == []
    for number in numbers:
        quantiles.add(number)
    least, median, largest = quantiles.at(0.0, 0.5, 1.0)
    assert (least, largest) == (0, 49_999)
    assert median == pytest.approx(25_000, rel=0.05)
