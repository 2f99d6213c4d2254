"""Ages of tokens, and which groups may still go into a batch."""

from __future__ import annotations

import random

import pytest

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError
from rollouts.training import Group, Prompt, Sample
from rollouts.training.staleness import Staleness


def sample(*versions: str) -> Sample:
    """One context token, then one sampled token of each version."""
    spans = [VersionSpan(version, place, place + 1) for place, version in enumerate(versions, 1)]
    return Sample(tokens=[0] * (1 + len(versions)), loss_mask=[0] + [1] * len(versions), versions=spans)


def group(index: int, *versions: str) -> Group:
    return Group(Prompt("p", group_index=index), (sample(*versions),), "kept")


def announced(*versions: str, **rule: object) -> Staleness:
    staleness = Staleness(**rule)  # type: ignore[arg-type]  # some are wrong on purpose
    for version in versions:
        staleness.announce(version)
    return staleness


def test_age_is_the_number_of_versions_announced_since() -> None:
    """Of each token; a group is as old as its oldest one. Names need not be numbers."""
    staleness = announced("first", "b", "10")
    assert staleness.tokens_by_age([sample("first", "10"), sample("b")]) == {2: 1, 1: 1, 0: 1}
    assert staleness.age(group(0, "b", "10")) == 1
    assert staleness.metrics([sample("first", "10")]) == {
        "staleness/mean": 1.0, "staleness/max": 2, "staleness/0": 0.5, "staleness/2": 0.5
    }  # fmt: skip


def test_a_run_that_announces_nothing_knows_no_age() -> None:
    """And says nothing about it."""
    assert Staleness().age(group(0, "a")) == 0
    assert Staleness().metrics([sample("a")]) == {}


def test_a_version_that_was_never_announced_is_an_error() -> None:
    """Its age is unknown, and a guess would put old tokens into a batch."""
    with pytest.raises(ConfigError, match="a version that was announced"):
        announced("a").age(group(0, "b"))


def test_versions_that_are_observed_are_in_the_order_of_their_numbers() -> None:
    """Numbers by their value, as a server that counts names them; other names as they are seen, earlier ones first."""
    seen = Staleness()
    assert seen.age_of([]) == 0
    seen.observe(["9", "11"])
    seen.observe(["10", "9"])
    assert [seen.age_of([version]) for version in ("9", "10", "11")] == [2, 1, 0]
    assert [seen.age_of(["10", "11"]), seen.age_of(["11", "9"])] == [1, 2]
    seen = Staleness()
    seen.observe(["b"])
    seen.observe(["a", "b"], earlier=True)
    assert seen.age_of(["b", "a"]) == 1
    seen.observe(["c"])
    assert [seen.age_of([version]) for version in ("a", "b", "c")] == [2, 1, 0]


def test_the_trainer_has_no_batch_at_first() -> None:
    """Then groups of one more batch may start than the bound says."""
    staleness = Staleness(max_staleness=1, policy="pace")
    assert staleness.room(pending=0, batch_size=4) == 8
    staleness.training = True
    assert staleness.room(pending=0, batch_size=4) == 4


def test_a_name_is_announced_once() -> None:
    """Two sets of weights under one name cannot be distinguished."""
    with pytest.raises(ConfigError, match="a new name"):
        announced("a", "b", "a")


@pytest.mark.parametrize("rule", [{"max_staleness": -1}, {"max_staleness": True}, {"policy": "hope"}])
def test_an_invalid_policy_is_refused(rule: dict[str, object]) -> None:
    """By name, when it is set."""
    with pytest.raises(ConfigError, match=next(iter(rule))):
        announced(**rule)


def test_drop_says_which_groups_are_too_old() -> None:
    """Those beyond the bound; with pace or without a bound none is."""
    age = announced("a", "b", "c").age(group(0, "a"))
    assert announced("a", "b", "c", max_staleness=1).too_old(age)
    assert not announced("a", "b", "c", max_staleness=2).too_old(age)
    assert not announced("a", "b", "c", max_staleness=1, policy="pace").too_old(age)
    assert not announced("a", "b", "c").too_old(age)


def test_pace_leaves_room_for_as_many_batches_as_versions_may_pass() -> None:
    """One batch, and one for each version of the bound; one less during training, since a version is expected."""
    staleness = announced("a", max_staleness=1, policy="pace")
    assert staleness.room(pending=3, batch_size=4) == 5
    staleness.training = True
    assert staleness.room(pending=3, batch_size=4) == 1
    staleness.announce("b")
    assert not staleness.training
    assert announced("a", max_staleness=1).room(3, 4) is None


def test_pace_waits_for_a_group_that_would_come_too_late() -> None:
    """A group in flight that may see no more announcements must be in this batch, though younger ones are ready."""
    staleness = announced("a", "b", max_staleness=1, policy="pace")
    ready = [group(1, "b"), group(2, "b")]
    assert staleness.choose(ready, {0: 1}, 2) is None
    assert staleness.choose(ready, {0: 2}, 2) == ready
    assert staleness.choose([*ready, group(0, "a")], {}, 2) == [group(0, "a"), ready[0]]


def test_pace_looks_ahead_over_the_announcements_of_the_bound() -> None:
    """Two groups of this version do not fit in the one batch before they are too old: the first must be in this one."""
    staleness = announced("a", max_staleness=1, policy="pace")
    assert staleness.choose([group(0, "a")], {1: 1, 2: 1}, 1) is None
    assert staleness.choose([group(0, "a")], {1: 1}, 1) == [group(0, "a")]


def test_nothing_is_waited_for_that_is_not_in_flight() -> None:
    """Where more versions were announced than batches handed out, there is no way to keep the bound: the oldest go."""
    staleness = announced("a", "b", "c", max_staleness=0, policy="pace")
    groups = [group(number, "a") for number in range(4)]
    assert staleness.choose(groups, {}, 2) == groups[:2]


@pytest.mark.parametrize("seed", range(60))
def test_pace_keeps_the_bound_whatever_finishes_when(seed: int) -> None:
    """Random play: groups end in any order, with the version of their start; no batch is older than allowed."""
    rng = random.Random(seed)
    bound, size = rng.randint(0, 3), rng.randint(1, 4)
    staleness = announced("0", max_staleness=bound, policy="pace")
    flying: dict[int, str] = {}
    started: dict[int, int] = {}
    ready: list[Group] = []
    taken, batches = 0, 0
    while batches < 40:
        room = staleness.room(len(ready) + len(flying), size)
        assert room is not None
        for _ in range(rng.randint(0, max(room, 0))):
            flying[taken], started[taken] = str(staleness.current - 1), staleness.current
            taken += 1
        for index in rng.sample(sorted(flying), rng.randint(0, len(flying))):
            if rng.random() < 0.8:
                ready.append(group(index, flying[index]))
            del flying[index], started[index]
        if staleness.training and rng.random() < 0.7:
            staleness.announce(str(staleness.current))
        staleness.training = False
        chosen = staleness.choose(ready, started, size)
        if chosen is not None:
            assert max(staleness.age(one) for one in chosen) <= bound
            ready = [one for one in ready if one not in chosen]
            batches += 1
            staleness.training = True
