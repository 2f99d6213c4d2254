"""Curation of stored runs into data sets for SFT, preference and reward training. A wing: no other package imports it.

``curate(runs, "tokens", Selection(...))`` iterates over rows; ``rollouts curate`` writes them to a folder with a card.
"""

from __future__ import annotations

from rollouts.curation.curate import Curation, curate
from rollouts.curation.rows import Target
from rollouts.curation.select import Selection
from rollouts.curation.writing import write_folder

__all__ = ["Curation", "Selection", "Target", "curate", "write_folder"]
