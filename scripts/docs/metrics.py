"""docs/metrics.md: the names of the metrics of samples and of batches, from the tables of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollouts.training.metric_names import OF_BATCHES, OF_PROGRAMS, OF_SAMPLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

_HEAD = """# Names of metrics

Written by `scripts/docs/write metrics`; do not edit. In a name, upper case stands for a part that varies.
"""

_CHAPTERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Metrics of a sample",
        """`sample.metrics` is a dict of numbers, summed over the episode. An environment adds its own names with
`StepResult.metrics` or `ToolResult.metrics`. A count of 0 is often absent, so a reward reads it with
`sample.metrics.get("tool_errors", 0)`. The rehearsal of `rollouts run` prints each name that a reward or filter reads
and that no rollout has, with the nearest names; with `sample.metrics["tool_eror"]` the run does not start.
""",
        OF_SAMPLES,
    ),
    ("Further metrics of agents that are programs", "The last branch of a rollout has them.\n", OF_PROGRAMS),
    (
        "Metrics of a batch",
        """A line of `metrics.jsonl`; `manager.metrics` after `generate_batch()`; what `on_batch` and loggers get.
""",
        OF_BATCHES,
    ),
)


def pages() -> dict[Path, str]:
    lines = [_HEAD]
    for title, text, names in _CHAPTERS:
        lines += [f"## {title}\n", text, "| name | is |", "|---|---|"]
        lines += [f"| `{name}` | {meaning.replace('``', '`')} |" for name, meaning in names.items()]
        lines.append("")
    return {PAGE: "\n".join(lines)}
