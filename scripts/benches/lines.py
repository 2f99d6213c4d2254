"""What the benchmarks say: one line each, with its target, and the table and the page that are made of them.

A line is a ratio of two things measured in one run, bytes, or milliseconds; it is the median of its rounds, beside the
lowest and the highest of them.
"""

from __future__ import annotations

import operator
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

__all__ = ["Line", "machine", "page"]


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
    """The machine, as far as it matters."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def page(lines: Sequence[Line], where: Mapping[str, Any], tokenizer: str) -> str:
    """``docs/performance.md``."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows += ["| " + " | ".join(line.cells()) + " |" for line in lines]
    short = [line.name for line in lines if not line.ok]
    verdict = f"Short of its target: {', '.join(short)}." if short else "Every target is met."
    about = f"{where['cpus']} CPUs ({where['architecture']}, {where['system']}), Python {where['python']}"
    return f"""# Performance

Written by `scripts/bench --page docs/performance.md`; `scripts/bench` prints it, `--json` gives it to programs, and the
exit code is 1 where a target is missed. {verdict}

Measured on {about}, load {where["load"]} while it ran, tokenizer {tokenizer}. Only CPU time of the client's process is
counted, never wall time; the server is a stub in a process of its own that answers prebuilt bytes
(`rollouts.testing.canned`). Each number is the median of rounds that take turns, so that both sides of a ratio see the
same machine; absolute times in the last column belong to this machine and this moment.

{chr(10).join(rows)}

- `lean` is a loop by hand: aiohttp, a typed decode, arrays, kept request bytes, each new text tokenised once. It checks
  nothing, waits without deadlines and reads no reply: it knows beforehand what others decode and parse to find out, and
  what to answer. `naive` is httpx, `json`, lists and a file of JSON lines. Ours has everything on: parser, checks,
  masks, metrics, deadlines and the journal. It needs no aiohttp: a request over its own connections costs a third.
- S is 4 turns of 512 tokens, L one reply of 8,192, A 32 turns of 64, H 16 turns of 32 behind 16,000 tokens, G groups of
  eight S with a reward in a thread and a filter.
- Texts are consecutive pages of a book, no observation is given twice, and ours begins each round as if it had rendered
  nothing before: without openings, and without the words that it looks up instead of encoding them again. The tokenizer
  that all the loops share keeps what it keeps.
- The journal has the texts of a sample as they are, so with it on each response is decoded once more than the replies.
- A rollout in flight holds ids, masks, logprobs, the request that is being sent, its task and its connection, and the
  texts of its messages, which are as long as the model and the environment made them: told apart, and with them.
- Counters that do not depend on a machine are tests: `tests/test_costs.py`.
- `docs/peers.md` has the same jobs played by strands-sglang, verifiers and slime's own loop.
"""
