"""Credit: advantages of tokens from the rewards of conversations and of their turns.

Invariant: an estimator sees the conversations of one comparison only, each once, however many branches it has. Its
columns have the value of a turn on each token that the turn sampled, and 0 on context. Each estimator states its bias:
that of the expected gradient, by enumeration of a small game in ``tests/training/test_credit.py``.

This module is imported on use. It knows no trainer: :func:`assign_advantages` sets ``Sample.advantages``, which doors
with a place for a column take, and others refuse by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.training.batch import check_ended
from rollouts.training.comparisons import Comparison, by_comparison, by_conversation
from rollouts.training.rows import reward_of_branches, turn_column
from rollouts.training.types import Sample

__all__ = [
    "Conversation",
    "Estimator",
    "RoleBaselines",
    "assign_advantages",
    "dr_grpo",
    "gigpo",
    "grpo",
    "maxrl",
    "returns_to_go",
    "rloo",
    "tree_leaf",
    "turn_deltas",
]

Numbers: TypeAlias = "npt.NDArray[np.float64]"
_EPSILON = 1e-6


@attrs.frozen(eq=False)
class Conversation:
    """One conversation of a comparison."""

    branches: Sequence[Sample]
    reward: float
    turn_rewards: Numbers
    """The reward of each turn, ``[T]``: those of the environment's steps; the rest of ``reward`` at the last turn."""


Estimator: TypeAlias = Callable[[Sequence[Conversation]], list[Numbers]]
"""For each conversation of a comparison the advantage of each of its turns, ``[T]``, or of all, ``[1]``."""


def assign_advantages(samples: Sequence[Sample], estimator: Estimator, *, by: Comparison | None = None) -> None:
    """Set ``Sample.advantages`` of scored samples.

    Args:
        samples: whole groups.
        estimator: such as :func:`rloo`, or ``partial(returns_to_go, discount=0.9)``.
        by: the conversations that are compared, as for :func:`~rollouts.training.group_advantages`.

    Raises:
        ConfigError: a sample that failed or has no reward, branches of a conversation with unlike rewards, a
            comparison that the estimator cannot use, or an estimate that is not finite, or not of each turn.
    """
    for sample in samples:
        check_ended(sample)
    for members in by_comparison(samples, by):
        conversations = [_conversation(branches) for branches in by_conversation(members)]
        for conversation, values in zip(conversations, estimator(conversations), strict=True):
            turns = len(conversation.turn_rewards)
            if len(values) not in (1, turns) or not np.isfinite(values).all():
                expected = f"{turns} finite numbers, or 1, for the turns of {conversation.branches[0]!r}"
                raise ConfigError.of("estimator", np.asarray(values).tolist(), expected)
            offset = 0
            for branch in conversation.branches:
                column, count = _turns(branch)
                numbers = values[np.minimum(np.maximum(column, 0) + offset, len(values) - 1)]
                branch.advantages = np.where(column >= 0, numbers, 0).astype(np.float32)
                offset += count


def _turns(branch: Sample) -> tuple[npt.NDArray[np.int32], int]:
    """The turn of each trained token, -1 on others, ``[n]``; and the number of all turns."""
    mask = branch.mask_column
    column = np.full(len(branch), -1, np.int32)
    if not branch.completions:
        if not mask.any():
            return column, 0
        turns = turn_column(branch)
        column[: len(turns)] = turns
        return column, int(turns.max()) + 1
    turn = -1
    for record in branch.completions:
        turn = max(turn + (not record.continues), 0)
        column[record.start : record.stop] = turn
    column[~mask] = -1
    return column, turn + 1


def _conversation(branches: Sequence[Sample]) -> Conversation:
    reward = reward_of_branches(branches)
    rewards: list[float] = []
    for branch in branches:
        first = len(rewards)
        numbers = list(
            itertools.accumulate(not (number and one.continues) for number, one in enumerate(branch.completions))
        )
        rewards += [0.0] * _turns(branch)[1]
        known = [*(branch.step_completions or ())]
        for number, amount in zip(known, branch.step_rewards, strict=False):
            if number >= 0:
                rewards[first + numbers[number] - 1] += amount
    rewards = rewards or [0.0]  # no branch has a turn
    rewards[-1] += reward - sum(rewards)
    return Conversation(branches, reward, np.array(rewards))


