"""``rollouts run`` and ``--resume``: server, model and folder of a resumed run."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from aiohttp import web
from rich.console import Console

from rollouts import __version__
from rollouts.commands.run import Distribute, launch, recorded_server
from rollouts.commands.stored_target import checked_target, resumed_target, stored_recipe
from rollouts.commands.target import RunTarget
from rollouts.concurrency.deadlines import pauses
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.inference.base import ServerInfo
from rollouts.recipe import Recipe
from rollouts.runs.info import read_info
from rollouts.runs.journal import Journal
from rollouts.runs.run import RunResult
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer
from rollouts.training.config import RolloutConfig
from tests.observability.test_loggers import ListLogger
from tests.stored_runs import edit_info

RECIPE = """
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe

def length(sample):
    return float(len(sample.response))

def recipe(endpoint, *, batch_size: int = 2):
    prompts = [f"question {number}" for number in range(40)]
    sizes = {"batch_size": batch_size, "n_samples_per_prompt": 2, "max_turns": 1, "max_new_tokens": 4}
    return agent_recipe("small", endpoint, CalculatorEnvironment, prompts, reward_fn=length, keep="all", **sizes)
"""

MODEL = str(DEMO_MODEL)


def a_server(model: str = MODEL) -> StubServer:
    """A server that records its requests and reports this model."""
    return StubServer(model_info={"model_path": model, "weight_version": "v1"})


@pytest.fixture
def target(tmp_path: Path) -> RunTarget:
    (tmp_path / "small.py").write_text(RECIPE)
    return RunTarget(recipe=tmp_path / "small.py", batches=1)


LIVES = """
    made = agent_recipe("small", endpoint, CalculatorEnvironment, prompts, reward_fn=length, keep="all", **sizes)
    return attrs.evolve(made, lifetime=life())

@contextlib.asynccontextmanager
async def life():
    place = Path(__file__).with_name("life")
    place.write_text("begun")
    try:
        yield
    finally:
        place.write_text(place.read_text() + " ended")
