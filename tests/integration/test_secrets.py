"""Keys appear nowhere: not in the folder of a run, not in logs, not in a repr."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rollouts.commands import main
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.recipe.files import load_recipe
from rollouts.runs.info import read_info
from rollouts.training import AsyncRolloutManager

KEY, PASSWORD, TOKEN = "sk-canary-key", "canary-password", "canary-of-the-world"
ROOT = Path(__file__).parents[2]

RECIPE = """
import functools, os, attrs
from rollouts.recipes.configs.calculator import recipe as calculator
from rollouts.environments import CalculatorEnvironment

class Keyed(CalculatorEnvironment):
    def __init__(self, token):
        self.token = token

    async def start(self, prompt):
        assert self.token == os.environ["WORLD_TOKEN"]
        if prompt.index % 7 == 3:
            raise ConnectionError("refused by the world")
        return await super().start(prompt)

def recipe(endpoint, *, batch_size: int = 2):
    made = calculator(endpoint, batch_size=batch_size, n_samples_per_prompt=4)
    world = functools.partial(Keyed, token=os.environ["WORLD_TOKEN"])
    generate = functools.partial(made.config.generate_fn, environment_cls=world)
    reward = functools.partial(score, made.config.reward_fn, os.environ["WORLD_TOKEN"])
    config = attrs.evolve(made.config, generate_fn=generate, reward_fn=reward)
    return attrs.evolve(made, config=config, environment_cls=world)

def score(reward, token, sample):
    return reward(sample)
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUTS_API_KEY", KEY)
    monkeypatch.setenv("WORLD_TOKEN", TOKEN)
    monkeypatch.syspath_prepend(str(ROOT))
    path = tmp_path / "keyed.py"
    path.write_text(RECIPE)
    return path


def whole_text(folder: Path) -> bytes:
    """All bytes of the files in a folder; the run writes JSONL, since Parquet would compress the keys."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("given", ["key", "password"])
def test_no_secret_is_in_a_run(
    given: str,
    recipe_file: Path,
    engine_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A real run with failures and tracebacks: no key in any byte of its folder, its logs and its output."""
    caplog.set_level(logging.DEBUG)
    url = engine_url
    if given == "password":  # a request carries one or the other
        url = engine_url.replace("http://", f"http://user:{PASSWORD}@")
        monkeypatch.delenv("ROLLOUTS_API_KEY")
    run = tmp_path / "run"
    arguments = ["--endpoint", url, "--out", str(run), "--set", "batch_size=2", "--format", "jsonl"]
    assert main(["run", str(recipe_file), *arguments]) == 0
    assert read_info(run)["status"] == "finished"
    main(["show", str(run)])
    main(["verify", str(run)])
    out, err = capfd.readouterr()
    stored = whole_text(run)
    assert b"refused by the world" in stored, "the failure is stored with its traceback"
    assert b"The answer is" in stored
    for secret in (KEY, PASSWORD, TOKEN):
        assert secret.encode() not in stored
        assert secret not in out + err + caplog.text
    assert main(["run", "--resume", str(run), "--batches", "2"]) == (0 if given == "key" else 2)
    out, err = capfd.readouterr()
    assert ("expected the URL with its user name and password" in err) == (given == "password")
    for secret in (KEY, PASSWORD, TOKEN):
        assert secret.encode() not in whole_text(run)
        assert secret not in out + err + caplog.text


def test_no_secret_is_in_a_repr(recipe_file: Path) -> None:
    """Errors and the interpreter print a recipe, its parts and its manager."""
    endpoint = Endpoint(base_url=f"http://user:{PASSWORD}@host:1")
    keyed = Endpoint(api_key=KEY)
    recipe = load_recipe(recipe_file)(endpoint)
    printed = [repr(recipe), repr(recipe.config), str(recipe.describe()), repr(recipe.config.describe())]
    printed += [repr(endpoint), repr(keyed), repr(AsyncRolloutManager(recipe.config, recipe.data_buffer))]
    for scheme in ("ftp", "http"):
        with pytest.raises(ConfigError) as refused:
            Endpoint(base_url=f"{scheme}://user:{PASSWORD}@host:1", api_key=KEY)
        printed.append(str(refused.value))
    for secret in (KEY, PASSWORD, TOKEN):
        assert [text for text in printed if secret in text] == []
