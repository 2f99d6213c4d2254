"""The calculator's problems as Harbor tasks: a folder for each, which a script plays in a box over an image.

    scripts/learn scripts/faults/harbor_recipe.py --kinds= --set root=IMAGE --set tasks=FOLDER

The image needs bash and ``python3``. Also the recipe of ``scripts/faults/crash --harbor IMAGE``.
"""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import calculator_prompts
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.recipe import Grade, harbor_recipe
from rollouts.programs import script
from rollouts.programs.gateway.session import SessionLimits
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.configs.calculator_grpo import KINDS
from rollouts.recipes.environments import calculator_program

__all__ = ["recipe"]

_AGENT = Path(calculator_program.__file__).parent / "agent.py"
_TOML = """schema_version = "1.4"
[environment]
network_mode = "no-network"
docker_image = "given"
workdir = "/app"
storage_mb = 64
[verifier]
timeout_sec = 60
"""
_TEST = """#!/bin/bash
if [ "$(< answer.txt)" = "The answer is {answer}." ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def _written(folder: Path, count: int, seed: int) -> Path:
    """Write the tasks, unless they are there; returns their folder."""
    place = folder / f"trained-{count}-{seed}"
    new = folder / f".{place.name}"
    for number, prompt in enumerate(
        islice(calculator_prompts(seed, **KINDS["trained"]), count) if not place.exists() else ()
    ):
        task = new / f"trained-{number:05}"
        (task / "tests").mkdir(parents=True, exist_ok=True)
        (task / "task.toml").write_text(_TOML)
        (task / "instruction.md").write_text(prompt.messages[0].text)
        (task / "tests" / "test.sh").write_text(_TEST.format(answer=prompt.label))
    if new.exists():
        new.rename(place)
    return place


@recipe_defaults(batch_size=16, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    root: str,
    tasks: Path,
    grade: Grade = "carry",
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """root: the folder of an image with bash and python3; tasks: where the task folders are written."""
    return harbor_recipe(
        "harbor_arithmetic",
        endpoint,
        _written(tasks, prompts, seed),
        program=functools.partial(script, path=_AGENT, command=("python3", "-I", "-S")),
        grade=grade,
        boxes=BoxOptions(root=root),
        limits=SessionLimits(max_calls=8, max_seconds=120.0),
        seed=seed,
        **options,
    )
