"""The turn log: an episode that is interrupted after any turn resumes to the same result."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import numpy as np
import pytest

from rollouts.agent import run_agent
from rollouts.agent.turn_log import Turn, TurnLog, prompt_digest, replayed
from rollouts.concurrency.boundary import waits
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, StopReason, TokenColumn, VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, Resumable, SingleTurnEnvironment, ToolEnvironment, tool
from rollouts.errors import EndpointRefused, TokenMismatchError
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.runs.journal import Journal
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory

TURNS = 4


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(load_tokenizer(DEMO_MODEL))


class Counting(ToolEnvironment):
    """Counts its calls, and can be resumed."""

    started = 0

    def __init__(self) -> None:
        self.calls = 0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        Counting.started += 1
        return await super().start(prompt)

    @tool
    def count(self) -> str:
        """Count up."""
        self.calls += 1
        return f"{self.calls}"

    async def snapshot(self) -> dict[str, int]:
        return {"calls": self.calls}

    async def restore(self, prompt: Prompt, snapshot: dict[str, int]) -> None:
        self.calls = snapshot["calls"]


class Forgetful(ToolEnvironment):
    """Has state and no snapshot."""

    def __init__(self) -> None:
        self.calls = 0

    @tool
    def count(self) -> str:
        """Count up."""
        self.calls += 1
        return f"{self.calls}"


def script(text: str = "count") -> Any:
    """Call a tool three times, then answer; the turn is counted in the prompt tokens, as a model would."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    call = f"<tool_call>\n{json.dumps({'name': text, 'arguments': {}})}\n</tool_call><|im_end|>"
    ids = [tokenizer.encode(reply, add_special_tokens=False) for reply in [call] * (TURNS - 1) + ["done<|im_end|>"]]
    mark = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False)

    def reply(tokens: TokenColumn) -> Any:
        turn = sum(tokens[n : n + len(mark)].tolist() == mark for n in range(len(tokens)))
        return ids[turn - 1]

    return reply


class Book:
    """Stores turns as the journal does: through MessagePack."""

    def __init__(self, turns: Sequence[Turn] = (), stop_after: int | None = None) -> None:
        self.turns: list[Turn] = list(turns)
        self.voided = 0
        self._stop_after = stop_after
        self.log = TurnLog(self.save, turns)

    async def save(self, turn: Turn | None) -> None:
        if turn is None:
            self.voided += 1
            return
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(turn.fields))
        self.turns.append(Turn(turn.number, turn.tokens.copy(), turn.mask.copy(), turn.logprobs.copy(), fields))
        if turn.number == self._stop_after:
            raise EndpointRefused("the process died here")


async def play(renderer: Renderer, book: Book, environment_cls: Any = Counting, prompt: str = "go") -> Trajectory:
    request = Prompt(prompt, index=0, turn_log=book.log)
    return await run_agent(request, environment_cls, ScriptedPolicy(script()), renderer, sampling=SamplingParams())


def same(first: Trajectory, second: Trajectory) -> None:
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.mask.tolist() == second.mask.tolist()
    assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert first.messages == second.messages
    assert first.versions == second.versions
    assert [(call.start, call.stop) for call in first.completions] == [
        (call.start, call.stop) for call in second.completions
    ]


@pytest.mark.parametrize("after", range(1, TURNS))
async def test_an_episode_resumes_after_any_finished_turn(renderer: Renderer, after: int) -> None:
    """Tokens, mask, logprobs and messages equal those of an uninterrupted episode."""
    whole = await play(renderer, Book())
    first = Book(stop_after=after)
    await play(renderer, first)
    started = Counting.started
    book = Book(first.turns)
    resumed = await play(renderer, book)
    same(resumed, whole)
    assert resumed.metrics["turns_before_resume"] == after
    assert resumed.metrics["tool_calls"] == whole.metrics["tool_calls"]
    assert Counting.started == started, "restored, not started"
    assert len({turn.fields["session"] for turn in book.turns}) == 1, "the server has the prefix of its session"
    assert [turn.number for turn in book.turns] == list(range(1, TURNS)), (
        "later turns are logged after the earlier ones"
    )


class Slow(Counting):
    """Is restored after the deadline of its episode."""

    async def restore(self, prompt: Prompt, snapshot: dict[str, int]) -> None:
        await anyio.sleep_forever()


async def test_a_deadline_during_the_restoration_keeps_the_logged_turns(renderer: Renderer) -> None:
    """As without the interruption, the episode is truncated and has not failed; long episodes are not lost."""
    first = Book(stop_after=2)
    logged = await play(renderer, first)
    options = {"sampling": SamplingParams(), "limits": Limits(episode_seconds=30.0)}
    turn = changed(first.turns[-1], seconds=29.9)
    request = Prompt("go", index=0, turn_log=Book([*first.turns[:-1], turn]).log)
    resumed = await run_agent(request, Slow, ScriptedPolicy(script()), renderer, **options)  # type: ignore[arg-type]
    assert resumed.stop_reason is StopReason.DEADLINE
    assert resumed.tokens.tolist() == logged.tokens.tolist()
    assert any(span.name == "Slow.restore" for span in resumed.times)


