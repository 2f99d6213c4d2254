"""Weight updates of running servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import anyio.lowlevel

from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.inference.prefixes import Namespaces, isolated
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.testing.server import StubServer
from tests.engine_requests import until_it_samples

PROMPT = packed_tokens(range(1, 30))


def endpoint_at(url: str) -> Endpoint:
    return Endpoint(base_url=url, sampling=SamplingParams(max_new_tokens=400))


LONG = SamplingParams(max_new_tokens=900, temperature=3.0)


async def long_reply(policy: SGLangPolicy) -> Completion:
    """Sample a long reply."""
    return await policy.complete(CompletionRequest(PROMPT, LONG, session="one"))


async def test_later_tokens_carry_the_new_version() -> None:
    """And the server reports it."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        await update_weights(endpoint_at(url), DEMO_MODEL, "7")
        assert (await policy.describe()).weight_version == "7"
        completion = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3)))
        assert {span.version for span in completion.versions} == {"7"}


@pytest.mark.parametrize("while_running", ["retract", "in_place", "wait", "abort"])
async def test_no_server_is_left_paused(while_running: WhileRunning) -> None:
    """In every mode the next request is answered."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_reply, policy)
            await anyio.lowlevel.checkpoint()
            await update_weights(endpoint_at(url), DEMO_MODEL, "1", while_running=while_running)
        completion = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3)))
        assert {span.version for span in completion.versions} == {"1"}


async def test_weights_that_do_not_load_are_refused(tmp_path: Path) -> None:
    """The server continues with the old ones and is not left paused."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        with pytest.raises(EndpointRefused, match="update_weights_from_disk"):
            await update_weights(endpoint_at(url), tmp_path, "1", while_running="retract")
        completion = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3)))
        assert {span.version for span in completion.versions} == {"default"}


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """The message contains its URL."""
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1"):
        await update_weights(Endpoint(base_url="http://127.0.0.1:9"), DEMO_MODEL, "1")


async def test_an_unknown_while_running_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="while_running"):
        await update_weights(Endpoint(), DEMO_MODEL, "1", while_running="hope")  # type: ignore[arg-type]


# -- a busy server ----------------------------------------------------------------------------------------------------

UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued."
    " Retract or finish them, then call /flush_cache."
)


@attrs.define
class Busy:
    """The control routes of a server on which requests always run: a flush needs a pause that retracts them."""

    update: Any = attrs.field(factory=lambda: {"success": True, "message": "Succeeded to update model weights."})
    """Response to an update."""
    reports_version: bool = True
    """Whether it takes and reports the version of an update."""
    flushes: bool = True
    """Whether a flush succeeds under such a pause."""
    continues: list[Any] = attrs.field(factory=list)
    """First responses of ``/continue_generation``, without a continue."""
    http_workers: int = 1
    """Processes that take connections in turn. Each stores the versions that it was sent itself, and learns of a pause
    by another only later; until then it waits for its requests, which the pause holds, before it loads."""
    mode: str | None = None
    version: str = "0"
    """That of the scheduler, which replies have."""
    flushed: bool = False
    calls: list[str] = attrs.field(factory=list)
    stored: dict[int, str] = attrs.field(factory=dict)
    """The versions that the HTTP workers store."""
    worker: int = 0
    """The HTTP worker that answers the present request."""
    paused: int | None = None
    """The HTTP worker that was asked for the present pause."""
    ports: list[int] = attrs.field(factory=list)
    """Those of the connections so far."""

    def __call__(self, request: Asked) -> Any:
        self.calls.append(request.path.removeprefix("/").replace("/", "_"))
        if request.port not in self.ports:
            self.ports.append(request.port)
        self.worker = self.ports.index(request.port) % self.http_workers
        return getattr(self, self.calls[-1])(request.body)

    def pause_generation(self, body: Any) -> Any:
        self.mode, self.paused = body["mode"], self.worker
        return {"status": "ok"}

    def continue_generation(self, body: Any) -> Any:
        if self.continues:
            return self.continues.pop(0)
        self.mode = None
        return {"status": "ok"}

    def update_weights_from_disk(self, body: Any) -> Any:
        if self.mode is not None and self.worker != self.paused:
            return None
        if self.reports_version and isinstance(self.update, dict) and self.update["success"]:
            self.version = self.stored[self.worker] = body["weight_version"]
        return self.update

    def flush_cache(self, body: Any) -> Any:
        self.flushed = self.flushes and self.mode in ("retract", "abort")
        return (200, b"Cache flushed.\n") if self.flushed else (400, b"Flush cache failed.\n")

    def update_weight_version(self, body: Any) -> Any:
        assert body["abort_all_requests"] is False
        self.version = self.stored[self.worker] = body["new_version"]
        return {"success": True}

    def workers(self, body: Any) -> Any:
        return 404, b""

    def model_info(self, body: Any) -> Any:
        return {"model_path": "model", "weight_version": self.stored.get(self.worker, "0")}

    def server_info(self, body: Any) -> Any:
        return {"tokenizer_worker_num": self.http_workers}

    def v1_models(self, body: Any) -> Any:
        return {"data": []}

    def generate(self, body: Any) -> Any:
        spans = [{"version": self.version, "start": 0, "end": 1}]
        meta = {"finish_reason": {"type": "length", "length": 1}, "weight_versions": spans}
        return {"output_ids": [1], "meta_info": {**meta, "weight_version": self.stored.get(self.worker, "0")}}


