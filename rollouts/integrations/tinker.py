"""tinker 0.38 and tinker-cookbook 0.6: samples as datums or trajectory groups, and token completers both ways.

    out: to_datums(samples) or to_trajectory_group(samples), for forward_backward and the cookbook's own assembly
    in:  TinkerPolicy(sampling_client) plays our agent; PolicyCompleter(policy) samples for the cookbook's rollouts;
         CookbookEnvironment(make_env) is an environment of the cookbook for our manager

Invariant: a datum has the tokens, mask, logprobs and advantages of one row, shifted by one as in the cookbook
(tinker-cookbook 0.6.1, rl/data_processing.py: trajectory_to_data). tinker and its cookbook are imported when a function
needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Completion, Prompt, SamplingParams, TokenColumn, packed_tokens
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.environments.adapters.calls import call, numbers_of
from rollouts.errors import ConfigError, ContextOverflow
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.integrations.steps import trained_replies
from rollouts.integrations.token_episodes import Observation
from rollouts.training.batch import group_advantages
from rollouts.training.comparisons import Comparison, by_comparison, by_conversation, comparison_name
from rollouts.training.rows import check_temperature, reward_of_branches, row_columns
from rollouts.training.types import Sample

__all__ = [
    "CookbookEnvironment",
    "PolicyCompleter",
    "TinkerPolicy",
    "datum_columns",
    "to_datums",
    "to_trajectory_group",
    "to_trajectory_groups",
    "write_batch",
]


def datum_columns(sample: Sample, advantage: float) -> dict[str, npt.NDArray[Any]]:
    """The columns of a datum, each of n - 1 values: what predicts each token but the first.

    ``model_input`` and ``target_tokens`` are int64; ``logprobs``, ``advantages`` and ``mask`` float32, 0 on context.

    Args:
        sample: one row.
        advantage: that of each sampled token, unless the sample has ``advantages``.

    Raises:
        ConfigError: the sample failed, has no sampled token or no logprobs, a field that a datum has no place for, or a
            temperature other than 1, which a datum cannot name (tinker 0.38.0, types/datum.py: Datum).
    """
    check_temperature(sample, "tinker's forward_backward", 1.0)
    row = row_columns(sample, "tinker's Datum", "loss_multiplier", "teacher_log_probs", "images")
    tokens, mask, column = row.tokens.astype(np.int64), row.mask.astype(np.float32), sample.advantage_column
    advantages = mask * (np.float32(advantage) if column is None else column[: len(mask)])
    shifted = {"logprobs": row.logprobs[1:], "advantages": advantages[1:], "mask": mask[1:]}
    return {"model_input": tokens[:-1], "target_tokens": tokens[1:], **shifted}


def to_datums(samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> list[Any]:
    """Convert rows to ``tinker.Datum``, in order: each branch is a datum; raises as :func:`datum_columns`.

    ``advantages`` has one for each sample; by default :func:`~rollouts.training.group_advantages`, of whole groups.
    ``mask`` is for the cookbook, whose training step removes it (tinker-cookbook 0.6.1, rl/train.py: _remove_mask).
    """
    import tinker

    values = group_advantages(samples) if advantages is None else advantages
    datums = []
    for sample, advantage in zip(samples, values, strict=True):
        columns = datum_columns(sample, float(advantage))
        model_input = _model_input(columns.pop("model_input").tolist())
        inputs = {name: tinker.TensorData.from_numpy(column) for name, column in columns.items()}
        datums.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return datums


def write_batch(samples: Sequence[Sample], path: Path) -> None:
    """Write the columns of the datums of a batch, one datum a line; raises as :func:`datum_columns`."""
    rows = [datum_columns(*pair) for pair in zip(samples, group_advantages(samples).tolist(), strict=True)]
    lines = [msgspec.json.encode({name: column.tolist() for name, column in row.items()}) for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def to_trajectory_group(samples: Sequence[Sample]) -> Any:
    """Convert one group to the cookbook's ``TrajectoryGroup``: a transition for each completion that the mask trains.

    The cookbook centres rewards by the group without dividing by the standard deviation, and finds forks itself: it
    merges a branch that only appends with the one before.

    Raises:
        ConfigError: more than one comparison, whose rewards the cookbook would mix; a sample
            without reward, a rollout whose branches have unlike rewards, or as :func:`datum_columns`.
    """
    groups = sorted({comparison_name(sample) for sample in samples})
    if len(groups) != 1:
        expected = "the samples of one group whose rewards are compared: to_trajectory_groups takes several"
        raise ConfigError.of("to_trajectory_group(samples)", f"groups {groups}", expected)
    return _trajectory_group(samples)


def to_trajectory_groups(samples: Sequence[Sample], *, by: Comparison | None = None) -> list[Any]:
    """Convert groups to one ``TrajectoryGroup`` for each set of rewards that are compared, in order of its first.

    ``by`` is that of :func:`~rollouts.training.group_advantages`. Raises as :func:`to_trajectory_group`.
    """
    return [_trajectory_group(members) for members in by_comparison(samples, by)]


def _trajectory_group(samples: Sequence[Sample]) -> Any:
    rollouts = by_conversation(samples)
    rewards = [reward_of_branches(branches) for branches in rollouts]
    for sample in samples:
        check_temperature(sample, "tinker's forward_backward", 1.0)
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup

    trajectories = []
    for branches in rollouts:
        transitions = [transition for branch in branches for transition in _transitions(branch)]
        transitions[-1].episode_done = True
        trajectories.append(Trajectory(transitions=transitions, final_ob=_model_input([])))
    return TrajectoryGroup(trajectories, rewards, [{} for _ in trajectories])


def _transitions(sample: Sample) -> list[Any]:
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Transition

    row = row_columns(
        sample, "the cookbook's Trajectory", "loss_multiplier", "teacher_log_probs", "advantages", "images"
    )
    tokens = row.tokens.tolist()
    transitions = []
    for start, stop, cut in trained_replies(sample):
        action = TokensWithLogprobs(tokens[start:stop], row.logprobs[start:stop].tolist(), "length" if cut else "stop")
        transitions.append(Transition(ob=_model_input(tokens[:start]), ac=action, reward=0.0, episode_done=False))
    return transitions


def _model_input(tokens: list[int]) -> Any:
    import tinker

    return tinker.ModelInput.from_ints(tokens)


class TinkerPolicy(TrainerPolicy):
    """A policy over a ``tinker.SamplingClient``, which samples from one set of weights: those with number ``version``.

    ``max_context`` is the context of the model, if known.
    """

    trainer = "tinker"
    unsupported = ("min_p", "min_new_tokens", "repetition_penalty")

    def __init__(self, client: Any, *, version: int, max_context: int | None = None) -> None:
        self.client, self.version, self.max_context = client, version, max_context

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        import tinker

        if sampling.stop and stop_token_ids:
            expected = f"none: tinker takes these or ids, {stop_token_ids}"
            raise ConfigError.of("SamplingParams.stop", sampling.stop, expected)
        params = tinker.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=[*stop_token_ids] if stop_token_ids else [*sampling.stop] or None,
        )
        response = await self.client.sample(_model_input(tokens.tolist()), 1, params)
        (one,) = response.sequences
        return Reply(tokens=one.tokens, logprobs=one.logprobs, stopped_by=one.stop_reason, version=self.version)


class CookbookEnvironment:
    """One episode of an ``Env`` of the cookbook, for :func:`~.token_episodes.generate_token_batch`.

    Args:
        make_env: called with the prompt to create the ``Env``.
    """

    def __init__(self, make_env: Callable[[Prompt], Any]) -> None:
        self.make_env = make_env

    async def start(self, prompt: Prompt) -> Observation:
        from tinker_cookbook.rl.types import InitialObservationOverflow

        self.env = await call(self.make_env, prompt)
        opening = await self.env.initial_observation()
        if isinstance(opening, InitialObservationOverflow):
            raise ContextOverflow(f"the opening is longer than {type(self.env).__name__} allows: {opening.logs}")
        return Observation(opening[0].to_ints(), opening[1])

    async def step(self, reply: Completion) -> Observation:
        reason = "length" if reply.finish_reason == "length" else "stop"
        result = await self.env.step(reply.tokens.tolist(), extra={"stop_reason": reason})
        if result.metrics.get("parse_error_masked"):
            expected = "none: a sampled reply is trained; leave mask_error_turns of ParseErrorPolicy off"
            raise ConfigError.of("metrics['parse_error_masked']", result.metrics["parse_error_masked"], expected)
        numbers = numbers_of(result.metrics, "StepResult.metrics")
        if result.episode_done:
            return Observation(done=True, reward=result.reward, metrics=numbers)
        tokens = result.next_observation.to_ints()
        return Observation(tokens, result.next_stop_condition, reward=result.reward, metrics=numbers)


class PolicyCompleter:
    """A policy of this package as the cookbook's ``TokenCompleter``, e.g. over an SGLang server.

    Args:
        policy: samples the replies.
        sampling: its ``max_new_tokens`` is the longest reply; ``stop`` comes with each call.
    """

    def __init__(self, policy: Policy, sampling: SamplingParams) -> None:
        self.policy, self.sampling = policy, sampling

    async def __call__(self, model_input: Any, stop: Sequence[str | int], *, max_tokens: int | None = None) -> Any:
        """Complete the ids of a model input; returns ``TokensWithLogprobs``."""

        from tinker_cookbook.completers import TokensWithLogprobs

        ids = tuple(each for each in stop if isinstance(each, int))
        texts = tuple(each for each in stop if isinstance(each, str))
        budget = min(max_tokens or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        sampling = attrs.evolve(self.sampling, stop=texts, max_new_tokens=budget)
        tokens = packed_tokens(model_input.to_ints())
        completion = await self.policy.complete(CompletionRequest(tokens, sampling, stop_token_ids=ids))
        reason = "length" if completion.finish_reason == "length" else "stop"
        return TokensWithLogprobs(completion.tokens.tolist(), completion.logprobs.tolist(), reason)
