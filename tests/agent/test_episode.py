"""Episodes: append, fork or error where the history is rewritten, and limits that stop before useless work."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import attrs
import pytest

from rollouts.agent import run_agent, run_branches
from rollouts.agent.loop import begin_episode, seal
from rollouts.dtypes import Completion, Limits, Message, Prompt, SamplingParams, StopReason, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SimulatedUser, ToolEnvironment, tool
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import Status, agent_rollout_to_sample, trajectory_to_samples
from rollouts.trajectory import Trajectory

PROMPT = Prompt("What is 1 + 2?", index=4, group_index=2)


class Talk(ToolEnvironment):
    """One tool, and a user who sends two more messages."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.left = 2

    @tool
    def note(self, a: int) -> str:
        """Note a."""
        self.ran.append(a)
        return f"noted {a}"

    async def answer(self, reply: Message) -> Any:
        self.left -= 1
        if self.left < 0:
            return await super().answer(reply)
        return await SimulatedUser(self._say).step(reply)

    async def _say(self, conversation: Sequence[Message]) -> str:
        return f"And {self.left} more?"


def call(a: int) -> str:
    return f'<tool_call>\n{{"name": "note",  "arguments": {json.dumps({"a": a})}}}\n</tool_call>'


def thinking(number: int, text: str) -> str:
    return f"<think>\nthought {number}\n</think>\n\n{text}<|im_end|>"


REPLIES = [thinking(1, call(1)), thinking(2, "Three."), thinking(3, "Four."), thinking(4, "Five.")]


@pytest.fixture
def qwen3(small_tokenizer: Any, chat_template: Any) -> Renderer:
    """Strips the thoughts of earlier turns at each user message."""
    return Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"))


@pytest.fixture(scope="module")
def demo() -> Renderer:
    return renderer_for(load_tokenizer(DEMO_MODEL))


async def branches_of(
    renderer: Renderer, texts: Sequence[str], history: Any, environment_cls: Any = Talk, **options: Any
) -> tuple[list[Trajectory], ScriptedPolicy]:
    ids = [renderer.encode(text).tolist() for text in texts]
    policy = ScriptedPolicy(ids)
    options = {"sampling": SamplingParams(max_new_tokens=500), **options}
    return await run_branches(PROMPT, environment_cls, policy, renderer, history=history, **options), policy


# -- history ----------------------------------------------------------------------------------------------------------


async def test_append_keeps_the_ids(qwen3: Renderer) -> None:
    """One sequence with every thought, also with thoughts that the template would strip."""
    (only,), policy = await branches_of(qwen3, REPLIES, "append")
    text = qwen3.decode(only.tokens)
    assert all(f"thought {number}" in text for number in range(1, 5))
    assert only.mask.sum() == sum(len(qwen3.encode(text)) for text in REPLIES)
    assert all(list(sent) == only.tokens[: len(sent)].tolist() for sent in policy.requests)
    assert "forks" not in only.metrics


async def test_a_fork_opens_where_the_template_rewrites_and_not_in_the_tool_loop(qwen3: Renderer) -> None:
    """A tool call, then two user messages: three branches, each opened with the template's own rendering."""
    branches, policy = await branches_of(qwen3, REPLIES, "fork")
    assert [branch.stop_reason for branch in branches] == ["forked", "forked", "task_completed"]
    assert [len(branch.completions) for branch in branches] == [2, 1, 1]
    for branch, before in zip(branches[1:], branches[:-1], strict=True):
        opening = branch.tokens[: branch.completions[0].start]
        shown = [*before.messages, branch.messages[len(before.messages)]]
        assert qwen3.decode(opening) == qwen3.render(shown, Talk().tools)
        assert "thought" not in qwen3.decode(opening)
        assert not branch.mask[: branch.completions[0].start].any()
    requests = iter(policy.requests)
    for branch in branches:
        for one in branch.completions:
            assert list(next(requests)) == branch.tokens[: one.start].tolist()
    sessions = [session for session, _ in policy.sessions]
    assert sessions[0] == sessions[1]
    assert len(set(sessions)) == 3, "the requests of a session extend each other"