async def cached(policy: SGLangPolicy) -> int:
    """Return the number of cached prompt tokens of a new conversation."""
    return (await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3)))).cached_tokens


async def test_by_default_running_requests_are_prefilled_again_under_the_new_weights() -> None:
    """One reply has both versions, and the update does not wait for its end."""
    async with running_server(DEMO_MODEL, unflushed_updates=True) as url, SGLangPolicy(endpoint_at(url)) as policy:
        replies: list[Completion] = []

        async def reply() -> None:
            replies.append(await long_reply(policy))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reply)
            await until_it_samples(policy, LONG)
            await update_weights(endpoint_at(url), DEMO_MODEL, "1")
            assert not replies
        assert [span.version for span in replies[0].versions] == ["default", "1"]


async def test_an_unflushed_cache_is_flushed_after_the_update() -> None:
    """SGLang's 400 "Weights were updated, but the cache was not flushed" is not a refusal."""
    async with running_server(DEMO_MODEL, unflushed_updates=True) as url, SGLangPolicy(endpoint_at(url)) as policy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_reply, policy)
            await until_it_samples(policy, LONG)
            await update_weights(endpoint_at(url), DEMO_MODEL, "1", while_running="wait")
        assert (await policy.describe()).weight_version == "1"
        assert await cached(policy) == 0


@pytest.mark.parametrize("while_running", ["retract", "wait", "abort"])
@pytest.mark.parametrize("reported", ["flushed", "not flushed"])
async def test_the_cache_is_flushed_whatever_the_server_reports(while_running: WhileRunning, reported: str) -> None:
    """In a pause, and checked: servers before 0.5.22 do not report a failed flush."""
    server = Busy() if reported == "flushed" else Busy((400, {"success": False, "message": UNFLUSHED}))
    async with JsonServer(server) as listening:
        await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1", while_running=while_running)
    assert (server.flushed, server.version, server.mode) == (True, "1", None)
    assert server.calls.index("flush_cache") > server.calls.index("update_weights_from_disk")
    if while_running in ("retract", "abort"):  # no request may start between the new weights and the flush
        assert "continue_generation" not in server.calls[: server.calls.index("flush_cache")]


async def test_a_cache_that_cannot_be_flushed_is_an_error() -> None:
    """The message: the weights are new, the cache is old, and the fix. The server is not paused."""
    server = Busy((400, {"success": False, "message": UNFLUSHED}), flushes=False)
    async with JsonServer(server) as listening:
        with pytest.raises(EndpointUnavailable) as caught:
            await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1", while_running="wait", seconds=0.5)
    text = str(caught.value)
    assert f"{listening.url} has the weights '1'" in text
    assert "its prefix cache contains K/V of the old weights" in text
    assert "call update_weights again" in text
    assert "old ones" not in text
    assert server.mode is None


async def test_a_200_without_success_is_refused() -> None:
    """The weights are the old ones; the message quotes the server."""
    server = Busy({"success": False, "message": "Failed to get weights iterator: nothing there."})
    async with JsonServer(server) as listening:
        with pytest.raises(EndpointRefused, match=r"nothing there.*keeps the weights that it had"):
            await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")
    assert server.mode is None
    assert "flush_cache" not in server.calls


async def test_a_server_that_reports_another_version_is_an_error() -> None:
    """The reported version is checked after the update."""
    server = Busy(reports_version=False)
    async with JsonServer(server) as listening:
        with pytest.raises(EndpointRefused, match="weight_version '0'; expected '1'"):
            await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")


