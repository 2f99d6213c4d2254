"""Continuation of a stored rollout from its ids, in any process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rollouts.dtypes import Endpoint, FinishReason, Limits, Message, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SimulatedUser
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.rewards.teacher_top import set_top
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import Prompt, Sample, Status, agent_rollout_to_sample, continue_rollout

ENDPOINT = Endpoint(sampling=SamplingParams(max_new_tokens=200))
ADD = '<tool_call>\n{"name": "add",  "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(load_tokenizer(DEMO_MODEL))


def through_disk(sample: Sample) -> Sample:
    """The sample as another process would read it."""
    return Sample.from_dict(json.loads(json.dumps(sample.to_dict())))


def spoken(renderer: Renderer, *texts: str | Reply) -> ScriptedPolicy:
    return ScriptedPolicy([text if isinstance(text, Reply) else renderer.encode(text).tolist() for text in texts])


async def played(renderer: Renderer, policy: ScriptedPolicy, **options: Any) -> Sample:
    prompt = Prompt("1 + 2?", label="3", metadata={"n": 1}, group_index=1, index=5)
    options = {"environment_cls": CalculatorEnvironment, **options}
    return through_disk(
        await agent_rollout_to_sample(prompt, endpoint=ENDPOINT, tokenizer=renderer, policy=policy, **options)
    )


async def continue_last(
    renderer: Renderer, sample: Sample, policy: ScriptedPolicy, *new: Any, **options: Any
) -> Sample:
    (continued,) = await continue_rollout(sample, *new, endpoint=ENDPOINT, tokenizer=renderer, policy=policy, **options)
    return continued


def assert_extends(continued: Sample, sample: Sample, policy: ScriptedPolicy) -> None:
    """Check that the continued sample, and each request, begins with the stored columns."""
    width = len(sample)
    assert continued.tokens[:width] == sample.tokens
    assert continued.loss_mask[:width] == sample.loss_mask
    assert continued.rollout_log_probs[:width] == sample.rollout_log_probs
    assert all(list(sent) == continued.tokens[: len(sent)] and len(sent) >= width for sent in policy.requests)
    assert check_sample(continued) == []


async def test_a_finished_rollout_continues_with_a_user_message(renderer: Renderer) -> None:
    """The request extends the stored ids; trained tokens stay trained; index, label and metadata stay."""
    sample = await played(renderer, spoken(renderer, ADD, "The answer is 3.<|im_end|>"))
    policy = spoken(renderer, "Sure.<|im_end|>")
    continued = await continue_last(renderer, sample, policy, "Are you sure?")
    assert_extends(continued, sample, policy)
    between = renderer.decode(continued.tokens[len(sample) : continued.completions[-1].start])
    assert between == "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
    assert [message["role"] for message in continued.messages[-3:]] == ["assistant", "user", "assistant"]
    assert (continued.index, continued.group_index, continued.label, continued.metadata) == (5, 1, "3", {"n": 1})
    assert continued.status is Status.COMPLETED


async def test_the_continued_rollout_names_no_teacher(renderer: Renderer) -> None:
    """A teacher's scores are of the old tokens alone: their column and their rows in the metadata stay behind."""
    sample = await played(renderer, spoken(renderer, ADD, "The answer is 3.<|im_end|>"))
    sample.teacher_log_probs = [-0.5] * len(sample)
    set_top(sample, "http://teacher/generate", None)
    continued = await continue_last(renderer, sample, spoken(renderer, "Sure.<|im_end|>"), "Are you sure?")
    assert continued.metadata == {"n": 1}
    assert continued.teacher_log_probs is None
    assert sample.metadata == {"n": 1, "scored_by": {"url": "http://teacher/generate"}}


async def test_tool_results_may_come_from_elsewhere(renderer: Renderer) -> None:
    """A rollout that ended at a tool call continues with a result from another process."""
    sample = await played(renderer, spoken(renderer, ADD), limits=Limits(max_turns=1))
    assert sample.status is Status.TRUNCATED
    result = Message("tool", "3", tool_call_id=sample.messages[-1]["tool_calls"][0]["id"], name="add")
    policy = spoken(renderer, "The answer is 3.<|im_end|>")
    continued = await continue_last(renderer, sample, policy, [result], environment_cls=CalculatorEnvironment)
    assert_extends(continued, sample, policy)
    assert "<tool_response>\n3\n</tool_response>" in renderer.decode(continued.tokens[len(sample) :])


