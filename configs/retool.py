"""Mathematics with Python as a tool, on DAPO's problems, AIME's, or your own.

    rollouts run retool --endpoint http://HOST:30000 --model Qwen/Qwen3-4B \\
        --data dapo-math-17k.jsonl --out runs/retool
"""

import functools
from typing import Any, Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.environments.python_tool import REQUIRED
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.recipes.environments.retool import STOP, CodeTagsEnvironment, RetoolEnvironment, load_maths
from rollouts.rewards import boxed_math


@recipe_defaults(temperature=1.0, max_new_tokens=4096, over_sampling_factor=3.0, in_flight=384)
def recipe(
    endpoint: Endpoint,
    *,
    data: str,
    input_key: str | None = None,
    label_key: str | None = None,
    style: Literal["tools", "tags"] = "tools",
    limit: int | None = None,
    max_turns: int = 8,
    require: tuple[str, ...] = REQUIRED,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Problems from a file or ``hub:OWNER/DATASET/PATH``; ``require`` names the required restrictions.

    With ``style="tags"`` programs and their outputs are text of one assistant turn. The defaults are for asynchronous
    training: 384 rollouts run (1.5 batches), of groups that are 2 versions old on average. For training on-policy set
    ``over_sampling_factor=1`` and ``in_flight=None``.
    """
    tags: dict[str, Any] = {"stop": STOP, "dialect": "plain"} if style == "tags" else {}
    return agent_recipe(
        "retool",
        endpoint,
        functools.partial(CodeTagsEnvironment if style == "tags" else RetoolEnvironment, require=require),
        load_maths(data, limit=limit, prompt=input_key, label=label_key),
        reward_fn=boxed_math,
        max_turns=max_turns,
        seed=seed,
        **tags,
        **options,
    )
