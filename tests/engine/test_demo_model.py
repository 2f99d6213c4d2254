"""The tokenizer and the template of the demo model, and what its weights do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from rollouts.dtypes import Message  # noqa: E402 - only where transformers is
from rollouts.engine import DEMO_MODEL  # noqa: E402
from rollouts.environments.calculator import CalculatorEnvironment  # noqa: E402

TOKENIZER = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
TOOLS = [tool.to_chat() for tool in CalculatorEnvironment().tools]
SYSTEM = """\
<|im_start|>system
Use the tools. Finish with: The answer is N.
Tools: add(a, b), subtract(a, b), multiply(a, b), divide(a, b)<|im_end|>
"""


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **options))


def call(name: str, **arguments: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@given(st.text())
def test_any_text_comes_back_as_it_was(text: str) -> None:
    """Byte-level BPE has no unknown token, and decoding cleans nothing up."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_numbers_below_100_are_one_token() -> None:
    """Pairs of digits, so that a model this small learns to copy them."""
    assert all(len(TOKENIZER.encode(str(number))) == 1 for number in range(100))
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("970299")) == ["97", "02", "99"]


def test_markers_of_tool_calls_survive_decoding_and_control_tokens_do_not() -> None:
    """As in Qwen3: the text of a reply holds its calls, not its end."""
    ids = TOKENIZER.encode("<tool_call>\n{}\n</tool_call><|im_end|>")
    assert [ids[0], ids[-2]] == TOKENIZER.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    assert ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"


def test_the_system_block_lists_the_tools() -> None:
    """The tools that are passed in, by name and arguments; the block stands even without a system message."""
    user = {"role": "user", "content": "5 plus 7?"}
    start = [{"role": "system", "content": CalculatorEnvironment.system_prompt}, user]
    question = "<|im_start|>user\n5 plus 7?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(start, tools=TOOLS, add_generation_prompt=True) == SYSTEM + question
    assert rendered([user], tools=TOOLS[:1]).startswith("<|im_start|>system\nTools: add(a, b)<|im_end|>\n")
    assert rendered([user], add_generation_prompt=True) == question


def test_calls_are_canonical_and_their_results_share_a_user_turn() -> None:
    """Hermes calls, one block each; consecutive tool messages are merged."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=2), call("divide", b=4, a=3)]},
        Message("tool", "3").to_chat(),
        Message("tool", "0.75").to_chat(),
        {"role": "assistant", "content": "The answer is 3."},
    ]
    assert rendered(messages) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "divide", "arguments": {"b": 4, "a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n0.75\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThe answer is 3.<|im_end|>\n"
    )


def test_a_longer_conversation_extends_the_shorter_one() -> None:
    """No turn is rendered differently once others follow it."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [call("add", a=1, b=2)]},
        Message("tool", "3").to_chat(),
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "again"},
    ]
    texts = [rendered(messages[:count], tools=TOOLS) for count in range(1, len(messages) + 1)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)


def test_the_folder_is_small() -> None:
    """It ships inside the package."""
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 1_000_000


async def test_most_replies_to_a_problem_are_a_call_or_an_answer(client: Any) -> None:
    """Even at temperature 1 the demo model keeps to the two forms that it learned."""
    text = f"{SYSTEM}<|im_start|>user\nAdd 12 and 7.<|im_end|>\n<|im_start|>assistant\n"
    samplings = [{"max_new_tokens": 48, "sampling_seed": seed} for seed in range(64)]
    answers = await client.generate(text=[text] * 64, sampling_params=samplings)
    texts = [answer["text"] for answer in answers]
    calls = sum(text.startswith('<tool_call>\n{"name": "') and text.endswith("}}\n</tool_call>") for text in texts)
    plain = sum(text.startswith("The answer is ") for text in texts)
    assert calls + plain >= 58
    assert 0 < plain < calls
