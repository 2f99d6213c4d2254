"""Runs a package's own tests of tool parsers on this project's dialects, with a plugin that stubs the package."""

import collections
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "parser-tests"
"""The folder of the downloaded tests."""


def outcomes_of(
    package: str, dialects: Mapping[str, str], arguments: Sequence[str], config: pytest.Config, report: Path
) -> dict[str, dict[str, str]]:
    """The outcome of each test that parses text, by file and name.

    Args:
        package: the folder of the tests, also the begin of the plugin's name.
        dialects: the dialect of each parser, by its name or module.
        arguments: what pytest runs.
        config: of this run; the tests are skipped outside of ``scripts/test --extras``.
        report: a new file.
    """
    if "extra" not in config.getoption("markexpr"):
        pytest.skip("tests of parsers take minutes; scripts/test --extras runs them")
    folder = FOLDER / package
    if not folder.exists():
        pytest.skip(f"{folder} is missing; scripts/test --extras downloads it")
    path = os.pathsep.join([str(Path(__file__).parent), str(folder)])
    variables = {"PYTHONPATH": path, "JUDGE_REPORT": str(report), "JUDGE_DIALECTS": json.dumps(dialects)}
    plugins = ["-p", "parser_judge", "-p", f"{package}_stub", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-c", os.devnull, "--rootdir", str(folder), *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, check=False)
    found: dict[str, dict[str, str]] = {}
    for name, result in json.loads(report.read_text()).items():
        if result["outcome"] in ("passed", "failed"):
            file = name.partition("::")[0].rpartition("/")[2]
            number = re.search(r"expected_tool_calls(\d+)-[^\[]*\]$", name)  # a name that holds the whole text
            test = f"{name.partition('[')[0].rpartition('::')[2]}[{number[1]}]" if number else name.rpartition("::")[2]
            holder = name.split("::")[-2] if name.count("::") == 2 and package == "sglang" else ""
            found[f"{file}::{f'{holder}.' if holder else ''}{test}"] = result
    return found


def table_of(package: str, outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """How many tests of each file agree and differ."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, result in outcomes.items():
        counts[name.partition("::")[0]][result["outcome"]] += 1
    counts["all"] = sum(counts.values(), collections.Counter())
    rows = "".join(f"{file:44}{found['passed']:5}{found['failed']:8}\n" for file, found in counts.items())
    return f"\n{f'test file of {package}':44}agree  differ\n{rows}"
