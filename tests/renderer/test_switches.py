"""Bridges do not depend on earlier text in silence: switches are found, bridges are compared with full renderings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollouts.agent import run_branches
from rollouts.dtypes import Message, Prompt, SamplingParams, StopReason, Tool, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory

DEMO = load_tokenizer(DEMO_MODEL)
TOOLS = [Tool("look", "Looks."), Tool("leap", "Leaps.")]
SAMPLING = SamplingParams(max_new_tokens=99)


def turns(body: str, start: str = "", prompt: str = "<|im_start|>assistant\n") -> str:
    """A template with Hermes calls; ``body`` writes the text of each message ``m``."""
    return (
        "{%- set ns = namespace(think=true, count=0) %}" + start + "{{- tools | tojson if tools else '' }}"
        "{%- for m in messages %}" + body + "{{- '<|im_start|>' + m.role + '\n' + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ '<tool_call>' }}{{ c.function | tojson }}{{ '</tool_call>' }}{% endfor %}"
        "{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    )


THINKS = turns(
    "",
    "{%- for m in messages if m.role in ('user', 'tool') %}{% if '/think' in m.content %}{% set ns.think = true %}"
    "{%- elif '/no_think' in m.content %}{% set ns.think = false %}{% endif %}{% endfor %}",
    "<|im_start|>assistant\n' + ('<think>\n' if ns.think else '<think></think>') + '",
)
NUMBERED = turns(
    "{%- if m.role == 'tool' %}{{ '#' + ns.count | string }}{% set ns.count = ns.count + 1 %}{% endif %}",
)
COUNTED = turns(
    "{%- if m.role == 'user' %}{% set ns.count = ns.count + 1 %}{% endif %}",
    prompt="<|im_start|>assistant' + (', again' if ns.count > 4 else '') + '\n",
)
ONE_CALL = turns("{%- if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}")
ALTERNATES = turns(
    "{%- if m.role == 'user' and loop.previtem and loop.previtem.role != 'assistant' %}"
    "{{- raise_exception('roles must alternate') }}{% endif %}"
)
NOT_EMPTY = turns(
    "{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{- raise_exception('empty turn') }}{% endif %}"
)


def renderer_of(template: str) -> Renderer:
    return Renderer(DEMO, chat_template=template, dialect="hermes")


def call(number: int) -> ToolCall:
    return ToolCall("look", {"x": str(number)}, id=f"call{number:05d}")


def calling(*numbers: int) -> Message:
    return Message("assistant", tool_calls=[call(number) for number in numbers])


def result(number: int, text: str = "seen") -> Message:
    return Message("tool", text, tool_call_id=call(number).id, name="look")


def as_rendered(renderer: Renderer, history: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether the bridge is the end of transformers' rendering of the real conversation."""
    bridge = renderer.decode(renderer.bridge(history, new, tools=TOOLS, tail=DEMO.encode("<|im_end|>")))
    whole = DEMO.apply_chat_template(
        [message.to_chat() for message in [*history, *new]],
        chat_template=renderer._model.template.source,
        tools=[tool.to_chat() for tool in TOOLS],
        tokenize=False,
        add_generation_prompt=True,
    )
    return str(whole).endswith(f"<|im_end|>{bridge}")


USER, OFF, ON = Message("user", "2 + 2?"), Message("user", "2 + 2? /no_think"), Message("user", "And? /think")
SAID = Message("assistant", "4")
ROUND = [calling(1), result(1)]
CONVERSATIONS = {
    "in the first user message": [OFF],
    "before a round of tools": [OFF, *ROUND],
    "before another user message": [OFF, SAID, USER],
    "before many turns": [OFF, *[SAID, USER] * 5, *ROUND * 3],
    "in a tool result": [USER, calling(1), result(1, "4 /no_think")],
    "in a tool result, long ago": [USER, calling(1), result(1, "4 /no_think"), *ROUND * 3, SAID, USER, SAID, USER],
    "switched off and on": [OFF, SAID, ON],
    "switched off and on, long ago": [OFF, SAID, ON, *[SAID, USER] * 5],
    "not at all": [USER, *[SAID, USER] * 5],
}