"""


def write_lives(path: Path) -> None:
    text = RECIPE.replace("\nfrom", "\nimport contextlib\nfrom pathlib import Path\nimport attrs\nfrom", 1)
    path.write_text(text.rpartition("    return agent_recipe")[0] + LIVES)


async def test_the_lifetime_of_a_recipe_is_that_of_its_run(tmp_path: Path) -> None:
    """It begins before the first rollout, and ends after the last."""
    write_lives(tmp_path / "small.py")
    seen: list[str] = []

    async def look(request: Any) -> None:
        seen.append((tmp_path / "life").read_text())

    server = StubServer(model_info={"model_path": MODEL, "weight_version": "v1"}, latency=look)
    async with server:
        await play(RunTarget(recipe=tmp_path / "small.py", batches=1, urls=(server.url,)), tmp_path / "out")
    assert set(seen) == {"begun"}
    assert (tmp_path / "life").read_text() == "begun ended"


async def test_no_lifetime_begins_where_workers_play_the_rollouts(tmp_path: Path) -> None:
    """It would open sandboxes that no rollout takes."""

    @contextlib.asynccontextmanager
    async def distribute(target: RunTarget, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
        yield recipe.config

    write_lives(tmp_path / "small.py")
    async with a_server() as server:
        target = RunTarget(recipe=tmp_path / "small.py", batches=1, urls=(server.url,))
        await play(target, tmp_path / "out", distribute=distribute)
    assert not (tmp_path / "life").exists()


async def play(target: RunTarget, out: Path, **options: Any) -> RunResult:
    result = await launch(target, out, "jsonl", options.pop("overwrite", False), Console(file=io.StringIO()), **options)
    assert result is not None
    assert result.error is None, result.error
    return result


async def resume(out: Path, **fields: Any) -> RunResult:
    """Resume for one more batch, with a command line that contains only ``fields``."""
    batches = int(read_info(out)["batches"]) + 1
    return await play(RunTarget(recipe=None, batches=batches, **fields), out, resume=True)


def without_urls(info: dict[str, Any]) -> None:
    """Turn ``run.json`` into that of an earlier version."""
    del info["command"]["endpoint"]
    del info["vocab_size"]


async def test_a_recipe_that_cannot_be_recorded_deletes_no_old_run(tmp_path: Path) -> None:
    """Also with ``--overwrite``; no server is asked. The rollouts of an endpoint with adapters are not recorded."""
    (tmp_path / "small.py").write_text(RECIPE.replace("**sizes", '**sizes, lora="family"'))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    target = RunTarget(recipe=tmp_path / "small.py", urls=("http://127.0.0.1:9",), model=MODEL)
    with pytest.raises(ConfigError, match="--record: got 'family'; expected an endpoint without lora"):
        await play(target, tmp_path / "old", record=True, overwrite=True)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["run.json"]


# -- the server of a resumed run --


async def test_a_resumed_run_uses_its_stored_servers(target: RunTarget, tmp_path: Path) -> None:
    """All of them, without ``--endpoint``; no engine is started."""
    async with a_server() as one, a_server() as other:
        await play(attrs.evolve(target, urls=(one.url, other.url), batches=3), tmp_path / "run")
        assert read_info(tmp_path / "run")["command"]["endpoint"] == [one.url, other.url]
        before = len(one.requests), len(other.requests)
        assert resumed_target(RunTarget(recipe=None), tmp_path / "run").urls == (one.url, other.url)
        await resume(tmp_path / "run")
        assert len(one.requests) + len(other.requests) > sum(before)
    assert not (tmp_path / "run" / "engine.log").exists()


async def test_an_endpoint_on_the_command_line_replaces_the_stored_one(target: RunTarget, tmp_path: Path) -> None:
    """Only the new server gets requests, and the next resume uses it again."""
    async with a_server() as one, a_server() as other:
        await play(attrs.evolve(target, urls=(one.url,)), tmp_path / "run")
        before = len(one.requests)
        await resume(tmp_path / "run", urls=(other.url,))
        first = len(other.requests)
        await resume(tmp_path / "run")
        assert (len(one.requests), before) == (before, before)
        assert 0 < first < len(other.requests)
    info = read_info(tmp_path / "run")
    assert info["endpoint"]["base_url"] == info["command"]["endpoint"] == [other.url]


async def test_a_run_of_an_earlier_version_resumes_at_its_endpoint(target: RunTarget, tmp_path: Path) -> None:
    """Its command contains no URLs; those of its endpoint are used, even if the folder contains an engine's log."""
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,)), tmp_path / "run")
        edit_info(tmp_path / "run", without_urls)
        before = len(server.requests)
        await resume(tmp_path / "run")
        assert len(server.requests) > before
        (tmp_path / "run" / "engine.log").touch()
        edit_info(tmp_path / "run", lambda info: (without_urls(info), info["endpoint"].update(model="Qwen/Qwen3-8B")))
        assert resumed_target(RunTarget(recipe=None), tmp_path / "run").urls == (server.url,)


async def test_an_embedded_run_of_an_earlier_version_stays_embedded(target: RunTarget, tmp_path: Path) -> None:
    """Its endpoint is the URL of its old engine: the engine's log and the model show that."""
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,)), tmp_path / "run")
    edit_info(tmp_path / "run", without_urls)
    (tmp_path / "run" / "engine.log").touch()
    assert resumed_target(RunTarget(recipe=None), tmp_path / "run").urls == ()
    edit_info(tmp_path / "run", lambda info: info["endpoint"].update(base_url=["http://host:30000"]))
    assert resumed_target(RunTarget(recipe=None), tmp_path / "run").urls == ("http://host:30000",)


