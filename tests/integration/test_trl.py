"""The real TRL on the demo model: optimizer steps of both trainers, and a loss without environment tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anyio.from_thread
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.errors import ConfigError
from rollouts.integrations.trl import RolloutFunc, RolloutWorker, WeightTransfer, dataset_rows, env_reward, to_row
from rollouts.training import DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from training.trl_grpo import Job, train

pytest.importorskip("trl", reason="trl is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # trl, accelerate and datasets issue warnings of their own

STEPS = 5
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The embedded engine in its own process, as for a trainer."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with anyio.from_thread.start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(engine_process(DEMO_MODEL, log)) as engine:
            sampling = SamplingParams(max_new_tokens=48)
            yield Endpoint(model=str(DEMO_MODEL), base_url=engine.url, sampling=sampling)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def exact(sample: Sample) -> float:
    last = sample.messages[-1] if sample.messages else {}
    return float(last.get("role") == "assistant" and last.get("content") == f"The answer is {sample.label}.")


def config_for(endpoint: Endpoint, **sizes: Any) -> RolloutConfig:
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=CalculatorEnvironment,
        endpoint=endpoint,
        tokenizer=endpoint.model,
        max_turns=3,
    )
    return RolloutConfig(
        generate_fn=generate_fn, reward_fn=exact, **{"batch_size": 4, "n_samples_per_prompt": 4, **sizes}
    )


def weights_of(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def moved(before: dict[str, Any], model: Any) -> bool:
    return any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


# -- GRPOTrainer(rollout_func=...) -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return list(islice(calculator_prompts(3), 40))


def grpo_trainer(rollout_func: RolloutFunc, prompts: list[Prompt], out: Path, **options: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=16, num_generations=4, max_steps=STEPS, learning_rate=1e-3,
        max_completion_length=256, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", bf16=False,
        gradient_checkpointing=False, temperature=1.0, beta=0.0, disable_tqdm=True, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32),
            reward_funcs=env_reward,
            args=args,
            train_dataset=Dataset.from_list(dataset_rows(prompts)),
            processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL),
            rollout_func=rollout_func,
        )


def test_the_grpo_trainer_takes_steps_on_our_rollouts(
    endpoint: Endpoint, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Five optimizer steps through ``rollout_func``: rewards arrive, and weights change."""
    with RolloutFunc(config_for(endpoint), prompts, endpoint=endpoint, folder=tmp_path / "weights") as rollout_func:
        trainer = grpo_trainer(rollout_func, prompts, tmp_path)
        before = weights_of(trainer.model)
        trainer.train()
        assert rollout_func.served == STEPS - 1, "the weights that sampled the last batch"
        assert trainer.state.global_step == STEPS
        assert moved(before, trainer.model)
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(logged) == STEPS
        assert all(0 <= entry["reward"] <= 1 for entry in logged)
        assert max(entry["grad_norm"] for entry in logged) > 0


def test_environment_tokens_are_not_in_the_loss_of_the_grpo_trainer(
    endpoint: Endpoint, prompts: list[Prompt], tmp_path: Path
) -> None:
    """TRL's loss does not change if the environment tokens at the end of a row are replaced.

    No sampled token follows them, since it would attend to them. If the mask trains them, the loss changes.
    """
    with RolloutFunc(config_for(endpoint), prompts) as rollout_func:
        trainer = grpo_trainer(rollout_func, prompts, tmp_path)
        rows = [{"prompt": row["prompt"]} for row in dataset_rows(prompts[:4]) for _ in range(4)]
        trainer.model.train()
        inputs = trainer._generate_and_score_completions(rows)
    trainer.current_gradient_accumulation_steps = 1  # what train() would set
    inputs["advantages"] = torch.linspace(-1, 1, len(rows))
    assert not inputs["tool_mask"].bool().all()
    cut, ends = cut_after_environment(inputs)

    def loss(batch: dict[str, Any]) -> float:
        with torch.no_grad():
            return float(trainer._compute_loss(trainer.model, batch))

    other = {**cut, "completion_ids": cut["completion_ids"].clone()}
    for row, start, stop in ends:
        other["completion_ids"][row, start:stop] = (other["completion_ids"][row, start:stop] + 7) % 400
    assert ends
    assert loss(other) == pytest.approx(loss(cut), abs=1e-7)
    trained = {**cut, "tool_mask": torch.ones_like(cut["tool_mask"])}
    trained_other = {**other, "tool_mask": torch.ones_like(cut["tool_mask"])}
    trained["old_per_token_logps"] = trained_other["old_per_token_logps"] = torch.full(
        cut["completion_ids"].shape, -1.0
    )
    assert loss(trained) != pytest.approx(loss(trained_other), abs=1e-4)


