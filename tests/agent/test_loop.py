"""The agent loop: the order of turns, the ends of an episode, and failures of environment and endpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import anyio
import numpy as np
import PIL.Image
import pytest

from rollouts.agent import run_agent
from rollouts.concurrency.boundary import waits
from rollouts.concurrency.times import now
from rollouts.dtypes import Image, Limits, Message, Prompt, SamplingParams, StopReason, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment, StepResult, ToolEnvironment, tool
from rollouts.errors import ConfigError, ContextOverflow, EndpointUnavailable, TokenMismatchError
from rollouts.inference.base import CompletionRequest
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.trajectory import Trajectory


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(load_tokenizer(DEMO_MODEL))


@pytest.fixture(scope="module")
def ids() -> Any:
    tokenizer = load_tokenizer(DEMO_MODEL)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(
    renderer: Renderer,
    replies: Iterable[Any],
    environment_cls: Any = CalculatorEnvironment,
    *,
    max_new_tokens: int = 1000,
    **options: Any,
) -> Trajectory:
    policy = ScriptedPolicy(replies)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return await run_agent(Prompt("1 + 2?", index=0), environment_cls, policy, renderer, sampling=sampling, **options)


async def test_tools_run_until_the_answer(renderer: Renderer, ids: Any) -> None:
    """Calls are executed, their results shown in order, and a reply without a call ends the episode."""
    both = call("add", a=1, b=2) + "\n" + call("multiply", a=3, b=3) + "<|im_end|>"
    trajectory = await play(renderer, [ids(both), ids("The answer is 3.<|im_end|>")])
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    roles = [message.role for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["3", "9"]
    assert trajectory.metrics["tool_calls"] == 2


async def test_calls_that_cannot_run_are_answered_in_order(renderer: Renderer, ids: Any) -> None:
    """A malformed call and an unknown tool get an error message each, between the results of the valid calls."""
    text = "\n".join([call("add", a=1, b=2), "<tool_call>\n{oops\n</tool_call>", call("fly"), call("add", a=2, b=2)])
    trajectory = await play(renderer, [ids(text + "<|im_end|>"), ids("ok<|im_end|>")])
    results = [message.content for message in trajectory.messages if message.role == "tool"]
    assert results[0] == "3"
    assert results[1].startswith("Error: ")
    assert "no tool 'fly'; the tools are: add, subtract, multiply, divide" in results[2]
    assert results[3] == "4"
    assert trajectory.metrics["malformed_tool_calls"] == 1
    assert trajectory.metrics["unknown_tool_calls"] == 1


async def test_further_messages_follow_the_results_of_the_calls(renderer: Renderer, ids: Any) -> None:
    """Results and errors have the order of the calls, not of the step; other messages follow in their order. A call may
    have two results."""

    class Talkative(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            first, last = reply.tool_calls
            said = [Message("user", "one"), Message("tool", "last", tool_call_id=last.id), Message("user", "two")]
            firsts = [Message("tool", text, tool_call_id=first.id) for text in ("first", "first again")]
            return StepResult([*said, *firsts, Message("user", "three")])

    text = "\n".join([call("add", a=1, b=2), call("fly"), call("add", a=2, b=2)])
    trajectory = await play(renderer, [ids(text + "<|im_end|>"), ids("ok<|im_end|>")], Talkative, limits=Limits(2))
    shown = [message.content for message in trajectory.messages[3:-1]]
    assert shown[2].startswith("Error: there is no tool 'fly'")
    assert [*shown[:2], *shown[3:]] == ["first", "first again", "last", "one", "two", "three"]


async def test_an_environment_without_tools_tells_the_model_so(renderer: Renderer, ids: Any) -> None:
    """A tool call where there are no tools goes back as a user message, and is counted."""
    replies = [ids(call("add", a=1, b=2) + "<|im_end|>"), ids("3<|im_end|>")]
    trajectory = await play(renderer, replies, SingleTurnEnvironment)
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert "there is no tool 'add'; there are no tools here" in trajectory.messages[2].content
    assert trajectory.metrics["unknown_tool_calls"] == 1


async def test_the_requests_of_an_episode_share_a_session_that_no_other_has(renderer: Renderer, ids: Any) -> None:
    """A server that routes by it finds the tokens of the episode's last request cached."""
    found = []
    for _ in range(2):
        policy = ScriptedPolicy([ids(call("add", a=1, b=2) + "<|im_end|>"), ids("3<|im_end|>")])
        await run_agent(Prompt("?", index=0), CalculatorEnvironment, policy, renderer, sampling=SamplingParams())
        found.append([session for session, _ in policy.sessions])
    assert all(len(set(sessions)) == 1 and sessions[0] for sessions in found)
    assert found[0][0] != found[1][0]


