"""A bridge looks only at what is new, and the comparisons of a conversation cost in proportion to its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import pytest

from rollouts.agent import run_branches
from rollouts.dtypes import Limits, Message, Prompt
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.renderer import BridgeMemory
from rollouts.testing.policy import ScriptedPolicy
from tests.renderer.test_switches import DEMO, SAMPLING, THINKS, TOOLS, Looking, as_rendered, renderer_of, turns

STOP = DEMO.encode("<|im_end|>")
LATE = turns(
    "{%- if m.role == 'user' %}{% set ns.count = ns.count + 1 %}{% endif %}",
    prompt="<|im_start|>assistant' + (', again' if ns.count > 6 else '') + '\n",
)
TOGGLED = turns(
    "{%- if '/flip' in m.content %}{% set ns.think = not ns.think %}{% endif %}",
    prompt="<|im_start|>assistant\n' + ('<think>' if ns.think else '') + '",
)
SWITCHED_AND_COUNTED = turns(
    "{%- if m.role == 'user' %}{% set ns.count = ns.count + 1 %}{% endif %}"
    "{%- if '/x' in m.content %}{% set ns.think = false %}{% endif %}",
    prompt="<|im_start|>assistant' + (', off' if not ns.think else '') + (', again' if ns.count > 3 else '') + '\n",
)


class Counted(Sequence[Message]):
    """A conversation that counts the messages that are looked at."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages, self.looks = list(messages), 0

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        found = self.messages[at]
        self.looks += len(found) if isinstance(found, list) else 1
        return found

    def __len__(self) -> int:
        return len(self.messages)


@pytest.mark.parametrize(("first", "each"), [("", ""), (" /no_think", ""), ("", " /no_think"), (" /no_think", "ing")])
def test_a_bridge_looks_at_as_many_messages_after_300_turns_as_after_10(first: str, each: str) -> None:
    """Also with a switch in each message, where only the last one decides; but 1, 2, 4, 8, … look at all of them."""
    renderer = renderer_of(THINKS)
    history, memory = Counted([Message("user", f"Well?{first}")]), BridgeMemory()
    looks, whole = [], []
    for turn in range(1, 301):
        history.messages.append(Message("assistant", f"{turn}"))
        new = [Message("user", f"And {turn}?{each}")]
        history.looks = 0
        renderer.bridge(history, new, tools=TOOLS, tail=STOP, memory=memory)
        (whole if history.looks >= len(history) else looks).append(history.looks)
        history.messages += new
    assert max(looks[-200:]) <= max(looks[:10]) < 10
    assert len(whole) < 40
    assert as_rendered(renderer, [*history.messages, Message("assistant", "Yes.")], [Message("user", "So?")])


@pytest.mark.parametrize("kinds", [("/no_think",), ("/no_think", "/think"), ("/no_think", "no switch", "/think", "")])
def test_messages_with_switches_are_dropped_only_if_no_bridge_depends_on_them(kinds: tuple[str, ...]) -> None:
    """Each bridge of a conversation with many switches is the end of transformers' rendering of all of it."""
    renderer, memory = renderer_of(THINKS), BridgeMemory()
    history = [Message("system", "Be brief. /think"), Message("user", "Well?")]
    for turn in range(24):
        history.append(Message("assistant", "Yes."))
        new = [Message("user", f"And {turn}? {kinds[turn % len(kinds)]}")]
        bridge = renderer.decode(renderer.bridge(history, new, tools=TOOLS, tail=STOP, memory=memory))
        history += new
        assert renderer.render(history, TOOLS).endswith(bridge)
    assert len(memory.read(history, renderer._model.switches, renderer._model.marks).messages) <= 5


def test_a_switch_that_toggles_is_never_dropped() -> None:
    """The number of such messages decides, so that all of them stay."""
    renderer, memory = renderer_of(TOGGLED), BridgeMemory()
    assert renderer._model.switches.texts == ("/flip",)
    history = [Message("user", "Well?")]
    for turn in range(11):
        history.append(Message("assistant", "Yes."))
        new = [Message("user", "And? /flip" if turn % 3 else "And?")]
        bridge = renderer.decode(renderer.bridge(history, new, tools=TOOLS, tail=STOP, memory=memory))
        history += new
        assert renderer.render(history, TOOLS).endswith(bridge)


def test_another_conversation_starts_the_memory_again() -> None:
    """A list that is another, or shorter, is read from its start."""
    renderer, memory = renderer_of(THINKS), BridgeMemory()
    said, new = Message("assistant", "Yes."), [Message("user", "And?")]
    for first, ending in ((" /no_think", "<think></think>"), ("", "<think>\n"), (" /no_think", "<think></think>")):
        history = [Message("user", f"Well?{first}"), said]
        bridge = renderer.bridge(history, new, tools=TOOLS, tail=STOP, memory=memory)
        assert renderer.decode(bridge).endswith(ending)


class Talking(Looking):
    """A conversation of user messages."""

    def __init__(self) -> None:
        self.left = 12

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        return StepResult([Message("user", "And?")], done=self.left == 0)


async def test_a_late_dependence_on_earlier_text_fails_the_rollout() -> None:
    """No switch is near, and the first six bridges are right: the comparison of the fourth behind a dummy finds it."""
    renderer = renderer_of(LATE)
    policy = ScriptedPolicy([DEMO.encode("ok<|im_end|>")] * 12)
    (only,) = await run_branches(Prompt("q"), Talking, policy, renderer, sampling=SAMPLING, limits=Limits(max_turns=12))
    assert only.failure is not None
    assert "after this conversation it writes" in only.failure.message
    assert len(policy.requests) == 7


def test_without_a_memory_the_bridge_after_a_switch_is_compared() -> None:
    """A call with a whole conversation: the switch is in the user message before the last reply."""
    renderer = renderer_of(SWITCHED_AND_COUNTED)
    user, said = Message("user", "Well?"), Message("assistant", "Yes.")
    history = [user, said, user, said, user, said, Message("user", "Well? /x"), said]
    with pytest.raises(ConfigError, match="after this conversation it writes"):
        renderer.bridge(history, [user], tools=TOOLS, tail=STOP)
