"""The law book of the group scheduler, section 11: random interleavings.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
from hypothesis import given, settings

from tests.manager_semantics.world import (
    Scene,
    many,
    play,
    scenes,
)


@many
@given(scene=scenes(threads=False))
def test_every_law_holds_in_any_interleaving(scene: Scene) -> None:
    """11.1 With failures, timeouts, odd results and cancellations: groups are whole, sums add up, nothing is lost."""
    anyio.run(play, scene)


@settings(parent=many, max_examples=60)
@given(scene=scenes(threads=True))
def test_every_law_holds_with_functions_in_threads(scene: Scene) -> None:
    """11.2 The same with sync functions, which run in threads."""
    anyio.run(play, scene)
