"""Whether a model's chat template can be trusted, before anything is sampled from it.

Invariant: the verdict is the renderer's own self-test, on the tools that a run would have; what an endpoint is asked
changes nothing there. This module starts no run.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.commands.arguments import BROKEN, add_verb, in_loop, options_of
from rollouts.concurrency.boundary import boundary, function_name
from rollouts.display.transcript import visible
from rollouts.dtypes import Endpoint, Tool
from rollouts.errors import ConfigError, EndpointUnavailable, EnvironmentFailure
from rollouts.http.client import HttpClient
from rollouts.inference.sglang import shared_policy
from rollouts.inference.wire_errors import error_of, message_of
from rollouts.recipe_files import build, load_recipe
from rollouts.renderer import ExamplePart, Renderer, SelfTest, conversation, load_tokenizer

__all__ = ["Echo", "TemplateCheckOptions", "add", "check", "echo"]

_SECONDS = 60.0
_COLOURS = {"exact": "green", "forks": "yellow", "refused": "bold red"}
_CALLS = {"read": "green", "one a turn": "yellow", "not read": "bold red"}
_TOOLS = (
    Tool(
        "weather",
        "The weather somewhere.",
        {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]},
    ),
    Tool("now", "The time.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}}),
)
"""What the model is told of where no recipe says it."""


@attrs.frozen(kw_only=True)
class TemplateCheckOptions:
    """What is checked."""

    model: str | None = None
    template: Path | None = None
    endpoint: str | None = None
    recipe: Path | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    dialect: str | None = None
    stops: tuple[int, ...] = ()


async def check(subject: TemplateCheckOptions, console: Console) -> bool:
    """Print the verdicts, an example, and what the endpoint got; true if all of it is exact.

    Raises:
        ConfigError: the tokenizer, the template or the recipe cannot be had.
        EndpointError: the endpoint does not answer.
    """
    model = subject.model or await _named(subject.endpoint)
    told = (_TOOLS, "append", None) if subject.recipe is None else await _of_recipe(subject, model)
    tools, history, dialect = told
    renderer = await anyio.to_thread.run_sync(_renderer, subject, model, subject.dialect or dialect)
    test = await anyio.to_thread.run_sync(renderer.self_test, tools)
    about = f"{renderer!r}\n{test.strategy} dummy · {len(tools)} tools · history: {history}"
    console.print(Text(visible(about), "bold"))
    console.print(steps_table(test))
    if test.calls is not None:
        console.print(Text(f"calls: {test.calls}", _CALLS[test.calls]))
    if test.unread:
        console.print(Text(visible(test.unread), "bold red"))
    for note in test.notes:
        console.print(Text(visible(f"note: {note}"), "yellow"))
    good = test.verdict == "exact"
    try:
        pieces = await anyio.to_thread.run_sync(conversation, renderer, tools)
    except ConfigError as error:
        console.print(Text(visible(f"no example: {error}"), "red"))
        return False
    console.print(example_table(pieces, renderer))
    if subject.endpoint is not None:
        found = await echo(subject.endpoint, pieces)
        console.print(Text(str(found), "green" if found.exact else "bold red"))
        good = good and found.exact
    console.print(Text(f"verdict: {test.verdict}", _COLOURS[test.verdict]))
    return good


def steps_table(test: SelfTest) -> Table:
    """One row a step: what it is, the verdict, why."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for step in test.steps:
        table.add_row(step.name, Text(step.verdict, _COLOURS[step.verdict]), Text(visible(step.reason), "dim"))
    return table


