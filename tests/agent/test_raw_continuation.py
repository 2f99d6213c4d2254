"""Raw continuation: a step answers with text that continues the same assistant turn.

1. Tokens: the text is encoded once and alone, between two replies, without chat markup; sampled ids stay.
2. Mask: exactly the sampled tokens are trained.
3. The turn is one message of the conversation; the environment receives what was sampled since its last answer.
4. An interrupted, aborted or replayed episode continues the same turn, to the same result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import attrs
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.agent import run_agent, run_branches
from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, StopReason, TokenColumn, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SimulatedUser, StepResult
from rollouts.errors import EndpointRefused, EnvironmentFailure
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.ors_server.episode import HostedEpisode
from rollouts.recipe import agent_recipe
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.runs.journal import Journal
from rollouts.runs.reader import load_run
from rollouts.runs.recording import RECORDING, Recording, recorded, replayed_from
from rollouts.runs.verify import check_sample, verify_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.testing.environment_check import CheckOptions, examine
from rollouts.testing.playing import play
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    RolloutConfig,
    Sample,
    agent_rollout_to_sample,
    continue_rollout,
    generate_rollout_batch,
    trajectory_to_samples,
)
from rollouts.trajectory import Trajectory
from tests.worlds import Speller, some_text

TOKENIZER = load_tokenizer(DEMO_MODEL)
PLAIN = Renderer(TOKENIZER, dialect="plain")
QUESTION = Message("user", "What is 2 + 2?")
FIRST, SECOND, ANSWER = "I look. <search>2 + 2</search>", "Again. <search>four</search>", "So <answer>4</answer>"
FOUND = ["\n\n<information>It is 4.</information>\n\n", "\n\n<information>Four is 4.</information>\n\n"]
SAMPLING = SamplingParams(max_new_tokens=99)


class Searching:
    """Answers each search with the next text, in the same turn; any other reply ends the episode."""

    tools: Sequence[Tool] = ()

    def __init__(self, texts: Sequence[str] = FOUND) -> None:
        self.texts = list(texts)
        self.replies: list[str] = []
        self.opened: tuple[Message, ...] = ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.opened = prompt.messages
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self.replies.append(reply.content)
        if "<search>" not in reply.content:
            return StepResult(done=True, reward=1.0)
        return StepResult(continuation=self.texts.pop(0), reward=0.25, metrics={"searches": 1})

    async def snapshot(self) -> list[str]:
        return self.texts

    async def restore(self, prompt: Prompt, snapshot: list[str]) -> None:
        self.texts = snapshot

    async def close(self) -> None:
        return None


def script(*texts: str | Reply) -> ScriptedPolicy:
    return ScriptedPolicy([text if isinstance(text, Reply) else PLAIN.encode(text) for text in texts])


async def searched(*texts: str | Reply, **options: Any) -> tuple[Trajectory, ScriptedPolicy, Searching]:
    policy, environment = script(*texts), options.pop("environment", None) or Searching()
    options = {"sampling": SAMPLING, **options}
    renderer = options.pop("renderer", PLAIN)
    trajectory = await run_agent(Prompt([QUESTION], index=0), lambda: environment, policy, renderer, **options)
    return trajectory, policy, environment


# -- 1. tokens, 2. mask -----------------------------------------------------------------------------------------------


async def test_the_text_stands_between_two_replies_and_nothing_else_does() -> None:
    """Position by position: opening, sampled, text encoded alone, sampled, text, sampled."""
    trajectory, policy, _ = await searched(FIRST, SECOND, ANSWER + "<|im_end|>")
    assert trajectory.failure is None
    parts = [
        (PLAIN.opening([QUESTION]).tolist(), False),
        (PLAIN.encode(FIRST).tolist(), True),
        (TOKENIZER(FOUND[0], add_special_tokens=False)["input_ids"], False),
        (PLAIN.encode(SECOND).tolist(), True),
        (TOKENIZER(FOUND[1], add_special_tokens=False)["input_ids"], False),
        (PLAIN.encode(ANSWER + "<|im_end|>").tolist(), True),
    ]
    assert trajectory.tokens.tolist() == [token for ids, _ in parts for token in ids]
    assert trajectory.mask.tolist() == [sampled for ids, sampled in parts for _ in ids]
    assert [request.tolist() for request in policy.requests] == [
        trajectory.tokens[: call.start].tolist() for call in trajectory.completions
    ]
    assert [call.continues for call in trajectory.completions] == [False, True, True]
    assert trajectory.metrics["continuations"] == 2
    assert (trajectory.step_rewards, trajectory.metrics["searches"]) == ([0.25, 0.25, 1.0], 2)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), budget=st.integers(3, 40))
def test_texts_and_spellings_of_any_kind_keep_their_ids(seed: int, budget: int) -> None:
    """Odd spellings, cuts inside a character and odd texts: each id stays, each text is encoded once, the laws hold."""
    speller = Speller(TOKENIZER, PLAIN.stop_token_ids[0], seed)
    replies = [speller.spell(some_text(speller.rng) + "<search>") for _ in range(3)]
    texts = [some_text(speller.rng) for _ in range(3)]

    class Always(Searching):
        async def step(self, reply: Message) -> StepResult:
            return StepResult(continuation=self.texts.pop(0)) if self.texts else StepResult(done=True)

    PLAIN.forget()
    before = PLAIN.encoded_tokens
    run = partial(
        run_agent, sampling=SamplingParams(max_new_tokens=budget), limits=Limits(max_turns=4, on_cut="continue")
    )
    policy = ScriptedPolicy([*replies, speller.reply()])
    trajectory = anyio.run(run, Prompt(f"question {seed}", index=0), partial(Always, texts), policy, PLAIN)
    assert len(trajectory.completions) == 4
    pieces = [trajectory.tokens[call.start : call.stop].tolist() for call in trajectory.completions]
    assert pieces[:3] == [ids[:budget] for ids in replies]
    between = zip(trajectory.completions, trajectory.completions[1:], strict=False)
    assert [trajectory.tokens[one.stop : other.start].tolist() for one, other in between] == [
        TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
    assert PLAIN.encoded_tokens - before == int((~trajectory.mask).sum())


async def test_a_text_after_the_end_of_the_turn_is_counted() -> None:
    """The sampled stop token stays and nothing is written after it; a metric counts such texts."""
    trajectory, _, _ = await searched(FIRST + "<|im_end|>", ANSWER + "<|im_end|>")
    text = PLAIN.decode(trajectory.tokens)
    assert text.endswith(f"{FIRST}<|im_end|>{FOUND[0]}{ANSWER}<|im_end|>")
    assert trajectory.metrics["continued_after_end"] == 1


@pytest.mark.parametrize("special_text", ["as_ids", "as_text", "error"])
async def test_special_tokens_in_a_text_are_those_of_a_users_text(special_text: Literal["as_text", "error"]) -> None:
    """A web page with a mark of the template: its id, plain text, or a failure that names the field."""
    renderer = Renderer(TOKENIZER, dialect="plain", special_text=special_text)
    environment = Searching(["<information>a<|im_end|>b</information>"])
    trajectory, _, _ = await searched(FIRST, ANSWER + "<|im_end|>", environment=environment, renderer=renderer)
    if special_text == "error":
        assert trajectory.failure is not None
        assert "StepResult.continuation: got '<|im_end|>'; expected no special token" in trajectory.failure.message
        return
    one, two = trajectory.completions
    between = trajectory.tokens[one.stop : two.start].tolist()
    assert (renderer.stop_token_ids[0] in between) == (special_text == "as_ids")
    assert renderer.decode(between) == "<information>a<|im_end|>b</information>"


async def test_a_text_without_tokens_is_refused() -> None:
    """A text must have tokens: two replies in a row would be one."""

    class Silent(Renderer):
        def continuation(self, text: str) -> Any:
            return super().continuation(text)[:0]

    trajectory, _, _ = await searched(FIRST, renderer=Silent(TOKENIZER, dialect="plain"))
    assert trajectory.failure is not None
    assert "expected text of at least one token" in trajectory.failure.message


async def test_the_limits_hold_within_a_turn() -> None:
    """Each completion is a turn of the limits; the text of the last one is not appended, as no reply could follow."""
    trajectory, _, environment = await searched(FIRST, SECOND, ANSWER, limits=Limits(max_turns=2))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(environment.replies) == 2
    assert PLAIN.decode(trajectory.tokens).endswith(SECOND)
    short, _, _ = await searched(FIRST, SECOND, limits=Limits(max_tokens=len(PLAIN.opening([QUESTION])) + 40))
    assert short.stop_reason is StopReason.MAX_TOKENS
    assert short.messages[-1].content == FIRST + FOUND[0]


class Seeds(ScriptedPolicy):
    """A script of texts; keeps the seed of each request."""

    def __init__(self, *texts: str) -> None:
        super().__init__([PLAIN.encode(text) for text in texts])
        self.seeds: list[int | None] = []

    async def complete(self, request: CompletionRequest) -> Any:
        self.seeds.append(request.sampling.seed)
        return await super().complete(request)


async def test_seeds_differ_within_a_turn() -> None:
    """Each completion of a turn has its own seed, the same in each run."""
    found = []
    for _ in range(2):
        policy = Seeds(FIRST, SECOND, ANSWER)
        await run_agent(Prompt([QUESTION], index=0), Searching, policy, PLAIN, sampling=SamplingParams(seed=3))
        found.append(policy.seeds)
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_a_stored_run_is_verified(format: Format, tmp_path: Path) -> None:
    """The laws hold for each file, the turn is stored as one, and another token in the text breaks law 1."""
    if format == "parquet":
        pytest.importorskip("pyarrow")
    generate = partial(
        generate_rollout_batch,
        endpoint=Endpoint(sampling=SAMPLING),
        tokenizer=PLAIN,
        environment_cls=Searching,
        policy=ScriptedPolicy(model),
    )
    config = RolloutConfig(generate_fn=generate, batch_size=1, n_samples_per_prompt=2, over_sampling_factor=1)
    writer = RunWriter(tmp_path / "run", {"config": config.describe()}, format=format)
    async with AsyncRolloutManager(config, DataBuffer([{"prompt": QUESTION.content}])) as manager:
        batch = await manager.generate_batch()
        writer.write_batch(batch, manager.metrics, manager.accounting)
    writer.finish("completed", manager.accounting)
    assert verify_run(tmp_path / "run").violations == []
    for sample, stored in zip(batch, load_run(tmp_path / "run"), strict=True):
        assert [call.continues for call in stored.completions] == [False, True, True]
        assert stored.completions == sample.completions
        tokens = stored.token_column.copy()
        tokens[stored.completions[1].start - 1] ^= 1
        stored.tokens = tokens
        assert {violation.law for violation in check_sample(stored)} == {1}


def model(tokens: TokenColumn) -> Any:
    """Search twice, then answer."""
    read = PLAIN.decode(tokens)
    return PLAIN.encode(ANSWER + "<|im_end|>" if FOUND[1] in read else SECOND if FOUND[0] in read else FIRST)


# -- 3. the conversation ----------------------------------------------------------------------------------------------


async def test_the_turn_is_one_message_and_the_environment_gets_what_is_new() -> None:
    """Steps receive the sampled texts one by one; the conversation has the whole turn."""
    trajectory, _, environment = await searched(FIRST, SECOND, ANSWER + "<|im_end|>")
    assert environment.replies == [FIRST, SECOND, ANSWER]
    assert trajectory.messages == [QUESTION, Message("assistant", FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER)]


@pytest.mark.parametrize("history", ["append", "fork", "error"])
async def test_messages_follow_a_continued_turn(history: Literal["append", "fork", "error"]) -> None:
    """The bridge closes the turn as the template does, and no history counts as rewritten."""

    class Both(Searching):
        async def step(self, reply: Message) -> StepResult:
            if "<answer>" in reply.content and self.texts:
                self.texts.clear()
                return StepResult([Message("user", "Sure?")])
            return await super().step(reply)

    policy = script(FIRST, ANSWER + "<|im_end|>", "Yes.<|im_end|>")
    branches = await run_branches(Prompt([QUESTION], index=0), Both, policy, PLAIN, sampling=SAMPLING, history=history)
    (only,) = branches
    assert only.failure is None
    assert PLAIN.decode(policy.requests[2]) == PLAIN.render(only.messages[:3])
    assert [message.role for message in only.messages] == ["user", "assistant", "user", "assistant"]
    assert [call.continues for call in only.completions] == [False, True, False]


async def test_a_history_with_a_continued_turn_forks(small_tokenizer: Any, chat_template: Any) -> None:
    """Where the template strips thoughts, the new branch has the turn as context; sampled tokens are trained once."""
    renderer = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"), dialect="plain")

    class Both(Searching):
        async def step(self, reply: Message) -> StepResult:
            if "<answer>" in reply.content and self.texts:
                self.texts.clear()
                return StepResult([Message("user", "Sure?")])
            return await super().step(reply)

    first, second = (
        "<think>\nI look.\n</think>\n\n<search>2 + 2</search>",
        f"<think>\nSo.\n</think>\n\n{ANSWER}<|im_end|>",
    )
    texts = [first, second, "<think>\n\n</think>\n\nYes.<|im_end|>"]
    policy = ScriptedPolicy([renderer.encode(text) for text in texts])
    prompt = Prompt([QUESTION], index=0, group_index=0)
    branches = await run_branches(prompt, Both, policy, renderer, sampling=SAMPLING, history="fork")
    assert [branch.stop_reason for branch in branches] == [StopReason.FORKED, StopReason.TASK_COMPLETED]
    opening = renderer.decode(policy.requests[2])
    assert opening == renderer.render(branches[1].messages[:3])
    assert FOUND[0].strip() in opening
    assert "I look." not in opening
    trained = [token for branch in branches for token in branch.tokens[branch.mask].tolist()]
    assert trained == [token for text in texts for token in renderer.encode(text).tolist()]
    assert [check_sample(sample) for sample in trajectory_to_samples(branches, prompt, renderer.decode)] == [[], []]


async def test_a_turn_that_the_prompt_began_may_be_continued() -> None:
    """The first reply has the prompt's text, the later ones have not; the message has all of it."""
    prompt = Prompt([QUESTION, Message("assistant", "Well.")], index=0)
    environment = Searching()
    policy = script(" " + FIRST, ANSWER + "<|im_end|>")
    trajectory = await run_agent(prompt, lambda: environment, policy, PLAIN, sampling=SAMPLING)
    assert environment.replies == ["Well. " + FIRST, ANSWER]
    assert trajectory.messages[-1].content == "Well. " + FIRST + FOUND[0] + ANSWER


