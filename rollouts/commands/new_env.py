"""``rollouts new-env``: write the template of an environment: a folder that runs, with tests that pass.

Invariant: no existing file is overwritten; the written files pass their own tests and ``rollouts check-env``.
"""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from shlex import quote
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_verb
from rollouts.errors import ConfigError

__all__ = ["add", "new_environment"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_INIT = '''"""{title}: one line about the task."""
'''

_ENVIRONMENT = '''"""The world: the actions of the model, and the end of an episode."""

from collections.abc import Mapping
from typing import Any

from rollouts.dtypes import Prompt
from rollouts.environments import ToolEnvironment, tool


class {cls}(ToolEnvironment):
    """One episode: each rollout creates its own. A reply without a tool call is the answer and ends it."""

    system_prompt = "Use the tool. Finish with: The answer is X."

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        self.looked_up = 0

    @tool
    async def look_up(self, country: str) -> str:
        """Look up the capital of a country."""  # the model reads the first line as the tool's description
        self.looked_up += 1
        if country not in self.table:
            raise ValueError(f"there is no {{country!r}}")  # the model reads a ValueError; others fail the rollout
        return self.table[country]

    # These two let a resumed run continue the episode; without them it starts again.

    async def snapshot(self) -> Any:
        return self.looked_up

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        self.looked_up = snapshot
'''

_RECIPE = '''"""{title} agents.

rollouts run {name}/recipe.py --set keep=all --out runs/{name}
"""

from functools import partial
from pathlib import Path
from typing import Unpack

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, RecipeOptions, agent_recipe, recipe_defaults
from rollouts.training import load_prompts
from rollouts.rewards import exact_match

from {name}.environment import {cls}

ROWS = Path(__file__).parent / "rows.jsonl"


@recipe_defaults(batch_size=8, max_new_tokens=256)
def recipe(endpoint: Endpoint, *, data: Path = ROWS, seed: int = 0, **options: Unpack[RecipeOptions]) -> Recipe:
    """Every keyword is an option: --set batch_size=4. keep=spread drops groups whose rewards are all equal."""
    prompts = load_prompts(data)
    table = {{str(prompt.metadata["country"]): str(prompt.label) for prompt in prompts}}
    environment_cls = partial({cls}, table)
    return agent_recipe("{name}", endpoint, environment_cls, prompts, reward_fn=exact_match, seed=seed, **options)
'''

_ROWS = """\
{"prompt": "What is the capital of France?", "label": "Paris", "metadata": {"country": "France"}}
{"prompt": "What is the capital of Peru?", "label": "Lima", "metadata": {"country": "Peru"}}
{"prompt": "What is the capital of Kenya?", "label": "Nairobi", "metadata": {"country": "Kenya"}}
"""

_TEST = '''"""{title}: the tool, the reward, the recipe, and ``rollouts check-env``."""

import anyio
from rollouts.dtypes import Endpoint
from rollouts.testing.environment_check import CheckOptions, examine
from rollouts.testing.playing import calling, play
from rollouts.training import Sample
from rollouts.rewards import exact_match

from {name}.environment import {cls}
from {name}.recipe import recipe

TABLE = {{"Peru": "Lima"}}


def test_a_recorded_episode() -> None:
    """The tool answers, the reply ends the episode, and the reward scores the reply."""

    async def episode() -> None:
        replies = [calling("look_up", country="Peru"), "The answer is Lima."]
        played = await play({cls}(TABLE), "What is the capital of Peru?", replies)
        assert played.messages[3].content == "Lima"
        assert played.done
        assert exact_match(Sample(messages=played.chat, label="Lima")) == 1.0
        assert exact_match(Sample(messages=played.chat, label="Quito")) == 0.0

    anyio.run(episode)


def test_a_wrong_argument_is_an_error_message_to_the_model() -> None:
    """It is not a failure of the environment."""

    async def episode() -> None:
        played = await play({cls}(TABLE), "?", [calling("look_up", country="Atlantis")])
        assert played.messages[-1].content == "Error: there is no 'Atlantis'"

    anyio.run(episode)


def test_the_recipe_loads_its_data() -> None:
    """No server is needed."""
    assert len(recipe(Endpoint()).data_buffer) == 3


def test_it_passes_check_env() -> None:
    """The same checks as ``rollouts check-env {name}/recipe.py``."""
    built = recipe(Endpoint())
    findings = anyio.run(examine, built.environment_cls, built.data_buffer.prompts, CheckOptions(stall_seconds=1.0))
    assert [finding for finding in findings if finding.verdict == "bad"] == []
'''

_README = """\
# {name}

One sentence about the task.

- **Rows**: JSONL with `prompt`, `label`, `metadata.country`.
- **Environment**: `{cls}` has the tool `look_up`. A reply without a call is the answer.
- **Reward**: `exact_match`: 1.0 if the answer is the label.

```
rollouts check-env {name}/recipe.py                       # played with random replies
rollouts run {name}/recipe.py --set keep=all --out runs/{name}    # on the built-in model, which solves little
pip install pytest && pytest {name}                       # its tests
```
"""


def new_environment(name: str, into: Path = Path()) -> list[Path]:
    """Write the files of a new environment; return their paths.

    Args:
        name: of its folder, which is a Python package.
        into: the parent folder.

    Raises:
        ConfigError: ``name`` is not a valid package name, its folder exists, or ``into`` does not exist or cannot be
            written to.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError.of("NAME", name, "a Python name in lower case, e.g. word_game")
    if not into.is_dir():
        raise ConfigError.of("--into", str(into), "a folder that exists")
    folder = into / name
    if folder.exists():
        raise ConfigError.of("NAME", str(folder), "a folder that does not exist yet")
    title = name.replace("_", " ").capitalize()
    fields = {
        "name": name,
        "title": title,
        "cls": "".join(part.capitalize() for part in name.split("_")) + "Environment",
    }
    texts = {
        "README.md": _README.format(**fields),
        "__init__.py": _INIT.format(**fields),
        "environment.py": _ENVIRONMENT.format(**fields),
        "recipe.py": _RECIPE.format(**fields),
        "rows.jsonl": _ROWS,
        f"test_{name}.py": _TEST.format(**fields),
    }
    try:
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--into", str(into), f"a folder that can be written to ({error})") from error
    return [folder / file for file in texts]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "new-env", _new_env, "create a template of an environment, with tests", "new-env wordle")
    parser.add_argument("name", metavar="NAME", help="name of its folder: a Python name in lower case")
    parser.add_argument(
        "--into", type=Path, default=Path(), metavar="DIR", help="parent folder (default: current folder)"
    )


def _new_env(args: argparse.Namespace) -> int:
    for path in new_environment(args.name, args.into):
        say(path)
    say(f"next: rollouts check-env {quote(str(args.into / args.name / 'recipe.py'))}")
    return 0
