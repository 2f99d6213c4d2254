"""OpenRLHF 0.11: samples as the results of an ``AgentExecutor``, and our agent as the executor.

    out: to_response(sample, prompt, label)
    in:  execute(episodes, …), from the class AgentExecutor of the file that --train.agent_func_path names;
         AgentInstanceEnvironment(AgentInstance, tokenizer) is an agent instance of OpenRLHF for our manager

Invariant: one row for each rollout, no longer than ``max_length``, where OpenRLHF cuts without a warning
(OpenRLHF 0.11.2, trainer/ppo_utils/samples_generator.py: _process_response_into_experience). OpenRLHF and vLLM are
never imported.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.dtypes import Completion, Prompt, SamplingParams, TokenColumn
from rollouts.environments.adapters.calls import numbers_of
from rollouts.errors import ConfigError
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.integrations.token_episodes import Observation
from rollouts.training.comparisons import by_comparison
from rollouts.training.rows import check_one_branch, check_temperature, reward_of, row_columns, segments
from rollouts.training.types import Sample, Status

__all__ = ["AgentInstanceEnvironment", "OpenRLHFPolicy", "execute", "to_response", "write_batch"]


def to_response(sample: Sample, *, max_length: int | None = None, temperature: float | None = None) -> dict[str, Any]:
    """Convert a rollout to the response that ``SamplesGenerator`` makes an ``Experience`` of.

    Args:
        sample: a scored rollout of one branch.
        max_length: OpenRLHF's ``max_len``.
        temperature: that of OpenRLHF's sampling parameters; samples of another temperature are refused.

    Raises:
        ConfigError: the sample failed, is unscored, is a branch of several, is longer than ``max_length``, was sampled
            at another temperature, or has a field that OpenRLHF has no place for.
    """
    check_temperature(sample, "OpenRLHF", temperature)
    row = row_columns(sample, "OpenRLHF", "loss_multiplier", "advantages", "teacher_log_probs", "images")
    if max_length is not None and len(row.tokens) > max_length:
        expected = f"at most max_length={max_length} tokens, where OpenRLHF cuts"
        raise ConfigError.of(f"{sample!r}.tokens", len(row.tokens), expected)
    reward = reward_of(sample)
    return {
        "prompt": sample.prompt if isinstance(sample.prompt, str) else [_chat(one) for one in sample.prompt],
        "label": sample.label,
        "images": None,
        "mm_train_inputs": None,
        "reward": reward,
        "scores": reward,
        "observation_tokens": row.tokens.tolist(),
        "action_ranges": [(start, stop) for start, stop, sampled in segments(sample) if sampled],
        "rollout_log_probs": row.logprobs.tolist(),
        "truncated": sample.status is Status.TRUNCATED,
        "extra_logs": {"turns": float(sample.turns)},
    }


def write_batch(samples: Sequence[Sample], path: Path, *, temperature: float | None = None) -> None:
    """Write the responses of a batch, one a line; raises as :func:`to_response`, and where a rollout forks.

    Rows that are compared are next to each other: OpenRLHF compares rows by their position.
    """
    check_one_branch(samples, "OpenRLHF")
    compared = by_comparison(samples)
    if len(sizes := {len(members) for members in compared}) > 1:
        expected = "as many rows for each comparison, such as each seat of each group: OpenRLHF compares by position"
        raise ConfigError.of("samples: rows of a comparison", sorted(sizes), expected)
    rows = itertools.chain(*compared)
    responses = [to_response(sample, temperature=temperature) for sample in rows]
    path.write_bytes(b"".join(msgspec.json.encode(response) + b"\n" for response in responses))


def _chat(message: Any) -> Any:
    return message.to_chat() if hasattr(message, "to_chat") else message


class OpenRLHFPolicy(TrainerPolicy):
    """A policy over the ``llm_engine`` of an executor, a vLLM engine of OpenRLHF.

    Args:
        engine: the ``llm_engine``.
        template: the trainer's ``sampling_params``, a ``vllm.SamplingParams``; each request is made from a copy.
        max_length: the longest sequence.
    """

    trainer = "OpenRLHF"
    unsupported = ("seed", "stop", "min_p", "repetition_penalty")

    def __init__(self, engine: Any, template: Any, max_length: int) -> None:
        self.engine, self.template, self.max_context = engine, template, max_length

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        request = copy.deepcopy(self.template)
        request.max_tokens, request.logprobs = sampling.max_new_tokens, 1
        request.stop_token_ids = list(stop_token_ids)
        answer = await self.engine.generate(tokens.tolist(), request, multi_modal_data=None)
        (output,) = answer.outputs
        logprobs = None
        if output.logprobs is not None:
            logprobs = [entry[one].logprob for one, entry in zip(output.token_ids, output.logprobs, strict=True)]
        return Reply(
            tokens=list(output.token_ids), logprobs=logprobs, stopped_by=output.finish_reason, version="unknown"
        )


class AgentInstanceEnvironment:
    """One episode of an ``AgentInstanceBase``, for :func:`~.token_episodes.generate_token_batch`.

    Prompt and feedback are encoded separately, without a chat template
    (OpenRLHF 0.11.2, utils/agent.py: MultiTurnAgentExecutor).

    Args:
        instance_cls: called without arguments.
        tokenizer: that of the trainer, of transformers.
    """

    def __init__(self, instance_cls: Callable[[], Any], tokenizer: Any) -> None:
        self.instance_cls, self.tokenizer = instance_cls, tokenizer

    async def start(self, prompt: Prompt) -> Observation:
        if not isinstance(prompt.prompt, str):
            raise ConfigError.of("prompt", prompt.prompt, "one text, with the chat markup that the instance expects")
        self.instance, self.label = self.instance_cls(), prompt.label
        opening = await self.instance.reset({"observation": prompt.prompt, "label": prompt.label})
        self.text: str = opening["observation"]
        self.tokens = self._encoded(self.text)
        return Observation(self.tokens)

    async def step(self, reply: Completion) -> Observation:
        action = self.tokenizer.decode(reply.tokens.tolist(), skip_special_tokens=False)
        states = {"observation_text": self.text, "action_text": action, "label": self.label}
        result = await self.instance.step(states)
        for name in ("environment_images", "sampling_params"):
            if result.get(name):
                raise ConfigError.of(f"step()[{name!r}]", result[name], "none: text, sampled as the run is configured")
        self.text += action + result["environment_feedback"]
        self.tokens = [*self.tokens, *reply.tokens.tolist(), *self._encoded(result["environment_feedback"])]
        reward = float(result["rewards"])
        if not result["done"]:
            return Observation(self.tokens, reward=reward)
        logs = numbers_of({"scores": result.get("scores"), **result.get("extra_logs", {})}, "step()")
        return Observation(done=True, reward=reward, metrics=logs)

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
        return ids


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
    response = to_response(samples[0], max_length=max_length, temperature=sampling.temperature)
    return {**response, "prompt": prompt}
