"""NumPy, loaded at its first use: most commands have no arrays, and its import takes longer than the core's."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np", "npt"]

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    np, npt = _Lazy("numpy"), _Lazy("numpy.typing")
