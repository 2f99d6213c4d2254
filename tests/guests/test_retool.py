"""ReTool: rows in the shapes of the data sets, a recorded solution with its reward, and invalid files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Endpoint, Message
from rollouts.environments.python_tool import REQUIRED
from rollouts.errors import ConfigError
from rollouts.recipe.files import build, load_recipe
from rollouts.recipes.environments.retool import CodeTagsEnvironment, RetoolEnvironment, load_maths
from rollouts.rewards import boxed_math
from rollouts.testing.playing import calling, play
from rollouts.training import Sample

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 1+1", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": "9a"},
}
AIME = {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "…", "Answer": 204}
OURS = {"prompt": "Find y.", "label": "\\frac12", "metadata": {"level": 1}}


def test_rows_in_each_shape(tmp_path: Path) -> None:
    """DAPO's, AIME's and our shape load; a repeated problem is taken once; ``limit`` counts problems."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (DAPO, DAPO, AIME, OURS)))
    prompts = load_maths(str(path))
    assert [(prompt.messages[0].content, prompt.label) for prompt in prompts] == [
        ("Solve: 1+1", "34"),
        ("Find x.", "204"),
        ("Find y.", "\\frac12"),
    ]
    assert prompts[2].metadata == {"level": 1}
    assert len(load_maths(str(path), limit=2)) == 2


def test_rows_of_parquet(tmp_path: Path) -> None:
    """Parquet files load as the hub stores them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([DAPO, DAPO]), path)
    assert [prompt.label for prompt in load_maths(str(path))] == ["34"]
    path.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="not Parquet"):
        load_maths(str(path))


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    """A folder loads its parts in order and ignores the card; the columns of ReTool's two data sets are known."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dapo = [{"prompt": [{"role": "user", "content": f"Solve {n}"}], "label": str(n)} for n in range(5)]
    aime = [
        {"id": n, "problem": f"Find {n}", "solution": "…", "answer": str(n), "url": "", "year": "2024"} for n in (7, 8)
    ]
    for name, rows, parts in (("dapo-math-17k", dapo, 2), ("aime-2024", aime, 1)):
        folder = tmp_path / name / "data"
        folder.mkdir(parents=True)
        (tmp_path / name / "README.md").write_text("a card")
        for part in range(parts):
            table = pyarrow.Table.from_pylist(rows[part * 3 : (part + 1) * 3])
            parquet.write_table(table, folder / f"train-{part:05}-of-{parts:05}.parquet")
        loaded = load_maths(str(tmp_path / name))
        assert [prompt.label for prompt in loaded] == [str(row.get("label", row.get("answer"))) for row in rows]
        assert [len(prompt.messages) for prompt in loaded] == [1] * len(rows)
    assert [prompt.label for prompt in load_maths(str(tmp_path / "dapo-math-17k"), limit=4)] == ["0", "1", "2", "3"]


@pytest.mark.extra
def test_what_the_guide_writes_is_read(
    asset: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's own code writes both data sets as rows; here it reads them from a local folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = asset("../source-documents/001_23c2aad6707c266b.txt").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    rows = {
        "dapo-math-17k": {"prompt": [{"role": "user", "content": "Solve: 1+1"}], "label": "2"},
        "aime-2024": {"prompt": [{"role": "user", "content": "Find x."}], "label": "204"},
    }
    assert len(snippets) == len(rows)
    for code, (name, row) in zip(snippets, rows.items(), strict=True):
        (tmp_path / name / "data").mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name / "data" / "train-00000-of-00001.parquet")
        here = code.replace(f"zhuzilin/{name}", str(tmp_path / name)).replace("~/data", str(tmp_path))
        assert here.count(str(tmp_path)) == 2
        exec(compile(here, "the guide", "exec"), {})
        (prompt,) = load_maths(str(tmp_path / f"{name}.jsonl"))
        assert (prompt.messages[0].content, prompt.label) == (row["prompt"][0]["content"], row["label"])


