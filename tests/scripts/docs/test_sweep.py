"""The sweep over folders of chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs.sweep import main
from tests.dialects import TEMPLATES


def test_templates_are_counted_by_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal templates once; one whose calls no dialect reads is refused unless it is named, and none starts unread."""
    (tmp_path / "a.jinja").write_text(TEMPLATES["longcat_2"])
    (tmp_path / "copy.jinja").write_text(TEMPLATES["longcat_2"])
    (tmp_path / "unknown.jinja").write_text(TEMPLATES["longcat_2"].replace("longcat", "other").replace("arg_", "a_"))
    assert main([str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split("\t")[:3] == ["a.jinja", "longcat_2", "read"]
    assert rows[1].split("\t")[:5] == ["unknown.jinja", "plain", "not read", "refused", "by name: exact"]
    assert rows[2].startswith("2 templates: ")
    assert rows[2].endswith("1 refused, 0 error (1 played by name); 0 started with calls unread")
