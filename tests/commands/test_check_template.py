"""``rollouts check-model``: verdicts, an example with its mask, and the echo of an endpoint."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.check_template import TemplateCheckOptions, check, echo
from rollouts.dtypes import packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.renderer import ExamplePart, Renderer, conversation, load_tokenizer
from scripts.docs import families
from tests.families import TOOLS

ROOT = Path(__file__).parents[2]
DEMO = str(DEMO_MODEL)
FORKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role != 'user' else 'earlier' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def printed(**subject: object) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard")
    fields = {name: subject.pop(name) for name in ("model", "endpoint", "recipe", "options") if name in subject}
    good = await check(TemplateCheckOptions(**fields, generate=subject), console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return good, console.file.getvalue()


async def test_an_exact_model_passes_with_an_example() -> None:
    """Each step, the dialect, and trained tokens in another colour than context."""
    good, text = await printed(model=DEMO)
    assert good
    assert "dialect hermes" in text
    assert text.count("exact") >= 6
    assert re.search(r"\x1b\[32mIt is sunny\.<\|im_end\|>", text)
    assert re.search(r"\x1b\[2m\S*And in Oslo\?", text)
    assert "mask 1" in text
    assert "mask 0" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [([], "as_ids (special tokens in the text of users and tools become"), (["--special-text", "error"], "error (")],
)
def test_the_treatment_of_special_tokens_is_shown(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default, and that of ``--special-text``."""
    assert main(["check", "--model", DEMO, *given]) == 0
    assert f"special_text: {words}" in " ".join(capsys.readouterr().out.split())


UNREAD = FORKS.replace(
    "<|im_end|>", "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>", 1
)
NAMES_A_DIALECT = """
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe

def recipe(endpoint):
    return agent_recipe("sums", endpoint, CalculatorEnvironment, ["1 + 2?"], dialect="plain")
"""


async def test_the_verdict_says_whether_calls_are_read(tmp_path: Path) -> None:
    """``read`` passes; ``not read`` is refused with its reason, unless user or recipe chose the dialect ``plain``."""
    template, recipe = tmp_path / "chat.jinja", tmp_path / "sums.py"
    template.write_text(UNREAD)
    recipe.write_text(NAMES_A_DIALECT)
    assert "calls: read" in (await printed(model=DEMO))[1]
    good, text = await printed(model=DEMO, chat_template=template)
    assert not good
    assert "calls: not read" in text
    assert "dialect 'plain' does not read the tool calls" in text
    assert "verdict: refused" in text
    for named in ({"dialect": "plain"}, {"recipe": recipe}):
        _, text = await printed(model=DEMO, chat_template=template, **named)
        assert "calls: not read" in text
        assert "tool calls are text" in text
        assert "verdict: forks" in text


async def test_a_template_that_forks_passes_with_the_policy_fork(tmp_path: Path) -> None:
    """Each request has the template's own rendering then; the output says what the policy does."""
    file = tmp_path / "chat.jinja"
    file.write_text(FORKS)
    for history, passes, does in (("fork", True, "opens a branch"), ("error", False, "fails the rollout")):
        good, text = await printed(model=DEMO, chat_template=file, dialect="plain", history=history)
        assert good is passes
        assert f"history: {history} ({does} where the template rewrites)" in text


async def test_a_template_that_forks_does_not_pass(tmp_path: Path) -> None:
    """The output names the step and the change."""
    file = tmp_path / "chat.jinja"
    file.write_text(FORKS)
    good, text = await printed(model=DEMO, chat_template=file)
    assert not good
    assert "forks" in text


def test_the_command_gives_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 exact, 1 not exact, 2 for a missing file or model."""
    file = tmp_path / "chat.jinja"
    file.write_text(FORKS)
    assert main(["check", "--model", DEMO]) == 0
    assert main(["check", "--model", DEMO, "--chat-template", str(file)]) == 1
    assert main(["check", "--model", DEMO, "--chat-template", str(tmp_path / "none")]) == 2
    assert main(["check"]) == 2
    assert "--model" in capsys.readouterr().err


async def test_a_recipe_supplies_tools_and_history() -> None:
    """The self-test uses the tools of the recipe's environment."""
    good, text = await printed(model=DEMO, recipe=ROOT / "configs/calculator.py", options={"history": "fork"})
    assert good
    assert "4 tools · history: fork" in text
    with pytest.raises(ConfigError, match="history"):
        await printed(model=DEMO, recipe=ROOT / "configs/calculator.py", options={"history": "forget"})


async def test_an_endpoint_echoes_the_ids(tmp_path: Path) -> None:
    """A server scores exactly the ids that were sent; the second request hits its prefix cache."""
    async with engine_process(DEMO_MODEL, tmp_path / "log") as engine:
        good, text = await printed(model=DEMO, endpoint=engine.url)
        assert good
        assert "counted, the same ids; sent again" in text
        pieces = conversation(Renderer(load_tokenizer(DEMO_MODEL)), TOOLS)
        found = await echo(engine.url, pieces)
        sent = int(np.sum([len(piece.tokens) for piece in pieces]))
        assert (found.sent, found.counted, found.same_ids, found.exact) == (sent, sent, True, True)
        assert found.cached > 0
        named, _ = await printed(endpoint=engine.url)
        assert named


async def test_an_unreachable_endpoint_is_an_error() -> None:
    """EndpointUnavailable names the URL."""
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1:9"):
        await echo("http://127.0.0.1:9", [ExamplePart("opening", packed_tokens([1, 2]), False)])


def test_the_page_of_families_is_up_to_date(request: pytest.FixtureRequest) -> None:
    """docs/families.md is what scripts/docs/write families writes now, also with the first merges of each tokenizer.

    ``--long`` takes the whole tokenizers, as the script does.
    """
    assert families.page(request) == families.PAGE.read_text(encoding="utf-8")
