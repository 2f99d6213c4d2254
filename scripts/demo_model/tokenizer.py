"""The tokenizer of the demo model: words, numbers of two digits, and the markers of the chat template."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollouts.dtypes import Message
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from scripts.demo_model.demonstrations import (
    CONTEXT,
    CONTROL,
    MARKERS,
    OPERATORS,
    SPLIT,
    TEMPLATE,
    answer_text,
    clean_turns,
    flawed_turns,
    transcript,
)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on demonstrations; every text survives encoding and decoding."""
    prompts = calculator_prompts(seed)
    rng = random.Random(seed)
    texts = []
    for number in range(4000):
        prompt = next(prompts)
        text = transcript(prompt, flawed_turns(prompt, rng) if number % 2 else clean_turns(prompt))
        texts.append(re.sub(r"<[^<>\s]+>", "\n", text))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Exit if a demonstration differs from the rendering of the chat template."""
    tools: list[dict[Any, Any] | Callable[..., Any]] = [tool.to_chat() for tool in CalculatorEnvironment().tools]
    prompt = next(calculator_prompts(0, two_step_share=1.0))
    chat: list[dict[str, Any]] = [{"role": "system", "content": CalculatorEnvironment.system_prompt}]
    chat.append({"role": "user", "content": prompt.prompt})
    for operator, a, b in prompt.metadata["steps"]:
        name, apply = OPERATORS[operator]
        chat.append({"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {"a": a, "b": b}}}]})
        chat.append(Message("tool", str(apply(a, b))).to_chat())
    chat.append({"role": "assistant", "content": answer_text(prompt.label)})
    rendered = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    if rendered != transcript(prompt, clean_turns(prompt)) + "\n":
        raise SystemExit(f"the chat template and the demonstrations differ:\n{rendered}")
