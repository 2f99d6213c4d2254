"""Mathematics with Python as a tool, on DAPO's problems, AIME's, or your own.

    rollouts run retool --endpoint http://HOST:30000 --model Qwen/Qwen3-4B \\
        --data dapo-math-17k.jsonl --out runs/retool
"""

import functools
from typing import Any, Literal

from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.environments.python_tool import REQUIRED
from rollouts.recipe import Recipe, agent_recipe
from rollouts.recipes.environments.retool import STOP, CodeTagsEnvironment, RetoolEnvironment, load_maths
from rollouts.rewards import boxed_math


def recipe(
    endpoint: Endpoint,
    *,
    data: str,
    style: Literal["tools", "tags"] = "tools",
    limit: int | None = None,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 4096,
    max_turns: int = 8,
    keep: Literal["spread", "all"] = "spread",
    history: OnRewrite = "append",
    require: tuple[str, ...] = REQUIRED,
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Problems from a file or ``hub:OWNER/DATASET/PATH``; ``require`` names what the sandbox must enforce.

    With ``style="tags"`` programs and their outputs are text of one assistant turn.
    """
    tags: dict[str, Any] = {"stop": STOP, "dialect": "plain"} if style == "tags" else {}
    return agent_recipe(
        "retool",
        endpoint,
        functools.partial(CodeTagsEnvironment if style == "tags" else RetoolEnvironment, require=require),
        load_maths(data, limit=limit),
        reward_fn=boxed_math,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        keep=keep,
        history=history,
        batches=batches,
        seed=seed,
        **tags,
    )
