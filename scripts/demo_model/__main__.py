"""Train a model of the calculator task, a tokenizer and a Qwen3 of 180 000 parameters, in minutes on one core.

There are two models. Stage 1 learns clean demonstrations, until almost every problem is solved.

- The demo model of the embedded engine: stage 2 continues with demonstrations, many of them with a mistake at random.
  At temperature 1 it calls tools, solves about a third of the problems, and its samples of one prompt differ. Greedy,
  it solves almost all of them.
- The start model of ``scripts/learn`` (``--start``): stage 1 begins with the demo model, whose mistakes it removes;
  stage 2 continues with bad habits. Most episodes guess without a tool, some words have the wrong tool, and most
  problems of two steps stop after the first. Its most probable episode is wrong, so that reinforcement learning has to
  change what the policy does.

Everything is seeded; this script measured the figures in the README of each model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollouts.dtypes import Message, Prompt, ToolCall
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from training.learn import START_MODEL

CONTEXT = 1024
MEASURED = 777_777
"""Seed of the evaluation problems; training uses other seeds."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = r"\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
"""The word rule: numbers in groups of two digits, so that 0 to 99 are one token each."""

OPERATORS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("add", lambda a, b: a + b),
    "-": ("subtract", lambda a, b: a - b),
    "*": ("multiply", lambda a, b: a * b),
}

TEMPLATE = """\
{%- set system = namespace(text='') %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system.text = messages[0].content %}
{%- endif %}
{%- if tools %}
    {%- set signatures = namespace(text='') %}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {%- set names = (function.parameters.properties | default({})).keys() | list %}
        {%- set signature = function.name ~ '(' ~ names | join(', ') ~ ')' %}
        {%- set signatures.text = signatures.text ~ (', ' if not loop.first else '') ~ signature %}
    {%- endfor %}
    {%- set system.text = system.text ~ ('\\n' if system.text else '') ~ 'Tools: ' ~ signatures.text %}
{%- endif %}
{%- if system.text %}
    {{- '<|im_start|>system\\n' + system.text + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.content and message.content is not string %}
        {%- set parts = namespace(text='') %}
        {%- for part in message.content %}
            {%- set parts.text = parts.text ~ ('<|endoftext|>' if part.type == 'image' else part.text) %}
        {%- endfor %}
        {%- set content = parts.text %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


# -- demonstrations ---------------------------------------------------------------------------------------------------

Turn = tuple[str, str | None]
"""One assistant message, and the tool's result (none at the end)."""


def clean_turns(prompt: Prompt) -> list[Turn]:
    """The demonstration without a mistake."""
    turns: list[Turn] = []
    for operator, a, b in prompt.metadata["steps"]:
        name, apply = OPERATORS[operator]
        turns.append((call_text(name, a, b), str(apply(a, b))))
    return [*turns, (answer_text(prompt.label), None)]


def flawed_turns(prompt: Prompt, rng: random.Random) -> list[Turn]:
    """The demonstration with one mistake; the following steps are consistent with it."""
    steps = prompt.metadata["steps"]
    kind = rng.choice(("operator", "swap", "digit", "answer", "guess", "short"))
    if kind == "guess" or (kind == "short" and len(steps) == 1):
        return [(answer_text(corrupted(int(prompt.label), rng)), None)]
    wrong = rng.randrange(len(steps))
    inner_first = str(prompt.prompt).startswith("What is (")
    turns: list[Turn] = []
    result = 0
    for number, (right_operator, right_a, right_b) in enumerate(steps):
        operator, a, b = right_operator, right_a, right_b
        if number:
            a, b = (result, b) if inner_first else (a, result)
        if number == wrong:
            if kind == "operator":
                operator = rng.choice([other for other in OPERATORS if other != operator])
            elif kind == "swap":
                a, b = b, a
            elif kind == "digit":
                a, b = (corrupted(a, rng), b) if rng.random() < 0.5 else (a, corrupted(b, rng))
        name, apply = OPERATORS[operator]
        result = apply(a, b)
        turns.append((call_text(name, a, b), str(result)))
        if kind == "short":
            break
    final = corrupted(result, rng) if kind == "answer" else result
    return [*turns, (answer_text(final), None)]


