"""The garbage collector of a process that does nothing but a run, told to stop it less.

Invariant: inside, what was there before is not searched for garbage again, and full searches are rare; afterwards all
is as it was. Nothing is changed at import: a library does not decide for its host.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["calm_collector"]

_THRESHOLDS = (20_000, 20, 100)
"""Objects made before a search of the young ones; such searches before one of the older; of those before a full one."""


@contextlib.contextmanager
def calm_collector() -> Iterator[None]:
    """Leave what is there now out of collections, and make them rare, while inside."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
