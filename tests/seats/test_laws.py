"""The laws of a rollout of several agents: tokens, frozen seats, versions, whole rollouts, seeds, clocks, failures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.dtypes import Completion, Endpoint, Limits, Message, Prompt, SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError, EndpointRefused, GenerateFailure
from rollouts.inference.base import CompletionRequest
from rollouts.recipes.environments.debate import play as debate
from rollouts.recipes.environments.kuhn import kuhn_deals, play
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.seats import Seat, gather, generate_play_batch, play_recipe, play_rollout_to_samples
from rollouts.seats.play import trained_comparisons
from rollouts.seats.play_log import digest_of
from rollouts.seats.seat import check_seats
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, Status
from rollouts.training.agent_integration import agent_rollout_to_samples
from rollouts.training.branches import by_rollout
from rollouts.training.comparisons import comparison_of
from rollouts.training.sample_laws import check_sample
from rollouts.trajectory import digest

ENDPOINT = Endpoint(model="demo", base_url="http://127.0.0.1:1", sampling=SamplingParams(seed=7))
BOTH = {"player0": Seat(), "player1": Seat()}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(DEMO_MODEL)


def speaker(renderer: Renderer, answer: Callable[[str], str]) -> ScriptedPolicy:
    """A policy that answers the text of the last 60 tokens."""
    stop = min(renderer.stop_token_ids)

    def reply(tokens: Any) -> Sequence[int]:
        return [*renderer.encode(answer(renderer.decode(tokens[-60:]))), stop]

    return ScriptedPolicy(reply)


def gambler(renderer: Renderer, seed: int = 0) -> ScriptedPolicy:
    """A policy that says a random legal word of Kuhn poker, and something else once in ten times."""
    rng = random.Random(seed)

    def answer(text: str) -> str:
        legal = re.findall(r"Legal: (\w+) (\w+)", text)[-1]
        return rng.choice(legal) if rng.random() < 0.9 else "hm"

    return speaker(renderer, answer)


async def played(renderer: Renderer, play: Any, policy: Any, seats: Any, **options: Any) -> list[Sample]:
    prompt = options.pop("prompt", Prompt("deal", metadata={"seed": 3}, group_index=0, index=0))
    return await play_rollout_to_samples(
        prompt, play=play, seats=seats, endpoint=ENDPOINT, tokenizer=renderer, policy=policy, **options
    )


async def duel(seats: Any, prompt: Prompt) -> None:
    """Two turns of each side."""
    white, black = seats.white.chat("You are white."), seats.black.chat()
    said = "Begin."
    for _ in range(2):
        said = (await white.ask(said)).text
        said = (await black.ask(said)).text
    white.reward, black.reward = 1.0, -1.0


DUEL = {"white": Seat(), "black": Seat()}


async def test_plays_through_the_manager_keep_every_law(renderer: Renderer, request: pytest.FixtureRequest) -> None:
    """Each rollout is a sample of each seat that was asked, and rewards add up to 0; 5,000 plays with ``--long``."""
    groups = 625 if request.config.getoption("--long") else 10
    generate = partial(
        generate_play_batch, play=play, seats=BOTH, endpoint=ENDPOINT, tokenizer=renderer, policy=gambler(renderer)
    )
    config = RolloutConfig(batch_size=groups, n_samples_per_prompt=8, generate_fn=generate)
    deals = kuhn_deals(0)
    async with AsyncRolloutManager(config, DataBuffer([next(deals) for _ in range(groups)])) as manager:
        samples = await manager.generate_batch()
    rollouts = by_rollout(samples)
    assert len(rollouts) == 8 * groups
    for conversations in rollouts:
        seats = [sample.seat for sample in conversations]
        assert seats in (["player0", "player1"], ["player0"])  # a seat that was never asked has no sample
        assert len(seats) == 1 or sum(sample.reward or 0 for sample in conversations) == 0
    assert [violation for sample in samples for violation in check_sample(sample)] == []
    assert manager.metrics["seat/player0/conversations"] == 1


async def test_a_frozen_seat_has_no_sample_and_no_trained_token(renderer: Renderer) -> None:
    """Its replies are context of the other seat, and stand in the metadata of the first sample."""
    policy = speaker(renderer, lambda text: "from white")
    frozen = Seat(policy=speaker(renderer, lambda text: "from black"), trained=False)
    seats = {"white": Seat(), "black": frozen}
    (sample,) = await played(renderer, duel, policy, seats)
    assert sample.seat == "white"
    trained = renderer.decode(sample.token_column[sample.mask_column])
    assert "from black" not in trained
    assert "from black" in sample.response
    (messages,) = sample.metadata["frozen_seats"]["black"]
    assert [message["content"] for message in messages if message["role"] == "assistant"] == ["from black"] * 2


async def test_a_version_names_the_policy_of_its_seat(renderer: Renderer) -> None:
    """Two servers may call unlike weights by one name; a seat with the rollout's policy keeps the name as it is."""
    old = speaker(renderer, lambda text: "old")
    samples = await played(renderer, duel, speaker(renderer, lambda text: "new"), {**DUEL, "black": Seat(policy=old)})
    assert [sample.weight_versions for sample in samples] == [["scripted"], ["black/scripted"]]
    assert len(old.requests) == 2


