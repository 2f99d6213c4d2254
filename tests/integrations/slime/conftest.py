"""What lives in the process between calls ends with the test that began it."""

from collections.abc import Iterator

import pytest

from rollouts.integrations.slime import close_rollouts


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_rollouts()
