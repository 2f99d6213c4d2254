"""``rollouts check-env``: sound environments pass, and each kind of error has a finding."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.check_env import load_environment, show_findings
from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments import CalculatorEnvironment, StepResult, ToolEnvironment
from rollouts.errors import ConfigError
from rollouts.testing.environment_check import CheckOptions, Finding, examine

ROOT = Path(__file__).parents[2]
PATIENT = 2.0  # a machine with other work may hold up anything for a while

HEAD = """\
import random
import time
from collections.abc import Mapping
from typing import Any
import anyio
from rollouts.dtypes import Message, Tool
from rollouts.environments import StepResult, ToolEnvironment, tool
class World(ToolEnvironment):
    def __init__(self) -> None:
        self.count = 0
"""

SOUND = """\
    @tool
    async def add(self, a: int) -> str:
        '''Add to the count.'''
        self.count += a
        return str(self.count)
    async def snapshot(self) -> Any:
        return self.count
    async def restore(self, prompt: Any, snapshot: Any) -> None:
        self.count = snapshot
"""


async def findings(body: str, folder: Path, *, stall_seconds: float = PATIENT) -> dict[str, Finding]:
    path = folder / "world.py"
    path.write_text(HEAD + body)
    found = await examine(*load_environment(path, {}), CheckOptions(stall_seconds=stall_seconds, step_seconds=20))
    return {finding.about: finding for finding in found}


async def test_a_sound_environment_is_all_good(tmp_path: Path) -> None:
    """Every check runs, and no finding is bad."""
    found = await findings(SOUND, tmp_path)
    assert [about for about, finding in found.items() if finding.verdict != "good"] == []
    assert set(found) == {
        "tool add", "episodes", "answers", "determinism", "snapshots", "close on cancel", "agent",
        "time of start", "time of step", "time of close", "blocking calls",
    }  # fmt: skip


BROKEN: dict[str, tuple[str, str, str]] = {
    "raises": (
        "    @tool\n    def look(self) -> str:\n        '''Look.'''\n        raise KeyError('shelf')\n",
        "episodes", "KeyError: 'shelf' .*world.py:14 in look",
    ),
    "returns nothing": (
        "    async def step(self, reply: Message) -> StepResult:\n        return None\n",
        "episodes", "World.step: got None; expected a StepResult",
    ),
    "no description": (
        "    @tool\n    def look(self, at: str) -> str:\n        return at\n",
        "tool look", "no description",
    ),
    "no type": (
        "    @tool\n    def look(self, at: Any) -> str:\n        '''Look.'''\n        return str(at)\n",
        "tool look", "parameters.at: no type",
    ),
    "wrong type": (
        "    tools = (Tool('look', 'Look.', {'type': 'object', 'properties': {'at': {'type': 'str'}}}),)\n"
        "    async def step(self, reply: Message) -> StepResult:\n        return StepResult(done=True)\n",
        "tool look", "type 'str' is none of JSON Schema",
    ),
    "calls without answers": (
        "    tools = (Tool('look', 'Look.'),)\n"
        "    async def step(self, reply: Message) -> StepResult:\n"
        "        return StepResult([Message('user', 'go on')])\n",
        "answers", "1 calls were answered by 0 tool messages",
    ),
    "no finite reward": (
        "    async def step(self, reply: Message) -> StepResult:\n"
        "        return StepResult(done=True, reward=float('nan'))\n",
        "episodes", r"World\.step: StepResult\.reward: got nan; expected a finite number",
    ),
    "left to chance": (
        "    @tool\n    def roll(self) -> str:\n        '''Roll.'''\n        return str(random.random())\n",
        "determinism", "equal replies had different results: prompt 0, step",
    ),
    "a snapshot without the state": (
        SOUND.replace("self.count = snapshot", "pass"),
        "snapshots", "restored after step .* it returns",
    ),
    "a snapshot that is no data": (
        SOUND.replace("return self.count", "return object()"),
        "snapshots", "is not plain data",
    ),
    "a restore that raises": (
        SOUND.replace("self.count = snapshot", "raise OSError('gone')"),
        "snapshots", "OSError: gone",
    ),
    "a close that raises": (
        SOUND + "    async def close(self) -> None:\n        raise OSError('gone')\n",
        "episodes", "World.close raised OSError: gone",
    ),
    "a cancellation that is swallowed": (
        "    @tool\n    async def wait(self) -> str:\n        '''Wait.'''\n"
        "        try:\n            await anyio.sleep(0.01)\n"
        "        except BaseException:\n            time.sleep(1.2)\n            raise\n        return 'done'\n",
        "close on cancel", "a cancelled step continued for 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_wrong_is_found(name: str, tmp_path: Path) -> None:
    """Under its name, in words that say where."""
    body, about, words = BROKEN[name]
    finding = (await findings(body, tmp_path))[about]
    assert finding.verdict == "bad"
    with pytest.raises(ValueError, match=words):
        raise ValueError(finding.text)


async def test_a_call_that_blocks_is_found_by_its_line(tmp_path: Path) -> None:
    """The finding has the blocking line and the seconds."""
    body = "    @tool\n    def look(self) -> str:\n        '''Look.'''\n        time.sleep(0.3)\n        return 'x'\n"
    finding = (await findings(body, tmp_path, stall_seconds=0.1))["blocking calls"]
    assert finding.verdict == "bad"
    assert "world.py:14 in look" in finding.text


@pytest.mark.parametrize(("blocks", "verdict"), [("not MADE", "good"), ("True", "bad")], ids=["once", "each time"])
async def test_what_a_process_pays_once_is_not_counted(blocks: str, verdict: str, tmp_path: Path) -> None:
    """The first environment may load shared data; an environment that blocks at every creation is reported."""
    body = "    @tool\n    def look(self) -> str:\n        '''Look.'''\n        return 'x'\n"
    body += (
        f"    def __init__(self) -> None:\n        if {blocks}: time.sleep(0.5)\n        MADE.append(1)\nMADE = []\n"
    )
    assert (await findings(body, tmp_path, stall_seconds=0.4))["blocking calls"].verdict == verdict


async def test_no_snapshots_are_a_note(tmp_path: Path) -> None:
    """An episode that was interrupted starts again; that is not a fault."""
    body = "    @tool\n    def look(self) -> str:\n        '''Look.'''\n        return 'x'\n"
    assert (await findings(body, tmp_path))["snapshots"].verdict == "note"


@pytest.mark.parametrize("text", ["", "class A: pass", "import", "def recipe(endpoint): return 3"])
async def test_a_file_without_an_environment_is_refused(text: str, tmp_path: Path) -> None:
    """With what was expected."""
    path = tmp_path / "nothing.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"nothing\.py|recipe"):
        load_environment(path, {})
    with pytest.raises(ConfigError, match="Python file"):
        load_environment(tmp_path / "none.py", {})


def test_the_command_says_it_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when nothing is bad, 1 when something is, 2 for what cannot be checked."""
    path = tmp_path / "world.py"
    path.write_text(HEAD + BROKEN["raises"][0])
    assert main(["check-env", str(path)]) == 1
    assert "KeyError" in capsys.readouterr().out
    assert main(["check-env", str(tmp_path / "none.py")]) == 2
    assert "Python file" in capsys.readouterr().err