async def test_each_sampled_token_is_trained_once_over_all_branches(qwen3: Renderer) -> None:
    """Law 3: the trained tokens of all branches, in order, are the sampled tokens."""
    branches, _ = await branches_of(qwen3, REPLIES, "fork")
    trained = [token for branch in branches for token in branch.tokens[branch.mask].tolist()]
    assert trained == [token for text in REPLIES for token in qwen3.encode(text).tolist()]
    samples = trajectory_to_samples(branches, PROMPT, qwen3.decode)
    assert [check_sample(sample) for sample in samples] == [[], [], []]
    assert {sample.rollout_id for sample in samples} == {4}
    assert [sample.history for sample in samples] == ["fork"] * 3
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 3


async def test_forks_and_duplicated_context_are_counted(qwen3: Renderer) -> None:
    """``duplicated_tokens`` counts the prompt tokens that an earlier branch contains too."""
    branches, _ = await branches_of(qwen3, REPLIES, "fork")
    assert [branch.metrics.get("forks", 0) for branch in branches] == [0, 1, 1]
    for branch, before in zip(branches[1:], branches[:-1], strict=True):
        new = branch.messages[len(before.messages)]
        added = len(qwen3.bridge(before.messages, [new], tools=Talk().tools, tail=[]))
        assert branch.metrics["duplicated_tokens"] == branch.completions[0].start - added


async def test_a_stable_conversation_never_forks(qwen3: Renderer) -> None:
    """The model does not think, and writes its call with other white space: the template rewrites nothing."""
    texts = [call(1) + "<|im_end|>", "Three.<|im_end|>", "Four.<|im_end|>", "Five.<|im_end|>"]
    (only,), _ = await branches_of(qwen3, texts, "fork")
    (error,), _ = await branches_of(qwen3, texts, "error")
    assert only.tokens.tolist() == error.tokens.tolist()
    assert error.stop_reason is StopReason.TASK_COMPLETED


async def test_error_fails_the_rollout_where_the_history_is_rewritten(qwen3: Renderer) -> None:
    """The failure shows the rewritten text; the sampled tokens are stored."""
    (only,), _ = await branches_of(qwen3, REPLIES, "error")
    assert only.stop_reason is StopReason.FAILED
    assert only.failure is not None
    assert only.failure.kind == "HistoryRewritten"
    assert "history rewritten: " in only.failure.message
    assert len(only.completions) == 2


async def test_a_lost_thought_is_noticed_where_its_words_stand_in_the_prompt(qwen3: Renderer) -> None:
    """A reply is looked for behind its own prompt, the first one too."""
    reply = "<think>\nWhat is 1 + 2?\n</think>\n\nThree.<|im_end|>"
    (only,), _ = await branches_of(qwen3, [reply, *REPLIES], "error")
    assert (only.stop_reason, len(only.completions)) == (StopReason.FAILED, 1)


async def test_a_template_that_drops_thoughts_at_once_forks_at_each_step(
    small_tokenizer: Any, chat_template: Any
) -> None:
    """QwQ: the prompt opens a thinking block, and the history contains none."""
    renderer = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-QwQ-32B"))
    branches, _ = await branches_of(renderer, [text.removeprefix("<think>\n") for text in REPLIES], "fork")
    assert [len(branch.completions) for branch in branches] == [1, 1, 1, 1]
    assert sum(int(branch.mask.sum()) for branch in branches) == sum(
        len(renderer.encode(text.removeprefix("<think>\n"))) for text in REPLIES
    )


async def test_a_branch_without_a_completion_is_removed(qwen3: Renderer) -> None:
    """The token limit is reached right after a fork: the branch before the fork is the last, and no fork counts.

    The rollout keeps all that was counted after the fork.
    """

    class Closing(Talk):
        async def close(self) -> None:
            raise RuntimeError("boom")

    sampled = sum(len(qwen3.encode(text)) for text in REPLIES[:2])
    limits = Limits(max_sampled_tokens=sampled)
    (only,), _ = await branches_of(qwen3, REPLIES, "fork", Closing, limits=limits)
    assert only.stop_reason is StopReason.MAX_TOKENS
    assert only.metrics["close_failures"] == 1
    assert not {"forks", "duplicated_tokens"} & only.metrics.keys()
    assert only.messages[-1].content == "And 1 more?"


