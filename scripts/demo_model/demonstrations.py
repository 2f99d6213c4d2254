"""Demonstrations of the calculator task, as text: sound ones, flawed ones, and bad habits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from rollouts.dtypes import Prompt
from rollouts.environments.calculator import CalculatorEnvironment

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
