"""The engine of the tests marked ``containers``, started once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandboxes.engine import Engine, running_engine


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if not request.config.getoption("--containers"):
        pytest.skip("scripts/test --containers runs it")
    with running_engine() as running:
        yield running
