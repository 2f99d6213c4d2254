"""``rollouts doctor``: what is installed, and which verb lacks which extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import __version__
from rollouts.base.extras import install_command
from rollouts.commands import main
from rollouts.commands.doctor import NEEDS, extras_of, lacking, report_text

REQUIRES = [
    "anyio>=4",
    'torch>=2.6; extra == "engine"',
    'aiohttp>=3.10; extra == "engine"',
    "aiohttp>=3.10; extra == 'serve'",
    'ruff>=0.12; extra == "dev"',
    'mkdocs-material>=9.7; extra == "docs"',
    'uvloop; sys_platform == "no such platform" and extra == "serve"',
]


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({}, {"engine": ["torch>=2.6", "aiohttp>=3.10"], "serve": ["aiohttp>=3.10"]}),
        ({"torch": "2.13.0+cpu", "aiohttp": "3.9"}, {"engine": ["aiohttp>=3.10"], "serve": ["aiohttp>=3.10"]}),
        ({"torch": "2.13.0+cpu", "aiohttp": "3.12"}, {"engine": [], "serve": []}),
    ],
    ids=["nothing", "an old version", "all"],
)
def test_an_extra_names_the_requirements_that_are_not_satisfied(
    installed: dict[str, str], missing: dict[str, list[str]]
) -> None:
    """Missing packages and wrong versions; extras for developers and other platforms are left out."""
    assert extras_of(REQUIRES, installed.get) == missing


def test_a_verb_lacks_an_extra_that_is_not_whole() -> None:
    """Each verb that needs it is listed with the pip command."""
    extras: dict[str, list[str]] = {extra: [] for extra in NEEDS.values()}
    assert lacking(extras) == {}
    assert lacking({**extras, "serve": ["aiohttp>=3.10"]}) == {"serve-env": "serve", "up": "serve"}
    assert lacking({**extras, "images": ["pillow>=10"]}) == {"--images, run visual or geo3k": "images"}
    report = {
        "rollouts": "1",
        "python": "3",
        "platform": "p",
        "libraries": {"anyio": "4", "uvloop": None},
        "gpu": False,
        "torch": None,
        "sandbox": {"mechanisms": ["seccomp"], "not_enforced": {"reading": "no Landlock"}, "error": None},
        "extras": {"serve": ["aiohttp>=3.10"]},
        "lacking": {"serve-env": "serve"},
    }
    text = report_text(report)
    assert "torch      not installed; nvidia-smi not found" in text
    assert "sandbox    seccomp: does not contain reading" in text
    assert "  serve  missing: aiohttp>=3.10" in text
    assert f"serve-env: {install_command('serve')}" in text


def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The values of this installation; PyTorch's build is read without importing it."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rollouts"] == __version__
    assert report["python"] == sys.version.split()[0]
    assert {"engine", "parquet"} <= report["extras"].keys()
    assert not any(name.startswith(("dev", "test", "bench")) for name in report["extras"])
    assert set(report["lacking"].items()) <= set(NEEDS.items())


@pytest.mark.parametrize(
    ("hidden", "arguments", "message"),
    [
        ("torch", ["run", "calculator", "--out", "run"], f"needs torch: {install_command('engine')}, or --endpoint"),
        ("aiohttp", ["serve-env", "calculator"], f"serve-env needs aiohttp: {install_command('serve')}"),
        ("aiohttp", ["up", "calculator", "--out", "run"], f"up needs aiohttp: {install_command('serve')}"),
        ("aiohttp", ["serve"], install_command("engine")),
        (
            "PIL",
            ["run", "visual", "--endpoint", "http://127.0.0.1:9", "--model", "none", "--out", "run"],
            f"visual: Pillow is not installed; {install_command('images')}",
        ),
        (
            "prometheus_client",
            ["run", "calculator", "--metrics-port", "0", "--out", "run"],
            f"prometheus-client is not installed: {install_command('prometheus')}",
        ),
        (
            "opentelemetry.trace",
            ["run", "calculator", "--trace", "--out", "run"],
            f"opentelemetry-api is not installed: {install_command('otel')}",
        ),
    ],
    ids=[
        "run without torch",
        "serve-env without aiohttp",
        "up without aiohttp",
        "serve without aiohttp",
        "run visual without Pillow",
        "run --metrics-port without prometheus-client",
        "run --trace without opentelemetry-api",
    ],
)
def test_a_verb_without_its_extra_names_the_pip_command(
    hidden: str, arguments: list[str], message: str, tmp_path: Path
) -> None:
    """Exit code 2 and one line, before a file is written."""
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\nfrom rollouts.commands import main; sys.exit(main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.iterdir()) == []
