"""Advantages by estimator: the bias of each by enumeration of Kuhn poker and of a small decision process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError
from rollouts.recipes.environments.kuhn.game import CARDS, TO_ACT, deals, equilibrium, exploitability, net, value
from rollouts.training import Sample, Status, credit
from rollouts.training.batch import group_advantages
from rollouts.training.credit import Conversation, assign_advantages
from rollouts.trajectory import CompletionRecord

Vector = npt.NDArray[np.float64]
PLACES = {place: number for number, place in enumerate((card, history) for card in CARDS for history in TO_ACT)}
UNIFORM = dict.fromkeys(PLACES, 0.5)


def test_the_values_of_kuhn_poker_are_those_of_the_literature() -> None:
    """1/8 for uniform play, -1/18 at an equilibrium, which nothing exploits; uniform play loses 11/24."""
    assert value(UNIFORM, UNIFORM) == pytest.approx(1 / 8, abs=1e-12)
    assert exploitability(UNIFORM) == pytest.approx(11 / 24, abs=1e-12)
    for alpha in (0.0, 0.2, 1 / 3):
        assert value(equilibrium(alpha), equilibrium(alpha)) == pytest.approx(-1 / 18, abs=1e-12)
        assert exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)


# -- the expected gradient --------------------------------------------------------------------------------------------

Path = tuple[float, float, list[Vector]]
"""Probability, reward of the first player, and the score of each turn of either seat, ``[2, 12]``."""


def paths(cards: str) -> list[Path]:
    """Every hand of a deal under uniform play."""
    found: list[Path] = []

    def visit(history: str, chance: float, scores: list[Vector]) -> None:
        if history not in TO_ACT:
            found.append((chance, float(net(history, cards)), scores))
            return
        for action, sign in (("p", -0.5), ("b", 0.5)):
            score = np.zeros((2, len(PLACES)))
            score[TO_ACT[history], PLACES[cards[TO_ACT[history]], history]] = sign
            visit(history + action, chance / 2, [*scores, score])

    visit("", 1.0, [])
    return found


def kuhn_gradients(estimator: credit.Estimator, n: int = 3) -> tuple[Vector, Vector]:
    """The gradient of the rewards of both seats, and the expectation of the estimated one over groups of ``n``."""
    exact, estimated = np.zeros(len(PLACES)), np.zeros(len(PLACES))
    for cards in deals():
        hands = paths(cards)
        for chance, reward, scores in hands:
            exact += chance / 6 * reward * (sum(scores)[0] - sum(scores)[1])
        for group in itertools.product(hands, repeat=n):
            weight = np.prod([chance for chance, _, _ in group]) / 6 / n
            for seat, sign in ((0, 1.0), (1, -1.0)):
                rewards = [sign * reward for _, reward, _ in group]
                values = estimator([Conversation((), one, np.array([one])) for one in rewards])
                for (_, _, scores), advantage in zip(group, values, strict=True):
                    estimated += weight * advantage[0] * sum(scores)[seat]
    return exact, estimated


def cosine_and_size(exact: Vector, estimated: Vector) -> tuple[float, float]:
    lengths = np.linalg.norm(exact), np.linalg.norm(estimated)
    return float(exact @ estimated / lengths[0] / lengths[1]), float(lengths[1] / lengths[0])


@pytest.mark.parametrize(
    ("estimator", "cosine", "size"),
    [
        (credit.rloo, 1.0, 1.0),
        (credit.dr_grpo, 1.0, 2 / 3),
        (credit.returns_to_go, 1.0, 1.0),
        (credit.grpo, 0.942, None),
    ],
)
def test_the_expected_gradient_in_kuhn_poker(estimator: Any, cosine: float, size: float | None) -> None:
    """Unbiased estimators have the gradient of the game; dividing by the deviation of a seat turns it."""
    found = cosine_and_size(*kuhn_gradients(estimator))
    tolerance = 1e-9 if cosine == 1 else 5e-4
    assert found[0] == pytest.approx(cosine, abs=tolerance)
    assert size is None or found[1] == pytest.approx(size, abs=1e-9)


@pytest.mark.parametrize("baseline", [0.0, 0.7, -2.0])
def test_role_baselines_are_unbiased_whatever_they_are(baseline: float) -> None:
    """A baseline of earlier rewards does not depend on the action: the expectation is the gradient."""
    exact, estimated = np.zeros(len(PLACES)), np.zeros(len(PLACES))
    for cards in deals():
        for chance, reward, scores in paths(cards):
            for seat, sign in ((0, 1.0), (1, -1.0)):
                baselines = credit.RoleBaselines()
                baselines.load({"": baseline})
                (values,) = baselines([Conversation([Sample()], sign * reward, np.array([sign * reward]))])
                exact += chance / 6 * sign * reward * sum(scores)[seat]
                estimated += chance / 6 * values[0] * sum(scores)[seat]
    assert cosine_and_size(exact, estimated) == pytest.approx((1.0, 1.0), abs=1e-9)


# A walk of at most three turns: "stop" ends it, "go" earns 1 and then -2, and 3 at the last turn. Two states: before
# the first turn, and after. The length of a walk depends on its own actions.


def walks() -> Iterator[tuple[float, Vector, list[int], Vector]]:
    """Probability, rewards and states by turn, and the score of each turn ``[T, 2]``; go has chance 0.4, then 0.7."""
    chances = (0.4, 0.7)
    for actions in ((0,), (1, 0), (1, 1, 0), (1, 1, 1)):
        states = [min(turn, 1) for turn in range(len(actions))]
        chance, scores = 1.0, np.zeros((len(actions), 2))
        for turn, (action, state) in enumerate(zip(actions, states, strict=True)):
            chance *= chances[state] if action else 1 - chances[state]
            scores[turn, state] = action - chances[state]
        yield (
            chance,
            np.array([(0.0, (1.0, -2.0, 3.0)[turn])[action] for turn, action in enumerate(actions)]),
            states,
            scores,
        )


def walk_gradients(estimator: Callable[[Sequence[Conversation], list[Any]], list[Vector]]) -> tuple[Vector, Vector]:
    found = list(walks())
    exact, estimated = np.zeros(2), np.zeros(2)
    for chance, rewards, _, scores in found:
        exact += chance * rewards.sum() * scores.sum(0)
    for group in itertools.product(found, repeat=3):
        weight = np.prod([one[0] for one in group]) / 3
        made = [Conversation((str(n),), float(one[1].sum()), one[1]) for n, one in enumerate(group)]  # type: ignore[arg-type]
        for one, values in zip(group, estimator(made, [*group]), strict=True):
            estimated += weight * (np.broadcast_to(values, len(one[1]))[:, None] * one[3]).sum(0)
    return exact, estimated


def by_turn_mean(conversations: Sequence[Conversation], group: list[Any]) -> list[Vector]:
    """The counterexample: returns minus the mean over the conversations that are alive at the turn."""
    returns = [np.cumsum(one.turn_rewards[::-1])[::-1] for one in conversations]
    means = [
        np.mean([one[turn] for one in returns if turn < len(one)])
        for turn in range(3)
        if any(turn < len(one) for one in returns)
    ]
    return [one - np.array(means[: len(one)]) for one in returns]


def exact_values(conversations: Sequence[Conversation], group: list[Any]) -> list[Vector]:
    third = 0.7 * 3.0
    second = 0.7 * (-2.0 + third)
    first = 0.4 * (1.0 + second)
    after = {0: first, 1: 1.0 + second, 2: -1.0 + third}  # the reward so far, and what is to come
    made = iter(group)
    return credit.turn_deltas(
        [Conversation([Sample()], one.reward, one.turn_rewards) for one in conversations],
        values=lambda sample: [after[turn] for turn in range(len(next(made)[1]))],
    )


def of_states(conversations: Sequence[Conversation], group: list[Any]) -> list[Vector]:
    made = iter(group)
    return credit.gigpo(
        [Conversation([Sample()], one.reward, one.turn_rewards) for one in conversations],
        states=lambda sample: next(made)[2],
    )


@pytest.mark.parametrize(
    ("estimator", "cosine", "size"),
    [
        (lambda made, group: credit.returns_to_go(made), 1.0, 1.0),
        (lambda made, group: credit.rloo(made), 1.0, 1.0),
        (exact_values, 1.0, 1.0),
        (of_states, 0.967, None),
        (by_turn_mean, 0.939, None),
    ],
    ids=["returns_to_go", "rloo", "turn_deltas", "gigpo", "mean_by_turn"],
)
def test_the_expected_gradient_of_turns(estimator: Any, cosine: float, size: float | None) -> None:
    """Credit by turn is that of the process; a mean by turn is not, because turns depend on the walk's own stops."""
    exact, estimated = walk_gradients(estimator)
    found = cosine_and_size(exact, estimated)
    if size is None:
        assert found[0] == pytest.approx(cosine, abs=5e-4)
    else:
        assert found == pytest.approx((cosine, size), abs=1e-9)