class LeavingServer(StubServer):
    """Listens until it has described itself twice: for the model of a resumed run, and in preflight."""

    async def _models(self, request: web.Request) -> web.Response:
        response = await super()._models(request)
        if self.asked.count(request.path) == 2:
            for site in list(self._runner.sites):
                await site.stop()
        return response


def test_a_resumed_run_waits_for_a_server_that_dies_after_preflight(target: RunTarget, tmp_path: Path) -> None:
    """In a new process, whose first rollouts ask for the description again: no prompt is lost."""
    info = {"model_path": MODEL, "weight_version": "v1"}
    results: list[RunResult] = []

    async def begin() -> int:
        async with a_server() as server:
            await play(attrs.evolve(target, urls=(server.url,), model=MODEL), tmp_path / "run")
        return int(server.url.rpartition(":")[2])

    async def resumed() -> None:
        results.append(await resume(tmp_path / "run"))

    async def resume_without_server() -> None:
        async with anyio.create_task_group() as tasks:
            async with LeavingServer(model_info=info, port=port) as leaving:
                tasks.start_soon(resumed)
                while not pauses():  # noqa: ASYNC110 - the first rollouts find no server
                    await anyio.sleep(0.01)
            assert not leaving.requests
            async with StubServer(model_info=info, port=port):
                while not results:  # noqa: ASYNC110 - the rollouts find the server
                    await anyio.sleep(0.01)

    port = anyio.run(begin)
    anyio.run(resume_without_server)
    assert (results[0].accounting.in_batch, results[0].accounting.failed) == (4, 0)
    results[0].accounting.check()
    assert verify_run(tmp_path / "run").ok


async def test_a_server_that_is_gone_is_named(target: RunTarget, tmp_path: Path) -> None:
    """A run never moves to another server because its own does not answer."""
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,)), tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(EndpointUnavailable, match=f"no server answers at {server.url}"):
        await resume(tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_bytes() == before


@pytest.mark.parametrize("given", ["again", "stored"])
@pytest.mark.parametrize("model", [None, MODEL])
async def test_a_server_of_another_model_is_refused(
    target: RunTarget, tmp_path: Path, given: str, model: str | None
) -> None:
    """The error comes before a token request and before the folder changes, with --model and without."""
    async with a_server() as server, a_server("Qwen/Qwen3-8B") as other:
        await play(attrs.evolve(target, urls=(server.url,), model=model), tmp_path / "run")
        urls = (other.url,) if given == "again" else ()
        if given == "stored":
            edit_info(tmp_path / "run", lambda info: info["command"].update(endpoint=[other.url]))
        before = (tmp_path / "run" / "run.json").read_bytes()
        words = rf"--resume, server\.model: got 'Qwen/Qwen3-8B' at {other.url}; expected '{MODEL}'"
        with pytest.raises(ConfigError, match=words):
            await resume(tmp_path / "run", urls=urls)
        assert other.requests == []
    assert (tmp_path / "run" / "run.json").read_bytes() == before


async def test_a_server_that_no_longer_names_its_model_is_refused(target: RunTarget, tmp_path: Path) -> None:
    """A model that cannot be compared is not accepted."""
    async with a_server() as server, StubServer(model_info={"weight_version": "v1"}) as silent:
        await play(attrs.evolve(target, urls=(server.url,), model=MODEL), tmp_path / "run")
        with pytest.raises(ConfigError, match=r"--resume, server\.model: got None at .*; expected '"):
            await resume(tmp_path / "run", urls=(silent.url,))


async def test_an_embedded_run_does_not_resume_with_another_model(target: RunTarget, tmp_path: Path) -> None:
    """Refused before the engine is started."""
    async with a_server("/models/first") as server:
        await play(attrs.evolve(target, urls=(server.url,), model=MODEL), tmp_path / "run")
    edit_info(tmp_path / "run", lambda info: info["command"].update(endpoint=[], model=None))
    words = rf"--resume, server\.model: got '{MODEL}' in the embedded engine; expected '/models/first'"
    for model in (None, MODEL):
        with pytest.raises(ConfigError, match=words):
            await resume(tmp_path / "run", model=model)
    assert not (tmp_path / "run" / "engine.log").exists()


async def test_an_embedded_run_with_other_settings_starts_no_engine(target: RunTarget, tmp_path: Path) -> None:
    """Options, recipe and packages are compared first; the journal is newer than run.json."""
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,), model=MODEL), tmp_path / "run")
    edit_info(tmp_path / "run", lambda info: info["command"].update(endpoint=[], model=None))
    with pytest.raises(ConfigError, match=r"--resume, settings: options\.batch_size: got '3'; expected None"):
        await resume(tmp_path / "run", options={"batch_size": "3"})
    assert target.recipe is not None
    target.recipe.write_text(RECIPE + "# another\n")
    with pytest.raises(ConfigError, match=r"--resume, settings: recipe\.text: got '[0-9a-f]{8}'"):
        await resume(tmp_path / "run")
    assert not (tmp_path / "run" / "engine.log").exists()
    target.recipe.write_text(RECIPE)
    edit_info(tmp_path / "run", lambda info: info["settings"]["versions"].update(attrs="0.1"))
    assert checked_target(RunTarget(recipe=None), tmp_path / "run", allow_changes=False).recipe == target.recipe


