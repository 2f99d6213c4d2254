"""The record with which the journal of a run starts: what a resumed run must keep, and its settings.

Invariant: the record is on disk before the first event. This module reads no journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.runs.journal import Journal
from rollouts.runs.layout import JOURNAL
from rollouts.runs.run_journal import RunJournal
from rollouts.training.data_buffer import DataBuffer

__all__ = ["SETTINGS", "begin", "identity_of", "settings_in"]

SETTINGS = "settings"
"""The entry of a description, of a record of a start, and of ``run.json`` with the settings."""


def begin(path: Path, description: Mapping[str, Any], buffer: DataBuffer) -> RunJournal:
    """Start the journal of a new run.

    Raises:
        JournalError: it cannot be written.
    """
    journal = Journal(path / JOURNAL)
    run_journal = RunJournal(journal)
    run_journal.began({**identity_of(description, buffer), **settings_in(description)})
    journal.flush()
    return run_journal


def identity_of(description: Mapping[str, Any], buffer: DataBuffer) -> dict[str, Any]:
    """The sizes and data that a resumed run must keep, whatever is allowed to change."""
    config = description["config"]
    sizes = {name: config[name] for name in ("batch_size", "n_samples_per_prompt")}
    return {"recipe": description.get("recipe"), **sizes, "data": buffer.fingerprint}


def settings_in(description: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with the settings, where the description has one."""
    return {SETTINGS: description[SETTINGS]} if SETTINGS in description else {}
