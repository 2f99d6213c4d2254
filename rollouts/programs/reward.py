"""The reward of a program's change of a repository: its tests, run in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Mapping

from rollouts.programs.launchers.repository_task import RepositoryTask, evaluate
from rollouts.programs.launchers.workspace import RepositoryWorkspace, diff_of
from rollouts.sandboxes import Sandbox
from rollouts.training.types import Sample

__all__ = ["repository_reward"]


async def repository_reward(sample: Sample, *, tasks: Mapping[str, RepositoryTask], sandbox: Sandbox) -> float:
    """1 if every test of the task passes with the diff of the sample, else 0.

    ``metadata["verdict"]`` gets the outcome, the result of each test and the end of what the tests wrote. A sandbox
    that fails raises, so that it is a failure of the reward and not a 0.

    Args:
        sample: of a rollout with a :class:`~rollouts.programs.launchers.workspace.RepositoryWorkspace` of these tasks.
        tasks: by the name in ``metadata["task"]``.
        sandbox: the kind of the sandbox in which the tests run, opened for each sample.
    """
    task = RepositoryWorkspace(tasks).task(sample.metadata)
    verdict = await evaluate(task, sandbox, diff_of(sample.metadata))
    sample.metadata["verdict"] = {name: value for name, value in verdict.metadata().items() if name != "diff"}
    return float(verdict.resolved)
