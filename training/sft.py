"""TRL's SFTTrainer on a curated data set, and what the form of its rows does: ``scripts/learn --sft``.

    rollouts curate runs/a --to tokens --out data/sft
    python -m training.sft data/sft --model training/start_model --out runs/sft

These two commands train one model. ``scripts/learn --sft`` stores a run of the start model, curates it as token rows
and as chat rows, trains one model on each form of the same rollouts, and evaluates each on tasks that no row is of.

    tokens       the ids and the mask of the rollouts: what ``--to tokens`` wrote
    completion   prompt and completion: everything after the prompt is trained, results of tools, too
    chat         messages with TRL's defaults: everything is trained

Invariant: the three forms have the same rollouts, in the same order. Needs ``rollouts[engine,parquet,trl]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec
from rich.table import Table

from rollouts.commands import main as rollouts
from rollouts.curation import Selection, curate, write_folder
from rollouts.errors import ConfigError, RolloutsError
from rollouts.views.terminal.console import SafeConsole

__all__ = ["Form", "Job", "rows_of_form", "run_verb", "scores_of", "sft_trainer", "train"]

Form: TypeAlias = Literal["tokens", "completion", "chat"]

_START = Path(__file__).parent / "start_model"
_WHERE = "pass_rate in 0.01..0.99"


@attrs.frozen(kw_only=True)
class Job:
    """Configuration of one training."""

    data: Path
    """A data set of ``rollouts curate``."""
    model: Path
    out: Path
    """Folder of the trained model."""
    form: Form = "tokens"
    steps: int = 60
    rows: int = 8
    """Rows of a step."""
    lr: float = 1e-3
    seed: int = 0


def rows_of_form(data: Path, form: Form) -> Any:
    """The rows of a curated data set as a data set of ``datasets``, in the columns that TRL takes.

    Raises:
        ConfigError: the data set is not curated rows of this form.
    """
    from datasets import Dataset, load_dataset

    columns = {"tokens": ("input_ids", "labels"), "completion": ("messages", "tools"), "chat": ("messages", "tools")}
    loaded = load_dataset(str(data), split="train")
    if not {*columns[form]} <= {*loaded.column_names}:
        raise ConfigError.of("data", str(data), f"curated rows with the columns {', '.join(columns[form])}")
    rows = loaded.select_columns(list(columns[form]))
    if form != "completion":
        return rows
    split = []
    for row in rows:
        first = next(place for place, message in enumerate(row["messages"]) if message["role"] == "assistant")
        prompt, completion = row["messages"][:first], row["messages"][first:]
        split.append({"prompt": prompt, "completion": completion, "tools": row["tools"]})
    return Dataset.from_list(split)


def sft_trainer(job: Job) -> Any:
    """TRL's SFTTrainer on the rows of a job, before its first step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(job.out), max_steps=job.steps, per_device_train_batch_size=job.rows, learning_rate=job.lr,
        max_length=None, seed=job.seed, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        args=config,
        train_dataset=rows_of_form(job.data, job.form),
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )


def train(job: Job) -> dict[str, float]:
    """Train a model and save it.

    Returns:
        The number of ``rows``, the ``ids`` and the ``trained`` ids of the first one, the first ``loss``, and the
        ``seconds`` of CPU of the steps.
    """
    trainer = sft_trainer(job)
    first = trainer.data_collator([trainer.train_dataset[0]])
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    job.out.mkdir(parents=True, exist_ok=True)
    trainer.save_model(str(job.out))
    for name in ("generation_config.json", "chat_template.jinja"):  # as the engine and other servers expect them
        if (job.model / name).is_file():
            (job.out / name).write_bytes((job.model / name).read_bytes())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rows": len(trainer.train_dataset),
        "ids": int(first["attention_mask"][0].sum()),
        "trained": int((first["labels"][0] != -100).sum()),
        "loss": losses[0],
        "seconds": seconds,
    }


