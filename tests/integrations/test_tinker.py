"""tinker-cookbook 0.6 and tinker 0.38: their own assembly of our rows, and completers both ways."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt, SamplingParams, packed_tokens
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.tinker import (
    CookbookEnvironment,
    PolicyCompleter,
    TinkerPolicy,
    datum_columns,
    to_datums,
    to_trajectory_group,
)
from rollouts.integrations.token_episodes import generate_token_batch
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Status
from rollouts.training.batch import group_advantages
from rollouts.training.rows import by_rollout
from tests.trainer_samples import columns, scored_groups


def row_of(datum: Any) -> tuple[list[int], list[bool], list[float], list[float]]:
    """Tokens, mask, logprobs and advantages of a datum, as wide as the row."""
    inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
    tokens = [*datum.model_input.to_ints(), int(inputs["target_tokens"][-1])]
    assert tokens[1:] == inputs["target_tokens"].tolist()
    mask = [False, *(inputs["mask"] == 1).tolist()]
    return tokens, mask, [0.0, *inputs["logprobs"].tolist()], [0.0, *inputs["advantages"].tolist()]


def test_the_columns_of_a_datum_are_the_row_shifted_by_one() -> None:
    """Also of a row that ends in context, which is cut."""
    for sample in scored_groups(1, 3):
        tokens, mask, logprobs = columns(sample)
        got = datum_columns(sample, 0.5)
        assert got["model_input"].tolist() == tokens[:-1]
        assert got["target_tokens"].tolist() == tokens[1:]
        assert (got["mask"] == 1).tolist() == mask[1:]
        assert got["logprobs"].tolist() == logprobs[1:]
        assert got["advantages"].tolist() == [0.5 * one for one in mask[1:]]


def test_advantages_of_a_sample_itself_go_first() -> None:
    """Each token's own, 0 on context."""
    (sample,) = scored_groups(1, 1)
    sample.advantages = np.arange(len(sample), dtype=np.float32)
    expected = [float(n) * one for n, one in enumerate(columns(sample)[1])][1:]
    assert datum_columns(sample, 9.0)["advantages"].tolist() == expected


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("status", Status.FAILED, "status: got 'failed'"),
        ("loss_multiplier", 0.5, "loss_multiplier: got 0.5"),
        ("rollout_log_probs", None, "rollout_log_probs: got None"),
    ],
)
def test_what_a_datum_cannot_carry_is_refused(field: str, value: Any, words: str) -> None:
    """By the name of the field."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, field, value)
    with pytest.raises(ConfigError, match=words):
        datum_columns(sample, 0.0)


@pytest.mark.trainer
@pytest.mark.parametrize("forks", [False, True])
def test_datums_have_our_rows_and_our_advantages(forks: bool, compared: Callable[..., None]) -> None:
    """One for each branch; GRPO's advantages are those of group_advantages."""
    pytest.importorskip("tinker")
    samples = scored_groups(forks=forks)
    expected = group_advantages(samples)
    for sample, datum, advantage in zip(samples, to_datums(samples), expected, strict=True):
        tokens, mask, logprobs, advantages = row_of(datum)
        assert (tokens, mask, logprobs) == columns(sample)
        assert set(np.array(advantages)[mask].tolist()) == {float(advantage)}
    what = f"datums{', forks' if forks else ''}: tokens, mask, logprobs, advantages"
    compared("tinker 0.38.0", "b", what, 0.0)


@pytest.mark.trainer
@pytest.mark.parametrize("forks", [False, True])
def test_the_cookbook_assembles_our_rows_from_a_trajectory_group(forks: bool, compared: Callable[..., None]) -> None:
    """Its compute_advantages and assemble_training_data: one datum for each branch, advantages centred by the group."""
    data_processing = pytest.importorskip("tinker_cookbook.rl.data_processing")
    worst = 0.0
    for group in range(3):
        samples = [sample for sample in scored_groups(3, forks=forks) if sample.group_index == group]
        ours = to_trajectory_group(samples)
        advantages = data_processing.compute_advantages([ours])
        datums, _ = data_processing.assemble_training_data([ours], advantages)
        rewards = np.array([branches[-1].reward for branches in by_rollout(samples)], np.float32)
        rollouts = [branches[-1].rollout_id for branches in by_rollout(samples)]
        centred = dict(zip(rollouts, rewards - rewards.mean(), strict=True))
        assert len(datums) == len(samples)
        for sample, datum in zip(samples, datums, strict=True):
            tokens, mask, logprobs, given = row_of(datum)
            assert (tokens, mask) == columns(sample)[:2]
            assert logprobs == columns(sample)[2]
            worst = max(worst, float(np.abs(np.array(given)[mask] - centred[sample.rollout_id]).max()))
    what = f"assembled groups{', forks' if forks else ''}: centred advantages"
    compared("cookbook 0.6.1", "b", what, worst, within=1e-6, note="tml-renderers stubbed")