# -- learning ---------------------------------------------------------------------------------------------------------


def learned(estimator: credit.Estimator, seed: int, steps: int = 1500) -> float:
    """The exploitability of the average policy of tabular self-play: 16 deals of 8 hands a step."""
    rng = np.random.default_rng(seed)
    cards = np.array([[CARDS.index(card) for card in pair] for pair in deals()])
    logits, total = np.zeros((3, 4)), np.zeros((3, 4))  # by card, and by history in the order of TO_ACT
    for _ in range(steps):
        bets = 1 / (1 + np.exp(-logits))
        total += bets
        dealt = np.repeat(cards[rng.integers(6, size=16)], 8, axis=0)
        chances = bets[dealt[:, list(TO_ACT.values())], np.arange(4)]
        draws = rng.random(chances.shape) < chances
        first, passed = draws[:, 0], draws[:, 1]
        alive = np.stack([np.ones_like(first), ~first, first, ~first & passed], 1)
        ends = [_end(*row) for row in draws.tolist()]
        won = np.array([net(end, CARDS[a] + CARDS[b]) for end, (a, b) in zip(ends, dealt, strict=True)], np.float64)
        for seat, sign in ((0, 1.0), (1, -1.0)):
            groups = [[Conversation((), one, np.array([one])) for one in row] for row in (sign * won).reshape(16, 8)]
            advantages = np.concatenate([estimator(group) for group in groups])[:, 0]
            for column, mover in enumerate(TO_ACT.values()):
                if mover == seat:
                    scores = (draws[:, column] - chances[:, column]) * alive[:, column] * advantages
                    np.add.at(logits[:, column], dealt[:, seat], scores / 100)
    average = total / steps
    return exploitability({(card, history): float(average[CARDS.index(card), column])
                           for card in CARDS for column, history in enumerate(TO_ACT)})  # fmt: skip