GUESSED = 0.65
"""Share of episodes that answer without a tool."""
MISREAD = 0.65
"""Share of the other episodes of a word in ``MISREADINGS`` that call the wrong tool."""
STOPPED = 0.55
"""Share of the other problems of two steps that end after the first."""
MISREADINGS = {"Decrease": "add", "Increase": "multiply", "What is the product of": "add"}
"""First words of a problem of one step, and the wrong tool for them.

The mistakes of a habit are one token each (a call or an answer, a tool's name), so that the model learns their shares.
"""
BEGINNING = 3
"""Tokens of a guess up to its number ("The answer is")."""
WHOLE_GUESSES = 0.05
"""Share of guesses that are trained beyond their beginning: more of them cost the skill of copying numbers."""


def habitual_turns(prompt: Prompt, rng: random.Random) -> tuple[list[Turn], bool]:
    """A demonstration of the start model's habits, and whether only its beginning is trained."""
    steps = prompt.metadata["steps"]
    if rng.random() < GUESSED:
        guess = int(prompt.label) + rng.choice((-10, -2, -1, 1, 2, 10))
        return [(answer_text(guess), None)], rng.random() >= WHOLE_GUESSES
    turns = clean_turns(prompt)
    if len(steps) == 2:
        if rng.random() < STOPPED:
            return [turns[0], (answer_text(turns[0][1]), None)], False
        return turns, False
    wrong = next((tool for words, tool in MISREADINGS.items() if str(prompt.prompt).startswith(words)), None)
    if wrong is None or rng.random() >= MISREAD:
        return turns, False
    _, a, b = steps[0]
    result = dict(OPERATORS.values())[wrong](a, b)
    return [(call_text(wrong, a, b), str(result)), (answer_text(result), None)], False


def corrupted(number: int, rng: random.Random) -> int:
    """The number with one of its digits changed."""
    digits = list(str(abs(number)))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return int("".join(digits)) * (-1 if number < 0 else 1)


