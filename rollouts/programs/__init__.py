"""Agents that are programs or functions: a wing that the core does not import.

launchers/   how each program is started for one task
gateway/     the model API server that the programs call, with exact token ids
generate.py  samples of one program or function
recipe.py    recipes of programs and functions
reward.py    the reward of a program's change of a repository
task_check.py  a check of tasks before a run
"""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.programs.generate import (
        function_rollout_to_samples,
        generate_function_batch,
        generate_program_batch,
        program_rollout_to_samples,
    )
    from rollouts.programs.launchers import (
        Launch,
        ModelServer,
        Program,
        aider,
        claude_code,
        cline,
        codex,
        mini_swe_agent,
        opencode,
        openhands,
        pi,
        qwen_code,
        script,
    )
    from rollouts.programs.recipe import function_recipe, program_recipe
    from rollouts.programs.reward import repository_reward

__all__ = [
    "Launch",
    "ModelServer",
    "Program",
    "aider",
    "claude_code",
    "cline",
    "codex",
    "function_recipe",
    "function_rollout_to_samples",
    "generate_function_batch",
    "generate_program_batch",
    "mini_swe_agent",
    "opencode",
    "openhands",
    "pi",
    "program_recipe",
    "program_rollout_to_samples",
    "qwen_code",
    "repository_reward",
    "script",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.programs.generate": (
            "function_rollout_to_samples",
            "generate_function_batch",
            "generate_program_batch",
            "program_rollout_to_samples",
        ),
        "rollouts.programs.launchers": (
            "Launch",
            "ModelServer",
            "Program",
            "aider",
            "claude_code",
            "cline",
            "codex",
            "mini_swe_agent",
            "opencode",
            "openhands",
            "pi",
            "qwen_code",
            "script",
        ),
        "rollouts.programs.recipe": ("function_recipe", "program_recipe"),
        "rollouts.programs.reward": ("repository_reward",),
    },
)
