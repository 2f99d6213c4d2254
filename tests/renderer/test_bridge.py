"""Random conversations of each family, compared with transformers' rendering of the real history.

Each bridge must be the end of ``apply_chat_template`` over the whole conversation so far, with the real replies and
results. Texts of users and tools contain the switches and marks that templates look for.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import attrs
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from rollouts.agent import run_branches
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams
from rollouts.environments.base import StepResult
from rollouts.renderer import Renderer
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory
from tests.families import FAMILIES as REAL_AND_SMALL
from tests.families import TOOLS, Family
from tests.structures import STRUCTURES
from tests.test_families import World

FAMILIES = {**REAL_AND_SMALL, **STRUCTURES}
ALONE = ("Qwen2.5", "gpt-oss")
"""Families that load a tokenizer of their own, for seconds: played with ``--long``, and by ``test_families.py``."""
WRITTEN = ("/no_think", "/think", "<think>", "</think>", "detailed thinking off", "<tool_response>", "/nothink")


class Marked(World):
    """A world whose users and tools write what templates look for."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.shown = [self._marked(message) for message in await super().start(prompt)]
        return self.shown

    async def step(self, reply: Message) -> StepResult:
        step = await super().step(reply)
        return attrs.evolve(step, messages=[self._marked(message) for message in step.messages])

    def _marked(self, message: Message) -> Message:
        if self.rng.random() > 0.3:
            return message
        return attrs.evolve(message, content=f"{message.content} {self.rng.choice(WRITTEN)}")


def play(family: Family, renderer: Renderer, seed: int) -> tuple[Marked, Trajectory]:
    tools = TOOLS if family.calls and "refused" not in family.verdicts else ()
    world = Marked(family, renderer, tools, seed, cuts=False)

    async def run() -> Trajectory:
        (only,) = await run_branches(
            Prompt("unused", index=seed),
            lambda: world,
            ScriptedPolicy(world.answer),
            renderer,
            sampling=SamplingParams(max_new_tokens=4096),
            limits=Limits(max_turns=8),
            on_step=world.observe,
        )
        return only

    return world, anyio.run(run)


def rendered(renderer: Renderer, messages: Sequence[Message], world: Marked) -> str:
    """The whole conversation by transformers; the fields have the form that the template takes."""
    template = renderer._template
    text: str = _compile_jinja_template(template.source).render(  # apply_chat_template drops content that is None
        messages=[template._chat(message) for message in messages],
        tools=[tool.to_chat() for tool in world.tools] or None,
        documents=None,
        add_generation_prompt=True,
        **template._variables,
    )
    return text


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_bridge_ends_the_rendering_of_the_real_history(
    name: str, request: pytest.FixtureRequest, conversations: int
) -> None:
    """The opening is the whole text; a bridge is its end, without the stop token that was sampled."""
    if name in ALONE and not request.config.getoption("--long"):
        pytest.skip("its tokenizer takes seconds to load; --long plays it")
    family = FAMILIES[name]
    renderer = family.make(request)
    for seed in range(conversations // 20):
        world, branch = play(family, renderer, seed)
        assert branch.failure is None, branch.failure
        replies = [number for number, message in enumerate(branch.messages) if message.role == "assistant"]
        stop = 0
        for call, number in zip(branch.completions, replies, strict=True):
            written = renderer.decode(branch.tokens[stop : call.start])
            whole = rendered(renderer, branch.messages[:number], world)
            assert whole == written if stop == 0 else whole.endswith(written)
            stop = call.stop
