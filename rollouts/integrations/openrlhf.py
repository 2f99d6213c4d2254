"""OpenRLHF 0.11: samples as what an ``AgentExecutor`` returns, and our agent as the executor.

    out: to_response(sample, prompt, label)
    in:  execute(episodes, …), from the class AgentExecutor of the file that --train.agent_func_path names

Invariant: one row for each rollout, no longer than ``max_length``, which OpenRLHF would cut without a word.
OpenRLHF and vLLM are never imported.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.dtypes import Completion, SamplingParams, TokenColumn
from rollouts.errors import ConfigError
from rollouts.inference.base import ServerInfo
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.integrations.replies import check_budget, check_sampling, completion_of
from rollouts.training.rows import by_rollout, check_fields, reward_of, segments, split, trimmed
from rollouts.training.types import Sample, Status

__all__ = ["OpenRLHFPolicy", "execute", "to_response", "write_batch"]


def to_response(sample: Sample, *, max_length: int | None = None) -> dict[str, Any]:
    """Convert a rollout to the response that ``SamplesGenerator`` makes an ``Experience`` of.

    Args:
        sample: a scored rollout of one branch.
        max_length: OpenRLHF's ``max_len``.

    Raises:
        ConfigError: the sample failed, is unscored, is a branch of several, is longer than ``max_length``, or has a
            field that OpenRLHF has no place for.
    """
    check_fields(sample, "OpenRLHF", "loss_multiplier", "advantages", "teacher_log_probs", "images")
    split(sample)
    row = trimmed(sample)
    if max_length is not None and len(row) > max_length:
        expected = f"at most max_length={max_length} tokens, where OpenRLHF cuts"
        raise ConfigError.of(f"{sample!r}.tokens", len(row), expected)
    assert row.logprob_column is not None  # split has checked it
    reward = reward_of(sample)
    return {
        "prompt": sample.prompt if isinstance(sample.prompt, str) else [_chat(one) for one in sample.prompt],
        "label": sample.label,
        "images": None,
        "mm_train_inputs": None,
        "reward": reward,
        "scores": reward,
        "observation_tokens": row.token_column.tolist(),
        "action_ranges": [(start, stop) for start, stop, sampled in segments(row) if sampled],
        "rollout_log_probs": row.logprob_column.tolist(),
        "truncated": sample.status is Status.TRUNCATED,
        "extra_logs": {"turns": float(sample.turns)},
    }


def write_batch(samples: Sequence[Sample], path: Path) -> None:
    """Write the responses of a batch, one a line; raises as :func:`to_response`, and where a rollout forks."""
    for branches in by_rollout(samples):
        if len(branches) > 1:
            raise ConfigError.of(f"{branches[0]!r}", f"{len(branches)} branches", "one row for each rollout: no forks")
    path.write_bytes(b"".join(msgspec.json.encode(to_response(sample)) + b"\n" for sample in samples))


def _chat(message: Any) -> Any:
    return message.to_chat() if hasattr(message, "to_chat") else message


class OpenRLHFPolicy:
    """A policy over the ``llm_engine`` of an executor, a vLLM engine of OpenRLHF.

    Args:
        engine: the ``llm_engine``.
        asked: the trainer's ``sampling_params``, a ``vllm.SamplingParams``; a copy of it makes each request.
        max_length: the longest sequence.
    """

    def __init__(self, engine: Any, asked: Any, max_length: int) -> None:
        self.engine, self.asked, self.max_length = engine, asked, max_length

    async def complete(
        self,
        tokens: TokenColumn,
        sampling: SamplingParams,
        *,
        stop_token_ids: tuple[int, ...] = (),
        session: str = "",
        route: str = "",
    ) -> Completion:
        check_sampling(sampling, "a request of OpenRLHF", "seed", "stop", "min_p", "repetition_penalty")
        check_budget(tokens, sampling, self.max_length)
        request = copy.deepcopy(self.asked)
        request.max_tokens, request.logprobs = sampling.max_new_tokens, 1
        request.stop_token_ids = list(stop_token_ids)
        answer = await self.engine.generate(tokens.tolist(), request, multi_modal_data=None)
        (output,) = answer.outputs
        ids = list(output.token_ids)
        logprobs = None if output.logprobs is None else [
            entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)
        ]  # fmt: skip
        return completion_of(
            tokens,
            ids,
            logprobs,
            trainer="OpenRLHF",
            budget=sampling.max_new_tokens,
            stopped_by=output.finish_reason,
            version="unknown",
        )

    async def describe(self) -> ServerInfo:
        return ServerInfo(version="openrlhf", max_context=self.max_length)

    async def aclose(self) -> None:
        return None


async def execute(
    episodes: Episodes,
    prompt: Any,
    label: Any,
    sampling_params: Any,
    max_length: int,
    hf_tokenizer: Any,
    llm_engine: Any,
    images: Any = None,
) -> dict[str, Any]:
    """Play one rollout: the body of ``AgentExecutor.execute``, with ``episodes`` before its arguments.

    Raises:
        ConfigError: there are images, or the rollout forks.
        GenerateFailure: the rollout failed all attempts.
    """
    if images:
        raise ConfigError.of("images", images, "none: a rollout is text")
    budget = sampling_params.max_tokens or max_length
    sampling = SamplingParams(
        temperature=sampling_params.temperature,
        top_p=sampling_params.top_p,
        top_k=sampling_params.top_k if sampling_params.top_k > 0 else -1,
        max_new_tokens=budget,
        min_new_tokens=sampling_params.min_tokens,
    )
    policy = OpenRLHFPolicy(llm_engine, sampling_params, max_length)
    samples = await episodes.play(prompt_of(prompt, label=label), lambda: policy, hf_tokenizer, sampling)
    if len(samples) != 1:
        raise ConfigError.of("execute", f"{len(samples)} branches", 'one row: history="append" of the episodes')
    return {**to_response(samples[0], max_length=max_length), "prompt": prompt}