async def test_the_seconds_of_the_environment_are_those_of_its_calls(renderer: Renderer, ids: Any) -> None:
    """Its metric is the sum over start and steps, each of which is in the times."""
    began = now()
    trajectory = await play(renderer, [ids(call("add", a=1, b=2) + "<|im_end|>"), ids("3<|im_end|>")])
    wall = now() - began
    spans = [span for span in trajectory.times if span.activity == "environment"]
    assert [span.name for span in spans] == [f"CalculatorEnvironment.{name}" for name in ("start", "step", "step")]
    assert trajectory.metrics["environment_seconds"] == pytest.approx(sum(span.seconds for span in spans), abs=1e-3)
    assert 0 < trajectory.metrics["environment_seconds"] < wall


async def test_a_wait_for_a_step_names_the_tools_that_run(renderer: Renderer, ids: Any) -> None:
    """Each once; a step without calls, or without tools, has the name of the method."""
    shown: list[str] = []

    class Nosy(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            shown.extend(wait.shown for wait in waits())
            return await super().step(reply)

    both = "\n".join([call("add", a=1, b=2), call("multiply", a=1, b=2), call("add", a=3, b=4), call("fly")])
    await play(renderer, [ids(both + "<|im_end|>"), ids("3<|im_end|>")], Nosy)
    assert shown == ["tool add, multiply", "Nosy.step"]


async def test_call_ids_are_unique_over_the_episode(renderer: Renderer, ids: Any) -> None:
    """Each call is answered, also when some calls never ran."""
    text = ids(call("fly") + "\n" + call("add", a=1, b=2) + "<|im_end|>")
    trajectory = await play(renderer, [text, text, ids("ok<|im_end|>")])
    call_ids = [call.id for message in trajectory.messages for call in message.tool_calls]
    assert len(call_ids) == len(set(call_ids)) == 4


async def test_the_tools_of_the_last_turn_do_not_run(renderer: Renderer, ids: Any) -> None:
    """The turn limit stops before a step whose result is never shown."""
    ran: list[float] = []

    class Counting(ToolEnvironment):
        @tool
        def note(self, a: float) -> str:
            """Note a."""
            ran.append(a)
            return "noted"

    text = ids(call("note", a=1) + "<|im_end|>")
    trajectory = await play(renderer, [text] * 5, Counting, limits=Limits(max_turns=3))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.completions) == 3
    assert len(ran) == 2
    assert trajectory.mask[-1], "nothing is rendered after the last reply"


async def test_a_reply_that_would_pass_the_limit_of_tool_calls_does_not_run(renderer: Renderer, ids: Any) -> None:
    """The reply is stored, and the episode ends."""
    one, two = call("add", a=1, b=1) + "<|im_end|>", call("add", a=1, b=1) + call("add", a=2, b=2) + "<|im_end|>"
    trajectory = await play(renderer, [ids(one), ids(two)], limits=Limits(max_tool_calls=2))
    assert trajectory.stop_reason is StopReason.MAX_TOOL_CALLS
    assert sum(message.role == "tool" for message in trajectory.messages) == 1


async def test_a_cut_reply_ends_the_episode(renderer: Renderer, ids: Any) -> None:
    """This is the default; the sampled tokens are stored."""
    trajectory = await play(renderer, [ids("a long reply<|im_end|>")], max_new_tokens=2)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.mask.sum() == 2