async def test_a_reply_with_tool_calls_is_answered_with_messages() -> None:
    """A parsed call needs its result; the failure says how calls become text."""
    call = '<search><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    environment = Searching()
    environment.tools = (Tool("look", "Look.", {"type": "object", "properties": {}}),)
    trajectory, _, _ = await searched(call, environment=environment, renderer=Renderer(TOKENIZER))
    assert trajectory.failure is not None
    assert "StepResult.continuation" in trajectory.failure.message
    assert 'dialect="plain"' in trajectory.failure.message


# -- 4. interruptions -------------------------------------------------------------------------------------------------


def plain_turn(turn: Turn) -> Turn:
    """The turn as the journal stores it."""
    return Turn(turn.number, turn.tokens.copy(), turn.mask.copy(), turn.logprobs.copy(),
                msgspec.msgpack.decode(msgspec.msgpack.encode(turn.fields)))  # fmt: skip


@pytest.mark.parametrize("after", [1, 2, 3])
async def test_an_interrupted_turn_goes_on(after: int) -> None:
    """Resumed after each continuation, and after the messages that follow: columns, messages and seeds are equal."""

    class Both(Searching):
        async def step(self, reply: Message) -> StepResult:
            if "<answer>" in reply.content and self.texts == []:
                self.texts = ["no more"]
                return StepResult([Message("user", "Sure?")])
            return await super().step(reply)

    texts = [FIRST, SECOND, ANSWER + "<|im_end|>", "Yes.<|im_end|>"]
    turns: list[Turn] = []

    async def play_logged(policy: ScriptedPolicy, log: TurnLog) -> Trajectory:
        sampling = attrs.evolve(SAMPLING, seed=5)
        return await run_agent(Prompt([QUESTION], index=0, turn_log=log), Both, policy, PLAIN, sampling=sampling)

    async def save(turn: Turn | None) -> None:
        assert turn is not None
        turns.append(plain_turn(turn))
        if turn.number == after:
            raise EndpointRefused("the process died here")

    async def ignore(turn: Turn | None) -> None:
        return None

    uninterrupted, rest = Seeds(*texts), Seeds(*texts[after:])
    whole = await play_logged(uninterrupted, TurnLog(ignore))
    await play_logged(script(*texts), TurnLog(save))
    resumed = await play_logged(rest, TurnLog(ignore, turns))
    assert resumed.failure is None
    assert rest.seeds == uninterrupted.seeds[after:]
    assert resumed.tokens.tolist() == whole.tokens.tolist()
    assert resumed.mask.tolist() == whole.mask.tolist()
    assert resumed.messages == whole.messages
    assert [call.continues for call in resumed.completions] == [False, True, True, False]
    assert resumed.metrics["turns_before_resume"] == after
    assert resumed.metrics["continuations"] == whole.metrics["continuations"] == 2


