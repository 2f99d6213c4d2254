"""The target of a command: a recipe and the server that it uses, opened."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Literal

import anyio.to_thread
import attrs

from rollouts.commands.chat_options import CHAT_PROVIDER, ChatOptions
from rollouts.dtypes import Endpoint, Provider
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import EngineProcess, check_installed, engine_process
from rollouts.errors import ConfigError, without_password
from rollouts.inference.shared import shared_policy
from rollouts.recipe import Recipe
from rollouts.recipe.files import RecipeFunction, build, load_recipe, read_options

__all__ = [
    "ENGINE_LOG",
    "RunTarget",
    "built",
    "make_folder",
    "open_target",
    "weights_checksum",
    "without_secrets",
]

ENGINE_LOG = "engine.log"
"""The file in a run's folder with the output of the embedded engine."""

HIDDEN = "//***@"
"""Replaces the user name and password of a URL in ``run.json``."""


@attrs.frozen(kw_only=True)
class RunTarget:
    """The recipe to run, and its server."""

    recipe: Path | None
    """The recipe file; ``None`` only where a run is resumed."""
    urls: tuple[str, ...] = ()
    """URLs of servers; empty starts the embedded engine."""
    provider: Provider | Literal["openai"] | None = None
    """Protocol of those servers; ``None`` for SGLang."""
    chat: ChatOptions = attrs.field(factory=ChatOptions)
    """Of the provider ``openai``."""
    served: str | None = None
    """The model that the server must report: that of the resumed run."""
    weights: str | None = None
    """The checksum of the weights that the embedded engine must load: that of the resumed run."""
    model: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    batches: int | None = None
    slots: int | None = None


@contextlib.asynccontextmanager
async def open_target(
    target: RunTarget, log: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> AsyncIterator[tuple[Recipe, EngineProcess | None]]:
    """Build the recipe for its server; an embedded engine lives as long as the context.

    Args:
        target: from the command line.
        log: the file for the output of an embedded engine, in the folder of ``--out``; by default a temporary file.
        say: called with the name of each step.

    Raises:
        ConfigError: the recipe or its options are wrong, the model folder does not exist, ``log`` cannot be written,
            the server serves another model than the resumed run's, or a stored URL lacks its password.
        EndpointError: the server does not answer, is not an SGLang server, or did not start.
    """
    if target.recipe is None:
        raise ConfigError.of(
            "RECIPE", None, "a Python file with a function recipe(...), or a name of `rollouts recipes`"
        )
    function = load_recipe(target.recipe)
    read_options(function, target.options)
    if any(HIDDEN in url for url in target.urls):
        option = "--base-url" if target.provider == CHAT_PROVIDER else "--endpoint"
        expected = f"the URL with its user name and password, which the run does not store: pass {option} again"
        raise ConfigError.of(option, target.urls, expected)
    if target.provider == CHAT_PROVIDER:
        from rollouts.commands.chat_target import built_on_api  # a wing: no other provider loads it

        if target.slots is not None:
            raise ConfigError.of("--slots", target.slots, "none with --provider openai: --at-once limits its requests")
        recipe = built_on_api(function, target.options, target.chat, target.model, target.urls)
        yield _with_batches(recipe, target), None
        return
    key, admin_key = os.environ.get("ROLLOUTS_API_KEY"), os.environ.get("ROLLOUTS_ADMIN_KEY")
    if target.urls:
        endpoint = Endpoint(
            provider=target.provider or "sglang",
            model=target.model or "default",
            base_url=target.urls,
            api_key=key,
            admin_key=admin_key,
        )
        if target.model is None or target.served is not None:
            say(f"server: asking {', '.join(map(without_password, target.urls))} for its model")
            served = (await shared_policy(endpoint).describe()).model
            _check_served(target, served, f"at {', '.join(map(without_password, target.urls))}")
            model = target.model or served
            if model is None:
                raise ConfigError.of("--model", None, "a name or folder: the server does not name its model")
            endpoint = attrs.evolve(endpoint, model=model)
        yield built(function, endpoint, target), None
        return
    if target.provider == "vllm":
        raise ConfigError.of("--provider", target.provider, "--endpoint URL as well: the embedded engine is not vLLM")
    folder = _model_folder(target.model)
    if target.weights is None:
        _check_served(target, str(folder), "in the embedded engine")
    else:
        checksum = await anyio.to_thread.run_sync(weights_checksum, folder)
        if checksum != target.weights:
            expected = f"{target.weights}: a resumed run needs the weights that it began with"
            raise ConfigError(f"--resume, weights: got {checksum} in {folder}; expected {expected}")
    with tempfile.TemporaryDirectory() as logs:
        check_installed()  # before a folder is made
        if log is not None:
            make_folder(log.parent)
        say(f"engine: starting on this machine with the model {folder.name}")
        async with engine_process(folder, log or Path(logs) / ENGINE_LOG, slots=target.slots) as engine:
            yield built(function, Endpoint(model=str(folder), base_url=engine.url), target), engine


def make_folder(path: Path) -> None:
    """Make the folder of ``--out``, if it does not exist.

    Raises:
        ConfigError: it cannot be made, or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError.of("--out", str(path), f"a folder that can be written to ({error})") from error


def _check_served(target: RunTarget, model: str | None, where: str) -> None:
    if target.served is not None and model != target.served:
        expected = f"{target.served!r}: a resumed run needs the model that it began with"
        raise ConfigError(f"--resume, server.model: got {model!r} {where}; expected {expected}")


def weights_checksum(folder: Path) -> str:
    """The CRC-32 of the weight files of a model folder (``*.safetensors``, ``*.bin``); their path does not matter."""
    crc = 0
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")):
        with file.open("rb") as data:
            while block := data.read(1 << 22):
                crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _model_folder(named: str | None) -> Path:
    """The model folder as an absolute path: a run stores it as the name of its tokenizer."""
    folder = DEMO_MODEL if named is None else Path(named).resolve()
    if not folder.is_dir():
        raise ConfigError.of("--model", str(folder), "a folder with a model, or --endpoint URL of a server that has it")
    return folder


def built(function: RecipeFunction, endpoint: Endpoint, target: RunTarget) -> Recipe:
    """The recipe of a target for this endpoint."""
    return _with_batches(build(function, endpoint, target.options), target)


def _with_batches(recipe: Recipe, target: RunTarget) -> Recipe:
    """The recipe with the number of batches of the command line."""
    return recipe if target.batches is None else attrs.evolve(recipe, batches=target.batches)


def without_secrets(url: str) -> str:
    """A URL as ``run.json`` stores it: a mark replaces the user name and password."""
    bare = without_password(url)
    return url if bare == url else bare.replace("//", HIDDEN, 1)