async def test_an_embedded_run_does_not_resume_with_other_weights(target: RunTarget, tmp_path: Path) -> None:
    """The weights in the folder have changed; a copy of the same weights elsewhere is the same model."""
    model = tmp_path / "first"
    shutil.copytree(DEMO_MODEL, model)
    await play(attrs.evolve(target, model=str(model)), tmp_path / "run")
    model.rename(tmp_path / "second")
    result = await launch(
        RunTarget(recipe=None, model=str(tmp_path / "second"), batches=2),
        tmp_path / "run",
        "jsonl",
        False,
        Console(file=io.StringIO()),
        resume=True,
    )
    assert result is not None
    assert result.error is None
    weights = tmp_path / "second" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ConfigError, match=r"--resume, weights: got [0-9a-f]{8} in .*second; expected [0-9a-f]{8}"):
        await resume(tmp_path / "run")


async def test_another_vocabulary_is_refused(target: RunTarget, tmp_path: Path) -> None:
    """With a tokenizer of another size the same ids would have another meaning."""
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,)), tmp_path / "run")
        assert read_info(tmp_path / "run")["vocab_size"] == 509
        edit_info(tmp_path / "run", lambda info: info.update(vocab_size=151_936))
        before = len(server.requests)
        with pytest.raises(ConfigError, match="--resume, vocab_size: got 509; expected 151936"):
            await resume(tmp_path / "run")
        assert len(server.requests) == before


async def test_a_password_of_a_url_is_required_again(target: RunTarget, tmp_path: Path) -> None:
    """It is not stored, so the run does not resume without it."""
    async with a_server() as server:
        url = server.url.replace("//", "//me:secret@")
        await play(attrs.evolve(target, urls=(url,)), tmp_path / "run")
        assert b"secret" not in (tmp_path / "run" / "run.json").read_bytes()
        before = len(server.requests)
        with pytest.raises(ConfigError, match=r"--endpoint: got .*; expected the URL with its user name and password"):
            await resume(tmp_path / "run")
        assert len(server.requests) == before
        await resume(tmp_path / "run", urls=(url,))
        assert len(server.requests) > before
        resumed = resumed_target(RunTarget(recipe=None), tmp_path / "run")
        assert stored_recipe(resumed, tmp_path / "run").endpoint.base_url == (server.url,), "a replay needs no server"


