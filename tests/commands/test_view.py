"""``rollouts view``: what it writes, where, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from rollouts.commands import main
from tests.stored_runs import store_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "run"
    anyio.run(partial(store_run, path))
    return path


def test_a_page_is_written_and_not_written_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is the run's, in the current folder; ``--overwrite`` replaces it."""
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(run)]) == 0
    assert "run.html: " in capsys.readouterr().out
    assert (tmp_path / "run.html").exists()
    assert main(["view", str(run)]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main(["view", str(run), str(run), "--overwrite", "--no-verify"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "RUN", "RUN"], "RUN: got"),
        (["RUN", "--out", "a.txt"], "--out: got 'a.txt'; expected a file FILE.html"),
        (["RUN", "--out", "RUN/batches/a.html"], "--out: got"),
        (["RUN", "--port", "1"], "--port: got 1; expected --serve with it"),
        (["RUN", "--serve", "--out", "a.html"], "--out: got 'a.html'; expected no file with --serve"),
        (["none"], "RUN: got 'none'"),
    ],
)
def test_what_it_refuses(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that names the argument."""
    assert main(["view", *(argument.replace("RUN", str(run)) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err.replace(str(run), "RUN")
    assert err.count("\n") == 1 + err.count("ids instead of texts")
