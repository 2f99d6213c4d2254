"""The target of a command: a recipe and the server that it uses, opened or read from a stored run."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
import attrs

from rollouts.commands.chat_options import CHAT_PROVIDER, ChatOptions
from rollouts.dtypes import Endpoint, Provider, without_password
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import EngineProcess, check_installed, engine_process
from rollouts.errors import ConfigError
from rollouts.inference.shared import shared_policy
from rollouts.recipe import Recipe
from rollouts.recipe_files import RecipeFunction, build, load_recipe, read_options
from rollouts.runs.folder import JOURNAL, read_info
from rollouts.runs.reading import reading

__all__ = [
    "ENGINE_LOG",
    "RunTarget",
    "make_folder",
    "open_target",
    "resumed_target",
    "stored_recipe",
    "weights_checksum",
    "without_secrets",
]

ENGINE_LOG = "engine.log"
"""The file in a run's folder with the output of the embedded engine."""

DEMO_WEIGHTS_0_1 = "9b402ec7"
"""The checksum of the demo model of 0.1.0: runs of that version do not store the checksum of their weights."""

_HIDDEN = "//***@"
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
    if any(_HIDDEN in url for url in target.urls):
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
        yield _built(function, endpoint, target), None
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
            yield _built(function, Endpoint(model=str(folder), base_url=engine.url), target), engine


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


def _built(function: RecipeFunction, endpoint: Endpoint, target: RunTarget) -> Recipe:
    return _with_batches(build(function, endpoint, target.options), target)


def _with_batches(recipe: Recipe, target: RunTarget) -> Recipe:
    """The recipe with the number of batches of the command line."""
    return recipe if target.batches is None else attrs.evolve(recipe, batches=target.batches)


def resumed_target(target: RunTarget, run: Path, *, allow_changes: bool = False) -> RunTarget:
    """The target of a resumed run: that of the command line, its empty fields filled from ``run.json``.

    With ``allow_changes`` the server may have another model: the comparison of the settings records it.

    Raises:
        ConfigError: the run does not exist or cannot be read, or neither it nor the command line names a recipe.
    """
    with reading(run / "run.json"):
        return _resumed(target, run, read_info(run), allow_changes)


def _resumed(target: RunTarget, run: Path, info: Mapping[str, Any], allow_changes: bool) -> RunTarget:
    before = info.get("command") or {}
    provider = target.provider or (info.get("endpoint") or {}).get("provider")
    stored = (info.get("endpoint") or {}).get("provider")
    if (provider == CHAT_PROVIDER) is not (stored == CHAT_PROVIDER):
        raise ConfigError.of("--provider", provider, f"{stored}: a run has token ids, or text of a chat API")
    if provider != CHAT_PROVIDER and target.chat != ChatOptions():
        raise ConfigError.of("--resume", str(run), "a run with --provider openai, whose options these are")
    recipe = target.recipe or (Path(before["recipe"]) if before.get("recipe") else None)
    if recipe is None:
        if not (run / JOURNAL).is_dir():
            raise ConfigError.of("--resume", str(run), "a run with a journal; a run of Python has one by run_in(...)")
        raise ConfigError.of("RECIPE", None, f"a recipe file: {run} does not store its recipe, as a run of Python")
    return attrs.evolve(
        target,
        recipe=recipe,
        urls=target.urls or _stored_urls(run, info),
        provider=provider,
        served=None if allow_changes else (info.get("server") or {}).get("model"),
        weights=None if allow_changes else _stored_weights(before, info),
        model=target.model or before.get("model"),
        options={**before.get("options", {}), **target.options},
        batches=target.batches or info.get("batches_wanted"),
        slots=target.slots or before.get("slots"),
        chat=_resumed_chat(target.chat, before.get("chat") or {}),
    )


def _resumed_chat(given: ChatOptions, before: Mapping[str, Any]) -> ChatOptions:
    """The options of a chat API: those of the command line, the others from the run. A budget is of one command."""
    fields = attrs.asdict(given)
    stored = {name: value for name, value in before.items() if name in fields and not fields[name]}
    return attrs.evolve(given, **{**stored, "body": given.body or tuple(before.get("body") or ())})


def _stored_weights(before: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    """The checksum of the weights of an embedded run; for runs of 0.1.0 that of the demo model."""
    if before.get("model") is None and "weights" not in before and _is_demo((info.get("server") or {}).get("model")):
        return DEMO_WEIGHTS_0_1
    weights: str | None = before.get("weights")
    return weights


def _is_demo(model: str | None) -> bool:
    """Whether a path is that of a demo model, in any installation."""
    return Path(model or "").parts[-3:] == DEMO_MODEL.parts[-3:]


def _stored_urls(run: Path, info: Mapping[str, Any]) -> tuple[str, ...]:
    """The servers of a stored run; none if it used the embedded engine."""
    before, endpoint = info.get("command") or {}, info.get("endpoint") or {}
    if "endpoint" in before:
        return tuple(before["endpoint"])
    # Runs of 0.1.0 store the URL of the embedded engine in the field of server URLs. Such a run is recognised by a
    # single local URL, the engine's log, and the model folder that the command named.
    urls = tuple(endpoint.get("base_url") or ())
    folder = DEMO_MODEL if before.get("model") is None else Path(before["model"]).resolve()
    local = len(urls) == 1 and urls[0].startswith("http://127.0.0.1:")
    model = endpoint.get("model")
    same_model = model == str(folder) or (folder == DEMO_MODEL and _is_demo(model))
    embedded = local and (run / ENGINE_LOG).exists() and same_model
    return () if embedded else urls


def stored_recipe(target: RunTarget, run: Path) -> Recipe:
    """The recipe with the endpoint of a stored run; no request is sent.

    Raises:
        ConfigError: the run does not exist, or the recipe or its options are wrong.
    """
    if target.recipe is None:
        raise ConfigError.of(
            "--recipe", None, "a Python file with a function recipe(...), or a name of `rollouts recipes`"
        )
    stored = read_info(run).get("endpoint") or {}
    endpoint = Endpoint(model=target.model or stored.get("model") or "default")
    if stored.get("base_url"):
        provider = stored.get("provider", "sglang")
        endpoint = attrs.evolve(endpoint, base_url=tuple(stored["base_url"]), provider=provider)
    return _built(load_recipe(target.recipe), endpoint, target)


def without_secrets(url: str) -> str:
    """A URL as ``run.json`` stores it: a mark replaces the user name and password."""
    bare = without_password(url)
    return url if bare == url else bare.replace("//", _HIDDEN, 1)