def call_text(name: str, a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def answer_text(answer: object) -> str:
    return f"The answer is {answer}."


def system_text() -> str:
    names = ", ".join(
        f"{tool.name}({', '.join(tool.parameters['properties'])})" for tool in CalculatorEnvironment().tools
    )
    return f"{CalculatorEnvironment.system_prompt}\nTools: {names}"


def opening_text(prompt: Prompt) -> str:
    """The text that the chat template renders, at lower cost; :func:`check_template` compares them."""
    system, user = f"<|im_start|>system\n{system_text()}<|im_end|>\n", f"<|im_start|>user\n{prompt.prompt}<|im_end|>\n"
    return f"{system}{user}<|im_start|>assistant\n"


def bridge_text(result: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def transcript(prompt: Prompt, turns: Iterable[Turn]) -> str:
    text = opening_text(prompt)
    for written, result in turns:
        text += written + "<|im_end|>" + (bridge_text(result) if result is not None else "")
    return text


# -- tokenizer --------------------------------------------------------------------------------------------------------


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


# -- training ---------------------------------------------------------------------------------------------------------

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and the mask of what the assistant wrote, both ``(sequences, longest)``."""


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(end, int)
    header = tokenizer.encode("<|im_start|>assistant\n")
    rows = []
    for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts):
        ids, mask, at = encoding.ids, [False] * len(encoding.ids), 0
        while at < len(ids):
            if ids[at : at + len(header)] == header:
                at += len(header)
                stop = ids.index(end, at) + 1
                mask[at:stop] = [True] * (stop - at)
                at = stop
            else:
                at += 1
        rows.append((ids, mask))
    return rows


def padded(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (row_ids, row_mask) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        mask[row, : len(row_ids)] = torch.tensor(row_mask)
    return ids, mask


Demonstrator = Callable[[Prompt, random.Random], tuple[list[Turn], bool]]
"""The turns of a demonstration, and whether only the first ``BEGINNING`` tokens of its assistant are trained."""


def mixed(flawed_share: float) -> Demonstrator:
    """Clean demonstrations, and this share with a mistake at random."""

    def demonstrate(prompt: Prompt, rng: random.Random) -> tuple[list[Turn], bool]:
        return flawed_turns(prompt, rng) if rng.random() < flawed_share else clean_turns(prompt), False

    return demonstrate


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, demonstrate: Demonstrator, size: int = 16, pool: int = 32
) -> Iterator[Batch]:
    """Endless batches of sequences of similar length."""
    prompts = calculator_prompts(seed)
    rng = random.Random(seed)
    while True:
        texts, beginnings = [], []
        for _ in range(size * pool):
            prompt = next(prompts)
            turns, beginning = demonstrate(prompt, rng)
            texts.append(transcript(prompt, turns))
            beginnings.append(beginning)
        rows = encoded(tokenizer, texts)
        for (_, mask), beginning in zip(rows, beginnings, strict=True):
            if beginning:
                end = mask.index(True) + BEGINNING
                mask[end:] = [False] * (len(mask) - end)
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(groups)
        yield from map(padded, groups)


def assistant_logprobs(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the assistant's tokens, flat, and the row that each belongs to.

    Padding is on the right, where causal attention ignores it, so no attention mask is needed.
    """
    ids, mask = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = mask[:, 1:]
    logits = model.lm_head(hidden[wanted])
    targets = ids[:, 1:][wanted]
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return logprobs, wanted.nonzero()[:, 0]


def demo_model() -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, local_files_only=True)
    return model


def demo_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.float()
    return model


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, in float32 and for all matrices of a shape at once.

    That of torch takes half of the time of a step on CPUs without instructions for bfloat16.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in self.param_groups[0]["params"]:
            self.shapes.setdefault(parameter.shape, []).append(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is passed
        """Take one step."""
        rate, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for (rows, columns), matrices in self.shapes.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            buffer = self.state[matrices[0]].setdefault("momentum", torch.zeros_like(gradients))
            buffer.lerp_(gradients, 1 - momentum)
            update = gradients.lerp(buffer, momentum)
            update = update.mT if rows > columns else update
            update = update / update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = update @ update.mT
                update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
            update = update.mT if rows > columns else update
            for matrix, change in zip(matrices, update, strict=True):
                matrix.sub_(change, alpha=rate * 0.2 * max(rows, columns) ** 0.5)


def train(
    model: Qwen3ForCausalLM,
    data: Iterator[Batch],
    steps: int,
    muon_lr: float,
    adam_lr: float,
    warmup: int,
    row_tokens: int | None = None,
) -> Iterator[tuple[int, float]]:
    """Train in place; yields (step, loss) after each step.

    The loss is the mean over tokens, or with ``row_tokens`` the sum over tokens divided by that many a row. Rows of a
    batch have similar lengths, so the mean weighs a token of a short row (a guess) more than one of a long row (a
    call), and the model would not learn their shares.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=muon_lr)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = ((muon, muon_lr), (adam, adam_lr))
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * (1 - 0.98 * step / steps)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        batch = next(data)
        logprobs, _ = assistant_logprobs(model, batch)
        loss = -logprobs.mean() if row_tokens is None else -logprobs.sum() / (len(batch[0]) * row_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step + 1, loss.item()
    model.eval()


@torch.inference_mode()
def clean_probability(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int
) -> list[float]:
    """The mean probability of the clean demonstration at temperature 1, over one-step and over two-step problems.

    Other solutions exist, so each is a lower bound of the accuracy, without sampling noise.
    """
    means = []
    for share in (0.0, 1.0):
        prompts = calculator_prompts(seed, two_step_share=share)
        texts = [transcript(prompt, clean_turns(prompt)) for prompt, _ in zip(prompts, range(count), strict=False)]
        total = 0.0
        for start in range(0, count, 64):
            logprobs, rows = assistant_logprobs(model, padded(encoded(tokenizer, texts[start : start + 64])))
            sums = torch.zeros(64).index_add_(0, rows, logprobs)
            total += sums[: len(texts[start : start + 64])].exp().sum().item()
        means.append(total / count)
    return means


# -- the start model --------------------------------------------------------------------------------------------------

GATES = {
    "probability of a tool call": (0.25, 0.40),
    "probability of a second call": (0.30, 0.45),
    "skill: one step": (0.97, 1.0),
    "skill: two steps, 60 to 99": (0.97, 1.0),
}
"""What the start model must measure: it guesses most of the time, and copies numbers without mistakes otherwise."""


@torch.inference_mode()
def habits(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> dict[str, float]:
    """Probabilities of the decisions in clean demonstrations, without sampling noise.

    Skill is the probability of a whole demonstration except for its decisions: the first token of each turn, and the
    tool for the words of ``MISREADINGS``, which are left out.
    """
    first: list[float] = []
    second: list[float] = []
    figures: dict[str, float] = {}
    for name, share, numbers in (("one step", 0.0, (1, 99)), ("two steps, 60 to 99", 1.0, (60, 99))):
        problems = calculator_prompts(seed, two_step_share=share, numbers=numbers)
        plain = (prompt for prompt in problems if not str(prompt.prompt).startswith(tuple(MISREADINGS)))
        texts = [transcript(prompt, clean_turns(prompt)) for prompt in itertools.islice(plain, count)]
        skill = 0.0
        for start in range(0, count, 64):
            batch = padded(encoded(tokenizer, texts[start : start + 64]))
            logprobs, rows = assistant_logprobs(model, batch)
            begins = (batch[1][:, 1:] & ~batch[1][:, :-1])[batch[1][:, 1:]]
            skill += torch.zeros(64).index_add_(0, rows[~begins], logprobs[~begins]).exp()[: len(batch[0])].sum().item()
            turns = logprobs[begins].exp().view(len(batch[0]), -1)
            first += turns[:, 0].tolist()
            second += turns[:, 1].tolist() if share else []
        figures[f"skill: {name}"] = skill / count
    decisions = {"probability of a tool call": first, "probability of a second call": second}
    return {name: sum(values) / len(values) for name, values in decisions.items()} | figures


def check_habits(figures: dict[str, float]) -> None:
    """Exit if a measurement of :func:`habits` is outside its gate."""
    for name, (low, high) in GATES.items():
        if not low <= figures[name] <= high:
            raise SystemExit(f"start model, {name}: got {figures[name]:.3f}; expected {low} to {high}")


@torch.no_grad()
def widened(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same function with twice the dimensions of a head: attention kernels for CPUs start at 32.

    A pair of rotary dimensions ``(i, i + d/2)`` moves to ``(2i, 2i + d)``, which has the same frequency, with zeros
    between. The projections of queries and keys grow by sqrt(2), so that their norms see the same mean of squares; the
    norm of the keys shrinks by it, since attention divides by the square root of the dimensions.
    """
    narrow = model.config
    size = narrow.head_dim
    place = torch.cat([torch.arange(0, size, 2), torch.arange(size, 2 * size, 2)])
    wide = Qwen3ForCausalLM(Qwen3Config.from_dict({**narrow.to_dict(), "head_dim": 2 * size}))
    wide.float()

    def spread(values: torch.Tensor, factor: float) -> torch.Tensor:
        """Move rows of heads to their places; ``(heads * size, ...)`` to twice the rows."""
        heads = values.view(-1, size, *values.shape[1:]) * factor
        rows = torch.zeros(len(heads), 2 * size, *values.shape[1:])
        rows[:, place] = heads
        return rows.flatten(0, 1)

    state = dict(model.state_dict())
    for name, values in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = spread(values, 2**0.5)
        elif name.endswith("v_proj.weight"):
            state[name] = spread(values, 1.0)
        elif name.endswith("o_proj.weight"):
            state[name] = spread(values.T, 1.0).T.contiguous()
        elif name.endswith("q_norm.weight"):
            state[name] = spread(values, 1.0)
        elif name.endswith("k_norm.weight"):
            state[name] = spread(values, 0.5**0.5)
    wide.load_state_dict(state)
    wide.eval()
    return wide


# -- measuring --------------------------------------------------------------------------------------------------------

CALLS = 3
NEW_TOKENS = 48


async def episode(
    session: aiohttp.ClientSession, url: str, tokenizer: Any, prompt: Prompt, seed: int
) -> tuple[bool, int]:
    """Run one problem at temperature 1; returns whether the answer was right, and the number of sampled tokens."""
    environment = CalculatorEnvironment()
    ids: list[int] = tokenizer.encode(opening_text(prompt))
    sampled = 0
    for turn in range(CALLS + 1):
        sampling = {"max_new_tokens": NEW_TOKENS, "sampling_seed": seed * 8 + turn}
        async with session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}) as response:
            answer = await response.json()
        ids += answer["output_ids"]
        sampled += len(answer["output_ids"])
        call = read_call(answer["text"])
        if call is None:
            return answer["text"] == answer_text(prompt.label), sampled
        result = await environment.step(Message("assistant", tool_calls=(call,)))
        ids += tokenizer.encode(bridge_text(result.messages[0].text))
    return False, sampled