async def test_a_logged_turn_has_the_number_of_replies() -> None:
    """One for each assistant message, also for the one that the prompt began: later seeds depend on it."""
    turns: list[Turn] = []

    async def save(turn: Turn | None) -> None:
        assert turn is not None
        turns.append(turn)

    prompt = Prompt([QUESTION, Message("assistant", "Well.")], index=0, turn_log=TurnLog(save))
    await run_agent(prompt, Searching, script(" " + FIRST, SECOND, ANSWER), PLAIN, sampling=SAMPLING)
    assert [turn.fields["replies"] for turn in turns] == [1, 1]


def options_of(policy: ScriptedPolicy) -> dict[str, Any]:
    return {"endpoint": Endpoint(sampling=SAMPLING), "tokenizer": PLAIN, "policy": policy}


async def continued(
    cut: Sequence[str | Reply], rest: Sequence[str], left: Sequence[str], begun: Sequence[Message] = ()
) -> tuple[Sample, Searching]:
    """Play until the script ends or a reply is cut, store the sample, and continue it in another environment."""
    prompt = Prompt([QUESTION, *begun], index=0, group_index=0)
    first = await agent_rollout_to_sample(prompt, environment_cls=Searching, **options_of(script(*cut)))
    stored = Sample.from_dict(json.loads(json.dumps(first.to_dict())))
    environment = Searching(left)
    (whole,) = await continue_rollout(stored, environment_cls=lambda: environment, **options_of(script(*rest)))
    assert whole.failure is None
    assert check_sample(whole) == []
    return whole, environment


