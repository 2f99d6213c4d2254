"""The card of a curated data set: its rows, the account of every rollout, and the settings that a trainer needs.

Invariant: the card has no time and no path but the paths of the command, so that equal curations have equal cards.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rollouts.base.storable import to_plain
from rollouts.curation.curate import Account, Curation, Quantiles
from rollouts.curation.rows import COLUMNS, Target
from rollouts.runs.columns import type_name

__all__ = ["account_table", "card", "command_of", "reweighted"]

_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

_TRAINERS: dict[Target, str] = {
    "tokens": """The ids are the sampled ones, and `labels` is -100 wherever the policy did not sample. Nothing is
tokenized again, so the model must have the tokenizer of the policy that sampled.

- TRL `SFTTrainer`: `SFTConfig(max_length=None)`, or at least {longest}: a shorter one cuts rows silently. Leave
  `completion_only_loss` and `assistant_only_loss` unset, because the trainer takes `labels` as they are; and
  `packing=False`, unless the attention of the model separates packed rows.
- axolotl: `datasets: [{{path: FOLDER, type: }}]` with an empty `type`, on a data set without `source`
  (`--without-source`), and a `sequence_len` of at least {longest}.
- LLaMA-Factory: `tokenized_path: PATH`, with
  `DatasetDict(train=load_dataset(FOLDER, split="train")).save_to_disk(PATH)` of `datasets`. It cuts nothing.""",
    "chat": """The trainer renders and tokenizes a chat row again, so its ids may differ from the sampled ones, and
the trainer decides which are trained. `--to tokens` has the exact ids and the exact mask.

- TRL `SFTTrainer` trains **every** token of `messages`, also of system, user and tools, unless
  `SFTConfig(assistant_only_loss=True)` and a chat template with `{{% generation %}}` markers are given.
- axolotl: `type: chat_template`, `roles_to_train: [assistant]`, `train_on_eos: turn`.
- LLaMA-Factory, where the `file_name` of `dataset_info.json` is `data` of this folder, with the fields
  `{{"formatting": "openai", "columns": {{"messages": "messages", "tools": "tools"}}, "tags": {{"role_tag": "role",
  "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
  "function_tag": "function", "system_tag": "system"}}}}`.""",
    "pairs": """A pair is two replies to one exact context: the first reply in which a rollout that passed differs
from a rollout that did not. The verdict is that of the whole rollout (`source.credit`), not of the reply.

- TRL `DPOTrainer`, `RewardTrainer`: the columns as they are. Every token after the prompt counts, which is one reply.
- LLaMA-Factory takes one message as `chosen`, and no list of one: it does not take these columns.""",
    "kto": """A row is the last reply of a rollout after its context. The label is that of the whole rollout
(`source.credit`).

- TRL `KTOTrainer`: the columns as they are. Set `desirable_weight` and `undesirable_weight` by the share of labels.
- LLaMA-Factory takes the whole conversation in one column: it does not take these columns.""",
}


_ENCODED = """The ids are **encoded from text** of a chat API (`source.encoded` is `text`), with the tokenizer and the
chat template of the command. `labels` is -100 everywhere but in the replies and their stop tokens. No model sampled
these ids, so they have no logprobs. Thinking that the API hides is not in the rows. The terms of the API decide whether
its replies may train another model.

- TRL `SFTTrainer`: `SFTConfig(max_length=None)`, or at least {longest}: a shorter one cuts rows silently. Leave
  `completion_only_loss` and `assistant_only_loss` unset, because the trainer takes `labels` as they are; and
  `packing=False`, unless the attention of the model separates packed rows."""


def command_of(curation: Curation, *, without_source: bool = False) -> str:
    """The command that makes this data set, without its output folder."""
    selection = curation.selection
    words = ["rollouts", "curate", *(str(run.path) for run in curation.runs), "--to", curation.target]
    for option, value in (
        ("--where", selection.where),
        ("--select", selection.select),
        ("--passing", selection.passing),
        ("--per-task", selection.per_task),
        ("--seed", selection.seed),
        ("--near", selection.near),
        ("--tools", selection.tools),
        ("--tokenizer", None if curation.student is None else curation.student.name),
    ):
        words += [] if value is None else [option, str(value)]
    for source in selection.not_in:
        words += ["--not-in", str(source)]
    return shlex.join([*words, *(["--without-source"] if without_source else [])])


def reweighted(account: Account) -> str:
    """The rows whose weight in the loss no column has; empty without any."""
    count = account.reweighted
    return f"{count} rows are of samples whose `loss_multiplier` is not 1, which no column has" if count else ""


def account_table(account: Account) -> list[tuple[str, int]]:
    """The account as lines: the rollouts read, the refused ones by reason, and the rest; they add up."""
    refused = sorted(account.refused.items(), key=lambda line: (-line[1], line[0]))
    lines = [(f"refused: {reason}", count) for reason, count in refused]
    return [("read", account.read), *lines, ("in the data set", account.written)]


def card(curation: Curation, files: Sequence[str], *, without_source: bool = False) -> str:
    """The text of ``README.md``."""
    account, target = curation.account, curation.target
    settings = (_TRAINERS[target] if curation.student is None else _ENCODED).format(longest=account.longest)
    columns = {name: kind for name, kind in COLUMNS[target].items() if name != "source" or not without_source}
    pattern = files[0].replace("-00000.", "-*.")
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        f"    path: {pattern}",
        "---",
        "",
        f"# Curated rollouts: {target}",
        "",
        f"{account.rows} rows of {account.written} rollouts of {account.tasks_written} tasks.",
        "",
        "```",
        command_of(curation, without_source=without_source),
        "```",
        "",
        "## Settings of trainers",
        "",
        settings,
        "",
        "## Rollouts",
        "",
        "| rollouts | |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in account_table(account)),
        "",
        f"Tasks: {account.tasks_read} read, {account.tasks_written} in the data set.{_held_out(curation)}",
        "",
        "## Rows",
        "",
        "| | " + " | ".join(f"{share:.0%}" for share in _SHARES) + " |",
        "|---|" + "---|" * len(_SHARES),
        _quantile_line("reward", account.rewards),
        _quantile_line("tokens", account.lengths),
        "",
        *([f"Trained tokens: {account.trained} of {account.tokens}.", ""] if target == "tokens" else []),
        *([f"{note}.", ""] if (note := reweighted(account)) else []),
        "| column | type |",
        "|---|---|",
        *(f"| `{name}` | `{type_name(kind)}` |" for name, kind in columns.items()),
        "",
        "## Sources",
        "",
        "| run | model | SHA-256 of run.json |",
        "|---|---|---|",
        *(f"| {_cell(run.path)} | {_cell(run.model)} | `{run.digest}` |" for run in curation.runs),
        "",
        "| policy version | rows |",
        "|---|---|",
        *(f"| {_cell(version)} | {count} |" for version, count in sorted(account.versions.items())),
        "",
    ]
    return "\n".join(lines)


def _held_out(curation: Curation) -> str:
    if not curation.selection.not_in:
        return ""
    return (
        f" Held-out texts: {curation.held_out_texts}; {curation.common} sequences of 13 words are their common wording"
        " and show no overlap."
    )


def _quantile_line(name: str, quantiles: Quantiles) -> str:
    values = quantiles.at(*_SHARES) or [float("nan")] * len(_SHARES)
    return f"| {name} | " + " | ".join(f"{value:g}" for value in values) + " |"


def _cell(value: Any) -> str:
    return str(to_plain(str(value))).replace("|", "\\|").replace("\n", " ")
