"""Load a recipe, by name or from a file, and build it with options from a command line.

A string that ends in ``.py`` is the path of a file. Any other is a name: of a built-in recipe, a module of
:mod:`rollouts.recipes.configs`, or of an entry point in the group ``rollouts.recipes``, whose value is a module with a
function ``recipe``. Built-in names cannot be replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, Unpack, get_args, get_origin, get_type_hints

import attrs
import msgspec

from rollouts.base.plugins import plugins
from rollouts.concurrency.boundary import function_name
from rollouts.dtypes import Endpoint, OnRewrite
from rollouts.errors import ConfigError, RolloutsError, is_of_users
from rollouts.recipe.recipe import OPTION_DEFAULTS, Recipe
from rollouts.renderer import CallCheck, SpecialText

__all__ = [
    "GENERATE_OPTIONS",
    "Option",
    "RecipeFunction",
    "absolute",
    "build",
    "built_in",
    "file_of",
    "import_file",
    "load_recipe",
    "read_options",
    "recipe_names",
    "recipe_options",
    "summary_of",
]

_BUILT_IN = Path(__file__).parents[1] / "recipes" / "configs"
ENTRY_POINTS = "rollouts.recipes"
"""The group in which packages add recipes."""

RecipeFunction: TypeAlias = Callable[..., Recipe]
"""``recipe(endpoint, *, ...options) -> Recipe``."""

ENDPOINTS = "endpoints"
"""A parameter of recipes that is not an option: the endpoints of other models of the launch, by name."""


GENERATE_OPTIONS: Mapping[str, Any] = {
    "history": OnRewrite,
    "template_kwargs": dict[str, Any],
    "chat_template": Path,
    "dialect": str,
    "calls": CallCheck,
    "stop_token_ids": tuple[int, ...],
    "special_text": SpecialText,
    "images": bool,
}
"""Options of every recipe with their types: arguments of its generate function, unless the recipe itself has them."""


def load_recipe(path: str | Path) -> RecipeFunction:
    """Import a recipe, named or in a file, and return its function.

    Raises:
        ConfigError: no such recipe, it cannot be imported, or it has no function ``recipe``.
    """
    function = getattr(import_file(path), "recipe", None)
    if not callable(function):
        raise ConfigError.of(f"{path}: recipe", function, "a function recipe(endpoint, *, ...) that returns a Recipe")
    result: RecipeFunction = function
    return result


def built_in() -> list[str]:
    """The names of the built-in recipes."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.py") if path.stem != "__init__")


def recipe_names() -> list[str]:
    """The names of the built-in recipes and of the recipes that packages add; none of them is imported."""
    return sorted({*built_in(), *plugins(ENTRY_POINTS)})


def _is_name(recipe: str | Path) -> bool:
    return Path(recipe).suffix != ".py" and str(recipe) in recipe_names()


def absolute(path: str | Path) -> Path:
    """The path of a recipe file, absolute; the name of a recipe stays a name, which its installation knows."""
    return Path(path) if _is_name(path) else Path(path).resolve()


def file_of(recipe: str | Path) -> Path:
    """The absolute path of the Python file of a recipe, named or in a file."""
    if not _is_name(recipe):
        return Path(recipe).resolve()
    if str(recipe) in built_in():
        return _BUILT_IN / f"{recipe}.py"
    return Path(import_file(recipe).__file__ or recipe)


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file, or the module of a recipe by its name.

    The folder of a file and the parent folder are added to ``sys.path``: a recipe can import modules from there.

    Raises:
        ConfigError: no such file or recipe, or it cannot be imported.
    """
    name = str(path)
    path = Path(path).resolve()
    if path.parent == _BUILT_IN.resolve() and path.suffix == ".py":
        name = path.stem
    if name in built_in():
        try:
            return importlib.import_module(f"rollouts.recipes.configs.{name}")
        except ImportError as error:
            raise ConfigError(f"recipe {name}: importing it raised {type(error).__name__}: {error}") from error
    if path.suffix != ".py" and name in (added := plugins(ENTRY_POINTS)):
        module = added[name].load()
        if not isinstance(module, ModuleType):
            raise added[name].refused(f"got {module!r}; expected a module with a function recipe(endpoint, *, ...)")
        return module
    if not path.is_file() or path.suffix != ".py":
        from rollouts.base.nearest import did_you_mean  # here: only an error needs it

        names = recipe_names()
        shown = str(path) if path.suffix == ".py" else name
        expected = "an existing Python file with a function recipe(endpoint, *, ...), or a known recipe"
        raise ConfigError.of("RECIPE", shown, f"{expected}{did_you_mean(Path(name).stem, names)}: {', '.join(names)}")
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


@attrs.frozen
class Option:
    """One option of a recipe."""

    name: str
    kind: Any
    """The annotated type."""
    default: Any
    """``inspect.Parameter.empty`` if the recipe needs the option."""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def kind_name(self) -> str:
        return _type_name(self.kind)


def recipe_options(function: RecipeFunction) -> list[Option]:
    """The options of a recipe function in the order of its signature, then those of a TypedDict of its ``**options``.

    Raises:
        ConfigError: an annotation cannot be read.
    """
    options: list[Option] = []
    try:
        hints = get_type_hints(function)
        for each in list(inspect.signature(function).parameters.values())[1:]:
            kind = hints.get(each.name, str)
            if each.kind is not each.VAR_KEYWORD:
                options.append(Option(each.name, kind, each.default))
            elif get_origin(kind) is Unpack:
                (named,) = get_args(kind)
                defaults = {**OPTION_DEFAULTS, **getattr(function, "option_defaults", {})}
                empty = dict.fromkeys(named.__required_keys__, inspect.Parameter.empty)
                kinds = get_type_hints(named).items()
                options += [Option(name, kind, defaults.get(name, empty.get(name))) for name, kind in kinds]
    except (NameError, TypeError) as error:
        raise ConfigError(f"recipe: an annotation cannot be read ({error}); expected types by their names") from error
    return [option for option in options if option.name != ENDPOINTS]


def summary_of(function: RecipeFunction) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _place(error: BaseException, path: Path) -> str:
    """File and line in the recipe where an error was raised, and in the module that it imported, if that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_users(frame.filename)]
    lines = [number for number, frame in enumerate(frames) if frame.filename == str(path)]
    last = (error.filename, error.lineno) if isinstance(error, SyntaxError) else None
    if last is None and lines and frames[lines[-1] + 1 :]:
        last = (frames[-1].filename, frames[-1].lineno)
    if not lines:
        return str(path) if last is None else f"{last[0]}, line {last[1]}"
    place = f"{path}, line {frames[lines[-1]].lineno}"
    return place if last is None else f"{place}, at {last[0]}, line {last[1]}"


