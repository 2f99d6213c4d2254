"""The common part of the scripts of this folder: the model server of the program, and one tool."""

import os
import subprocess

MODEL, KEY, URL = (os.environ[name] for name in ("OPENAI_MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL"))


def bash(command: str) -> str:
    """Runs a command and returns its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout or "(nothing)"
