"""Branches of one rollout: the kept prefix, the restored environment, each token once, interruptions, and what verify
finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.dtypes import Completion, Endpoint, Limits, Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.renderer import Renderer, renderer_for
from rollouts.rewards.teacher_top import set_top
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, Status
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.branching import branch_rollout, branched_rollout_to_samples, generate_branched_batch
from rollouts.training.sample_laws import check_sample
from rollouts.trajectory import digest

TURNS = 4


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(DEMO_MODEL)


class Climb:
    """Its hidden height grows by the length of each reply; the reward comes at the end."""

    tools = ()

    def __init__(self) -> None:
        self.height, self.turns = 0, 0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return [Message("user", str(prompt.prompt))]

    async def step(self, reply: Message) -> StepResult:
        self.height, self.turns = self.height + len(reply.text), self.turns + 1
        if self.turns == TURNS:
            return StepResult(done=True, reward=float(self.height))
        return StepResult(messages=[Message("user", f"Turn {self.turns}.")], reward=0.0)

    async def close(self) -> None:
        pass

    async def snapshot(self) -> list[int]:
        return [self.height, self.turns]

    async def restore(self, prompt: Prompt, snapshot: list[int]) -> None:
        self.height, self.turns = snapshot


class Aliased(Climb):
    """It returns its own state as the snapshot, and plays on with the snapshot that it gets."""

    def __init__(self) -> None:
        self.state = {"height": 0, "turns": 0}

    height = property(lambda self: self.state["height"], lambda self, value: self.state.update(height=value))
    turns = property(lambda self: self.state["turns"], lambda self, value: self.state.update(turns=value))

    async def snapshot(self) -> Any:
        return self.state

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        self.state = snapshot


class Forgetful(Climb):
    """It has no snapshots."""

    snapshot = None  # type: ignore[assignment]


class Seeded(ScriptedPolicy):
    """A policy whose replies depend on the seed and on all tokens before them."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__([])
        self.renderer, self.calls = renderer, 0

    async def complete(self, request: CompletionRequest) -> Completion:
        self.calls += 1
        number = (digest(request.tokens) + (request.sampling.seed or 0)) % 7
        ids = [*self.renderer.encode("up " * (1 + number)), min(self.renderer.stop_token_ids)]
        return await ScriptedPolicy([ids]).complete(request)


ENDPOINT = Endpoint(model="demo", base_url="http://127.0.0.1:1", sampling=SamplingParams(seed=7))


def options(renderer: Renderer, **others: Any) -> dict[str, Any]:
    given = {"environment_cls": Climb, "endpoint": ENDPOINT, "tokenizer": renderer, "policy": Seeded(renderer)}
    return {**given, **others}


def prompt(log: TurnLog | None = None) -> Prompt:
    return Prompt("Climb.", group_index=0, index=0, turn_log=log)


def content(samples: Sequence[Sample]) -> list[Any]:
    return [(one.conversation, one.reward, list(one.tokens), list(one.loss_mask)) for one in samples]


@pytest.mark.parametrize("environment", [Climb, Aliased])
async def test_branches_share_a_prefix_that_is_trained_once(renderer: Renderer, environment: Any) -> None:
    """Equal ids up to the fork, trained in the whole rollout only; hidden state restored; other replies after it."""
    given = options(renderer, environment_cls=environment)
    whole, *branches = samples = await branched_rollout_to_samples(prompt(), turn=2, n=4, **given)
    assert [(one.conversation, one.parent) for one in samples] == [(0, None), (1, 0), (2, 0), (3, 0)]
    for branch in branches:
        assert branch.shared > 0
        assert branch.tokens[: branch.shared] == whole.tokens[: branch.shared]
        assert not any(branch.loss_mask[: branch.shared])
        assert branch.turns == TURNS - 2
        assert branch.metrics.get("turns_before_resume") is None
    for sample in samples:
        replies = [one["content"] for one in sample.messages if one["role"] == "assistant"]
        assert sample.reward == sum(map(len, replies)), "the height before the fork counts, as the snapshot says"
    assert len({tuple(sample.tokens) for sample in samples}) == 4, "each has a seed"
    assert whole.sampled_tokens + sum(one.sampled_tokens for one in branches) == sum(
        stop - start for one in samples for start, stop in [(call.start, call.stop) for call in one.completions]
    )
    assert [violation for sample in samples for violation in check_sample(sample)] == []