async def test_the_times_of_a_removed_branch_are_kept(qwen3: Renderer) -> None:
    """E.g. of a snapshot, which a conversation of several agents takes after a fork."""
    sampling = SamplingParams(max_new_tokens=500)
    episode = await begin_episode(PROMPT, ScriptedPolicy([]), qwen3, sampling=sampling, history="fork")
    (first,), _ = await branches_of(qwen3, REPLIES[1:], "append")
    spans = list(first.times)
    played, empty = Trajectory("fork"), Trajectory("fork")
    played.completions, played.times = first.completions, first.times
    empty.times.add("environment", "snapshot", 0.0, 2.0)
    episode.branches = [played, empty]
    seal(episode, episode.branches)
    assert list(played.times) == [*spans, ("environment", "snapshot", 0.0, 2.0)]


async def test_all_branches_share_the_rewards_and_the_status(qwen3: Renderer) -> None:
    """Each branch has the sum of all step rewards, and the status of the whole rollout."""

    class Rewarded(Talk):
        async def answer(self, reply: Message) -> Any:
            step = await super().answer(reply)
            return type(step)(step.messages, done=step.done, reward=0.25)

    branches, _ = await branches_of(qwen3, REPLIES, "fork", Rewarded, limits=Limits(max_turns=3))
    samples = trajectory_to_samples(branches, PROMPT, qwen3.decode)
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert [sample.step_rewards for sample in samples] == [[0.25], [0.25]]
    assert [sample.status for sample in samples] == [Status.TRUNCATED] * 2


async def test_one_sample_cannot_hold_a_fork(demo: Renderer) -> None:
    """``fork`` is refused before anything is sampled, as is an unknown value."""
    for history in ("fork", "forget"):
        with pytest.raises(ConfigError, match="history"):
            await agent_rollout_to_sample(
                "q", environment_cls=Talk, endpoint=None, tokenizer=demo, policy=ScriptedPolicy([]), history=history
            )


# -- limits -----------------------------------------------------------------------------------------------------------


async def play(demo: Renderer, texts: Sequence[str], **limits: Any) -> tuple[Trajectory, list[int]]:
    world = Talk()
    policy = ScriptedPolicy([demo.encode(text).tolist() for text in texts])
    sampling = SamplingParams(max_new_tokens=limits.pop("max_new_tokens", 500))
    trajectory = await run_agent(PROMPT, lambda: world, policy, demo, sampling=sampling, limits=Limits(**limits))
    return trajectory, world.ran


async def test_a_reply_with_too_many_calls_at_once_runs_none(demo: Renderer) -> None:
    """The reply is stored, and the episode ends."""
    texts = [call(1) + "<|im_end|>", call(2) + call(3) + "<|im_end|>"]
    trajectory, notes = await play(demo, texts, max_parallel_calls=1)
    assert trajectory.stop_reason is StopReason.MAX_TOOL_CALLS
    assert (notes, len(trajectory.completions)) == ([1], 2)


async def test_the_tokens_of_an_episode_are_limited_over_all_turns(demo: Renderer) -> None:
    """The last reply may use the remaining tokens, and is cut there."""
    first = call(1) + "<|im_end|>"
    limit = len(demo.encode(first)) + 3
    trajectory, notes = await play(demo, [first, "a long answer to all<|im_end|>"], max_sampled_tokens=limit)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert (int(trajectory.mask.sum()), notes) == (limit, [1])


@pytest.mark.parametrize("limit", ["max_tokens", "max_sampled_tokens"])
async def test_a_call_whose_result_no_reply_could_answer_does_not_run(demo: Renderer, limit: str) -> None:
    """The reply ends exactly at the limit."""
    first = call(1) + "<|im_end|>"
    opening = demo.opening(PROMPT.messages, Talk().tools)
    room = len(demo.encode(first)) + (len(opening) if limit == "max_tokens" else 0)
    trajectory, notes = await play(demo, [first], **{limit: room})
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert notes == []


async def test_a_duplicate_call_id_is_replaced_and_counted(small_tokenizer: Any) -> None:
    """Ids must be unique to match results to calls; the first call keeps its id."""
    marks = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
    found = small_tokenizer("qwen3", *marks, "<|tool_call_argument_begin|>")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(found, chat_template=source)
    one = '<|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    (trajectory,), _ = await branches_of(renderer, [one + one + "<|im_end|>", "ok<|im_end|>"], "append", Talk,
                                         limits=Limits(max_turns=2))  # fmt: skip
    calls = trajectory.messages[1].tool_calls
    assert [each.id for each in calls] == ["functions.note:0", "call00001"]
    assert trajectory.metrics["duplicate_call_ids"] == 1
    assert [message.tool_call_id for message in trajectory.messages[2:4]] == ["functions.note:0", "call00001"]