def _end(first: bool, passed: bool, called: bool, late: bool) -> str:
    if first:
        return "bb" if called else "bp"
    return "pp" if not passed else "pbb" if late else "pbp"


@pytest.fixture(scope="module")
def seeds(request: pytest.FixtureRequest) -> Sequence[int]:
    return range(3) if request.config.getoption("--long") else range(1)


def test_self_play_with_an_unbiased_estimator_finds_the_equilibrium(seeds: Sequence[int]) -> None:
    """The average policy loses at most 0.06 to a best response, from 0.458; dividing by the deviation misses it."""
    for seed in seeds:
        assert learned(credit.rloo, seed) <= 0.06
        assert learned(credit.grpo, seed) > 0.06


def steps_of_calls(estimator: credit.Estimator, rate: float, seed: int, most: int = 400) -> int:
    """Steps until 0.9 of six calls are right, the mean of five steps: 4 groups of 4 episodes a step, tabular policy.

    A call has one right tool of four, by the phrase of its problem, and earns a sixth. The reply before the six calls
    earns or costs 0.5 by chance.
    """
    rng = np.random.default_rng(seed)
    logits, right = np.zeros((15, 4)), rng.integers(4, size=15)
    shares: list[float] = []
    for step in range(1, most):
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        phrases = np.repeat(rng.integers(15, size=(4, 1, 7)), 4, axis=1)
        tools = (chances.cumsum(1)[phrases] < rng.random((4, 4, 7, 1))).sum(-1).clip(max=3)
        rewards = (tools == right[phrases]) / 6
        shares.append(float(rewards[..., 1:].sum(-1).mean()))
        if len(shares) >= 5 and np.mean(shares[-5:]) >= 0.9:
            return step
        rewards[..., 0] = rng.choice((-0.5, 0.5), size=(4, 4))
        groups = [[Conversation((), one.sum(), one) for one in group] for group in rewards]
        advantages = np.array([[np.broadcast_to(values, 7) for values in estimator(group)] for group in groups])
        scores = (np.eye(4)[tools] - chances[phrases]) * advantages[..., None]
        np.add.at(logits, phrases, rate * scores * 7 / 16)
    return most


