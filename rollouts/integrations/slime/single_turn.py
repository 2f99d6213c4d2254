"""Rollouts without a recipe: one reply to a prompt, or a custom generate function of slime.

Invariant: a text prompt is sent unchanged, since slime's data set has already rendered it
(slime 0.3.1, utils/data.py: Dataset); the model's own chat template renders a prompt of messages. Either way the ids
that are sent are the ids that are stored. The samples of a custom generate function stay the same objects
(:mod:`rollouts.integrations.slime.returned_samples`).
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import anyio
import anyio.to_thread
import attrs

from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, StopReason, TokenColumn
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError, ContextOverflow, GenerateFailure
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime.convert import Reading
from rollouts.integrations.slime.custom_calls import CustomCalls, Stopped, ends_its_requests
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.returned_samples import views_of_rollout
from rollouts.integrations.slime.settings import Settings
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory

__all__ = ["codec_of", "generate_single_turn", "generate_with_slime", "prompt_ids"]

_ENDS = {"stop": StopReason.TASK_COMPLETED, "length": StopReason.MAX_TOKENS, "abort": StopReason.ABORTED}

_LONG_TEXT = 8000
"""Characters from which a prompt is encoded in a thread."""
_EMPTY_ABORTS = 30
"""Aborts in a row without a new token after which a resumed rollout counts as lost."""
_BACKOFF_SECONDS = 0.5


async def generate_single_turn(
    prompt: Prompt, *, policy: Policy, endpoint: Endpoint, sampling: SamplingParams, max_context: int | None = None
) -> Sample:
    """Generate one reply; a text prompt goes to the policy directly.

    ``max_context`` bounds prompt and reply together, in tokens.
    """
    if not isinstance(prompt.prompt, str):
        return await agent_rollout_to_sample(
            prompt,
            environment_cls=SingleTurnEnvironment,
            endpoint=endpoint,
            tokenizer=endpoint.model,
            limits=Limits(max_turns=1, max_tokens=max_context),
            sampling=sampling,
            policy=policy,
        )
    text, place = prompt.prompt, f"prompt of group {prompt.group_index}"
    codec, stops = codec_of(endpoint.model)
    if len(text) < _LONG_TEXT:
        ids = prompt_ids(endpoint.model, text)
    else:
        ids = await anyio.to_thread.run_sync(prompt_ids, endpoint.model, text)
    if not len(ids):
        raise GenerateFailure(f"{place}: got {text!r}; expected text of at least one token")
    if max_context is not None:
        if len(ids) >= max_context:
            expected = f"less than {max_context}, rollout_max_context_len"
            raise GenerateFailure(f"{place}: got {len(ids)} tokens; expected {expected}")
        sampling = attrs.evolve(sampling, max_new_tokens=min(max_context - len(ids), sampling.max_new_tokens))
    trajectory = Trajectory()
    trajectory.add_context(ids, prompt.messages)
    try:
        completion = await policy.complete(
            CompletionRequest(trajectory.tokens, sampling, stop_token_ids=stops, session=uuid.uuid4().hex)
        )
    except ContextOverflow as error:
        raise GenerateFailure(f"the prompt does not fit the model's context: {error}") from error
    reply = Message("assistant", codec.decode(completion.tokens.tolist()))
    trajectory.add_reply(completion, reply, temperature=sampling.sent_temperature)
    trajectory.count("generation_seconds", completion.seconds)
    trajectory.seal(_ENDS[completion.finish_reason])
    return trajectory_to_sample(trajectory, prompt, lambda tokens: codec.decode(tokens.tolist()))


@functools.lru_cache(maxsize=4)
def codec_of(model: str) -> tuple[Codec, tuple[int, ...]]:
    """The tokenizer of a model, and the ids that end its turns; :meth:`Pipeline.check` loads it in a thread."""
    tokenizer = load_tokenizer(model)
    return Codec(tokenizer), stop_ids_of(tokenizer)


@functools.lru_cache(maxsize=64)
def prompt_ids(model: str, text: str) -> TokenColumn:
    """The ids of a prompt, read-only; the rollouts of a group have the same prompt."""
    return codec_of(model)[0].encode(text)


async def generate_with_slime(
    prompt: Prompt,
    *,
    args: Any,
    path: str,
    argument: Any,
    params: Mapping[str, Any],
    calls: CustomCalls,
    policy: ResumablePolicy,
    reading: Reading,
    settings: Settings,
    on_abort: Literal["fail", "resume", "restart"],
) -> list[Sample]:
    """Call a custom generate function as slime does: ``(args, sample, sampling_params[, evaluation])``.

    The function sends its own requests to the engines, so it cannot be paused: if it is stopped because its batch is
    full, it starts again from the prompt when the policy is open. Each attempt has its own session.

    Args:
        argument: slime's sample of the rollout, which stays unchanged: the function gets a copy.
        policy: the policy whose pauses and limit hold for the function, too.
        on_abort: what follows a sample that the function returned as aborted: ``"fail"`` loses the attempt,
            ``"resume"`` calls the function again with the sample, as with partial rollouts, ``"restart"`` begins again.
            With ``mask_earlier_versions``, a resumed call trains only the tokens that the function adds.

    Raises:
        GenerateFailure: slime could not use the returned samples.
    """
    function = load_function(path)
    ends_requests, call_of = ends_its_requests(function), _calling(function, args, reading.evaluation)
    begun = functools.partial(_begun, argument, reading.evaluation, settings.keeps_session)
    aborted = records().sample.Status.ABORTED
    returned, empty = begun(), 0
    while True:
        before = returned.response_length
        if on_abort == "resume" and settings.mask_earlier_versions and before:
            returned.loss_mask = [0] * before
        try:
            call = functools.partial(call_of, returned, dict(params))
            returned = await calls.run(policy, call, ends_requests=ends_requests)
        except Stopped:
            empty = 0
            if ends_requests and on_abort == "resume" and returned.response_length:
                returned.status = aborted  # it continues from the sample
            else:
                returned = begun()
            continue
        if on_abort == "fail" or getattr(returned, "status", None) is not aborted:
            break
        empty = empty + 1 if on_abort == "restart" or returned.response_length <= before else 0
        if empty >= _EMPTY_ABORTS:
            break  # the attempt is lost
        if on_abort == "restart":
            returned = begun()
        if empty:
            await anyio.sleep(_BACKOFF_SECONDS)
    try:
        return views_of_rollout(returned, argument, prompt, reading)
    except ConfigError as error:
        raise GenerateFailure(f"{path}: {error}") from error


def _calling(function: Any, args: Any, evaluation: bool) -> Callable[[Any, dict[str, Any]], Awaitable[Any]]:
    """A generate function as one of a sample and sampling parameters, in slime's form or in miles' newer one."""
    parameters = {} if inspect.isclass(function) else inspect.signature(function).parameters
    if next(iter(parameters), "input") == "input":
        return functools.partial(_call_with_input, function, args, evaluation)
    extra = {"evaluation": evaluation} if "evaluation" in parameters else {}
    return functools.partial(function, args, **extra)


async def _call_with_input(function: Any, args: Any, evaluation: bool, sample: Any, params: dict[str, Any]) -> Any:
    """Call a function of one ``GenerateFnInput``; its ``state`` is miles' own, made once for each namespace."""
    base = importlib.import_module(f"{family().package}.rollout.base_types")
    if inspect.isclass(function):
        function = function()
    state = await anyio.to_thread.run_sync(_state_of, args)
    call = base.GenerateFnInput(state=state, sample=sample, sampling_params=params, evaluation=evaluation)
    output = await function(call)
    return output.samples if isinstance(output, base.GenerateFnOutput) else output


_LOCK = threading.Lock()
_state: Any = None


def _state_of(args: Any) -> Any:
    """miles' ``GenerateState`` of a namespace, which loads a tokenizer; that of another namespace is dropped."""
    global _state
    with _LOCK:
        if _state is None or _state.args is not args:
            module = f"{family().package}.rollout.inference_rollout.inference_rollout_common"
            _state = importlib.import_module(module).GenerateState(args)
        return _state


def _begun(argument: Any, evaluation: bool, keeps_session: bool) -> Any:
    """slime's sample for a new attempt. In training it has a session, as in slime; with miles in evaluation, too."""
    sample = copy.deepcopy(argument)
    name = family().session
    if (not evaluation or family().router_policy is not None) and keeps_session and getattr(sample, name) is None:
        setattr(sample, name, str(uuid.uuid4()))
    return sample
