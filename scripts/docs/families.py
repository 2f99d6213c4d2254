"""docs/families.md: the verdicts of the renderer's self-test on each model family.

Needs the test assets: ROLLOUTS_TEST_ASSETS, or ../shared/assets next to the project.
"""

from __future__ import annotations

import functools
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError
from rollouts.renderer import SelfTest, load_tokenizer
from rollouts.renderer.dialects import dialect_of_template
from tests.dialects import TEMPLATES
from tests.families import REAL, SMALL, TOOLS, UNCHECKED, Family, small
from tests.integration.test_sglang_parsers import AGREEING as OF_SGLANG_AGREE
from tests.integration.test_sglang_parsers import DISAGREEMENTS as OF_SGLANG
from tests.integration.test_vllm_parsers import AGREEING as OF_VLLM_AGREE
from tests.integration.test_vllm_parsers import DISAGREEMENTS
from tests.structures import STRUCTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
HEAD = """# Model families

Written by `scripts/docs/write families` from the renderer's self-test; do not edit.
`rollouts check-model --model DIR` prints the same for any model.

Calls are **read** if the dialect parses each call that the template writes (one, two in parallel, nested arguments,
after text) with its name and arguments; **one a turn** if the template writes only one; else **not read**, and a run
with tools starts only with `dialect="plain"`, which parses no calls, or with a dialect that is named together with
`calls="unchecked"`, which reads the replies whatever the template writes into the history.

Each step of a synthetic conversation (opening, two rounds of tools, two user turns) is **exact** (the appended ids
equal the template's own rendering), **forks** (the bridge is right, but the template rewrites earlier messages;
`history=` sets what happens then) or **refused** (a run with such steps does not start). The verdict is the worst of
them, and **refused** if calls are not read.

"""
REAL_HEAD = """## Templates as published

| family | template | dialect | calls | stops at | verdict | forks | refused | known for |
|---|---|---|---|---|---|---|---|---|
"""
SMALL_HEAD = """
## Small templates with the quirks of other families

These families are tested with small templates of the same structure, because theirs were not available or not needed.

| family | template | dialect | calls | stops at | verdict | forks | refused | known for |
|---|---|---|---|---|---|---|---|---|
"""
UNCHECKED_HEAD = """
## Refused templates that are played by name

With `dialect=…` and `calls="unchecked"`; `run.json`, `rollouts show` and `rollouts check-run` say so.

| family | options | calls | verdict |
|---|---|---|---|
"""
NOTATIONS_HEAD = """
## Notations of calls

Each dialect reads the calls of a small template that writes its notation.

| dialect | found in its template | calls |
|---|---|---|
"""
FUNCTIONS = """
## A chat template in Python

The chat template of GLM-4's publisher (glm-4-9b-chat) has names for tools, calls and results that chat messages do not
have, and vLLM 0.33.0's (`examples/tool_chat_template_glm4.jinja`) leaves results out. A function writes the publisher's
format: `chat_template="rollouts.renderer.glm_4:render", dialect="rollouts.renderer.glm_4:Glm4"`; its row is above.
Checkpoints differ in the sentence before the tools: `template_kwargs={"introduction": "…"}`.
"""
JUDGED_HEAD = f"""
## Compared with the parsers of vLLM and SGLang

`scripts/test --extras` runs the servers' own tests of their parsers on the dialects, and prints for each file how many
agree: {OF_VLLM_AGREE} of {OF_VLLM_AGREE + len(DISAGREEMENTS)} of vLLM 0.33.0, and {OF_SGLANG_AGREE} of \
{OF_SGLANG_AGREE + len(OF_SGLANG)} in twelve files of SGLang (August 2026).
They are downloaded from PyPI and GitHub; `python -m scripts.servers.parser_tests --sglang CLONE` takes SGLang's from a
clone that has the commit. Names and arguments are equal in all but these:

| test file | tests that differ | why |
|---|---|---|
"""
WHY_HEAD = """
## Why

The self-test's reason for the first step that is not exact, and for calls that are not read.

"""


