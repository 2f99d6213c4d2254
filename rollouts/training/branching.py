"""Branching: several continuations of one rollout from the state after one of its turns.

    generate_fn = partial(generate_branched_batch, turn=3, n=4, environment_cls=…, endpoint=…, tokenizer=…)

Invariant: a branch begins with exactly the ids of its parent up to the fork, as context, and its environment with the
snapshot of that turn; so each sampled token is trained once, in the branch that sampled it. Branches are conversations
0, 1, … of one rollout: number 0 is the whole rollout, the others have ``Sample.parent`` and ``Sample.shared``.

With a log, turns are logged by branch: after an interruption each continues after its last logged turn. This module is
imported on use; it chooses no turn, and knows no rewards.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from rollouts.agent.turn_log import Turn, TurnLog, prompt_digest
from rollouts.base.validators import is_int
from rollouts.concurrency.task_groups import first_error
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import Prompt, SamplingParams, VersionSpan
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, Failure, GenerateFailure
from rollouts.training.agent_integration import agent_rollout_to_sample, generate_all
from rollouts.training.continuation import prompt_of
from rollouts.training.sample_validator import copied
from rollouts.training.types import Sample, Status

__all__ = ["ForkTurn", "branch_rollout", "branched_rollout_to_samples", "check_parents", "generate_branched_batch"]

ForkTurn: TypeAlias = "int | Callable[[Sample], int]"
"""The number of replies that all branches share; or a function of the whole rollout that returns it. A rollout with at
most so many replies has no branches."""


async def branched_rollout_to_samples(prompt: Any, *, turn: ForkTurn, n: int, **options: Any) -> list[Sample]:
    """Play a rollout, and ``n - 1`` other continuations of it from after one of its turns.

    Args:
        prompt: as for :func:`~rollouts.training.agent_rollout_to_sample`.
        turn: where they begin.
        n: the number of leaves, the whole rollout included.
        **options: of :func:`~rollouts.training.agent_rollout_to_sample`; the environment must be resumable.

    Returns:
        The whole rollout and its branches, with one ``rollout_id``, each with the reward of its episode. If one
        fails, all have status FAILED.

    Raises:
        ConfigError: an argument is wrong, or the environment has no snapshots.
    """
    if not is_int(n, 2):
        raise ConfigError.of("n", n, "an integer >= 2")
    if not callable(turn) and not is_int(turn, 1):
        raise ConfigError.of("turn", turn, "an integer >= 1, or a function of a sample")
    _check(options)
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    logs = await _BranchLogs.of_prompt(prompt)
    trunk = attrs.evolve(prompt, turn_log=logs.log(0), label=copied(prompt.label))
    whole = await agent_rollout_to_sample(trunk, **options)
    kept = turn(whole) if callable(turn) else turn
    if not is_int(kept):
        raise ConfigError.of("turn", kept, "an integer, from the function of a sample")
    if whole.status in (Status.FAILED, Status.ABORTED) or not 1 <= kept < whole.turns:
        return [whole]
    return await _branches(whole, kept, n, prompt, logs, options)


async def branch_rollout(sample: Sample, turn: int, n: int, *, turns: Sequence[Turn], **options: Any) -> list[Sample]:
    """Continue a rollout from after one of its turns in ``n - 1`` other ways.

    Args:
        sample: the whole rollout, of one branch.
        turn: the number of its replies that all share.
        n: the number of leaves, ``sample`` included.
        turns: the turns that the rollout logged, with snapshots, such as a :class:`~.TurnLog` saved.
        **options: as for :func:`branched_rollout_to_samples`.

    Returns:
        ``sample`` and its branches.

    Raises:
        ConfigError: the turn has no snapshot, or the turns are those of another rollout.
    """
    if not is_int(n, 2):
        raise ConfigError.of("n", n, "an integer >= 2")
    if not is_int(turn, 1) or turn >= sample.turns:
        raise ConfigError.of("turn", turn, f"1 to {sample.turns - 1}, of the {sample.turns} turns of {sample!r}")
    _check(options)
    prompt = prompt_of(sample)
    logs = _BranchLogs(None, prompt)
    logs.kept[0] = list(turns)
    return await _branches(sample, turn, n, prompt, logs, options)


def _check(options: Mapping[str, Any]) -> None:
    if options.get("history", "append") != "append":
        raise ConfigError.of("history", options["history"], '"append": other rollouts have no turns to branch from')


async def generate_branched_batch(prompts: Iterable[Any], **options: Any) -> list[Sample]:
    """Run :func:`branched_rollout_to_samples` for all prompts concurrently: a ``generate_fn`` with options bound."""
    return await generate_all(branched_rollout_to_samples, prompts, options)


async def _branches(
    whole: Sample, turn: int, n: int, prompt: Prompt, logs: _BranchLogs, options: dict[str, Any]
) -> list[Sample]:
    shared = logs.until(turn, whole)
    sampling = options.get("sampling") or options["endpoint"].sampling
    leaves: dict[int, Sample] = {}

    async def play(number: int) -> None:
        branch = attrs.evolve(prompt, turn_log=logs.log(number, shared), label=copied(prompt.label))
        seeded = {**options, "sampling": _seeded(sampling, number)}
        leaves[number] = _as_branch(await agent_rollout_to_sample(branch, **seeded), number, shared, whole)

    async with first_error() as tasks:
        for number in range(1, n):
            tasks.start_soon(play, number)
    samples = [whole, *(leaves[number] for number in range(1, n))]
    for failed in [one for one in samples if one.status in (Status.FAILED, Status.ABORTED)][:1]:
        for sample in samples:
            sample.status, sample.failure = failed.status, failed.failure
    return samples


def _seeded(sampling: SamplingParams, number: int) -> SamplingParams:
    """The sampling parameters of a branch: with the seed of its parent it would sample the same tokens."""
    if sampling.seed is None:
        return sampling
    return attrs.evolve(sampling, seed=zlib.crc32(f"{sampling.seed}/branch/{number}".encode()) & 0x7FFFFFFF)


def _as_branch(sample: Sample, number: int, kept: Sequence[Turn], whole: Sample) -> Sample:
    """A whole resumed rollout as a branch: the tokens of the kept turns are context, and count for the parent only.

    One that has other tokens failed: it did not resume, but began from the prompt.
    """
    shared = sum(len(turn.tokens) for turn in kept)
    if not np.array_equal(sample.token_column[:shared], whole.token_column[:shared]):
        failure = Failure.of(GenerateFailure(f"branch {number} did not continue the turns of its parent"))
        sample.status, sample.failure = Status.FAILED, sample.failure or failure
        return sample
    mask, logprobs = sample.mask_column.copy(), sample.logprob_column
    mask[:shared] = False
    if logprobs is not None:
        logprobs = np.where(mask, logprobs, np.float32(0))
    dropped = sum(one.start < shared for one in sample.completions)
    before = kept[-1].fields
    metrics = {name: value - before["metrics"].get(name, 0) for name, value in sample.metrics.items()}
    metrics.pop("turns_before_resume", None)
    answered = [max(one - dropped, -1) for one in sample.step_completions or ()]
    past = sum(len(turn.fields["times"]) for turn in kept)
    branch = attrs.evolve(
        sample,
        tokens=sample.token_column,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        response=sample.response,
        messages=list(sample.messages),
        completions=list(sample.completions)[dropped:],
        versions=[
            VersionSpan(span.version, max(span.start, shared), span.stop)
            for span in sample.versions
            if span.stop > shared
        ],
        step_completions=answered or None,
        metrics={name: value for name, value in metrics.items() if value},
        times=Timeline(sample.times.to_list()[past:]),
        conversation=number,
        parent=0,
        shared=shared,
    )
    branch.image_inputs = sample.image_inputs
    return branch.pack()


class _BranchLogs:
    """The turns of one rollout by branch: in memory, where the next branches find them, and in its log."""

    def __init__(self, log: TurnLog | None, prompt: Prompt) -> None:
        self._log = log
        self._digest = prompt_digest(prompt)
        self.kept: dict[int, list[Turn]] = {}

    @classmethod
    async def of_prompt(cls, prompt: Prompt) -> _BranchLogs:
        """The logs of a rollout that begins or resumes; turns of another prompt are dropped."""
        log = None if prompt.turn_log is None else await prompt.turn_log.claim()
        logs = cls(log, prompt)
        for turn in () if log is None else log.turns:
            logs._keep(turn)
        if log is not None and not all(logs._is_ours(turn) for turn in log.turns):
            logs.kept.clear()
            await log.void()
        return logs

    def log(self, number: int, first: Sequence[Turn] = ()) -> TurnLog:
        """The log of a branch, which begins with the turns ``first`` of its parent.

        Its own turns follow if they were sampled after these: a function of the rollout may now choose another turn.
        """

        async def save(turn: Turn | None) -> None:
            if turn is None:
                self.kept.pop(number, None)
                return
            turn = attrs.evolve(turn, fields={**turn.fields, "conversation": f"/{number}"})
            self._keep(_apart(turn))
            if self._log is not None:
                await self._log.save(turn)

        own = self.kept.get(number, [])
        if first:
            follows = bool(own) and own[0].number == first[-1].number + 1
            while own and not (follows and own[-1].resumable):
                own.pop()
        return TurnLog(save, [_apart(turn) for turn in [*first, *own]])

    def _keep(self, turn: Turn) -> None:
        """Add a turn; it replaces those of an earlier beginning, and the first of the whole rollout all branches."""
        number = _number_of(turn)
        if not number and turn.number == 1:
            self.kept.clear()
        earlier = self.kept.get(number, [])
        self.kept[number] = [*(one for one in earlier if one.number < turn.number), turn]

    def until(self, turn: int, whole: Sample) -> list[Turn]:
        """The turns of the whole rollout that its branches share."""
        turns = self.kept.get(0, [])[:turn]
        if len(turns) < turn or not turns[-1].resumable:
            raise ConfigError.of(
                "environment_cls", "no snapshot of a turn", "a resumable environment: snapshot, restore"
            )
        tokens = np.concatenate([one.tokens for one in turns])
        if not np.array_equal(tokens, whole.token_column[: len(tokens)]):
            raise ConfigError.of("turns", "other tokens", f"those of {whole!r}")
        return turns

    def _is_ours(self, turn: Turn) -> bool:
        return _number_of(turn) >= 0 and turn.fields.get("prompt") == self._digest


def _apart(turn: Turn) -> Turn:
    """The turn with a copy of its snapshot: an environment may change what it returned, or was given."""
    return attrs.evolve(turn, fields=copy.deepcopy(dict(turn.fields)))


def _number_of(turn: Turn) -> int:
    name = turn.fields.get("conversation")
    return int(name[1:]) if isinstance(name, str) and name[:1] == "/" and name[1:].isdecimal() else -1


def check_parents(samples: Sequence[Sample], name: str) -> None:
    """Check that the parent of each branch is another conversation of its seat in the rollout.

    Args:
        samples: those of one rollout.
        name: the function that returned them, for the message.

    Raises:
        GenerateFailure: a parent is not.
    """
    conversations = {(sample.seat, sample.conversation) for sample in samples}
    for sample in samples:
        parent = sample.parent
        if parent is not None and (parent == sample.conversation or (sample.seat, parent) not in conversations):
            expected = "another conversation of its seat in the rollout"
            raise GenerateFailure(f"{name}: Sample.parent: got {parent}; expected {expected}")
