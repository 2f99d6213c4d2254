"""Failure policies by cause, and the statistics of lost attempts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest

from rollouts.agent import run_agent
from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Message, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment
from rollouts.environments.base import StepResult
from rollouts.errors import (
    CAUSES,
    ConfigError,
    EndpointUnavailable,
    EnvironmentFailure,
    Failure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
)
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, Group, Prompt, RolloutConfig, Sample
from rollouts.training.failures import FailurePolicy, FailureStats, same_cause
from rollouts.training.metrics import Accounting
from tests.manager_semantics.test_admission import on_virtual_clock
from tests.stored_runs import some_sample


class Recorded:
    """Fails as configured; records each call as ``(index, replacement)``."""

    def __init__(self, fails: Callable[[Prompt, int], BaseException | None]) -> None:
        self.calls: list[tuple[int, int]] = []
        self._tries: Counter[int] = Counter()
        self._fails = fails

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        self.calls.append((prompt.index, prompt.replacement))
        self._tries[prompt.index] += 1
        await anyio.lowlevel.checkpoint()
        error = self._fails(prompt, self._tries[prompt.index])
        if error is not None:
            raise error
        return [some_sample(prompt, seed=prompt.replacement)]


def manager_for(generate: Recorded, failures: dict[str, FailurePolicy], **options: Any) -> AsyncRolloutManager:
    sizes: dict[str, Any] = {"batch_size": 2, "n_samples_per_prompt": 4, "over_sampling_factor": 1.0, **options}
    settings = RolloutConfig(generate_fn=generate, failures=failures, **sizes)
    return AsyncRolloutManager(settings, DataBuffer([f"question {number}" for number in range(20)]))


@pytest.mark.parametrize(
    ("failure", "kind", "cause"),
    [
        (EnvironmentFailure, None, "environment_start"),
        (EnvironmentFailure, "environment_step", "environment_step"),
        (RewardFailure, None, "reward"),
        (FilterFailure, None, "filter"),
        (EnvironmentFailure, "verifier", "verifier"),
        (GenerateFailure, None, "generate"),
        (EndpointUnavailable, None, "endpoint"),
        (EndpointUnavailable, "generation", "endpoint"),
    ],
)
@pytest.mark.parametrize("raises_it", [False, True])
async def test_a_failure_is_typed_by_the_boundary_that_it_came_through(
    failure: Any, kind: Any, cause: str, raises_it: bool
) -> None:
    """Neither the type of the exception matters nor the name of the code; the code may raise the failure itself."""
    with pytest.raises(failure) as caught, boundary(failure, "World.step", kind=kind):
        raise failure("x") if raises_it else KeyError("x")
    assert Failure.of(caught.value).cause == cause
    assert cause in CAUSES


async def test_what_overran_its_deadline_is_a_cause_of_its_own() -> None:
    """Whichever function timed out."""
    with pytest.raises(EnvironmentFailure) as caught, boundary(EnvironmentFailure, "World.step", seconds=0.01):
        await anyio.sleep_forever()
    assert Failure.of(caught.value).cause == "deadline"


async def test_a_step_that_answers_nonsense_is_a_failed_step() -> None:
    """Although no exception was raised."""

    class Mute(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            return StepResult()

    trajectory = await run_agent(
        Prompt("x"), Mute, ScriptedPolicy([[5, 6]]), renderer_for(str(DEMO_MODEL)), sampling=SamplingParams()
    )
    assert trajectory.failure is not None
    assert trajectory.failure.cause == "environment_step"


def test_each_cause_has_its_own_number_of_attempts() -> None:
    """The endpoint is tried four times, with the policy's pauses between them; the rest as max_attempts says."""
    generate = Recorded(lambda prompt, tries: EndpointUnavailable("down") if prompt.index == 1 and tries < 4 else None)
    manager = manager_for(generate, {"endpoint": FailurePolicy(attempts=4, backoff_seconds=2)}, max_attempts=1)

    async def run() -> float:
        began = anyio.current_time()
        await manager.generate_batch()
        return anyio.current_time() - began

    assert (2 + 4 + 8) / 2 <= on_virtual_clock(run) <= 2 + 4 + 8
    assert generate.calls.count((1, 0)) == 4
    assert manager.accounting.failed == 0
    assert manager.metrics["lost/endpoint"] == 3