@pytest.mark.parametrize(("limit", "reason"), [("max_tokens", "max_tokens"), ("max_context", "context_overflow")])
async def test_the_whole_sequence_never_passes_its_limit(renderer: Renderer, ids: Any, limit: str, reason: str) -> None:
    """A reply may use the remaining tokens; if none remain, no request is sent."""
    opening = len(renderer.opening([Message("system", CalculatorEnvironment.system_prompt), Message("user", "1 + 2?")],
                                   CalculatorEnvironment().tools))  # fmt: skip
    room = opening + len(ids(call("add", a=1, b=2))) + 3
    options: dict[str, Any] = {"limits": Limits(max_tokens=room)} if limit == "max_tokens" else {"max_context": room}
    options["max_new_tokens"] = room
    trajectory = await play(renderer, [ids(call("add", a=1, b=2) + "<|im_end|>")] * 9, **options)
    assert trajectory.stop_reason == StopReason(reason)
    assert len(trajectory.completions) == 1
    cut = await play(renderer, [ids("word " * 500)], **options)
    assert cut.stop_reason == StopReason(reason)
    assert len(cut) == room


async def test_an_aborted_reply_is_no_normal_end(renderer: Renderer, ids: Any) -> None:
    """The partial tokens are stored, with the stop reason ABORTED."""
    trajectory = await play(renderer, [Reply(ids("The answer"), finish_reason="abort")])
    assert trajectory.stop_reason is StopReason.ABORTED
    assert trajectory.mask.sum() == len(ids("The answer"))


class Breaking(CalculatorEnvironment):
    """Raises, or hangs if ``error`` is ``None``, in the method named ``where``."""

    closed = 0

    def __init__(self, where: str, error: BaseException | None) -> None:
        self.where, self.error = where, error
        if where == "init":
            raise ValueError("no")

    async def _break(self, where: str) -> None:
        if where == self.where:
            if self.error is None:
                await anyio.sleep_forever()
            else:
                raise self.error

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        await self._break("start")
        return await super().start(prompt)

    async def step(self, reply: Message) -> StepResult:
        await self._break("step")
        return await super().step(reply)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        type(self).closed += 1
        await self._break("close")


@pytest.mark.parametrize("where", ["init", "start", "step"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("boom"), SystemExit(3), ExceptionGroup("g", [KeyError("k")]), ContextOverflow("a model's"), None],
)
async def test_what_an_environment_raises_is_data(
    renderer: Renderer, ids: Any, where: str, error: BaseException | None
) -> None:
    """An exception or a hang fails this rollout only, with place and traceback; the environment is closed."""
    before = Breaking.closed
    trajectory = await play(
        renderer,
        [ids(call("add", a=1, b=2) + "<|im_end|>")] * 3,
        partial(Breaking, where, error),
        limits=Limits(step_seconds=0.5 if error is None else 60),
    )
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvironmentFailure"
    assert ("Breaking()" if where == "init" else f"Breaking.{where}") in trajectory.failure.message
    assert Breaking.closed == before + (where != "init")


@pytest.mark.parametrize("error", [RuntimeError("boom"), None])
async def test_a_close_that_fails_costs_no_rollout(renderer: Renderer, ids: Any, error: Exception | None) -> None:
    """The failure is counted."""
    limits = Limits(close_seconds=0.01)
    trajectory = await play(renderer, [ids("3<|im_end|>")], partial(Breaking, "close", error), limits=limits)
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert trajectory.metrics["close_failures"] == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), ConfigError("field"), TokenMismatchError("ids")])
@pytest.mark.parametrize("where", ["snapshot", "start", "step"])
async def test_a_method_that_cannot_be_read_is_data(renderer: Renderer, ids: Any, where: str, error: Exception) -> None:
    """Looking it up is a part of the call, so that no error of a property ends a run, nor loses the tokens."""

    def broken(environment: Any) -> Any:
        raise error

    environment_cls = type("Broken", (CalculatorEnvironment,), {where: property(broken)})
    trajectory = await play(renderer, [ids("3<|im_end|>")], environment_cls)
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvironmentFailure"
    what = "Broken()" if where == "snapshot" else f"Broken.{where}"
    assert trajectory.failure.message.startswith(f"{what} raised {type(error).__name__}: {error}")
    assert len(trajectory.completions) == (where == "step")


