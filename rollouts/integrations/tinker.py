"""tinker 0.38 and tinker-cookbook 0.6: samples as datums or trajectory groups, and token completers both ways.

    out: to_datums(samples) or to_trajectory_group(samples), for forward_backward and the cookbook's own assembly
    in:  TinkerPolicy(sampling_client) plays our agent; PolicyCompleter(policy) plays the cookbook's environments

Invariant: a datum has the tokens, mask, logprobs and advantages of one row, shifted by one as tinker takes them.
tinker and its cookbook are imported when a function needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from rollouts.dtypes import Completion, SamplingParams, TokenColumn, packed_tokens
from rollouts.errors import ConfigError
from rollouts.inference.base import Policy, ServerInfo
from rollouts.integrations.replies import check_budget, check_sampling, completion_of
from rollouts.training.batch import group_advantages
from rollouts.training.rows import by_rollout, check_fields, reward_of, split
from rollouts.training.types import Sample

__all__ = ["PolicyCompleter", "TinkerPolicy", "datum_columns", "to_datums", "to_trajectory_group", "write_batch"]

_NO_FIELD = ("min_p", "min_new_tokens", "repetition_penalty")


def datum_columns(sample: Sample, advantage: float) -> dict[str, npt.NDArray[Any]]:
    """The columns of a datum, each of n - 1 values: what predicts each token but the first.

    ``model_input`` and ``target_tokens`` are int64; ``logprobs``, ``advantages`` and ``mask`` float32, 0 on context.

    Args:
        sample: one row.
        advantage: that of each sampled token, unless the sample has ``advantages`` of its own.

    Raises:
        ConfigError: the sample failed, has no sampled token or no logprobs, or a field that a datum has no place for.
    """
    check_fields(sample, "tinker's Datum", "loss_multiplier", "teacher_log_probs", "images")
    row = split(sample)
    p, n = len(row.prompt), len(row.prompt) + len(row.response)
    mask = np.zeros(n, np.float32)
    logprobs = np.zeros(n, np.float32)
    mask[p:], logprobs[p:] = row.mask, row.logprobs
    own = sample.advantage_column
    advantages = mask * (np.float32(advantage) if own is None else own[:n])
    tokens = np.concatenate([row.prompt, row.response]).astype(np.int64)
    shifted = {"logprobs": logprobs[1:], "advantages": advantages[1:], "mask": mask[1:]}
    return {"model_input": tokens[:-1], "target_tokens": tokens[1:], **shifted}


def to_datums(samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> list[Any]:
    """Convert rows to ``tinker.Datum``, in order: branches are datums of their own; raises as :func:`datum_columns`.

    ``advantages`` has one for each sample; by default :func:`~rollouts.training.group_advantages`, of whole groups.
    ``mask`` is for the cookbook; its training step removes it before the service gets the datum.
    """
    import tinker

    given = group_advantages(samples) if advantages is None else advantages
    datums = []
    for sample, advantage in zip(samples, given, strict=True):
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
    """Convert one group to the cookbook's ``TrajectoryGroup``: a transition for each completion.

    The cookbook centres rewards by the group without dividing by the standard deviation, and finds forks itself: it
    merges a branch that only appends with the one before.

    Raises:
        ConfigError: more than one group, or a sample without reward, or as :func:`datum_columns`.
    """
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup

    groups = sorted({-1 if sample.group_index is None else sample.group_index for sample in samples})
    if len(groups) != 1:
        raise ConfigError.of("to_trajectory_group(samples)", f"groups {groups}", "the samples of one group")
    trajectories, rewards = [], []
    for branches in by_rollout(samples):
        transitions = [transition for branch in branches for transition in _transitions(branch)]
        transitions[-1].episode_done = True
        trajectories.append(Trajectory(transitions=transitions, final_ob=_model_input([])))
        rewards.append(reward_of(branches[-1]))
    return TrajectoryGroup(trajectories, rewards, [{} for _ in trajectories])


def _transitions(sample: Sample) -> list[Any]:
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Transition

    check_fields(sample, "the cookbook's Trajectory", "loss_multiplier", "teacher_log_probs", "advantages", "images")
    split(sample)
    tokens, logprobs = sample.token_column.tolist(), sample.logprob_column
    assert logprobs is not None  # split has checked it
    transitions = []
    for one in sample.completions:
        stop = "length" if one.finish_reason == "length" else "stop"
        action = TokensWithLogprobs(tokens[one.start : one.stop], logprobs[one.start : one.stop].tolist(), stop)
        transitions.append(Transition(ob=_model_input(tokens[: one.start]), ac=action, reward=0.0, episode_done=False))
    return transitions


def _model_input(tokens: list[int]) -> Any:
    import tinker

    return tinker.ModelInput.from_ints(tokens)


class TinkerPolicy:
    """A policy over a ``tinker.SamplingClient``, which samples from one set of weights: those with number ``version``.

    ``max_context`` is the context of the model, if known.
    """

    def __init__(self, client: Any, *, version: int, max_context: int | None = None) -> None:
        self.client, self.version, self.max_context = client, version, max_context

    async def complete(
        self,
        tokens: TokenColumn,
        sampling: SamplingParams,
        *,
        stop_token_ids: tuple[int, ...] = (),
        session: str = "",
        route: str = "",
    ) -> Completion:
        import tinker

        check_sampling(sampling, "tinker's SamplingParams", *_NO_FIELD)
        if sampling.stop and stop_token_ids:
            raise ConfigError.of(
                "SamplingParams.stop", sampling.stop, f"none: tinker takes these or ids, {stop_token_ids}"
            )
        check_budget(tokens, sampling, self.max_context)
        asked = tinker.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=[*stop_token_ids] if stop_token_ids else [*sampling.stop] or None,
        )
        response = await self.client.sample(_model_input(tokens.tolist()), 1, asked)
        (sequence,) = response.sequences
        return completion_of(
            tokens,
            sequence.tokens,
            sequence.logprobs,
            trainer="tinker",
            budget=sampling.max_new_tokens,
            stopped_by=sequence.stop_reason,
            version=self.version,
        )

    async def describe(self) -> ServerInfo:
        return ServerInfo(version="tinker", weight_version=str(self.version), max_context=self.max_context)

    async def aclose(self) -> None:
        return None


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
        completion = await self.policy.complete(tokens, sampling, stop_token_ids=ids)
        reason = "length" if completion.finish_reason == "length" else "stop"
        return TokensWithLogprobs(completion.tokens.tolist(), completion.logprobs.tolist(), reason)