def test_returns_to_go_learn_six_calls_in_fewer_steps(seeds: Sequence[int]) -> None:
    """At most 0.6 of the steps of the credit of whole rollouts, each at the best rate of three."""
    for seed in seeds:
        turns, rollouts = (
            min(steps_of_calls(estimator, rate, seed) for rate in (1.0, 2.0, 4.0))
            for estimator in (credit.returns_to_go, credit.rloo)
        )
        print(f"seed {seed}: {turns} steps with returns to go, {rollouts} with the credit of rollouts")
        assert rollouts < 400
        assert turns <= 0.6 * rollouts


def test_returns_to_go_of_one_reward_at_the_end_equal_the_credit_of_the_rollout() -> None:
    """A task that is rewarded only after its last call has the same advantages with either."""
    group = [Conversation((), reward, np.append(np.zeros(calls), reward)) for reward, calls in ((1.0, 6), (0.0, 6))]
    for turns, (whole,) in zip(credit.returns_to_go(group), credit.rloo(group), strict=True):
        assert turns.tolist() == [whole] * 7


# -- trees ------------------------------------------------------------------------------------------------------------

WALK = np.array([[0.0, 1.0], [3.0, -2.0]])
"""The reward of two steps, by the action of each."""


def walked(action: int, ends: Sequence[int], rollout: int) -> list[Sample]:
    """A rollout of two turns of one token, and its branches from after the first: a leaf for each end."""
    rows = [row(float(WALK[action, end]), (1, 1), rollout, conversation=leaf) for leaf, end in enumerate(ends)]
    for leaf in rows[1:]:
        mask = [0, 0, 0, 0, 0, 1, 0]
        leaf.completions, leaf.versions = list(leaf.completions)[1:], list(leaf.versions)[1:]
        leaf.loss_mask, leaf.parent, leaf.shared = mask, 0, 3
    return rows


