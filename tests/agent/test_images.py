"""Episodes with images: the policy receives the images of its branch, in order, with the positions of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollouts.agent import run_agent, run_branches
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.vllm import VLLMPolicy
from rollouts.renderer import Renderer, renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory
from tests.processors import FAMILIES, build_processor, load_tokenizer_of, picture

pytest.importorskip("torch")

FIRST, SECOND, THIRD = picture(97, 61), picture(20, 30), picture(8, 8)
PAD = 500
"""The demo model's placeholder."""


class Painter(SingleTurnEnvironment):
    """Answers each reply with images, three times."""

    def __init__(self) -> None:
        self.left = [(FIRST, "and", SECOND), (SECOND,), "no image"]

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        if not self.left:
            return StepResult(done=True, reward=1.0)
        return StepResult([Message("user", self.left.pop(0))])


@pytest.fixture(scope="module")
def demo() -> Renderer:
    return renderer_for(DEMO_MODEL, images=True)


PROMPT = Prompt([Message("user", ["Look: ", THIRD, "?"])], index=3, group_index=1)


async def play(renderer: Renderer, policy: Any, **options: Any) -> list[Trajectory]:
    options = {"sampling": SamplingParams(max_new_tokens=8), "limits": Limits(max_turns=8), **options}
    return await run_branches(PROMPT, Painter, policy, renderer, **options)


def check_positions(trajectory: Trajectory) -> None:
    """The ids of each image, and no others, are placeholders."""
    marked = np.zeros(len(trajectory), np.bool_)
    for span in trajectory.images:
        assert span.stop - span.start == 9
        marked[span.start : span.stop] = True
    assert np.array_equal(marked, trajectory.tokens == PAD)


async def test_each_request_has_the_images_of_its_prompt_in_order(demo: Renderer) -> None:
    """A request has the images of the prompt and of all results so far, an image as often as it is shown."""
    policy = ScriptedPolicy([demo.encode("yes<|im_end|>").tolist()] * 4)
    (trajectory,) = await play(demo, policy)
    shown = [[span.image for span in images] for images in policy.images]
    assert shown == [
        [THIRD],
        [THIRD, FIRST, SECOND],
        [THIRD, FIRST, SECOND, SECOND],
        [THIRD, FIRST, SECOND, SECOND],
    ]
    for tokens, images in zip(policy.requests, policy.images, strict=True):
        assert all((tokens[span.start : span.stop] == PAD).all() for span in images)
    assert [span.image for span in trajectory.images] == shown[-1]
    check_positions(trajectory)


async def test_a_branch_has_the_images_of_its_own_tokens(tokenizer: Any, chat_template: Any) -> None:
    """A template that strips thoughts rewrites the history: the new branch has all images, at its own positions."""
    qwen = load_tokenizer_of(FAMILIES["qwen3_vl"], tokenizer("qwen3").name_or_path)
    processor = build_processor(FAMILIES["qwen3_vl"], qwen)
    renderer = Renderer(qwen, chat_template=chat_template("Qwen3.5-4B"), images=processor)
    reply = renderer.encode("<think>\nlong\n</think>\n\nyes<|im_end|>").tolist()
    policy = ScriptedPolicy([reply] * 4)
    branches = await play(renderer, policy, history="fork", sampling=SamplingParams(max_new_tokens=50))
    assert len(branches) > 1
    pad = qwen.convert_tokens_to_ids("<|image_pad|>")
    for branch in branches:
        inside = np.concatenate([branch.tokens[span.start : span.stop] for span in branch.images])
        assert (inside == pad).all()
        assert len(inside) == np.count_nonzero(branch.tokens == pad)
    assert [span.image for span in branches[-1].images] == [THIRD, FIRST, SECOND, SECOND]


async def test_text_without_images_is_played_as_before(demo: Renderer) -> None:
    """A renderer with a processor changes nothing for a conversation of text."""
    prompt = Prompt("Hi", index=0, group_index=0)
    plain = renderer_for(DEMO_MODEL)
    both = []
    for renderer in (demo, plain):
        policy = ScriptedPolicy([renderer.encode("yes<|im_end|>").tolist()])
        options: dict[str, Any] = {"sampling": SamplingParams(max_new_tokens=8)}
        both.append(await run_agent(prompt, SingleTurnEnvironment, policy, renderer, **options))
        assert policy.images == [()]
    assert np.array_equal(both[0].tokens, both[1].tokens)


class TextPolicy(ScriptedPolicy):
    takes_images = False


@pytest.mark.parametrize(
    "policy", [partial(TextPolicy, []), partial(VLLMPolicy, Endpoint(provider="vllm"))], ids=["text", "vllm"]
)
async def test_a_policy_without_images_is_refused_by_name(policy: Any, demo: Renderer) -> None:
    """Before the environment starts and before a request is sent."""
    with pytest.raises(
        ConfigError, match=r"images: got <(ScriptedPolicy|VLLMPolicy) .*expected none: requests of this"
    ):
        await play(demo, policy())


async def test_a_processor_that_writes_more_than_placeholders_is_refused_by_name(tokenizer: Any) -> None:
    """SGLang encodes the text of Gemma's prompts again, so that its ids would differ from the record."""
    gemma = load_tokenizer_of(FAMILIES["gemma3"], tokenizer("qwen3").name_or_path)
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    template += (
        "{{ p.text if p.type == 'text' else '<start_of_image>' }}{% endfor %}{% endif %}{% endfor %}<|im_start|>"
    )
    renderer = Renderer(gemma, chat_template=template, images=build_processor(FAMILIES["gemma3"], gemma))
    with pytest.raises(ConfigError, match=r"the processor's expansion of an image: got .*expected a run of <start_of"):
        await play(renderer, ScriptedPolicy([]))


async def test_a_text_with_the_token_of_an_image_fails_the_rollout(demo: Renderer) -> None:
    """The server would take it for an image."""

    class Liar(Painter):
        async def step(self, reply: Message) -> StepResult:
            return StepResult([Message("user", [FIRST, "<|endoftext|>"])])

    policy = ScriptedPolicy([demo.encode("yes<|im_end|>").tolist()] * 2)
    trajectory = await run_agent(PROMPT, Liar, policy, demo, sampling=SamplingParams(max_new_tokens=8))
    assert trajectory.failure is not None
    assert "placeholders <|endoftext|>: got 2; expected 1" in trajectory.failure.message


async def test_the_demo_server_counts_and_answers(demo: Renderer, engine_url: str) -> None:
    """A whole episode over HTTP: the server expands the placeholders to the ids of the trajectory."""
    endpoint = Endpoint(model=str(DEMO_MODEL), base_url=engine_url)
    async with SGLangPolicy(endpoint, vocab_size=demo.vocab_size) as policy:
        short = SamplingParams(max_new_tokens=1)
        limits = Limits(max_turns=20, on_cut="continue")
        (trajectory,) = await play(demo, policy, sampling=short, limits=limits)
        assert policy.totals.encoded_images == 3
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert len(trajectory.images) == 4
    check_positions(trajectory)
