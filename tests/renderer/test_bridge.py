"""Bridges of each family, compared with transformers' rendering of the real history, and with the new messages.

Each bridge must be the end of ``apply_chat_template`` over the whole conversation so far, with the real replies and
results. Texts of users and tools contain the switches and marks that templates look for. With any of a family's stop
tokens missing, the text of each new message is in the next request, or the run is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import anyio
import attrs
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from rollouts.agent import run_branches
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, TokenColumn, Tool, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer, speak
from rollouts.renderer.python_template import PythonTemplate
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory
from tests.families import FAMILIES as REAL_AND_SMALL
from tests.families import TOOLS, Family
from tests.structures import STRUCTURES
from tests.test_families import World

FAMILIES = {**REAL_AND_SMALL, **STRUCTURES}
ALONE = ("Qwen2.5", "gpt-oss")
"""Families that load another tokenizer, for seconds: played with ``--long``, and by ``test_families.py``."""
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
    """The whole conversation by transformers, or by a template in Python; its fields have the form that it takes."""
    template = renderer._model.template
    given = {
        "messages": [template._chat(message) for message in messages],
        "tools": [tool.to_chat() for tool in world.tools] or None,
        "add_generation_prompt": True,
        **template._variables,
    }
    if isinstance(template, PythonTemplate):
        return "".join(template._function(**given))
    text: str = _compile_jinja_template(template.source).render(**given, documents=None)  # keeps content that is None
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


# -- new messages, whichever stop tokens are known --------------------------------------------------------------------

ROUNDS = 4
"""Of tools: the first bridges render the whole conversation, the last one a dummy."""


def tool_results(number: int, calls: Sequence[ToolCall], text: str) -> list[Message]:
    """A result for each call, or one without a call where the template has none."""
    results = [Message("tool", f"{text}{n}", tool_call_id=call.id, name=call.name) for n, call in enumerate(calls)]
    return results or [Message("tool", text, tool_call_id=f"c{number:08d}", name="look")]


NEWS: dict[str, Callable[[int, Sequence[ToolCall], str], list[Message]]] = {
    "results": lambda number, calls, _: tool_results(number, calls, f"seen{number}"),
    "results and a user message": lambda number, calls, _: [
        *tool_results(number, calls, f"seen{number}"),
        Message("user", f"asked{number}"),
    ],
    "results with stop tokens": lambda number, calls, stops: tool_results(number, calls, f"left{stops}{number}right"),
    "a user message with stop tokens": lambda number, calls, stops: [Message("user", f"left{stops}{number}right")],
}
"""The messages that answer a reply, from its number, its calls and the text of the family's stop tokens."""


class Answering:
    """An environment that answers each reply with messages of one kind, and the model that calls its tools."""

    def __init__(self, family: Family, renderer: Renderer, news: str, stops: Sequence[int]) -> None:
        self.family, self.renderer, self.news, self.stops = family, renderer, NEWS[news], stops
        self.answered = "user" not in news or "results" in news
        self.shown: Sequence[Message] = ()
        self.replies: list[list[int]] = []
        self.written: list[list[Message]] = []

    @property
    def tools(self) -> Sequence[Tool]:
        return TOOLS if self.answered else ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.shown = [Message("user", "Well?")]
        return self.shown

    async def step(self, reply: Message) -> StepResult:
        if len(self.replies) > ROUNDS:
            return StepResult(done=True)
        stops = "".join(self.renderer.stop_texts)
        self.written.append(self.news(len(self.replies), reply.tool_calls, stops))
        return StepResult(self.written[-1])

    async def close(self) -> None:
        return None

    def observe(self, trajectory: Trajectory) -> None:
        self.shown = trajectory.messages

    def answer(self, _: TokenColumn) -> list[int]:
        """One call, two in every second reply; the reply ends with a known stop token, the template's if possible."""
        number = len(self.replies)
        calling = self.answered and self.family.calls
        count = min(1 + number % 2, self.family.parallel) if calling else 0
        ids = [self.family.ids.format(2 * number + n, name="look") for n in range(count)]
        calls = tuple(ToolCall("look", {"at": f"x{n}"}, id=id) for n, id in enumerate(ids))
        reply = Message("assistant", "" if calls else "Yes.", calls)
        new = tool_results(number, calls, "seen") if calls else [Message("user", "More?")]
        spoken = speak(self.renderer, self.shown, reply, new, self.tools if calls else ()).tolist()
        own = spoken[-1] if spoken[-1] in self.renderer.stop_token_ids else None
        text = spoken if own is None else spoken[:-1]
        self.replies.append([*text, own if own in self.stops else self.stops[0]])
        return self.replies[-1]


