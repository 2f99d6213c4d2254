"""Laws of model families: for any chat template, the stored tokens are those of the requests, or the run is refused.

For each family: its verdicts, its dialect, and random conversations (tools, parallel results, reasoning, scripts, cut
replies, several user turns, unusual tokenization of replies).

1. ``history="append"``: each request is a prefix of the stored tokens; the loss mask is exactly the sampled tokens; if
   the template is stable, the text is its own rendering.
2. ``history="fork"``: each request is the template's rendering of the conversation at that moment, even if it rewrites
   the history; each sampled token is trained once.
3. A family whose bridge would be wrong is refused with the reason before anything is sampled.

``--long`` plays 2,000 conversations of each family, with its whole vocabulary.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from rollouts.agent import run_branches
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, StopReason, TokenColumn, Tool, ToolCall
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, speak
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import Status, trajectory_to_samples
from rollouts.trajectory import Trajectory
from tests.families import FAMILIES as REAL_AND_SMALL
from tests.families import TOOLS, UNCHECKED, Family
from tests.structures import STRUCTURES
from tests.worlds import some_text

FAMILIES = {**REAL_AND_SMALL, **STRUCTURES}
PLAYED_WITHOUT_TOOLS = [name for name, family in FAMILIES.items() if not family.calls or "refused" in family.verdicts]


class World:
    """Both sides of one random conversation: an environment and the model's replies."""

    def __init__(self, family: Family, renderer: Renderer, tools: Sequence[Tool], seed: int, *, cuts: bool) -> None:
        self.family, self.renderer, self._tools = family, renderer, tuple(tools)
        self.rng = random.Random(seed)
        self.longest = self.rng.randint(4, 40) if cuts else 4096
        self.left = self.rng.randint(1, 4)
        self.shown: list[Message] = []
        self.replies: list[list[int]] = []
        self.calls = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        wanted = self.rng.random() < 0.7 and self.family.system
        system = [Message("system", f"Be brief. {self.text()}")] if wanted else []
        self.shown = [*system, Message("user", self.text())]
        return self.shown

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        if self.left < 0:
            return StepResult(done=True)
        results = [Message("tool", self.text(), tool_call_id=c.id, name=c.name) for c in reply.tool_calls]
        return StepResult(results or [Message("user", self.text())])

    async def close(self) -> None:
        return None

    def observe(self, trajectory: Trajectory) -> None:
        self.shown = trajectory.messages

    def answer(self, _: TokenColumn) -> Reply:
        """A reply in the format of the family, with random tokenization."""
        reply, new = self.next_reply()
        ids = speak(self.renderer, self.shown, reply, new, self._tools).tolist()
        ids = self.respelled(ids[:-1]) + ids[-1:]
        self.replies.append(ids[: self.longest])
        return Reply(self.replies[-1], "length" if len(ids) > self.longest else "stop")

    def next_reply(self) -> tuple[Message, list[Message]]:
        calls = self.rng.choice([0, 0, 1, 1, 2, 3]) if self._tools else 0
        tool_calls = tuple(self.call() for _ in range(min(calls, self.family.parallel)))
        content = self.text() if not tool_calls or (self.family.text_and_calls and self.rng.random() < 0.4) else ""
        thought = self.text() if self.family.thinks and self.rng.random() < 0.7 else None
        results = [Message("tool", "x", tool_call_id=call.id, name=call.name) for call in tool_calls]
        return Message("assistant", content, tool_calls, reasoning=thought), results or [Message("user", "x")]

    def call(self) -> ToolCall:
        name = self.rng.choice(self._tools).name
        self.calls += 1
        return ToolCall(name, {"at": self.text(3)}, id=self.family.ids.format(self.calls, name=name))

    def text(self, most: int = 8) -> str:
        return unicodedata.normalize("NFC", some_text(self.rng, most)).strip() or "ok"

    def respelled(self, ids: Sequence[int]) -> list[int]:
        """The same text with some tokens split, unlike the tokenizer's encoding."""
        odd: list[int] = []
        for token in ids:
            piece = self.renderer.decode([token])
            if len(piece) > 1 and self.rng.random() < 0.2 and len(piece) < 12:
                parts = [part for character in piece for part in self.renderer.encode(character).tolist()]
                if "\ufffd" not in piece and self.renderer.decode(parts) == piece:
                    odd += parts
                    continue
            odd.append(token)
        return odd


