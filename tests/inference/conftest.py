"""Fixtures of the inference tests."""

from __future__ import annotations

import pytest

from tests.inference.client import Client


@pytest.fixture
def client() -> Client:
    return Client()