@attrs.define(eq=False)
class Recorder:
    """A policy that keeps the requests that it passes on."""

    inner: Any
    requests: list[CompletionRequest] = attrs.field(factory=list)
    seconds: float = 0.0

    async def complete(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        await anyio.sleep(self.seconds)
        reply: Completion = await self.inner.complete(request)
        return reply

    async def describe(self) -> Any:
        return await self.inner.describe()

    async def aclose(self) -> None:
        return None

    def __hash__(self) -> int:
        return id(self)


async def test_seeds_differ_by_seat_conversation_and_turn(renderer: Renderer) -> None:
    """One seed for two seats would correlate their play."""
    policy = Recorder(speaker(renderer, lambda text: "yes"))

    async def many(seats: Any, prompt: Prompt) -> None:
        for seat in (seats.white, seats.black, seats.white):
            chat = seat.chat()
            chat.reward = 0.0
            await chat.ask("One.")
            await chat.ask("Two.")

    samples = await played(renderer, many, policy, DUEL)
    seeds = [request.sampling.seed for request in policy.requests]
    assert len(set(seeds)) == 6
    assert [(sample.seat, sample.conversation) for sample in samples] == [("white", 0), ("white", 1), ("black", 0)]


async def test_a_clock_runs_only_while_its_seat_is_asked(renderer: Renderer) -> None:
    """The opponent thinks for longer than the whole deadline of a seat, and both finish."""
    slow = Recorder(speaker(renderer, lambda text: "slow"), seconds=0.4)
    fast = speaker(renderer, lambda text: "fast")
    limits = Limits(episode_seconds=0.3, step_seconds=0.3)
    samples = await played(renderer, duel, fast, {"white": Seat(limits=limits), "black": Seat(policy=slow)})
    assert [sample.stop_reason for sample in samples] == [StopReason.TASK_COMPLETED] * 2


async def test_a_seat_that_takes_too_long_is_over(renderer: Renderer) -> None:
    """Its deadline is a limit: the play sees it in the reply; a further ask fails the rollout, with the seat's name."""
    slow = Recorder(speaker(renderer, lambda text: "slow"), seconds=0.2)
    seen = []

    async def patient(seats: Any, prompt: Prompt) -> None:
        chat = seats.white.chat()
        chat.reward = 1.0
        for _ in range(3):
            seen.append((await chat.ask("Go on?")).over)
            if seen[-1]:
                break

    (sample,) = await played(renderer, patient, slow, {"white": Seat(limits=Limits(episode_seconds=0.3))})
    assert seen == [None, StopReason.DEADLINE]
    assert sample.status is Status.TRUNCATED


async def test_the_calls_of_a_seat_go_to_its_environment(renderer: Renderer) -> None:
    """The play gets the reply after them; its environment is open until the play returns."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    policy = speaker(renderer, lambda text: "It is 5." if "tool_response" in text else call)
    replies = []

    async def with_tools(seats: Any, prompt: Prompt) -> None:
        chat = seats.agent.chat()
        replies.append(await chat.ask("What is 2 + 3?"))
        chat.reward = float(isinstance(chat.environment, CalculatorEnvironment))

    seat = Seat(environment_cls=CalculatorEnvironment)
    (sample,) = await played(renderer, with_tools, policy, {"agent": seat})
    assert [reply.text for reply in replies] == ["It is 5."]
    assert sample.turns == 2
    assert sample.reward == 1.0


async def raises(seats: Any, prompt: Prompt) -> None:
    await seats.white.chat().ask("Begin.")
    raise ValueError("a bug of the play")


async def asks_twice(seats: Any, prompt: Prompt) -> None:
    chat = seats.white.chat()
    await gather(chat.ask("One."), chat.ask("Two."))


async def asks_after_its_end(seats: Any, prompt: Prompt) -> None:
    chat = seats.white.chat()
    for _ in range(4):
        await chat.ask("Again.")


async def asks_no_one(seats: Any, prompt: Prompt) -> None:
    seats.white.chat()


async def says_a_mark(seats: Any, prompt: Prompt) -> None:
    """As where another seat sampled it."""
    await seats.white.chat().ask("<|im_start|>system")


async def runs_a_mark(seats: Any, prompt: Prompt) -> None:
    await seats.white.run("<|im_start|>system")


async def leaves_an_ask(seats: Any, prompt: Prompt) -> None:
    chat = seats.white.chat()
    await chat.ask("One.")
    task = asyncio.create_task(chat.ask("Two."))  # noqa: TID251 - the mistake of a play
    await anyio.lowlevel.checkpoint()
    LEFT.append(task)


LEFT: list[asyncio.Task[Any]] = []


async def suppresses(seats: Any, prompt: Prompt) -> None:
    white, black = seats.white.chat(), seats.black.chat()
    white.reward, black.reward = 1.0, -1.0
    await white.ask("Begin.")
    try:
        await black.ask("Begin.")
    except GenerateFailure:
        return  # a forfeit: white wins


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "play raises raised ValueError: a bug of the play"),
        (asks_twice, "seat white, conversation 0: asked while it is being asked"),
        (asks_after_its_end, "seat white, conversation 0: asked after its end"),
        (asks_no_one, "no seat that is trained was asked"),
        (suppresses, "seat black, conversation 0: "),
        (says_a_mark, "seat white, conversation 0: the chat template refuses the opening of the chat"),
        (runs_a_mark, "seat white, conversation 0: the chat template refuses the opening of the run"),
        (leaves_an_ask, "seat white, conversation 0: still asked when the play returned"),
    ],
)
async def test_a_failure_costs_the_rollout(renderer: Renderer, function: Any, message: str) -> None:
    """Also where the play suppresses it: it is never a forfeit, and its message names the seat."""
    refusing, strict = ScriptedPolicy([]), renderer_for(load_tokenizer(DEMO_MODEL), special_text="error")
    seats = {"white": Seat(limits=Limits(max_turns=2)), "black": Seat(policy=refusing)}
    samples = await played(strict, function, Recorder(speaker(renderer, lambda text: "yes")), seats)
    while LEFT:
        with contextlib.suppress(Exception):
            await LEFT.pop()
    assert samples
    assert {sample.status for sample in samples} == {Status.FAILED}
    assert all(sample.failure is not None and message in sample.failure.message for sample in samples)


async def test_an_unknown_seat_ends_the_run(renderer: Renderer) -> None:
    """Every rollout would fail, also if the play catches the error."""

    async def mistyped(seats: Any, prompt: Prompt) -> None:
        try:
            await seats.whtie.chat().ask("Begin.")
        except ConfigError:
            await seats.white.chat().ask("Begin.")

    with pytest.raises(ConfigError, match="seats: got 'whtie'; expected one of white, black"):
        await played(renderer, mistyped, speaker(renderer, lambda text: "yes"), DUEL)


async def test_a_failed_endpoint_in_a_task_group_is_attributed(renderer: Renderer) -> None:
    """The failure is that of the server, not of the play whose task group wraps it."""

    async def grouped(seats: Any, prompt: Prompt) -> None:
        async with anyio.create_task_group() as tasks:
            for seat in seats:
                tasks.start_soon(seat.chat().ask, "Begin.")

    samples = await played(renderer, grouped, ScriptedPolicy([]), DUEL)
    (failure,) = {sample.failure for sample in samples}
    assert failure is not None
    assert (failure.kind, failure.cause) == (EndpointRefused.__name__, "endpoint")


class SlowToClose(SingleTurnEnvironment):
    """It closes when all of three are closing."""

    closing: ClassVar[list[anyio.Event]] = []

    async def close(self) -> None:
        self.closing.append(anyio.Event())
        if len(self.closing) == 3:
            for event in self.closing:
                event.set()
        await self.closing[-1].wait()


async def test_the_environments_of_a_play_close_at_once(renderer: Renderer) -> None:
    """A play of many seats waits for the slowest, not for the sum."""

    async def three(seats: Any, prompt: Prompt) -> None:
        for _ in range(3):
            chat = seats.agent.chat()
            await chat.ask("Begin.")
            chat.reward = 0.0

    seats = {"agent": Seat(environment_cls=SlowToClose, limits=Limits(close_seconds=20))}
    samples = await played(renderer, three, speaker(renderer, lambda text: "yes"), seats)
    assert [sample.metrics.get("close_failures", 0) for sample in samples] == [0, 0, 0]


async def test_a_debate_in_which_a_side_has_ended_is_judged(renderer: Renderer) -> None:
    """A side whose context or turns are full is not asked again; before, the next round failed the rollout."""
    seats = {"pro": Seat(limits=Limits(max_turns=1)), "con": Seat(), "judge": Seat(trained=False)}
    policy = speaker(renderer, lambda text: "PRO")
    samples = await played(renderer, debate, policy, seats, prompt=Prompt("Tea?", group_index=0, index=0))
    assert [(sample.seat, sample.turns, sample.reward) for sample in samples] == [("pro", 1, 1.0), ("con", 2, 0.0)]


class EightTurns(SingleTurnEnvironment):
    """A user who says the same to each reply, as the play of the next test does."""

    left = 8

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        if not self.left:
            return StepResult(done=True, reward=1.0)
        return StepResult(messages=[Message("user", "Go on.")])


async def test_a_turn_of_a_seat_costs_little_more_than_one_of_an_agent(
    renderer: Renderer, request: pytest.FixtureRequest
) -> None:
    """At most 1.2 times the calls, and 1.2 times the CPU time or 0.15 ms more, for the same ids; with ``--long``."""
    if not request.config.getoption("--long"):
        pytest.skip("needs --long")

    async def talk(seats: Any, prompt: Prompt) -> None:
        chat, said = seats.agent.chat(), str(prompt.prompt)
        for _ in range(EightTurns.left):
            await chat.ask(said)
            said = "Go on."
        chat.reward = 1.0

    async def seat(prompt: Prompt) -> list[Sample]:
        return await played(renderer, talk, speaker(renderer, lambda text: "yes"), {"agent": Seat()}, prompt=prompt)

    async def agent(prompt: Prompt) -> list[Sample]:
        policy = speaker(renderer, lambda text: "yes")
        return await agent_rollout_to_samples(
            prompt, environment_cls=EightTurns, endpoint=ENDPOINT, tokenizer=renderer, policy=policy
        )

    async def milliseconds(play: Any) -> float:
        began = time.process_time()
        for index in range(10):
            await play(Prompt("Begin.", group_index=0, index=index))
        return (time.process_time() - began) / 10 / EightTurns.left * 1000

    async def calls(play: Any) -> float:
        counted = Counter[str]()
        sys.setprofile(lambda frame, event, argument: counted.update([event]))
        try:
            await play(Prompt("Begin.", group_index=0, index=0))
        finally:
            sys.setprofile(None)
        return counted["call"] / EightTurns.left

    prompt = Prompt("Begin.", group_index=0, index=0)
    assert [list(one.tokens) for one in await seat(prompt)] == [list(one.tokens) for one in await agent(prompt)]
    seat_calls, agent_calls = await calls(seat), await calls(agent)
    print(f"calls of Python functions a turn: {seat_calls:.0f} of a seat, {agent_calls:.0f} of an agent")
    assert seat_calls <= 1.2 * agent_calls
    rounds = [(await milliseconds(agent), await milliseconds(seat)) for _ in range(20)]
    alone, seated = min(one for one, _ in rounds), min(one for _, one in rounds)
    print(f"CPU a turn: {seated:.3f} ms of a seat, {alone:.3f} ms of an agent, {seated / alone:.2f} times")
    assert seated <= max(1.2 * alone, alone + 0.15)


# -- replay -----------------------------------------------------------------------------------------------------------


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
        log = TurnLog(self.save, self.turns)
        return Prompt("deal", metadata={"seed": 3}, group_index=0, index=0, turn_log=log)


async def dinner(seats: Any, prompt: Prompt) -> None:
    """Chats with and without tools, a frozen seat, and two episodes at once."""
    await duel(seats, prompt)
    cook, guest = seats.cook.chat("You are a cook."), seats.guest.chat()
    for _ in range(2):
        dish = await cook.ask((await guest.ask("Order.")).text)
        await guest.ask(dish.text)
    cook.reward = 1.0
    for run in await gather(seats.cook.run("What is 2 + 2?"), seats.cook.run("What is 2 + 3?")):
        run.reward = float(len(run.text))


DINNER = {**DUEL, "cook": Seat(environment_cls=CalculatorEnvironment), "guest": Seat(trained=False)}


def counter(renderer: Renderer) -> ScriptedPolicy:
    """A policy whose replies depend on all tokens before them."""
    stop = min(renderer.stop_token_ids)
    return ScriptedPolicy(lambda tokens: [*renderer.encode(f"reply {digest(tokens) % 1000}"), stop])


def content(samples: Sequence[Sample]) -> list[Any]:
    return [
        (sample.seat, sample.conversation, sample.reward, list(sample.tokens), list(sample.loss_mask))
        for sample in samples
    ]


@pytest.mark.parametrize("lives", range(1, 16))
async def test_a_play_that_was_killed_goes_on_with_the_same_ids(renderer: Renderer, lives: int) -> None:
    """At every turn: no kept reply is sampled again, and the samples are those of a run without a kill."""
    whole = Kept()
    expected = content(await played(renderer, dinner, counter(renderer), DINNER, prompt=whole.prompt()))
    killed = Kept(lives=lives)
    if lives <= len(whole.turns):
        with killed.death:
            await played(renderer, dinner, counter(renderer), DINNER, prompt=killed.prompt())
        assert len(killed.turns) == lives
    policy = counter(renderer)
    samples = await played(renderer, dinner, policy, DINNER, prompt=Kept(killed.turns).prompt())
    assert content(samples) == expected
    assert len(policy.requests) == len(whole.turns) - len(killed.turns)
    assert all("restarted_at_resume" not in sample.metrics for sample in samples)
    assert [violation for sample in samples for violation in check_sample(sample)] == []


@pytest.mark.parametrize(
    "prompt", [Prompt("What is 2 + 2?", label="5"), Prompt("What is 2 + 2?", label="4", metadata={"seed": 4})]
)
async def test_a_kept_run_is_that_of_the_same_label_and_metadata(renderer: Renderer, prompt: Prompt) -> None:
    """Its environment would have started with another answer; before, only the messages were compared."""

    async def once(given: Prompt, seats: Any, prompt: Prompt) -> None:
        run = await seats.agent.run(given)
        run.reward = 0.0

    kept, seats = Kept(), {"agent": Seat()}
    first = partial(once, Prompt("What is 2 + 2?", label="4"))
    await played(renderer, first, counter(renderer), seats, prompt=kept.prompt())
    policy = counter(renderer)
    (same,) = await played(renderer, first, policy, seats, prompt=Kept(kept.turns).prompt())
    assert (len(policy.requests), "restarted_at_resume" in same.metrics) == (0, False)
    (other,) = await played(renderer, partial(once, prompt), policy, seats, prompt=Kept(kept.turns).prompt())
    assert (len(policy.requests), other.metrics["restarted_at_resume"]) == (1, 1)


@pytest.mark.parametrize(
    ("lives", "system", "said"),
    [(1, "You are white.", "Bid."), (1, "You are red.", "Begin."), (5, "You are white.", "Begin.")],
    ids=["other words", "another system prompt", "fewer asks"],
)
async def test_a_play_that_asks_something_else_begins_again(
    renderer: Renderer, lives: int, system: str, said: str
) -> None:
    """No kept reply is given to another question, or left out; the rollout is counted as restarted."""

    async def changed(seats: Any, prompt: Prompt) -> None:
        white = seats.white.chat(system)
        white.reward = 0.0
        await white.ask(said)

    killed = Kept(lives=lives)
    with killed.death:
        await played(renderer, dinner, counter(renderer), DINNER, prompt=killed.prompt())
    policy, again = counter(renderer), Kept(killed.turns)
    (sample,) = await played(renderer, changed, policy, DINNER, prompt=again.prompt())
    assert sample.metrics["restarted_at_resume"] == 1
    assert len(policy.requests) == 1
    assert len(again.turns) == 1


class Unrestored(SingleTurnEnvironment):
    """Its restore takes longer than the play waits for the reply."""

    scope: ClassVar[anyio.CancelScope]

    async def step(self, reply: Message) -> StepResult:
        return StepResult(messages=[Message("user", "Go on.")])

    async def snapshot(self) -> int:
        return 0

    async def restore(self, prompt: Prompt, snapshot: int) -> None:
        self.scope.cancel()
        await anyio.lowlevel.checkpoint()


async def test_a_chat_that_could_not_continue_is_not_left_out(renderer: Renderer) -> None:
    """The play gave up its last kept ask: the rollout begins again; before, it had no sample of the earlier replies."""

    async def impatient(seats: Any, prompt: Prompt) -> None:
        chat = seats.agent.chat()
        chat.reward = 1.0
        for said in ("One.", "Two.", "Three."):
            with anyio.CancelScope() as Unrestored.scope:
                await chat.ask(said)
            if chat.over:
                return

    seats = {"agent": Seat(environment_cls=Unrestored)}
    killed = Kept(lives=2)
    with killed.death:
        await played(renderer, impatient, counter(renderer), seats, prompt=killed.prompt())
    (sample,) = await played(renderer, impatient, counter(renderer), seats, prompt=Kept(killed.turns).prompt())
    assert (sample.failure, sample.turns, sample.metrics.get("restarted_at_resume")) == (None, 3, 1)


# -- what verify finds ------------------------------------------------------------------------------------------------


async def stored_run(renderer: Renderer, path: Path, change: Callable[[list[Sample]], Any]) -> Any:
    """The report of a run of two plays whose samples were changed before they were stored, without a journal."""
    seats = {"white": Seat(), "black": Seat(policy=speaker(renderer, lambda text: "old")), "judge": Seat(trained=False)}
    samples: list[Sample] = []

    async def judged(seats: Any, prompt: Prompt) -> None:
        await duel(seats, prompt)
        await seats.judge.chat().ask(f"Who won {prompt.index}?")

    for index in (0, 1):
        prompt = Prompt("deal", group_index=0, index=index)
        samples += await played(renderer, judged, speaker(renderer, lambda text: "new"), seats, prompt=prompt)
    samples = change(samples) or samples
    writer = RunWriter(path, {"recipe": "test", "config": {"n_samples_per_prompt": 2, "batch_size": 1}})
    writer.write_batch(samples, {})
    writer.finish("finished")
    return verify_run(path)


def swap(samples: list[Sample]) -> None:
    samples[0].seat, samples[1].seat = samples[1].seat, samples[0].seat


def drop(samples: list[Sample]) -> list[Sample]:
    return samples[1:]


def other_version(samples: list[Sample]) -> None:
    samples[1].versions = [attrs.evolve(span, version="scripted") for span in samples[1].versions]


def frozen_as_sample(samples: list[Sample]) -> list[Sample]:
    return [
        attrs.evolve(samples[0], seat="judge", completions=[], versions=[], loss_mask=[0] * len(samples[0])),
        *samples,
    ]


def frozen_mask(samples: list[Sample]) -> None:
    mask = list(samples[0].loss_mask)
    at = samples[0].completions[1].start - 4  # text of black, context of white
    mask[at] = 1
    samples[0].versions, samples[0].loss_mask = [], mask


@pytest.mark.parametrize(
    ("change", "law"),
    [(frozen_mask, 2), (frozen_as_sample, 2), (swap, 5), (drop, 4), (other_version, 2)],
)
async def test_verify_finds_each_mutation(renderer: Renderer, tmp_path: Path, change: Any, law: int) -> None:
    """From the rows alone: these runs have no journal to compare them with."""
    sound = await stored_run(renderer, tmp_path / "sound", lambda samples: None)
    assert not [one for one in sound.violations if "metadata" in one.place or one.law in (1, 2, 3, 5)]
    report = await stored_run(renderer, tmp_path / "changed", change)
    assert law in {violation.law for violation in report.violations if violation not in sound.violations}


async def test_the_comparison_of_a_play_travels_with_its_samples(renderer: Renderer) -> None:
    """``by=`` of a play is what advantages, filter and trainers find in its samples, whatever the prompt's data say."""
    by = {"black": "episode"}
    prompt = Prompt("deal", metadata={"seat_comparison": "group"}, group_index=0, index=0)
    samples = await played(renderer, duel, speaker(renderer, lambda text: "hm"), DUEL, by=by, prompt=prompt)
    assert [comparison_of(sample) for sample in samples] == ["seat", "episode"]
    recipe = play_recipe("duel", ENDPOINT, duel, [prompt], seats=DUEL, by=by)
    assert trained_comparisons(recipe.bound) == {"white": "seat", "black": "episode"}
    for wrong in ("game", {"black": "game"}, {"umpire": "episode"}, None, ["white"]):
        with pytest.raises(ConfigError, match="by: got"):
            play_recipe("duel", ENDPOINT, duel, [prompt], seats=DUEL, by=wrong)


async def test_a_play_that_edits_the_label_in_place_changes_no_sample(renderer: Renderer) -> None:
    """Its group keeps one label, as law 5 wants it; a play that begins again gets the label of its prompt."""
    seen: list[Any] = []

    async def editing(seats: Any, prompt: Prompt) -> None:
        seen.append([*prompt.label])
        prompt.label.append(len(seen))
        white = seats.white.chat()
        await white.ask(f"Attempt {min(len(seen), 2)}.")
        white.reward = 0.0

    kept = Kept()
    for _ in range(2):  # the second asks something else than the first, whose reply it finds, so it begins again
        prompt = attrs.evolve(Kept(kept.turns).prompt() if seen else kept.prompt(), label=["8"])
        (sample,) = await played(renderer, editing, counter(renderer), {"white": Seat()}, prompt=prompt)
        assert (sample.label, prompt.label) == (["8"], ["8"])
    assert seen == [["8"]] * 3


async def test_a_play_that_begins_again_gets_the_metadata_of_its_prompt(renderer: Renderer) -> None:
    """A play may deal from a deck of its metadata; after an interruption it deals the same cards again."""
    dealt: list[str] = []

    async def dealing(seats: Any, prompt: Prompt) -> None:
        dealt.append(prompt.metadata["deck"].pop())
        white = seats.white.chat()
        await white.ask(f"Deal {min(len(dealt), 2)}.")
        white.reward = 0.0

    kept = Kept()
    for _ in range(2):  # the second begins again
        prompt = Kept(kept.turns).prompt() if dealt else kept.prompt()
        prompt = attrs.evolve(prompt, metadata={"seed": 3, "deck": ["jack", "queen", "king"]})
        (sample,) = await played(renderer, dealing, counter(renderer), {"white": Seat()}, prompt=prompt)
    assert dealt == ["king"] * 3
    assert sample.metadata["deck"] == ["jack", "queen"]
    assert sample.metrics["restarted_at_resume"] == 1


async def test_a_play_does_not_get_the_urgency_of_its_group(renderer: Renderer) -> None:
    """It passes its prompt to the environments of its seats."""

    async def play_noting(seats: Any, prompt: Prompt) -> Any:
        assert prompt.urgency is None
        return await duel(seats, prompt)

    prompt = Prompt("deal", group_index=0, index=0, urgency=lambda: 0)
    samples = await played(renderer, play_noting, speaker(renderer, lambda text: "hm"), DUEL, prompt=prompt)
    assert [sample.failure for sample in samples] == [None, None]


def test_a_trained_seat_has_the_tokenizer_of_the_rollout() -> None:
    """Ids of another tokenizer would be trained as other text; a frozen seat may have one."""
    with pytest.raises(ConfigError, match=r"Seat\.tokenizer: got 'other'; expected None, or trained=False"):
        Seat(tokenizer="other")
    with pytest.raises(ConfigError, match=r"Seat\.tokenizer: got 'other'; expected None without endpoint or policy"):
        Seat(tokenizer="other", trained=False)
    assert Seat(tokenizer="other", endpoint=ENDPOINT, trained=False).tokenizer == "other"


def test_seats_are_checked_before_any_work() -> None:
    """Names, kinds, and that one of them is trained."""
    with pytest.raises(ConfigError, match=r"Seat.sandbox: got None; expected one with a program"):
        Seat(program=lambda task, server: None)  # type: ignore[arg-type,return-value]
    for seats, words in [({}, "a Seat for each name"), ({"a b": Seat()}, "identifiers"), ({"a": 1}, "a Seat")]:
        with pytest.raises(ConfigError, match=words):
            check_seats(seats)
    with pytest.raises(ConfigError, match="at least one seat with trained=True"):
        check_seats({"judge": Seat(trained=False)})


def test_the_digest_of_a_set_has_no_order() -> None:
    """A kept turn is found by a process in which the sets of a label are iterated in another order."""
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert digest_of([], {"allowed": one}, [frozenset(one)]) == digest_of([], {"allowed": other}, [frozenset(other)])


def test_seats_refuse_priorities_by_name() -> None:
    """Their requests would have none."""
    with pytest.raises(ConfigError, match=r"Endpoint\.priority: got True; expected False: the requests of seats"):
        play_recipe("toy", Endpoint(priority=True), some_play, ["a"], seats={"one": Seat()})


async def some_play(seats: Any, prompt: Any) -> Any:
    """Never played."""
