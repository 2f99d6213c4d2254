"""An agentic judge: solver and judge are programs, each in a fresh sandbox. The judge is not trained.

rollouts run judge --out runs/judge
"""

import functools
import sys
from itertools import islice
from pathlib import Path
from typing import Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import calculator_prompts
from rollouts.programs import script
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments import judge
from rollouts.sandboxes import NamespaceSandbox, ProcessSandbox
from rollouts.seats import Seat, play_recipe


@recipe_defaults(max_new_tokens=128)
def recipe(
    endpoint: Endpoint,
    *,
    sandbox: Literal["process", "namespaces"] = "process",
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Made-up sums."""
    box = ProcessSandbox() if sandbox == "process" else NamespaceSandbox(readable=[sys.prefix, sys.base_prefix])
    agent = functools.partial(script, path=Path(judge.__file__).with_name("agent.py"), command=(sys.executable, "-S"))
    seats = {name: Seat(program=agent, sandbox=box, trained=name == "solver") for name in ("solver", "judge")}
    data = islice(calculator_prompts(seed), prompts)
    return play_recipe("judge", endpoint, judge.play, data, seats=seats, seed=seed, **options)