@pytest.mark.parametrize("system", [[], [Message("system", "Be brief.")]], ids=["alone", "with a system prompt"])
@pytest.mark.parametrize("history", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_switch_in_an_earlier_message_reaches_the_bridge(history: list[Message], system: list[Message]) -> None:
    """The bridge equals the text in the real conversation, also where it is not compared."""
    renderer = renderer_of(THINKS)
    assert as_rendered(renderer, [*system, *history, SAID], [Message("user", "And 3 + 3?")])
    assert as_rendered(renderer, [*system, *history, calling(9)], [result(9)])


def test_a_text_that_changes_no_bridge_is_no_switch(chat_template: Any, small_tokenizer: Any) -> None:
    """Templates compare many strings; only strings that change a later bridge count."""
    assert set(renderer_of(THINKS)._model.switches.texts) == {"/no_think", "/think"}
    assert renderer_of(NUMBERED)._model.switches.texts == ()
    qwen3 = Renderer(small_tokenizer("qwen3"), chat_template=chat_template("Qwen-Qwen3-0.6B"))
    assert qwen3._model.switches.texts == ()


def test_a_bridge_that_depends_on_the_history_is_refused() -> None:
    """Results that are numbered over a conversation that is too long to be rendered whole: the error has both texts."""
    renderer = renderer_of(NUMBERED)
    with pytest.raises(ConfigError, match=r'writes .*#3<.* where the bridge has .*#0<.*history="fork"'):
        renderer.bridge([USER, *ROUND * 3, calling(4)], [result(4)], tools=TOOLS, tail=[])


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_bridge_of_a_short_conversation_is_the_templates_own(rounds: int) -> None:
    """Also where it depends on the history, which no dummy shows."""
    assert as_rendered(renderer_of(NUMBERED), [USER, *ROUND * rounds, calling(4)], [result(4)])


@pytest.mark.parametrize(
    ("template", "history", "new", "words"),
    [
        (ONE_CALL, [USER, calling(1, 2)], [result(1), result(2)], "one call a turn"),
        (ALTERNATES, [USER, calling(1)], [result(1), USER], "roles must alternate"),
        (NOT_EMPTY, [USER, Message("assistant", "")], [USER], "empty turn"),
    ],
    ids=["two calls", "a user message after results", "an empty reply"],
)
def test_a_step_that_the_template_refuses_is_refused(
    template: str, history: list[Message], new: list[Message], words: str
) -> None:
    """No second dummy hides that the template raises on the real step."""
    with pytest.raises(ConfigError, match=words):
        renderer_of(template).bridge(history, new, tools=TOOLS, tail=[])


class Looking:
    """An environment with tools that answers each step until the third."""

    tools = tuple(TOOLS)

    def __init__(self) -> None:
        self.left = 3

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return [USER]

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        results = [Message("tool", "seen", tool_call_id=call.id, name=call.name) for call in reply.tool_calls]
        return StepResult(results, done=self.left == 0)

    async def close(self) -> None:
        return None


async def play(template: str, reply: str) -> list[Trajectory]:
    renderer = renderer_of(template)
    policy = ScriptedPolicy([DEMO.encode(reply + "<|im_end|>")] * 3)
    return await run_branches(Prompt("q"), Looking, policy, renderer, sampling=SAMPLING)


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


async def test_the_first_bridges_of_an_episode_are_compared() -> None:
    """Also behind a long history, which the self-test does not have: ``append`` fails the rollout, ``fork``
    continues."""
    past = [USER, *[SAID, USER] * 4]

    class Past(Looking):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            return past

    renderer = renderer_of(COUNTED)
    renderer.self_test(TOOLS).raise_if_refused()
    policy = ScriptedPolicy([DEMO.encode(CALL + "<|im_end|>")] * 4)
    (only,) = await run_branches(Prompt("q"), Past, policy, renderer, sampling=SAMPLING)
    assert only.failure is not None
    assert "after this conversation it writes" in only.failure.message
    assert len(policy.requests) == 1
    forked = await run_branches(Prompt("q"), Past, policy, renderer, sampling=SAMPLING, history="fork")
    assert forked[-1].stop_reason is StopReason.TASK_COMPLETED
    assert "<|im_start|>assistant, again" in renderer.decode(forked[-1].tokens)


async def test_one_call_a_turn_is_a_limit_of_its_own() -> None:
    """If the template has one call a turn, a reply with two ends the episode; no step is rendered for it."""
    renderer = renderer_of(ONE_CALL)
    found = renderer.self_test(TOOLS)
    assert found.calls == "one a turn"
    assert any("max_parallel_calls is 1" in note for note in found.notes)
    (one,) = await play(ONE_CALL, CALL)
    assert (one.stop_reason, len(one.completions)) == (StopReason.TASK_COMPLETED, 3)
    (two,) = await play(ONE_CALL, CALL + CALL)
    assert (two.stop_reason, len(two.completions)) == (StopReason.MAX_TOOL_CALLS, 1)