def test_a_trajectory_group_is_one_group() -> None:
    """Rewards of two groups would be centred together."""
    pytest.importorskip("tinker_cookbook.rl.types")
    with pytest.raises(ConfigError, match=r"got 'groups \[0, 1\]'"):
        to_trajectory_group(scored_groups(2, 2))


class SamplingClient:
    """A strict fake of ``tinker.SamplingClient``: it returns scripted sequences and keeps its requests."""

    def __init__(self, *sequences: Any) -> None:
        self.sequences = list(sequences)
        self.requests: list[Any] = []

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1
        self.requests.append((prompt.to_ints(), sampling_params))
        return SimpleNamespace(sequences=[self.sequences.pop(0)])


def sequence(tokens: list[int], reason: str = "stop", logprobs: Any = ()) -> Any:
    return SimpleNamespace(
        tokens=tokens, logprobs=[-0.5] * len(tokens) if logprobs == () else logprobs, stop_reason=reason
    )


@pytest.mark.trainer
async def test_a_sampling_client_is_a_policy() -> None:
    """Ids go out and come back, the version is that of its weights, a reply at its budget ends by length."""
    pytest.importorskip("tinker")
    client = SamplingClient(sequence([7, 8]), sequence([7, 8], "length"))
    policy = TinkerPolicy(client, version=4, max_context=10)
    tokens = packed_tokens([1, 2, 3])
    first = await policy.complete(
        CompletionRequest(tokens, SamplingParams(max_new_tokens=5, temperature=0.7), stop_token_ids=(9,))
    )
    assert (first.tokens.tolist(), first.finish_reason, first.versions[0].version) == ([7, 8], "stop", "4")
    asked = client.requests[0]
    assert (asked[0], asked[1].max_tokens, asked[1].temperature, asked[1].stop) == ([1, 2, 3], 5, 0.7, [9])
    assert (
        await policy.complete(CompletionRequest(tokens, SamplingParams(max_new_tokens=2)))
    ).finish_reason == "length"
    assert (await policy.describe()).max_context == 10


@pytest.mark.trainer
async def test_what_the_service_cannot_take_or_give_is_an_error() -> None:
    """Parameters without a field, stop strings with stop ids, too long a prompt, replies without logprobs."""
    pytest.importorskip("tinker")
    policy = TinkerPolicy(SamplingClient(sequence([]), sequence([7], logprobs=None)), version=0, max_context=10)
    tokens = packed_tokens([1, 2, 3])
    with pytest.raises(ConfigError, match=r"SamplingParams.min_p: got 0.1; expected 0.0: tinker"):
        await policy.complete(CompletionRequest(tokens, SamplingParams(min_p=0.1)))
    with pytest.raises(ConfigError, match=r"SamplingParams.stop"):
        await policy.complete(
            CompletionRequest(tokens, SamplingParams(stop=("x",), max_new_tokens=2), stop_token_ids=(9,))
        )
    with pytest.raises(ContextOverflow, match="exceed the context of 10"):
        await policy.complete(CompletionRequest(tokens, SamplingParams(max_new_tokens=8)))
    for words, error in (("0 tokens", EndpointUnavailable), ("no logprobs", EndpointRefused)):
        with pytest.raises(error, match=words):
            await policy.complete(CompletionRequest(tokens, SamplingParams(max_new_tokens=2)))


@pytest.mark.trainer
async def test_a_policy_is_a_token_completer_of_the_cookbook() -> None:
    """Their call, our policy: the budget is the smaller one, stop ids arrive."""
    tinker = pytest.importorskip("tinker")
    pytest.importorskip("tinker_cookbook.completers")
    policy = ScriptedPolicy([[5, 6, 7], [5, 6, 7]])
    completer = PolicyCompleter(policy, SamplingParams(max_new_tokens=8))
    whole = await completer(tinker.ModelInput.from_ints([1, 2]), [9])
    assert (whole.tokens, whole.stop_reason, len(whole.logprobs)) == ([5, 6, 7], "stop", 3)
    cut = await completer(tinker.ModelInput.from_ints([1, 2]), [9], max_tokens=2)
    assert (cut.tokens, cut.stop_reason) == ([5, 6], "length")
    assert [request.tolist() for request in policy.requests] == [[1, 2], [1, 2]]


