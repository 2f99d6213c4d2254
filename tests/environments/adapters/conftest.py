"""The table of ``scripts/test --trainers``, to which the environments of trainers belong."""

from __future__ import annotations

from tests.integrations.conftest import compared

__all__ = ["compared"]