async def test_the_name_of_a_tool_is_text(tmp_path: Path) -> None:
    """Not markup: a server of tools may name one as it likes."""
    path = tmp_path / "world.py"
    path.write_text(
        HEAD + "    tools = (Tool('[/b] :smile:\\x1b[2J', 'Add.', {'type': 'object', 'properties': {}}),)\n"
    )
    console = Console(file=io.StringIO(), width=300)
    options = CheckOptions(stall_seconds=PATIENT, step_seconds=20)
    show_findings(await examine(*load_environment(path, {}), options), console)
    assert isinstance(console.file, io.StringIO)
    assert "tool [/b] :smile:␛[2J" in console.file.getvalue()


@pytest.mark.parametrize("name", ["calculator", "countdown", "guess", "mixed"])
async def test_the_ready_made_ones_pass(name: str) -> None:
    """By their recipes."""
    found = await examine(
        *load_environment(ROOT / "configs" / f"{name}.py", {}, count=3),
        CheckOptions(stall_seconds=PATIENT),
    )
    assert [finding for finding in found if finding.verdict == "bad"] == []


async def test_an_environment_that_shows_images_is_checked_with_a_processor(tmp_path: Path) -> None:
    """Its episode runs through the agent loop; images that differ are named by their hashes."""
    body = """\
    @tool
    async def draw(self, size: int) -> str:
        '''Draw.'''
        return str(size)
    async def step(self, reply: Message) -> StepResult:
        from rollouts.dtypes import Image
        import PIL.Image
        picture = Image.of(PIL.Image.new("RGB", (8, 8)))
        return StepResult([Message("tool", ("drawn", picture), tool_call_id=c.id) for c in reply.tool_calls] or
            [Message("user", (picture,))])
"""
    found = await findings(body, tmp_path)
    assert (found["agent"].verdict, found["determinism"].verdict) == ("good", "good"), found["agent"]