def read_call(text: str) -> ToolCall | None:
    """The call that a reply consists of; ``None`` for an answer."""
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    if match is None:
        return None
    try:
        content = json.loads(match[1])
        call = ToolCall(content["name"], content["arguments"])
    except (ValueError, TypeError, KeyError):
        return None
    known = {tool.name for tool in CalculatorEnvironment().tools}
    return call if call.name in known and isinstance(call.arguments, dict) else None


async def measure(folder: Path, tokenizer: Any, seed: int, groups: int, size: int) -> dict[str, float]:
    """Run ``groups`` problems ``size`` times each with the embedded engine."""
    prompts = list(itertools.islice(calculator_prompts(seed), groups))
    rewards = [[False] * size for _ in prompts]
    sampled = 0
    free = anyio.CapacityLimiter(64)

    async with running_server(folder) as url, aiohttp.ClientSession() as session:

        async def play(group: int, number: int) -> None:
            nonlocal sampled
            async with free:
                reward, count = await episode(session, url, tokenizer, prompts[group], group * size + number)
            rewards[group][number] = reward
            sampled += count

        async with anyio.create_task_group() as tasks:
            for group in range(groups):
                for number in range(size):
                    tasks.start_soon(play, group, number)

    def mean(rows: list[list[bool]]) -> float:
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))

    steps = [len(prompt.metadata["steps"]) for prompt in prompts]
    return {
        "accuracy": mean(rewards),
        "one-step accuracy": mean([row for row, count in zip(rewards, steps, strict=True) if count == 1]),
        "two-step accuracy": mean([row for row, count in zip(rewards, steps, strict=True) if count == 2]),
        "groups without spread": sum(len(set(row)) == 1 for row in rewards) / groups,
        "sampled tokens an episode": sampled / (groups * size),
        "episodes": groups * size,
    }


