"""Tasks in Harbor's format: a folder of them, played by an agent of Harbor or by a program of ours.

rollouts check-task tasks && rollouts run harbor --endpoint http://127.0.0.1:30000 --data tasks --set agent=claude-code
"""

import functools
from pathlib import Path
from typing import Any, Literal, Unpack

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.recipe import Grade, harbor_recipe
from rollouts.programs import script
from rollouts.programs.gateway.session import SessionLimits
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.configs.repositories import PROGRAMS


@recipe_defaults(batch_size=4, n_samples_per_prompt=4, over_sampling_factor=1.0, max_new_tokens=4096)
def recipe(
    endpoint: Endpoint,
    *,
    data: Path | None = None,
    agent: str = "",
    program: Literal["", "claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code", "script"] = "",
    command: tuple[str, ...] = (),
    path: Path | None = None,
    grade: Grade = "auto",
    root: str = "",
    layers: tuple[str, ...] = (),
    network: Literal["none", "task"] = "none",
    ignore: tuple[str, ...] = (),
    variables: tuple[str, ...] = (),
    reward_key: str = "",
    max_calls: int = 100,
    max_seconds: float = 3600.0,
    warm: int | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """agent: of Harbor (needs rollouts[harbor]); program: of ours, script with path; root: one image for all tasks.

    layers: folders over every image, e.g. with an agent.
    """
    if data is None:
        raise ConfigError.of("data", None, "a folder of tasks: --data FOLDER")
    launch: Any = None
    if program == "script":
        if path is None:
            raise ConfigError.of("path", None, "the file of the script")
        launch = functools.partial(script, path=path)
    elif program:
        launch = PROGRAMS[program]
    if launch is not None and command:
        launch = functools.partial(launch, command=command)
    return harbor_recipe(
        "harbor",
        endpoint,
        data,
        agent=agent or None,
        program=launch,
        grade=grade,
        boxes=BoxOptions(root=root or None, layers=layers, network=network, ignore=ignore),
        variables=variables,
        reward_key=reward_key or None,
        limits=SessionLimits(max_calls=max_calls, max_seconds=max_seconds),
        warm=warm,
        seed=seed,
        **options,
    )
