"""A prompt that ends in an assistant message: the reply continues that turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from rollouts.agent import run_branches
from rollouts.dtypes import Endpoint, Message, Prompt, SamplingParams, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment, SimulatedUser
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import agent_rollout_to_samples, continue_rollout
from tests.families import FAMILIES

USER = Message("user", "What is 1 + 2?")
SYSTEM = Message("system", "Be brief.")
SAMPLING = SamplingParams(max_new_tokens=99)
LOADED = load_tokenizer(DEMO_MODEL)
DEMO = Renderer(LOADED)
NAMES = ["Qwen2.5", "Qwen3", "Qwen3.5", "QwQ", "GLM-4.6", "gpt-oss", "DeepSeek-V3.1", "Granite 4", "Mistral Nemo"]
TEXTS = ["Let me think", "Sure. ", "  two\n\nlines\n", "<think>\nHm, 1 + 2"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_that_of_continue_final_message(
    name: str, text: str, request: pytest.FixtureRequest, tokenizer: Any
) -> None:
    """Text for text and id for id what transformers writes; the reply begins with the message, or before it."""
    renderer = FAMILIES[name].make(request)
    messages = [SYSTEM, USER, Message("assistant", text)]
    options = {"chat_template": renderer._model.template.source, "continue_final_message": True, "tokenize": False}
    chat = [message.to_chat() for message in messages]
    try:
        expected = LOADED.apply_chat_template(chat, **{**renderer._model.template._variables, **options})
    except ValueError:
        with pytest.raises(ConfigError, match="messages"):
            renderer.opening(messages)
        return
    opening = renderer.opening(messages)
    assert renderer.decode(opening) == expected
    assert opening.tolist() == renderer.encode(expected).tolist()
    turn = renderer.decode(opening[renderer.reply_start(messages) :])
    assert turn.rstrip().endswith(text.strip())
    assert "assistant" not in turn


def test_without_a_last_assistant_message_nothing_changes() -> None:
    """The reply begins where the opening ends."""
    assert DEMO.reply_start([SYSTEM, USER]) == len(DEMO.opening([SYSTEM, USER]))


SHORTENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:5] if m.role == 'assistant' else m.content }}"
    "<|im_end|>{% endfor %}"
)


def test_a_turn_that_cannot_go_on_is_refused() -> None:
    """Calls are complete, and a template may not write the content as it is; the error names message and template."""
    call = ToolCall("add", {"a": 1}, id="call00000")
    with pytest.raises(ConfigError, match=r"messages\[-1\].tool_calls: got .*a turn with calls is complete"):
        DEMO.opening([USER, Message("assistant", tool_calls=[call])])
    shortens = Renderer(LOADED, chat_template=SHORTENS)
    with pytest.raises(ConfigError, match=r"messages\[-1\].content .*got 'Let me think'.*chat template"):
        shortens.opening([USER, Message("assistant", "Let me think")])


async def play(
    text: str, replies: Sequence[str], environment: Any, history: Literal["append", "fork", "error"] = "append"
) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy([DEMO.encode(reply) for reply in replies])
    prompt = Prompt([USER, Message("assistant", text)])
    branches = await run_branches(prompt, environment, policy, DEMO, sampling=SAMPLING, history=history)
    return branches, policy


@pytest.mark.parametrize("history", ["append", "fork", "error"])
async def test_a_reply_goes_on_in_the_turn_of_the_prompt(history: Literal["append", "fork", "error"]) -> None:
    """The start of the turn is masked context, the message has both parts, and the next turn follows the whole."""

    async def user(conversation: Sequence[Message]) -> str | None:
        return "And 2 + 2?" if len(conversation) < 3 else None

    environment = partial(SimulatedUser, user)
    (only,), policy = await play("It is", [" 3.<|im_end|>", "4.<|im_end|>"], environment, history)
    assert [message.content for message in only.messages if message.role == "assistant"] == ["It is 3.", "4."]
    opening = DEMO.opening([USER, Message("assistant", "It is")])
    assert policy.requests[0].tolist() == opening.tolist()
    assert DEMO.decode(opening).endswith("assistant\nIt is")
    assert not only.mask[: len(opening)].any()
    assert DEMO.decode(only.tokens[only.mask]) == " 3.<|im_end|>4.<|im_end|>"
    assert DEMO.decode(policy.requests[1]) == DEMO.render(only.messages[:3])


async def test_a_call_that_the_prompt_began_is_read() -> None:
    """The prompt's part and the sampled part are parsed as one turn, and the call runs."""
    begun = '<tool_call>\n{"name": "add", "arguments": '
    branches, _ = await play(begun, ['{"a": 1, "b": 2}}\n</tool_call><|im_end|>', "3<|im_end|>"], CalculatorEnvironment)
    calling, result = branches[-1].messages[-3:-1]
    assert [(call.name, dict(call.arguments), call.error) for call in calling.tool_calls] == [
        ("add", {"a": 1, "b": 2}, None)
    ]
    assert result.content == "3"


@pytest.mark.parametrize("history", ["append", "fork"])
async def test_a_cut_reply_in_the_turn_of_the_prompt_is_continued(history: Literal["append", "fork"]) -> None:
    """The continued reply is parsed with the prompt's part, and only sampled tokens are trained."""
    prompt = Prompt([USER, Message("assistant", "It is")], index=0, group_index=0)
    options: dict[str, Any] = {"endpoint": Endpoint(), "tokenizer": DEMO, "history": history}
    cut = DEMO.encode(" 3, and").tolist()
    first = ScriptedPolicy([Reply(cut, "length")])
    (sample,) = await agent_rollout_to_samples(
        prompt,
        environment_cls=SingleTurnEnvironment,
        policy=first,
        sampling=SamplingParams(max_new_tokens=len(cut)),
        **options,
    )
    second = ScriptedPolicy([DEMO.encode(" no more.<|im_end|>")])
    (whole,) = await continue_rollout(sample, policy=second, sampling=SAMPLING, **options)
    assert second.requests[0].tolist() == list(sample.tokens)
    assert whole.messages[-1]["content"] == "It is 3, and no more."
    assert [message["role"] for message in whole.messages] == ["user", "assistant"]
    trained = whole.token_column[np.array(whole.loss_mask, bool)]
    assert DEMO.decode(trained) == " 3, and no more.<|im_end|>"