async def test_a_busy_machine_is_not_a_fault_of_the_environment() -> None:
    """A stall in a frame of this package, or outside of any code, is not a finding: no line of the user was running."""
    found = await examine(Wide, [Prompt("1 + 2?")], CheckOptions(stall_seconds=0.02))
    stalls = next(finding for finding in found if finding.about == "blocking calls")
    assert stalls.verdict == "good", stalls.text


async def test_an_error_outside_of_the_users_code_names_no_line_of_this_package() -> None:
    """Python itself refuses the call of a method that has other arguments: no line of a user raised it."""
    bad = (await examine(Unstartable, [Prompt("1 + 2?")]))[0]
    assert bad.text.startswith("Unstartable.start raised TypeError: CalculatorEnvironment.restore() missing 1 ")
    assert bad.text.endswith("argument: 'snapshot'")


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (3, "Counted.tools: got 3; expected a sequence of Tools"),
        ([3], "Counted.tools: got 3; expected Tools"),
        (property(lambda world: world.read_tools()), "Counted.tools raised ValueError: third"),
    ],
    ids=["number", "list", "raises in the third"],
)
async def test_an_environment_with_wrong_tools_is_closed(tools: Any, words: str) -> None:
    """Every created environment is closed, and the tools are a finding."""
    made: list[Any] = []
    closed: list[Any] = []

    class Counted:
        def __init__(self) -> None:
            made.append(self)
            self.started = False

        async def start(self, prompt: Prompt) -> Sequence[Message]:
            self.started = True
            return prompt.messages

        async def step(self, reply: Message) -> StepResult:
            return StepResult(done=True)

        async def close(self) -> None:
            closed.append(self)

        def read_tools(self) -> tuple[Tool, ...]:
            if self.started and len(made) > 3:  # that whose step is cancelled
                raise ValueError("third")
            return ()

    Counted.tools = tools  # type: ignore[attr-defined]
    found = await examine(Counted, [Prompt("x")])  # type: ignore[arg-type]
    assert any(words in finding.text for finding in found if finding.verdict == "bad")
    assert closed == made


@pytest.mark.parametrize("lacks_step", [True, False], ids=["a method is missing", "tools raises before start"])
async def test_an_object_that_is_no_environment_is_closed(lacks_step: bool) -> None:
    """It has opened its resources, too."""
    made: list[Any] = []
    closed: list[Any] = []

    class Half:
        def __init__(self) -> None:
            made.append(self)

        @property
        def tools(self) -> tuple[Tool, ...]:
            if not lacks_step:
                raise ValueError("not started")
            return ()

        async def start(self, prompt: Prompt) -> Sequence[Message]:
            return prompt.messages

        async def close(self) -> None:
            closed.append(self)

    if not lacks_step:
        Half.step = Half.start  # type: ignore[attr-defined]
    found = await examine(Half, [Prompt("x")])  # type: ignore[arg-type]
    words = "expected an object with tools, start, step and close" if lacks_step else "raised ValueError: not started"
    assert words in found[0].text
    assert closed == made


async def test_a_close_that_cannot_be_read_hides_no_finding() -> None:
    """The finding says what is wrong with the object."""

    class Half:
        @property
        def close(self) -> Any:
            raise ValueError("not yet")

    found = await examine(Half, [Prompt("x")])  # type: ignore[arg-type]
    assert "Half()" in found[0].text


async def test_a_value_that_is_no_environment_is_a_finding() -> None:
    """It has nothing to close."""
    found = await examine(lambda: None, [Prompt("x")])  # type: ignore[arg-type, return-value]
    assert "got None; expected an object with tools" in found[0].text


class Wide(ToolEnvironment):
    """A schema of so many arguments that this package reads it for a while."""

    tools = (Tool("look", "Look.", {"properties": {f"at_{n}": {"type": "integer"} for n in range(10_000)}}),)

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True)


class Unstartable(CalculatorEnvironment):
    """An environment whose method has the arguments of another one."""

    start = CalculatorEnvironment.restore  # type: ignore[assignment]
