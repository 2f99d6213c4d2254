"""TRL 1.16: rollouts for the two trainers that accept external ones.

``GRPOTrainer(rollout_func=RolloutFunc(...))`` requests one completion per prompt and waits for it.
``AsyncGRPOTrainer(rollout_worker=RolloutWorker(...), weight_transfer=WeightTransfer(...))`` reads a queue that a stream
of batches fills, with any number of rows per rollout.

Invariant: a row's mask is the sample's, so TRL's loss contains only tokens that the policy sampled; a row's version is
that of the oldest weights that sampled one of its tokens. This module never imports trl.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.from_thread
import attrs

from rollouts.dtypes import ChatDict, Endpoint, Prompt
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, RolloutsError, text_of
from rollouts.inference.weights import update_weights
from rollouts.integrations.leases import LeasedBatch
from rollouts.training.batch import group_advantages
from rollouts.training.comparisons import comparison_of
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.evaluation import run_evaluation, task_key
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.rows import check_fields, check_has_ids, check_temperature, int_version
from rollouts.training.types import Sample, Status

__all__ = [
    "LeasedRolloutWorker",
    "RolloutFunc",
    "RolloutRow",
    "RolloutWorker",
    "WeightTransfer",
    "dataset_rows",
    "env_reward",
    "to_row",
]

_FULL_SECONDS = 0.05
_NO_IMAGES = "TRL, whose trainer makes pixel_values only of the images of its data set,"
"""Extra columns of ``rollout_func`` are passed to rewards, never to the model.

(TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer._generate_and_score_completions)
"""
_LACKING = ("advantages", "teacher_log_probs", "loss_multiplier")
_RANK_BITS, _STEP_BITS = 24, 40
"""Lowest bits of process and step in the index of a rollout, which has 63."""


# -- GRPOTrainer -------------------------------------------------------------------------------------------------------


def dataset_rows(prompts: Iterable[Prompt]) -> list[dict[str, Any]]:
    """Convert prompts to rows of a data set for TRL: ``datasets.Dataset.from_list(dataset_rows(prompts))``."""
    return [{"prompt": [message.to_chat() for message in prompt.messages]} for prompt in prompts]


def env_reward(completions: Sequence[Any], env_reward: Sequence[float | None], **others: Any) -> list[float | None]:
    """The reward function for ``GRPOTrainer``: it returns the rewards of the rollouts; ``None`` for a failed one."""
    return list(env_reward)


class RolloutFunc:
    """The ``rollout_func`` of a ``GRPOTrainer``; a context manager that runs an event loop in a thread.

    ``tools=`` of the trainer must stay unset, or TRL runs its own tool loop over the completions
    (TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer._generate). A rollout that fails all attempts becomes one
    untrained token without a reward: TRL excludes such a row from its group's mean
    (TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer._generate_and_score_completions).

    Args:
        config: provides ``generate_fn``, ``reward_fn`` and deadlines; its sizes are not used.
        prompts: the prompts of the data set, with the labels and metadata that TRL does not pass
            (TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer._generate).
        endpoint: the server that gets new weights before each generation, from the main process; ``None`` for no
            weight updates.
        folder: where weights are written for the server, which must be able to read it.
        pad_token_id: the one token of a failed rollout.

    Attributes:
        served: the trainer's step whose weights the server has; ``None`` before the first generation.
    """

    def __init__(
        self,
        config: RolloutConfig,
        prompts: Iterable[Prompt],
        *,
        endpoint: Endpoint | None = None,
        folder: str | Path | None = None,
        pad_token_id: int = 0,
    ) -> None:
        if endpoint is not None and folder is None:
            raise ConfigError.of("RolloutFunc.folder", None, "a folder for the weights, since endpoint is set")
        self.config = config
        self.endpoint = endpoint
        self.folder = None if folder is None else Path(folder)
        self.pad_token_id = pad_token_id
        self._prompts = {_chat_key(prompt.messages): prompt for prompt in prompts}
        self.served: int | None = None
        self._stack = contextlib.ExitStack()
        self._played: tuple[int, int] = (0, 0)
        """A step of the trainer, and the number of rollouts at it so far."""
        self._portal: anyio.from_thread.BlockingPortal | None = None

    def __enter__(self) -> Self:
        self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal = None
        self._stack.close()

    def __call__(self, prompts: Sequence[str | Sequence[ChatDict]], trainer: Any) -> dict[str, Any]:
        """Generate one completion per prompt, in order.

        TRL has repeated each prompt for its group
        (TRL 1.16.0, trainer/grpo_trainer.py: GRPOTrainer._get_train_sampler).

        Returns:
            Columns with one entry per prompt: ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask`` (lists
            over tokens), ``env_reward``.

        Raises:
            ConfigError: a prompt is not one of ``prompts``, or a rollout forks, which ``rollout_func`` cannot return;
                or a sample has a temperature other than the trainer's, a field that TRL lacks, or a reward that is
                compared within its rollout.
        """
        template_kwargs = getattr(trainer, "chat_template_kwargs", None)
        if template_kwargs:
            expected = "none: TRL renders no prompt here; bind template_kwargs to the generate_fn of the config"
            raise ConfigError.of("GRPOConfig.chat_template_kwargs", template_kwargs, expected)
        if self._portal is None:
            raise RuntimeError("a RolloutFunc is a context manager: with RolloutFunc(...) as rollout_func")
        known = [self._find(prompt) for prompt in prompts]
        self._update_weights(trainer)
        samples = self._portal.call(self._play, known, self._first_index(trainer, len(known)))
        if len(samples) != len(prompts):
            raise ConfigError.of("rollout_func", f"{len(samples)} rows", f"{len(prompts)}, one per prompt: no forks")
        columns: dict[str, list[Any]] = {
            "prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "env_reward": []
        }  # fmt: skip
        for sample in samples:
            for name, value in self._row(sample, trainer.args.temperature).items():
                columns[name].append(value)
        return columns

    async def _play(self, prompts: Sequence[Prompt], first_index: int) -> list[Sample]:
        return await run_evaluation(self.config, prompts, 1, first_index=first_index)

    def _first_index(self, trainer: Any, count: int) -> int:
        """The index of the first of ``count`` rollouts, which is mixed with the seed.

        No other rollout has it: not one of another process, whose prompts may be the same, nor one of another step,
        also where training continues in a new process.
        """
        step, rank = int(trainer.state.global_step), getattr(getattr(trainer, "accelerator", None), "process_index", 0)
        before = self._played[1] if self._played[0] == step else 0
        self._played = step, before + count
        return (step << _STEP_BITS) + (rank << _RANK_BITS) + before

    def _find(self, prompt: str | Sequence[ChatDict]) -> Prompt:
        known = self._prompts.get(_chat_key(Prompt(prompt).messages))
        if known is None:
            raise ConfigError.of("rollout_func(prompts)", prompt, "one of RolloutFunc's prompts")
        return known

    def _update_weights(self, trainer: Any) -> None:
        step = int(trainer.state.global_step)
        if self.endpoint is None or self.folder is None or self._portal is None or step == self.served:
            return
        with _failing_everywhere(is_main=trainer.accelerator.is_main_process):
            if trainer.accelerator.is_main_process:
                folder = self.folder / str(step)
                trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
                self._portal.call(update_weights, self.endpoint, folder, str(step))
                shutil.rmtree(folder)
        trainer.accelerator.wait_for_everyone()
        self.served = step

    def _row(self, sample: Sample, temperature: float) -> dict[str, Any]:
        check_has_ids(sample)
        mask = sample.mask_column
        if sample.status is Status.FAILED or sample.logprob_column is None or not mask.any():
            ids = sample.token_column.tolist() or [self.pad_token_id]
            pad = [self.pad_token_id]
            return {"prompt_ids": ids, "completion_ids": pad, "logprobs": [0.0], "env_mask": [0], "env_reward": None}
        check_temperature(sample, "TRL", temperature)
        check_fields(sample, "TRL", *_LACKING)
        check_fields(sample, _NO_IMAGES, "images")
        if comparison_of(sample) == "episode":
            raise ConfigError.of(f"{sample!r}: comparison", "episode", "seat: TRL compares the rows of one prompt")
        start = int(mask.argmax())
        return {
            "prompt_ids": sample.token_column[:start].tolist(),
            "completion_ids": sample.token_column[start:].tolist(),
            "logprobs": sample.logprob_column[start:].tolist(),
            "env_mask": mask[start:].astype(np.int8).tolist(),
            "env_reward": sample.reward,
        }


@contextlib.contextmanager
def _failing_everywhere(*, is_main: bool) -> Iterator[None]:
    """Run the work of the main process, rank 0; the other ranks wait for its end, and raise its error.

    An error that cannot be pickled is a ``RolloutsError`` with its text there.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:  # noqa: BLE001 - raised again in each process
        error = raised
    dist = sys.modules.get("torch.distributed")  # which a trainer of several processes has imported
    if dist is not None and dist.is_available() and dist.is_initialized():
        shared = [_portable(error) if is_main and error is not None else None]
        dist.broadcast_object_list(shared, src=0)
        error = error or shared[0]
    if error is not None:
        raise error


