"""Scoring in processes: values and failures are returned, deadlines kill, and the event loop is not blocked."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import anyio
import pytest

from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards import exact_match, in_process, numeric_match
from rollouts.rewards.processes import call_in_process
from rollouts.training import Sample
from rollouts.training.scoring import score


async def test_a_rule_in_a_process_scores_as_it_does_here() -> None:
    """Also a partial of one, as the ``reward_fn`` of a run would be called."""
    sample = Sample(messages=[{"role": "assistant", "content": "3.1"}], label="3.14", tokens=[1, 2])
    await score(sample, in_process(partial(numeric_match, absolute=0.1)), seconds=60)
    assert sample.reward == 1.0


async def test_what_it_raises_is_a_failure_with_its_traceback() -> None:
    """The process is reused."""
    first = await call_in_process("pid", os.getpid, seconds=60)
    with pytest.raises(RewardFailure, match=r"root raised ValueError: .*") as caught:
        await call_in_process("root", math.sqrt, -1.0, seconds=60)
    assert "Traceback" in caught.value.__notes__[0]
    with pytest.raises(RewardFailure, match=r"exit raised SystemExit: 3"):
        await call_in_process("exit", sys.exit, 3, seconds=60)
    assert await call_in_process("pid", os.getpid, seconds=60) == first != os.getpid()


async def test_a_late_call_is_killed() -> None:
    """And is a late failure; the next call has a new process."""
    first = await call_in_process("pid", os.getpid, seconds=60)
    with pytest.raises(RewardFailure, match=r"nap did not answer within 0.2 s") as caught:
        await call_in_process("nap", time.sleep, 3600, seconds=0.2)
    assert caught.value.late
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert await call_in_process("pid", os.getpid, seconds=60) != first


async def test_a_process_that_dies_is_a_failure() -> None:
    """Whatever killed it; the next call has a new one."""
    own = await call_in_process("pid", os.getpid, seconds=60)
    with pytest.raises(RewardFailure, match="kill: its process died"):
        await call_in_process("kill", os.kill, own, signal.SIGKILL, seconds=60)
    assert await call_in_process("pid", os.getpid, seconds=60) != own


async def test_the_loop_turns_while_a_process_computes() -> None:
    """Counts iterations of the event loop while another process blocks for half a second."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    await call_in_process("warm", os.getpid, seconds=60)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await call_in_process("busy", _spin, 0.5, seconds=60)
        tasks.cancel_scope.cancel()
    assert turns > 20


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_no_process_outlives_its_loop() -> None:
    """Also without a ``__main__`` guard: workers do not import the script."""
    code = (
        "import os, anyio\n"
        "from rollouts.rewards.processes import call_in_process\n"
        "async def main():\n"
        "    return await call_in_process('pid', os.getpid, seconds=60)\n"
        "print(anyio.run(main))\n"
    )
    root = Path(__file__).parents[2]
    line = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, cwd=root, check=False, timeout=120)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_function_that_no_process_could_find_is_refused() -> None:
    """At once, and not at the first reward."""
    with pytest.raises(ConfigError, match=r"in_process\(reward_fn\).*expected a function at the top of a module"):
        in_process(lambda sample: 1.0)
    stranger = type(exact_match)(exact_match.__code__, {}, "stranger")
    stranger.__module__, stranger.__qualname__ = "rollouts_recipe_mine", "stranger"
    sys.modules["rollouts_recipe_mine"] = module = type(sys)("rollouts_recipe_mine")
    module.stranger = stranger  # type: ignore[attr-defined]
    try:
        with pytest.raises(ConfigError, match=r"rollouts_recipe_mine.stranger"):
            in_process(stranger)
    finally:
        del sys.modules["rollouts_recipe_mine"]
