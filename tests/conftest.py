"""Fixtures of more than one test file: real tokenizers and real chat templates, if the assets are available.

The assets are in the folder that ``ROLLOUTS_TEST_ASSETS`` names, else in ``../shared/assets`` next to the project. A
test is skipped, with the reason, if an asset is missing.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

SMALL = 8_000
"""Number of ids of a small tokenizer, its special tokens apart."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Read when torch is imported, here and in processes of tests: where all cores are busy, a second thread of an
operation on a small model waits for the first in a loop, which costs more than it computes."""

hypothesis.settings.register_profile("untimed", deadline=None)  # a machine under load is no failure
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="play 2,000 conversations of each family, encode 100,000 texts, fuzz 100,000 inputs; takes an hour",
    )
    parser.addoption("--browser", action="store_true", help="run the tests that open pages in Chromium")
    parser.addoption("--containers", action="store_true", help="run the tests of a real Podman and buildah, as root")
    parser.addoption("--gpu", action="store_true", help="run the tests of the embedded engine and of vLLM on a GPU")
    parser.addoption("--programs", action="store_true", help="run the tests of real programs, in .programs")
    parser.addoption("--sglang", action="store_true", help="run the tests of a real SGLang server, in .venv-sglang")
    parser.addoption("--vllm", action="store_true", help="run the tests of a real vLLM server, in .venv-vllm")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage collection during the imports and the collection of tests: almost all that they create stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Full collections skip what was imported: a million objects, in hundreds of tests that collect garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def thawed() -> Iterator[None]:
    """The collector as in a process of its own."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def conversations(request: pytest.FixtureRequest) -> int:
    """How many random conversations of each family are played."""
    return 2_000 if request.config.getoption("--long") else 40


@functools.cache
def _assets() -> Path | None:
    sibling = Path(__file__).resolve().parents[1].parent / "shared" / "assets"
    named = os.environ.get("ROLLOUTS_TEST_ASSETS")
    return next((folder for folder in ([Path(named)] if named else [sibling]) if folder.is_dir()), None)


def _asset(path: str) -> Path:
    assets = _assets()
    if assets is None:
        pytest.skip("no assets: ROLLOUTS_TEST_ASSETS is not set and ../shared/assets does not exist")
    if not (assets / path).exists():
        pytest.skip(f"the assets do not contain {path}")
    return assets / path


@pytest.fixture(scope="session")
def asset() -> Callable[[str], Path]:
    """A file of the assets by its path inside them, e.g. ``"datasets/math500.jsonl"``."""
    return _asset


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a real tokenizer (``qwen3``, ``qwen2_5``, ``deepseek_v3``, ``gptoss``), unpacked once a session."""
    root = tmp_path_factory.mktemp("tokenizers")

    @functools.cache
    def unpacked(name: str) -> Path:
        with tarfile.open(_asset(f"tokenizers/{name}.tar.xz"), "r:xz") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
            archive.extractall(root, **safe)
        return root / name

    return unpacked


@pytest.fixture(scope="session")
def tokenizer(
    tokenizer_folder: Callable[[str], Path], small_tokenizer_folder: Callable[[str], Path]
) -> Callable[..., Any]:
    """A real tokenizer by its name, loaded once a session.

    With more special tokens it replaces other families' own, and has the first merges only: it loads 20 times as fast.
    """
    from rollouts.renderer import load_tokenizer

    @functools.cache
    def loaded(name: str, *special: str) -> Any:
        if not special:
            return load_tokenizer(tokenizer_folder(name))
        found = load_tokenizer(small_tokenizer_folder(name))
        found.add_tokens(list(special), special_tokens=True)
        return found

    return loaded


@pytest.fixture(scope="session")
def small_tokenizer(
    request: pytest.FixtureRequest, tokenizer: Callable[..., Any], small_tokenizer_folder: Callable[[str], Path]
) -> Callable[..., Any]:
    """A real tokenizer by its name, with its first merges only; with ``--long``, with all.

    For laws that hold with any vocabulary: it loads in a tenth of a second, the whole one in three to six.
    """
    from rollouts.renderer import load_tokenizer

    whole = request.config.getoption("--long")

    @functools.cache
    def loaded(name: str, *special: str) -> Any:
        return tokenizer(name, *special) if whole or special else load_tokenizer(small_tokenizer_folder(name))

    return loaded


@pytest.fixture(scope="session")
def small_tokenizer_folder(
    tokenizer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with the first ids of a real tokenizer, by its name, and its special tokens."""
    root = tmp_path_factory.mktemp("small-tokenizers")

    @functools.cache
    def shortened(name: str) -> Path:
        folder = shutil.copytree(tokenizer_folder(name), root / name)
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        model = content["model"]
        model["vocab"] = {token: number for token, number in model["vocab"].items() if number < SMALL}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[one, two] for one, two in merges if {one, two, one + two} <= model["vocab"].keys()]
        added = [token for token in content["added_tokens"] if token["content"] not in model["vocab"]]
        for number, token in enumerate(added, SMALL):
            token["id"] = number
        path.write_text(json.dumps(content), encoding="utf-8")
        path = folder / "tokenizer_config.json"
        options = json.loads(path.read_text(encoding="utf-8"))
        options.pop("added_tokens_decoder", None)  # has the old ids
        path.write_text(json.dumps(options), encoding="utf-8")
        return folder

    return shortened


@pytest.fixture(scope="session")
def chat_template() -> Callable[[str], str]:
    """The text of a real chat template by its file name without ``.jinja``."""

    @functools.cache
    def read(name: str) -> str:
        return _asset(f"templates/{name}.jinja").read_text(encoding="utf-8")

    return read


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    """The URL of ``rollouts serve`` with the demo model, in its own process, which lives as long as the session."""
    pytest.importorskip("torch")
    from rollouts.engine.process import READY

    line = [sys.executable, "-u", "-m", "rollouts", "serve", "--port", "0", "--stop-with-stdin"]
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        line, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    yield next(text for text in process.stdout if READY in text).removeprefix(READY).strip()
    process.communicate(timeout=60)
    assert process.returncode == 0, "the engine ends cleanly when its parent closes its input"