class Shut:
    """Called as a method, but another object, and an attribute of it cannot be read."""

    def __call__(self) -> None:
        """Close nothing."""

    @property
    def __func__(self) -> Any:
        raise RuntimeError("boom")


def unreadable(environment: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(("close", "failures"), [(property(unreadable), 1), (Shut(), 0)], ids=["property", "object"])
async def test_a_close_that_cannot_be_read_costs_no_rollout(
    renderer: Renderer, ids: Any, close: Any, failures: int
) -> None:
    """Looking it up is a part of the call."""
    environment_cls = type("Closing", (CalculatorEnvironment,), {"close": close})
    trajectory = await play(renderer, [ids("3<|im_end|>")], environment_cls)
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert trajectory.metrics.get("close_failures", 0) == failures


async def test_a_cancelled_episode_closes_its_environment(renderer: Renderer) -> None:
    """The environment is closed also when the caller is cancelled."""
    before = Breaking.closed
    with anyio.move_on_after(0.01) as scope:
        await play(renderer, [], partial(Breaking, "start", None))
    assert scope.cancelled_caught
    assert Breaking.closed == before + 1


async def test_the_episode_has_a_deadline(renderer: Renderer, ids: Any) -> None:
    """The tokens sampled before it are stored."""
    limits = Limits(episode_seconds=1.0)
    replies = [ids(call("add", a=1, b=2) + "<|im_end|>")]
    trajectory = await play(renderer, replies, partial(Breaking, "step", None), limits=limits)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert trajectory.mask.any()


async def test_an_endpoint_that_fails_is_data(renderer: Renderer) -> None:
    """The rollout fails with the endpoint's own error."""

    def broken(tokens: Any) -> Any:
        raise EndpointUnavailable("no server")

    trajectory = await play(renderer, broken)
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EndpointUnavailable"


async def test_an_overflow_later_on_is_a_stop_reason(renderer: Renderer, ids: Any) -> None:
    """A sequence that no longer fits ends the episode normally, also where the prompt itself does not fit."""
    replies = iter([ids(call("add", a=1, b=2) + "<|im_end|>")])

    def full(tokens: Any) -> Any:
        for reply in replies:
            return reply
        raise ContextOverflow("full")

    assert (await play(renderer, full)).stop_reason is StopReason.CONTEXT_OVERFLOW
    unanswered = await play(renderer, full)
    assert (unanswered.stop_reason, unanswered.failure) == (StopReason.CONTEXT_OVERFLOW, None)
    assert not unanswered.mask.any()


@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize("on_cut", ["stop", "continue"])
async def test_a_reply_that_the_server_cut_before_its_budget_is_an_overflow(
    renderer: Renderer, ids: Any, on_cut: Any, limit: int | None
) -> None:
    """The KV pool or the end of the context cut it, not ``max_new_tokens`` or a limit that would have left it less."""
    cut = Reply(ids("a long reply"), finish_reason="length")
    trajectory = await play(renderer, [cut] * 9, limits=Limits(on_cut=on_cut, max_sampled_tokens=limit))
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.completions) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected a StepResult"),
        (StepResult(), "no messages and not done"),
    ],
)
async def test_a_step_must_return_messages_or_done(renderer: Renderer, ids: Any, answer: Any, message: str) -> None:
    """Otherwise the model would reply to itself."""

    class Mute(CalculatorEnvironment):
        async def step(self, reply: Message) -> StepResult:
            return answer  # type: ignore[no-any-return]

    trajectory = await play(renderer, [ids("3<|im_end|>")], Mute)
    assert trajectory.failure is not None
    assert message in trajectory.failure.message


async def test_a_completion_has_its_temperature_and_the_distribution_of_its_logprobs(
    renderer: Renderer, ids: Any
) -> None:
    """The record has the temperature of the sampling, and the distribution that the policy names, if any."""
    (completion,) = (await play(renderer, [ids("3<|im_end|>")])).completions
    assert (completion.temperature, completion.logprobs_of) == (1.0, None)
    assert "logprobs_of" not in completion.to_dict()