def play(family: Family, renderer: Renderer, seed: int, history: Any) -> tuple[World, list[Trajectory], ScriptedPolicy]:
    tools = TOOLS if family.calls and "refused" not in family.verdicts else ()
    world = World(family, renderer, tools, seed, cuts=history == "append" and seed % 4 == 0)
    policy = ScriptedPolicy(world.answer)

    async def run() -> list[Trajectory]:
        return await run_branches(
            Prompt("unused", index=seed),
            lambda: world,
            policy,
            renderer,
            sampling=SamplingParams(max_new_tokens=world.longest),
            limits=Limits(max_turns=8, on_cut="continue"),
            history=history,
            on_step=world.observe,
        )

    return world, anyio.run(run), policy


def assert_stored(world: World, branches: Sequence[Trajectory], requests: Sequence[TokenColumn]) -> None:
    """Check laws 1 to 3 of the package against the requests and the sampled ids."""
    assert branches[-1].stop_reason is not StopReason.FAILED, branches[-1].failure
    calls = [(branch, call) for branch in branches for call in branch.completions]
    assert len(calls) == len(requests) == len(world.replies)
    masks = [np.zeros(len(branch), bool) for branch in branches]
    for (branch, call), request, reply in zip(calls, requests, world.replies, strict=True):
        assert np.array_equal(request, branch.tokens[: call.start])
        assert branch.tokens[call.start : call.stop].tolist() == reply
        masks[branches.index(branch)][call.start : call.stop] = True
        if call.finish_reason == "stop":
            assert branch.mask[call.stop - 1]
    for branch, mask in zip(branches, masks, strict=True):
        assert np.array_equal(branch.mask, mask)
    assert sum(int(branch.mask.sum()) for branch in branches) == sum(map(len, world.replies))


def assert_reads_as_rendered(renderer: Renderer, branch: Trajectory, tools: Sequence[Tool], stop: str = "") -> None:
    """Check that each request of a branch, as text, is the template's rendering of the conversation so far.

    ``stop`` is a stop token that the template never writes; it is not compared.
    """
    replies = [number for number, message in enumerate(branch.messages) if message.role == "assistant"]
    for call, number in zip(branch.completions, replies[-len(branch.completions) :], strict=True):
        # gpt-oss samples <|return|> where its history has <|end|>: the sampled token stays.
        shown = renderer.decode(branch.tokens[: call.start]).replace("<|return|>", "<|end|>").replace(stop, "")
        rendered = renderer.render(branch.messages[:number], tools)
        assert unicodedata.normalize("NFC", shown) == unicodedata.normalize("NFC", rendered)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations(name: str, request: pytest.FixtureRequest, conversations: int) -> None:
    """Half of them with ``history="append"``, half with ``history="fork"``."""
    family = FAMILIES[name]
    renderer = family.make(request)
    stable = set(family.verdicts) == {"exact"}
    forks = 0
    for seed in range(conversations):
        history = ("append", "fork")[seed % 2]
        world, branches, policy = play(family, renderer, seed, history)
        assert_stored(world, branches, policy.requests)
        cut = any(call.finish_reason != "stop" for branch in branches for call in branch.completions)
        if history == "fork" or (stable and not cut):
            for branch in branches:
                stop = renderer.stop_texts[0] if family.stopless else ""
                assert_reads_as_rendered(renderer, branch, world.tools, stop)
        for sample in trajectory_to_samples(branches, Prompt("q", index=seed, group_index=0), renderer.decode):
            assert check_sample(sample) == []
        forks += len(branches) - 1
    if stable:
        assert forks == 0, f"{forks} forks of a family that is exact"
    elif "forks" in family.verdicts[3:]:
        assert forks > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_verdicts_on_each_family(name: str, request: pytest.FixtureRequest) -> None:
    """The verdict on each step, the dialect, and whether calls are read."""
    family = FAMILIES[name]
    renderer = family.make(request)
    found = renderer.self_test(TOOLS)
    assert tuple(step.verdict for step in found.steps) == family.verdicts, str(found)
    assert renderer.dialect.name == family.dialect
    assert found.calls == ("not read" if not family.calls else "one a turn" if family.parallel == 1 else "read")
    assert (found.verdict == "refused") == ("refused" in family.verdicts or not family.calls)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PLAYED_WITHOUT_TOOLS])
