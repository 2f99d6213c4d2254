"""Pages in a real browser: what Chromium shows is what the reader of the run reads.

Skipped unless ``--browser`` is given; ``scripts/test --browser`` runs only these. Chromium draws each page without a
window, with a virtual clock that runs until the page waits for nothing.
"""

from __future__ import annotations

import functools
import html.parser
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from rollouts.concurrency.times import Timeline
from rollouts.dtypes import VersionSpan
from rollouts.engine import DEMO_MODEL
from rollouts.errors import Failure
from rollouts.renderer.tokenizer import local_decoder
from rollouts.runs.reader import load_run
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.training.types import Group, Prompt, by_rollout
from rollouts.trajectory import CompletionRecord
from rollouts.views.page import open_source, write_view
from rollouts.views.page.live import LiveView, serving_view
from rollouts.views.page.payload import build_payload

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202e"


@attrs.frozen
class Element:
    """An element of a page, with all text inside it."""

    tag: str
    attributes: dict[str, str]
    text: str

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())


class _Page(html.parser.HTMLParser):
    EMPTY = frozenset({"meta", "input", "br", "img", "link", "line", "rect", "circle", "path", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        if tag in self.EMPTY:
            self.elements.append(Element(tag, found, ""))
        else:
            self._open.append((tag, found, []))

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            name, attributes, texts = self._open.pop()
            self.elements.append(Element(name, attributes, "".join(texts)))
            if name == tag:
                return

    def of(self, name: str) -> list[Element]:
        return [element for element in self.elements if name in element.classes]


@pytest.fixture(autouse=True, scope="module")
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--browser"):
        pytest.skip("scripts/test --browser runs this")


@functools.cache
def _chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found is not None, "no Chromium: on Debian, apt-get install chromium"
    return found


def opened(address: str, *, seconds: float = 8) -> _Page:
    """The page as it is when Chromium has drawn it."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={int(1000 * seconds)}"]
    done = subprocess.run(
        [_chromium(), *options, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=120
    )
    page = _Page(done.stdout)
    (view,) = [element for element in page.elements if element.attributes.get("id") == "view"]
    assert "data-ready" in view.attributes, view.text[:500]
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches with forks of two versions, a dropped group, a failed one, and texts of a hostile model."""
    path = tmp_path_factory.mktemp("view") / "run"
    writer = RunWriter(path, {"recipe": HOSTILE, "tokenizer": str(DEMO_MODEL)})
    for batch in range(2):
        samples = [sample for group in range(2) for sample in _group(2 * batch + group)]
        writer.write_batch(samples, {"batch": batch, "ended": 105.0 + batch, "reward/mean": 0.5, "reward/std": 0.5})
    dropped = _group(4)
    failed = _group(5)
    failed[1].failure = Failure("EnvironmentFailure", HOSTILE, "group 5", "Traceback: line 1", "environment_step")
    writer.on_group(Group(Prompt("?", group_index=4), tuple(dropped), "dropped", "check_reward_nonzero_std"))
    writer.on_group(Group(Prompt("?", group_index=5), tuple(failed), "failed", "environment"))
    return path


def _group(group: int) -> list[Sample]:
    """Two rollouts; the second has two branches. Tokens of the demo model's vocabulary."""
    rng = np.random.default_rng(group)
    found = []
    for index, branches in ((2 * group, 1), (2 * group + 1, 2)):
        ids = rng.integers(0, 250, 40).astype(np.int32)
        for branch in range(branches):
            mask = np.zeros(40, bool)
            mask[10 + 15 * branch : 20 + 15 * branch] = True
            start, stop = 10 + 15 * branch, 20 + 15 * branch
            own = Sample(f"question {group} {HOSTILE}", "", ids, mask, float(index % 2), group_index=group, index=index)
            own.rollout_id = index
            own.rollout_log_probs = np.where(mask, -rng.random(40), 0).astype(np.float32)
            own.versions = [VersionSpan("v1", start, start + 4), VersionSpan("v2", start + 4, stop)]
            own.completions = [CompletionRecord(f"r{branch}", start, stop, "stop", 0, 8, 0.5)]
            began = 100.0 + index + 4 * branch
            own.times = Timeline([("generating", "http://a", began, 1.5), ("tool", "add", began + 1.5, 2.0)])
            calls = [{"function": {"name": "add", "arguments": {"a": HOSTILE}}}]
            own.messages = [{"role": "assistant", "content": HOSTILE, "tool_calls": calls}]
            own.messages += [{"role": "tool", "content": HOSTILE}]
            found.append(own)
    return found


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    """The address of the page of the run."""
    out = run.with_suffix(".html")
    write_view([build_payload(open_source(run), local_decoder(str(DEMO_MODEL)))], out)
    return out.as_uri()


def test_the_rows_and_squares_are_the_groups_and_samples(run: Path, page: str) -> None:
    """One row a group of any outcome, one square a sample; outcomes are named."""
    shown = opened(f"{page}#tab=groups")
    stored = load_run(run, "all")
    rows = shown.of("row")
    assert [int(row.attributes["data-group"]) for row in rows] == stored.group_indices
    assert len(shown.of("square")) == len(stored)
    outcomes = [element.text for element in shown.of("outcome")]
    assert outcomes == ["batch 0", "batch 0", "batch 1", "batch 1", "dropped", "failed"]
    assert shown.of("statistics")[0].text == "0.5 ± 0.5", "two rollouts, one of them with two branches"


@pytest.mark.parametrize(("group", "sample"), [(0, 0), (3, 2)])
def test_the_marked_tokens_are_the_mask(run: Path, page: str, group: int, sample: int) -> None:
    """Every token is there with its text, and exactly the trained ones are marked."""
    shown = opened(f"{page}#group={group}&sample={sample}")
    stored = load_run(run, "all").group(group)[sample]
    tokens = shown.of("token")
    assert [int(token.attributes["data-place"]) for token in tokens] == list(range(len(stored)))
    marked = [int("s" in token.classes) for token in tokens]
    assert marked == list(stored.loss_mask)
    (view,) = shown.of("sample")
    assert view.attributes["data-trained"] == str(stored.sampled_tokens)


def test_layers_of_versions_forks_and_cached_tokens(page: str) -> None:
    """Each layer colours the tokens that it is about: replies by version, the shared prefix, the cached prefix."""
    by_version = opened(f"{page}#group=0&sample=2&layer=version")
    colours = [
        re.search(r"hsl\([^)]*\)|rgb\([^)]*\)", token.attributes.get("style", "")) for token in by_version.of("s")
    ]
    assert len({colour[0] for colour in colours if colour}) == 2
    shared = opened(f"{page}#group=0&sample=2&layer=fork").of("shared")
    assert len(shared) == 40, "both branches have the same ids"
    assert len(opened(f"{page}#group=0&sample=2&layer=cached").of("cached")) == 8


def test_two_samples_from_their_first_different_token(run: Path, page: str) -> None:
    """The number of shared tokens is that of the stored ids."""
    shown = opened(f"{page}#group=1&sample=0&against=1")
    left, right = (load_run(run, "all").group(1)[number].tokens for number in (0, 1))
    shared = next(place for place, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
    (view,) = shown.of("compare")
    assert view.attributes["data-shared"] == str(shared)
    assert len(shown.of("token")) == 2 * (40 - shared)


def test_a_hostile_text_stays_text(run: Path, page: str) -> None:
    """In rows, transcript, tool call, tool result, failure and title; nothing of it runs or becomes an element."""
    for place in ("#tab=groups", "#group=5&sample=1", "#tab=overview"):
        shown = opened(page + place)
        assert "run · rollouts" in [element.text for element in shown.elements if element.tag == "title"]
        assert not [element for element in shown.elements if element.tag == "img"]
    cards = opened(f"{page}#group=0&sample=0").of("card")
    assert len(cards) == 2
    assert all("</script><script>" in card.text and "⟨U+202E⟩" in card.text for card in cards)


def test_the_overview_counts_what_the_files_count(page: str) -> None:
    """Failures by cause, the verdict on the laws, the reasons of what is in no batch."""
    shown = opened(page)
    (failures,) = shown.of("failures")
    assert "1 × environment_step" in failures.text
    assert shown.of("verdict")
    assert shown.of("chart")


def test_the_first_screen_has_numbers_and_both_ends(run: Path, page: str) -> None:
    """The totals, a histogram, and one click to the best, the worst and a failed sample; two batches are a table."""
    shown = opened(page)
    (tiles,) = shown.of("tiles")
    assert tiles.text.startswith("batches2groups kept4groups dropped1groups failed1samples18")
    (ends,) = shown.of("extremes")
    assert re.search(r"best sample: reward 1 .*worst sample: reward 0 ", ends.text)
    assert "most frequent failure: 1 × environment_step group 5, sample 1" in ends.text
    links = [element.attributes["href"] for element in shown.elements if element.tag == "a"]
    assert links[2].endswith("&group=5&sample=1")
    found = [dict(part.split("=") for part in link[1:].split("&")) for link in links[:2]]
    stored = load_run(run, "all")
    assert [stored.group(int(one["group"]))[int(one["sample"])].reward for one in found] == [1.0, 0.0]
    assert [len(opened(f"{page}{link}").of("sample")) for link in links[:2]] == [1, 1]
    (numbers,) = shown.of("numbers")
    assert "batch 1" in numbers.text
    assert "reward of a batch" not in "".join(element.text for element in shown.of("chart"))
    (verdict,) = shown.of("verdict")
    listed = re.split(r"\d+ more", verdict.text)[0]
    assert listed.count("; expected ") == 3, "the others are folded"


def test_three_batches_are_lines_and_sources_are_rows(tmp_path: Path) -> None:
    """A chart of the reward; a row for each environment of a mix, with its share of the reward."""
    writer = RunWriter(tmp_path / "run", {"tokenizer": str(DEMO_MODEL)})
    for batch in range(3):
        samples = _group(batch)
        for sample in samples:
            sample.metadata = {"environment": "easy" if batch else "hard"}
            sample.reward = 3.0 if batch else 1.0
        writer.write_batch(samples, {"batch": batch, "reward/mean": 0.5})
    out = tmp_path / "page.html"
    write_view([build_payload(open_source(tmp_path / "run", verify=False), local_decoder(str(DEMO_MODEL)))], out)
    shown = opened(out.as_uri())
    assert "reward of a batch" in "".join(element.text for element in shown.of("chart"))
    (sources,) = shown.of("sources")
    assert re.search(r"hard11114 %.*easy22386 %", sources.text)


def test_the_timeline_has_a_lane_for_each_rollout_and_names_what_was_waited_for(run: Path, page: str) -> None:
    """A seal for each batch that has its time, and the last rollout of each batch."""
    shown = opened(f"{page}#tab=timeline")
    (lanes,) = shown.of("lanes")
    stored = load_run(run, "all")
    assert lanes.attributes["data-lanes"] == str(sum(len(by_rollout(group)) for group in stored.groups()))
    assert lanes.attributes["data-spans"] == str(2 * len(stored))
    assert lanes.attributes["data-seals"] == "2"
    (held_up,) = shown.of("heldup")
    assert "batch 1" in held_up.text
    assert "tool add" in held_up.text


def test_ten_thousand_samples_open_in_two_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the time that the browser takes for an empty page, the least of three."""
    writer = RunWriter(tmp_path / "run", {"tokenizer": str(DEMO_MODEL)})
    for batch in range(10):
        rng = np.random.default_rng(batch)
        samples = [
            Sample("?", "", rng.integers(0, 250, 60).astype(np.int32), None, float(rng.random() < 0.5))
            for _ in range(1000)
        ]
        for number, sample in enumerate(samples):
            sample.index = 1000 * batch + number
            sample.group_index = sample.index // 8
        writer.write_batch(samples, {"batch": batch})
    source = open_source(tmp_path / "run", verify=False)
    (path,) = write_view([build_payload(source, local_decoder(str(DEMO_MODEL)))], tmp_path / "page.html")
    empty = tmp_path / "empty.html"
    empty.write_text("<div id=view data-ready=0></div>")
    seconds = min(_seconds(path.as_uri() + "#tab=groups") - _seconds(empty.as_uri()) for _ in range(3))
    with capsys.disabled():
        print(f"\n10,000 samples, {path.stat().st_size / 1e6:.2f} MB: open in {seconds:.2f} s")
    assert seconds < 2


def _seconds(address: str) -> float:
    start = time.perf_counter()
    opened(address, seconds=1)
    return time.perf_counter() - start


@pytest.fixture
def live(run: Path) -> Iterator[str]:
    """The address of a live view of the run."""
    view = LiveView([functools.partial(open_source, run, verify=False)], [None])
    with serving_view(view, 0) as url:
        yield url


def test_a_live_view_reads_its_server(run: Path, live: str) -> None:
    """The page asks for its parts, and draws them."""
    shown = opened(f"{live}#group=0&sample=0", seconds=1)
    assert len(shown.of("row")) == 6
    assert len(shown.of("token")) == 40