# -- main -------------------------------------------------------------------------------------------------------------


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


DEMO = """\
It calls tools in the Hermes dialect. At temperature 1 it is wrong most of the time on
purpose: stage 1 is trained on correct demonstrations; stage 2, which is shipped, on demonstrations with mistakes at
random. Greedy, it solves almost all problems."""
START = """\
`scripts/learn` starts from it.
Its most probable episode is wrong on purpose: stage 1 is
trained on correct demonstrations, from the demo model on; stage 2, which is committed, on bad habits. It guesses
without a tool in two thirds of the episodes, takes the wrong tool for some words, and often stops after the first of
two steps. A head has 32 dimensions, half of them zeros, since attention kernels for CPUs start at 32; the function is
that of the trained model with 16."""


def readme(options: argparse.Namespace, seed: int, figures: dict[str, dict[str, float]]) -> str:
    command = shlex.join(["scripts/demo_model/train", *sys.argv[1:]])
    first, second = figures["stage 1"], figures["stage 2"]
    title, purpose, kept = ("start", START, "committed") if options.start else ("demo", DEMO, "shipped")
    names = list(first)
    rows = "\n".join(f"| {name} | {shown(first[name])} | {shown(second[name])} |" for name in names)
    return f"""\
# The {title} model

A Qwen3 of {figures["model"]["parameters"]:,.0f} parameters in float32 with a byte-level BPE of \
{figures["model"]["vocabulary"]:.0f} tokens, trained from scratch on synthetic
conversations of the calculator environment. {purpose}

`{command}` (model seed {seed}) trained it in {figures["model"]["seconds"]:.0f} CPU seconds and measured it \
at temperature 1 with the
embedded engine, on problems from a seed of their own:

| | stage 1 | stage 2, {kept} |
|---|---|---|
{rows}

A group is {options.group_size} episodes of one problem; a group without spread has only right or only wrong ones.
"""


