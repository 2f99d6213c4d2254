"""Rollouts without a recipe: one reply to a prompt, or whatever a custom generate function of slime's does.

Invariant: a prompt that is text goes to the model as it is, since slime's data set has rendered it already; a prompt of
messages is rendered by the model's own chat template. Either way the ids that are sent are the ids that are kept.
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread

from rollouts.dtypes import Message, Prompt, SamplingParams, StopReason, packed_tokens
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ContextOverflow, GenerateFailure
from rollouts.inference.base import Policy
from rollouts.integrations.slime.convert import from_slime, leaves
from rollouts.integrations.slime.settings import load_function
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory

__all__ = ["generate_single_turn", "generate_with_slime", "sampling_dict"]

_ENDS = {"stop": StopReason.TASK_COMPLETED, "length": StopReason.MAX_TOKENS, "abort": StopReason.ABORTED}


async def generate_single_turn(
    prompts: Sequence[Prompt], *, policy: Policy, model: str, sampling: SamplingParams, endpoint: Any
) -> list[Sample]:
    """One reply to each prompt; the policy is asked directly where the prompt is text."""
    samples = []
    for prompt in prompts:
        if isinstance(prompt.prompt, str):
            samples.append(await _continue_text(prompt, prompt.prompt, policy, model, sampling))
        else:
            samples.append(
                await agent_rollout_to_sample(
                    prompt,
                    environment_cls=SingleTurnEnvironment,
                    endpoint=endpoint,
                    tokenizer=model,
                    max_turns=1,
                    sampling=sampling,
                    policy=policy,
                )
            )
    return samples


async def _continue_text(prompt: Prompt, text: str, policy: Policy, model: str, sampling: SamplingParams) -> Sample:
    codec, stops = await anyio.to_thread.run_sync(_codec, model)
    ids = packed_tokens(await anyio.to_thread.run_sync(codec.encode, text))
    if not len(ids):
        raise GenerateFailure(
            f"prompt of group {prompt.group_index}: got {text!r}; expected text of at least one token"
        )
    trajectory = Trajectory()
    trajectory.add_context(ids, prompt.messages)
    try:
        completion = await policy.complete(trajectory.tokens, sampling, stop_token_ids=stops, session=uuid.uuid4().hex)
    except ContextOverflow as error:
        raise GenerateFailure(f"the prompt does not fit the model's context: {error}") from error
    trajectory.add_reply(completion, Message("assistant", codec.decode(completion.tokens.tolist())))
    trajectory.count("generation_seconds", completion.seconds)
    trajectory.seal(_ENDS[completion.finish_reason])
    return trajectory_to_sample(trajectory, prompt, lambda tokens: codec.decode(tokens.tolist()))


@functools.lru_cache(maxsize=4)
def _codec(model: str) -> tuple[Codec, tuple[int, ...]]:
    """The tokenizer of a model, and the ids that end its turns; it needs no chat template."""
    tokenizer = load_tokenizer(model)
    return Codec(tokenizer), stop_ids_of(tokenizer)


async def generate_with_slime(
    prompts: Sequence[Prompt],
    *,
    args: Any,
    path: str,
    template: Callable[[Prompt], Any],
    sampling: SamplingParams,
    evaluation: bool = False,
) -> list[Sample]:
    """Call a custom generate function as slime does: ``(args, sample, sampling_params[, evaluation])``.

    It talks to the engines by itself, so it can be neither paused nor resumed.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        sample = copy.deepcopy(template(prompt))
        function = load_function(getattr(sample, "generate_function_path", None) or path)
        options = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        made = await function(args, sample, sampling_dict(args, sampling), **options)
        samples += [from_slime(entry, prompt) for entry in leaves(made)]
    return samples


def sampling_dict(args: Any, sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as slime hands them to a generate function."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": getattr(args, "rollout_stop_token_ids", None),
        "skip_special_tokens": bool(getattr(args, "rollout_skip_special_tokens", False)),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