async def test_turns_rebuild_the_trajectory(renderer: Renderer) -> None:
    """Completely, up to the last turn."""
    book = Book()
    whole = await play(renderer, book)
    again = replayed(book.turns)
    assert again.tokens.tolist() == whole.tokens[: len(again)].tolist()
    assert again.logprobs.tobytes() == whole.logprobs[: len(again)].tobytes()
    assert again.messages == whole.messages[: len(again.messages)]
    assert again.completions == whole.completions[: TURNS - 1]


async def test_a_changed_turn_is_a_broken_law(renderer: Renderer) -> None:
    """The checksum of the request finds a token that changed between the processes."""
    book = Book()
    await play(renderer, book)
    tokens = book.turns[0].tokens.copy()
    tokens[0] ^= 1
    changed = Turn(1, tokens, book.turns[0].mask, book.turns[0].logprobs, book.turns[0].fields)
    with pytest.raises(TokenMismatchError):
        replayed([changed, *book.turns[1:]])


def changed(turn: Turn, **fields: Any) -> Turn:
    """A turn with other columns or fields."""
    columns = {name: fields.pop(name) for name in ("tokens", "logprobs") if name in fields}
    return attrs.evolve(turn, **columns, fields={**turn.fields, **fields})


def _with(column: Any, position: int, value: float) -> Any:
    column = column.copy()
    column[position] = value
    return column


