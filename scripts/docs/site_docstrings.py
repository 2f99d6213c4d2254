"""Docstrings for the API reference: their cross references, written for Sphinx, as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["RolesAsCode"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?([^`]+)`")


class RolesAsCode(griffe.Extension):
    """Replaces ``:class:`name``` by ``name`` as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value).replace("``", "`")
