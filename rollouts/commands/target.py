"""What a command runs: the recipe and the server that it is aimed at."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs

from rollouts.dtypes import Endpoint, without_password
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import EngineProcess, engine_process
from rollouts.errors import ConfigError
from rollouts.inference.sglang import shared_policy
from rollouts.recipe import Recipe
from rollouts.recipe_files import RecipeFunction, build, load_recipe, read_options
from rollouts.runs.folder import read_info

__all__ = [
    "ENGINE_LOG",
    "RunTarget",
    "open_target",
    "resumed_target",
    "stored_recipe",
    "weights_checksum",
    "without_secrets",
]

ENGINE_LOG = "engine.log"
"""The file in the folder of a run that holds the output of an embedded engine."""

DEMO_WEIGHTS_0_1 = "9b402ec7"
"""The checksum of the demo model of 0.1.0: runs of that version do not have the checksum of their weights."""

_HIDDEN = "//***@"
"""Stands in ``run.json`` where a URL had a user name or a password."""


@attrs.frozen(kw_only=True)
class RunTarget:
    """What to run, against which server."""

    recipe: Path | None
    """Only a run that is resumed may do without."""
    urls: tuple[str, ...] = ()
    """Servers; without one the embedded engine is started."""
    served: str | None = None
    """The model that the server must name: that of the run that goes on."""
    weights: str | None = None
    """The checksum of the weights that the embedded engine must load: those of the run that goes on."""
    model: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    batches: int | None = None
    slots: int | None = None


@contextlib.asynccontextmanager
async def open_target(aim: RunTarget, log: Path | None = None) -> AsyncIterator[tuple[Recipe, EngineProcess | None]]:
    """The recipe, aimed at a server that lives as long as the context.

    Args:
        aim: what the command line said.
        log: where an embedded engine writes what it has to say; by default a temporary file.

    Raises:
        ConfigError: the recipe or its options are wrong, the model folder is not there, the server serves another model
            than the run that goes on has, or a stored URL lacks its password.
        EndpointError: the server does not answer, is no SGLang server, or did not start.
    """
    if aim.recipe is None:
        raise ConfigError.of("RECIPE", None, "a Python file with a function recipe(...)")
    function = load_recipe(aim.recipe)
    read_options(function, aim.options)
    key = os.environ.get("ROLLOUTS_API_KEY")
    if aim.urls:
        if any(_HIDDEN in url for url in aim.urls):
            expected = "the URL with its user name and password, which the run does not keep: give --endpoint again"
            raise ConfigError.of("--endpoint", aim.urls, expected)
        endpoint = Endpoint(model=aim.model or "default", base_url=aim.urls, api_key=key)
        if aim.model is None or aim.served is not None:
            named = (await shared_policy(endpoint).describe()).model
            _check_served(aim, named, f"at {', '.join(map(without_password, aim.urls))}")
            model = aim.model or named
            if model is None:
                raise ConfigError.of("--model", None, "a name or folder: the server does not name its model")
            endpoint = attrs.evolve(endpoint, model=model)
        yield _built(function, endpoint, aim), None
        return
    folder = _model_folder(aim.model)
    if aim.weights is None:
        _check_served(aim, str(folder), "in the embedded engine")
    else:
        found = await anyio.to_thread.run_sync(weights_checksum, folder)
        if found != aim.weights:
            expected = f"{aim.weights}: a run goes on with the weights that it began with"
            raise ConfigError(f"--resume, weights: got {found} in {folder}; expected {expected}")
    with tempfile.TemporaryDirectory() as logs:
        async with engine_process(folder, log or Path(logs) / ENGINE_LOG, slots=aim.slots) as engine:
            yield _built(function, Endpoint(model=str(folder), base_url=engine.url), aim), engine


def _check_served(aim: RunTarget, model: str | None, where: str) -> None:
    if aim.served is not None and model != aim.served:
        expected = f"{aim.served!r}: a run goes on with the model that it began with"
        raise ConfigError(f"--resume, server.model: got {model!r} {where}; expected {expected}")


def weights_checksum(folder: Path) -> str:
    """A checksum of the weights in a model folder: the same for a copy in another place."""
    crc = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            while block := data.read(1 << 22):
                crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _model_folder(named: str | None) -> Path:
    """Absolute, so that the tokenizer that the run names is found from anywhere."""
    folder = DEMO_MODEL if named is None else Path(named).resolve()
    if not folder.is_dir():
        raise ConfigError.of("--model", str(folder), "a folder with a model, or --endpoint URL of a server that has it")
    return folder


def _built(function: RecipeFunction, endpoint: Endpoint, aim: RunTarget) -> Recipe:
    recipe = build(function, endpoint, aim.options)
    return recipe if aim.batches is None else attrs.evolve(recipe, batches=aim.batches)


def resumed_target(aim: RunTarget, run: Path) -> RunTarget:
    """What to do to go on with a run: what the command line says, and where it says nothing, what it said before.

    Raises:
        ConfigError: there is no run, or neither it nor the command line names a recipe.
    """
    info = read_info(run)
    before = info.get("command") or {}
    recipe = aim.recipe or (Path(before["recipe"]) if before.get("recipe") else None)
    if recipe is None:
        raise ConfigError.of("RECIPE", None, f"a recipe file: {run} does not say which it was")
    return attrs.evolve(
        aim,
        recipe=recipe,
        urls=aim.urls or _stored_urls(run, info),
        served=(info.get("server") or {}).get("model"),
        weights=_stored_weights(before, info),
        model=aim.model or before.get("model"),
        options={**before.get("options", {}), **aim.options},
        batches=aim.batches or info.get("batches_wanted"),
        slots=aim.slots or before.get("slots"),
    )


def _stored_weights(before: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    """The checksum of the weights of an embedded run; for runs of 0.1.0 that of its demo model."""
    if before.get("model") is None and "weights" not in before and _is_demo((info.get("server") or {}).get("model")):
        return DEMO_WEIGHTS_0_1
    weights: str | None = before.get("weights")
    return weights


def _is_demo(model: str | None) -> bool:
    """Whether a path is that of a demo model, in whichever installation."""
    return Path(model or "").parts[-3:] == DEMO_MODEL.parts[-3:]


def _stored_urls(run: Path, info: Mapping[str, Any]) -> tuple[str, ...]:
    """The servers of a stored run; none where it had the embedded engine."""
    before, told = info.get("command") or {}, info.get("endpoint") or {}
    if "endpoint" in before:
        return tuple(before["endpoint"])
    # Runs of 0.1.0 have the URL of the embedded engine where others have those of their servers. It was one URL of this
    # machine; the engine left its log, and served the folder that the command named.
    urls = tuple(told.get("base_url") or ())
    folder = DEMO_MODEL if before.get("model") is None else Path(before["model"]).resolve()
    local = len(urls) == 1 and urls[0].startswith("http://127.0.0.1:")
    named = told.get("model")
    of_the_engine = named == str(folder) or (folder == DEMO_MODEL and _is_demo(named))
    embedded = local and (run / ENGINE_LOG).exists() and of_the_engine
    return () if embedded else urls


def stored_recipe(aim: RunTarget, run: Path) -> Recipe:
    """The recipe, aimed at the server that a stored run had; nobody asks whether it is there.

    Raises:
        ConfigError: there is no run, or the recipe or its options are wrong.
    """
    if aim.recipe is None:
        raise ConfigError.of("--recipe", None, "a Python file with a function recipe(...)")
    told = read_info(run).get("endpoint") or {}
    endpoint = Endpoint(model=aim.model or told.get("model") or "default")
    if told.get("base_url"):
        endpoint = attrs.evolve(endpoint, base_url=tuple(told["base_url"]))
    return _built(load_recipe(aim.recipe), endpoint, aim)


def without_secrets(url: str) -> str:
    """A URL as ``run.json`` may hold it: without user name and password, and with a mark where they were."""
    bare = without_password(url)
    return url if bare == url else bare.replace("//", _HIDDEN, 1)