UNFIT: dict[str, Callable[[Turn, int], Turn]] = {
    "a sampled id outside the vocabulary": lambda turn, size: changed(turn, tokens=_with(turn.tokens, -3, size)),
    "an id of the prompt outside the vocabulary": lambda turn, size: changed(turn, tokens=_with(turn.tokens, 0, size)),
    "a negative id": lambda turn, size: changed(turn, tokens=_with(turn.tokens, -3, -1)),
    "another id in a request": lambda turn, size: changed(turn, tokens=_with(turn.tokens, 0, 5)),
    "a logprob above 0": lambda turn, size: changed(turn, logprobs=_with(turn.logprobs, int(turn.mask.argmax()), 5.0)),
    "versions that do not cover the reply": lambda turn, size: changed(turn, versions=[]),
    "a step reward of NaN": lambda turn, size: changed(turn, step_rewards=[math.nan]),
    "a metric of NaN": lambda turn, size: changed(turn, metrics={"found": math.nan}),
    "no calls": lambda turn, size: changed(turn, completions=[]),
    "no seconds": lambda turn, size: changed(turn, seconds=None),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_turns_that_do_not_fit_start_the_rollout_again(renderer: Renderer, what: str) -> None:
    """Impossible values are not resumed from: the rollout loses its turns, and they are counted."""
    first = Book(stop_after=2)
    await play(renderer, first)
    last = UNFIT[what](first.turns[-1], renderer.vocab_size)
    if what in ("an id of the prompt outside the vocabulary", "another id in a request"):
        turns = [UNFIT[what](first.turns[0], renderer.vocab_size), first.turns[-1]]
    else:
        turns = [first.turns[0], last]
    book = Book(turns)
    resumed = await play(renderer, book)
    same(resumed, await play(renderer, Book()))
    assert resumed.metrics["restarted_at_resume"] == 1
    assert resumed.metrics["unfit_turns_at_resume"] == 2
    assert "turns_before_resume" not in resumed.metrics
    assert [turn.number for turn in book.turns[2:]] == list(range(1, TURNS)), "logged from the first"


async def test_turns_of_an_earlier_version_lack_the_completions_of_step_rewards() -> None:
    """They are -1, not known, for the rewards before the resume, so that those after it are in their place."""
    trajectory = Trajectory()
    trajectory.add_context(np.array([1, 2], np.int32))
    trajectory.step_rewards.append(0.5)
    turn = Turn.since(trajectory, 0, 0, 0, 0)
    fields = {name: value for name, value in turn.fields.items() if name != "step_completions"}
    rebuilt = replayed([attrs.evolve(turn, fields=fields)])
    assert (rebuilt.step_rewards, rebuilt.step_completions) == ([0.5], [-1])


async def test_an_environment_without_a_snapshot_starts_again(renderer: Renderer) -> None:
    """Its state is lost, so the episode restarts; one turn is logged, so that the restart is counted."""
    first = Book(stop_after=2)
    await play(renderer, first, Forgetful)
    assert [turn.resumable for turn in first.turns] == [False]
    resumed = await play(renderer, Book(first.turns), Forgetful)
    assert "turns_before_resume" not in resumed.metrics
    assert resumed.metrics["restarted_at_resume"] == 1
    assert [message.content for message in resumed.messages if message.role == "tool"] == ["1", "2", "3"]


async def test_turns_of_another_prompt_are_not_resumed(renderer: Renderer) -> None:
    """A generate function may play several episodes for one rollout."""
    first = Book(stop_after=2)
    await play(renderer, first)
    resumed = await play(renderer, Book(first.turns), prompt="another")
    assert "turns_before_resume" not in resumed.metrics
    first_task, other_task = (Prompt("", metadata={"task": number}) for number in (1, 2))
    assert prompt_digest(first_task) != prompt_digest(other_task)
    assert prompt_digest(Prompt("go", metadata={"task": 1})) == prompt_digest(Prompt("go")), "as runs have it stored"


async def test_a_rollout_of_several_episodes_logs_no_turns(renderer: Renderer) -> None:
    """Their turns could not be distinguished."""
    book = Book()
    await play(renderer, book)
    logged = len(book.turns)
    request = Prompt("x", turn_log=book.log)
    await run_agent(request, Counting, ScriptedPolicy(script()), renderer, sampling=SamplingParams())
    assert (book.voided, len(book.turns)) == (1, logged)


async def test_the_environment_does_not_receive_the_log(renderer: Renderer) -> None:
    """It has the tokens of the turns, which environments never see."""
    received: list[Prompt] = []

    class Receiving(Counting):
        async def start(self, prompt: Prompt) -> Any:
            received.append(prompt)
            return await super().start(prompt)

    await play(renderer, Book(), Receiving)
    assert [prompt.turn_log for prompt in received] == [None]


def test_a_copy_of_a_prompt_has_no_log() -> None:
    """A generate function may send its prompt to another process, which cannot store turns."""
    request = Prompt("go", index=0, turn_log=Book().log)
    for copied in (pickle.loads(pickle.dumps(request)), copy.deepcopy(request)):
        assert copied == request
        assert copied.turn_log is None


class Refuses(Counting):
    """Its snapshot raises."""

    waited: tuple[tuple[str, str], ...] = ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        type(self).waited = ((waits()[-1].what, waits()[-1].kind),)
        return await super().start(prompt)

    async def snapshot(self) -> dict[str, int]:
        type(self).waited = (self.waited[0], (waits()[-1].what, waits()[-1].kind))
        raise OSError("no state today")


async def test_a_failed_snapshot_does_not_fail_the_rollout(renderer: Renderer) -> None:
    """Its turns are logged without a snapshot, and the failure is counted; a wait for one is a step's."""
    book = Book()
    trajectory = await play(renderer, book, Refuses)
    assert Refuses.waited == (("Refuses.start", "environment_start"), ("Refuses.snapshot", "environment_step"))
    assert trajectory.metrics["snapshot_failures"] == TURNS - 1
    assert not any(turn.resumable for turn in book.turns)


@pytest.mark.parametrize(
    ("state", "stored"),
    [
        ({VersionSpan("v", 0, 1): 1}, 0),
        ({"at": object()}, 0),
        ({"text": "\ud800"}, 0),
        ({"huge": 2**70}, 0),
        ({"board": np.zeros(2), ("a", 1): None}, TURNS - 1),
    ],
    ids=["key", "object", "half a character", "huge", "plain"],
)
async def test_a_snapshot_that_is_no_plain_data_has_failed(
    renderer: Renderer, tmp_path: Path, state: Any, stored: int
) -> None:
    """A run could not read such a key again, and would restore another state of the environment."""

    class Odd(Counting):
        async def snapshot(self) -> Any:
            return state

    with Journal(tmp_path) as journal:
        request = Prompt("go", index=0, turn_log=RunJournal(journal).turn_log(0))
        trajectory = await run_agent(request, Odd, ScriptedPolicy(script()), renderer, sampling=SamplingParams())
    assert trajectory.metrics.get("snapshot_failures", 0) == TURNS - 1 - stored
    assert sum(turn.resumable for turn in RunHistory.read(tmp_path).read_turns(0)) == stored


def test_the_ready_made_environments_can_be_resumed() -> None:
    """An environment with state and no snapshot cannot."""
    assert isinstance(CalculatorEnvironment(), Resumable)
    assert isinstance(SingleTurnEnvironment(), Resumable)
    assert not isinstance(Forgetful(), Resumable)


_DIGESTS = """
import sys
from rollouts.agent.turn_log import prompt_digest
from rollouts.dtypes import Message, Prompt, ToolCall
class Place: pass
def digest(arguments):
    call = ToolCall("f", arguments)
    return prompt_digest(Prompt([Message("user", "x"), Message("assistant", "", tool_calls=(call,))]))
held = [Place() for _ in range(int(sys.argv[1]))]
print(digest({"a": {"x", "y", "z", "w"}}), digest({"a": [Place()]}), digest({"a": {"b": frozenset("xyz")}}))
print(digest({"a": 1, "b": [1, 2]}), prompt_digest(Prompt("x")), prompt_digest(Prompt([Message("user", "hi")])))
"""


def test_the_digest_of_a_prompt_is_equal_in_every_process() -> None:
    """Also if a call in its messages has a set or an object: else each resume would play its rollouts again.

    Digests of plain data are those of stored runs.
    """
    printed = set()
    for seed in (1, 2, 3):
        line = [sys.executable, "-c", _DIGESTS, str(seed * 1000)]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        printed.add(subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout)
    (only,) = printed
    assert only.splitlines()[1] == "3088909920 2159005666 645275091"