async def test_step_rewards_and_metrics_add_up(renderer: Renderer, ids: Any) -> None:
    """Step rewards are stored in order; without rewards there are none."""

    class Scoring(SingleTurnEnvironment):
        left = 2

        async def step(self, reply: Message) -> StepResult:
            self.left -= 1
            messages = [Message("user", "again")]
            return StepResult(messages, done=self.left == 0, reward=0.5 * self.left, metrics={"moves": 2})

    trajectory = await play(renderer, [ids("3<|im_end|>")] * 2, Scoring)
    assert trajectory.step_rewards == [0.5, 0.0]
    assert trajectory.step_completions == [0, 1]
    assert trajectory.metrics["moves"] == 4
    assert (await play(renderer, [ids("3<|im_end|>")])).step_rewards == []


def answering(**fields: Any) -> type[SingleTurnEnvironment]:
    """An environment whose only step returns these fields."""

    class Shop(SingleTurnEnvironment):
        async def step(self, reply: Message) -> StepResult:
            return StepResult(done=True, **fields)

    return Shop


class Unconvertible:
    """A value whose conversion to float raises."""

    def __float__(self) -> float:
        raise RuntimeError("no number today")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": math.nan}, "reward: got nan; expected a finite number"),
        ({"reward": -math.inf}, "reward: got -inf; expected a finite number"),
        ({"reward": "0.1"}, "reward: got '0.1'; expected a finite number"),
        ({"reward": b"1"}, "reward: got b'1'; expected a finite number"),
        ({"reward": 10**400}, "reward: got 1000"),
        ({"reward": {"right": 1}}, "reward: got {'right': 1}; expected a finite number"),
        ({"reward": [0.5, None]}, "reward[1]: got None; expected a finite number"),
        ({"reward": [0.5, "1"]}, "reward[1]: got '1'; expected a finite number"),
        ({"reward": Unconvertible()}, "reward: got <"),
        ({"metrics": {"found": "yes"}}, "metrics['found']: got 'yes'; expected a finite number"),
        ({"metrics": {"found": math.nan}}, "metrics['found']: got nan; expected a finite number"),
        ({"metrics": {"found": None}}, "metrics['found']: got None; expected a finite number"),
        ({"metrics": {3: 1}}, "metrics: got {3: 1}; expected a mapping of names to finite numbers"),
        ({"metrics": [1]}, "metrics: got [1]; expected a mapping of names to finite numbers"),
        ({"metrics": None}, "metrics: got None; expected a mapping of names to finite numbers"),
    ],
)
async def test_a_step_returns_finite_numbers(renderer: Renderer, ids: Any, fields: Any, message: str) -> None:
    """Any other value is the environment's failure, with field and value, and is not stored."""
    trajectory = await play(renderer, [ids("3<|im_end|>")], answering(**fields))
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.cause) == ("EnvironmentFailure", "environment_step")
    assert trajectory.failure.message.startswith(f"Shop.step: StepResult.{message}")
    assert trajectory.step_rewards == []
    assert "found" not in trajectory.metrics


async def test_a_list_of_rewards_that_cannot_be_read_is_the_environments_failure(renderer: Renderer, ids: Any) -> None:
    """Reading the list runs user code outside of the step."""

    class Torn(list[float]):
        def __iter__(self) -> Any:
            raise RuntimeError("no list today")

    trajectory = await play(renderer, [ids("3<|im_end|>")], answering(reward=Torn()))
    assert trajectory.failure is not None
    expected = "Shop.step: reading its StepResult raised RuntimeError('no list today')"
    assert (trajectory.failure.kind, trajectory.failure.message) == ("EnvironmentFailure", expected)


