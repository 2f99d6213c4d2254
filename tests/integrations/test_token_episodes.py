"""Rollouts of an environment that reads and writes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollouts.dtypes import Completion, Endpoint, Limits, Prompt, SamplingParams, StopReason
from rollouts.errors import ConfigError, ContextOverflow
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.token_episodes import Observation, generate_token_batch
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import Sample, Status


class Scripted:
    """An environment with given observations; it keeps the replies."""

    def __init__(self, *observations: Observation | Exception) -> None:
        self.observations = list(observations)
        self.replies: list[Completion] = []
        self.prompt: Prompt | None = None

    def next(self) -> Observation:
        seen = self.observations.pop(0)
        if isinstance(seen, Exception):
            raise seen
        return seen

    async def start(self, prompt: Prompt) -> Observation:
        self.prompt = prompt
        return self.next()

    async def step(self, reply: Completion) -> Observation:
        self.replies.append(reply)
        return self.next()


async def play(environment: Scripted, *replies: Any, **options: Any) -> tuple[list[Sample], ScriptedPolicy]:
    policy = ScriptedPolicy(replies)
    given: dict[str, Any] = {"endpoint": Endpoint(model="m"), "policy": policy, **options}
    samples = await generate_token_batch(
        [Prompt("go", label="l", index=3)], environment_cls=lambda: environment, decode=_text, **given
    )
    return samples, policy


def _text(tokens: Sequence[int]) -> str:
    return " ".join(str(int(one)) for one in tokens)


async def test_an_observation_that_goes_on_extends_the_sequence() -> None:
    """Only what it adds is context; rewards and metrics are summed, and belong to the reply before them."""
    environment = Scripted(
        Observation([1, 2], [9]),
        Observation([1, 2, 5, 6, 3], ["x"], reward=0.5, metrics={"n": 1}),
        Observation(done=True, reward=1.0, metrics={"n": 2}),
    )
    ((sample,), policy) = await play(environment, [5, 6], [7], sampling=SamplingParams(temperature=0.7))
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 5, 6, 3, 7], [0, 0, 1, 1, 0, 1])
    assert [request.tolist() for request in policy.requests] == [[1, 2], [1, 2, 5, 6, 3]]
    assert [one.temperature for one in sample.completions] == [0.7, 0.7]
    assert (sample.reward, sample.step_rewards, sample.metrics["n"]) == (1.5, [0.5, 1.0], 3)
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.TASK_COMPLETED)
    assert (sample.response, sample.label, sample.index) == ("5 6 3 7", "l", 3)
    assert [message["content"] for message in sample.messages] == ["1 2", "5 6", "3", "7"]


async def test_a_rewritten_observation_is_a_branch() -> None:
    """A reply that it shows again is context there; all branches have the reward of the rollout."""
    environment = Scripted(Observation([1, 2]), Observation([1, 6, 3], reward=0.5), Observation(done=True, reward=1.0))
    ((first, second), policy) = await play(environment, [5, 6], [7])
    assert (first.tokens, first.loss_mask) == ([1, 2, 5, 6], [0, 0, 1, 1])
    assert (second.tokens, second.loss_mask) == ([1, 6, 3, 7], [0, 0, 0, 1])
    assert (first.reward, second.reward, first.stop_reason) == (1.5, 1.5, StopReason.FORKED)
    assert first.rollout_id == second.rollout_id == 3
    names = [session for session, _ in policy.sessions]
    assert names[0] != names[1]


async def test_a_rewritten_observation_without_a_reply_is_not_a_branch() -> None:
    """The branch before it ends the rollout, with its own messages."""
    environment = Scripted(Observation([1, 2]), Observation([1, 6, 3], reward=0.5))
    ((sample,), _) = await play(environment, [5, 6], limits=Limits(max_sampled_tokens=2))
    assert (sample.tokens, sample.stop_reason, sample.reward) == ([1, 2, 5, 6], StopReason.MAX_TOKENS, 0.5)
    assert [message["content"] for message in sample.messages] == ["1 2", "5 6"]
    assert "forks" not in sample.metrics


@pytest.mark.parametrize(
    ("limits", "reason", "tokens"),
    [
        (Limits(max_turns=1), StopReason.MAX_TURNS, [1, 2, 5, 6]),
        (Limits(max_tokens=5), StopReason.MAX_TOKENS, [1, 2, 5, 6, 3]),
        (Limits(max_sampled_tokens=2), StopReason.MAX_TOKENS, [1, 2, 5, 6, 3]),
    ],
)
async def test_a_limit_ends_the_episode(limits: Limits, reason: StopReason, tokens: list[int]) -> None:
    """The environment has answered the last reply, so its reward counts."""
    environment = Scripted(Observation([1, 2]), Observation([1, 2, 5, 6, 3], reward=0.5))
    ((sample,), _) = await play(environment, [5, 6], limits=limits)
    assert (sample.tokens, sample.stop_reason, sample.status) == (tokens, reason, Status.TRUNCATED)
    assert sample.reward == 0.5


async def test_a_cut_reply_goes_to_the_environment() -> None:
    """It decides what a cut reply is worth, as in the trainer."""
    environment = Scripted(Observation([1, 2]), Observation(done=True, reward=-1.0))
    ((sample,), _) = await play(environment, [5, 6, 7], sampling=SamplingParams(max_new_tokens=2))
    assert [reply.finish_reason for reply in environment.replies] == ["length"]
    assert (sample.reward, sample.status) == (-1.0, Status.COMPLETED)


@pytest.mark.parametrize(
    ("observations", "words"),
    [
        ([OSError("no room")], "no room"),
        ([Observation(done=True)], "got done=True"),
        ([Observation()], "without tokens"),
        ([Observation([1]), Observation([1, 5], reward=float("nan"))], "reward"),
        ([Observation([1]), None], "got NoneType; expected an Observation"),
    ],
)
async def test_a_bad_environment_fails_its_rollout(observations: list[Any], words: str) -> None:
    """The sample has the cause; no other rollout is affected."""
    ((sample,), _) = await play(Scripted(*observations), [5])
    assert sample.status is Status.FAILED
    assert sample.failure is not None
    assert words in sample.failure.message


async def test_an_opening_that_is_too_long_is_truncated() -> None:
    """As a prompt that does not fit the context."""
    ((sample,), _) = await play(Scripted(ContextOverflow("too long")))
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_OVERFLOW)


async def test_an_aborted_reply_ends_the_rollout() -> None:
    """The environment does not get it."""
    environment = Scripted(Observation([1, 2]))
    ((sample,), _) = await play(environment, Reply([5], finish_reason="abort"))
    assert (sample.status, environment.replies) == (Status.ABORTED, [])


async def test_siblings_have_seeds_of_their_own() -> None:
    """The seed is mixed with the rollout and the turn."""
    seeds = []

    class Asked(ScriptedPolicy):
        async def complete(self, request: CompletionRequest) -> Completion:
            seeds.append(request.sampling.seed)
            return await super().complete(request)

    for index in (0, 1):
        await generate_token_batch(
            [Prompt("go", index=index)],
            environment_cls=lambda: Scripted(Observation([1]), Observation([1, 5, 2]), Observation(done=True)),
            decode=_text,
            endpoint=Endpoint(model="m"),
            policy=Asked(lambda tokens: [5]),
            sampling=SamplingParams(seed=1),
        )
    assert len(set(seeds)) == 4


async def test_a_limit_of_tool_calls_is_refused() -> None:
    """Replies are tokens here."""
    with pytest.raises(ConfigError, match=r"limits\.max_tool_calls: got 3"):
        await play(Scripted(), limits=Limits(max_tool_calls=3))


async def test_the_environment_does_not_get_the_urgency_of_its_group() -> None:
    """The policy does."""
    environment = Scripted(Observation([1]), Observation(done=True))
    await generate_token_batch(
        [Prompt("go", urgency=lambda: 0)],
        environment_cls=lambda: environment,
        decode=_text,
        endpoint=Endpoint(model="m"),
        policy=ScriptedPolicy([[5]]),
    )
    assert environment.prompt == Prompt("go")
    assert environment.prompt.urgency is None
