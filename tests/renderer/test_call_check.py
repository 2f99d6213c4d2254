"""Runs with tools start only if the dialect reads the calls that the chat template writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.agent import run_branches
from rollouts.dtypes import Endpoint, Prompt, SamplingParams, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.integrations.slime import close_rollouts
from rollouts.integrations.slime import generate_rollout_batch as generate_slime_batch
from rollouts.recipe import agent_recipe, preflight
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.renderer.dialects import DIALECTS
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import generate_rollout_batch
from tests.dialects import TEMPLATES
from tests.integrations.slime.launches import Launch

DEMO = load_tokenizer(DEMO_MODEL)
TOOLS = [Tool("look", "Looks."), Tool("leap", "Leaps.")]


def chatml(calls: str) -> str:
    """A template that writes the calls of a turn after its content."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first and tools %}{{ tools | tojson }}\n"
        "{% endif %}{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def each(call: str) -> str:
    return "{% for c in m.tool_calls %}" + call + "{% endfor %}"


HERMES = "<tool_call>{{ c.function | tojson }}</tool_call>"
UNKNOWN = chatml(each("<toolcall>{{ c.function.name }} {{ c.function.arguments | tojson }}</toolcall>"))
OTHER_BODY = chatml(
    each(
        '<tool_call>\n<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
        "<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</invoke>\n</tool_call>"
    )
)
LEFT_OUT = chatml("").replace("{{ tools | tojson }}", "{{ tools | tojson }}Write <|tool_call_start|>[f(x=1)].")
ONE_A_TURN = chatml("{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + each(HERMES))
PYTHONIC = "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
PYTHONIC += "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}"


def renderer_of(template: str, **options: Any) -> Renderer:
    return Renderer(DEMO, chat_template=template, **options)


UNREAD = {
    "marks that no dialect knows": (UNKNOWN, {}, r"dialect 'plain' .*'<toolcall>look \{.*' and read as no call"),
    "known marks around another body": (OTHER_BODY, {}, r"dialect 'hermes' .*<invoke name=.*not valid JSON"),
    "calls that are left out of the history": (LEFT_OUT, {}, "dialect 'llama_pythonic' .*the template writes no call"),
    "the same with its dialect named": (LEFT_OUT, {"dialect": "hermes"}, "'hermes' .*the template writes no call"),
    "another dialect than the template's": (
        chatml(each(HERMES)),
        {"dialect": "glm"},
        r'dialect="hermes" or dialect="kimi_vl" or dialect="llama_json" reads them',
    ),
    "two calls in one pair of marks": (
        chatml(
            "<tool_call>{% for c in m.tool_calls %}{{ c.function | tojson }}{{ '\n' if not loop.last }}{% endfor %}"
            "</tool_call>"
        ),
        {},
        "two calls in parallel",
    ),
    "calls that are read at the start only": (
        chatml("[" + PYTHONIC + "]"),
        {"dialect": "llama_pythonic"},
        "a call after text",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_template_whose_calls_are_not_read_is_refused(case: str) -> None:
    """The message has the template, the dialect, the written text, the parsed calls and the remedies, in one line."""
    template, options, words = UNREAD[case]
    found = renderer_of(template, **options).self_test(TOOLS)
    assert (found.calls, found.verdict) == ("not read", "refused")
    with pytest.raises(ConfigError, match=words) as caught:
        found.raise_if_refused()
    message = str(caught.value)
    assert message.startswith(f"chat template {found.template}: dialect ")
    assert "\n" not in message
    assert 'dialect="plain"' in message
    assert "calls: not read" in str(found)


@pytest.mark.parametrize("case", UNREAD)
def test_without_tools_its_calls_do_not_matter(case: str) -> None:
    """The result does not mention them, and a run starts."""
    found = renderer_of(UNREAD[case][0], **UNREAD[case][1]).self_test()
    assert found.calls is None
    assert "calls" not in str(found)
    found.raise_if_refused()


@pytest.mark.parametrize("template", [UNKNOWN, OTHER_BODY, LEFT_OUT, chatml(each(HERMES))])
def test_the_plain_dialect_starts_a_run_without_calls(template: str) -> None:
    """``dialect="plain"``: no refusal, and a note that calls are text."""
    found = renderer_of(template, dialect="plain").self_test(TOOLS)
    found.raise_if_refused()
    assert found.calls == "not read"
    assert found.verdict != "refused"
    assert any("tool calls are text" in note for note in found.notes)


def test_nested_arguments_as_python_prints_them_are_read() -> None:
    """Qwen3-Coder's dialect reads a dict or list of Python where the template writes no JSON."""
    call = "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    call += "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function></tool_call>"
    found = renderer_of(chatml(each(call))).self_test(TOOLS)
    assert (found.calls, found.verdict) == ("read", "exact")


def test_a_template_with_one_call_a_turn() -> None:
    """Its single call is read."""
    found = renderer_of(ONE_A_TURN).self_test(TOOLS)
    assert (found.calls, found.verdict) == ("one a turn", "exact")
    found.raise_if_refused()
    assert "calls: one a turn" in str(found)


@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"plain"}))
def test_each_dialect_reads_a_template_that_writes_it(name: str) -> None:
    """One call, two, nested arguments and a call after text, as far as the dialect supports them."""
    found = renderer_of(TEMPLATES[name], dialect=name).self_test(TOOLS)
    found.raise_if_refused()
    assert found.calls == "read"