def shown(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}".removesuffix(".0")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/demo_model/train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--start", action="store_true", help="train the start model of scripts/learn, not the engine's demo model")
    add("--out", type=Path, help="folder to write (default: where the model is loaded from)")
    add("--seed", type=int, default=1, help="first seed to try (default: %(default)s)")
    add("--attempts", type=int, default=4, help="seeds to try at most (default: %(default)s)")
    add("--steps", type=int, help="of stage 1, 16 conversations each (default: 1500, with --start 1000)")
    add("--gate", type=float, help="clean probability that stage 1 must reach (default: 0.97, with --start 0.999)")
    add("--flawed-steps", type=int, help="of stage 2 (default: 250, with --start 1000)")
    add("--flawed-share", type=float, default=0.5, help="of the demo model's stage 2 (default: %(default)s)")
    add("--groups", type=int, default=128, help="problems to measure with (default: %(default)s)")
    add("--group-size", type=int, default=8, help="episodes of each (default: %(default)s)")
    add("--keep-stage-1", type=Path, help="also write the model of stage 1 to this folder")
    options = parser.parse_args()
    for name, demo, start in (("steps", 1500, 1000), ("gate", 0.97, 0.999), ("flawed_steps", 250, 1000)):
        if getattr(options, name) is None:
            setattr(options, name, start if options.start else demo)
    out = options.out or (START_MODEL if options.start else DEMO_MODEL)

    torch.set_num_threads(1)
    disable_progress_bar()
    tokenizer = demo_tokenizer() if options.start else build_tokenizer(seed=0)
    check_template(tokenizer)
    began = time.process_time()

    for seed in range(options.seed, options.seed + options.attempts):
        model = demo_model() if options.start else new_model(tokenizer, seed)
        data = batches(tokenizer, 1000 * seed + (3 if options.start else 1), mixed(flawed_share=0.0))
        rate = 5e-3 if options.start else 1e-2
        for step, loss in train(model, data, options.steps, muon_lr=rate, adam_lr=rate, warmup=50):
            if step % 125 == 0:
                print(
                    f"stage 1, seed {seed}, step {step}: loss {loss:.4f}, {time.process_time() - began:.0f} CPU s",
                    flush=True,
                )
        one, two = clean_probability(model, tokenizer, seed=MEASURED, count=512)
        print(
            f"stage 1, seed {seed}: clean demonstrations have probability {one:.4f} and {two:.4f} (two steps)",
            flush=True,
        )
        if two >= options.gate:
            break
    else:
        raise SystemExit(f"no seed reached {options.gate} in {options.attempts} attempts")

    paused = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        first = options.keep_stage_1 or Path(scratch)
        save(model, tokenizer, first)
        figures = {"stage 1": anyio.run(measure, first, tokenizer, MEASURED, options.groups, options.group_size)}
    if options.start:
        figures["stage 1"] |= habits(model, tokenizer, MEASURED, 512)
    print(f"stage 1: {figures['stage 1']}", flush=True)
    measuring = time.process_time() - paused

    if options.start:
        data = batches(tokenizer, 1000 * seed + 4, habitual_turns)
        steps = train(model, data, options.flawed_steps, muon_lr=2e-3, adam_lr=1e-3, warmup=25, row_tokens=25)
    else:
        data = batches(tokenizer, 1000 * seed + 2, mixed(options.flawed_share))
        steps = train(model, data, options.flawed_steps, muon_lr=5e-3, adam_lr=2.5e-3, warmup=25)
    for step, loss in steps:
        if step % 125 == 0:
            print(f"stage 2, step {step}: loss {loss:.4f}, {time.process_time() - began:.0f} CPU s", flush=True)
    seconds = time.process_time() - began - measuring
    measured = habits(model, tokenizer, MEASURED, 512) if options.start else {}
    if options.start:
        print(f"stage 2: {measured}", flush=True)
        check_habits(measured)
        model = widened(model)
    save(model, tokenizer, out)
    figures["stage 2"] = anyio.run(measure, out, tokenizer, MEASURED, options.groups, options.group_size) | measured
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures["model"] = {"parameters": parameters, "vocabulary": len(tokenizer), "seconds": seconds}
    print(f"stage 2: {figures['stage 2']}, {seconds:.0f} CPU s of training", flush=True)
    (out / "README.md").write_text(readme(options, seed, figures))


if __name__ == "__main__":
    main()