def compare_forms(out: Path, *, batches: int, tasks: int, seed: int) -> list[dict[str, Any]]:
    """Store a run of the start model, train a model on each form of the same rollouts, and evaluate all."""
    run, held = out / "run", out / "held.jsonl"
    model = ["--model", str(_START)]
    size = ["--tasks", str(tasks), "--rollouts", "4", "--seed", str(seed + 1), "--limit", "1", "--overwrite"]
    run_verb("eval", "calculator_grpo", *model, *size, "--out", str(out / "eval-start"))
    prompts = {row["label"]: row["prompt"] for row in _lines(out / "eval-start" / "greedy.jsonl")}
    held.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts.values()))
    stored = ["--seed", str(seed), "--batches", str(batches), "--quiet", "--overwrite"]
    run_verb("run", "calculator_grpo", *model, *stored, "--out", str(run))
    selection = Selection(where=_WHERE, not_in=(held,))
    write_folder(curate(run, "tokens", selection), out / "tokens", overwrite=True)
    write_folder(curate(run, "chat", selection), out / "chat", overwrite=True)
    results = [{"form": "start model", **scores_of(out / "eval-start")}]
    for form in get_args(Form):
        data = out / ("tokens" if form == "tokens" else "chat")
        trained = train(Job(data=data, model=_START, out=out / f"model-{form}", form=form))
        run_verb(
            "eval", "calculator_grpo", "--model", str(out / f"model-{form}"), *size, "--out", str(out / f"eval-{form}")
        )
        results.append({"form": form, **trained, **scores_of(out / f"eval-{form}")})
    (out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return results


def run_verb(*arguments: str) -> None:
    """Run a command of ``rollouts`` in this process; raises RolloutsError where its exit code is not 0."""
    if rollouts(list(arguments)) != 0:
        raise RolloutsError(f"rollouts {' '.join(arguments)} failed")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def scores_of(folder: Path) -> dict[str, float]:
    """Mean rewards of sampled and greedy rollouts; a failed one counts as not passed."""
    means = {}
    for name, file in (("sampled", "rollouts.jsonl"), ("greedy", "greedy.jsonl")):
        rewards = [row["reward"] or 0.0 for row in _lines(folder / file)]
        means[name] = sum(rewards) / len(rewards)
    return means


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("rows given to SFTTrainer", "rows", "ids of row 0", "trained", "first loss", "CPU s", "T=1", "greedy")
    for result in results:
        numbers = [result.get(name) for name in ("rows", "ids", "trained", "loss", "seconds", "sampled", "greedy")]
        cells = [
            "–" if number is None else f"{number:.3f}" if isinstance(number, float) else str(number)
            for number in numbers
        ]
        table.add_row(result["form"], *cells)
    return table


def main(arguments: Sequence[str]) -> int:
    """Train on one data set, or compare the forms; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.sft", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="data set of rollouts curate; without it, compare the forms")
    parser.add_argument("--model", type=Path, default=_START, help="folder of the model (default: the start model)")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"), help="folder of the results (default: runs/sft)")
    parser.add_argument("--form", choices=get_args(Form), default="tokens", help="with DATA (default: tokens)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--batches", type=int, default=10, help="batches of 16 groups of 8 of the run (default: 10)")
    parser.add_argument("--tasks", type=int, default=64, help="held-out tasks (default: 64)")
    args = parser.parse_args(arguments)
    console = SafeConsole()
    try:
        if args.data is None:
            results = compare_forms(args.out, batches=args.batches, tasks=args.tasks, seed=args.seed)
            console.print(_table(results))
            return 0
        options = {
            name: getattr(args, name) for name in ("data", "model", "out", "form", "steps", "rows", "lr", "seed")
        }
        console.print({"out": str(args.out), **train(Job(**options))})
    except RolloutsError as error:
        with contextlib.suppress(OSError):
            print(f"training.sft: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main(sys.argv[1:]))
