"""Rollouts without a recipe: one reply to a prompt, or a custom generate function of slime.

Invariant: a text prompt is sent unchanged, since slime's data set has already rendered it; a prompt of messages is
rendered by the model's own chat template. Either way the ids that are sent are the ids that are stored. The samples of
a custom generate function stay the same objects (:mod:`rollouts.integrations.slime.returned_samples`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from rollouts.dtypes import Message, Prompt, SamplingParams, StopReason, packed_tokens
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError, ContextOverflow, GenerateFailure
from rollouts.inference.base import Policy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.integrations.slime.custom_calls import CustomCalls, Stopped, ends_its_requests
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.returned_samples import views_of_rollout
from rollouts.integrations.slime.settings import load_function
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory

__all__ = ["codec_of", "generate_single_turn", "generate_with_slime"]

_ENDS = {"stop": StopReason.TASK_COMPLETED, "length": StopReason.MAX_TOKENS, "abort": StopReason.ABORTED}

_EMPTY_ABORTS = 30
"""Aborts in a row without a new token after which a resumed rollout counts as lost."""
_BACKOFF_SECONDS = 0.5


async def generate_single_turn(
    prompts: Sequence[Prompt], *, policy: Policy, model: str, sampling: SamplingParams, endpoint: Any
) -> list[Sample]:
    """Generate one reply to each prompt; a text prompt goes to the policy directly."""
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
    codec, stops = await anyio.to_thread.run_sync(codec_of, model)
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
def codec_of(model: str) -> tuple[Codec, tuple[int, ...]]:
    """The tokenizer of a model, and the ids that end its turns; no chat template is needed."""
    tokenizer = load_tokenizer(model)
    return Codec(tokenizer), stop_ids_of(tokenizer)


async def generate_with_slime(
    prompts: Sequence[Prompt],
    *,
    args: Any,
    path: str,
    template: Callable[[Prompt], Any],
    params: Mapping[str, Any],
    calls: CustomCalls,
    policy: ResumablePolicy,
    reward_key: str | None = None,
    any_reward: bool = False,
    evaluation: bool = False,
    resumes: bool = False,
    mask_earlier: bool = False,
) -> list[Sample]:
    """Call a custom generate function as slime does: ``(args, sample, sampling_params[, evaluation])``.

    The function sends its own requests to the engines, so it cannot be paused: if it is stopped because its batch is
    full, it starts again from the prompt when the policy is open. Each attempt has its own session.

    Args:
        prompts: one per rollout.
        args: slime's namespace.
        path: dotted path of the function.
        template: returns slime's sample of a prompt.
        params: slime's sampling parameters, passed to the function.
        calls: limits and stops the calls.
        policy: the policy whose pauses and limit hold for the function, too.
        reward_key: the entry of a dict reward that is trained on.
        any_reward: whether a reward needs no number, because a function of the launch makes it one later.
        evaluation: passed to a function that has this parameter.
        resumes: with partial rollouts: the function is called again with the sample that it returned as aborted.
        mask_earlier: train only the tokens that the function adds to such a sample.

    Raises:
        GenerateFailure: slime could not use the returned samples.
    """
    samples: list[Sample] = []
    for prompt in prompts:
        given = template(prompt)
        function = load_function(getattr(given, "generate_function_path", None) or path)
        ends_requests = ends_its_requests(function)
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        returned: Any = _begun(given, evaluation)
        empty = 0
        while True:
            before = returned.response_length
            if mask_earlier and before:
                returned.loss_mask = [0] * before
            try:
                call = functools.partial(function, args, returned, dict(params), **extra)
                returned = await calls.run(policy, call, ends_requests=ends_requests)
            except Stopped:
                empty = 0
                if ends_requests and resumes and returned.response_length:
                    returned.status = records().sample.Status.ABORTED  # it goes on from what stands on the sample
                else:
                    returned = _begun(given, evaluation)
                continue
            if not resumes or getattr(returned, "status", None) is not records().sample.Status.ABORTED:
                break
            empty = empty + 1 if returned.response_length <= before else 0
            if empty >= _EMPTY_ABORTS:
                break  # the attempt is lost
            if empty:
                await anyio.sleep(_BACKOFF_SECONDS)
        try:
            options: dict[str, Any] = {"reward_key": reward_key, "any_reward": any_reward, "evaluation": evaluation}
            samples += views_of_rollout(returned, given, prompt, **options)
        except ConfigError as error:
            raise GenerateFailure(f"{path}: {error}") from error
    return samples


def _begun(given: Any, evaluation: bool) -> Any:
    """slime's sample for a new attempt; in training it has a session, as in slime."""
    sample = copy.deepcopy(given)
    if not evaluation and sample.session_id is None:
        sample.session_id = str(uuid.uuid4())
    return sample
