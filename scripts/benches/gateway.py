"""CPU time of a call of a program: the gateway's, its client's, and that of other servers between program and model.

256 sessions of 50 turns, whose requests have the whole history, as programs send it. Each server runs in its own
process and asks a server with one prebuilt reply; all get the same requests of the same client. One more session is
played before the others: what a server does once for a process, such as first renderings, is in its row by itself, and
in no call. So is the load of our fast encoder, which a long run has: else it would run in a thread during some calls.

``python -m scripts.benches.gateway reading`` prints what it costs to read a request, by turn, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import anyio
import attrs
from aiohttp import web

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint, Message, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.programs.gateway import chat
from rollouts.programs.gateway.normal import Conversations, message_rules
from rollouts.programs.gateway.server import Gateway
from rollouts.programs.gateway.session import ProgramSession, SessionLimits
from rollouts.programs.gateway.wire import Entries, decoded_body
from rollouts.renderer import BridgeMemory, Renderer, renderer_for
from rollouts.testing.canned import Canned, canned_server
from scripts.benches.workers import Spent
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_gateway", "gateway_options"]

Row = dict[str, float | int | str]
ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "You are an agent. " * 100
RESULT = "The file has forty lines. " * 20
REPLY = "I read the next file and compare it with the last one. " * 6
MOST_WITHOUT_RENDERER = 2.0
READY_SECONDS = 180.0
KEY = "key-of-the-benchmark"


@attrs.frozen
class Server:
    """A running server, and how its sessions are reached."""

    pids: Sequence[int]
    places: Sequence[tuple[str, str]]
    """URL and key of each session."""
    loading: float = 0.0
    """CPU seconds before the first call that belong to the warm-up."""


# -- our side: run as a child -----------------------------------------------------------------------------------------


async def serve_ours(upstream: str, tokenizer: str, sessions: int) -> None:
    """Serve until standard input ends; prints the places of the sessions, and what the encoder took."""
    renderer = renderer_for(tokenizer)
    began = time.process_time()
    assert renderer.encoder  # loads the fast encoder, which takes more CPU than some hundred calls
    loading, limits = time.process_time() - began, SessionLimits(max_calls=None)
    async with contextlib.AsyncExitStack() as stack:
        policy = await stack.enter_async_context(
            SGLangPolicy(Endpoint(base_url=upstream), vocab_size=renderer.vocab_size)
        )
        gateway = await stack.enter_async_context(Gateway())
        places = []
        for _ in range(sessions):
            session = ProgramSession(policy, renderer, SamplingParams(max_new_tokens=4096), limits=limits)
            await stack.enter_async_context(session)
            places.append([f"{gateway.open(session)}/v1/chat/completions", session.key])
        print(json.dumps([places, loading]), flush=True)
        stack.enter_context(calm_collector())
        await anyio.to_thread.run_sync(sys.stdin.read)


def upstream(port: int, tokenizer: str) -> None:
    """Serve the reply as chat completions, with what miles reads of SGLang's."""
    renderer = renderer_for(tokenizer)
    ids = reply_ids(renderer)
    logprobs = [[-0.5, token, None] for token in ids]
    message = {"role": "assistant", "content": REPLY.strip()}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    choice["meta_info"] = {"output_token_logprobs": logprobs, "completion_tokens": len(ids)}
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "any",
            "choices": [choice],
            "usage": {"prompt_tokens": 100, "completion_tokens": len(ids), "total_tokens": 100 + len(ids)},
        }
    ).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def reply_ids(renderer: Renderer) -> list[int]:
    """The reply in tokens, with its stop id."""
    return [*renderer.encode(REPLY.strip()).tolist(), renderer.stop_token_ids[0]]


# -- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(line: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A child, killed at the end; its standard error goes to a file."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            line, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def until_ready(process: subprocess.Popen[str], port: int, log: Path) -> None:
    """Wait until a port takes connections.

    Raises:
        SystemExit: the process ended, or was not ready in time; with the end of its log.
    """
    ends = time.monotonic() + READY_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    last = (log.read_text().strip().splitlines() or ["no message"])[-1]
    raise SystemExit(f"not ready: {last[:160]}")


@contextlib.contextmanager
def ours(folder: Path, tokenizer: str, sessions: int) -> Iterator[Server]:
    ids = reply_ids(renderer_for(tokenizer))
    with canned_server(Canned([ids])) as url:
        line = [sys.executable, "-m", "scripts.benches.gateway", "ours", url, tokenizer, str(sessions)]
        with started(line, folder / "ours.log") as process:
            assert process.stdout is not None
            text = process.stdout.readline()
            if not text:
                raise SystemExit((folder / "ours.log").read_text()[-2000:])
            places, loading = json.loads(text)
            yield Server([process.pid], [(url, key) for url, key in places], loading)


