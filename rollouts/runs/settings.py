"""The settings that decide what a run's samples are, as plain values: recorded at each start, compared at each resume.

Invariant: equal settings give equal values in every process and on every machine; a path or an address is not part of
them. Arguments bound to a function enter as a checksum only, because they may be secret. This module reads files, and
writes none.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

import rollouts
from rollouts.base.storable import to_json
from rollouts.concurrency.boundary import function_name
from rollouts.recipe import Recipe

__all__ = ["Change", "changes", "recorded_settings", "settings_of", "settings_of_target"]

_PACKAGE = Path(rollouts.__file__).parent
_NOT_COMPARED = ("data", "seed", "in_flight")
"""Options whose effect the fingerprint of the data and the sampling seed show, and the slots, which suit a machine."""
_EVERY_KEY = ("options", "versions", "sampler")
"""Settings in which a missing entry is a difference; elsewhere it was not recorded."""


@attrs.frozen
class Change:
    """A setting that differs from the stored one."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: got {self.now!r}; expected {self.then!r}"


def settings_of(
    recipe: Recipe, file: Path | None, options: Mapping[str, str], model: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """The settings of a recipe.

    Args:
        recipe: as built, with its endpoint; its renderer is loaded.
        file: the recipe's file.
        options: the options that it was built with.
        model: the name or the checksum of the weights that the server has.
        versions: of Python and the packages.
    """
    config, bound = recipe.config, recipe.bound
    endpoint = bound.get("endpoint", recipe.endpoint)
    listed_elsewhere = ("endpoint", "environment_cls", "tokenizer", "policy", "sampling")
    settings = {
        **settings_of_target(file, options, versions),
        "reward": {**_function(config.reward_fn), "group_rm": config.group_rm},
        "filter": _function(config.filter_fn),
        "data": {"metadata": f"{recipe.data_buffer.metadata_checksum:08x}"},
        "sampler": recipe.data_buffer.ask_sampler("describe") or {},
        "environment": {} if recipe.environment_cls is None else _function(recipe.environment_cls),
        "generate": _function(config.generate_fn, leave_out=listed_elsewhere),
        "sampling": attrs.asdict(bound.get("sampling") or endpoint.sampling),
        "model": {name: value for name, value in model.items() if value is not None},
        **({} if recipe.tokenizer is None else recipe.renderer().fingerprints()),  # a chat API renders itself
    }
    plain: dict[str, Any] = msgspec.json.decode(to_json(settings))
    return plain


def settings_of_target(file: Path | None, options: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, Any]:
    """The settings that are known before the recipe is built."""
    return {
        "recipe": {"text": None if file is None else _checksum(file.read_bytes())},
        "options": {name: value for name, value in options.items() if name not in _NOT_COMPARED},
        "versions": {name: version for name, version in versions.items() if name != "python"},
    }


def recorded_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ``run.json`` has of a run whose journal has none: a run of 0.1.0."""
    config, command = info.get("config") or {}, info.get("command") or {}
    settings: dict[str, Any] = {
        "reward": {"function": config.get("reward_fn"), "group_rm": config.get("group_rm")},
        "filter": {"function": config.get("filter_fn")},
        "environment": {"function": info.get("environment")},
        "sampling": (info.get("endpoint") or {}).get("sampling"),
    }
    if "options" in command:
        options = command["options"].items()
        settings["options"] = {name: value for name, value in options if name not in _NOT_COMPARED}
    return {name: value for name, value in settings.items() if value}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that both have, and that differ."""
    found = []
    for group in then.keys() & now.keys():
        old, new = then[group], now[group]
        names = old.keys() | new.keys() if group in _EVERY_KEY else old.keys() & new.keys()
        found += [
            Change(f"{group}.{name}", old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)
        ]
    return sorted(found, key=lambda change: change.name)


def _function(function: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The name of a function or class, and checksums of its file and of the plain values bound to it."""
    bound: list[Any] = []
    name = None if function is None else function_name(function)
    while isinstance(function, functools.partial):
        bound.append([function.args, {name: function.keywords[name] for name in sorted(function.keywords)}])
        function = function.func
    for _, keywords in bound:
        for left_out in leave_out:
            keywords.pop(left_out, None)
    described: dict[str, Any] = {"function": name}
    try:
        is_itself = inspect.isroutine(function) or isinstance(function, type)
        file = inspect.getsourcefile(function if is_itself else type(function))
    except TypeError:  # built in
        file = None
    if file is not None and Path(file).is_file() and not Path(file).resolve().is_relative_to(_PACKAGE.resolve()):
        described["code"] = _checksum(Path(file).read_bytes())
    if bound:
        described["bound"] = _checksum(to_json([_plain(value) for value in bound]))
    return described


def _plain(value: Any) -> Any:
    """A value without addresses of objects: data as they are, everything else by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if attrs.has(type(value)):
        return _plain(attrs.asdict(value, recurse=False))
    return function_name(value)


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"