async def test_an_aborted_reply_is_aborted_with_its_tokens(demo: Renderer) -> None:
    """An abort is not a normal end, even if the text looks complete."""
    policy = ScriptedPolicy([Reply(demo.encode("Three.").tolist(), "abort")])
    sampling = SamplingParams(max_new_tokens=50)
    run = partial(run_branches, sampling=sampling, history="append")
    branches = await run(PROMPT, Talk, policy, demo)
    (sample,) = trajectory_to_samples(branches, PROMPT, demo.decode)
    assert (sample.status, sample.stop_reason, sample.response) == (Status.ABORTED, StopReason.ABORTED, "Three.")


# -- what is tokenised ------------------------------------------------------------------------------------------------


async def test_each_request_names_the_version_of_the_last_sampled_token(demo: Renderer) -> None:
    """Text of the environment comes between; the first request has no such token."""
    asked: list[str] = []

    class Watched(ScriptedPolicy):
        async def complete(self, request: CompletionRequest) -> Completion:
            asked.append(request.version)
            return await super().complete(request)

    first, second, third = (demo.encode(text).tolist() for text in (call(1), call(2), "Done.<|im_end|>"))
    versions = [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, len(second))]
    policy = Watched(
        [Reply(first, versions=[VersionSpan("v1", 0, len(first))]), Reply(second, versions=versions), third]
    )
    await run_agent(PROMPT, Talk, policy, demo, sampling=SamplingParams(max_new_tokens=500), limits=Limits(max_turns=3))
    assert asked == ["", "v1", "v2"]


async def test_only_new_text_is_tokenised(small_tokenizer: Any, chat_template: Any) -> None:
    """Over an episode, only the opening and the bridges are encoded."""
    renderer = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"))
    ids = [renderer.encode(text).tolist() for text in REPLIES]
    before = renderer.encoded_tokens
    trajectory = await run_agent(
        PROMPT, Talk, ScriptedPolicy(ids), renderer, sampling=SamplingParams(max_new_tokens=99)
    )
    stops_left_out = len(trajectory.completions) - 1  # each bridge begins with the stop token that was sampled
    assert renderer.encoded_tokens - before == int((~trajectory.mask).sum()) + stops_left_out


async def test_long_text_is_rendered_in_a_thread(demo: Renderer) -> None:
    """Long text is not rendered on the event loop; short text needs no thread."""
    threads: list[bool] = []

    class Watched(Renderer):
        def bridge(self, *given: Any, **options: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().bridge(*given, **options)

    async def user(conversation: Sequence[Message]) -> str:
        return "word " * 2000 if len(conversation) == 2 else "word"

    renderer = Watched(load_tokenizer(DEMO_MODEL))
    policy = ScriptedPolicy([renderer.encode("ok<|im_end|>").tolist()] * 3)
    sampling = SamplingParams(max_new_tokens=99)
    await run_agent(
        PROMPT, partial(SimulatedUser, user), policy, renderer, sampling=sampling, limits=Limits(max_turns=3)
    )
    assert threads == [False, True]


class Paused(ScriptedPolicy):
    """A policy whose calls wait before they are sent; ``seconds`` is the time of the request that was answered."""

    seconds = 0.0

    async def complete(self, request: CompletionRequest) -> Completion:
        await anyio.sleep(0.05)
        return attrs.evolve(await super().complete(request), seconds=self.seconds)


@pytest.mark.parametrize(
    ("seconds", "activities"),
    [
        pytest.param(0.001, ["environment", "queued", "generating", "environment"], id="said"),
        pytest.param(0.0, ["environment", "generating", "environment"], id="not said"),
    ],
)
async def test_a_pause_before_a_request_is_not_time_of_the_server(seconds: float, activities: list[str]) -> None:
    """The time that the policy does not count as its request is a wait; without its seconds nothing is guessed."""
    demo = renderer_for(str(DEMO_MODEL))
    policy = Paused([demo.encode("ok<|im_end|>").tolist()])
    policy.seconds = seconds
    trajectory = await run_agent(PROMPT, Talk, policy, demo, sampling=SamplingParams(max_new_tokens=9))
    assert [span.activity for span in trajectory.times] == activities
    waiting = trajectory.times.to_list()[1]
    assert waiting[3] >= 0.04
    began = [span.began for span in trajectory.times]
    assert began == sorted(began)
