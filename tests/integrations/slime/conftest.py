"""State of the process between calls ends with the test that created it.

With ``SLIME_PATH`` set to a checkout of slime (and its requirements installed, engines apart), slime is importable and
every test of this folder runs on slime's own classes instead of the stand-ins.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.engine import DEMO_MODEL, running_server
from rollouts.integrations.slime import close_rollouts
from rollouts.testing.server import StubServer
from scripts.benches.slime_job import EmptyEngines

SLIME = os.environ.get("SLIME_PATH")

if SLIME:
    sys.path.append(SLIME)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("slime.rollout.sglang_rollout")
        if importlib.util.find_spec("wandb") is not None:
            # slime's example retool imports it during an episode; until Python 3.11.8, ast.parse, which pydantic uses
            # in that import, fails if the collector runs other code in the middle of it
            importlib.import_module("wandb")


@pytest.fixture(scope="session")
def slime_path() -> Path:
    """The checkout of slime; tests that use it are skipped without one."""
    if not SLIME:
        pytest.skip("SLIME_PATH names no checkout of slime")
    return Path(SLIME)


@pytest.fixture(scope="session")
def manager_class(slime_path: Path) -> Any:
    """slime's ``RolloutManager`` without Ray around it."""
    sys.meta_path.append(EmptyEngines())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("slime.ray.rollout")
    return module.RolloutManager.__ray_metadata__.modified_class


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without its image processor: slime's data set takes no text prompts with one."""
    folder = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "processor_config.json"))
    return folder


@pytest.fixture(autouse=True, scope="module")
def _without_slimes_sockets() -> Iterator[None]:
    """slime never closes its HTTP clients: they are collected here, else a test of another file fails by them."""
    yield
    if SLIME:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_rollouts()


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """The URL of an embedded engine with the demo model; few slots, so that requests are always in flight."""
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(running_server(DEMO_MODEL, slots=12)) as url:
            yield url


@pytest.fixture
def serve() -> Iterator[Callable[..., StubServer]]:
    """Starts a stub of an SGLang server with the given options, in its own thread."""
    with start_blocking_portal() as portal, ExitStack() as servers:

        def start(**options: object) -> StubServer:
            stub = StubServer(**options)  # type: ignore[arg-type]  # each test passes what it needs
            return servers.enter_context(portal.wrap_async_context_manager(stub))

        yield start
        close_rollouts()  # before the server ends