def _rewards(conversations: Sequence[Conversation], name: str, least: int = 2) -> Numbers:
    if len(conversations) < least:
        expected = f"at least {least} that are compared; RoleBaselines needs no others"
        raise ConfigError.of(f"{name}: conversations", len(conversations), expected)
    return np.array([one.reward for one in conversations])


def _constant(values: Numbers) -> list[Numbers]:
    return list(values[:, None])


# -- one number for a conversation ------------------------------------------------------------------------------------


def grpo(conversations: Sequence[Conversation]) -> list[Numbers]:
    """Reward minus mean, over the unbiased deviation + 1e-6; 0 without spread.

    Biased: groups with a small spread count more. Uniform Kuhn poker, groups of 3: cosine 0.942 to the gradient.
    """
    rewards = _rewards(conversations, "grpo", 1)
    spread = rewards.std(ddof=1) if len(rewards) > 1 and np.ptp(rewards) > 0 else 1.0
    return _constant((rewards - rewards.mean()) / (spread + _EPSILON))


def dr_grpo(conversations: Sequence[Conversation]) -> list[Numbers]:
    """Reward minus mean. Direction exact; the size is (n - 1)/n of the gradient's, for n conversations."""
    rewards = _rewards(conversations, "dr_grpo", 1)
    return _constant(rewards - rewards.mean())


def rloo(conversations: Sequence[Conversation]) -> list[Numbers]:
    """Reward minus the mean of the others; 0 without others. Unbiased."""
    rewards = _rewards(conversations, "rloo", 1)
    return _constant(_leave_one_out(rewards))


def maxrl(conversations: Sequence[Conversation]) -> list[Numbers]:
    """Reward minus mean, over the mean; 0 where no conversation has a reward.

    Another objective than the expected reward: a truncated likelihood of success, which counts hard prompts more.

    Raises:
        ConfigError: a reward below 0.
    """
    rewards = _rewards(conversations, "maxrl", 1)
    if rewards.min() < 0:
        raise ConfigError.of("maxrl: reward", float(rewards.min()), "a number >= 0")
    mean = rewards.mean()
    return _constant((rewards - mean) / mean if mean > 0 else np.zeros(len(rewards)))


