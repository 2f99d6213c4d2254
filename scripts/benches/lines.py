"""The results of the benchmarks: one line each with its target, and the table and the page built from them.

A line is a ratio of two measurements of one run, bytes, or milliseconds; it has the median of its rounds, the lowest
and the highest.
"""

from __future__ import annotations

import operator
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

__all__ = ["Line", "calls_section", "machine", "page"]


@attrs.frozen
class Line:
    """One measured number."""

    name: str
    what: str
    value: float
    low: float
    high: float
    rounds: int
    target: float | None = None
    sense: Literal["at most", "at least"] = "at most"
    details: Mapping[str, float] = attrs.field(factory=dict)

    @classmethod
    def of(cls, name: str, what: str, values: Sequence[float], target: float | None = None, **more: Any) -> Line:
        """From the value of each round."""
        return cls(name, what, statistics.median(values), min(values), max(values), len(values), target, **more)

    @property
    def ok(self) -> bool:
        if self.target is None:
            return True
        good = operator.le if self.sense == "at most" else operator.ge
        return bool(good(self.value, self.target))

    def to_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ok": self.ok}

    def cells(self) -> list[str]:
        """As a row of a table."""
        target = "" if self.target is None else f"{self.sense} {self.target:g}"
        verdict = "" if self.target is None else "yes" if self.ok else "NO"
        spread = f"{self.low:.2f} to {self.high:.2f} ({self.rounds})"
        details = ", ".join(f"{name} {value:,.3g}" for name, value in self.details.items())
        return [self.name, self.what, f"{self.value:.2f}", spread, target, verdict, details]


COLUMNS = ("name", "what", "median", "lowest to highest (rounds)", "target", "met", "in it")


def machine() -> dict[str, Any]:
    """The relevant facts of the machine."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def calls_section(rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page with the rows of ``scripts/bench calls``, and of the same with ``--cpu``."""
    of_time = {row["part"]: row["share"] for row in times}
    cells = [
        f"| {row['part']} | {row['calls an episode']:,.0f} | {row['share']} | {of_time.get(row['part'], '0%')} |"
        for row in rows
    ]
    return f"""## An episode by part

Calls of functions and CPU time in an episode of three turns of 256 tokens with a calculator, by folder of the package
and by library; a function written in C counts for its caller. `scripts/bench calls` prints the calls, of which
`tests/test_costs.py` has the limits; with `--cpu` it samples the CPU time.

| part | calls | share | share of the CPU time |
|---|---|---|---|
{chr(10).join(cells)}
"""


def page(lines: Sequence[Line], where: Mapping[str, Any], tokenizer: str, by_part: str) -> str:
    """Build ``docs/performance.md``; ``by_part`` is the result of :func:`calls_section`."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows += ["| " + " | ".join(line.cells()) + " |" for line in lines]
    short = [line.name for line in lines if not line.ok]
    verdict = f"Missed targets: {', '.join(short)}." if short else "Every target is met."
    about = f"{where['cpus']} CPUs ({where['architecture']}, {where['system']}), Python {where['python']}"
    return f"""# Performance

Written by `scripts/bench --page docs/performance.md`; `scripts/bench` prints it, `--json` prints JSON, and the exit
code is 1 if a target is missed. {verdict}

Measured on {about}, load {where["load"]} while it ran, tokenizer {tokenizer}. Only CPU time of the client's process is
counted, never wall time; the server is a stub in its own process that responds with prebuilt bytes
(`rollouts.testing.canned`). Each number is the median of alternating rounds, so that both sides of a ratio see the same
machine; the absolute times in the last column are valid for this machine and this run only.

{chr(10).join(rows)}

- S, L, A and H are in groups of eight, as in use; `single` has another prompt for each sample. Two samples share
  the prompt of their group and the reply of the server, no other text.
- `lean` is a hand-written loop: aiohttp, a typed decode, arrays, reused request bytes, each new text tokenised once,
  the prompt of a group once for all its samples, with `fastokens` as ours; the last column has the ratio to the same
  loop with `tokenizers`. It has no checks and no deadlines, and does not decode or parse replies: it knows their
  content, and the results of the tools, beforehand. `naive` is httpx, `json`, lists and a file of JSON lines. Ours has
  everything on: parser, checks, masks, metrics, deadlines and the journal. It does not use aiohttp: a request over its
  own connections costs a third.
- S is 4 turns of 512 tokens, L one reply of 8,192, A 32 turns of 64, H 16 turns of 32 behind 16,000 tokens, G is S with
  a reward in a thread and a filter.
- Texts are pages of a book; no two samples or turns have the same observation. Our cache of openings is empty at
  the start of each round. The tokenizer and the fast encoder, which all loops share, keep their own caches.
- The journal stores the texts of a sample, so with the journal on each response is decoded once more than the replies.
- The memory of a rollout in flight is its ids, masks, logprobs, the request that is being sent, its task and its
  connection. The texts of its messages, whose length depends on model and environment, are excluded in the median, and
  included in the last column.
- Counters that do not depend on the machine are tests: `tests/test_costs.py`.
- `scripts/bench scheduler` measures what the scheduler alone costs a rollout, by file and by function.
- `docs/scale.md` has what 100,000 rollouts in flight cost one parent, and its pauses.
- `docs/programs.md` has what a call of a program costs the gateway.
- `docs/peers.md` compares the same jobs in strands-sglang and verifiers, and calls of slime's manager.
  `docs/internals.md` has what single parts save.

{by_part}"""
