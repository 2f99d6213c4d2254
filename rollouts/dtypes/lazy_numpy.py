"""NumPy, loaded at its first use: most commands have no arrays, and its import takes longer than the core's."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["np", "npt"]

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:

    def _lazy(name: str) -> ModuleType:  # PEP 562: later accesses cost no more than those of the module
        here = vars(module := ModuleType(name))
        here["__getattr__"] = lambda key: here.setdefault(key, getattr(importlib.import_module(name), key))
        return module

    np, npt = _lazy("numpy"), _lazy("numpy.typing")
