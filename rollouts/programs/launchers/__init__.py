"""Agents that are programs: how each is started for one task, with our model server as its only one."""

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

__all__ = [
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
]