def _portable(error: BaseException) -> BaseException:
    """The error, or one with its text, that other processes can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - foreign code of the error
        return RolloutsError(f"the main process raised {type(error).__name__}: {text_of(error)}")
    return error


def _chat_key(messages: object) -> str:
    """A key of a prompt's messages, without the ``None`` that TRL fills columns of a data set with."""
    return task_key(messages, None)


# -- AsyncGRPOTrainer --------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class RolloutRow:
    """One row of the trainer's queue; columns are as wide as ``input_ids``.

    Its fields are those of ``RolloutSample`` (TRL 1.16.0, experimental/async_grpo/async_rollout_worker.py).
    """

    prompt: list[ChatDict]
    completion: list[ChatDict]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    """1 where the policy sampled the token."""
    old_log_probs: npt.NDArray[np.float32]
    """0 on context."""
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


def to_row(sample: Sample, advantage: float, *, temperature: float | None = None) -> RolloutRow:
    """Convert a sample to a row.

    Args:
        sample: one row.
        advantage: that of each sampled token.
        temperature: that of the trainer's ``AsyncGRPOConfig``.

    Raises:
        ConfigError: the sample lacks logprobs or a group, a policy version is not a number, it was sampled at another
            temperature, or it has a field that TRL lacks.
    """
    check_has_ids(sample)
    if sample.logprob_column is None or sample.group_index is None:
        raise ConfigError.of("to_row(sample)", sample, "a sample with logprobs and a group")
    check_temperature(sample, "TRL", temperature)
    check_fields(sample, "TRL", *_LACKING)
    check_fields(sample, _NO_IMAGES, "images")
    messages = sample.read_record("messages")
    first = next((n for n, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    return RolloutRow(
        prompt=list(messages[:first]),
        completion=list(messages[first:]),
        input_ids=sample.token_column.astype(np.int64),
        completion_mask=sample.mask_column.astype(np.int64),
        old_log_probs=sample.logprob_column.copy(),
        advantage=float(advantage),
        model_version=int_version(sample),
        group_id=sample.group_index,
        metrics={"reward": float(sample.reward or 0.0), **sample.metrics},
    )


def _rows(samples: Sequence[Sample], temperature: float | None) -> list[RolloutRow]:
    """The rows of whole groups; a sample without a sampled token counts in its group, and has nothing to train."""
    pairs = zip(samples, group_advantages(samples), strict=True)
    return [to_row(one, float(value), temperature=temperature) for one, value in pairs if one.sampled_tokens]


class RolloutWorker:
    """The ``rollout_worker`` of an ``AsyncGRPOTrainer``: fills its queue from a stream, in a thread of this process.

    ``rows_ahead`` and the config's ``over_sampling_factor`` bound how far generation runs ahead of training. TRL drops
    rows that are older than ``max_staleness`` of its config
    (TRL 1.16.0, experimental/async_grpo/async_grpo_trainer.py: RolloutQueueDataset).

    Args:
        config: as for :class:`~rollouts.training.AsyncRolloutManager`.
        data_buffer: the source of prompts; the trainer's own data set is not read.
        rows_ahead: most rows in the queue.
        temperature: that of the trainer's ``AsyncGRPOConfig``; a sample with another ends generation.
    """

    def __init__(
        self, config: RolloutConfig, data_buffer: DataBuffer, *, rows_ahead: int = 256, temperature: float | None = None
    ) -> None:
        self.temperature = temperature
        self.rollout_buffer: queue.Queue[RolloutRow] = queue.Queue(rows_ahead)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.manager = AsyncRolloutManager(config, data_buffer)
        self.model_version = 0
        self._stack = contextlib.ExitStack()
        self._work: Future[None] | None = None
        self._alive_at = time.monotonic()

    def start(self) -> None:
        """Start generation."""
        portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        self._alive_at = time.monotonic()
        self._work = portal.start_task_soon(self._fill)

    def stop(self) -> None:
        """End generation; rollouts in flight go back to the buffer."""
        if self._work is not None:
            self._work.cancel()
        self._stack.close()

    def update_model_version(self, model_version: int) -> None:
        """Store the trainer's current version; rows carry the versions that the server reported with the tokens."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if generation has ended, or has produced no row for ``stale_after_s`` seconds.

        Raises:
            RuntimeError: its cause is the error that ended generation.
        """
        if self._work is not None and self._work.done():
            error = None if self._work.cancelled() else self._work.exception()
            raise RuntimeError(f"generation has ended: {error or 'it was stopped, or data is exhausted'}") from error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            waiting = "; ".join(self.manager.waiting_for(3)) or "nothing"
            raise RuntimeError(f"generation has produced no row for {silent:.0f} s; it waits for {waiting}")

    async def _fill(self) -> None:
        async with self.manager, contextlib.aclosing(self.manager.stream()) as batches:
            async for samples in batches:
                await self._put(samples)

    async def _put(self, samples: Sequence[Sample]) -> None:
        self.metrics_queue.put({f"rollout/{name}": value for name, value in self.manager.metrics.items()})
        for row in _rows(samples, self.temperature):
            row = attrs.evolve(row, enqueued_at=time.time())
            while True:
                self._alive_at = time.monotonic()
                try:
                    self.rollout_buffer.put_nowait(row)
                    break
                except queue.Full:
                    await anyio.sleep(_FULL_SECONDS)


class LeasedRolloutWorker:
    """The ``rollout_worker`` of an ``AsyncGRPOTrainer`` whose batches are leased, e.g. from ``rollouts up``.

    A batch is acknowledged at the first :meth:`update_model_version` after the trainer took its last row. Its lease
    must last that long.

    Args:
        batches: read in a thread of this process.
        rows_ahead: most rows in the queue.
        temperature: that of the trainer's ``AsyncGRPOConfig``; a sample with another ends the worker.
    """

    def __init__(
        self, batches: Iterable[LeasedBatch], *, rows_ahead: int = 256, temperature: float | None = None
    ) -> None:
        self.temperature = temperature
        self.rollout_buffer: queue.Queue[RolloutRow] = queue.Queue(rows_ahead)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        self._batches = iter(batches)
        self._untrained: deque[tuple[int, LeasedBatch]] = deque()
        """The batches, each with the number of rows up to its last one."""
        self._rows = 0
        self._stops = threading.Event()
        self._putting = threading.Lock()
        self._thread = threading.Thread(target=self._fill, name="leased-rollouts", daemon=True)
        self._error: BaseException | None = None
        self._refused: Exception | None = None
        """The error of an acknowledgement."""
        self._alive_at = time.monotonic()

    def start(self) -> None:
        """Start to take batches."""
        self._alive_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take no more batches; unacknowledged groups return when their leases end."""
        self._stops.set()

    def update_model_version(self, model_version: int) -> None:
        """Acknowledge the batches whose rows the trainer took before this step.

        If that fails, no further row is trained, and :meth:`check_health` raises the error: TRL calls this in its
        main process alone (TRL 1.16.0, async_grpo_trainer.py: AsyncGRPOTrainer._sync_weight_merged).
        """
        self.model_version = model_version
        taken = self._rows - self.rollout_buffer.qsize()
        while self._refused is None and self._untrained and self._untrained[0][0] <= taken:
            try:
                self._untrained[0][1].ack(model_version)
            except Exception as error:  # noqa: BLE001 - raised by check_health
                self._refused = error
                with self._putting, contextlib.suppress(queue.Empty):
                    self.stop()
                    while True:
                        self.rollout_buffer.get_nowait()
            else:
                self._untrained.popleft()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no more batches come, or none has come for ``stale_after_s`` seconds.

        Raises:
            RuntimeError: its cause is the error of the batches, or of an acknowledgement.
        """
        error = self._refused or self._error
        if error is not None or (self._thread.ident is not None and not self._thread.is_alive()):
            raise RuntimeError(f"leases have ended: {error or 'the data is exhausted'}") from error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise RuntimeError(f"no batch has come for {silent:.0f} s")

    def _fill(self) -> None:
        try:
            for batch in self._batches:
                rows = _rows(batch.samples, self.temperature)
                self._untrained.append((self._rows + len(rows), batch))
                for row in rows:
                    if not self._put(attrs.evolve(row, enqueued_at=time.time())):
                        return
        except BaseException as error:  # noqa: BLE001 - raised by check_health in the trainer's thread
            self._error = error

    def _put(self, row: RolloutRow) -> bool:
        """Wait for room; whether the row is in the queue, ``False`` after :meth:`stop`."""
        while not self._stops.is_set():
            self._alive_at = time.monotonic()
            with self._putting:
                if not self._stops.is_set() and not self.rollout_buffer.full():
                    self.rollout_buffer.put_nowait(row)  # no other thread puts rows
                    self._rows += 1
                    return True
            self._stops.wait(_FULL_SECONDS)
        return False


class WeightTransfer:
    """The ``weight_transfer`` of an ``AsyncGRPOTrainer``: sends weights to SGLang-protocol servers through a folder.

    The prefix of a request that is in flight during an update is computed again with the new weights, so each token's
    logprob is that of its version. Versions are the trainer's numbers, from 1.

    Args:
        endpoint: the server or servers.
        model: the folder that the model was loaded from: its config is copied next to the new weights.
        folder: where weights are written; the server must be able to read it.
    """

    def __init__(self, endpoint: Endpoint, model: str | Path, folder: str | Path) -> None:
        self.endpoint = endpoint
        self.model = Path(model)
        self.folder = Path(folder)
        self.version = 0

    def init_weight_transfer(self) -> None:
        """Do nothing: no resource stays open between two transfers."""

    def pause(self) -> None:
        """Do nothing: the update itself pauses the server."""

    def resume(self) -> None:
        """Do nothing; see :meth:`pause`."""

    def destroy(self) -> None:
        """Do nothing; see :meth:`init_weight_transfer`."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Load these weights into the server, as the next version.

        Raises:
            EndpointError: a server refused the weights, or could not flush its cache.
        """
        from safetensors.torch import save_file

        self.version += 1
        folder = self.folder / str(self.version)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for file in self.model.glob("*.json"):
            if file.name in ("config.json", "generation_config.json"):
                shutil.copy(file, folder / file.name)
        anyio.run(_send, self.endpoint, folder, str(self.version))
        shutil.rmtree(folder)


async def _send(endpoint: Endpoint, folder: Path, version: str) -> None:
    await update_weights(endpoint, folder, version)
