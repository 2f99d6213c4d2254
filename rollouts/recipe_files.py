"""Load a recipe from a file and build it with options from a command line."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, get_type_hints

import msgspec

from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.errors import ConfigError, RolloutsError
from rollouts.recipe import Recipe

__all__ = ["GENERATE_OPTIONS", "RecipeFunction", "build", "import_file", "load_recipe", "read_options"]

RecipeFunction: TypeAlias = Callable[..., Recipe]
"""``recipe(endpoint, *, ...options) -> Recipe``."""


GENERATE_OPTIONS: Mapping[str, Any] = {
    "history": OnRewrite,
    "template_kwargs": dict[str, Any],
    "chat_template": Path,
    "dialect": str,
    "stop_token_ids": tuple[int, ...],
}
"""Options of every recipe with their types: arguments of its generate function, unless the recipe has its own."""


def load_recipe(path: str | Path) -> RecipeFunction:
    """Import a recipe file and return its function.

    Raises:
        ConfigError: no such file, it cannot be imported, or it has no function ``recipe``.
    """
    function = getattr(import_file(path), "recipe", None)
    if not callable(function):
        raise ConfigError.of(f"{path}: recipe", function, "a function recipe(endpoint, *, ...) that returns a Recipe")
    result: RecipeFunction = function
    return result


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file.

    Its folder and the parent folder are added to ``sys.path``, so that a recipe can import modules from there.

    Raises:
        ConfigError: no such file, or it cannot be imported.
    """
    path = Path(path).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError.of("recipe", str(path), "a Python file with a function recipe(endpoint, *, ...)")
    for folder in (path.parent, path.parent.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    name = f"rollouts_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        place = _place(error, path)
        raise ConfigError(f"{place}: importing the recipe raised {type(error).__name__}: {error}") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """File and line of the recipe that raised, and those of the module that it imported, if that one raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    lines = [number for number, frame in enumerate(frames) if frame.filename == str(path)]
    place = f"{path}, line {frames[lines[-1]].lineno}" if lines else str(path)
    last = (error.filename, error.lineno) if isinstance(error, SyntaxError) else None
    if last is None and lines and frames[lines[-1] + 1 :]:
        last = (frames[-1].filename, frames[-1].lineno)
    return place if last is None else f"{place}, at {last[0]}, line {last[1]}"


def read_options(function: RecipeFunction, options: Mapping[str, str]) -> dict[str, Any]:
    """Convert option texts to the types in the function's annotations, or in :data:`GENERATE_OPTIONS`.

    Raises:
        ConfigError: an option is unknown (the message lists the known ones), is missing, or does not fit its type.
    """
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"recipe: an annotation cannot be read ({error}); expected types by their names") from error
    hints = {**GENERATE_OPTIONS, **hints}
    names = dict.fromkeys([*parameters, *GENERATE_OPTIONS])
    known = ", ".join(f"{name} ({_type_name(hints.get(name, str))})" for name in names)
    for name in options:
        if name not in names:
            raise ConfigError.of("option", name, f"an option of the recipe: {known}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            kind = _type_name(hints.get(name, str))
            raise ConfigError.of(f"option {name}", None, f"{kind}: the recipe needs it, --set {name}=...")
    return {name: _converted(name, text, hints.get(name, str)) for name, text in options.items()}


def build(function: RecipeFunction, endpoint: Endpoint, options: Mapping[str, str]) -> Recipe:
    """Call a recipe function with options as text; those that it does not have are bound to its generate function.

    Raises:
        ConfigError: as :func:`read_options`; or the function raised, or did not return a recipe.
    """
    values = read_options(function, options)
    own = inspect.signature(function).parameters
    bound = {name: values.pop(name) for name in GENERATE_OPTIONS if name in values and name not in own}
    try:
        recipe: Any = function(endpoint, **values)
    except RolloutsError:
        raise
    except Exception as error:
        place = _place(error, Path(inspect.getsourcefile(function) or ""))
        raise ConfigError(
            f"recipe {function_name(function)} raised {type(error).__name__}: {error} ({place})"
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError.of("what the recipe returned", recipe, "a Recipe")
    return recipe.with_options(**bound)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _converted(name: str, text: str, kind: Any) -> Any:
    if kind is Any:
        return text
    try:
        return msgspec.convert(text, kind, strict=False, dec_hook=_decoded)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        first = error
    try:  # lists, objects and the like are written as JSON
        return msgspec.json.decode(text, type=kind, strict=False, dec_hook=_decoded)
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        raise ConfigError.of(f"option {name}", text, f"{_type_name(kind)} ({first})") from None


def _decoded(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise TypeError(f"a {_type_name(kind)} cannot be written as text")
