"""Rollouts without a recipe: one reply to a prompt, or whatever a custom generate function of slime's does.

Invariant: a prompt that is text goes to the model as it is, since slime's data set has rendered it already; a prompt of
messages is rendered by the model's own chat template. Either way the ids that are sent are the ids that are kept. What
a custom generate function gives is kept as that object (:mod:`rollouts.integrations.slime.returned_samples`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread

from rollouts.dtypes import Message, Prompt, SamplingParams, StopReason, packed_tokens
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError, ContextOverflow, GenerateFailure
from rollouts.inference.base import Policy
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.returned_samples import keep
from rollouts.integrations.slime.settings import load_function
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory

__all__ = ["generate_single_turn", "generate_with_slime", "sampling_dict"]

_ENDS = {"stop": StopReason.TASK_COMPLETED, "length": StopReason.MAX_TOKENS, "abort": StopReason.ABORTED}

_EMPTY_ABORTS = 30
"""Aborts in a row without a further token after which a rollout that is resumed counts as lost."""
_BACKOFF_SECONDS = 0.5


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
    reward_key: str | None = None,
    evaluation: bool = False,
    resume: Callable[[], Awaitable[None]] | None = None,
    mask_earlier: bool = False,
) -> list[Sample]:
    """Call a custom generate function as slime does: ``(args, sample, sampling_params[, evaluation])``.

    It talks to the engines by itself, so it cannot be paused. Each attempt has a session of its own.

    Args:
        prompts: one for each rollout.
        args: slime's namespace.
        path: the function's.
        template: slime's sample of a prompt.
        sampling: what the function is told.
        reward_key: the part of a reward that is its number.
        evaluation: told to a function that asks for it.
        resume: with partial rollouts, returns when sampling may go on: the function is then called again with a sample
            that it gave back aborted, as slime does.
        mask_earlier: train only what a function adds to such a sample.

    Raises:
        GenerateFailure: slime could not go on with what it gave.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        given = template(prompt)
        sample = copy.deepcopy(given)
        sample.session_id = sample.session_id or str(uuid.uuid4())
        function = load_function(getattr(sample, "generate_function_path", None) or path)
        options = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        made: Any = sample
        empty = 0
        while True:
            before = made.response_length
            if mask_earlier and before:
                made.loss_mask = [0] * before
            made = await function(args, made, sampling_dict(args, sampling), **options)
            if resume is None or getattr(made, "status", None) is not records().sample.Status.ABORTED:
                break
            empty = empty + 1 if made.response_length <= before else 0
            if empty >= _EMPTY_ABORTS:
                break  # a lost attempt: nothing comes any more
            if empty:
                await anyio.sleep(_BACKOFF_SECONDS)
            await resume()
        try:
            samples += keep(made, given, prompt, reward_key=reward_key, evaluation=evaluation)
        except ConfigError as error:
            raise GenerateFailure(f"{path}: {error}") from error
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