async def test_workers_of_a_resumed_run_use_its_endpoint(target: RunTarget, tmp_path: Path) -> None:
    """The recipe that workers play has the stored servers."""
    aimed_at: list[tuple[str, ...]] = []

    @contextlib.asynccontextmanager
    async def elsewhere(target: RunTarget, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
        assert target.recipe == tmp_path / "small.py"
        aimed_at.append(recipe.endpoint.base_url)
        yield recipe.config

    distribute: Distribute = elsewhere
    async with a_server() as server:
        await play(attrs.evolve(target, urls=(server.url,)), tmp_path / "run")
        await play(RunTarget(recipe=None, batches=2), tmp_path / "run", resume=True, distribute=distribute)
        assert aimed_at == [(server.url,)]


# -- a run that is being written --


@pytest.mark.parametrize("option", ["--out", "--resume"])
async def test_a_live_run_is_left_alone(target: RunTarget, tmp_path: Path, option: str) -> None:
    """It is neither replaced nor resumed: the error comes before a request and before an engine's log is written."""
    async with a_server() as server:
        target = attrs.evolve(target, urls=(server.url,))
        await play(target, tmp_path / "run")
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        asked = len(server.asked)
        how = {"resume": True} if option == "--resume" else {"overwrite": True}
        with (
            Journal(tmp_path / "run" / "journal"),
            pytest.raises(ConfigError, match=f"{option}: got .*; expected a run that no other process is writing to"),
        ):
            await play(attrs.evolve(target, batches=2), tmp_path / "run", **how)
        assert len(server.asked) == asked
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


# -- what a run prints --


def test_a_run_says_what_it_does_before_its_first_batch(target: RunTarget, tmp_path: Path) -> None:
    """Server, preflight, rehearsal, then the sizes; a line for the batch; with --quiet nothing."""
    console = Console(file=io.StringIO(), width=80)
    quiet = Console(file=io.StringIO())

    async def both() -> None:
        async with a_server() as server:
            here = attrs.evolve(target, urls=(server.url,))
            assert await launch(here, tmp_path / "run", "jsonl", False, console)
            assert await launch(here, tmp_path / "quiet", "jsonl", False, quiet, quiet=True)

    anyio.run(both)
    assert isinstance(console.file, io.StringIO)
    assert isinstance(quiet.file, io.StringIO)
    text = console.file.getvalue()
    parts = [
        "server: asking http://127.0.0.1:",
        "preflight: environment, chat template and server",
        "server: SGLang ",
        "rehearsal: an episode with random replies",
        "run: small, batch 0 of 2 groups of 2 rollouts, in ",
        "batch 0: reward ",
        "finished after ",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert quiet.file.getvalue() == ""


async def test_the_engine_of_an_embedded_run_is_recorded_as_embedded(target: RunTarget, tmp_path: Path) -> None:
    """Its version is not that of a real SGLang server."""
    server = ServerInfo(version="0.5.23", model=MODEL)
    async with a_server() as stub:
        await play(attrs.evolve(target, urls=(stub.url,)), tmp_path / "run")
        assert not str(read_info(tmp_path / "run")["server"]["version"]).startswith("embedded")
    assert recorded_server(target, server)["version"] == f"embedded {__version__} (protocol of SGLang 0.5.23)"
    described = attrs.evolve(server, version="0.5.23 (protocol of the embedded engine)")
    assert recorded_server(target, described) == recorded_server(target, server)
    assert recorded_server(attrs.evolve(target, urls=("http://host",)), server)["version"] == "0.5.23"


async def test_a_resumed_run_continues_at_its_loggers(target: RunTarget, tmp_path: Path) -> None:
    """Both processes give a logger the same id, and the second one its own first batch."""
    first, second = ListLogger(), ListLogger()
    async with a_server() as server:
        target = attrs.evolve(target, urls=(server.url,))
        await play(target, tmp_path / "run", loggers=[first])
        await play(attrs.evolve(target, batches=2), tmp_path / "run", resume=True, loggers=[second])
    assert first.run is not None
    assert second.run is not None
    assert (first.run.id, first.run.first_step, [*first.numbers]) == (second.run.id, 0, [0])
    assert (second.run.first_step, [*second.numbers]) == (1, [1])