async def test_an_aborted_part_of_a_turn_is_continued() -> None:
    """The environment starts with the turn so far and receives the whole second part, not the first again."""
    half = PLAIN.encode(SECOND).tolist()
    whole, environment = await continued(
        [FIRST, Reply(half[:5], "abort")], [PLAIN.decode(half[5:]), ANSWER + "<|im_end|>"], FOUND[1:]
    )
    assert environment.opened == (QUESTION, Message("assistant", FIRST + FOUND[0]))
    assert environment.replies == [SECOND, ANSWER]
    text = FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER
    assert [message["content"] for message in whole.messages] == [QUESTION.content, text]
    assert [call.continues for call in whole.completions] == [False, True, False, True]


async def test_a_continuation_without_a_reply_is_asked_again() -> None:
    """The endpoint failed after the text was appended: the next request continues the same turn."""
    whole, environment = await continued([FIRST], [SECOND, ANSWER + "<|im_end|>"], FOUND[1:])
    assert environment.replies == [SECOND, ANSWER]
    assert whole.messages[-1]["content"] == FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER
    assert [call.continues for call in whole.completions] == [False, True, True]


@pytest.mark.parametrize("cut", [True, False], ids=["aborted", "without a reply"])
async def test_a_turn_that_the_prompt_began_goes_on_whole(cut: bool) -> None:
    """The environment starts with the prompt's part of the turn, and the message has it."""
    half = PLAIN.encode(SECOND).tolist()
    parts = [Reply(half[:5], "abort")] if cut else []
    rest = [PLAIN.decode(half[5:]) if cut else SECOND, ANSWER + "<|im_end|>"]
    more = Message("user", "Quickly.")
    whole, environment = await continued([" " + FIRST, *parts], rest, FOUND[1:], [more, Message("assistant", "Well.")])
    assert environment.opened == (QUESTION, more, Message("assistant", "Well. " + FIRST + FOUND[0]))
    assert environment.replies == [SECOND, ANSWER]
    assert whole.messages[-1]["content"] == "Well. " + FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER


