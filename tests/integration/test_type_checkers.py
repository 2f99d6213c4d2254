"""Type checkers see the mistakes that users make. The gate shows it for mypy; this is pyright, which editors use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra

WRONG = Path(__file__).parents[1] / "wrong_types.py"


def test_pyright_finds_each_mistake(tmp_path: Path) -> None:
    """Each comment that ignores an error stands on a line with an error, and there is no other error."""
    pytest.importorskip("pyright")
    (tmp_path / "pyrightconfig.json").write_text('{"reportUnnecessaryTypeIgnoreComment": "error"}')
    (tmp_path / "wrong.py").write_text(WRONG.read_text())
    (tmp_path / "more.py").write_text("number: int = 3  # type: ignore[assignment]\n")
    line = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [(Path(error["file"]).name, error["rule"]) for error in found] == [
        ("more.py", "reportUnnecessaryTypeIgnoreComment")
    ]