@contextlib.contextmanager
def chat_upstream(folder: Path, tokenizer: str) -> Iterator[str]:
    port, log = free_port(), folder / "upstream.log"
    line = [sys.executable, "-m", "scripts.benches.gateway", "upstream", str(port), tokenizer]
    with started(line, log) as process:
        until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def litellm(folder: Path, tokenizer: str, sessions: int) -> Iterator[Server]:
    """LiteLLM's proxy: it translates and forwards, and keeps no ids."""
    program, port, log = ROOT / ".venv-litellm/bin/litellm", free_port(), folder / "litellm.log"
    if not program.exists():
        raise SystemExit(f"{program.relative_to(ROOT)} does not exist: pip install 'litellm[proxy]' in .venv-litellm")
    with chat_upstream(folder, tokenizer) as url:
        parameters = {"model": "openai/any", "api_base": f"{url}/v1", "api_key": KEY}
        settings = {
            "model_list": [{"model_name": "any", "litellm_params": parameters}],
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        (folder / "litellm.yaml").write_text(json.dumps(settings))
        line = [str(program), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}
        with started([*line, "--num_workers", "1"], log, **quiet) as process:
            assert process.stdout is not None
            until_ready(process, port, log)
            yield Server([process.pid], [(f"http://127.0.0.1:{port}/v1/chat/completions", KEY)] * sessions)


@contextlib.contextmanager
def miles(folder: Path, tokenizer: str, sessions: int) -> Iterator[Server]:
    """miles' session server: it keeps the ids of one line of calls for each session, for the chat API."""
    python, port, log = ROOT / ".venv-miles/bin/python", free_port(), folder / "miles.log"
    if "MILES_PATH" not in os.environ or not python.exists():
        raise SystemExit("MILES_PATH is not set, or .venv-miles does not exist")
    with chat_upstream(folder, tokenizer) as url:
        line = [str(python), "scripts/benches/gateway_miles.py", url, str(port), tokenizer]
        with started(line, log, PYTHONPATH=os.environ["MILES_PATH"]) as process:
            until_ready(process, port, log)
            base = f"http://127.0.0.1:{port}/sessions"

            async def names() -> list[str]:
                async with aiohttp.ClientSession() as http:
                    found = []
                    for _ in range(sessions):
                        async with http.post(base) as response:
                            found.append((await response.json())["session_id"])
                    return found

            yield Server([process.pid], [(f"{base}/{name}/v1/chat/completions", KEY) for name in anyio.run(names)])


SERVERS = {"ours": ours, "litellm": litellm, "miles": miles}


# -- the job ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Phase:
    """Some turns of all sessions; the first phase is the whole session that warms the server up."""

    calls: int
    server: float
    """CPU seconds of the server."""
    client: float


async def played(server: Server, turns: int, phases: Sequence[int]) -> list[Phase]:
    """Play the last session, then all others; each phase of these ends after so many turns of every session."""
    histories = [[text("system", SYSTEM), text("user", f"Task {n}.")] for n in range(len(server.places))]
    timeout, connector = aiohttp.ClientTimeout(300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def one(number: int, count: int) -> None:
            url, key = server.places[number]
            headers = {"Authorization": f"Bearer {key}"}
            for _ in range(count):
                body = {"model": "any", "messages": histories[number]}
                async with http.post(url, json=body, headers=headers) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise SystemExit(f"{url}: {response.status} {str(answer)[:300]}")
                message = answer["choices"][0]["message"]
                if message["content"] != REPLY.strip():
                    raise SystemExit(f"another reply: {message}")
                histories[number] += [text("assistant", message["content"]), text("user", RESULT)]

        async def phase(numbers: Sequence[int], count: int) -> Phase:
            before, began = Spent.by(server.pids), time.process_time()
            async with anyio.create_task_group() as tasks:
                for number in numbers:
                    tasks.start_soon(one, number, count)
            client = time.process_time() - began
            return Phase(count * len(numbers), Spent.by(server.pids).since(before).cpu, client)

        *others, warming = range(len(server.places))
        warm_up = await phase([warming], turns)
        found = [attrs.evolve(warm_up, server=warm_up.server + server.loading)]
        for first, last in itertools.pairwise([0, *phases, turns]):
            found.append(await phase(others, last - first))
    return found


def reading(turns: Sequence[int] = (10, 25, 50, 100, 200), sessions: int = 40) -> None:
    """Print the CPU time in which a request becomes messages with their keys: the median of the sessions."""
    rules = message_rules(renderer_for(default_tokenizer()).render)
    spent: dict[int, list[float]] = {turn: [] for turn in turns}
    for number in range(sessions):
        entries, conversations = Entries(), Conversations(rules)
        history = [text("system", SYSTEM), text("user", f"Task {number}.")]
        for turn in range(1, max(turns) + 1):
            body = json.dumps({"model": "any", "messages": history}).encode()
            began = time.thread_time()
            request = chat.read(decoded_body(body, chat.HISTORY, chat.FIELDS), entries=entries)
            conversations.keep(conversations.of(request.messages, set()))
            if turn in spent:
                spent[turn].append(time.thread_time() - began)
            history += [text("assistant", REPLY.strip()), text("user", RESULT)]
    for turn, seconds in spent.items():
        print(f"{turn} turns: {1e6 * statistics.median(seconds):.0f} us, at least {1e6 * min(seconds):.0f} us")


def text(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendering(tokenizer: str, turns: int) -> float:
    """CPU seconds of the renderer for a call: the openings, bridges and replies of one session."""
    renderer = renderer_for(tokenizer)
    assert renderer.encoder  # loads the fast encoder, as the server does
    ids = renderer.encode(REPLY.strip())
    reply, new = Message("assistant", REPLY.strip()), [Message("user", RESULT)]

    def session(number: int) -> float:
        began = time.process_time()
        history, memory = [Message("system", SYSTEM), Message("user", f"Task {number}.")], BridgeMemory()
        tail = renderer.opening(history, ())[-1:]
        for _ in range(turns - 1):
            renderer.parse(ids, tools=(), prompt=tail)
            history.append(reply)
            renderer.bridge(history, new, tools=(), tail=ids[-1:], memory=memory)
            history += new
        return (time.process_time() - began) / turns

    session(0)
    return statistics.median(session(number) for number in range(1, 11))


def bench_gateway(options: argparse.Namespace) -> list[Row]:
    """CPU time of a call of a program at many sessions with growing histories: ours, LiteLLM's proxy, miles' server."""
    turns, sessions = options.turns, options.sessions
    tokenizer = str(options.tokenizer or default_tokenizer())
    renderer = 1000 * rendering(tokenizer, turns)
    phases = [1, turns // 5 + 1, turns - turns // 5]
    rows: list[Row] = []
    base = 0.0
    for name in ("ours", *options.peers):
        began = os.getloadavg()[0]
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                SERVERS[name](Path(folder), tokenizer, sessions + 1) as server,
            ):
                run: Callable[[], Awaitable[list[Phase]]] = lambda: played(server, turns, phases)  # noqa: E731
                with calm_collector():
                    warming, *found = anyio.run(run)
        except (SystemExit, BaseExceptionGroup) as error:
            if name == "ours":
                raise
            shown = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            rows.append({**dict.fromkeys(rows[0], ""), "server": name, "ms/call": f"not run: {shown}"})
            print(f"{name}: not run: {shown}", file=sys.stderr)
            continue
        calls = sum(phase.calls for phase in found)
        server_ms, client_ms = (
            1000 * sum(seconds) / calls
            for seconds in ([phase.server for phase in found], [phase.client for phase in found])
        )
        early, late = (1000 * phase.server / phase.calls for phase in (found[1], found[3]))
        base = base or server_ms
        row: Row = {"server": name, "ms/call": server_ms, "times ours": server_ms / base}
        row |= {"client ms/call": client_ms, "early ms/call": early, "late ms/call": late}
        row |= {"warm-up ms": 1000 * warming.server}
        rest = server_ms - renderer if name == "ours" else ""
        row |= {"renderer ms/call": renderer if name == "ours" else "", "without the renderer": rest}
        met = "" if name != "ours" else "yes" if server_ms - renderer <= MOST_WITHOUT_RENDERER else "NO"
        rows.append(row | {"met": met, "load": f"{began:.1f}"})
        times = (
            f"{server_ms:.3f} ms/call, early {early:.3f}, late {late:.3f}; {1000 * warming.server:.0f} ms to warm up"
        )
        print(f"{name}: {times}", file=sys.stderr)
    return rows


def gateway_options(parser: argparse.ArgumentParser) -> None:
    peers = [name for name in SERVERS if name != "ours"]
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="(default: all)")
    parser.add_argument("--sessions", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "upstream":
        upstream(int(rest[0]), rest[1])
    elif verb == "reading":
        reading()
    else:
        anyio.run(serve_ours, rest[0], rest[1], int(rest[2]))