def test_a_dialect_reads_the_replies_of_its_family(name: str, request: pytest.FixtureRequest) -> None:
    """Calls in their order, with names and arguments; thoughts and content; nothing malformed."""
    family = FAMILIES[name]
    renderer = family.make(request)
    for seed in range(20):
        world = World(family, renderer, TOOLS, seed, cuts=False)
        history = [Message("system", "Be brief."), Message("user", "Well?")]
        reply, new = world.next_reply()
        ids = speak(renderer, history, reply, new, TOOLS)
        read = renderer.parse(ids, tools=TOOLS, prompt=renderer.opening(history, TOOLS))
        assert [(c.name, c.arguments, c.error) for c in read.tool_calls] == [
            (c.name, c.arguments, None) for c in reply.tool_calls
        ]
        assert (read.content, read.reasoning or None) == (reply.content, reply.reasoning)


REFUSED = {
    "SmolLM3": "dialect 'plain' does not read the tool calls",
    "OLMo": "dialect 'plain' does not read the tool calls",
    "Phi-3.5": "leaves out tool messages",
    "Gemma 3": "roles must alternate",
    "Command-R": "the template writes",
    "Gemma 2": "roles must alternate",
    "Phi-4": "this model has no tools",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_run_on_a_refused_template_does_not_start(name: str, request: pytest.FixtureRequest) -> None:
    """The error has the reason, and nothing is sampled; without tools, the same template passes."""
    renderer = FAMILIES[name].make(request)
    world = World(FAMILIES[name], renderer, TOOLS, 0, cuts=False)
    policy = ScriptedPolicy(world.answer)
    sampling = SamplingParams(max_new_tokens=10)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        await run_branches(Prompt("q"), lambda: world, policy, renderer, sampling=sampling)
    assert policy.requests == []
    renderer.self_test(()).raise_if_refused()


# -- ends of turns ----------------------------------------------------------------------------------------------------

USER, CALLING = Message("user", "Well?"), ToolCall("look", {"at": "x"}, id="c00000001")
RESULT = Message("tool", "seen", tool_call_id=CALLING.id, name="look")


def reply_of(name: str, request: pytest.FixtureRequest, *, calls: bool) -> tuple[Renderer, Message, Message, list[int]]:
    renderer = FAMILIES[name].make(request)
    reply = Message("assistant", tool_calls=(CALLING,)) if calls else Message("assistant", "Yes.")
    new = RESULT if calls else Message("user", "More?")
    return renderer, reply, new, speak(renderer, [USER], reply, [new], TOOLS).tolist()


@pytest.mark.parametrize(
    ("name", "calls", "stop"),
    [
        ("Qwen3", False, "<|im_end|>"),
        ("GLM-4.6", False, "<|user|>"),
        ("GLM-4.6", True, "<|observation|>"),
        ("gpt-oss", False, "<|return|>"),
        ("gpt-oss", True, "<|call|>"),
        ("Mistral Nemo", True, "</s>"),
        ("Llama 3.x", True, "<|eot_id|>"),
        ("Gemma 4", True, "<|calls_end|>"),
    ],
)
def test_a_sampled_stop_token_is_not_repeated(
    name: str, calls: bool, stop: str, request: pytest.FixtureRequest
) -> None:
    """It is the last id of the reply; the bridge repeats neither it nor the template's own stop token."""
    renderer, reply, new, ids = reply_of(name, request, calls=calls)
    assert renderer.decode(ids[-1:]) == stop
    bridge = renderer.bridge([USER, reply], [new], tools=TOOLS, tail=ids)
    cut = renderer.bridge([USER, reply], [new], tools=TOOLS, tail=ids[:-1])
    assert cut[1:].tolist() == bridge.tolist()
    assert int(cut[0]) not in bridge[:1]


def test_a_stop_of_another_name_is_not_doubled(request: pytest.FixtureRequest) -> None:
    """Llama samples ``<|eom_id|>`` where the template writes ``<|eot_id|>``."""
    renderer, reply, new, ids = reply_of("Llama 3.x", request, calls=True)
    eom = next(stop for stop in renderer.stop_token_ids if renderer.decode([stop]) == "<|eom_id|>")
    usual = renderer.bridge([USER, reply], [new], tools=TOOLS, tail=ids)
    assert renderer.bridge([USER, reply], [new], tools=TOOLS, tail=[*ids[:-1], eom]).tolist() == usual.tolist()


@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "Mistral Nemo", "Gemma 4", "content must be None"])
def test_families_without_a_header_after_results_get_none(name: str, request: pytest.FixtureRequest) -> None:
    """The bridge ends with the result's own mark."""
    renderer, reply, new, ids = reply_of(name, request, calls=True)
    text = renderer.decode(renderer.bridge([USER, reply], [new], tools=TOOLS, tail=ids))
    assert text.rstrip().endswith((">", "]"))
    assert "seen" in text[-45:]
    assert not any(mark in text for mark in ("ssistant", "model"))


