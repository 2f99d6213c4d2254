"""A broken environment is a described failure of its own prompt, and the run continues with the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bad_worlds import BAD, Bad, play_with_sound_prompts
from tests.packages import needing


@pytest.mark.parametrize("bad", [needing(bad.needs, bad, bad.what) for bad in BAD])
async def test_the_run_goes_on(bad: Bad, tmp_path: Path) -> None:
    """The failed group is stored with class, cause and message; the batch has the others, and the sum is right."""
    played = await play_with_sound_prompts(bad, tmp_path)
    assert {(failure.kind, failure.cause) for failure in played.failures} == {(bad.kind, bad.cause)}
    for failure in played.failures:
        said = failure.message
        assert re.match("(?s:.*)".join(map(re.escape, bad.message.split("…"))), said), said
    assert [sample.metadata["environment"] for sample in played.kept] == ["good"] * 2
    assert (played.accounting.in_batch, played.accounting.failed, played.accounting.in_flight) == (2, 1, 0)