def example_table(pieces: Sequence[ExamplePart], renderer: Renderer) -> Table:
    """The example as it would be stored: what is trained is green, context is dim."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for piece in pieces:
        style = "green" if piece.sampled else "dim"
        numbers = f"{len(piece.tokens)} tokens, mask {int(piece.sampled)}"
        table.add_row(
            Text(piece.role, style), Text(visible(renderer.decode(piece.tokens)), style), Text(numbers, style)
        )
    return table


async def _named(url: str | None) -> str:
    named = None if url is None else (await shared_policy(Endpoint(base_url=url)).describe()).model
    if named is None:
        raise ConfigError.of("--model", None, "a name or folder, or --endpoint URL of a server that names its model")
    return named


def _renderer(subject: TemplateCheckOptions, model: str, dialect: str | None) -> Renderer:
    template = None
    if subject.template is not None:
        if not subject.template.is_file():
            raise ConfigError.of("--template", str(subject.template), "a file with a chat template")
        template = subject.template.read_text(encoding="utf-8")
    tokenizer = load_tokenizer(model)
    return Renderer(tokenizer, chat_template=template, dialect=dialect, stop_token_ids=subject.stops or None)


async def _of_recipe(subject: TemplateCheckOptions, model: str) -> tuple[tuple[Tool, ...], str, str | None]:
    """The tools of a recipe's environment, its choice for rewritten histories, and its dialect if it names one."""
    assert subject.recipe is not None
    endpoint = Endpoint(model=model) if subject.endpoint is None else Endpoint(model=model, base_url=subject.endpoint)
    recipe = build(load_recipe(subject.recipe), endpoint, subject.options)
    name = function_name(recipe.environment_cls)
    with boundary(EnvironmentFailure, f"{name}()", seconds=_SECONDS):
        environment = recipe.environment_cls()
        tools = tuple(environment.tools)
        await environment.close()
    bound = getattr(recipe.config.generate_fn, "keywords", {})
    return tools, str(bound.get("history", "append")), bound.get("dialect")


# -- the echo ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Echo:
    """What a server says it was sent: the whole example, once and again."""

    sent: int
    counted: int | None
    """Prompt tokens by its own count."""
    same_ids: bool | None
    """Whether the ids that it scored are those that were sent; ``None`` where it does not tell them."""
    cached: int
    """Of the second request, taken from its prefix cache."""

    @property
    def exact(self) -> bool:
        return self.counted == self.sent and self.same_ids is not False

    def __str__(self) -> str:
        ids = {True: "the same ids", False: "OTHER IDS", None: "ids not told"}[self.same_ids]
        return f"endpoint: {self.sent} ids sent, {self.counted} counted, {ids}; sent again, {self.cached} were cached"


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


async def echo(url: str, pieces: Sequence[ExamplePart]) -> Echo:
    """Send a conversation as ids, and ask back which ids were scored.

    Raises:
        EndpointError: no answer, or none of an SGLang server.
    """
    ids = np.concatenate([piece.tokens for piece in pieces])
    transport = HttpClient(connect_seconds=5.0)
    try:
        first = await _scored(transport, url, ids.tolist(), scored=True)
        second = await _scored(transport, url, ids.tolist(), scored=False)
    finally:
        await transport.aclose()
    told = first.input_token_logprobs
    back = None if told is None else np.array([token for _, token, _ in told], np.int32)
    same = None if back is None else zlib.crc32(back.tobytes()) == zlib.crc32(ids.astype(np.int32).tobytes())
    return Echo(len(ids), first.prompt_tokens, same, second.cached_tokens or 0)


async def _scored(transport: HttpClient, url: str, ids: list[int], *, scored: bool) -> _Meta:
    start = 0 if scored else -1
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    place = f"{url.rstrip('/')}/generate"
    with boundary(EndpointUnavailable, place, seconds=_SECONDS):
        status, payload = await transport.post(
            place, msgspec.json.encode(body), {"Content-Type": "application/json"}, fresh=True
        )
        if status != 200:
            raise error_of(status, f"{message_of(payload)} (POST {place})")
        try:
            return msgspec.json.decode(payload, type=_Answer, strict=False).meta_info
        except msgspec.MsgspecError as error:
            raise EndpointUnavailable(f"{place}: not an answer of /generate ({error})") from error


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "check", _check, "say whether every token of this model's chat template is exact", "check --model DIR"
    )
    parser.add_argument("--model", metavar="NAME_OR_DIR", help="the tokenizer; by default what the endpoint names")
    parser.add_argument("--template", type=Path, metavar="FILE", help="this chat template instead of the model's own")
    parser.add_argument("--endpoint", metavar="URL", help="send ids to this server, and compare what it says it got")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="take the tools from this recipe's environment")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    parser.add_argument("--dialect", metavar="NAME", help="how tool calls are written; by default what is taught")
    parser.add_argument("--stop", type=int, action="append", default=[], metavar="ID", help="ids that end a turn")


def _check(args: argparse.Namespace) -> int:
    subject = TemplateCheckOptions(
        model=args.model,
        template=args.template,
        endpoint=args.endpoint,
        recipe=args.recipe,
        options=options_of(args),
        dialect=args.dialect,
        stops=tuple(args.stop),
    )
    return 0 if in_loop(check, subject, Console()) else BROKEN
