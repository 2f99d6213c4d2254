"""Our manager in the place of verl's agent loop manager (V1): ``agent.agent_loop_manager_class``.

Invariant: each prompt that verl submits ends in exactly one state, ``finished`` with the rows of one whole group, or
``failure``. A group keeps the step in which its prompt was first taken, so that verl's rule of staleness counts the
steps for which it was carried over
(verl 0.9.1, trainer/ppo/v1/replay_buffer.py: ReplayBufferAsync._stale_terminal_keys).

The prompts of training are those of the recipe, in its order, or the groups of a stored run; a prompt that verl submits
is a request for one group. Validation plays verl's own prompts.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.from_thread
import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, GenerateFailure
from rollouts.integrations.episodes import prompt_of, recipe_of
from rollouts.integrations.verl.agent_loop import ServerManagerPolicy, plain, sampling_of
from rollouts.integrations.verl.rows import put_group, worker
from rollouts.runs.reader import load_run
from rollouts.training.comparisons import COMPARISON, comparison_keys, comparison_of
from rollouts.training.evaluation import run_evaluation
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.rows import by_rollout
from rollouts.training.types import Sample, Status

__all__ = ["RolloutsManager"]

_LOG = logging.getLogger(__name__)


class RolloutsManager:
    """An agent loop manager of verl V1. Its options are those of the entry ``rollouts`` of ``agent_loop_config_path``.

    Options: ``recipe`` and ``recipe_options``, or ``run``, the folder of a stored run; ``over_sampling_factor`` of the
    recipe's config; ``version`` as for the loop. At the end of a call nothing stays in flight, because servers may
    sleep between steps: unfinished groups go back to the recipe's buffer, and their finished rollouts are reused.
    """

    def __init__(self, config: Any, llm_client: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self.config, self.rollout, self.llm_client = config, config.actor_rollout_ref.rollout, llm_client
        self.tokenizer = tokenizer
        known = {"recipe", "recipe_options", "run", "over_sampling_factor", "version"}
        for name in options.keys() - known:
            raise ConfigError.of(name, options[name], f"one of {sorted(known)}")
        self.version: int | None = options.get("version")
        self.factor: float | None = options.get("over_sampling_factor")
        self.first_steps: dict[int, int] = {}
        """The step in which each group in work began, by group index."""
        self._idle: list[_Filler] = []
        self._stored: Iterator[list[Sample]] | None = None
        if (options.get("recipe") is None) == (options.get("run") is None):
            raise ConfigError.of("recipe, run", options, "one of them")
        if options.get("run") is not None:
            groups = iter(load_run(Path(options["run"])).groups())
            first = next(groups, [])
            _check_compared("run", first)
            self._stored = itertools.chain([first] if first else [], groups)
        else:
            self.recipe = recipe_of(options["recipe"], options.get("recipe_options"))
            self.recipe.with_options(policy=None, tokenizer=None, sampling=None)  # refused if its function takes none
            ask = getattr(getattr(self.recipe.config.generate_fn, "func", None), "comparisons", None)
            kinds: dict[str, str] = {} if ask is None else ask(self.recipe.bound)
            _check_compared(
                "recipe",
                [
                    Sample(group_index=0, rollout_id=number, seat=name, metadata={COMPARISON: kind})
                    for name, kind in kinds.items()
                    for number in (0, 1)
                ],
            )
        self._portal_context = anyio.from_thread.start_blocking_portal()
        self._portal = self._portal_context.__enter__()
        self._tasks: list[Future[None]] = []

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> Self:
        """Create the manager; verl calls this.

        The workers of verl's reward loop are not used: every row has the reward of the recipe.

        Raises:
            ConfigError: the configuration names no entry ``rollouts``, or an option is wrong; or verl has a teacher, or
                a reward model, which would replace the rewards.
        """
        from omegaconf import OmegaConf
        from verl.utils.fs import copy_to_local
        from verl.utils.tokenizer import hf_tokenizer

        if teacher_client:
            raise ConfigError.of("distillation", "a teacher", "none with RolloutsManager")
        if OmegaConf.select(config, "reward.reward_model.enable"):
            raise ConfigError.of("reward.reward_model.enable", True, "False: rows have the reward of the recipe")
        path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        entries = [plain(OmegaConf.to_container(entry)) for entry in OmegaConf.load(path)] if path else []
        named = [entry for entry in entries if entry.get("name") == "rollouts"]
        if len(named) != 1:
            raise ConfigError.of("agent_loop_config_path", path, "a YAML list with one entry named rollouts")
        options = {name: value for name, value in named[0].items() if name not in ("name", "_target_")}
        tokenizer = hf_tokenizer(copy_to_local(config.actor_rollout_ref.model.path))
        return cls(config, llm_client, tokenizer, options)

    def generate_sequences(self, prompts: Any) -> None:
        """Start to fill the prompts of a ``TensorDict`` with groups, and return.

        Raises:
            GenerateFailure: an earlier call ended with an error.
        """
        for task in self._tasks:
            if task.done() and (error := task.exception()) is not None:
                raise GenerateFailure(f"an earlier step ended: {error}") from error
        self._tasks = [task for task in self._tasks if not task.done()]
        rows = [{name: _entry(column, number) for name, column in prompts.items()} for number in range(len(prompts))]
        self._tasks.append(self._portal.start_task_soon(self._fill, rows))

    def close(self) -> None:
        """End generation; prompts in flight go back to the recipe's data buffer."""
        for task in self._tasks:
            task.cancel()
        self._portal_context.__exit__(None, None, None)

    async def _fill(self, rows: Sequence[dict[str, Any]]) -> None:
        import transfer_queue
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

        of_verl = worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class, self.config, self.tokenizer)
        validate = bool(rows[0].get("validate"))
        partition = "val" if validate else "train"
        open_rows = {str(row["uid"]): row for row in rows}
        step = int(rows[0]["global_steps"])
        try:
            groups = self._validated(rows) if validate else self._trained(len(rows), step)
            async for members in groups:
                uid, row = next(iter(open_rows.items()))
                columns: dict[str, Any] = {
                    name: row[name] for name in ("raw_prompt", "data_source") if validate and name in row
                }
                number = members[0].group_index
                assert number is not None, "a group of the manager has a number"
                await put_group(
                    members,
                    of_verl,
                    uid=uid,
                    global_steps=step if validate else self.first_steps.pop(number, step),
                    partition=partition,
                    version=self.version,
                    columns=columns,
                )
                del open_rows[uid]
        finally:
            for uid in open_rows:
                _LOG.error("no group for prompt %s", uid)
                with anyio.CancelScope(shield=True):
                    await transfer_queue.async_kv_put(key=uid, partition_id=partition, tag={"status": "failure"})

    async def _trained(self, count: int, step: int) -> AsyncIterator[list[Sample]]:
        """Whole groups for training, as many as ``count``."""
        if self._stored is not None:
            for position in range(count):
                members = next(self._stored, None)
                if members is None:
                    raise DataExhausted(f"the stored run has no more groups: {position} of {count} prompts got one")
                yield members
            return
        fillers = [filler for filler in self._idle if filler.manager.config.batch_size == count]
        filler = fillers[0] if fillers else self._filler(count)
        if fillers:
            self._idle.remove(filler)
        filler.step = step
        try:
            samples = await filler.manager.generate_batch()
        finally:
            self._idle.append(filler)  # also after an error: it has accepted groups, and finished rollouts
        for _, group in itertools.groupby(samples, lambda sample: sample.group_index):
            yield _with_replies(list(group))

    def _filler(self, count: int) -> _Filler:
        """A manager of batches of ``count`` groups; calls that overlap have one each, with the buffer in common."""
        filler = _Filler()
        config = attrs.evolve(
            self.recipe.config,
            batch_size=count,
            over_sampling_factor=self.factor or self.recipe.config.over_sampling_factor,
            n_samples_per_prompt=self.rollout.n,
            generate_fn=functools.partial(self._generate, filler, False),
        )
        filler.manager = AsyncRolloutManager(config, self.recipe.data_buffer)
        return filler

    async def _validated(self, rows: Sequence[dict[str, Any]]) -> AsyncIterator[list[Sample]]:
        """The rollouts of each prompt of a validation, in order. A failed one ends the validation."""
        if self._stored is not None:
            raise ConfigError.of("run", "a stored run", "a recipe: a stored run cannot play verl's validation")
        config = attrs.evolve(
            self.recipe.config, generate_fn=functools.partial(self._generate, _Filler(), True), group_rm=False
        )
        prompts = [
            prompt_of(
                row["raw_prompt"],
                label=(row.get("reward_model") or {}).get("ground_truth"),
                metadata=row.get("extra_info"),
            )
            for row in rows
        ]
        each = self.rollout.val_kwargs.n
        rollouts = by_rollout(await run_evaluation(config, prompts, each))
        for number in range(len(rows)):
            samples = [sample for rollout in rollouts[number * each : (number + 1) * each] for sample in rollout]
            failed = next((sample for sample in samples if sample.status is Status.FAILED), None)
            if failed is not None:
                raise GenerateFailure(f"validation: {failed!r}: {failed.failure and failed.failure.message}")
            for sample in samples:
                sample.group_index = number  # each rollout of an evaluation is a group; those of a prompt have one uid
            yield _with_replies(samples)

    async def _generate(self, filler: _Filler, validate: bool, prompts: Sequence[Prompt]) -> Sequence[Sample]:
        (prompt,) = prompts
        if prompt.group_index is not None and not validate:
            self.first_steps.setdefault(prompt.group_index, filler.step)
        of_verl = self.rollout.val_kwargs if validate else self.rollout
        sampling = {name: getattr(of_verl, name) for name in ("temperature", "top_p", "top_k")}
        lengths = self.rollout.prompt_length, self.rollout.response_length
        max_new_tokens = min(self.recipe.endpoint.sampling.max_new_tokens, lengths[1])
        generate: Any = self.recipe.config.generate_fn
        samples: Sequence[Sample] = await generate(
            prompts,
            policy=ServerManagerPolicy(
                self.llm_client, *lengths, filler.step if self.version is None else self.version
            ),
            tokenizer=self.tokenizer,
            sampling=sampling_of(sampling, max_new_tokens),
        )
        if samples[-1].status in (Status.FAILED, Status.ABORTED):
            return samples
        if not any(sample.sampled_tokens for sample in samples):
            raise GenerateFailure(f"the prompt leaves no room for a reply within {lengths}, verl's lengths")
        return samples


@attrs.define(eq=False)
class _Filler:
    """A manager and the step that its groups in work belong to."""

    step: int = 0
    manager: Any = None


def _with_replies(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a sampled token: the last branch of a rollout may have had no room for a reply."""
    return [sample for sample in samples if sample.sampled_tokens]


def _check_compared(what: str, samples: Sequence[Sample]) -> None:
    """Check that the rewards of a group are all compared with each other, as verl does with the rows of a prompt.

    (verl 0.9.1, trainer/ppo/core_algos.py: compute_grpo_outcome_advantage)
    """
    if len(set(comparison_keys(samples))) > 1:
        seats = {sample.seat: comparison_of(sample) for sample in samples}
        expected = "one trained seat compared by seat, or all by group: verl compares all rows of a prompt"
        raise ConfigError.of(f"{what}: comparisons of its seats", seats, expected)


def _entry(column: Any, number: int) -> Any:
    """The value of one row in a column of a ``TensorDict``: a tensor, data of each row, or data of all rows."""
    if type(column).__name__ == "NonTensorStack":
        return column[number].data
    return column.data if type(column).__name__ == "NonTensorData" else column[number]
