"""Recordings: the replayable events in their order; a function whose events cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollouts.dtypes import Prompt, SamplingParams, packed_tokens
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, EndpointRefused, ReplayDiverged
from rollouts.inference.base import CompletionRequest
from rollouts.runs.journal import Journal
from rollouts.runs.recording import RECORDING, Recording, recorded, replayed_from
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Sample

PROMPT = packed_tokens([1, 2, 3])


async def ask(prompts: Sequence[Prompt], environment_cls: object = None, policy: object = None) -> list[Sample]:
    """One question, without an environment."""
    reply = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=4)))  # type: ignore[attr-defined]
    return [Sample(tokens=reply.tokens)]


async def deaf(prompts: Sequence[Prompt]) -> list[Sample]:
    return []


async def record(run: Path, *replies: list[int]) -> None:
    """One rollout for each reply, all of index 0, until the script ends."""
    with Journal(run / RECORDING) as journal:
        generate = recorded(ask, journal, CalculatorEnvironment, ScriptedPolicy(replies))
        for _ in replies:
            await generate([Prompt("?", index=0)])
        with pytest.raises(EndpointRefused):
            await generate([Prompt("?", index=1)])


async def test_the_tape_is_the_last_attempt(tmp_path: Path) -> None:
    """Earlier attempts are not on the tape; an error of the endpoint is replayed as an error."""
    await record(tmp_path, [4, 5], [6, 7, 8])
    recording = Recording(tmp_path)
    play = replayed_from(ask, recording.tape, CalculatorEnvironment, {})
    (sample,) = await play([Prompt("?", index=0)])
    assert sample.tokens == [6, 7, 8]
    with pytest.raises(EndpointRefused, match="no further reply"):
        await play([Prompt("?", index=1)])


async def test_a_rollout_that_is_on_no_tape_diverges_at_once(tmp_path: Path) -> None:
    """The tape stores the first divergence."""
    await record(tmp_path, [4])
    tape = Recording(tmp_path).tape(9)
    play = replayed_from(ask, lambda _: tape, CalculatorEnvironment, {})
    with pytest.raises(ReplayDiverged, match="rollout 9, event 0: got a request for complete; expected nothing"):
        await play([Prompt("?", index=9)])
    with pytest.raises(ReplayDiverged, match="event 0"):
        tape.check()


async def test_a_function_that_cannot_be_given_a_policy_is_refused(tmp_path: Path) -> None:
    """Before the run begins."""
    with Journal(tmp_path) as journal, pytest.raises(ConfigError, match="'deaf'; expected a generate function that"):
        recorded(deaf, journal, CalculatorEnvironment, ScriptedPolicy([]))
