"""Fewer draws for prompts without spread: the cost of a kept group, equal weight for live prompts, prompts that wake.

The pure model: a rollout of prompt i passes with probability p[i]; a group is observed ``LATE`` draws after its own.
Half of the dead prompts never pass, half always do; the others pass with 0.05 to 0.95. An epoch is as many draws as
there are prompts.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter, deque
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Message
from rollouts.errors import ConfigError
from rollouts.runs.writer import RunWriter
from rollouts.training import DataBuffer, Sample
from rollouts.training.samplers import PassRateSampler
from tests.processors import picture
from tests.stored_runs import some_sample, store_run

PROMPTS, N, LATE = 400, 8, 72


@attrs.define
class Played:
    """The draws of one model run."""

    started: Counter[int]
    """Groups by epoch."""
    kept: Counter[int]
    visits: list[Counter[int]]
    """Draws of each prompt, by epoch."""
    woken: dict[int, int]
    """The epoch in which a prompt that woke was kept for the first time."""
    live: list[int]
    wakers: list[int]
    buffer: DataBuffer

    def cost(self, first: int, last: int) -> float:
        """Prompts started for each kept group in the epochs from ``first`` to ``last``, counted from 1."""
        epochs = range(first - 1, last)
        return sum(self.started[one] for one in epochs) / sum(self.kept[one] for one in epochs)

    def spread_of_visits(self) -> float:
        visits = [sum(epoch[position] for epoch in self.visits) for position in self.live]
        return statistics.pstdev(visits) / statistics.fmean(visits)


def questions() -> list[str]:
    return [f"question {number}" for number in range(PROMPTS)]


def rates(dead: float, seed: int) -> tuple[list[float], list[int]]:
    rng = random.Random(f"rates/{seed}")
    positions = rng.sample(range(PROMPTS), PROMPTS)
    count = round(dead * PROMPTS)
    rate = [rng.uniform(0.05, 0.95) for _ in range(PROMPTS)]
    for number, position in enumerate(positions[:count]):
        rate[position] = float(number % 2)
    return rate, positions[:count]


def play(
    sampler: Any, dead: float, seed: int = 0, epochs: int = 8, wakes: int | None = None, fails: float = 0.0
) -> Played:
    """Play the model. ``wakes``: in this epoch most of the dead prompts begin to pass half of the time."""
    rate, dead_ones = rates(dead, seed)
    rng = random.Random(f"model/{seed}")
    buffer = DataBuffer(questions(), seed=seed, sampler=sampler)
    wakers = dead_ones[: round(0.62 * len(dead_ones))] if wakes is not None else []
    live = [position for position in range(PROMPTS) if position not in set(dead_ones)]
    played = Played(Counter(), Counter(), [Counter() for _ in range(epochs)], {}, live, wakers, buffer)
    waiting: deque[tuple[Any, list[float]]] = deque()
    for draw in range(epochs * PROMPTS):
        epoch = draw // PROMPTS
        if epoch == wakes and draw % PROMPTS == 0:
            for position in wakers:
                rate[position] = 0.5
        (prompt,) = buffer.get_prompts(1)
        position = int(str(prompt.prompt).split()[1])
        played.started[epoch] += 1
        played.visits[epoch][position] += 1
        rewards = [float(rng.random() < rate[position]) for _ in range(N)]
        if len(set(rewards)) > 1:
            played.kept[epoch] += 1
            if wakes is not None and epoch >= wakes and position in wakers:
                played.woken.setdefault(position, epoch)
        if rng.random() >= fails:
            waiting.append((prompt, rewards))
        if len(waiting) > LATE:
            buffer.observe(*waiting.popleft())
    return played


SEEDS = range(3)


@pytest.mark.parametrize(("dead", "most", "uniform"), [(0.3, 1.32, 1.6), (0.6, 1.65, 2.7)])
def test_a_kept_group_costs_few_prompts_from_the_third_epoch(dead: float, most: float, uniform: float) -> None:
    """At most 1.32 at 30 % dead prompts and 1.65 at 60 %, where a uniform order takes 1.7 and 2.9."""
    costs = [play(PassRateSampler(N), dead, seed).cost(3, 8) for seed in SEEDS]
    print(f"{dead:.0%} dead: {costs}, uniform {play(None, dead).cost(3, 8):.2f}")
    assert statistics.median(costs) <= most
    assert play(None, dead).cost(3, 8) > uniform


@pytest.mark.parametrize(("dead", "most"), [(0.3, 1.32), (0.6, 1.65)])
def test_a_sampler_that_knows_earlier_rewards_gains_in_the_first_epoch(dead: float, most: float) -> None:
    """It begins with the rewards of a run or of an evaluation, matched by prompt."""
    costs = []
    for seed in SEEDS:
        rate, _ = rates(dead, seed)
        rng = random.Random(seed)
        samples = [
            Sample(prompt=question, reward=float(rng.random() < rate[number]), group_index=number, rollout_id=roll)
            for number, question in enumerate(questions())
            for roll in range(number * N, number * N + N)
        ]
        costs.append(play(PassRateSampler.from_runs([samples], n=N), dead, seed, epochs=1).cost(1, 1))
    print(f"{dead:.0%} dead: {costs}")
    assert statistics.median(costs) <= most


@pytest.mark.parametrize("dead", [0.3, 0.6])
def test_live_prompts_have_equal_weight(dead: float) -> None:
    """The deviation of their visits is at most a fifth of the mean, whatever their pass rate."""
    found = [play(PassRateSampler(N), dead, seed).spread_of_visits() for seed in SEEDS]
    print(f"{dead:.0%} dead: {found}")
    assert max(found) <= 0.2


@pytest.mark.parametrize("dead", [0.3, 0.6])
def test_prompts_that_wake_are_kept_soon(dead: float) -> None:
    """At least 0.8 of the dead prompts that pass half of the time from the third epoch on are kept within four."""
    shares = []
    for seed in SEEDS:
        played = play(PassRateSampler(N), dead, seed, epochs=6, wakes=2)
        shares.append(sum(epoch < 6 for epoch in played.woken.values()) / len(played.wakers))
    print(f"{dead:.0%} dead: {shares}")
    assert min(shares) >= 0.8


def test_no_prompt_starves() -> None:
    """Each is drawn in at most ``1 / floor`` passes, and so at least once in 20 epochs; here within five."""
    played = play(PassRateSampler(N), 0.6, epochs=10)
    for first, last in ((0, 5), (5, 10)):
        assert all(sum(epoch[position] for epoch in played.visits[first:last]) for position in range(PROMPTS))


def test_failed_groups_change_no_estimate() -> None:
    """A tenth of the groups is never observed: the cost of a kept group is the same, and no rate is lower."""
    sound, faulty = (play(PassRateSampler(N), 0.3, fails=fails) for fails in (0.0, 0.1))
    assert faulty.cost(3, 8) == pytest.approx(sound.cost(3, 8), abs=0.06)
    for played in (sound, faulty):
        rate, _ = rates(0.3, 0)
        sampler = played.buffer.sampler
        assert isinstance(sampler, PassRateSampler)
        seen = {int(position): values for position, values in sampler.state_dict()["seen"].items()}
        estimates = [passed / (passed + failed) for passed, failed, _ in seen.values()]
        assert statistics.fmean(estimates) == pytest.approx(statistics.fmean(rate), abs=0.01)


def test_a_draw_looks_at_a_few_prompts() -> None:
    """Their number does not grow with the data: a dead prompt is passed over four times for each draw."""
    looks = Counter[int]()

    class Counted(PassRateSampler):
        def share(self, position: int, number: int) -> float:
            looks[size] += 1
            return super().share(position, number)

    for size in (100, 10_000):
        buffer = DataBuffer([f"q{number}" for number in range(size)], seed=1, sampler=Counted(N))
        for _ in range(3 * size):
            (prompt,) = buffer.get_prompts(1)
            buffer.observe(prompt, [0.0] * N)
    assert looks[100] / 300 == pytest.approx(looks[10_000] / 30_000, rel=0.1)
    assert looks[10_000] / 30_000 < 5


def test_rewards_other_than_0_and_1_count_by_their_spread() -> None:
    """A group whose rewards differ teaches, also if all of them pass; equal rewards of any value do not."""
    sampler = PassRateSampler(n=4, floor=0.01)
    DataBuffer(["a", "b", "c"], sampler=sampler)
    for position, rewards in enumerate(([0.1, 0.2, 0.1, 0.1], [0.9, 0.8, 0.8, 0.8], [0.4] * 4)):
        sampler.observe(position, rewards)
    assert sampler.share(0, 0) == sampler.share(1, 0) == 1.0
    assert sampler.share(2, 0) < 0.5
    assert sampler.metrics()["never_passed"] == 1


def test_the_metrics_count_tried_prompts_by_pass_rate() -> None:
    """Ten intervals, and the prompts of which each rollout passed or failed."""
    sampler = PassRateSampler(n=4)
    DataBuffer([f"q{number}" for number in range(9)], sampler=sampler)
    for position, passed in enumerate((0, 0, 1, 2, 4)):
        sampler.observe(position, [1.0] * passed + [0.0] * (4 - passed))
    numbers = dict(sampler.metrics())
    assert (numbers["tried"], numbers["never_passed"], numbers["always_passed"]) == (5, 2, 1)
    rates = {name.removeprefix("pass_rate/"): count for name, count in numbers.items() if name.startswith("pass_rate/")}
    assert {name: count for name, count in rates.items() if count} == {
        "0.0-0.1": 2, "0.2-0.3": 1, "0.5-0.6": 1, "0.9-1.0": 1,
    }  # fmt: skip
    assert len(rates) == 10


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_stored_runs_give_the_first_estimates(tmp_path: Path, format: Any) -> None:
    """Kept and dropped groups count, failed ones do not; prompts that a run lacks are untried."""
    manager = await store_run(tmp_path / "run", format=format, journaled=True)
    sampler = PassRateSampler.from_runs([tmp_path / "run"], n=4)
    rows = [{"prompt": f"question {number}", "label": number} for number in range(20)]
    DataBuffer(rows, sampler=sampler)
    counts = manager.accounting
    assert sampler.metrics()["tried"] == counts.in_batch + counts.ready + counts.dropped
    assert sampler.describe()["from_runs"] != PassRateSampler(n=4).describe().get("from_runs")
    with pytest.raises(ConfigError, match="nothing"):
        PassRateSampler.from_runs([tmp_path / "nothing"])


def test_stored_prompts_with_images_are_those_of_the_data(tmp_path: Path) -> None:
    """A run has the hashes of the images: the same prompt with another image is untried."""
    rows = [{"prompt": [Message("user", ["What?", picture(28, 28, seed)])], "label": 1} for seed in (0, 1)]
    buffer = DataBuffer(rows)
    writer = RunWriter(tmp_path)
    (prompt,) = buffer.get_prompts(1)
    images = {image.sha256: image for image in prompt.messages[0].images}
    samples = [some_sample(attrs.evolve(prompt, index=number), number) for number in range(2)]
    writer.write_batch([attrs.evolve(sample, named_images=images) for sample in samples], {})
    writer.finish("finished")
    sampler = PassRateSampler.from_runs([tmp_path], n=4)
    DataBuffer(rows, sampler=sampler)
    assert sampler.metrics()["tried"] == 1


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"n": 1}, r"PassRateSampler\.n: got 1; expected an integer >= 2"),
        ({"floor": 0}, r"PassRateSampler\.floor: got 0; expected a number above 0, at most 1"),
        ({"forget": 1.5}, r"PassRateSampler\.forget: got 1\.5"),
        ({"prior": float("nan")}, r"PassRateSampler\.prior"),
        ({"passing": "high"}, r"PassRateSampler\.passing: got 'high'; expected a number"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: dict[str, Any], words: str) -> None:
    """By name, with what is expected."""
    with pytest.raises(ConfigError, match=words):
        PassRateSampler(**numbers)


def test_a_prompt_without_spread_is_drawn_in_every_fifth_pass() -> None:
    """With the default floor, however long it has had none; the gap is never longer."""
    sampler = PassRateSampler(N, forget=1.0)
    buffer = DataBuffer(["live", "dead"], seed=2, sampler=sampler)
    passes = []
    for _ in range(200):
        (prompt,) = buffer.get_prompts(1)
        if prompt.prompt == "dead":
            passes.append(sampler.pass_of(0))
        buffer.observe(prompt, [0.0] * N if prompt.prompt == "dead" else [0.0, 1.0] * (N // 2))
    gaps = [later - earlier for earlier, later in itertools.pairwise(passes)][3:]
    assert set(gaps) == {5}
