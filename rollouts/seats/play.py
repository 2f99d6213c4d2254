"""Generation of samples by a play: an async function that lets several agents talk in one rollout.

Invariant: one rollout for each prompt: a sample for each branch of each conversation of a trained seat, all with one
``rollout_id``. A frozen seat has no sample and no trained token. A failure of a seat or an exception of the play costs
that rollout and no other; it never ends a conversation as if the agent had lost. ``metadata["seats"]`` names the
conversations, so that ``rollouts check-run`` finds a lost one.

With a log, replies are logged by conversation. After an interruption the play runs again, and gets the kept replies
where it asks the same; else the rollout begins again and is counted. For this a play takes randomness from its prompt
only. This module does not know groups, reward functions or batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack, get_args

import anyio
import anyio.to_thread
import attrs

from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint, Message, OnRewrite, Prompt, SamplingParams
from rollouts.errors import (
    ConfigError,
    EndpointAway,
    EnvironmentFailure,
    Failure,
    GenerateFailure,
    NoReply,
    RolloutsError,
    TokenMismatchError,
    shortened,
)
from rollouts.inference.base import Policy
from rollouts.renderer import RendererOptions
from rollouts.seats.handles import Seats
from rollouts.seats.play_log import PlayLog
from rollouts.seats.seat import Seat, check_seats
from rollouts.seats.table import SeatOptions, Table
from rollouts.training.agent_integration import generate_all, loaded_renderer
from rollouts.training.comparisons import COMPARISON, Comparison, comparison_of
from rollouts.training.sample_validator import copied
from rollouts.training.types import Sample, Status

__all__ = ["PlayFn", "generate_play_batch", "play_rollout_to_samples"]

PlayFn: TypeAlias = Callable[[Any, Prompt], Awaitable[Mapping[str, Any] | None]]
"""``async def play(seats, prompt)``: asks the seats and sets the rewards; returns metadata of all samples, or
``None``."""


async def play_rollout_to_samples(
    prompt: Prompt | str | Sequence[Message | dict[str, Any]],
    *,
    play: PlayFn,
    seats: Mapping[str, Seat],
    endpoint: Endpoint,
    tokenizer: Any,
    sampling: SamplingParams | None = None,
    policy: Policy | None = None,
    history: OnRewrite = "append",
    by: Comparison = "seat",
    **options: Unpack[RendererOptions],
) -> list[Sample]:
    """Run one play, and return the conversations of its trained seats as samples.

    Args:
        prompt: text, messages, or a :class:`Prompt` with label and metadata; given to ``play``.
        play: the function.
        seats: its agents by name.
        endpoint: the model of each seat without an ``endpoint``.
        tokenizer: a transformers tokenizer, the name or folder of one, or a :class:`Renderer`.
        sampling: replaces ``endpoint.sampling``.
        policy: replaces the client of ``endpoint``.
        history: what to do where the chat template rewrites the history; as for :func:`agent_rollout_to_samples`.
        by: which rewards are compared; each sample says so in ``metadata["seat_comparison"]``, and trainers follow it.
        **options: of the renderer, as for :func:`agent_rollout_to_samples`.

    Returns:
        The branches of each conversation, in the order of the seats and of the conversations of a seat. The first has
        ``metadata["frozen_seats"]``: the messages of each conversation of the other seats. A failed rollout has status
        FAILED and the ``failure`` of the seat that failed first, which its message names.

    Raises:
        ConfigError: an argument is wrong, or the play names a seat that does not exist.
        EndpointAway: no server answered for too long.
    """
    if history not in get_args(OnRewrite):
        raise ConfigError.of("history", history, f"one of {get_args(OnRewrite)}")
    checked, kinds = check_seats(seats), comparisons_of(seats, by)
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    log = await _log_of(prompt, history)
    label, given = copied(prompt.label), copied(prompt.metadata)  # a play may change both in place
    prompt = attrs.evolve(prompt, label=copied(label), turn_log=None, urgency=None)
    rest = SeatOptions(
        endpoint=endpoint, tokenizer=tokenizer, sampling=sampling, policy=policy, history=history, renderer=options
    )
    if not log.fits:
        await log.drop()
    table = Table(checked, prompt, rest, log)
    metadata, failure = await _played(table, play)
    if table.diverged:
        await log.drop()
        table = Table(checked, attrs.evolve(prompt, label=copied(label), metadata=given), rest, log)
        metadata, failure = await _played(table, play)
    samples = _samples(table, metadata, failure)
    for sample in samples:
        sample.label = label
        if sample.seat and kinds[sample.seat] != "seat":
            sample.metadata[COMPARISON] = kinds[sample.seat]
    return samples


async def generate_play_batch(
    prompts: Iterable[Prompt | str | Sequence[Message | dict[str, Any]]], **options: Any
) -> list[Sample]:
    """Run :func:`play_rollout_to_samples` with ``options`` for all prompts concurrently.

    With the options bound by ``functools.partial``, it is the ``generate_fn`` of a ``RolloutConfig``.
    """
    return await generate_all(play_rollout_to_samples, prompts, options)


async def check_play(bound: Mapping[str, Any], prompts: Iterable[Prompt]) -> None:
    """Check the options of :func:`generate_play_batch` before a run.

    Raises:
        ConfigError: ``play`` is not an async function of two arguments, the seats are wrong, or the chat template fails
            its self-test for the tools of a seat.
        EnvironmentFailure: the environment of a seat cannot be created or closed.
    """
    play, seats = bound.get("play"), check_seats(bound.get("seats"))
    comparisons_of(seats, bound.get("by", "seat"))
    expected = "async def play(seats, prompt)"
    if not callable(play) or not inspect.iscoroutinefunction(inspect.unwrap(getattr(play, "func", play))):
        raise ConfigError.of("play", play, expected)
    try:
        inspect.signature(play).bind(None, None)
    except TypeError:
        raise ConfigError.of("play", f"{function_name(play)}{inspect.signature(play)}", expected) from None
    given: Any = {name: bound[name] for name in RendererOptions.__annotations__ if name in bound}
    for seat in seats.values():
        if seat.environment_cls is None:
            continue
        what = f"{function_name(seat.environment_cls)}()"
        with boundary(EnvironmentFailure, what, seconds=_CLOSE_SECONDS, before_work=True):
            environment = seat.environment_cls()
            tools = tuple(environment.tools)
            await environment.close()
        renderer = await loaded_renderer(seat.tokenizer or bound.get("tokenizer"), given)
        (await anyio.to_thread.run_sync(renderer.self_test, tools)).raise_if_refused()


def trained_comparisons(bound: Mapping[str, Any]) -> dict[str, str]:
    """The comparison of each trained seat of these options of :func:`generate_play_batch`."""
    seats = check_seats(bound.get("seats"))
    kinds = comparisons_of(seats, bound.get("by", "seat"))
    return {name: kinds[name] for name, seat in seats.items() if seat.trained}


generate_play_batch.comparisons = trained_comparisons  # type: ignore[attr-defined]  # a trainer's door calls it
generate_play_batch.check = check_play  # type: ignore[attr-defined]  # the preflight of a recipe calls it

_CLOSE_SECONDS = 30.0


def comparisons_of(seats: Mapping[str, Seat], by: Comparison) -> dict[str, str]:
    """The comparison of each seat: ``"seat"``, ``"episode"`` or ``"group"``.

    Raises:
        ConfigError: ``by`` is not a comparison, or names a seat that does not exist.
    """
    if not isinstance(by, str | Mapping):
        raise ConfigError.of("by", by, "a comparison, or one for each seat")
    unknown = [] if isinstance(by, str) else sorted(set(by) - set(seats))
    if unknown:
        raise ConfigError.of("by", unknown, f"seats of the play, {sorted(seats)}")
    return {name: comparison_of(Sample(seat=name), by) for name in seats}


async def _log_of(prompt: Prompt, history: OnRewrite) -> PlayLog:
    """The log of a rollout; none where a conversation may fork, since a log has one branch."""
    log = None if prompt.turn_log is None else await prompt.turn_log.claim()
    return PlayLog(log if history == "append" else None, prompt)


async def _played(table: Table, play: PlayFn) -> tuple[dict[str, Any], Failure | None]:
    """Run the play and end its conversations; returns the metadata that it returned, or its failure."""
    metadata: dict[str, Any] = {}
    failure: Failure | None = None
    try:
        name = f"play {function_name(play)}"
        metadata = _returned(await call_foreign(GenerateFailure, name, play, Seats(table), table.prompt), name)
    except (ConfigError, EndpointAway, TokenMismatchError):
        raise
    except RolloutsError as error:
        failure = Failure.of(error)
    finally:
        table.over = True
        for conversation in table.all():
            if conversation.asking:
                text = "still asked when the play returned; expected every ask to be awaited in it"
                table.fail(conversation, GenerateFailure(text))
        with anyio.CancelScope(shield=True):  # each environment has its own deadline
            async with first_error() as tasks:
                for conversation in table.all():
                    tasks.start_soon(conversation.finish)
    if table.raised is not None:
        raise table.raised
    failure = table.failure or failure
    kept = table.log.untaken or any(one.kept for one in table.all())
    if failure is None and kept:
        table.diverged = True
    return metadata, failure


def _returned(value: Any, name: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise GenerateFailure(f"{name}: returned {shortened(value)}; expected metadata, a dict, or None")
    return dict(value or {})


def _samples(table: Table, metadata: Mapping[str, Any], failure: Failure | None) -> list[Sample]:
    """The samples of the trained seats, each with the record of all."""
    prompt, record, frozen = table.prompt, {}, {}
    samples: list[Sample] = []
    for name, conversations in table.conversations.items():
        found = {one.number: branches for one in conversations if (branches := one.samples())}
        first = {str(number): one[0].completions[0].prompt_digest for number, one in found.items()}
        trained = table.seats[name].trained
        record[name] = {"trained": trained, "conversations": first, "policy": table.policy_name(name)}
        if trained:
            samples += [branch for branches in found.values() for branch in branches]
        elif found:
            frozen[name] = [branches[-1].read_record("messages") for branches in found.values()]
    if not samples:
        failure = failure or Failure.of(NoReply("no seat that is trained was asked"))
        named: dict[str, Any] = {"group_index": prompt.group_index, "index": prompt.index, "rollout_id": prompt.index}
        samples = [Sample(prompt=prompt.prompt, label=prompt.label, status=Status.FAILED, **named)]
    for number, sample in enumerate(samples):
        sample.metadata = {**prompt.metadata, **metadata, "seats": record}
        sample.metadata.pop(COMPARISON, None)
        if not number and frozen:
            sample.metadata["frozen_seats"] = frozen
        if failure is not None:
            sample.status, sample.failure = Status.FAILED, failure
    if table.log.restarted:
        samples[0].metrics["restarted_at_resume"] = 1
    return samples
