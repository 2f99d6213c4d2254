"""Train the demo model of the embedded engine, a tokenizer and a Qwen3 of 180 000 parameters, in minutes on one core.

Stage 1 learns clean demonstrations of the calculator task, until almost every problem is solved. Stage 2 continues with
demonstrations, most of them with a mistake, so that the shipped model solves about a third of the problems and its
samples of one prompt differ: reinforcement learning can improve it. Everything is seeded; this script measured the
figures in the README of the model.
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
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollouts.dtypes import Message, Prompt, ToolCall
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts

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


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, flawed_share: float, size: int = 16, pool: int = 32
) -> Iterator[Batch]:
    """Endless batches of sequences of similar length."""
    prompts = calculator_prompts(seed)
    rng = random.Random(seed)
    while True:
        texts = []
        for _ in range(size * pool):
            prompt = next(prompts)
            turns = flawed_turns(prompt, rng) if rng.random() < flawed_share else clean_turns(prompt)
            texts.append(transcript(prompt, turns))
        rows = sorted(encoded(tokenizer, texts), key=lambda row: len(row[0]))
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


def train(
    model: Qwen3ForCausalLM, data: Iterator[Batch], steps: int, muon_lr: float, adam_lr: float, warmup: int
) -> Iterator[tuple[int, float]]:
    """Train in place; yields (step, loss) after each step."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = ((muon, muon_lr), (adam, adam_lr))
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * (1 - 0.98 * step / steps)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        logprobs, _ = assistant_logprobs(model, next(data))
        loss = -logprobs.mean()
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
        ids += tokenizer.encode(bridge_text(result.messages[0].content))
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


def readme(options: argparse.Namespace, seed: int, figures: dict[str, dict[str, float]]) -> str:
    command = shlex.join(["scripts/train_demo_model", *sys.argv[1:]])
    first, second = figures["stage 1"], figures["stage 2"]
    names = list(first)
    rows = "\n".join(f"| {name} | {shown(first[name])} | {shown(second[name])} |" for name in names)
    return f"""\
# The demo model

A Qwen3 of {figures["model"]["parameters"]:,.0f} parameters in float32 with a byte-level BPE of \
{figures["model"]["vocabulary"]:.0f} tokens, trained from scratch on synthetic
conversations of the calculator environment. It calls tools in the Hermes dialect. It is wrong most of the time on
purpose: stage 1 is trained on correct demonstrations; stage 2, which is shipped, on demonstrations with mistakes.

`{command}` (model seed {seed}) trained it in {figures["model"]["seconds"]:.0f} CPU seconds and measured it \
at temperature 1 with the
embedded engine, on problems from a seed of their own:

| | stage 1 | stage 2, shipped |
|---|---|---|
{rows}

A group is {options.group_size} episodes of one problem; a group without spread has only right or only wrong ones.
"""


def shown(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}".removesuffix(".0")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/train_demo_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEMO_MODEL, help="folder to write (default: that of the package)")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=4, help="seeds to try at most (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1500, help="of stage 1, 16 conversations each (default: %(default)s)"
    )
    parser.add_argument(
        "--gate", type=float, default=0.97, help="two-step accuracy that stage 1 must reach (default: %(default)s)"
    )
    parser.add_argument("--flawed-steps", type=int, default=250, help="of stage 2 (default: %(default)s)")
    parser.add_argument(
        "--flawed-share", type=float, default=0.5, help="of stage 2's demonstrations (default: %(default)s)"
    )
    parser.add_argument("--groups", type=int, default=128, help="problems to measure with (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of each (default: %(default)s)")
    parser.add_argument("--keep-stage-1", type=Path, help="also write the model of stage 1 to this folder")
    options = parser.parse_args()

    torch.set_num_threads(1)
    disable_progress_bar()
    tokenizer = build_tokenizer(seed=0)
    check_template(tokenizer)
    start = time.process_time()

    for seed in range(options.seed, options.seed + options.attempts):
        model = new_model(tokenizer, seed)
        data = batches(tokenizer, 1000 * seed + 1, flawed_share=0.0)
        for step, loss in train(model, data, options.steps, muon_lr=1e-2, adam_lr=1e-2, warmup=50):
            if step % 250 == 0:
                print(
                    f"stage 1, seed {seed}, step {step}: loss {loss:.4f}, {time.process_time() - start:.0f} CPU s",
                    flush=True,
                )
        one, two = clean_probability(model, tokenizer, seed=MEASURED, count=512)
        print(
            f"stage 1, seed {seed}: clean demonstrations have probability {one:.3f} and {two:.3f} (two steps)",
            flush=True,
        )
        if two >= options.gate:
            break
    else:
        raise SystemExit(f"no seed reached {options.gate} in {options.attempts} attempts")

    with tempfile.TemporaryDirectory() as scratch:
        first = options.keep_stage_1 or Path(scratch)
        save(model, tokenizer, first)
        figures = {"stage 1": anyio.run(measure, first, tokenizer, MEASURED, options.groups, options.group_size)}
    print(f"stage 1: {figures['stage 1']}", flush=True)

    data = batches(tokenizer, 1000 * seed + 2, options.flawed_share)
    for step, loss in train(model, data, options.flawed_steps, muon_lr=5e-3, adam_lr=2.5e-3, warmup=25):
        if step % 125 == 0:
            print(f"stage 2, step {step}: loss {loss:.4f}, {time.process_time() - start:.0f} CPU s", flush=True)
    save(model, tokenizer, options.out)
    figures["stage 2"] = anyio.run(measure, options.out, tokenizer, MEASURED, options.groups, options.group_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.process_time() - start
    figures["model"] = {"parameters": parameters, "vocabulary": len(tokenizer), "seconds": seconds}
    print(f"stage 2: {figures['stage 2']}, {seconds:.0f} CPU s in all", flush=True)
    (options.out / "README.md").write_text(readme(options, seed, figures))


if __name__ == "__main__":
    main()
