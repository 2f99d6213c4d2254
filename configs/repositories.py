"""Coding agents on ten small repositories: a program mends a defect, and tests score its change in a fresh sandbox.

rollouts run repositories --endpoint http://127.0.0.1:30000 --set program=codex --out runs/repositories
"""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, Unpack

from rollouts import programs
from rollouts.dtypes import Endpoint, Prompt
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.launchers.workspace import RepositoryWorkspace
from rollouts.programs.recipe import program_recipe
from rollouts.programs.reward import repository_reward
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.environments.repositories.tasks import TASKS
from rollouts.sandboxes import NamespaceSandbox, ProcessSandbox

PROGRAMS: Mapping[str, Callable[..., programs.Launch]] = {
    "aider": programs.aider,
    "claude_code": programs.claude_code,
    "cline": programs.cline,
    "codex": programs.codex,
    "mini_swe_agent": programs.mini_swe_agent,
    "opencode": programs.opencode,
    "openhands": programs.openhands,
    "pi": programs.pi,
    "qwen_code": programs.qwen_code,
}


@recipe_defaults(batch_size=4, n_samples_per_prompt=4, over_sampling_factor=2.0, in_flight=16, max_new_tokens=4096)
def recipe(
    endpoint: Endpoint,
    *,
    program: Literal[
        "aider", "claude_code", "cline", "codex", "mini_swe_agent", "opencode", "openhands", "pi", "qwen_code"
    ] = "claude_code",
    command: tuple[str, ...] = (),
    sandbox: Literal["process", "namespaces"] = "namespaces",
    readable: tuple[str, ...] = (),
    max_calls: int = 60,
    max_seconds: float = 1800.0,
    warm: int | None = None,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """Claude Code, Codex or another program of PROGRAMS, installed on this machine; command starts it.

    At most 16 sandboxes are open at once, and each that closes makes room for the next rollout.
    """
    kind = ProcessSandbox() if sandbox == "process" else NamespaceSandbox(readable=readable)
    launch = PROGRAMS[program]
    return program_recipe(
        "repositories",
        endpoint,
        functools.partial(launch, command=command) if command else launch,
        [Prompt(task.problem, metadata={"task": name}) for name, task in TASKS.items()],
        sandbox=kind,
        workspace=RepositoryWorkspace(TASKS),
        limits=SessionLimits(max_calls=max_calls, max_seconds=max_seconds),
        warm=warm,
        reward_fn=functools.partial(repository_reward, tasks=TASKS, sandbox=kind),
        seed=seed,
        **options,
    )
