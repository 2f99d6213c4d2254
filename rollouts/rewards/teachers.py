"""Logprobs of teachers, for on-policy distillation: frozen models on other servers score the sampled ids.

    math = Teacher("http://math:30000/generate", route="metadata.source=math")
    code = Teacher("http://code:30000/generate", route="metadata.source=code")
    config = RolloutConfig(..., filter_fn=scored_by_teachers([math, code], check_reward_nonzero_std))

Invariant: a kept sample has ``teacher_log_probs`` as wide as its tokens, 0 on context, of exactly one teacher and of
exactly its own ids; a request that fails for good fails the group, and is never a column of zeros. Groups that the
filter drops are not sent. This module knows no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollouts.base.validators import is_number
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError, FilterFailure, RewardFailure, without_password
from rollouts.rewards.http import Poster
from rollouts.training.types import FilterFn, Sample

__all__ = ["Route", "Teacher", "scored_by_teachers", "teacher_logprobs", "teachers_as_advantages"]

Route: TypeAlias = "str | Callable[[Sample], bool]"
"""``metadata.NAME=VALUE``, or a function of the sample."""

_ROUNDING = 1e-3
"""A logprob of a token that is certain may be this much above 0 in bfloat16."""


class Teacher:
    """A client of a teacher's ``/generate`` (SGLang 0.5.23, managers/io_struct.py: GenerateReqInput).

    Args:
        url: of its ``/generate``.
        route: which samples it scores; ``None``: all, where it is the only teacher.
        temperature: 1, that of prompt logprobs whatever the request says; the rollouts have to be sampled at it.
        options: of :class:`~rollouts.rewards.http.Poster`: ``api_key``, ``attempts``, ``seconds``, ``at_once``.

    Raises:
        ConfigError: an invalid argument.
    """

    def __init__(self, url: str, *, route: Route | None = None, temperature: float = 1.0, **options: Any) -> None:
        if not is_number(temperature) or temperature != 1:
            expected = "1: servers report prompt logprobs before the temperature"
            raise ConfigError.of("Teacher.temperature", temperature, expected)
        self._name, self._value = _parts_of(route) if isinstance(route, str) else ("", "")
        self.route = route
        self._post = Poster(url, **options)

    def __repr__(self) -> str:
        route = self.route if isinstance(self.route, str) else function_name(self.route) if self.route else "all"
        return f"<Teacher {without_password(self._post.place)}, {route}>"

    def takes(self, sample: Sample) -> bool:
        """Whether this teacher scores the sample."""
        if self.route is None:
            return True
        if isinstance(self.route, str):
            return self._name in sample.metadata and str(sample.metadata[self._name]) == self._value
        with boundary(RewardFailure, f"route {function_name(self.route)}"):
            return bool(self.route(sample))

    async def score(self, sample: Sample) -> None:
        """Set ``teacher_log_probs`` of a sample.

        Raises:
            RewardFailure: no answer, or not a finite logprob of each sampled id.
            ConfigError: the sample has images, or was sampled at another temperature than 1.
        """
        mask = sample.mask_column
        if sample.images:
            raise ConfigError.of(f"{sample!r}.images", len(sample.images), "none: a teacher is sent ids only")
        for number, one in enumerate(sample.read_record("completions")):
            if one.temperature not in (None, 1):
                expected = "1: a teacher's logprobs are of the distribution at temperature 1"
                raise ConfigError.of(f"{sample!r}.completions[{number}].temperature", one.temperature, expected)
        if not mask.any():
            return
        ids = sample.token_column.tolist()
        start = int(mask.argmax())
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": max(0, start - 1),
        }
        reply = await self._post(body, "logprobs of the teacher")
        column = np.zeros(len(ids), np.float32)
        column[start:] = teacher_logprobs(reply, ids, len(ids) - start)
        sample.teacher_log_probs = np.where(mask, column, np.float32(0))


def _parts_of(route: str) -> tuple[str, str]:
    name, equals, value = route.partition("=")
    if not equals or not name.startswith("metadata.") or name == "metadata.":
        raise ConfigError.of("Teacher.route", route, "metadata.NAME=VALUE, or a function of the sample")
    return name.removeprefix("metadata."), value


def teacher_logprobs(reply: Any, ids: Sequence[int], width: int) -> npt.NDArray[np.float32]:
    """The logprobs of the last ``width`` ids in a reply of ``/generate`` to a request for those of the prompt.

    Raises:
        RewardFailure: they are missing, not finite, or of other ids.
    """
    try:
        rows = reply["meta_info"]["input_token_logprobs"]
        echoed = [row[1] for row in rows]
        logprobs = np.array([row[0] for row in rows[-width:]], np.float32)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RewardFailure(
            f"teacher: got no meta_info.input_token_logprobs of [logprob, id] ({error!r}); expected one for each id"
        ) from None
    if len(echoed) < width or echoed != list(ids[len(ids) - len(echoed) :]):
        raise RewardFailure(f"teacher: got logprobs of other ids than the {len(ids)} that were sent")
    if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
        raise RewardFailure("teacher: got a logprob that is not finite, or above 0; expected one for each token")
    return logprobs


def scored_by_teachers(teachers: Sequence[Teacher], filter_fn: FilterFn | None = None) -> FilterFn:
    """A filter that has each sample of a kept group scored by its teacher; ``filter_fn`` decides which are kept.

    The deadline of the whole is ``RolloutConfig.filter_seconds``. A group fails where a teacher gives no answer, or
    where not exactly one teacher takes a sample.

    Raises:
        ConfigError: no teacher.
    """
    if not teachers:
        raise ConfigError.of("teachers", [], "at least one Teacher")
    inner = "all groups" if filter_fn is None else f"filter {function_name(filter_fn)}"

    async def keep_and_score(samples: Sequence[Sample]) -> Any:
        answer = True if filter_fn is None else await call_foreign(FilterFailure, inner, filter_fn, samples)
        may_stay = getattr(answer, "keep", answer) or getattr(answer, "keep_when_insufficient", False)
        if may_stay:
            chosen = [(sample, _teacher_of(sample, teachers)) for sample in samples]
            async with first_error() as requests:
                for sample, teacher in chosen:
                    requests.start_soon(teacher.score, sample)
        return answer

    keep_and_score.__name__ = "scored_by_teachers" if filter_fn is None else function_name(filter_fn)
    return keep_and_score


def _teacher_of(sample: Sample, teachers: Sequence[Teacher]) -> Teacher:
    found = [teacher for teacher in teachers if teacher.takes(sample)]
    if len(found) != 1:
        expected = f"exactly one of {list(teachers)} for metadata {dict(sample.metadata)!r}"
        raise ConfigError.of("teachers", found, expected)
    return found[0]


def teachers_as_advantages(samples: Sequence[Sample], advantages: Sequence[float], weight: float = 1.0) -> None:
    """Move the teachers' logprobs into ``advantages``, for a trainer that has no field for them, such as tinker.

    The advantage of a sampled token is that of its sample plus ``weight`` times the difference of the teacher's logprob
    and the policy's: minus the gradient of the reverse KL divergence, as sampled.

    Args:
        samples: scored by teachers; their ``teacher_log_probs`` become ``None``.
        advantages: one for each sample; 0 for distillation alone.
        weight: of the divergence.

    Raises:
        ConfigError: a sample has no logprobs of its policy, or of a teacher.
    """
    for sample, advantage in zip(samples, advantages, strict=True):
        teacher, logprobs = sample.teacher_column, sample.logprob_column
        if teacher is None or logprobs is None:
            missing = "teacher_log_probs" if teacher is None else "rollout_log_probs"
            raise ConfigError.of(f"{sample!r}.{missing}", None, "a logprob of each sampled token")
        column = np.float32(advantage) + np.float32(weight) * (teacher - logprobs)
        sample.advantages = np.where(sample.mask_column, column, np.float32(0))
        sample.teacher_log_probs = None