async def test_a_turn_may_depend_on_the_rollout(renderer: Renderer) -> None:
    """And a rollout that ends before it has no branches."""
    half = partial(branched_rollout_to_samples, turn=lambda sample: sample.turns // 2, n=3)
    assert [one.turns for one in await half(prompt(), **options(renderer))] == [4, 2, 2]
    (alone,) = await branched_rollout_to_samples(prompt(), turn=2, n=3, **options(renderer, limits=Limits(max_turns=2)))
    assert (alone.turns, alone.parent) == (2, None)


async def test_a_rollout_that_was_played_is_branched_by_its_turns(renderer: Renderer) -> None:
    """With turns that a log kept; turns of another rollout, and a turn that it does not have, are refused."""
    kept = Kept()
    (whole, *_) = await branched_rollout_to_samples(kept.prompt(), turn=2, n=2, **options(renderer))
    turns = [turn for turn in kept.turns if turn.fields["conversation"] == "/0"]
    set_top(whole, "http://teacher/generate", None)
    samples = await branch_rollout(whole, 1, 3, turns=turns, **options(renderer))
    assert ["scored_by" in one.metadata for one in samples] == [True, False, False], "a teacher scored these ids only"
    assert [one.turns for one in samples] == [4, 3, 3]
    assert samples[1].tokens[: samples[1].shared] == whole.tokens[: samples[1].shared]
    with pytest.raises(ConfigError, match="turn: got 4; expected 1 to 3, of the 4 turns"):
        await branch_rollout(whole, 4, 3, turns=turns, **options(renderer))
    other = (await branched_rollout_to_samples(Prompt("Up."), turn=2, n=2, **options(renderer)))[0]
    with pytest.raises(ConfigError, match="turns: got 'other tokens'; expected those of"):
        await branch_rollout(other, 2, 3, turns=turns, **options(renderer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment_cls": Forgetful}, "environment_cls: got 'no snapshot of a turn'; expected a resumable"),
        ({"n": 1}, "n: got 1; expected an integer >= 2"),
        ({"turn": 0}, "turn: got 0; expected an integer >= 1"),
        ({"turn": lambda sample: 1.5}, "turn: got 1.5; expected an integer, from the function"),
        ({"history": "error"}, "history: got 'error'; expected \"append\""),
    ],
)
async def test_what_cannot_branch_is_refused(renderer: Renderer, given: dict[str, Any], message: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=message):
        await branched_rollout_to_samples(prompt(), **{"turn": 2, "n": 2, **options(renderer), **given})


async def test_a_branch_that_fails_costs_the_rollout(renderer: Renderer) -> None:
    """The leaves of the others would be compared with a missing leaf."""
    steps: list[int] = []

    class Breaks(Climb):
        async def step(self, reply: Message) -> StepResult:
            steps.append(1)
            if len(steps) == TURNS + 2:
                raise ValueError("broken")
            return await super().step(reply)

    samples = await branched_rollout_to_samples(prompt(), turn=2, n=3, **options(renderer, environment_cls=Breaks))
    assert {sample.status for sample in samples} == {Status.FAILED}
    assert all("broken" in sample.failure.message for sample in samples if sample.failure)


class LongClimb(Climb):
    """Eight turns, with a page to read at each."""

    async def step(self, reply: Message) -> StepResult:
        self.height, self.turns = self.height + len(reply.text), self.turns + 1
        page = " ".join(f"{self.turns} + {number}" for number in range(30))
        return StepResult(messages=[Message("user", page)], reward=1.0, done=self.turns == 8)


def prefill(samples: Sequence[Sample]) -> int:
    """The tokens of requests that the server had not cached, by its own count."""
    return sum(call.start - call.cached_tokens for sample in samples for call in sample.completions)


async def test_branches_from_half_depth_cost_half_the_prefill(engine_url: str, renderer: Renderer) -> None:
    """By the cached tokens that the engine reports; whole rollouts of one prompt share its opening only."""
    endpoint = Endpoint(model="demo", base_url=engine_url, sampling=SamplingParams(max_new_tokens=8, seed=1))
    limits = Limits(max_turns=20, on_cut="continue")
    given = {"environment_cls": LongClimb, "endpoint": endpoint, "tokenizer": renderer, "limits": limits}
    whole, *branches = await branched_rollout_to_samples("Read.", turn=4, n=7, **given)
    assert len(branches) == 6
    others = [
        await agent_rollout_to_sample(Prompt("Read.", index=1 + number), **given) for number in range(len(branches))
    ]
    assert prefill([whole]) > 0
    ratio = prefill(branches) / prefill(others)
    print(f"prefill of 6 branches at half depth: {ratio:.3f} of that of 6 rollouts")
    assert ratio <= 0.55


# -- interruptions ----------------------------------------------------------------------------------------------------


class Kept:
    """A log in memory that dies after some turns, as the process of a run does."""

    def __init__(self, turns: Sequence[Turn] = (), lives: int = 10**6) -> None:
        self.turns, self.lives, self.death = list(turns), lives, anyio.CancelScope()

    async def save(self, turn: Turn | None) -> None:
        self.turns = [] if turn is None else [*self.turns, turn]
        self.lives -= 1
        if not self.lives:
            self.death.cancel()
            await anyio.lowlevel.checkpoint()

    def prompt(self) -> Prompt:
        return prompt(TurnLog(self.save, self.turns))


@pytest.mark.parametrize("lives", range(1, 6))
async def test_a_tree_that_was_killed_continues_with_the_same_ids(renderer: Renderer, lives: int) -> None:
    """At every turn of the whole rollout and of its branches: no logged turn is sampled again."""
    tree = partial(branched_rollout_to_samples, turn=2, n=3)
    whole = Kept()
    expected = content(await tree(whole.prompt(), **options(renderer)))
    assert len(whole.turns) == 5
    killed = Kept(lives=lives)
    with killed.death:
        await tree(killed.prompt(), **options(renderer))
    assert len(killed.turns) == lives
    again = options(renderer)
    assert content(await tree(Kept(killed.turns).prompt(), **again)) == expected
    assert again["policy"].calls == 8 - lives


async def test_turns_of_another_rollout_are_dropped(renderer: Renderer) -> None:
    """A log whose turns are of another prompt is void, and the rollout begins again."""
    kept = Kept()
    await branched_rollout_to_samples(kept.prompt(), turn=2, n=2, **options(renderer))
    again, given = Kept(kept.turns), options(renderer)
    other = Prompt("Another.", group_index=0, index=0, turn_log=TurnLog(again.save, again.turns))
    await branched_rollout_to_samples(other, turn=2, n=2, **given)
    assert given["policy"].calls == 6
    assert len(again.turns) == 4


class Unseeded(Seeded):
    """A policy that gives other replies in each process."""

    def __init__(self, renderer: Renderer, process: int) -> None:
        super().__init__(renderer)
        self.process = process

    async def complete(self, request: CompletionRequest) -> Completion:
        return await super().complete(attrs.evolve(request, sampling=SamplingParams(seed=self.process)))


@pytest.mark.parametrize("lives", [4, 5])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
async def test_branches_of_another_turn_are_not_continued(
    renderer: Renderer, lives: int, before: int, after: int
) -> None:
    """A rollout that ends otherwise after an interruption may be branched elsewhere: no branch has another prefix."""
    killed = Kept(lives=lives)
    with killed.death:
        tree = partial(branched_rollout_to_samples, turn=lambda sample: before, n=3)
        await tree(killed.prompt(), **options(renderer, policy=Unseeded(renderer, 0)))
    tree = partial(branched_rollout_to_samples, turn=lambda sample: after, n=3)
    whole, *branches = await tree(Kept(killed.turns).prompt(), **options(renderer, policy=Unseeded(renderer, 3)))
    for branch in branches:
        assert branch.status is Status.COMPLETED
        assert branch.tokens[: branch.shared] == whole.tokens[: branch.shared]
        assert branch.turns == TURNS - after


class FailingSnapshots(Climb):
    """Its snapshot fails after some turn of a branch."""

    taken: ClassVar[int] = 0

    async def snapshot(self) -> list[int]:
        FailingSnapshots.taken += 1
        if FailingSnapshots.taken == TURNS:
            raise ValueError("no snapshot")
        return await super().snapshot()


async def test_a_branch_continues_from_its_fork_where_its_last_turn_has_no_snapshot(renderer: Renderer) -> None:
    """It would begin from the prompt, and count as a branch."""
    FailingSnapshots.taken = 0
    given = {"environment_cls": FailingSnapshots}
    killed = Kept(lives=TURNS)
    with killed.death:
        await branched_rollout_to_samples(killed.prompt(), turn=1, n=2, **options(renderer, **given))
    assert not killed.turns[-1].resumable
    whole, branch = await branched_rollout_to_samples(
        Kept(killed.turns).prompt(), turn=1, n=2, **options(renderer, **given)
    )
    assert branch.shared
    assert branch.tokens[: branch.shared] == whole.tokens[: branch.shared]
    assert branch.turns == TURNS - 1


async def test_a_rollout_that_begins_again_has_new_branches(renderer: Renderer) -> None:
    """Its last logged turn has no snapshot: it begins again, and nothing of the old turns is in its tree."""
    killed = Kept(lives=5)
    with killed.death:
        await branched_rollout_to_samples(killed.prompt(), turn=2, n=3, **options(renderer))
    damaged = [
        attrs.evolve(turn, fields={name: value for name, value in turn.fields.items() if name != "snapshot"})
        if (turn.fields["conversation"], turn.number) == ("/0", TURNS - 1)
        else turn
        for turn in killed.turns
    ]
    again = Kept(damaged)
    tree = partial(branched_rollout_to_samples, turn=2, n=3)
    for process in (3, 4):
        whole, *branches = await tree(again.prompt(), **options(renderer, policy=Unseeded(renderer, process)))
        assert [one.tokens[: one.shared] == whole.tokens[: one.shared] for one in branches] == [True, True]
        assert [one.turns for one in branches] == [TURNS - 2] * 2


# -- stored -----------------------------------------------------------------------------------------------------------


async def stored(renderer: Renderer, path: Path, change: Callable[[list[Sample]], None]) -> Any:
    generate = partial(generate_branched_batch, turn=2, n=3, **options(renderer))
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=generate, filter_fn=None)
    async with AsyncRolloutManager(config, DataBuffer([Prompt("Climb.")])) as manager:
        samples = await manager.generate_batch()
    change(samples)
    writer = RunWriter(path, {"recipe": "test", "config": {"n_samples_per_prompt": 2, "batch_size": 1}})
    writer.write_batch(samples, {})
    writer.finish("finished")
    return verify_run(path)


