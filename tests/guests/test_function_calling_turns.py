"""Function calling in several turns: the disk, golden rewards of recorded conversations, and invalid rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Message, Prompt
from rollouts.errors import ConfigError
from rollouts.recipes.environments.function_calling import CallsInTurns, load_turns, turns_reward
from rollouts.recipes.environments.function_calling.turns import _row
from rollouts.testing.playing import Played, calling, play
from rollouts.training import Sample

ROWS = "datasets/bfcl_multi_turn_base.jsonl"


def file(content: str) -> dict[str, Any]:
    return {"type": "file", "content": content}


def folder(**contents: Any) -> dict[str, Any]:
    return {"type": "directory", "contents": contents}


def row(*, systems: tuple[str, ...] = ("GorillaFileSystem",), label: Any = None) -> dict[str, Any]:
    """Two turns: move a file, then say how long it is."""
    turns = [[{"role": "user", "content": text}] for text in ("Move a to old.", "How many words has it?")]
    wanted = [["mv(source='a', destination='old')"], ["cd('old')", "wc(file_name='a', mode='w')"]]
    root = {"home": folder(a=file("one two\nthree"), old=folder())}
    return {
        "prompt": turns[0],
        "label": wanted if label is None else label,
        "metadata": {
            "turns": turns,
            "involved_classes": list(systems),
            "initial_config": {"GorillaFileSystem": {"root": root}},
        },
    }


def prompt() -> Prompt:
    given = row()
    return Prompt(given["prompt"][0]["content"], given["label"], given["metadata"])


async def results_of(*calls: Message) -> list[str]:
    """The results of these calls on the disk of the row."""
    played = await play(CallsInTurns(), prompt(), calls)
    return [message.content for message in played.messages if message.role == "tool"]


async def test_the_disk() -> None:
    """Reading, writing, moving; an impossible operation returns an error to the model and changes nothing."""
    answers = await results_of(
        calling("ls"),
        calling("touch", file_name=".b"),
        calling("ls", a=True),
        calling("echo", content="x\ny\nx", file_name="c"),
        calling("diff", file_name1="a", file_name2="c"),
        calling("grep", file_name="c", pattern="x"),
        calling("cp", source="c", destination="old"),
        calling("cp", source="c", destination="d"),
        calling("rmdir", dir_name="old"),
        calling("mv", source="c", destination="old"),
        calling("du", human_readable=True),
        calling("find", name="c"),
        calling("cat", file_name="../a"),
        calling("cd", folder="old"),
        calling("pwd"),
        calling("cd", folder=".."),
        calling("cd", folder=".."),
    )
    assert [text if text.startswith("Error") else list(json.loads(text).values()) for text in answers] == [
        [["a", "old"]],
        [],
        [["a", "old", ".b"]],
        [None],
        ["- one two\n- three\n+ x\n+ y\n+ x"],
        [["x", "x"]],
        ["c copied to old"],
        ["c copied to d"],
        "Error: old is not empty",
        "Error: c is in old already",
        ["28 bytes"],
        [["./old/c", "./c"]],
        "Error: there is no ../a in the current directory",
        ["old"],
        ["/home/old"],
        ["home"],
        "Error: there is no directory above this one",
    ]


async def test_a_recorded_conversation() -> None:
    """The second user message follows the first finished turn; another path to the same disk is as right."""
    replies: list[Any] = [
        calling("cp", source="a", destination="old"),
        calling("rm", file_name="a"),
        "Moved.",
        calling("cd", folder="old"),
        calling("wc", file_name="a", mode="w"),
        "Three.",
    ]
    played = await play(CallsInTurns(), prompt(), replies)
    assert played.rewards == [0.0]  # the result of mv is missing
    replies[:2] = [calling("mv", source="a", destination="old"), calling("cat", file_name="b")]
    played = await play(CallsInTurns(), prompt(), replies)
    asked = [message.content for message in played.messages if message.role == "user"]
    assert (played.rewards, asked) == ([1.0], ["Move a to old.", "How many words has it?"])
    assert played.steps[-1].metrics == {"turns_right": 2}


@pytest.mark.parametrize(
    ("replies", "right"),
    [
        (["Moved."], 0),
        ([calling("mv", source="a", destination="b"), "Moved."], 0),
        ([calling("mv", source="a", destination="old"), "Moved.", "Three."], 1),
        ([calling("mv", source="a", destination="old"), calling("touch", file_name="z"), "Moved."], 0),
    ],
)
async def test_a_wrong_turn_ends_it(replies: list[Any], right: int) -> None:
    """A turn without calls, with another disk, without the result, or with an extra file is wrong."""
    played = await play(CallsInTurns(), prompt(), replies)
    assert (played.done, played.rewards) == (True, [0.0])
    assert played.steps[-1].metrics == {"turns_right": right}


def test_an_episode_that_was_cut_earned_nothing() -> None:
    """Its reward is 0; this is not a failure."""
    assert turns_reward(Sample()) == 0.0
    assert turns_reward(Sample(step_rewards=[1.0])) == 1.0


async def test_it_resumes_from_a_snapshot() -> None:
    """A snapshot within a turn survives MessagePack and restores a new environment."""
    first, second = CallsInTurns(), CallsInTurns()
    await first.start(prompt())
    await first.step(calling("mv", source="a", destination="old"))
    await first.step(Message("assistant", "Moved."))
    await first.step(calling("cd", folder="old"))
    await second.restore(prompt(), msgspec.msgpack.decode(msgspec.msgpack.encode(await first.snapshot())))
    for environment in (first, second):
        await environment.step(calling("wc", file_name="a", mode="w"))
        assert (await environment.step(Message("assistant", "Three."))).reward == 1.0


async def test_every_row_that_is_taken_can_be_solved(asset: Callable[[str], Path]) -> None:
    """The row's own calls earn 1 without an error; a reply without calls earns 0. 25 of 200 rows are taken."""
    prompts = load_turns(asset(ROWS))
    assert len(prompts) == 25
    assert len(load_turns(asset(ROWS), limit=3)) == 3
    for found in prompts:
        _, calls, _ = _row(found)
        replies: list[Any] = []
        for wanted in calls:
            replies += [Message("assistant", tool_calls=wanted), "Done."]
        played: Played = await play(CallsInTurns(), found, replies)
        assert played.rewards == [1.0]
        assert not [message for message in played.messages if message.content.startswith("Error")]
        assert (await play(CallsInTurns(), found, ["Done."])).rewards == [0.0]


