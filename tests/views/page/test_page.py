"""Pages are whole files: nothing is loaded, no text of a model is markup, and large runs are split between groups."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.views.page import open_source, write_view
from rollouts.views.page.payload import Chunk, Payload, build_payload
from tests.stored_runs import store_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def test_texts_are_neither_markup_nor_script(tmp_path: Path) -> None:
    """Prompt, message and failure of a hostile model are base64; the page has its own script only."""
    messages = [{"role": "user", "content": HOSTILE}]
    sample = Sample(HOSTILE, "", [1], [0], 0.0, group_index=0, index=0, messages=messages, label=HOSTILE)
    RunWriter(tmp_path / "run", {"recipe": HOSTILE}).write_batch([sample], {})
    (page,) = write_view([build_payload(open_source(tmp_path / "run", verify=False), None)], tmp_path / "a.html")
    text = page.read_text(encoding="utf-8")
    assert "alert(1)" not in text
    assert len(re.findall(r"<script>", text)) == 1


async def test_the_policy_allows_the_pages_own_script_and_style_only(tmp_path: Path) -> None:
    """The hashes equal those of the script and style; the only network address in the page is the name of SVG."""
    await store_run(tmp_path / "run", batches=1)
    (page,) = write_view([build_payload(open_source(tmp_path / "run"), None)], tmp_path / "a.html")
    text = page.read_text(encoding="utf-8")
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src &#x27;sha256-{digest}&#x27;" in text
    assert "default-src &#x27;none&#x27;" in text
    assert "connect-src" not in text
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}


def test_a_large_run_is_several_pages(tmp_path: Path) -> None:
    """Each page has the head and some chunks, none is cut, and every page knows which groups the others have."""
    payload = Payload(b"head", [Chunk(2 * number, 2, bytes(900)) for number in range(5)], 0)
    pages = write_view([payload], tmp_path / "run.html", limit=2500)
    assert [page.name for page in pages] == ["run.html", "run.1.html", "run.2.html"]
    held = [re.findall(r'id="(chunk-0-\d+|head-0)"', page.read_text(encoding="utf-8")) for page in pages]
    assert held == [["head-0", "chunk-0-0", "chunk-0-2"], ["head-0", "chunk-0-4", "chunk-0-6"], ["head-0", "chunk-0-8"]]
    (settings,) = re.findall(r'id="settings">(.*?)<', pages[0].read_text(encoding="utf-8"))
    assert b'"pages":[["run.html",0,4],["run.1.html",4,8],["run.2.html",8,10]]' in base64.b64decode(settings)
