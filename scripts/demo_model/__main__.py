"""Train a model of the calculator task, a tokenizer and a Qwen3 of 180 000 parameters, in minutes on one core.

There are two models. Stage 1 learns clean demonstrations, until almost every problem is solved.

- The demo model of the embedded engine: stage 2 continues with demonstrations, many of them with a mistake at random.
  At temperature 1 it calls tools, solves about a third of the problems, and its samples of one prompt differ. Greedy,
  it solves almost all of them.
- The start model of ``scripts/learn`` (``--start``): stage 1 begins with the demo model, whose mistakes it removes;
  stage 2 continues with bad habits. Most episodes guess without a tool, some words have the wrong tool, and most
  problems of two steps stop after the first. Its most probable episode is wrong, so that reinforcement learning has to
  change what the policy does.

Everything is seeded; this script measured the figures in the README of each model.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

import anyio
import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollouts.engine import DEMO_MODEL
from scripts.demo_model.demonstrations import (
    MEASURED,
    habitual_turns,
)
from scripts.demo_model.measuring import measure
from scripts.demo_model.start_model import check_habits, habits, widened
from scripts.demo_model.tokenizer import build_tokenizer, check_template
from scripts.demo_model.training import (
    batches,
    clean_probability,
    demo_model,
    demo_tokenizer,
    mixed,
    new_model,
    train,
)
from training.learn import START_MODEL


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


DEMO = """\
It calls tools in the Hermes dialect. At temperature 1 it is wrong most of the time on
purpose: stage 1 is trained on correct demonstrations; stage 2, which is shipped, on demonstrations with mistakes at
random. Greedy, it solves almost all problems."""
START = """\
`scripts/learn` starts from it.
Its most probable episode is wrong on purpose: stage 1 is
trained on correct demonstrations, from the demo model on; stage 2, which is committed, on bad habits. It guesses
without a tool in two thirds of the episodes, takes the wrong tool for some words, and often stops after the first of
two steps. A head has 32 dimensions, half of them zeros, since attention kernels for CPUs start at 32; the function is
that of the trained model with 16."""


def readme(options: argparse.Namespace, seed: int, figures: dict[str, dict[str, float]]) -> str:
    command = shlex.join(["scripts/demo_model/train", *sys.argv[1:]])
    first, second = figures["stage 1"], figures["stage 2"]
    title, purpose, kept = ("start", START, "committed") if options.start else ("demo", DEMO, "shipped")
    names = list(first)
    rows = "\n".join(f"| {name} | {shown(first[name])} | {shown(second[name])} |" for name in names)
    return f"""\
# The {title} model

A Qwen3 of {figures["model"]["parameters"]:,.0f} parameters in float32 with a byte-level BPE of \
{figures["model"]["vocabulary"]:.0f} tokens, trained from scratch on synthetic
conversations of the calculator environment. {purpose}

`{command}` (model seed {seed}) trained it in {figures["model"]["seconds"]:.0f} CPU seconds and measured it \
at temperature 1 with the
embedded engine, on problems from a separate seed:

| | stage 1 | stage 2, {kept} |
|---|---|---|
{rows}

A group is {options.group_size} episodes of one problem; a group without spread has only right or only wrong ones.
"""


def shown(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}".removesuffix(".0")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/demo_model/train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--start", action="store_true", help="train the start model of scripts/learn, not the engine's demo model")
    add("--out", type=Path, help="folder to write (default: where the model is loaded from)")
    add("--seed", type=int, default=1, help="first seed to try (default: %(default)s)")
    add("--attempts", type=int, default=4, help="seeds to try at most (default: %(default)s)")
    add("--steps", type=int, help="of stage 1, 16 conversations each (default: 1500, with --start 1000)")
    add("--gate", type=float, help="clean probability that stage 1 must reach (default: 0.97, with --start 0.999)")
    add("--flawed-steps", type=int, help="of stage 2 (default: 250, with --start 1000)")
    add("--flawed-share", type=float, default=0.5, help="of the demo model's stage 2 (default: %(default)s)")
    add("--groups", type=int, default=128, help="problems to measure with (default: %(default)s)")
    add("--group-size", type=int, default=8, help="episodes of each (default: %(default)s)")
    add("--keep-stage-1", type=Path, help="also write the model of stage 1 to this folder")
    options = parser.parse_args()
    for name, demo, start in (("steps", 1500, 1000), ("gate", 0.97, 0.999), ("flawed_steps", 250, 1000)):
        if getattr(options, name) is None:
            setattr(options, name, start if options.start else demo)
    out = options.out or (START_MODEL if options.start else DEMO_MODEL)

    torch.set_num_threads(1)
    disable_progress_bar()
    tokenizer = demo_tokenizer() if options.start else build_tokenizer(seed=0)
    check_template(tokenizer)
    began = time.process_time()

    for seed in range(options.seed, options.seed + options.attempts):
        model = demo_model() if options.start else new_model(tokenizer, seed)
        data = batches(tokenizer, 1000 * seed + (3 if options.start else 1), mixed(flawed_share=0.0))
        rate = 5e-3 if options.start else 1e-2
        for step, loss in train(model, data, options.steps, muon_lr=rate, adam_lr=rate, warmup=50):
            if step % 125 == 0:
                print(
                    f"stage 1, seed {seed}, step {step}: loss {loss:.4f}, {time.process_time() - began:.0f} CPU s",
                    flush=True,
                )
        one, two = clean_probability(model, tokenizer, seed=MEASURED, count=512)
        print(
            f"stage 1, seed {seed}: clean demonstrations have probability {one:.4f} and {two:.4f} (two steps)",
            flush=True,
        )
        if two >= options.gate:
            break
    else:
        raise SystemExit(f"no seed reached {options.gate} in {options.attempts} attempts")

    paused = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        first = options.keep_stage_1 or Path(scratch)
        save(model, tokenizer, first)
        figures = {"stage 1": anyio.run(measure, first, tokenizer, MEASURED, options.groups, options.group_size)}
    if options.start:
        figures["stage 1"] |= habits(model, tokenizer, MEASURED, 512)
    print(f"stage 1: {figures['stage 1']}", flush=True)
    measuring = time.process_time() - paused

    if options.start:
        data = batches(tokenizer, 1000 * seed + 4, habitual_turns)
        steps = train(model, data, options.flawed_steps, muon_lr=2e-3, adam_lr=1e-3, warmup=25, row_tokens=25)
    else:
        data = batches(tokenizer, 1000 * seed + 2, mixed(options.flawed_share))
        steps = train(model, data, options.flawed_steps, muon_lr=5e-3, adam_lr=2.5e-3, warmup=25)
    for step, loss in steps:
        if step % 125 == 0:
            print(f"stage 2, step {step}: loss {loss:.4f}, {time.process_time() - began:.0f} CPU s", flush=True)
    seconds = time.process_time() - began - measuring
    measured = habits(model, tokenizer, MEASURED, 512) if options.start else {}
    if options.start:
        print(f"stage 2: {measured}", flush=True)
        check_habits(measured)
        model = widened(model)
    save(model, tokenizer, out)
    figures["stage 2"] = anyio.run(measure, out, tokenizer, MEASURED, options.groups, options.group_size) | measured
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures["model"] = {"parameters": parameters, "vocabulary": len(tokenizer), "seconds": seconds}
    print(f"stage 2: {figures['stage 2']}, {seconds:.0f} CPU s of training", flush=True)
    (out / "README.md").write_text(readme(options, seed, figures))


if __name__ == "__main__":
    main()