async def test_without_messages_the_environment_answers_the_last_reply(renderer: Renderer) -> None:
    """A tool call that a limit prevented runs now, with its id; a malformed call gets its error."""
    broken = "<tool_call>\n{oops\n</tool_call>" + ADD
    sample = await played(renderer, spoken(renderer, broken), limits=Limits(max_turns=1))
    policy = spoken(renderer, "The answer is 3.<|im_end|>")
    continued = await continue_last(renderer, sample, policy, environment_cls=CalculatorEnvironment)
    assert_extends(continued, sample, policy)
    results = [message for message in continued.messages if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in results] == ["call00000", "call00001"]
    assert results[0]["content"].startswith("Error: ")
    assert results[1]["content"] == "3"
    assert continued.messages[2] == sample.messages[2]


async def test_an_aborted_reply_continues_where_it_ends(renderer: Renderer) -> None:
    """The same ids are sent, the reply is one message, and each part keeps its completion."""
    whole = renderer.encode(ADD).tolist()
    sample = await played(renderer, spoken(renderer, Reply(whole[:7], "abort")))
    assert sample.status is Status.ABORTED
    policy = spoken(renderer, Reply(whole[7:]), "The answer is 3.<|im_end|>")
    continued = await continue_last(renderer, sample, policy, environment_cls=CalculatorEnvironment)
    assert_extends(continued, sample, policy)
    assert len(policy.requests[0]) == len(sample)
    assert [message["role"] for message in continued.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert continued.messages[3]["content"] == "3"
    assert len(continued.completions) == 3
    again = await continue_last(renderer, through_disk(continued), spoken(renderer, "Yes.<|im_end|>"), "Sure?")
    assert check_sample(again) == []


async def test_a_cut_reply_that_is_answered_gets_an_untrained_stop_token(renderer: Renderer) -> None:
    """A stop token that the policy did not sample is context."""
    sample = await played(
        renderer, spoken(renderer, "a very long answer<|im_end|>"), sampling=SamplingParams(max_new_tokens=3)
    )
    continued = await continue_last(renderer, sample, spoken(renderer, "ok<|im_end|>"), "Shorter!")
    assert continued.tokens[len(sample)] in renderer.stop_token_ids
    assert continued.loss_mask[len(sample)] == 0


async def test_a_request_without_a_reply_is_sent_again(renderer: Renderer) -> None:
    """The endpoint went away after the tool had run: its result is among the tokens, and stays there."""
    replies = iter([renderer.encode(ADD).tolist()])

    def script(tokens: Any) -> list[int]:
        for reply in replies:
            return reply
        raise EndpointUnavailable("gone")

    sample = await played(renderer, ScriptedPolicy(script))
    assert sample.status is Status.FAILED
    policy = spoken(renderer, "The answer is 3.<|im_end|>")
    continued = await continue_last(renderer, sample, policy, environment_cls=CalculatorEnvironment)
    assert_extends(continued, sample, policy)
    assert len(policy.requests[0]) == len(sample)
    assert continued.status is Status.COMPLETED
    with pytest.raises(ConfigError, match="the last request has no reply yet"):
        await continue_last(renderer, sample, policy, "Well?")


async def test_a_simulated_user_is_an_async_function(renderer: Renderer) -> None:
    """The user function receives the whole conversation, and is called until it ends it."""
    sample = await played(renderer, spoken(renderer, "Hello.<|im_end|>"))
    heard: list[list[str]] = []

    async def user(conversation: Sequence[Message]) -> str | None:
        heard.append([message.content for message in conversation if message.role != "system"])
        return f"And {len(heard)}?" if len(heard) < 3 else None

    policy = spoken(renderer, "One.<|im_end|>", "Two.<|im_end|>")
    environment = partial(SimulatedUser, user, tools=CalculatorEnvironment().tools)
    continued = await continue_last(renderer, sample, policy, environment_cls=environment)
    assert_extends(continued, sample, policy)
    assert heard[0] == ["1 + 2?", "Hello."]
    assert heard[-1] == ["1 + 2?", "Hello.", "And 1?", "One.", "And 2?", "Two."]


async def test_a_past_that_was_trained_already_is_context(renderer: Renderer) -> None:
    """Law 3 over two samples: only newly sampled tokens are trained."""
    sample = await played(renderer, spoken(renderer, ADD, "The answer is 3.<|im_end|>"))
    continued = await continue_last(renderer, sample, spoken(renderer, "Sure.<|im_end|>"), "Sure?", train_past=False)
    assert continued.tokens[: len(sample)] == sample.tokens
    assert sum(continued.loss_mask) == len(renderer.encode("Sure.<|im_end|>"))
    assert sum(continued.loss_mask[: len(sample)]) == 0
    assert len(continued.completions) == 1
    assert check_sample(continued) == []


async def test_step_rewards_and_counters_are_continued(renderer: Renderer) -> None:
    """Rewards and counters of the past are added to."""
    sample = await played(renderer, spoken(renderer, ADD), limits=Limits(max_turns=1))
    sample.step_rewards = [0.5]
    continued = await continue_last(
        renderer, sample, spoken(renderer, ADD, "3<|im_end|>"), environment_cls=CalculatorEnvironment
    )
    assert continued.metrics["tool_calls"] == 2
    assert (continued.reward, continued.step_rewards, continued.step_completions) == (0.5, [0.5], [-1])


async def test_a_sample_that_breaks_a_law_is_not_continued(renderer: Renderer) -> None:
    """A token was changed on disk, or there is nothing at all."""
    sample = await played(renderer, spoken(renderer, "Hello.<|im_end|>"))
    sample.tokens[3] += 1
    with pytest.raises(ConfigError, match="law 1"):
        await continue_last(renderer, sample, spoken(renderer), "Well?")
    with pytest.raises(ConfigError, match="sample"):
        await continue_last(renderer, Sample(), spoken(renderer), "Well?")


async def test_an_earlier_reply_that_the_template_rewrites_forks_too(small_tokenizer: Any, chat_template: Any) -> None:
    """A new question drops the thought of an earlier reply; the last one has none, so only the whole past shows it."""
    renderer = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    replies = [f"<think>\nhm\n</think>\n\n{call}<|im_end|>", "Three.<|im_end|>"]
    sample = await played(renderer, spoken(renderer, *replies), history="error")
    sample.history = "fork"
    options = {"endpoint": ENDPOINT, "tokenizer": renderer, "policy": spoken(renderer, replies[1])}
    branches = await continue_rollout(sample, "Sure?", environment_cls=CalculatorEnvironment, **options)
    assert [branch.stop_reason for branch in branches] == ["forked", "task_completed"]
    assert "hm" not in renderer.decode(branches[1].tokens[: branches[1].completions[0].start])


async def test_a_forked_rollout_continues_with_its_history_option(small_tokenizer: Any, chat_template: Any) -> None:
    """The sample stores its ``history`` option: a rewrite of the past opens a branch."""
    renderer = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"))
    reply = "<think>\nhm\n</think>\n\nThree.<|im_end|>"
    sample = await played(renderer, spoken(renderer, reply), history="error")
    sample.history = "fork"
    options = {"endpoint": ENDPOINT, "tokenizer": renderer, "policy": spoken(renderer, reply)}
    first, second = await continue_rollout(sample, "Sure?", environment_cls=CalculatorEnvironment, **options)
    assert (first.tokens, first.stop_reason, first.history) == (sample.tokens, "forked", "fork")
    assert sum(second.loss_mask) == sum(first.loss_mask)
    assert "hm" not in renderer.decode(second.tokens[: second.completions[0].start])


async def test_an_aborted_reply_has_one_budget_and_one_minimum(renderer: Renderer) -> None:
    """The next request gets the rest of both limits, and the reply ends at a stop string that spans the two; a reply
    that its own limit cut has its minimum, and a whole budget again."""
    whole = renderer.encode("The answer is 42. The answer is 43.<|im_end|>").tolist()
    sampling = SamplingParams(max_new_tokens=60, min_new_tokens=4, stop="answer is 42", seed=1)
    sent: list[SamplingParams] = []

    class Watched(ScriptedPolicy):
        async def complete(self, request: CompletionRequest) -> Any:
            sent.append(request.sampling)
            return await super().complete(request)

    cuts: tuple[tuple[int, FinishReason, int], ...] = ((2, "abort", 2), (3, "abort", 3), (3, "length", 0))
    for split, reason, spent in cuts:
        cut = await played(renderer, spoken(renderer, Reply(whole[:split], reason)), sampling=sampling)
        continued = await continue_last(renderer, cut, Watched([Reply(whole[split:])]), sampling=sampling)
        assert (sent[-1].max_new_tokens, sent[-1].min_new_tokens) == (60 - spent, 4 - split)
        assert renderer.decode(continued.tokens[continued.completions[0].start :]) == "The answer is 42"
        assert continued.completions[-1].finish_reason == "stop"
        assert check_sample(continued) == []
    assert sent[0].seed != sent[1].seed
