"""The beginning of an environment: a folder that runs, with tests that pass, to be changed into what it shall be.

Invariant: nothing that exists is overwritten; what is written passes its own tests and ``rollouts check-env``.
"""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from typing import Any

from rollouts.commands.arguments import add_verb
from rollouts.errors import ConfigError

__all__ = ["add", "new_environment"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_INIT = '''"""{title}: what it is, in one line."""
'''

_ENVIRONMENT = '''"""The world: what the model can do in it, and when an episode ends."""

from collections.abc import Mapping
from typing import Any

from rollouts.dtypes import Prompt
from rollouts.environments import ToolEnvironment, tool


class {cls}(ToolEnvironment):
    """One episode. Made fresh for each rollout; a reply without a tool call is the answer and ends it."""

    system_prompt = "Use the tool. Finish with: The answer is X."

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        self.looked_up = 0

    @tool
    async def look_up(self, country: str) -> str:
        """Look up the capital of a country."""  # the first line is what the model is told of the tool
        self.looked_up += 1
        if country not in self.table:
            raise ValueError(f"there is no {{country!r}}")  # a ValueError is told to the model; others fail the rollout
        return self.table[country]

    # These two let an episode go on after the run was killed; leave them out, and it starts again.

    async def snapshot(self) -> Any:
        return self.looked_up

    async def restore(self, prompt: Prompt, snapshot: Any) -> None:
        self.looked_up = snapshot
'''

_RECIPE = '''"""{title} agents.

rollouts run {name}/recipe.py --out runs/{name}
"""

from functools import partial
from pathlib import Path
from typing import Literal

from rollouts.dtypes import Endpoint
from rollouts.recipe import Recipe, agent_recipe
from rollouts.training import load_prompts
from rollouts.training.rewards import exact_match

from {name}.environment import {cls}

ROWS = Path(__file__).parent / "rows.jsonl"


def recipe(
    endpoint: Endpoint,
    *,
    data: Path = ROWS,
    batch_size: int = 8,
    n_samples_per_prompt: int = 8,
    max_new_tokens: int = 256,
    keep: Literal["spread", "all"] = "spread",
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """Every keyword is an option of the command line: --set batch_size=4."""
    prompts = load_prompts(data)
    table = {{str(prompt.metadata["country"]): str(prompt.label) for prompt in prompts}}
    return agent_recipe(
        "{name}",
        endpoint,
        partial({cls}, table),
        prompts,
        reward_fn=exact_match,
        batch_size=batch_size,
        n_samples_per_prompt=n_samples_per_prompt,
        max_new_tokens=max_new_tokens,
        keep=keep,
        batches=batches,
        seed=seed,
    )
'''

_ROWS = """\
{"prompt": "What is the capital of France?", "label": "Paris", "metadata": {"country": "France"}}
{"prompt": "What is the capital of Peru?", "label": "Lima", "metadata": {"country": "Peru"}}
{"prompt": "What is the capital of Kenya?", "label": "Nairobi", "metadata": {"country": "Kenya"}}
"""

_TEST = '''"""{title}: what the world answers, what the reward says, and that it can be run."""

import anyio
from rollouts.dtypes import Endpoint
from rollouts.testing.environment_check import CheckOptions, examine
from rollouts.testing.playing import calling, play
from rollouts.training import Sample
from rollouts.training.rewards import exact_match

from {name}.environment import {cls}
from {name}.recipe import recipe

TABLE = {{"Peru": "Lima"}}


def test_a_recorded_episode() -> None:
    """The tool answers, the reply ends the episode, the reward is of the reply."""

    async def episode() -> None:
        replies = [calling("look_up", country="Peru"), "The answer is Lima."]
        played = await play({cls}(TABLE), "What is the capital of Peru?", replies)
        assert played.messages[3].content == "Lima"
        assert played.done
        assert exact_match(Sample(messages=played.chat, label="Lima")) == 1.0
        assert exact_match(Sample(messages=played.chat, label="Quito")) == 0.0

    anyio.run(episode)


def test_a_mistake_of_the_model_is_told_to_it() -> None:
    """And is no failure of the environment."""

    async def episode() -> None:
        played = await play({cls}(TABLE), "?", [calling("look_up", country="Atlantis")])
        assert played.messages[-1].content == "Error: there is no 'Atlantis'"

    anyio.run(episode)


def test_the_recipe_has_its_data() -> None:
    """Nothing is run: no server is needed."""
    assert len(recipe(Endpoint()).data_buffer) == 3


def test_it_passes_its_paces() -> None:
    """As ``rollouts check-env {name}/recipe.py`` does."""
    made = recipe(Endpoint())
    findings = anyio.run(examine, made.environment_cls, made.data_buffer.prompts, CheckOptions(stall_seconds=1.0))
    assert [finding for finding in findings if finding.verdict == "bad"] == []
'''

_README = """\
# {name}

What it is, in one sentence.

- **Rows**: JSONL with `prompt`, `label`, `metadata.country`.
- **Environment**: `{cls}` has the tool `look_up`. A reply without a call is the answer.
- **Reward**: `exact_match`: 1.0 if the answer is the label.

```
pytest {name}                                             # its tests
rollouts check-env {name}/recipe.py                       # played with random replies
rollouts run {name}/recipe.py --set keep=all --out runs/{name}    # on the built-in model, which solves little
```
"""


def new_environment(name: str, into: Path = Path()) -> list[Path]:
    """Write the files of a new environment; gives their paths.

    Args:
        name: of its folder, which is a Python package.
        into: the folder that it is made in.

    Raises:
        ConfigError: the name is none for a package, or its folder exists.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError.of("NAME", name, "a Python name in lower case, e.g. word_game")
    if not into.is_dir():
        raise ConfigError.of("--into", str(into), "a folder that exists")
    folder = into / name
    if folder.exists():
        raise ConfigError.of("NAME", str(folder), "a folder that does not exist yet")
    title = name.replace("_", " ").capitalize()
    words = {
        "name": name,
        "title": title,
        "cls": "".join(part.capitalize() for part in name.split("_")) + "Environment",
    }
    texts = {
        "README.md": _README.format(**words),
        "__init__.py": _INIT.format(**words),
        "environment.py": _ENVIRONMENT.format(**words),
        "recipe.py": _RECIPE.format(**words),
        "rows.jsonl": _ROWS,
        f"test_{name}.py": _TEST.format(**words),
    }
    folder.mkdir()
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "new-env", _new_env, "begin an environment of your own, with its tests", "new-env wordle")
    parser.add_argument("name", metavar="NAME", help="of its folder: a Python name in lower case")
    parser.add_argument("--into", type=Path, default=Path(), metavar="DIR", help="where its folder is made (here)")


def _new_env(args: argparse.Namespace) -> int:
    for path in new_environment(args.name, args.into):
        print(path)
    return 0