@pytest.mark.parametrize("while_running", ["retract", "wait", "abort", "in_place"])
@pytest.mark.parametrize("http_workers", [2, 3])
async def test_a_server_with_several_http_workers_is_updated(while_running: WhileRunning, http_workers: int) -> None:
    """SGLang stores the version in each HTTP worker: a reply names that of the scheduler, 20 times of 20."""
    server = Busy(http_workers=http_workers)
    async with JsonServer(server) as listening:
        for number in range(1, 21):
            await update_weights(
                endpoint_at(listening.url), DEMO_MODEL, f"v{number}", while_running=while_running, seconds=20.0
            )
    assert (server.version, server.mode) == ("v20", None)


async def test_a_reply_of_several_http_workers_shows_other_weights() -> None:
    """Where the scheduler did not take the version, the update fails."""
    server = Busy(http_workers=2, reports_version=False)
    async with JsonServer(server) as listening:
        with pytest.raises(EndpointRefused, match="weight_version '0'; expected '1'"):
            await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")


@pytest.mark.parametrize("while_running", ["wait", "abort"])
async def test_several_http_workers_retract_in_every_mode(
    while_running: WhileRunning, caplog: pytest.LogCaptureFixture
) -> None:
    """An HTTP worker waits for its own requests only: those of the others would run on under the new weights."""
    server = Busy(http_workers=2)
    async with JsonServer(server) as listening:
        await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1", while_running=while_running)
    assert server.calls.index("pause_generation") < server.calls.index("update_weights_from_disk")
    assert f"while_running='{while_running}'" in caplog.text
    assert "--tokenizer-worker-num 2" in caplog.text


async def test_several_http_workers_describe_one_version() -> None:
    """A policy sees the version of the scheduler, whichever HTTP worker answers."""
    server = Busy(http_workers=2)
    async with JsonServer(server) as listening, SGLangPolicy(endpoint_at(listening.url)) as policy:
        await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")
        infos = [await policy.describe() for _ in range(4)]
    assert {(info.weight_version, info.http_workers) for info in infos} == {("1", 2)}


async def test_a_continue_that_fails_is_sent_again() -> None:
    """A lost response does not leave a server paused."""
    server = Busy(continues=[(503, b"busy"), (500, b"worse")])
    async with JsonServer(server) as listening:
        await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")
    assert (server.mode, server.flushed) == (None, True)


async def test_an_update_that_is_cancelled_leaves_nothing_paused() -> None:
    """Cancelled while the server loads."""
    server = Busy(update=None)
    async with JsonServer(server) as listening:
        with anyio.move_on_after(0.5):
            await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1")
    assert "update_weights_from_disk" in server.calls
    assert server.mode is None


# -- several servers --------------------------------------------------------------------------------------------------


async def test_a_partial_update_lists_the_servers() -> None:
    """With the weights of each; a refusal by one server does not stop the others."""
    old, new = Busy((400, {"success": False, "message": "Failed to get weights iterator: no space."})), Busy()
    async with JsonServer(old) as first, JsonServer(new) as second:
        with pytest.raises(EndpointRefused, match="1 of 2 servers have the weights '1'") as caught:
            await update_weights(Endpoint(base_url=(first.url, second.url)), DEMO_MODEL, "1")
    assert f"{first.url} keeps the weights that it had" in str(caught.value)
    assert "no space" in str(caught.value)
    assert f"{second.url} has the weights '1'" in str(caught.value)
    assert (new.version, new.flushed, old.version) == ("1", True, "0")
    assert (old.mode, new.mode) == (None, None)


async def test_a_server_that_does_not_answer_delays_no_other() -> None:
    """All are updated concurrently; the weights of the late one are reported as unknown."""
    late, new = Busy(update=None), Busy()
    async with JsonServer(late) as first, JsonServer(new) as second:
        with pytest.raises(EndpointUnavailable, match="1 of 2 servers") as caught:
            await update_weights(Endpoint(base_url=(first.url, second.url)), DEMO_MODEL, "1", seconds=1.0)
    assert f"{first.url} may have the old weights or the new" in str(caught.value)
    assert f"{second.url} has the weights '1'" in str(caught.value)
    assert (late.mode, new.mode) == (None, None)


# -- in place ---------------------------------------------------------------------------------------------------------


