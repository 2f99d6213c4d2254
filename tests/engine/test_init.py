"""The package without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.base.extras import install_command
from rollouts.engine import running_server
from rollouts.errors import ConfigError

WITHOUT = """
import sys
sys.modules["torch"] = None
import anyio
from pathlib import Path
from rollouts.engine import serve
from rollouts.errors import ConfigError
try:
    anyio.run(lambda: serve(Path("nowhere"), on_ready=print))
except ConfigError as error:
    print(error)
"""


def python(code: str) -> str:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=60
    )
    return done.stdout


def test_importing_the_engine_loads_no_torch() -> None:
    """The command line imports the engine; torch would delay every command."""
    loaded = "import sys, rollouts.engine; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert python(loaded).strip() == "[]"


def test_without_torch_the_error_says_what_to_install() -> None:
    """The error names the extra to install."""
    assert install_command("engine") in python(WITHOUT)


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The error names the folder and what was expected there."""
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"model: got '.*nowhere'; expected a folder that transformers can load"):
        async with running_server(tmp_path / "nowhere"):
            pass


async def test_no_slots_is_refused() -> None:
    """A number that cannot serve is refused before anything loads."""
    with pytest.raises(ConfigError, match="slots: got 0; expected at least 1"):
        async with running_server(Path("nowhere"), slots=0):
            pass


async def test_an_address_that_is_taken_is_named() -> None:
    """The error names the address."""
    pytest.importorskip("torch")
    from rollouts.engine import DEMO_MODEL

    async with running_server(DEMO_MODEL) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port: got 127.0.0.1:{port}"):
            async with running_server(DEMO_MODEL, port=port):
                pass
