"""The calculator as an agent that is a program: your script, started as a process for each rollout.

rollouts run calculator_program --out runs/program
"""

import functools
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Unpack

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import calculator_prompts
from rollouts.programs import script
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.launchers.workspace import FilesWorkspace
from rollouts.programs.recipe import function_recipe, program_recipe
from rollouts.recipe import Recipe, RecipeOptions, recipe_defaults
from rollouts.recipes.configs.calculator_grpo import KINDS
from rollouts.recipes.environments import calculator_program
from rollouts.recipes.environments.calculator_program.agent_openai import solve
from rollouts.sandboxes import NamespaceSandbox, ProcessSandbox
from rollouts.training import Sample

SCRIPTS = Path(calculator_program.__file__).parent
ANSWER = "answer.txt"


def workspace_reward(sample: Sample) -> float:
    """1 if the program wrote ``The answer is N.`` with the right N to its workspace, else 0."""
    return float(sample.metadata.get("files", {}).get(ANSWER) == f"The answer is {sample.label}.")


async def agent(client: Any, prompt: Prompt) -> float:
    """The same agent as an async function in the process of the run."""
    return float(await solve(client, prompt.messages[0].text) == f"The answer is {prompt.label}.")


@recipe_defaults(batch_size=16, over_sampling_factor=1.0, max_new_tokens=64, keep="all")
def recipe(
    endpoint: Endpoint,
    *,
    agent_is: Literal["script", "openai_script", "function"] = "script",
    sandbox: Literal["process", "namespaces"] = "process",
    kind: Literal["trained", "one_step_60_99", "unseen_pairs_60_99"] = "trained",
    prompts: int = 2000,
    seed: int = 0,
    **options: Unpack[RecipeOptions],
) -> Recipe:
    """The problems of calculator_grpo, solved by a script without packages, one on the SDK of OpenAI, or a function."""
    shared: dict[str, Any] = {
        "limits": SessionLimits(max_calls=8, max_seconds=120.0),
        "seed": seed,
        **options,
    }
    problems = islice(calculator_prompts(seed, **KINDS[kind]), prompts)
    if agent_is == "function":
        return function_recipe("calculator_program", endpoint, agent, problems, **shared)
    file = "agent.py" if agent_is == "script" else "agent_openai.py"
    command = (sys.executable, "-S") if agent_is == "script" else (sys.executable,)
    return program_recipe(
        "calculator_program",
        endpoint,
        functools.partial(script, path=SCRIPTS / file, command=command),
        problems,
        sandbox=ProcessSandbox() if sandbox == "process" else NamespaceSandbox(readable=[sys.prefix, sys.base_prefix]),
        workspace=FilesWorkspace([ANSWER]),
        reward_fn=workspace_reward,
        **shared,
    )