def read_options(function: RecipeFunction, options: Mapping[str, str]) -> dict[str, Any]:
    """Convert option texts to the types in the function's annotations, or in :data:`GENERATE_OPTIONS`.

    Raises:
        ConfigError: an option is unknown (the message lists the known ones), is missing, or does not fit its type.
    """
    known = {option.name: option for option in recipe_options(function)}
    known |= {name: Option(name, kind, None) for name, kind in GENERATE_OPTIONS.items() if name not in known}
    if "data" in options and "data" not in known:
        expected = "no data: the recipe writes its own prompts, and has no option data"
        raise ConfigError.of("--data", options["data"], expected)
    for name in options:
        if name not in known:
            from rollouts.base.nearest import did_you_mean

            names = ", ".join(f"{option.name} ({option.kind_name})" for option in known.values())
            expected = f"an option of the recipe{did_you_mean(name, known)}: {names}"
            raise ConfigError.of(_argument(name), name, expected)
    for name, option in known.items():
        if option.required and name not in options:
            argument = _argument(name)
            argument = f"--set {name}" if argument == "--set" else argument
            raise ConfigError.of(argument, None, f"{option.kind_name}: the recipe needs it")
    return {name: _converted(name, text, known[name].kind) for name, text in options.items()}


def _argument(option: str) -> str:
    """The argument of the command line that sets an option of a recipe."""
    return f"--{option}" if option in ("data", "seed") else "--set"


def build(
    function: RecipeFunction,
    endpoint: Endpoint,
    options: Mapping[str, str],
    endpoints: Mapping[str, Endpoint] | None = None,
) -> Recipe:
    """Call a recipe function with options as text; options that it does not have are bound to its generate function.

    Args:
        function: the recipe.
        endpoint: where the trained model answers.
        options: texts by name.
        endpoints: other models by name, for a recipe with the parameter ``endpoints``.

    Raises:
        ConfigError: as :func:`read_options`; or the function raised, or did not return a recipe.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        got = "no parameter" if first is None else str(signature)
        raise ConfigError.of(f"recipe {function_name(function)}", got, "recipe(endpoint, *, ...)")
    values = read_options(function, options)
    own = {option.name for option in recipe_options(function)}
    bound = {name: values.pop(name) for name in GENERATE_OPTIONS if name in values and name not in own}
    if ENDPOINTS in inspect.signature(function).parameters:
        values[ENDPOINTS] = dict(endpoints or {})
    try:
        recipe: Any = function(endpoint, **values)
    except RolloutsError:
        raise
    except Exception as error:
        place = _place(error, Path(inspect.getsourcefile(inspect.unwrap(function)) or ""))
        raise ConfigError(
            f"recipe {function_name(function)} raised {type(error).__name__}: {error} ({place})"
        ) from error
    if inspect.iscoroutine(recipe):
        recipe.close()
        raise ConfigError.of(f"recipe {function_name(function)}", "async def", "def: a recipe is called, not awaited")
    if not isinstance(recipe, Recipe):
        raise ConfigError.of("the value that the recipe returned", recipe, "a Recipe, by return agent_recipe(...)")
    return recipe.with_options(**bound)


def _type_name(kind: Any) -> str:
    """The type as ``--set`` reads it: None is written as null."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("| None", "| null")


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
        raise ConfigError.of(f"--set {name}", text, f"{_type_name(kind)} ({first})") from None


def _decoded(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise TypeError(f"a {_type_name(kind)} cannot be written as text")