def test_a_sample_with_its_own_advantages_is_no_trajectory() -> None:
    """The cookbook computes them."""
    pytest.importorskip("tinker_cookbook.rl.types")
    (sample,) = scored_groups(1, 1)
    sample = attrs.evolve(sample, advantages=[0.0] * len(sample))
    with pytest.raises(ConfigError, match="advantages"):
        to_trajectory_group([sample])


REPLIES = {(1, 2): [5, 6], (1, 2, 5, 6, 3): [7], (9, 4): [8, 8]}
"""The reply to each observation of the environment below: the second extends the first, the third rewrites it."""


def counting(types: Any, tinker: Any, metrics: dict[str, float], overflow: bool = False) -> Any:
    """An environment of the cookbook with three observations."""

    class Counting(types.Env):  # type: ignore[misc]
        def __init__(self) -> None:
            self.actions: list[tuple[list[int], Any]] = []

        async def initial_observation(self) -> Any:
            if overflow:
                return types.InitialObservationOverflow(reward=-1.0)
            return tinker.ModelInput.from_ints([1, 2]), [99]

        async def step(self, action: list[int], *, extra: Any = None) -> Any:
            self.actions.append((action, extra["stop_reason"] if extra else None))
            turn = len(self.actions)
            shown = [*REPLIES][turn] if turn < 3 else ()
            return types.StepResult(
                turn / 4, turn == 3, tinker.ModelInput.from_ints([*shown]), [99], {"n": 1, **metrics}
            )

    return Counting()


@pytest.mark.trainer
async def test_an_environment_of_the_cookbook_is_played_by_our_manager(compared: Callable[..., None]) -> None:
    """Its observations, replies, logprobs and rewards are those of the cookbook's own rollout loop."""
    tinker = pytest.importorskip("tinker")
    types = pytest.importorskip("tinker_cookbook.rl.types")
    their_rollouts = pytest.importorskip("tinker_cookbook.rl.rollouts")
    script = lambda tokens: REPLIES[tuple(tokens.tolist())]  # noqa: E731
    completer = PolicyCompleter(ScriptedPolicy(script), SamplingParams())
    theirs = await their_rollouts.do_single_rollout(completer, counting(types, tinker, {}))
    generate = functools.partial(
        generate_token_batch,
        environment_cls=lambda: CookbookEnvironment(lambda prompt: counting(types, tinker, {})),
        decode=lambda tokens: str(tokens.tolist()),
        endpoint=Endpoint(model="trained"),
        policy=ScriptedPolicy(script),
    )
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate)
    async with AsyncRolloutManager(config, DataBuffer(["a", "b"])) as manager:
        samples = await manager.generate_batch()
    expected = [(one.ob.to_ints(), one.ac.tokens, one.ac.logprobs) for one in theirs.transitions]
    played = by_rollout(samples)
    assert len(played) == 4
    for branches in played:
        got = []
        for branch in branches:
            tokens, logprobs = branch.token_column.tolist(), branch.logprob_column
            assert logprobs is not None
            for one in branch.completions:
                reply = slice(one.start, one.stop)
                got.append((tokens[: one.start], tokens[reply], logprobs[reply].tolist()))
        assert got == expected
        assert [reward for branch in branches for reward in branch.step_rewards] == [0.25, 0.5, 0.75]
        assert {branch.reward for branch in branches} == {sum(one.reward for one in theirs.transitions)}
        assert branches[-1].metrics["n"] + branches[0].metrics["n"] == 3
    what = "Env in our manager and in do_single_rollout: observations, replies, logprobs, rewards"
    compared("cookbook 0.6.1", "c", what, 0.0, note="policy: scripted")


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics": {"parse_error_masked": 1.0}}, "parse_error_masked.*expected none: a sampled reply is trained"),
        ({"metrics": {}, "overflow": True}, ""),
    ],
)
async def test_what_of_the_cookbook_is_no_rollout(fields: dict[str, Any], words: str) -> None:
    """A reply that it would mask fails the rollout by name; an opening beyond its budget is truncated."""
    tinker = pytest.importorskip("tinker")
    types = pytest.importorskip("tinker_cookbook.rl.types")
    (sample,) = await generate_token_batch(
        [Prompt("a")],
        environment_cls=lambda: CookbookEnvironment(lambda prompt: counting(types, tinker, **fields)),
        decode=str,
        endpoint=Endpoint(model="trained"),
        policy=ScriptedPolicy(lambda tokens: [5, 6]),
    )
    assert sample.status is (Status.FAILED if words else Status.TRUNCATED)
    if words:
        assert sample.failure is not None
        assert re.search(words, sample.failure.message)
