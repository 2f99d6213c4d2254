"""``rollouts gateway``: the model APIs for one program that is started by hand.

It prints each call as it is answered and, with ``--out``, writes the session as a run of one rollout.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs

from rollouts.base.extras import install_command
from rollouts.base.terminal import say
from rollouts.commands.arguments import (
    add_generate_options,
    add_provider,
    add_verb,
    generate_settings_of,
    in_loop,
    port,
    positive,
)
from rollouts.commands.serve import serve_until_stopped
from rollouts.dtypes import Endpoint, Prompt, SamplingParams
from rollouts.errors import ConfigError, RolloutsError, without_password
from rollouts.inference.base import describe_once
from rollouts.inference.shared import shared_policy
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.gateway.tree import Call
from rollouts.programs.gateway.types import CallReply, CallRequest
from rollouts.renderer import Renderer, renderer_for
from rollouts.runs.writer import RunWriter, check_free
from rollouts.training.agent_integration import resuming
from rollouts.training.metrics import Accounting
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample

__all__ = ["add", "serve_program"]

_LINE_CHARACTERS = 60


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "gateway",
        _gateway,
        "serve the model APIs to a program, and keep its tokens",
        "gateway --endpoint http://127.0.0.1:30000 --out runs/by-hand",
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        metavar="URL",
        help="URL of an SGLang or vLLM server; repeat the option for several servers. The API key is read from "
        "ROLLOUTS_API_KEY",
    )
    add_provider(parser)
    parser.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="tokenizer (default: that of the server's model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8080, help="0 picks a free port (default: 8080)")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="most tokens of a reply (default: 4096)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the session as a run to this folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop at the end of standard input")
    add_generate_options(parser)


def _gateway(args: argparse.Namespace) -> int:
    try:
        import aiohttp  # noqa: F401 - part of an extra; refused before any request is sent
    except ImportError as error:
        raise ConfigError(f"gateway needs aiohttp: {install_command('gateway')} ({error})") from error
    options = generate_settings_of(args)
    if args.out is not None:
        check_free(args.out, overwrite=args.overwrite)
    return in_loop(serve_program, args, options)


async def serve_program(
    args: argparse.Namespace, options: Mapping[str, Any], started: Callable[[], None] = lambda: None
) -> int:
    """Serve one session until a signal, the end of standard input or of the session; return the exit code.

    Args:
        args: of the command line.
        options: of the renderer, and ``history``.
        started: called when the session takes calls.

    Raises:
        ConfigError: the address, the tokenizer or an option is invalid.
        EndpointError: the server does not answer.
    """
    from rollouts.programs.gateway.server import Gateway  # here: aiohttp is part of an extra

    endpoint = Endpoint(
        provider=args.provider or "sglang",
        base_url=tuple(args.endpoint),
        api_key=os.environ.get("ROLLOUTS_API_KEY"),
        sampling=SamplingParams(max_new_tokens=args.max_new_tokens or 4096),
    )
    server = await shared_policy(endpoint).describe()
    model = args.tokenizer or server.model
    if model is None:
        raise ConfigError.of("--tokenizer", None, "a name or folder: the server does not name its model")
    endpoint = attrs.evolve(endpoint, model=model)
    history = options.get("history", "append")
    rendering = {name: value for name, value in options.items() if name != "history"}
    renderer = await anyio.to_thread.run_sync(lambda: renderer_for(model, **rendering))
    policy = shared_policy(endpoint, renderer.vocab_size)
    described = await describe_once(policy)
    session = _PrintedSession(
        resuming(policy, renderer.decode),
        renderer,
        endpoint.sampling,
        max_context=described.max_context,
        history=history,
    )

    async def serve(on_ready: Callable[[str], None]) -> None:
        async with session, Gateway(args.host, args.port, model=model) as gateway:
            base = gateway.open(session)
            say(f"export ANTHROPIC_BASE_URL={base} ANTHROPIC_API_KEY={session.key}")
            say(f"export OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={session.key}")
            on_ready(base)
            started()
            await session.over.wait()
            say(f"the session has ended: {session.stop_reason}")

    code = await serve_until_stopped(serve, args.stop_with_stdin)
    session.end()
    samples = _samples(session, renderer)
    say(f"{session.tree!r} in {len(samples)} samples")
    for name, amount in sorted(session.metrics().items()):
        say(f"  {name}: {amount:g}")
    if args.out is not None:
        _write(args, samples, session, endpoint, renderer)
    return code


class _PrintedSession(ProgramSession):
    """Prints each call when it is answered."""

    async def call(self, request: CallRequest, *, lineage: Mapping[str, str], attempt: int = 0) -> list[CallReply]:
        known = len(self.tree.calls)
        try:
            replies = await super().call(request, lineage=lineage, attempt=attempt)
        except RolloutsError as error:
            say(f"a call is refused: {error}", flush=True)
            raise
        for reply in replies:
            call = self.tree.call_of(reply.id)
            if call is not None:
                say(_line(call, again=call not in self.tree.calls[known:]), flush=True)
        return replies


def _line(call: Call, *, again: bool) -> str:
    """One call: its parent, its numbers of tokens, and the beginning of its reply."""
    place = "root" if call.parent is None else f"after {call.parent.number}"
    message = call.reply.message
    names = ", ".join(one.name for one in message.tool_calls)
    text = " ".join(message.text.split())
    text = text if len(text) <= _LINE_CHARACTERS else f"{text[: _LINE_CHARACTERS - 1]}…"
    size = f"{call.reply_start} + {len(call.completion.tokens)} tokens"
    reply = f"calls {names}" if names else repr(text)
    return f"call {call.number} · {place} · {size} · {call.reply.finish_reason} · {reply}{' · again' if again else ''}"


def _samples(session: ProgramSession, renderer: Renderer) -> list[Sample]:
    """The branches of the session as the samples of one rollout."""
    branches = session.branches()
    if not branches:
        return []
    prompt = Prompt(session.tree.roots[0].new, group_index=0, index=0)
    return trajectory_to_samples(branches, prompt, renderer.decode)


def _write(
    args: argparse.Namespace, samples: list[Sample], session: ProgramSession, endpoint: Endpoint, renderer: Renderer
) -> None:
    """Write a run of one batch with one rollout; of none if no reply is trained."""
    described = attrs.asdict(endpoint)
    del described["api_key"], described["admin_key"]
    described["base_url"] = [without_password(url) for url in endpoint.base_url]
    description = {
        "recipe": "gateway",
        "endpoint": described,
        "tokenizer": endpoint.model,
        "vocab_size": renderer.vocab_size,
        "config": {"batch_size": 1, "n_samples_per_prompt": 1},
    }
    writer = RunWriter(args.out, description, overwrite=args.overwrite)
    if samples:
        writer.write_batch(samples, session.metrics())
    taken = int(bool(samples))
    writer.finish("finished", Accounting(taken=taken, in_batch=taken))
    say(f"run: {args.out}")
