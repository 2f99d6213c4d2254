"""``rollouts check-model``: test whether a model's chat template renders exact tokens, before anything is sampled.

Invariant: the verdict is that of the renderer's self-test, with the tools that a run would have; requests to an
endpoint leave no state there. This module starts no run.
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
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollouts.commands.arguments import (
    BROKEN,
    add_generate_options,
    add_options,
    add_verb,
    generate_settings_of,
    in_loop,
    options_of,
)
from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint, Tool
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.http.answers import message_of
from rollouts.http.client import HttpClient
from rollouts.inference.shared import shared_policy
from rollouts.inference.wire_errors import error_of
from rollouts.recipe import check_environment
from rollouts.recipe.files import build, load_recipe
from rollouts.renderer import ExamplePart, Renderer, RendererOptions, SelfTest, conversation, load_tokenizer
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import visible

__all__ = ["Echo", "TemplateCheckOptions", "add", "check", "echo"]

_SECONDS = 60.0
_COLOURS = {"exact": "green", "forks": "yellow", "refused": "bold red"}
_CALLS = {"read": "green", "one a turn": "yellow", "not read": "bold red", "unchecked": "yellow"}
_POLICIES = {
    "append": "keeps the ids where the template rewrites",
    "fork": "opens a branch where the template rewrites",
    "error": "fails the rollout where the template rewrites",
}
_SPECIAL_TEXT = {
    "as_ids": "special tokens in the text of users and tools become their ids",
    "as_text": "special tokens in the text of users and tools are encoded as plain text",
    "error": "special tokens in the text of users and tools are refused",
}
_TOOLS = (
    Tool(
        "weather",
        "The weather somewhere.",
        {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]},
    ),
    Tool("now", "The time.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}}),
)
"""The tools of the self-test without a recipe."""


@attrs.frozen(kw_only=True)
class TemplateCheckOptions:
    """The model, template, endpoint and recipe to check."""

    model: str | None = None
    endpoint: str | None = None
    recipe: Path | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    """Options of the recipe."""
    generate: Mapping[str, Any] = attrs.field(factory=dict)
    """Values of ``GENERATE_OPTIONS``: history policy, template and its variables, dialect, stop ids, special text."""


async def check(options: TemplateCheckOptions, console: Console) -> bool:
    """Print the verdicts, an example and the endpoint's echo; return whether all of it is exact.

    With the history policy ``fork``, the verdict ``forks`` passes: each request has the template's own rendering.

    Raises:
        ConfigError: the tokenizer, the template or the recipe cannot be loaded.
        EndpointError: the endpoint does not answer.
    """
    model = options.model or await _named(options.endpoint)
    tools: Sequence[Tool]
    if options.recipe is None:
        tools, history = _TOOLS, options.generate.get("history", "append")
        renderer = await anyio.to_thread.run_sync(_renderer, options, model)
    else:
        renderer, tools, history = await _recipe_settings(options, options.recipe, model)
    test = await anyio.to_thread.run_sync(renderer.self_test, tools)
    about = f"{renderer!r}\n{test.strategy} dummy · {len(tools)} tools · history: {history} ({_POLICIES[history]})"
    about += f"\nencoder: {await anyio.to_thread.run_sync(lambda: renderer.encoder)}"
    about += f"\nspecial_text: {renderer.special_text} ({_SPECIAL_TEXT[renderer.special_text]})"
    console.print(Text(visible(about), "bold"))
    console.print(steps_table(test))
    if test.calls is not None:
        console.print(Text(f"calls: {test.calls}", _CALLS[test.calls]))
    if test.unread:
        console.print(Text(visible(test.unread), "bold red"))
    for note in test.notes:
        console.print(Text(visible(f"note: {note}"), "yellow"))
    good = test.verdict == "exact" or (test.verdict == "forks" and history == "fork")
    try:
        pieces = await anyio.to_thread.run_sync(conversation, renderer, tools)
    except ConfigError as error:
        console.print(Text(visible(f"no example: {error}"), "red"))
        return False
    console.print(example_table(pieces, renderer))
    if options.endpoint is not None:
        echoed = await echo(options.endpoint, pieces)
        console.print(Text(str(echoed), "green" if echoed.exact else "bold red"))
        good = good and echoed.exact
    console.print(Text(f"verdict: {test.verdict}", _COLOURS[test.verdict]))
    return good


def steps_table(test: SelfTest) -> Table:
    """One row per step: name, verdict, reason."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for step in test.steps:
        table.add_row(step.name, Text(step.verdict, _COLOURS[step.verdict]), Text(visible(step.reason), "dim"))
    return table