class RoleBaselines:
    """Reward minus the moving mean of the seat's earlier rewards: for groups of one. Unbiased.

    The baselines depend on the order of the conversations; a run that resumes restores them with :meth:`load`.

    Args:
        decay: weight of the mean so far.
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ConfigError.of("decay", decay, "0 <= decay < 1")
        self.decay = decay
        self._baselines: dict[str, float] = {}

    def __call__(self, conversations: Sequence[Conversation]) -> list[Numbers]:
        """The advantages; afterwards the means contain these rewards."""
        values = []
        for one in conversations:
            seat = one.branches[0].seat
            mean = self._baselines.get(seat, 0.0)
            values.append(one.reward - mean)
            self._baselines[seat] = self.decay * mean + (1 - self.decay) * one.reward
        return _constant(np.array(values))

    def to_dict(self) -> dict[str, float]:
        """The baselines by seat."""
        return dict(self._baselines)

    def load(self, baselines: Mapping[str, float]) -> None:
        """Restore what :meth:`to_dict` returned."""
        self._baselines = dict(baselines)


# -- a number for each turn -------------------------------------------------------------------------------------------


def _returns(one: Conversation, discount: float) -> Numbers:
    """The discounted rewards from each turn on."""
    found = np.zeros(len(one.turn_rewards))
    after = 0.0
    for turn in range(len(found) - 1, -1, -1):
        after = found[turn] = one.turn_rewards[turn] + discount * after
    return found


def returns_to_go(conversations: Sequence[Conversation], *, discount: float = 1.0) -> list[Numbers]:
    """Rewards from each turn on, minus the mean of the others' from the same turn on. Unbiased with ``discount=1``.

    Others that have ended count with 0. A mean over conversations that have not ended, itself included, would depend on
    when it ends.
    """
    _rewards(conversations, "returns_to_go")
    returns = [_returns(one, discount) for one in conversations]
    total = np.zeros(max(map(len, returns)))
    for found in returns:
        total[: len(found)] += found
    return [found - (total[: len(found)] - found) / (len(returns) - 1) for found in returns]


def tree_leaf(conversations: Sequence[Conversation]) -> list[Numbers]:
    """For rollouts that branch once: how good the continuations of a turn are, compared with those of its siblings.

    Turns before the fork have the mean reward of the rollout's leaves, minus that of the other rollouts (0 without
    others); turns after it the reward of their leaf, minus the mean of the rollout's other leaves, over the number of
    leaves. Unbiased, where the sum over the tokens of a rollout, its branches included, is one rollout's gradient.

    Args:
        conversations: whole rollouts with their branches (:mod:`rollouts.training.branching`), each of one sample.

    Raises:
        ConfigError: a rollout has branches from after several of its turns, or a branch without its parent.
    """
    rewards = _rewards(conversations, "tree_leaf", 1)
    members: dict[Hashable, list[int]] = {}
    for number, one in enumerate(conversations):
        rollout = one.branches[0].rollout_id
        members.setdefault(("alone", number) if rollout is None else rollout, []).append(number)
    means = np.array([rewards[leaves].mean() for leaves in members.values()])
    found: dict[int, Numbers] = {}
    for leaves, whole in zip(members.values(), _leave_one_out(means), strict=True):
        own = _leave_one_out(rewards[leaves]) / len(leaves)
        for number, value in zip(leaves, own, strict=True):
            found[number] = np.full(len(conversations[number].turn_rewards), value)
        fork = _fork_turn([conversations[number].branches[0] for number in leaves])
        found[leaves[0]][: fork if len(leaves) > 1 else None] = whole
    return [found[number] for number in range(len(conversations))]


def _leave_one_out(rewards: Numbers) -> Numbers:
    """Each reward minus the mean of the others; 0 without others."""
    found: Numbers = (rewards - rewards.mean()) * len(rewards) / max(len(rewards) - 1, 1)
    return found


def _fork_turn(leaves: Sequence[Sample]) -> int:
    """The number of turns of the first leaf that the others share."""
    whole, *others = leaves
    turns, _ = _turns(whole)
    forks = {int(turns[: one.shared].max(initial=-1)) + 1 for one in others}
    expected = "a whole rollout first, then its branches from after one of its turns"
    if whole.parent is not None or any(one.parent != whole.conversation for one in others) or len(forks) > 1:
        raise ConfigError.of("tree_leaf: parents", [one.parent for one in leaves], expected)
    return forks.pop() if forks else 0


def turn_deltas(conversations: Sequence[Conversation], *, values: Callable[[Sample], Sequence[float]]) -> list[Numbers]:
    """How much each turn changed the value of the state. As good as the values: unbiased if they are exact.

    Args:
        conversations: of one branch each.
        values: of a sample, the value before each of its turns; after the last it is the reward.

    Raises:
        ConfigError: another number of values than turns.
    """
    found = []
    for one in conversations:
        before = np.array([value for branch in one.branches for value in values(branch)], np.float64)
        if len(before) != len(one.turn_rewards):
            expected = f"{len(one.turn_rewards)}, one before each turn"
            raise ConfigError.of("turn_deltas(values)", f"{len(before)} values", expected)
        found.append(np.append(before[1:], one.reward) - before)
    return found


def gigpo(
    conversations: Sequence[Conversation],
    *,
    states: Callable[[Sample], Sequence[Hashable]],
    discount: float = 1.0,
    weight: float = 1.0,
) -> list[Numbers]:
    """Reward minus mean, plus the return of a turn minus the mean return of all turns from the same state.

    Biased: the means contain the turn itself, and in the walk of its test the cosine is 0.967.

    Args:
        conversations: of one comparison.
        states: of a sample, a key of the state before each of its turns, such as a digest of a snapshot.
        discount: of the returns.
        weight: of the second part.

    Raises:
        ConfigError: another number of states than turns.
    """
    whole = dr_grpo(conversations)
    returns = [_returns(one, discount) for one in conversations]
    keys = [[key for branch in one.branches for key in states(branch)] for one in conversations]
    places: dict[Hashable, list[float]] = {}
    for one, found, own in zip(conversations, returns, keys, strict=True):
        if len(own) != len(found):
            expected = f"{len(found)}, one before each turn of {one.branches[0]!r}"
            raise ConfigError.of("gigpo(states)", f"{len(own)} states", expected)
        for key, value in zip(own, found.tolist(), strict=True):
            places.setdefault(key, []).append(value)
    means = {key: sum(numbers) / len(numbers) for key, numbers in places.items()}
    return [
        base + weight * (found - np.array([means[key] for key in own]))
        for base, found, own in zip(whole, returns, keys, strict=True)
    ]