def cut_after_environment(inputs: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """The rows up to the end of their first environment tokens, and the range of these tokens."""
    cut = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    ends = []
    for row, mask in enumerate(cut["tool_mask"].tolist()):
        width = int(cut["completion_mask"][row].sum())
        outside = [place for place in range(width) if not mask[place]]
        if not outside:
            continue
        start = outside[0]
        stop = next((place for place in range(start, width) if mask[place]), width)
        cut["completion_mask"][row, stop:] = 0
        ends.append((row, start, stop))
    return cut, ends


def test_the_launcher_trains_on_any_recipe(endpoint: Endpoint, tmp_path: Path) -> None:
    """``training.trl_grpo``: one optimizer step a generation, the server follows, and the model is saved."""
    job = Job(
        recipe=ROOT / "configs" / "calculator_grpo.py",
        endpoint=endpoint.base_url[0],
        model=str(DEMO_MODEL),
        weights=tmp_path / "weights",
        out=tmp_path / "model",
        options={"batch_size": "4", "n_samples_per_prompt": "4", "prompts": "40"},
        steps=2,
        max_completion_tokens=256,
    )
    trainer = train(job)
    assert trainer.state.global_step == 2
    assert [entry["num_tokens"] > 0 for entry in trainer.state.log_history if "reward" in entry] == [True, True]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_launcher_refuses_sizes_that_do_not_divide(endpoint: Endpoint, tmp_path: Path) -> None:
    """The error is raised before anything is loaded: TRL's own error is later and names no option of ours."""
    places = {"weights": tmp_path, "out": tmp_path}
    job = Job(
        recipe=ROOT / "configs" / "calculator_grpo.py",
        endpoint=endpoint.base_url[0],
        model=str(DEMO_MODEL),
        options={"batch_size": "5", "n_samples_per_prompt": "5"},
        **places,
    )
    with pytest.raises(
        ConfigError, match="--rows: got 8; expected a divisor of batch_size x n_samples_per_prompt = 25"
    ):
        train(job)


def test_a_prompt_that_was_not_given_is_refused(endpoint: Endpoint, prompts: list[Prompt]) -> None:
    """TRL passes the text only: an unknown text has no label to score with."""
    with (
        RolloutFunc(config_for(endpoint), prompts) as rollout_func,
        pytest.raises(ConfigError, match="a prompt that RolloutFunc was given"),
    ):
        rollout_func(["What is 1 + 1, again?"], None)


# -- AsyncGRPOTrainer(rollout_worker=..., weight_transfer=...) ---------------------------------------------------------


def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """FlashAttention's variable-length causal attention for the CPU: the queries are the last of the keys."""
    out = torch.empty_like(q)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        queries, keys, values = q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)
        copies = queries.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(copies, 0), values.repeat_interleave(copies, 0)
        places = torch.arange(d - c - (b - a), d - c)
        mask = torch.arange(d - c)[None] <= places[:, None]
        out[a:b] = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=softmax_scale
        ).transpose(0, 1)
    return out


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls of TRL's asynchronous trainer to CUDA (device name) and FlashAttention 3.

    This is the only test that patches other packages: without a GPU there is no other way.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    class Kernels:
        flash_attn_varlen_func = staticmethod(attention)

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: Kernels)


def async_trainer(worker: RolloutWorker, transfer: WeightTransfer, out: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    args = AsyncGRPOConfig(
        output_dir=str(out), per_device_train_batch_size=16, num_generations=4, max_steps=STEPS, learning_rate=1e-3,
        use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", bf16=False, token_budget=4096,
        max_staleness=3, gradient_checkpointing=False, dtype="float32", disable_tqdm=True,
    )  # fmt: skip
    return AsyncGRPOTrainer(
        model=str(DEMO_MODEL),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "never read"}]),
        processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL),
        rollout_worker=worker,
        weight_transfer=transfer,
    )