def subsets(stops: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The known stop tokens: all, then any that may be left."""
    return itertools.chain.from_iterable(itertools.combinations(stops, n) for n in range(len(stops), 0, -1))


def lost(world: Answering, renderer: Renderer) -> tuple[list[str], str]:
    """The new messages whose text is not in the next request; and why the run was refused, ``""`` if it was not."""
    policy = ScriptedPolicy(world.answer)

    async def run() -> str:
        try:
            (only,) = await run_branches(
                Prompt("unused"),
                lambda: world,
                policy,
                renderer,
                sampling=SamplingParams(max_new_tokens=4096),
                limits=Limits(max_turns=ROUNDS + 1),
                on_step=world.observe,
            )
        except ConfigError as error:
            return f"refused at the start: {error}"
        return "" if only.failure is None else only.failure.message

    refusal = anyio.run(run)
    missing = []
    for (before, after), reply, new in zip(
        itertools.pairwise(policy.requests), world.replies, world.written, strict=False
    ):
        written = renderer.decode(after[len(before) + len(reply) :])
        missing += [f"{message.text!r} in {written!r}" for message in new if message.text not in written]
    return missing, refusal


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FAMILIES)
def test_new_messages_are_in_the_next_request_whichever_stop_tokens_are_known(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Or the run is refused: before its start, unless the template itself cannot write a user message after results."""
    if name in ALONE and not request.config.getoption("--long"):
        pytest.skip("its tokenizer takes seconds to load; --long plays it")
    family = FAMILIES[name]
    plain = {} if family.calls else {"dialect": "plain"}
    complete = family.make(request, **plain)
    for stops in subsets(complete.stop_token_ids):
        renderer = family.make(request, stop_token_ids=stops, **plain)
        for news in NEWS:
            missing, refusal = lost(Answering(family, complete, news, stops), renderer)
            assert missing == [], (news, renderer.stop_texts)
            if refusal and not refusal.startswith("refused at the start"):
                assert news == "results and a user message", (news, renderer.stop_texts, refusal)
                assert "cannot render" in refusal
            if stops == complete.stop_token_ids and "refused" not in family.verdicts and news == "results":
                assert refusal == ""


def test_a_refusal_asks_which_stop_token_ends_a_turn_of_calls(request: pytest.FixtureRequest) -> None:
    """The template ends a turn of calls with a token that is not known to be a stop token, and a result with one."""
    complete = FAMILIES["Functionary 3.1"].make(request)
    eot, _ = complete.stop_token_ids
    renderer = FAMILIES["Functionary 3.1"].make(request, stop_token_ids=[eot])
    with pytest.raises(ConfigError, match=r"\['<\|eot_id\|>'\].*which stop ends a turn of calls\?"):
        renderer.self_test(TOOLS).raise_if_refused()
    call = ToolCall("look", {"at": "x"}, id="c00000001")
    history = [Message("user", "Well?"), Message("assistant", tool_calls=(call,))]
    with pytest.raises(ConfigError, match="which stop ends a turn of calls"):
        renderer.bridge(history, tool_results(1, [call], "seen"), tools=TOOLS, tail=[eot])


def test_a_turn_whose_end_depends_on_the_result_is_refused() -> None:
    """The text up to the stop token must be the same for every result, else it could be part of one."""
    source = SORTED.replace(
        "{{- '<|im_end|>' }}", "{{- (loop.nextitem.content or 'x')[0] if loop.nextitem }}<|im_end|>"
    )
    renderer = Renderer(load_tokenizer(DEMO_MODEL), chat_template=source)
    with pytest.raises(ConfigError, match="how it ends depends on the text of the new messages"):
        renderer.self_test(TOOLS).raise_if_refused()


# -- the order of results ---------------------------------------------------------------------------------------------

SORTED = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}
{%- set calls = messages[:loop.index0] | selectattr('tool_calls', 'defined') | list | last %}
{%- for c in calls.tool_calls %}
{%- for r in messages if r.tool_call_id == c.id %}{{ '<tool_response>' + r.content + '</tool_response>' }}{% endfor %}
{%- endfor %}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("rounds", [0, 4])
def test_results_in_another_order_than_the_calls_are_written_as_the_template_writes_them(rounds: int) -> None:
    """A template that sorts results into the order of the calls gets the calls in the order of the reply."""
    renderer = Renderer(load_tokenizer(DEMO_MODEL), chat_template=SORTED)
    history = [Message("user", "Well?")]
    for number in range(rounds + 1):
        calls = [ToolCall("look", {"at": "x"}, id=f"c{number}{n}") for n in range(3)]
        history.append(Message("assistant", tool_calls=tuple(calls)))
        results = [Message("tool", f"seen{call.id}", tool_call_id=call.id, name="look") for call in reversed(calls)]
        history += results
    start = len(history) - len(results)
    bridge = renderer.decode(renderer.bridge(history[:start], results, tools=TOOLS, tail=[]))
    assert bridge.index(f"seenc{rounds}0") < bridge.index(f"seenc{rounds}1") < bridge.index(f"seenc{rounds}2")
    assert renderer.render(history, TOOLS).endswith(bridge)