def test_a_stop_token_that_closes_a_call_belongs_to_it(request: pytest.FixtureRequest) -> None:
    """Apertus stops at the mark that closes its calls. A cut call has no mark, and an answer none of calls."""
    renderer = FAMILIES["Apertus"].make(request)
    ids = renderer.encode('<|tools_prefix|>[{"look": {"at": "x"}}]<|tools_suffix|>').tolist()
    (call,) = renderer.parse(ids, tools=TOOLS).tool_calls
    assert (call.name, call.arguments, call.error) == ("look", {"at": "x"}, None)
    (cut,) = renderer.parse(ids[:-1], tools=TOOLS).tool_calls
    assert cut.fault == "unclosed"
    (broken,) = renderer.parse([*ids[:-2], ids[-1]], tools=TOOLS).tool_calls
    assert broken.error is not None
    assert renderer.parse([*renderer.encode("Yes.").tolist(), ids[-1]], tools=TOOLS).content == "Yes."


def test_a_stop_token_stands_for_the_mark_that_ends_a_complete_call(request: pytest.FixtureRequest) -> None:
    """Hermes and Apertus: servers run such a call. A call that is cut, or incomplete before the stop, is malformed."""
    for name, text, stop in (
        ("Qwen3", '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}', "<|im_end|>"),
        ("Apertus", '<|tools_prefix|>[{"look": {"at": "x"}}]', "<|assistant_end|>"),
    ):
        renderer = FAMILIES[name].make(request)
        whole, end = renderer.encode(text).tolist(), renderer.encode(stop).tolist()
        (call,) = renderer.parse([*whole, *end], tools=TOOLS).tool_calls
        assert (call.name, call.arguments, call.error, call.raw) == ("look", {"at": "x"}, None, text)
        assert renderer.parse(whole, tools=TOOLS).tool_calls[0].fault == "unclosed"
        half = renderer.encode(text[:-2]).tolist()
        assert renderer.parse([*half, *end], tools=TOOLS).tool_calls[0].error is not None