def test_real_rows_load(asset: Callable[[str], Path]) -> None:
    """MATH-500, whole."""
    assert len(load_maths(str(asset("datasets/math500.jsonl")))) == 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one row"),
        ("x", "line 1: not JSON"),
        ("[]", "line 1: got"),
        ('{"problem": "?"}', "line 1: got .*expected prompt and label"),
        ('{"problem": "?", "answer": " "}', "line 1: got"),
        ('{"prompt": [1], "label": "1"}', "line 1: prompt: got"),
    ],
)
def test_invalid_rows_are_refused(text: str, words: str, tmp_path: Path) -> None:
    """The error names the row, before work starts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_maths(str(path))


def test_an_invalid_source_is_refused(tmp_path: Path) -> None:
    """The error lists the valid kinds of source."""
    (tmp_path / "card.md").write_text("?")
    for source in (str(tmp_path / "none.jsonl"), "hub:aime", str(tmp_path)):
        with pytest.raises(ConfigError, match="hub:OWNER/DATASET/PATH"):
            load_maths(source)


async def test_a_recorded_solution() -> None:
    """The environment runs the program of a reply, and the reward evaluates the boxed answer."""
    pytest.importorskip("math_verify")
    replies: list[Any] = [calling("python", code="print(sum(range(5)) / 4)"), "So it is \\boxed{\\frac{5}{2}}."]
    played = await play(RetoolEnvironment(), "What is (0+1+2+3+4)/4?", replies)
    assert [message.content for message in played.messages if message.role == "tool"] == ["2.5"]
    assert played.done
    assert await boxed_math(Sample(messages=played.chat, label="2.5")) == 1.0
    assert await boxed_math(Sample(messages=played.chat, label="2")) == 0.0


CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "%s"}}\n</tool_call>'
ACTIONS: dict[str, tuple[str, str, str]] = {
    "tags": ("<code>print(2 + 2)</code>", "Output:\n4", "programs"),
    "a call": (CALL % "x = 2\\nprint(x + x)", "Output:\n4", "programs"),
    "a call with a raw line end": (CALL % "x = 2\nprint(x + x)", "Output:\n4", "programs"),
    "a fence": ("```python\nprint(2 + 2)\n```", "Output:\n4", "programs"),
    "in a thought": ("I run <code>print(4)</code>", "Output:\n4", "programs"),
    "a call before tags": ("<code>print(1)</code>" + CALL % "print(4)", "Output:\n4", "programs"),
    "another function": (
        (CALL % "1").replace("code_interpreter", "look"),
        "My previous action is invalid",
        "invalid_actions",
    ),
    "no output": ("<code>x = 1</code>", "\n<interpreter>\n\n</interpreter>\n", "programs"),
    "an error": ("<code>print(1 / 0)</code>", "ZeroDivisionError: division by zero\n[exit code 1]", "programs"),
    "no program": ("<code> </code>", "Error: No Python code found", "invalid_actions"),
    "nothing": ("I think it is 4.", "My previous action is invalid", "invalid_actions"),
}


@pytest.mark.parametrize("what", ACTIONS)
async def test_an_action_in_tags_is_answered_in_the_same_turn(what: str) -> None:
    """Each form of a program runs, its output is text of the turn, and the answer in a box ends the episode."""
    text, shown, metric = ACTIONS[what]
    reply = Message("assistant", reasoning=text) if what == "in a thought" else text
    played = await play(CodeTagsEnvironment(require=()), "2 + 2?", [reply, "Answer: \\boxed{4}"])
    assert shown in played.steps[0].continuation
    assert played.steps[0].metrics == {metric: 1}
    assert played.done
    assert [message.role for message in played.messages] == ["system", "user", "assistant"]
    assert CodeTagsEnvironment(require=()).tools == ()


def test_what_the_sandbox_must_enforce_is_an_option(tmp_path: Path) -> None:
    """The environment has the default requirements, or those of ``--set require=...``."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OURS))
    function = load_recipe(Path(__file__).parents[2] / "configs" / "retool.py")
    for text, required in (({}, REQUIRED), ({"require": '["network"]'}, ("network",)), ({"require": "[]"}, ())):
        made = build(function, Endpoint(model="m"), {"data": str(path), **text}).environment_cls()
        assert isinstance(made, RetoolEnvironment)
        assert made.require == required


@pytest.mark.parametrize("repeated", ["<tool_call>{", "<code>", "```python ", "```python" + 20_000 * " "])
async def test_a_reply_that_repeats_an_opening_does_not_hold_the_event_loop(repeated: str) -> None:
    """Openings without an end, and spaces after one, are read in linear time."""
    began = time.process_time()
    await CodeTagsEnvironment(require=()).step(Message("assistant", repeated * (40_000 // len(repeated))))
    assert time.process_time() - began < 0.5
