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
    from rollouts.programs.launchers.aider import aider
    from rollouts.programs.launchers.base import Launch, ModelServer, Program
    from rollouts.programs.launchers.claude_code import claude_code
    from rollouts.programs.launchers.cline import cline
    from rollouts.programs.launchers.codex import codex
    from rollouts.programs.launchers.mini_swe_agent import mini_swe_agent
    from rollouts.programs.launchers.opencode import opencode
    from rollouts.programs.launchers.openhands import openhands
    from rollouts.programs.launchers.pi import pi
    from rollouts.programs.launchers.qwen_code import qwen_code
    from rollouts.programs.launchers.script import script
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
        "rollouts.programs.launchers.aider": ("aider",),
        "rollouts.programs.launchers.base": (
            "Launch",
            "ModelServer",
            "Program",
        ),
        "rollouts.programs.launchers.claude_code": ("claude_code",),
        "rollouts.programs.launchers.cline": ("cline",),
        "rollouts.programs.launchers.codex": ("codex",),
        "rollouts.programs.launchers.mini_swe_agent": ("mini_swe_agent",),
        "rollouts.programs.launchers.opencode": ("opencode",),
        "rollouts.programs.launchers.openhands": ("openhands",),
        "rollouts.programs.launchers.pi": ("pi",),
        "rollouts.programs.launchers.qwen_code": ("qwen_code",),
        "rollouts.programs.launchers.script": ("script",),
        "rollouts.programs.recipe": ("function_recipe", "program_recipe"),
        "rollouts.programs.reward": ("repository_reward",),
    },
)