@pytest.mark.parametrize("name", UNCHECKED)
async def test_a_refusal_is_overruled_by_name(name: str, request: pytest.FixtureRequest) -> None:
    """A dialect with ``calls="unchecked"`` reads the replies of a template that writes no calls; a note says so."""
    family, dialect = FAMILIES[name], UNCHECKED[name]
    with pytest.raises(ConfigError, match='calls="unchecked"'):
        family.make(request, dialect=dialect).self_test(TOOLS).raise_if_refused()
    with pytest.raises(ConfigError, match=r"calls: got 'unchecked'; expected a dialect named with it"):
        family.make(request, calls="unchecked")
    renderer = family.make(request, dialect=dialect, calls="unchecked")
    found = renderer.self_test(TOOLS)
    found.raise_if_refused()
    assert (found.calls, found.unread) == ("unchecked", "")
    assert 'calls="unchecked"' in " ".join(found.notes)
    assert renderer.fingerprints()["template"]["calls"] == "unchecked"
    spellings = {
        "hermes": '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>',
        "olmo3": '<function_calls>\nlook(at="x")\n</function_calls>',
        "xlam": '[{"name": "look", "arguments": {"at": "x"}}]',
        "granite": '<|tool_call|>[{"name": "look", "arguments": {"at": "x"}}]',
    }
    world = World(family, renderer, TOOLS, 0, cuts=False)
    world.left = 1
    replies = [renderer.encode(text + renderer.stop_texts[0]).tolist() for text in (spellings[dialect], "Yes.")]
    policy = ScriptedPolicy(replies)
    sampling = SamplingParams(max_new_tokens=99)
    (only,) = await run_branches(Prompt("q"), lambda: world, policy, renderer, sampling=sampling)
    assert only.stop_reason is StopReason.TASK_COMPLETED
    assert only.metrics["tool_calls"] == 1
    assert next(message for message in only.messages if message.role == "tool").text in renderer.decode(only.tokens)


# -- what a model does wrong ------------------------------------------------------------------------------------------


async def test_an_id_that_the_template_refuses_is_replaced(request: pytest.FixtureRequest) -> None:
    """Nemo requires ids of nine characters; the model wrote three: the call and its result have an id of ours."""
    renderer = FAMILIES["Mistral Nemo"].make(request)
    world = World(FAMILIES["Mistral Nemo"], renderer, TOOLS, 0, cuts=False)
    world.left = 1
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}, "id": "abc"}]</s>'
    ids = renderer.encode(text).tolist()
    policy = ScriptedPolicy([ids, renderer.encode("Yes.</s>").tolist()])
    sampling = SamplingParams(max_new_tokens=99)
    (only,) = await run_branches(Prompt("q"), lambda: world, policy, renderer, sampling=sampling, history="append")
    assert only.stop_reason is StopReason.TASK_COMPLETED
    (call,) = next(message for message in only.messages if message.tool_calls).tool_calls
    assert call.id == "call00000"
    first, second = only.completions
    assert only.tokens[first.start : first.stop].tolist() == ids
    assert '"call_id": "call00000"' in renderer.decode(only.tokens[first.stop : second.start])


@pytest.mark.parametrize("history", ["append", "fork"])
async def test_a_reply_that_the_template_refuses_ends_the_episode(history: Any, request: pytest.FixtureRequest) -> None:
    """An empty turn, after which the environment asks again: a stop reason of a complete rollout, and no failure."""
    renderer = FAMILIES["Mistral Small"].make(request)
    world = World(FAMILIES["Mistral Small"], renderer, TOOLS, 0, cuts=False)
    world.left = 2
    policy = ScriptedPolicy([renderer.encode("</s>").tolist()])
    sampling = SamplingParams(max_new_tokens=99)
    (only,) = await run_branches(Prompt("q"), lambda: world, policy, renderer, sampling=sampling, history=history)
    assert (only.stop_reason, only.failure) == (StopReason.MALFORMED_REPLY, None)
    (sample,) = trajectory_to_samples([only], Prompt("q", index=0, group_index=0), renderer.decode)
    assert sample.status is Status.COMPLETED


async def test_messages_that_the_template_refuses_fail_the_rollout(request: pytest.FixtureRequest) -> None:
    """Two messages of users after a good reply, where turns alternate: the environment's doing."""
    renderer = FAMILIES["Gemma 2"].make(request)

    class Twice(World):
        async def step(self, reply: Message) -> StepResult:
            return StepResult([USER, USER])

    family = FAMILIES["Gemma 2"]
    policy = ScriptedPolicy([renderer.encode("Yes.<end_of_turn>").tolist()])
    sampling = SamplingParams(max_new_tokens=99)
    (only,) = await run_branches(
        Prompt("q"), lambda: Twice(family, renderer, (), 0, cuts=False), policy, renderer, sampling=sampling
    )
    assert only.failure is not None
    assert "roles must alternate" in only.failure.message