@pytest.mark.usefixtures("without_gpu")
def test_the_async_trainer_takes_steps_on_our_stream(endpoint: Endpoint, tmp_path: Path) -> None:
    """Five optimizer steps from the queue: weights change and reach the engine, whose tokens have later versions."""
    buffer = DataBuffer(islice(calculator_prompts(5), 400), seed=0)
    worker = RolloutWorker(config_for(endpoint), buffer, rows_ahead=32)
    seen: list[int] = []
    take = worker.rollout_buffer.get

    def noting(*arguments: Any, **options: Any) -> Any:
        row = take(*arguments, **options)
        seen.append(row.model_version)
        return row

    worker.rollout_buffer.get = noting  # type: ignore[method-assign]
    transfer = WeightTransfer(endpoint, DEMO_MODEL, tmp_path / "weights")
    trainer = async_trainer(worker, transfer, tmp_path)
    before = weights_of(trainer.model)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert moved(before, trainer.model)
    assert transfer.version == trainer.model_version == STEPS + 1
    assert min(seen) == 1
    assert max(seen) > 1
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    assert logged[0]["ratio"] == pytest.approx(1.0, abs=1e-3), "the trainer computes the stored logprobs"
    with pytest.raises(RuntimeError, match="generation has ended"):
        worker.check_health(60)


@pytest.mark.usefixtures("without_gpu")
def test_environment_tokens_are_not_in_the_loss_of_the_async_trainer(endpoint: Endpoint, tmp_path: Path) -> None:
    """TRL's packed loss does not change if the environment's last tokens are replaced."""
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow

    buffer = DataBuffer(islice(calculator_prompts(6), 40), seed=0)
    worker = RolloutWorker(config_for(endpoint), buffer)
    trainer = async_trainer(worker, WeightTransfer(endpoint, DEMO_MODEL, tmp_path / "weights"), tmp_path)
    with anyio.from_thread.start_blocking_portal() as portal:
        portal.call(trainer.weight_transfer.folder.mkdir)
        samples = portal.call(worker.manager.generate_batch)
    rows = []
    for number, sample in enumerate(samples):
        mask = sample.mask_column
        first = int(mask.argmax())
        outside = np.flatnonzero(~mask[first:]) + first
        if not len(outside):
            continue
        start = int(outside[0])
        stop = int(np.flatnonzero(mask[start:])[0]) + start if mask[start:].any() else len(mask)
        row = {
            "input_ids": sample.token_column[:stop].astype(np.int64),
            "completion_mask": mask[:stop].astype(np.int64),
            "old_log_probs": sample.logprob_column[:stop],
            "advantage": (-1.0) ** number,
            "group_id": 0,
            "metrics": {"reward": 0.0},
        }
        rows.append((row, start))
    assert len(rows) >= 4

    def loss(rows: list[dict[str, Any]]) -> float:
        tree = TreeRow()
        for row in rows:
            tree.add(row)
        inputs = DataCollatorForRollout(0, 1, groups_trained=set(), metrics=trainer._metrics["train"], token_budget=0)(
            [[tree]]
        )
        trainer.current_gradient_accumulation_steps = 1
        with torch.no_grad():
            return float(trainer.compute_loss(trainer.model, inputs))

    plain = [row for row, _ in rows]
    others = copy.deepcopy(plain)
    for row, (_, start) in zip(others, rows, strict=True):
        row["input_ids"][start:] = (row["input_ids"][start:] + 7) % 400
    assert loss(others) == pytest.approx(loss(plain), abs=1e-6)
    for row in [*plain, *others]:
        row["completion_mask"][1:] = 1
    assert loss(others) != pytest.approx(loss(plain), abs=1e-4)


def test_a_row_of_a_server_without_numbered_versions_is_refused() -> None:
    """TRL counts versions, so a version that is not a number is rejected."""
    from rollouts.dtypes import VersionSpan

    sample = Sample(
        tokens=[1, 2],
        loss_mask=[0, 1],
        rollout_log_probs=[0, -1],
        group_index=0,
        versions=[VersionSpan("default", 1, 2)],
    )
    with pytest.raises(ConfigError, match="expected decimal numbers"):
        to_row(sample, 1.0)