async def test_an_unanswered_part_is_answered_by_the_environment() -> None:
    """A rollout that ended at its limit of turns inside a turn continues with the environment's answer."""
    prompt = Prompt([QUESTION], index=0, group_index=0)
    options = {"environment_cls": Searching, "max_turns": 2}
    sample = await agent_rollout_to_sample(prompt, **options, **options_of(script(FIRST, SECOND)))
    environment = Searching(FOUND[1:])
    (whole,) = await continue_rollout(
        sample, environment_cls=lambda: environment, **options_of(script(ANSWER + "<|im_end|>"))
    )
    assert environment.replies == [SECOND, ANSWER]
    assert whole.messages[-1]["content"] == FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER
    assert [call.continues for call in whole.completions] == [False, True, True]


async def test_a_user_message_may_follow_a_continued_turn_later() -> None:
    """A finished rollout whose last turn was continued takes another message, in all forms of storage."""
    prompt = Prompt([QUESTION], index=0, group_index=0)
    options = options_of(script(FIRST, ANSWER + "<|im_end|>"))
    sample = await agent_rollout_to_sample(prompt, environment_cls=Searching, **options)
    stored = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert stored.completions == sample.completions
    user = partial(SimulatedUser, _no_more)
    (whole,) = await continue_rollout(stored, "Sure?", environment_cls=user, **options_of(script("Yes.<|im_end|>")))
    assert [message["role"] for message in whole.messages] == ["user", "assistant", "user", "assistant"]
    assert check_sample(whole) == []


