"""The tasks of ``sums.py`` as a recipe file of the command line."""

from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions
from tests.chat_api.sums import sums
from tests.chat_api.sums import tasks as tasks_of


def recipe(endpoint: Endpoint, *, tasks: int = 20, **options: Unpack[RecipeOptions]) -> Recipe:
    """Sums with one call each."""
    return sums(endpoint, tasks_of(tasks), **options)