class Log:
    """A rollout log that keeps the events in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    async def save(self, turn: Turn | None) -> None:
        raise AssertionError("no turn is played")

    def taken(self, prompt: Prompt, position: int | None) -> None:
        self.events.append(("taken", prompt.group_index))

    def turn_log(self, index: int) -> TurnLog:
        self.events.append(("begins", index))
        return TurnLog(self.save)

    def attempt_lost(self, index: int, attempt: int, samples: Sequence[Sample]) -> None:
        assert samples[0].failure is not None
        self.events.append(("lost", index, attempt, samples[0].failure.kind))

    async def finished(self, samples: Sequence[Sample]) -> None:
        self.events.append(("finished", samples[0].index))

    async def settled(self, group: Group, appended: Callable[[], None]) -> None:
        appended()
        self.events.append(("settled", group.group_index, group.outcome))

    def sealed(self, number: int, groups: Sequence[int], metrics: Mapping[str, float], accounting: Accounting) -> None:
        self.events.append(("sealed", number, list(groups), accounting.in_batch))


async def test_a_log_has_each_attempt_before_the_next_one_begins() -> None:
    """A lost one with its number and failure, a sound one as finished, a rollout that is lost for good as neither."""
    generate = Recorded(
        lambda prompt, tries: OSError("no") if not prompt.index or (tries < 2 and prompt.index == 2) else None
    )
    log, sizes = Log(), {"batch_size": 2, "n_samples_per_prompt": 1, "over_sampling_factor": 1.0, "max_attempts": 2}
    config = RolloutConfig(generate_fn=generate, **sizes)
    await AsyncRolloutManager(config, DataBuffer(["a", "b", "c", "d"]), rollout_log=log).generate_batch()
    of_group = {
        number: [event for event in log.events if event[1] == number and event[0] != "sealed"] for number in range(3)
    }
    lost = [("begins", 0), ("lost", 0, 1, "GenerateFailure"), ("begins", 0), ("lost", 0, 2, "GenerateFailure")]
    assert of_group[0] == [("taken", 0), *lost, ("settled", 0, "failed")]
    assert of_group[1] == [("taken", 1), ("begins", 1), ("finished", 1), ("settled", 1, "kept")]
    second = [("begins", 2), ("lost", 2, 1, "GenerateFailure"), ("begins", 2), ("finished", 2)]
    assert of_group[2] == [("taken", 2), *second, ("settled", 2, "kept")]
    assert log.events[-1] == ("sealed", 0, [1, 2], 2)


async def test_a_lost_rollout_is_replaced_by_a_newly_sampled_one() -> None:
    """The group stays whole: its sound rollouts are kept, the lost one is played again with another number."""
    generate = Recorded(lambda prompt, tries: OSError("no") if prompt.index == 2 and prompt.replacement < 2 else None)
    manager = manager_for(generate, {"generate": FailurePolicy(attempts=1, replacements=2)})
    samples = await manager.generate_batch()
    assert [sample.index for sample in samples] == list(range(8))
    assert [call for call in generate.calls if call[0] == 2] == [(2, 0), (2, 1), (2, 2)]
    assert [call for call in generate.calls if call[0] == 0] == [(0, 0)], "the sound ones are not played again"
    assert manager.metrics["lost/replaced"] == 2


@pytest.mark.parametrize("n", [1, 2])
async def test_a_group_has_the_prompt_of_the_data_after_a_replacement(n: int) -> None:
    """The number of the replacement is that of its rollouts alone: a prompt that is put back begins again at 0."""
    generate = Recorded(lambda prompt, tries: None if prompt.replacement else OSError("no"))
    failures = {"generate": FailurePolicy(attempts=1, replacements=1)}
    config = RolloutConfig(generate_fn=generate, failures=failures, batch_size=1, n_samples_per_prompt=n)
    prompts: list[int] = []

    async def seen(group: Group) -> None:
        prompts.append(group.prompt.replacement)

    await AsyncRolloutManager(config, DataBuffer(["question"]), on_group=seen).generate_batch()
    assert set(prompts) == {0}


@pytest.mark.parametrize(("sound", "kept"), [(3, True), (2, False)])
async def test_a_group_is_filled_only_if_enough_of_it_is_sound(sound: int, kept: bool) -> None:
    """At least 3 of 4; otherwise it is dropped at once, and its siblings are stopped."""
    lost = range(sound, 4)
    generate = Recorded(
        lambda prompt, tries: OSError("no") if prompt.index in lost and not prompt.replacement else None
    )
    manager = manager_for(generate, {"generate": FailurePolicy(attempts=1, replacements=1, min_sound=3)})
    samples = await manager.generate_batch()
    assert (0 in {sample.group_index for sample in samples}) is kept
    assert manager.accounting.failed == (0 if kept else 1)


async def test_a_group_that_cannot_be_sound_enough_waits_for_none_of_its_rollouts() -> None:
    """Two of four are lost and three must be sound: the other two are cancelled while they run."""
    failures = {"generate": FailurePolicy(attempts=1, replacements=1, min_sound=3)}

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        assert prompt.index is not None
        await anyio.lowlevel.checkpoint()
        if prompt.index < 2:
            raise OSError("no")
        if prompt.index < 4:
            await anyio.sleep_forever()
        return [some_sample(prompt, seed=0)]

    sizes = {"batch_size": 2, "n_samples_per_prompt": 4, "over_sampling_factor": 1.0}
    settings = RolloutConfig(generate_fn=generate, failures=failures, **sizes)
    with anyio.fail_after(20):
        batch = await AsyncRolloutManager(settings, DataBuffer(["a", "b", "c", "d"])).generate_batch()
    assert 0 not in {sample.group_index for sample in batch}


async def test_one_cause_may_stop_the_run_while_others_drop_the_group() -> None:
    """The message contains the reason."""
    generate = Recorded(lambda prompt, tries: EndpointUnavailable("gone") if prompt.group_index == 1 else None)
    manager = manager_for(generate, {"endpoint": FailurePolicy(attempts=1, then="stop")})
    with pytest.raises(GenerateFailure, match="group 1 failed: EndpointUnavailable: gone"):
        await manager.generate_batch()
    generate = Recorded(lambda prompt, tries: OSError("gone") if prompt.group_index == 1 else None)
    manager = manager_for(generate, {"endpoint": FailurePolicy(attempts=1, then="stop")})
    await manager.generate_batch()
    assert manager.accounting.failed == 1


async def test_a_cause_that_stops_the_run_does_so_whichever_rollout_of_the_group_it_hits() -> None:
    """Also where another rollout of the group was lost to another cause first."""

    def fails(prompt: Prompt, tries: int) -> Exception | None:
        if prompt.group_index != 1 or prompt.index is None:
            return None
        return OSError("no") if prompt.index % 4 == 0 else EndpointUnavailable("gone")

    policies = {
        "generate": FailurePolicy(attempts=1, replacements=1),
        "endpoint": FailurePolicy(attempts=1, then="stop"),
    }
    manager = manager_for(Recorded(fails), policies)
    with pytest.raises(GenerateFailure, match="group 1 failed: EndpointUnavailable: gone"):
        await manager.generate_batch()


async def test_a_run_that_fails_too_often_stops_and_says_the_top_causes() -> None:
    """Long before patience ends."""
    rng = random.Random(0)
    generate = Recorded(lambda prompt, tries: OSError("no") if rng.random() < 0.8 else None)
    manager = manager_for(generate, {}, failure_budget=0.5, failure_window=20)

    async def go_on() -> None:
        for _ in range(10):
            await manager.generate_batch()

    with pytest.raises(GenerateFailure, match=r"of the last 20 attempts were lost, more than 50%: \d+ × generate"):
        await go_on()
    manager.accounting.check()


def test_lengths_are_kept_until_the_next_batch_only() -> None:
    """Also where nothing is lost."""
    stats = FailureStats(None, 1)
    sample = some_sample(Prompt("?", index=0), seed=1)
    stats.add([sample], sound=True)
    assert stats.metrics() == {}
    stats.add([sample, sample], sound=True)
    stats.add([sample], sound=False)
    assert stats.metrics()["turns/sound"] == 2 * sample.turns


async def test_the_lost_are_compared_with_the_sound() -> None:
    """With lengths, turns, and the number of affected prompts."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        sample = some_sample(prompts[0], seed=1, turns=6 if prompts[0].index == 1 else 1)
        if prompts[0].index == 1:
            sample.status = "failed"  # type: ignore[assignment]  # converted
        return [sample]

    settings = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate, max_attempts=1)
    manager = AsyncRolloutManager(settings, DataBuffer([f"question {number}" for number in range(20)]))
    await manager.generate_batch()
    assert manager.metrics["turns/lost"] == 6
    assert manager.metrics["turns/sound"] == 1
    assert manager.metrics["sampled_tokens/lost"] > manager.metrics["sampled_tokens/sound"]
    assert manager.metrics["lost/prompts"] == 1