def example_table(pieces: Sequence[ExamplePart], renderer: Renderer) -> Table:
    """The example as it would be stored: trained tokens are green, context is dim."""
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


def _renderer(options: TemplateCheckOptions, model: str) -> Renderer:
    settings = {name: value for name, value in options.generate.items() if name in RendererOptions.__annotations__}
    return Renderer(load_tokenizer(model), **settings)


async def _recipe_settings(
    options: TemplateCheckOptions, path: Path, model: str
) -> tuple[Renderer, tuple[Tool, ...], str]:
    """The renderer of a recipe, the tools of its environment, and its history policy."""
    endpoint = Endpoint(model=model) if options.endpoint is None else Endpoint(model=model, base_url=options.endpoint)
    recipe = build(load_recipe(path), endpoint, options.options).with_options(**options.generate)
    tools: tuple[Tool, ...] = ()
    if recipe.environment_cls is not None:
        tools = await check_environment(recipe)
    bound = getattr(recipe.config.generate_fn, "keywords", {})
    return await anyio.to_thread.run_sync(recipe.renderer), tools, str(bound.get("history", "append"))


# -- the echo ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Echo:
    """The server's report on the example, sent to it twice as token ids."""

    sent: int
    counted: int | None
    """Prompt tokens as the server counts them."""
    same_ids: bool | None
    """Whether the server scored the ids that were sent; ``None`` if it does not report ids."""
    cached: int
    """Tokens of the second request that came from the prefix cache."""

    @property
    def exact(self) -> bool:
        return self.counted == self.sent and self.same_ids is not False

    def __str__(self) -> str:
        ids = {True: "the same ids", False: "OTHER IDS", None: "ids not reported"}[self.same_ids]
        return f"endpoint: {self.sent} ids sent, {self.counted} counted, {ids}; sent again, {self.cached} were cached"


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Response(msgspec.Struct):
    meta_info: _Meta


async def echo(url: str, pieces: Sequence[ExamplePart]) -> Echo:
    """Send a conversation as ids, and compare them with the ids that the server scored.

    Raises:
        EndpointError: no response, or not that of an SGLang server.
    """
    ids = np.concatenate([piece.tokens for piece in pieces])
    client = HttpClient(connect_seconds=5.0)
    try:
        first = await _scored(client, url, ids.tolist(), scored=True)
        second = await _scored(client, url, ids.tolist(), scored=False)
    finally:
        await client.aclose()
    entries = first.input_token_logprobs
    scored = None if entries is None else np.array([token for _, token, _ in entries], np.int32)
    same = None if scored is None else zlib.crc32(scored.tobytes()) == zlib.crc32(ids.astype(np.int32).tobytes())
    return Echo(len(ids), first.prompt_tokens, same, second.cached_tokens or 0)


async def _scored(client: HttpClient, url: str, ids: list[int], *, scored: bool) -> _Meta:
    start = 0 if scored else -1
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    place = f"{url.rstrip('/')}/generate"
    with boundary(EndpointUnavailable, place, seconds=_SECONDS):
        status, payload = await client.post(
            place, msgspec.json.encode(body), {"Content-Type": "application/json"}, new_connection=True
        )
        if status != 200:
            raise error_of(status, f"{message_of(payload)} (POST {place})")
        try:
            return msgspec.json.decode(payload, type=_Response, strict=False).meta_info
        except msgspec.MsgspecError as error:
            raise EndpointUnavailable(f"{place}: not an answer of /generate ({error})") from error


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "check-model", _check, "does a model's chat template render exact tokens?", "check-model --model DIR"
    )
    parser.add_argument("--model", metavar="NAME_OR_DIR", help="tokenizer (default: the model that the endpoint names)")
    parser.add_argument("--endpoint", metavar="URL", help="server to send ids to, and to compare the ids it scored")
    parser.add_argument("--recipe", type=Path, metavar="RECIPE", help="recipe whose environment's tools are tested")
    add_options(parser, "--set")
    add_generate_options(parser)


def _check(args: argparse.Namespace) -> int:
    options = TemplateCheckOptions(
        model=args.model,
        endpoint=args.endpoint,
        recipe=args.recipe,
        options=options_of(args),
        generate=generate_settings_of(args),
    )
    return 0 if in_loop(check, options, SafeConsole()) else BROKEN
