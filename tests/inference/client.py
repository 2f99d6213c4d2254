"""Helper for tests: policies without backoff, and short completions."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollouts.dtypes import Completion, Endpoint, SamplingParams
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy


class Client:
    """Creates policies without backoff and requests short completions."""

    ids = np.arange(1, 6, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=16)

    def policy(self, *urls: str, vocab_size: int | None = None, **options: Any) -> SGLangPolicy:
        endpoint = Endpoint(base_url=urls, **options)
        return SGLangPolicy(endpoint, vocab_size=vocab_size, backoff=lambda failures: 0.0)

    async def complete(self, policy: SGLangPolicy, ids: Any = None, **options: Any) -> Completion:
        tokens = self.ids if ids is None else np.asarray(ids, np.int32)
        return await policy.complete(CompletionRequest(tokens, options.pop("sampling", self.sampling), **options))