def test_each_tool_name_must_be_one_that_the_dialect_reads() -> None:
    """A second tool whose name breaks the notation would lose its calls."""
    renderer = renderer_of(TEMPLATES["llama_pythonic"], dialect="llama_pythonic")
    with pytest.raises(ConfigError, match=r"2nd look"):
        renderer.self_test([TOOLS[0], Tool("2nd look", "Looks.")]).raise_if_refused()
    renderer.self_test([TOOLS[0], Tool("look-twice", "Looks.")]).raise_if_refused()


# -- users of the verdict ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["marks that no dialect knows", "known marks around another body"])
async def test_nothing_is_sampled_where_calls_would_be_lost(case: str) -> None:
    """The agent loop raises before the first request; without tools it runs."""
    policy = ScriptedPolicy([DEMO.encode("3<|im_end|>")])
    sampling = SamplingParams(max_new_tokens=9)
    renderer = renderer_of(UNREAD[case][0])
    with pytest.raises(ConfigError, match="does not read the tool calls"):
        await run_branches(Prompt("1 + 2?"), CalculatorEnvironment, policy, renderer, sampling=sampling)
    assert policy.requests == []
    await run_branches(Prompt("1 + 2?"), SingleTurnEnvironment, policy, renderer, sampling=sampling)
    assert len(policy.requests) == 1


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], str]:
    """The demo model's tokenizer with another chat template, as a folder."""

    def write(template: str) -> str:
        folder = tmp_path / "model"
        shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").write_text(template)
        return str(folder)

    return write


async def test_a_recipe_is_refused_before_its_first_request(model: Callable[[str], str]) -> None:
    """``preflight`` raises before a run, an evaluation or a play; the recipe's ``dialect`` is the remedy."""
    folder = model(UNKNOWN)
    async with StubServer() as server:
        endpoint = Endpoint(base_url=server.url, model=folder)
        build = partial(agent_recipe, "sums", endpoint, CalculatorEnvironment, ["1 + 2?"])
        with pytest.raises(ConfigError, match=r"dialect 'plain' does not read the tool calls"):
            await preflight(build())
        with pytest.raises(ConfigError, match=r"dialect 'hermes' does not read the tool calls"):
            await preflight(build(dialect="hermes"))
        with pytest.raises(ConfigError, match=r"dialect: got 'klingon'"):
            await preflight(build(dialect="klingon"))
        await preflight(build(dialect="plain"))
    assert build(dialect="plain").describe()["generate"]["dialect"] == "plain"
    assert "dialect" not in build().describe()["generate"]


async def test_rollouts_are_played_in_the_dialect_that_is_named(model: Callable[[str], str]) -> None:
    """With ``dialect="plain"`` a call is the final answer; by default the template is refused."""
    folder = model(UNKNOWN)
    policy = ScriptedPolicy([DEMO.encode('<toolcall>add {"a": 1, "b": 2}</toolcall><|im_end|>')])
    play = partial(
        generate_rollout_batch,
        ["1 + 2?"],
        environment_cls=CalculatorEnvironment,
        endpoint=Endpoint(model=folder),
        tokenizer=folder,
        policy=policy,
    )
    with pytest.raises(ConfigError, match="does not read the tool calls"):
        await play()
    assert policy.requests == []
    (sample,) = await play(dialect="plain")
    assert sample.metrics["tool_calls"] == 0


RECIPE = """
from rollouts.environments import CalculatorEnvironment
from rollouts.integrations.slime import close_rollouts
from rollouts.integrations.slime import generate_rollout_batch as generate_slime_batch
from rollouts.recipe import agent_recipe

def recipe(endpoint):
    return agent_recipe("sums", endpoint, CalculatorEnvironment, ["1 + 2?"])
"""


def test_a_trainer_integration_refuses_before_anything_is_sampled(model: Callable[[str], str], tmp_path: Path) -> None:
    """slime's first batch raises if the dialect does not read the calls of the model's template."""
    file = tmp_path / "sums.py"
    file.write_text(RECIPE)
    launch = Launch()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(StubServer()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        where = {"sglang_router_ip": host, "sglang_router_port": int(port), "hf_checkpoint": model(UNKNOWN)}
        args = launch.args(**where, rollouts_recipe=str(file), rollouts_recipe_options={})
        try:
            with pytest.raises(ConfigError, match="does not read the tool calls"):
                generate_slime_batch(args, 0, launch.source())
        finally:
            close_rollouts()
    assert server.requests == []


def test_a_dialect_with_a_renderer_is_refused() -> None:
    """A renderer already has its options."""
    renderer = renderer_of(UNKNOWN, dialect="plain")
    assert renderer_for(renderer) is renderer
    with pytest.raises(ConfigError, match=r"dialect: got 'hermes'; expected"):
        renderer_for(renderer, dialect="hermes")