@pytest.mark.parametrize(
    ("reward", "stored"),
    [
        (None, []), (1, [1.0]), (True, [1.0]), (np.float32(0.5), [0.5]), (np.int64(2), [2.0]), (np.array(0.25), [0.25]),
        (Fraction(1, 2), [0.5]), ((), []), ([0.5, 1, np.bool_(True)], [0.5, 1.0, 1.0]),
    ],
)  # fmt: skip
async def test_what_is_a_finite_number_is_a_step_reward(
    renderer: Renderer, ids: Any, reward: Any, stored: list[float]
) -> None:
    """Integers, booleans and NumPy scalars are accepted, one or several; floats are stored."""
    trajectory = await play(renderer, [ids("3<|im_end|>")], answering(reward=reward, metrics={"found": np.int64(1)}))
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert trajectory.step_rewards == stored
    assert all(type(number) is float for number in trajectory.step_rewards)
    assert (trajectory.metrics["found"], type(trajectory.metrics["found"])) == (1, int)


async def test_seeds_differ_by_turn_and_rollout(renderer: Renderer, ids: Any) -> None:
    """One seed of the run determines a different seed for each reply, reproducibly."""
    seeds: list[list[int | None]] = []

    class Watching(ScriptedPolicy):
        async def complete(self, request: CompletionRequest) -> Any:
            seeds[-1].append(request.sampling.seed)
            return await super().complete(request)

    for index in (0, 1, 0):
        seeds.append([])
        policy = Watching([ids(call("add", a=1, b=2) + "<|im_end|>"), ids("3<|im_end|>")])
        prompt, sampling = Prompt("?", index=index), SamplingParams(seed=7)
        await run_agent(prompt, CalculatorEnvironment, policy, renderer, sampling=sampling)
    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 4


async def test_a_template_that_failed_its_self_test_is_refused(ids: Any) -> None:
    """Before anything is sampled."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    backwards = "{% for m in messages | reverse %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer(tokenizer, chat_template=backwards, dialect="hermes")
    with pytest.raises(ConfigError, match="the self-test refuses its step"):
        await play(renderer, [ids("3<|im_end|>")])


async def test_an_observer_sees_every_step(renderer: Renderer, ids: Any) -> None:
    """It is called after each reply and each result."""
    lengths: list[int] = []
    replies = [ids(call("add", a=1, b=2) + "<|im_end|>"), ids("3<|im_end|>")]
    await play(renderer, replies, on_step=lambda trajectory: lengths.append(len(trajectory)))
    assert len(lengths) == 3
    assert lengths == sorted(lengths)


def test_tool_schema_reaches_the_model(renderer: Renderer) -> None:
    """The opening names the tools."""
    text = renderer.decode(renderer.opening([Message("user", "hi")], [Tool("add", "Add.")]))
    assert "add" in text


async def test_one_sequence_is_not_a_fork(renderer: Renderer) -> None:
    """``run_agent`` refuses ``fork`` before it plays anything."""
    with pytest.raises(ConfigError, match=r"'fork'; expected .append. or .error."):
        await play(renderer, [], history="fork")


async def test_an_image_for_a_model_of_text_is_refused_before_the_environment_starts(renderer: Renderer) -> None:
    """The error names the image and the chat template; no request is sent, and no environment is created for it."""
    started: list[str] = []

    class Eager(SingleTurnEnvironment):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            started.append("start")
            return await super().start(prompt)

    policy = ScriptedPolicy([])
    image = Image.of(PIL.Image.new("RGB", (4, 4)))
    with pytest.raises(ConfigError, match=r"content of a user message: got <Image 4x4 .* has no images"):
        await run_agent(Prompt([Message("user", ["What?", image])]), Eager, policy, renderer, sampling=SamplingParams())
    assert started == []


async def test_an_image_of_a_tool_for_a_model_of_text_fails_the_rollout(renderer: Renderer, ids: Any) -> None:
    """A result that the model cannot see is never shown as something else."""

    class Painter(SingleTurnEnvironment):
        async def step(self, reply: Message) -> StepResult:
            return StepResult([Message("user", [Image.of(PIL.Image.new("RGB", (4, 4)))])])

    trajectory = await play(renderer, [ids("Paint.<|im_end|>")], Painter)
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure is not None
    assert "has no images" in trajectory.failure.message