class Assets:
    """A substitute for pytest's ``request``, for the fixtures of :mod:`tests.families`."""

    def __init__(self, folder: Path, unpacked: Path) -> None:
        self.folder, self.unpacked = folder, unpacked

    def getfixturevalue(self, name: str) -> Callable[..., Any]:
        fixtures: dict[str, Callable[..., Any]] = {"chat_template": self.template, "small_tokenizer": self.tokenizer}
        return fixtures[name]

    def template(self, name: str) -> str:
        return (self.folder / "templates" / f"{name}.jinja").read_text(encoding="utf-8")

    @functools.cache  # noqa: B019 - lives as long as the script
    def tokenizer(self, name: str, *marks: str) -> Any:
        if not (self.unpacked / name).is_dir():
            with tarfile.open(self.folder / "tokenizers" / f"{name}.tar.xz", "r:xz") as archive:
                if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
                    archive.extractall(self.unpacked, filter="data")
                else:
                    archive.extractall(self.unpacked)
        found = load_tokenizer(self.unpacked / name)
        if marks:
            found.add_tokens(list(marks), special_tokens=True)
        return found


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def steps_of(test: SelfTest, verdict: str) -> str:
    return "; ".join(step.name for step in test.steps if step.verdict == verdict) or "–"


def rows(families: dict[str, Family], assets: Any) -> tuple[str, str]:
    table, why = [], []
    for name, family in families.items():
        renderer = family.make(assets)
        test = renderer.self_test(TOOLS)
        digest = test.template.rpartition("(")[2].rstrip(")")
        stops = " ".join(renderer.stop_texts)
        columns = [name, f"`{digest}`", renderer.dialect.name, str(test.calls), cell(stops), f"**{test.verdict}**"]
        columns += [steps_of(test, "forks"), steps_of(test, "refused"), cell(family.quirk) or "–"]
        table.append(f"| {' | '.join(columns)} |\n")
        first = next((step for step in test.steps if step.verdict != "exact"), None)
        notes = [note.replace(test.template, digest) for note in test.notes if note]
        if first is not None:
            reason = first.reason.replace(test.template, digest)
            why.append(f"- **{name}**, {first.name}: {cell(reason)}\n")
        if test.unread and not steps_of(test, "refused").strip("–"):
            why.append(f"- **{name}**, calls: {cell(test.unread)}\n")
        why += [f"- **{name}**: {cell(note)}\n" for note in notes]
    return "".join(table), "".join(why)


def unchecked_rows(assets: Any) -> str:
    table = []
    for name, dialect in UNCHECKED.items():
        test = {**REAL, **SMALL, **STRUCTURES}[name].make(assets, dialect=dialect, calls="unchecked").self_test(TOOLS)
        options = f'`dialect="{dialect}", calls="unchecked"`'
        table.append(f"| {name} | {options} | {test.calls} | **{test.verdict}** |\n")
    return "".join(table)


def notation_rows() -> str:
    table = []
    for name, template in sorted(TEMPLATES.items()):
        make = small(template, ("<|im_start|>",), ("<|im_end|>",))
        found = "yes" if dialect_of_template(template) == name else "by name"
        table.append(f"| {name} | {found} | {make(None, dialect=name).self_test(TOOLS).calls} |\n")
    return "".join(table)


def judged_rows() -> str:
    counts = Counter((name.partition("::")[0], reason) for name, reason in (DISAGREEMENTS | OF_SGLANG).items())
    return "".join(f"| {file} | {count} | {cell(reason)} |\n" for (file, reason), count in sorted(counts.items()))


def page(assets: Any) -> str:
    """The page; ``assets`` has the fixtures of :mod:`tests.families`: :class:`Assets`, or pytest's ``request``."""
    real, real_why = rows(REAL, assets)
    others, others_why = rows({**SMALL, **STRUCTURES}, assets)
    unchecked = UNCHECKED_HEAD + unchecked_rows(assets)
    tables = (
        REAL_HEAD
        + real
        + SMALL_HEAD
        + others
        + unchecked
        + FUNCTIONS
        + NOTATIONS_HEAD
        + notation_rows()
        + JUDGED_HEAD
        + judged_rows()
    )
    return HEAD + tables + WHY_HEAD + real_why + others_why


def pages() -> dict[Path, str]:
    """The page.

    Raises:
        ConfigError: the test assets are not there.
    """
    folder = Path(os.environ.get("ROLLOUTS_TEST_ASSETS") or ROOT.parent / "shared" / "assets")
    if not folder.is_dir():
        raise ConfigError.of("ROLLOUTS_TEST_ASSETS", str(folder), "the folder of the test assets")
    with tempfile.TemporaryDirectory() as unpacked:
        return {PAGE: page(Assets(folder, Path(unpacked)))}
