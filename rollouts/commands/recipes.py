"""``rollouts recipes``: the recipes that have a name, with their options and defaults."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_verb, recipe_help, tell
from rollouts.errors import ConfigError
from rollouts.recipe.files import RecipeFunction, load_recipe, recipe_names, recipe_options, summary_of

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "recipes", _recipes, "list the recipes with their options", "recipes calculator")
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to list (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _recipes(args: argparse.Namespace) -> int:
    functions: dict[str, RecipeFunction] = {}
    for name in args.names or recipe_names():
        try:
            functions[name] = load_recipe(name)
        except ConfigError as error:  # of a package that is broken
            if args.names:
                raise
            tell(error, debug=args.debug)
    if args.json:
        say(json.dumps({name: _described(function) for name, function in functions.items()}, default=str))
        return 0
    say("\n\n".join(recipe_help(name, function) for name, function in functions.items()))
    say("\nnext: rollouts run NAME --out DIR --set OPTION=VALUE")
    return 0


def _described(function: RecipeFunction) -> dict[str, Any]:
    options = {
        option.name: {"type": option.kind_name, "required": option.required}
        | ({} if option.required else {"default": option.default})
        for option in recipe_options(function)
    }
    return {
        "summary": summary_of(function),
        "file": inspect.getsourcefile(inspect.unwrap(function)),
        "options": options,
    }