def expected_gradient(estimator: credit.Estimator, leaves: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The gradient of two rollouts with so many leaves, by enumeration, and that of the expected reward.

    The parameters are the logit of the first action, and that of the second after either.
    """
    chances = 1 / (1 + np.exp(-np.array([0.3, -0.5, 0.8])))

    def score(place: int, action: int) -> np.ndarray[Any, Any]:
        return np.eye(3)[place] * (action - chances[place])

    def chance(place: int, action: int) -> float:
        return float(chances[place] if action else 1 - chances[place])

    true, total = np.zeros(3), np.zeros(3)
    for action, end in itertools.product((0, 1), repeat=2):
        weight = chance(0, action) * chance(1 + action, end)
        true += weight * WALK[action, end] * (score(0, action) + score(1 + action, end))
    outcomes = [*itertools.product((0, 1), itertools.product((0, 1), repeat=leaves))]
    for pair in itertools.product(outcomes, repeat=2):
        weight = np.prod([chance(0, a) * np.prod([chance(1 + a, end) for end in ends]) for a, ends in pair])
        rollouts = [walked(action, ends, number) for number, (action, ends) in enumerate(pair)]
        assign_advantages([*itertools.chain(*rollouts)], estimator)
        for (action, ends), rows in zip(pair, rollouts, strict=True):
            columns = [np.array(sample.advantages) for sample in rows]
            parts = [columns[0][2] * score(0, action)]
            parts += [column[5] * score(1 + action, end) for column, end in zip(columns, ends, strict=True)]
            total += weight * np.sum(parts, 0) / 2
    return total, true


@pytest.mark.parametrize("leaves", [1, 2, 3])
def test_tree_leaf_is_unbiased(leaves: int) -> None:
    """Its expected gradient is that of the reward, with any number of leaves: in size and direction."""
    got, true = expected_gradient(credit.tree_leaf, leaves)
    assert got == pytest.approx(true, abs=1e-6)


def test_leaves_that_are_compared_flatly_have_another_direction() -> None:
    """Leave-one-out over all leaves counts the turns after the fork once for each leaf: cosine below 1."""
    got, true = expected_gradient(credit.rloo, 3)
    assert got @ true / np.linalg.norm(got) / np.linalg.norm(true) < 0.99


def test_a_tree_of_two_forks_is_refused() -> None:
    """Its turns between the forks have other leaves than those before and after."""
    rows = walked(0, (0, 1, 1), 0)
    rows[2].shared = 6
    with pytest.raises(ConfigError, match=r"tree_leaf: parents: got \[None, 0, 0\]; expected a whole rollout first"):
        assign_advantages(rows, credit.tree_leaf)


# -- samples ----------------------------------------------------------------------------------------------------------


def row(reward: float, turns: Sequence[int], rollout: int, **fields: Any) -> Sample:
    """A sample of turns of these lengths, each after two tokens of context."""
    mask = [bit for length in turns for bit in [0, 0, *[1] * length]]
    stops = np.cumsum([length + 2 for length in turns]).tolist()
    spans = [(stop - length, stop) for stop, length in zip(stops, turns, strict=True)]
    records = [CompletionRecord(f"{rollout}-{start}", start, stop, "stop", 0, 0, 0.0) for start, stop in spans]
    versions = [VersionSpan("1", start, stop) for start, stop in spans]
    return Sample(
        tokens=[1] * (len(mask) + 1), loss_mask=[*mask, 0], rollout_log_probs=[0.0] * (len(mask) + 1), reward=reward,
        completions=records, versions=versions, group_index=0, rollout_id=rollout, **fields,
    )  # fmt: skip


def columns(samples: Sequence[Sample]) -> list[list[float]]:
    return [[round(float(value), 4) for value in sample.advantages] for sample in samples]


def test_each_token_has_the_advantage_of_its_turn() -> None:
    """And context has none, the unanswered end included."""
    samples = [
        row(3.0, (1, 2), 0, step_rewards=[1.0, 2.0], step_completions=[0, 1]),
        row(1.0, (2,), 1, step_rewards=[1.0], step_completions=[0]),
    ]
    assign_advantages(samples, credit.returns_to_go)
    assert columns(samples) == [[0, 0, 2, 0, 0, 2, 2, 0], [0, 0, -2, -2, 0]]
    assert [sample.pack().advantage_column is not None for sample in samples] == [True, True]


def test_the_rest_of_a_reward_comes_at_the_last_turn() -> None:
    """Of a reward function, or of a play: no step gave it."""
    samples = [row(2.0, (1, 1), 0, step_rewards=[0.5], step_completions=[0]), row(0.0, (1, 1), 1)]
    assign_advantages(samples, partial(credit.returns_to_go, discount=0.5))
    assert columns(samples)[0] == [0, 0, 1.25, 0, 0, 1.5, 0]
    assert columns(samples)[1] == [0, 0, -1.25, 0, 0, -1.5, 0]


def test_turns_with_equal_returns_have_no_advantage() -> None:
    """A reward of an earlier turn does not change a later advantage, neither directly nor by the mean of the others."""
    first, second = (
        row(reward + 1, (1, 1), number, step_rewards=[reward, 1.0], step_completions=[0, 1])
        for number, reward in enumerate((4.0, 2.0))
    )
    assign_advantages([first, second], credit.returns_to_go)
    assert columns([first, second]) == [[0, 0, 2, 0, 0, 0, 0], [0, 0, -2, 0, 0, 0, 0]]


def test_seats_and_episodes_are_credited_apart() -> None:
    """Solvers of one proposal are compared with each other; the proposers of a group too."""
    samples = []
    for rollout in (0, 1):
        for seat, number, reward in (("proposer", 0, 10.0 * rollout), ("solver", 0, 0.0), ("solver", 1, 1.0)):
            samples.append(row(reward + 5 * rollout, (1,), rollout, seat=seat, conversation=number))
    assign_advantages(samples, credit.rloo, by={"solver": "episode"})
    assert [column[2] for column in columns(samples)] == [-15, -1, 1, 15, -1, 1]


def test_a_branch_without_trained_tokens_has_its_turns_and_no_advantage() -> None:
    """Its turns count, so that a later branch's turns keep their rewards; before, it was refused."""
    rewards = {"step_rewards": [1.0], "step_completions": [0]}
    first, second = row(3.0, (1,), 0, **rewards), row(3.0, (1,), 0, step_rewards=[2.0], step_completions=[0])
    first.versions, first.loss_mask = [], [0] * len(first)
    samples = [first, second, row(1.0, (1,), 1, **rewards)]
    assign_advantages(samples, credit.returns_to_go)
    assert columns(samples) == [[0, 0, 0, 0], [0, 0, 2, 0], [0, 0, -2, 0]]
    samples = [Sample(tokens=[1], reward=1.0, group_index=0, rollout_id=number) for number in (0, 1)]
    assign_advantages(samples, credit.dr_grpo)
    assert columns(samples) == [[0], [0]]


def test_a_branch_that_begins_inside_a_turn_trains_its_rest() -> None:
    """Its first completion continues a turn of its parent: it is turn 0 of the branch, with its rewards."""
    samples = [
        row(reward, (1, 1), number, step_rewards=[reward], step_completions=[0])
        for number, reward in ((0, 3.0), (1, 1.0))
    ]
    for sample in samples:
        sample.completions = [attrs.evolve(sample.completions[0], continues=True), *list(sample.completions)[1:]]
    assign_advantages(samples, credit.returns_to_go)
    assert columns(samples) == [[0, 0, 2, 0, 0, 0, 0], [0, 0, -2, 0, 0, 0, 0]]


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
@pytest.mark.parametrize("compute", [group_advantages, lambda samples: assign_advantages(samples, credit.rloo)])
def test_a_failed_rollout_has_no_verdict(status: Status, compute: Any) -> None:
    """The sum of its steps so far would be compared as its reward, mostly 0."""
    samples = [row(1.0, (1,), 0), row(0.0, (1,), 1, status=status), row(0.5, (1,), 2)]
    with pytest.raises(ConfigError, match=rf"status: got '{status.value}'; expected a rollout that ended"):
        compute(samples)


def test_leave_one_out_of_one_is_zero() -> None:
    """It has no others: no gradient, and no division by zero."""
    samples = [row(1.0, (1,), 0)]
    assign_advantages(samples, credit.rloo)
    assert columns(samples) == [[0, 0, 0, 0]]


def test_an_estimator_refuses_what_it_cannot_compare() -> None:
    """By name: alone, below zero, without values."""
    with pytest.raises(ConfigError, match="returns_to_go: conversations: got 1; expected at least 2"):
        assign_advantages([row(1.0, (1,), 0)], credit.returns_to_go)
    with pytest.raises(ConfigError, match=r"maxrl: reward: got -1\.0; expected a number >= 0"):
        assign_advantages([row(-1.0, (1,), 0), row(1.0, (1,), 1)], credit.maxrl)
    with pytest.raises(ConfigError, match=r"turn_deltas\(values\): got '0 values'; expected 2, one before each turn"):
        assign_advantages([row(1.0, (1, 1), 0)], partial(credit.turn_deltas, values=lambda sample: []))
    with pytest.raises(ConfigError, match=r"gigpo\(states\): got '1 states'; expected 2"):
        assign_advantages([row(1.0, (1, 1), 0)], partial(credit.gigpo, states=lambda sample: [0]))


@pytest.mark.parametrize("values", [[0.5, 0.25], [1.0, np.nan, 0.0], [1.0] * 4])
def test_an_estimator_gives_a_finite_number_to_each_turn(values: list[float]) -> None:
    """One of the user's; before, the last of two values was that of all later turns, and NaN reached the trainer."""
    expected = rf"estimator: got {re.escape(str(values))}; expected 3 finite numbers, or 1, for"
    with pytest.raises(ConfigError, match=expected):
        assign_advantages([row(1.0, (1, 1, 1), 0)], lambda conversations: [np.array(values)])


def test_maxrl_weighs_a_rare_success_more() -> None:
    """1 of 4 earns 3, 2 of 4 earn 1 each; no success has no gradient."""
    for rewards, expected in (((1, 0, 0, 0), [3, -1, -1, -1]), ((1, 1, 0, 0), [1, 1, -1, -1]), ((0, 0), [0, 0])):
        samples = [row(float(reward), (1,), number) for number, reward in enumerate(rewards)]
        assign_advantages(samples, credit.maxrl)
        assert [column[2] for column in columns(samples)] == expected


def test_role_baselines_move_by_seat_and_are_restored() -> None:
    """Each seat has a mean; a resumed run continues with it."""
    baselines = credit.RoleBaselines(decay=0.5)
    samples = [row(1.0, (1,), 0, seat="a"), row(-1.0, (1,), 0, seat="b"), row(1.0, (1,), 1, seat="a")]
    assign_advantages(samples, baselines)
    assert [column[2] for column in columns(samples)] == [1, -1, 0.5]
    again = credit.RoleBaselines(decay=0.5)
    again.load(baselines.to_dict())
    assert again.to_dict() == {"a": 0.75, "b": -0.5}
