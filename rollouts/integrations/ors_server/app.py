"""An ORS server for a recipe's environment; the recipe's prompts are the tasks of one split.

Invariant: a session is closed once: by its client, after 15 minutes without a request, or when the server stops. A call
runs to its end even if its client disconnects; the result is stored for a minute, so that the client can resume.
Reference answers never leave the server: a task's specification is its index in the split.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import attrs
import msgspec
from aiohttp import web

from rollouts import __version__
from rollouts.base.validators import is_int
from rollouts.dtypes import Limits, Tool
from rollouts.environments.ors.environment import CONTINUES
from rollouts.environments.ors.wire import ORSError, blocks_of, messages_of
from rollouts.errors import ConfigError, RolloutsError
from rollouts.http.access import guard
from rollouts.http.address import url_of
from rollouts.http.server_log import server_log
from rollouts.integrations.ors_server.episode import HostedEpisode, HostedStep, sample_of
from rollouts.integrations.ors_server.http import (
    Refused,
    Run,
    body_of,
    ending_of,
    event,
    json_answer,
    refusals_as_json,
    run_to_end,
    send_events,
    session_id_of,
    stream_of,
)
from rollouts.recipe import Recipe
from rollouts.rewards import score_group

__all__ = ["environment_server"]

_KINDS = ("text", "image", "reasoning", "tool_call", "tool_result")
_START_WAIT, _SILENCE, _LINGER, _PING, _SWEEP = 25.0, 900.0, 60.0, 10.0, 5.0


@contextlib.asynccontextmanager
async def environment_server(
    recipe: Recipe,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    split: str = "train",
    limits: Limits | None = None,
    api_key: str | None = None,
) -> AsyncIterator[str]:
    """Serve while the context lasts; yields the URL.

    Args:
        recipe: provides environment, prompts and reward; its endpoint is not used.
        host: the address to listen on; any but a loopback address needs a key.
        port: 0 selects a free port.
        split: the name of the split.
        limits: deadlines of the environment's steps.
        api_key: the key that every request but those of ``/health`` must have.

    Raises:
        ConfigError: the address is not available, or is public without a key; or the recipe has a sampler.
    """
    guarded = guard(host, api_key)
    recipe.refuse_sampler("the client of the server")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise ConfigError.of("host:port", f"{host}:{port}", f"an address to listen on ({error})") from None
    async with anyio.create_task_group() as tasks:
        server = _Server(recipe, split, limits or Limits(), tasks)
        options: dict[str, Any] = {"access_log": None, "logger": server_log(), "handler_cancellation": True}
        runner = web.AppRunner(server.app(guarded), shutdown_timeout=0.5, **options)
        await runner.setup()
        try:
            await web.SockSite(runner, listening, backlog=4096).start()
            tasks.start_soon(server.expire_sessions)
            yield url_of(host, listening.getsockname()[1])
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()
                await server.close_all()
            tasks.cancel_scope.cancel()


@attrs.define(eq=False)
class _Session:
    hosted: HostedEpisode
    setup: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    ready: anyio.Event = attrs.field(factory=anyio.Event)
    error: str | None = None
    last_request: float = attrs.field(factory=time.monotonic)
    runs: dict[str, Run] = attrs.field(factory=dict)


class _Server:
    def __init__(self, recipe: Recipe, split: str, limits: Limits, tasks: anyio.abc.TaskGroup) -> None:
        self.recipe, self.split, self.limits, self.tasks = recipe, split, limits, tasks
        self.name = "".join(letter if letter.isalnum() else "_" for letter in recipe.name.lower()) or "environment"
        self.prompts = [
            attrs.evolve(prompt, group_index=None) for prompt in recipe.data_buffer.get_prompts(len(recipe.data_buffer))
        ]
        self.sessions: dict[str, _Session] = {}

    def app(self, guarded: Any) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[guarded, refusals_as_json])
        for method, path, handler in (
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/list_environments", self.environments),
            ("POST", "/create_session", self.create_session_id),
            ("POST", "/delete_session", self.delete_session_id),
            ("POST", "/create", self.create),
            ("POST", "/delete", self.delete),
            ("POST", "/ping", self.ping),
        ):
            app.router.add_route(method, path, handler)
        for method, path, handler in (
            ("GET", "/splits", self.splits),
            ("POST", "/tasks", self.task_list),
            ("POST", "/num_tasks", self.task_count),
            ("POST", "/task", self.task),
            ("POST", "/task_range", self.task_range),
            ("GET", "/tools", self.class_tools),
            ("GET", "/task_tools", self.tools),
            ("GET", "/prompt", self.prompt),
            ("GET", "/messages", self.messages),
            ("POST", "/call", self.call),
            ("POST", "/score_group", self.score_group),
        ):
            app.router.add_route(method, path, handler)
            app.router.add_route(method, "/{environment}" + path, self._named(handler))
        return app

    def _named(self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def checked(request: web.Request) -> web.StreamResponse:
            name = request.match_info["environment"]
            if name.lower() != self.name:
                raise Refused(404, f"unknown environment {name!r}; expected {self.name!r}")
            return await handler(request)

        return checked

    # -- environments and tasks --

    async def health(self, request: web.Request) -> web.Response:
        return json_answer({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return json_answer({"version": __version__})

    async def environments(self, request: web.Request) -> web.Response:
        return json_answer([self.name])

    async def splits(self, request: web.Request) -> web.Response:
        kind = self.split if self.split in ("train", "validation", "test") else "validation"
        return json_answer([{"name": self.split, "type": kind}])

    async def task_list(self, request: web.Request) -> web.Response:
        await self._split(request)
        return json_answer({"tasks": [self._spec(index) for index in range(len(self.prompts))], "env_name": self.name})

    async def task_count(self, request: web.Request) -> web.Response:
        await self._split(request)
        return json_answer({"num_tasks": len(self.prompts)})

    async def task(self, request: web.Request) -> web.Response:
        body = await self._split(request)
        return json_answer({"task": self._spec(self._index(body.get("index"))), "env_name": self.name})

    async def task_range(self, request: web.Request) -> web.Response:
        body = await self._split(request)
        start, stop = body.get("start"), body.get("stop")
        if not all(bound is None or isinstance(bound, int) for bound in (start, stop)):
            raise Refused(400, "Invalid index range")
        indices = range(len(self.prompts))[start:stop]
        return json_answer({"tasks": [self._spec(index) for index in indices], "env_name": self.name})

    async def class_tools(self, request: web.Request) -> web.Response:
        """The tools of an environment before it has a task."""
        environment = self.recipe.environment_for("serve-env")()
        try:
            return json_answer(
                self._listing(HostedEpisode(self.recipe, self.prompts[0], tools=tuple(environment.tools)))
            )
        finally:
            await environment.close()

    def _spec(self, index: int) -> dict[str, Any]:
        return {"split": self.split, "index": index}

    async def _split(self, request: web.Request) -> dict[str, Any]:
        body = await body_of(request)
        if body.get("split") != self.split:
            raise Refused(400, "Invalid split")
        return body

    def _index(self, index: Any) -> int:
        size = len(self.prompts)
        if not is_int(index, -size) or index >= size:
            raise Refused(400, "Invalid index")
        return index % size

    def _listing(self, hosted: HostedEpisode) -> dict[str, Any]:
        terminal = {
            "name": hosted.reply_tool,
            "arg": "message",
            "description": "Takes a reply that has no tool call.",
        }
        return {
            "tools": [_tool(tool) for tool in hosted.tools],
            "terminal_tool": terminal,
            "supports_score_group": self.recipe.config.group_rm,
            "message_block_types": list(_KINDS),
        }

    # -- sessions --

    async def create_session_id(self, request: web.Request) -> web.StreamResponse:
        return await send_events(request, [("task_id", str(uuid.uuid4())), ("end", "")])

    async def delete_session_id(self, request: web.Request) -> web.Response:
        return json_answer({"sid": session_id_of(request)})

    async def create(self, request: web.Request) -> web.Response:
        session_id, body = session_id_of(request), await body_of(request)
        if session_id in self.sessions:
            raise Refused(400, "Session already exists")
        name = body.get("env_name") or self.name
        if str(name).lower() != self.name:
            raise Refused(404, f"unknown environment {name!r}; expected {self.name!r}")
        task = body["task_spec"] if isinstance(body.get("task_spec"), dict) else body
        if task.get("split", self.split) != self.split:
            raise Refused(400, "Invalid split")
        prompt = self.prompts[self._index(task.get("index"))]
        self.sessions[session_id] = session = _Session(HostedEpisode(self.recipe, prompt, self.limits))
        self.tasks.start_soon(self._set_up, session)
        return json_answer({"sid": session_id})

    async def _set_up(self, session: _Session) -> None:
        with session.setup:
            try:
                await session.hosted.start()
            except RolloutsError as error:
                session.error = str(error)
            finally:
                session.ready.set()

    async def delete(self, request: web.Request) -> web.Response:
        session_id = session_id_of(request)
        await self._close(session_id)
        return json_answer({"sid": session_id})

    async def ping(self, request: web.Request) -> web.Response:
        self._session(request)
        return json_answer({"status": "ok"})

    async def tools(self, request: web.Request) -> web.Response:
        return json_answer(self._listing((await self._ready(request)).hosted))

    async def prompt(self, request: web.Request) -> web.Response:
        hosted = (await self._ready(request)).hosted
        texts = [message.text for message in hosted.messages[: hosted.opening] if message.text]
        return json_answer([{"type": "text", "text": "\n\n".join(texts)}])

    async def messages(self, request: web.Request) -> web.Response:
        hosted = (await self._ready(request)).hosted
        return json_answer(blocks_of([message.to_chat() for message in hosted.messages[: hosted.opening]], _KINDS))

    def _session(self, request: web.Request) -> _Session:
        session = self.sessions.get(session_id_of(request))
        if session is None:
            raise Refused(404, "Active environment not found")
        session.last_request = time.monotonic()
        return session

    async def _ready(self, request: web.Request) -> _Session:
        session = self._session(request)
        with anyio.move_on_after(_START_WAIT):
            await session.ready.wait()
        if not session.ready.is_set():
            headers = {"X-Backend-State": "starting", "Retry-After": "2"}
            raise Refused(503, "the environment is starting", headers)
        if session.error is not None:
            raise Refused(500, session.error)
        return session

    async def _close(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        session.setup.cancel()  # if it is still running
        with contextlib.suppress(RolloutsError):
            await session.hosted.close()

    async def close_all(self) -> None:
        """Close every session."""
        for session_id in list(self.sessions):
            await self._close(session_id)

    async def expire_sessions(self) -> None:
        """Close silent sessions and delete old results, periodically."""
        while True:
            await anyio.sleep(_SWEEP)
            now = time.monotonic()
            for session_id, session in list(self.sessions.items()):
                for task_id, run in list(session.runs.items()):
                    if run.ended is not None and now - run.ended > _LINGER:
                        del session.runs[task_id]
                if now - session.last_request > _SILENCE:
                    await self._close(session_id)

    # -- calls --

    async def call(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._ready(request), await body_of(request)
        name, arguments = body.get("name"), body.get("input")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise Refused(422, "name or input is missing; expected a tool's name and an object")

        async def work() -> str:
            step = await session.hosted.call(name, arguments)
            return msgspec.json.encode(_answer(step, is_reply=name == session.hosted.reply_tool)).decode()

        return await self._stream(request, session, _task_id(body), work)

    async def score_group(self, request: web.Request) -> web.StreamResponse:
        session, body = await self._ready(request), await body_of(request)
        reward_fn, hosted = self.recipe.config.reward_fn, session.hosted
        if not self.recipe.config.group_rm or reward_fn is None:
            raise Refused(404, f"environment {self.name!r} does not score groups")
        opening = hosted.messages[: hosted.opening]
        samples = []
        for index, candidate in enumerate(body.get("candidates") or ()):
            try:
                replies, _ = messages_of(msgspec.json.encode(candidate["messages"]), f"candidate {index}", images=True)
            except (ORSError, KeyError, TypeError, ConfigError) as error:
                raise Refused(422, f"candidate {index}: {error}; expected an object with messages") from None
            samples.append(sample_of(hosted.prompt, [*opening, *replies]))

        async def work() -> str:
            await score_group(samples, reward_fn, seconds=self.recipe.config.reward_seconds)
            return msgspec.json.encode({"scores": [{"reward": sample.reward} for sample in samples]}).decode()

        return await self._stream(request, session, _task_id(body), work)

    async def _stream(
        self, request: web.Request, session: _Session, task_id: str | None, work: Callable[[], Awaitable[str]]
    ) -> web.StreamResponse:
        if task_id is None:
            task_id = uuid.uuid4().hex
            session.runs[task_id] = run = Run()
            self.tasks.start_soon(run_to_end, run, work)
        elif task_id in session.runs:
            run = session.runs[task_id]
        else:
            return await send_events(request, [("error", "unknown task_id")])
        response = await stream_of(request)
        with contextlib.suppress(ConnectionError):  # a client that disconnected may resume
            await response.write(event("task_id", task_id))
            while not run.done.is_set():
                with anyio.move_on_after(_PING):
                    await run.done.wait()
                if not run.done.is_set():
                    session.last_request = time.monotonic()
                    await response.write(b": ping\r\n\r\n")
            await response.write(b"".join(ending_of(run)))
        return response


def _task_id(body: dict[str, Any]) -> str | None:
    """The id of the call to resume; ``None`` for a new call."""
    task_id = body.get("task_id")
    if task_id is not None and not isinstance(task_id, str):
        raise Refused(422, "task_id is not a string")
    return task_id


def _answer(step: HostedStep, *, is_reply: bool) -> dict[str, Any]:
    if step.reason:
        return {"ok": False, "error": step.error, "reason": step.reason}
    output = {
        "blocks": [{"type": "text", "text": text} for text in step.texts],
        "reward": step.reward,
        "finished": step.done,
        "metadata": {CONTINUES: True} if is_reply and not step.done else None,
    }
    return {"ok": True, "output": output}


def _tool(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