async def _no_more(conversation: Sequence[Message]) -> None:
    return None


async def test_a_recorded_continuation_is_replayed(tmp_path: Path) -> None:
    """The replay has no server and no environment, and gives the same tokens, mask and messages."""

    def no_environment() -> Any:
        raise AssertionError("a replay makes no environment")

    generate = partial(generate_rollout_batch, endpoint=Endpoint(sampling=SAMPLING), tokenizer=PLAIN)
    prompts = [Prompt([QUESTION], index=0, group_index=0)]
    with Journal(tmp_path / RECORDING) as journal:
        (sample,) = await recorded(generate, journal, Searching, script(FIRST, ANSWER + "<|im_end|>"))(prompts)
    replay = replayed_from(generate, Recording(tmp_path).tape, no_environment, {"version": "v", "model": "m"})
    (again,) = await replay(prompts)
    assert again.failure is None
    assert (again.tokens, again.loss_mask, again.messages) == (sample.tokens, sample.loss_mask, sample.messages)


async def test_an_ors_episode_refuses_a_continuation() -> None:
    """An ORS client has no assistant turn to continue; the failure names the field."""
    recipe = agent_recipe("search", Endpoint(), Searching, [{"prompt": "?"}])
    episode = HostedEpisode(recipe, Prompt([QUESTION], index=0), Limits())
    await episode.start()
    with pytest.raises(EnvironmentFailure, match=r"StepResult.continuation: got .*ORS has no text that goes on"):
        await episode.call(episode.reply_tool, {"message": FIRST})
    await episode.close()


async def test_a_scripted_play_shows_one_turn() -> None:
    """``rollouts.testing.play`` has the same conversation as an episode."""
    played = await play(Searching(), Prompt([QUESTION]), [FIRST, SECOND, ANSWER])
    assert played.messages == (QUESTION, Message("assistant", FIRST + FOUND[0] + SECOND + FOUND[1] + ANSWER))
    assert [step.continuation for step in played.steps] == [*FOUND, ""]


async def test_check_env_plays_continuations() -> None:
    """Such an environment is sound; one whose texts change from episode to episode is not deterministic."""
    count = iter(range(1000))

    class Talks(Searching):
        async def step(self, reply: Message) -> StepResult:
            return StepResult(continuation="\nGo on.\n")

        async def snapshot(self) -> Any:
            return None

        async def restore(self, prompt: Prompt, snapshot: Any) -> None:
            return None

    class Changes(Talks):
        async def step(self, reply: Message) -> StepResult:
            return StepResult(continuation=f"\n{next(count)}\n")

    options = CheckOptions(turns=3, stall_seconds=5.0)
    good = {finding.about: finding for finding in await examine(Talks, [Prompt("Go.")], options)}
    assert [about for about, finding in good.items() if finding.verdict == "bad"] == []
    assert "3 turns" in good["agent"].text
    bad = {finding.about: finding for finding in await examine(Changes, [Prompt("Go.")], options)}
    assert bad["determinism"].verdict == "bad"
