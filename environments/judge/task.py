"""The play: the solver's program writes a file, and the judge's program reads it in another sandbox."""

from __future__ import annotations

import re

from rollouts.dtypes import Prompt
from rollouts.programs.launchers.workspace import FilesWorkspace
from rollouts.seats import Seats

__all__ = ["play"]

RUBRIC = "A program was asked: {task} Its answer is below. Reply YES if the answer is right, else NO."
_VERDICT = re.compile(r"\b(?:YES|NO)\b")
_FILES = FilesWorkspace(["output.txt"])


async def play(seats: Seats, prompt: Prompt) -> dict[str, str]:
    """One solution and its verdict; a program that writes no file fails the rollout, which is tried again.

    The solution is right if the judge's words are YES and never NO.
    """
    work = await seats.solver.run(workspace=_FILES)
    answer = work.metadata["files"]["output.txt"]
    task = Prompt(RUBRIC.format(task=prompt.messages[-1].text), metadata={"files": {"input.txt": answer}})
    judge = await seats.judge.run(task, workspace=_FILES)
    verdict = judge.metadata["files"]["output.txt"]
    work.reward = float(set(_VERDICT.findall(verdict)) == {"YES"})
    return {"verdict": verdict}