async def test_a_stored_tree_is_sound_and_reads_back(renderer: Renderer, tmp_path: Path) -> None:
    """Through the manager, which takes its leaves as one rollout; parent and shared are fields of each row."""
    report = await stored(renderer, tmp_path / "run", lambda samples: None)
    assert [one for one in report.violations if "accounting" not in one.place] == []  # it has no journal
    assert report.checked[3]["branches"] == 4
    samples = load_run(tmp_path / "run")
    assert [one.parent for one in samples] == [None, 0, 0] * 2
    assert all(one.shared for one in samples if one.parent is not None)


def trains_the_prefix(samples: list[Sample]) -> None:
    whole, branch = samples[:2]
    branch.loss_mask = [*whole.loss_mask[: branch.shared], *branch.loss_mask[branch.shared :]]
    branch.rollout_log_probs = [*whole.rollout_log_probs[: branch.shared], *branch.rollout_log_probs[branch.shared :]]
    branch.completions = [*whole.completions[:2], *branch.completions]
    branch.versions = [*[one for one in whole.versions if one.stop <= branch.shared], *branch.versions]
    branch.step_completions = None


def has_another_prefix(samples: list[Sample]) -> None:
    samples[1].shared = len(samples[1]) - 1


def lacks_its_parent(samples: list[Sample]) -> None:
    samples[1].parent = 7


@pytest.mark.parametrize(("change", "law"), [(trains_the_prefix, 3), (has_another_prefix, 1), (lacks_its_parent, 4)])
async def test_verify_finds_what_branching_never_writes(
    renderer: Renderer, tmp_path: Path, change: Any, law: int
) -> None:
    """A token trained twice, a prefix that is not the parent's, and a branch without a parent."""
    report = await stored(renderer, tmp_path / "run", change)
    assert law in {violation.law for violation in report.violations}