def test_pauses_double_up_to_the_longest_with_jitter() -> None:
    """Between half and whole."""
    policy = FailurePolicy(backoff_seconds=1.0, most_seconds=5.0)
    rng = random.Random(0)
    for attempt, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (5000, 5.0)):
        drawn = [policy.pause(attempt, rng) for _ in range(200)]
        assert most / 2 <= min(drawn) < max(drawn) <= most


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        ({"weather": FailurePolicy()}, "RolloutConfig.failures: got 'weather'; expected one of endpoint"),
        ({"reward": "retry"}, r"RolloutConfig.failures\['reward'\]: got 'retry'; expected a FailurePolicy"),
        ({"reward": FailurePolicy(min_sound=9)}, r"min_sound: got 9; expected at most n_samples_per_prompt=4"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(failures: Any, words: str) -> None:
    """Before work starts."""
    with pytest.raises(ConfigError, match=words):
        manager_for(Recorded(lambda prompt, tries: None), failures)


@pytest.mark.parametrize(
    "fields", [{"attempts": 0}, {"replacements": -1}, {"backoff_seconds": -1}, {"then": "pray"}, {"attempts": "2"}]
)
def test_an_invalid_policy_is_refused(fields: Any) -> None:
    """By its field."""
    with pytest.raises(ConfigError, match=f"FailurePolicy.{next(iter(fields))}: got"):
        FailurePolicy(**fields)


def test_messages_of_one_cause_are_equal_without_their_values() -> None:
    """Quoted values, numbers and what was got are left out; the rest of a message stays."""
    one, other = (
        Failure("KeyError", f"row {number} of '{name}': got {name!r} + {number}; expected a key", "", "")
        for number, name in ((1, "a"), (0x1F, "it; goes: got on"))
    )
    assert same_cause(one) == same_cause(other) == "KeyError: row … of …: got …; expected a key"


def test_a_hostile_message_is_compared_in_linear_time() -> None:
    """A message of user code that begins a value 100,000 times and ends none: minutes, if each looked for an end."""
    message = ": got " * 100_000
    assert same_cause(Failure("ValueError", message, "", "")) == f"ValueError: {message}"