async def test_in_place_flushes_an_idle_server() -> None:
    """The next conversation reads no K/V of the old weights."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        await cached(policy)
        assert await cached(policy) > 0
        await update_weights(endpoint_at(url), DEMO_MODEL, "1", while_running="in_place")
        assert await cached(policy) == 0


async def test_in_place_warns_that_new_conversations_read_the_old_cache(caplog: pytest.LogCaptureFixture) -> None:
    """The cache of a busy server is not flushed; the warning contains the server and the version."""
    server = Busy()
    async with JsonServer(server) as listening:
        await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1", while_running="in_place")
    assert f"{listening.url} has the weights '1', but its prefix cache contains K/V of the old weights" in caplog.text
    assert (server.mode, server.version) == (None, "1")


def test_a_conversation_keeps_the_namespace_that_it_began_with() -> None:
    """A conversation that begins during the update has a separate namespace: its first K/V may be of either weights."""
    there, sessions = "http://namespaces", Namespaces()
    assert sessions.of("before", there) == ""
    with isolated([there], "1"):
        during = sessions.of("during", there)
        assert len({during, sessions.of("also during", there), "", "1"}) == 4
        assert sessions.of("before", there) == ""
    first = sessions.of("after", there)
    assert first.startswith("1 ")
    assert [sessions.of(name, there) for name in ("before", "during", "also after", "")] == ["", during, first, first]
    with isolated([there], "2"):
        pass
    second = sessions.of("later", there)
    assert second.startswith("2 ")
    assert [sessions.of(name, there) for name in ("before", "after", "")] == ["", first, second]


async def test_new_conversations_after_an_update_in_place_read_no_old_cache() -> None:
    """Although the server is busy and cannot flush: their requests have a new ``extra_key``."""
    async with StubServer() as stub, SGLangPolicy(endpoint_at(stub.url)) as policy:
        server = Busy()
        async with JsonServer(server) as listening:
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3), session="old"))
            with isolated([stub.url], "1"):
                await update_weights(endpoint_at(listening.url), DEMO_MODEL, "1", while_running="in_place")
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3), session="old"))
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3), session="new"))
        keys = [request.body.get("extra_key") for request in stub.requests]
        assert keys[:2] == [None, None]
        assert keys[2].startswith("1 ")
        async with SGLangPolicy(endpoint_at(listening.url)) as updated:
            assert updated._namespaces.of("new", listening.url).startswith("1 ")


async def test_new_conversations_after_an_update_by_another_process_read_no_old_cache() -> None:
    """The client sees the other version in replies, also when it is an earlier one again, whose conversations continued
    under later weights; conversations that began before keep their prefix."""
    info = {"model_path": "stub"}
    async with StubServer(model_info=info) as stub, SGLangPolicy(endpoint_at(stub.url)) as policy:

        async def key_of(session: str) -> str | None:
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3), session=session))
            return stub.requests[-1].body.get("extra_key")

        began = []
        for version in ("v1", "v2", "v1", "v2"):
            info["weight_version"] = version
            assert await key_of("old") is None
            began.append(await key_of(f"new {len(began)}"))
            assert await key_of(f"also new {len(began)}") == began[-1]
        with isolated([stub.url], "v1"):
            pass
        began.append(await key_of("before the first reply"))
        info["weight_version"] = "v1"
        await key_of("old")
        assert await key_of("after the first reply") == began[-1]
    assert began[0] is None
    assert [key.partition(" ")[0] for key in began[1:]] == ["v2", "v1", "v2", "v1"]
    assert len(set(began)) == 5


# -- routers and keys -------------------------------------------------------------------------------------------------


async def test_a_router_is_updated_through_its_workers() -> None:
    """It lacks control routes; all its workers are updated and checked."""
    one, two = Busy(), Busy()
    async with JsonServer(one) as first, JsonServer(two) as second:
        async with StubServer(workers=[first.url, second.url]) as router:
            await update_weights(endpoint_at(router.url), DEMO_MODEL, "1")
    for worker in (one, two):
        assert (worker.version, worker.flushed, worker.mode) == ("1", True, None)


async def test_control_routes_get_the_admin_key() -> None:
    """The description, as generation, gets the other: a server with both refuses the admin key there."""
    server = Busy()
    keys: dict[str, str | None] = {}

    def answer(request: Asked) -> Any:
        keys[request.path] = request.headers.get("Authorization")
        return server(request)

    async with JsonServer(answer) as listening:
        endpoint = Endpoint(base_url=listening.url, api_key="user", admin_key="root")
        await update_weights(endpoint, DEMO_MODEL, "1")
    for path in ("/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"):
        assert keys[path] == "Bearer root"
    assert keys["/model_info"] == "Bearer user"
    assert "root" not in repr(endpoint)
