"""The scripted policy."""

from __future__ import annotations

import numpy as np

from rollouts.dtypes import SamplingParams
from rollouts.inference.base import CompletionRequest
from rollouts.testing.policy import ScriptedPolicy


async def test_no_two_requests_have_one_id() -> None:
    """Also of policies that live one after the other: a run with two samples of one request breaks law 3."""
    request = CompletionRequest(np.array([1, 2], np.int32), SamplingParams(max_new_tokens=4))
    ids = [(await ScriptedPolicy([[3]]).complete(request)).request_id for _ in range(20)]
    assert len(set(ids)) == 20
