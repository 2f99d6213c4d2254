"""The target of a command, read from a stored run: its recipe and its servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rollouts.commands.chat_options import CHAT_PROVIDER, ChatOptions
from rollouts.commands.target import ENGINE_LOG, RunTarget, built
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, without_password
from rollouts.recipe import Recipe
from rollouts.recipe.files import file_of, load_recipe
from rollouts.runs.info import read_info
from rollouts.runs.layout import JOURNAL
from rollouts.runs.reading import reading
from rollouts.runs.resume import compared
from rollouts.runs.run_history import RunHistory
from rollouts.runs.settings import changes, recorded_settings, settings_of_target
from rollouts.runs.start import SETTINGS
from rollouts.runs.writer import versions

__all__ = ["checked_target", "resumed_target", "stored_recipe"]

DEMO_WEIGHTS_0_1 = "9b402ec7"
"""The checksum of the demo model of 0.1.0: runs of that version do not store the checksum of their weights."""


def checked_target(target: RunTarget, run: Path, *, allow_changes: bool) -> RunTarget:
    """As :func:`resumed_target`; before an engine is started for the run, the settings known without it are compared.

    These are the text of the recipe, its options and the versions of the packages; ``reopen`` compares all.

    Raises:
        ConfigError: also if such a setting differs, and changes are not allowed.
    """
    resumed = resumed_target(target, run, allow_changes=allow_changes)
    if not (allow_changes or resumed.urls) and resumed.recipe is not None and (run / JOURNAL).is_dir():
        now = settings_of_target(file_of(resumed.recipe), resumed.options, versions())
        with reading(run):
            info = read_info(run)
            if changes(info.get(SETTINGS) or recorded_settings(info), now):  # the journal decides: it may be younger
                compared(info, RunHistory.read(run / JOURNAL), now, allow_changes=False)
    return resumed


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
    stored = (info.get("endpoint") or {}).get("provider")
    provider = target.provider or stored
    if (provider == CHAT_PROVIDER) is not (stored == CHAT_PROVIDER):
        raise ConfigError.of("--provider", provider, f"{stored}: a run has token ids, or text of a chat API")
    if provider != CHAT_PROVIDER and target.chat != ChatOptions():
        raise ConfigError.of("--resume", str(run), "a run with --provider openai, whose options these are")
    given, urls = target.chat.base_url, [*map(without_password, _stored_urls(run, info))]
    if given is not None and without_password(given.rstrip("/")) not in urls and not allow_changes:
        expected = f"{', '.join(urls)}: another API may have another model of this name (--allow-changes)"
        raise ConfigError.of("--base-url", without_password(given), expected)
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
    return built(load_recipe(target.recipe), endpoint, target)
