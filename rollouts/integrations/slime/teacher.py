"""Logprobs of a teacher for on-policy distillation, ``rollouts_teacher_url``: the task's rewards stay unchanged.

Invariant: a sample gets one logprob for each token of its response, of exactly its own ids, or
:class:`~rollouts.errors.RewardFailure` is raised. slime's reward function and post-processing function for distillation
work without this module, and replace the rewards
(slime 0.3.1, rollout/on_policy_distillation.py: reward_func, post_process_rewards).
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ConfigError, without_password
from rollouts.rewards.http import Poster
from rollouts.rewards.teachers import teacher_logprobs

__all__ = ["Teacher"]


class Teacher:
    """A client of a teacher's server.

    Args:
        url: of its ``/generate``.
        temperature: that of the rollouts.

    Raises:
        ConfigError: not a URL.
    """

    def __init__(self, url: str, temperature: float) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            expected = "a URL that starts with http:// or https://"
            raise ConfigError.of("args.rollouts_teacher_url", without_password(str(url)), expected)
        self._post = Poster(url)
        self._temperature = temperature

    async def score(self, record: Any) -> None:
        """Set ``teacher_log_probs`` of slime's sample, float32, as long as its response.

        Raises:
            RewardFailure: no answer, or not a logprob for each token.
        """
        import torch

        params = {"temperature": self._temperature, "max_new_tokens": 0, "skip_special_tokens": False}
        body = {
            "input_ids": record.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._post(body, "logprobs of the teacher")
        logprobs = teacher_logprobs(reply, record.tokens, record.response_length)
        record.teacher_log_probs = torch.from_numpy(logprobs)
