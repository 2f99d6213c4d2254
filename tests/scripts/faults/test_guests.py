"""One hostile program among sound ones: it costs at most its own rollout, and the run ends sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.faults.guests import GUESTS, GuestFault, play_guest

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("fault", GUESTS, ids=lambda fault: fault.name)
async def test_a_hostile_program_costs_its_own_rollout(fault: GuestFault, tmp_path: Path) -> None:
    """Each call of the sound programs is answered, their groups are in batches, and all laws hold."""
    assert await play_guest(fault, tmp_path / "run") == ("held", "")