async def test_the_rows_contain_the_sizes_of_their_files(asset: Callable[[str], Path]) -> None:
    """Two rows' own calls write the output of ``du`` to a file: the simulation prints the same."""
    for found in load_turns(asset(ROWS)):
        name = found.metadata["id"]
        if name in ("multi_turn_base_28", "multi_turn_base_29"):
            environment = CallsInTurns()
            await environment.start(found)
            await environment.step(calling("cd", folder={"8": "data", "9": "VisionX"}[name[-1]]))
            answer = await environment.step(calling("du", human_readable=True))
            size = {"8": "205 bytes", "9": "79 bytes"}[name[-1]]
            assert json.loads(answer.messages[0].content) == {"disk_usage": size}


def test_mathematics_are_offered_where_the_row_has_them(tmp_path: Path) -> None:
    """Only there."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row(systems=("GorillaFileSystem", *more))) for more in ((), ("MathAPI",))))
    counts = []
    for found in load_turns(path):
        environment = CallsInTurns()
        environment._begin(found)
        counts.append(len(environment.tools))
    assert counts == [18, 35]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (calling("logarithm", value=36, base=6, precision=4), 2.0),
        (calling("standard_deviation", numbers=[1, 3]), 1.0),
        (calling("si_unit_conversion", value=2, unit_in="km", unit_out="cm"), 200000.0),
        (calling("imperial_si_conversion", value=2.54, unit_in="cm", unit_out="inch"), 1.0),
        (calling("power", base=-8, exponent=0.5), None),
        (calling("divide", a=1, b=0), None),
        (calling("mean", numbers=[]), None),
        (calling("si_unit_conversion", value=2, unit_in="km", unit_out="g"), None),
    ],
)
async def test_mathematics(call: Message, result: float | None) -> None:
    """Each call returns a result, or an error to the model."""
    step = await CallsInTurns().step(call)
    content = step.messages[0].content
    if result is None:
        assert content.startswith("Error: ")
    else:
        assert json.loads(content)["result"] == pytest.approx(result)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": [["mv(source='a', destination='old')"]]}, "row 1: label: got"),
        ({"label": [["fly('a')"], []]}, 'row 1: label: got "fly'),
        ({"label": [["cd(__import__('os').getcwd())"], []]}, "row 1: label: got"),
        ({"label": [[1], []]}, "row 1: label: got 1"),
        ({"systems": ("TradingBot",)}, "no such row"),
    ],
)
def test_invalid_rows_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The error is raised before work starts; the calls of a label are parsed, never run."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(**change)))
    with pytest.raises(ConfigError, match=words):
        load_turns(path)
