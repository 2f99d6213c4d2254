"""Self-tests of many chat templates: ``python -m scripts.docs.sweep FOLDER [FOLDER ...]``.

Each ``*.jinja`` below the folders gets the demo model's tokenizer with the template's marks as special tokens. It is
tried with the marks that look like ends of a turn as stop ids, then also with the headers of other roles, at which
models without an end mark stop. The row is that of the better verdict.

A template that starts with calls unread would train on calls that are not run: the exit code is 1 if there is one.
A refused one is also tried as it is played by name, with ``calls="unchecked"``.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.dtypes import Tool
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer

__all__ = ["main", "result_of"]

MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,24}\]|</?s>|<(?:eos|bos)>"
    r"|<(?:start|end)_of_turn>|<\|?[a-z]+_?(?:start|end)\|?>|\[e~\[|<turn\|>|<(?:start|end)_function_[a-z]+>|<escape>"
)
ENDS = re.compile(r"end|eot|eom|eos|</s>|return|\|call\|?|calls\||flush|END_|\[e~\[|<turn\|>|start_function_response")
HEADERS = re.compile(r"\|(?:user|observation)\|")
ORDER = ("exact", "forks", "refused", "error")
TOOLS = [
    Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    Tool("now", "The time.", {"type": "object", "properties": {"x": {"type": "string"}}}),
]


def result_of(source: str, **options: Any) -> tuple[str, str, str, str]:
    """Dialect, whether calls are read, verdict, and why it is refused; the options are those of the renderer."""
    marks = list(dict.fromkeys(MARK.findall(source)))
    found = []
    for wanted in ((ENDS,), (ENDS, HEADERS)):
        stops = [mark for mark in marks if any(pattern.search(mark) for pattern in wanted)]
        found.append(_tested(source, marks, stops, options))
    return min(found, key=lambda row: ORDER.index(row[2]))


def by_name(source: str) -> str:
    """The verdict with ``calls="unchecked"``: any dialect gives it, since a dialect reads the replies only."""
    return result_of(source, dialect="hermes", calls="unchecked")[2]


def _tested(source: str, marks: list[str], stops: list[str], options: Mapping[str, Any]) -> tuple[str, str, str, str]:
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer.add_tokens(marks, special_tokens=True)
    ids = [*map(tokenizer.convert_tokens_to_ids, stops), tokenizer.eos_token_id]
    try:
        renderer = Renderer(tokenizer, chat_template=source, stop_token_ids=list(dict.fromkeys(ids)), **options)
        test = renderer.self_test(TOOLS)
    except ConfigError as error:
        return "-", "-", "error", str(error)
    why = ""
    try:
        test.raise_if_refused()
    except ConfigError as error:
        why = str(error)
    return renderer.dialect.name, str(test.calls), "refused" if why else test.verdict, why


def main(folders: list[str]) -> int:
    sources: dict[str, tuple[Path, str]] = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            sources.setdefault(hashlib.sha256(source.encode()).hexdigest(), (path, source))
    counts, unread, opened = Counter[str](), 0, 0
    for path, source in sources.values():
        dialect, calls, verdict, why = result_of(source)
        counts[verdict] += 1
        unread += verdict in ("exact", "forks") and calls not in ("read", "one a turn")
        named = by_name(source) if verdict == "refused" else "-"
        opened += named in ("exact", "forks")
        print(f"{path.name}\t{dialect}\t{calls}\t{verdict}\tby name: {named}\t{why[:160]}", flush=True)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER)
    print(f"{len(sources)} templates: {total} ({opened} played by name); {unread} started with calls unread")
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
