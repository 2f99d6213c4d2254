"""Logprobs of teachers, for on-policy distillation: frozen models on other servers score the sampled ids.

    math = Teacher("http://math:30000/generate", route="metadata.source=math")
    code = Teacher("http://code:30000/generate", route="metadata.source=code")
    config = RolloutConfig(..., filter_fn=scored_by_teachers([math, code], check_reward_nonzero_std))

Invariant: a kept sample has ``teacher_log_probs`` as wide as its tokens, 0 on context, of exactly one teacher and of
exactly its own ids; a request that fails for good fails the group, and is never a column of zeros. Groups that the
filter drops are not sent. ``metadata["scored_by"]`` names the teacher. This module knows no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.concurrency.boundary import boundary, call_foreign, function_name
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, FilterFailure, RewardFailure, without_password
from rollouts.rewards.http import Poster
from rollouts.rewards.teacher_top import TeacherTop, check_without_top, checked_top, set_top
from rollouts.rewards.teacher_wire import PROTOCOLS, Protocol, Scores, logprobs_of_ids, request_of_ids
from rollouts.training.types import FilterFn, Sample

__all__ = ["Route", "Teacher", "first_different_id", "scored_by_teachers", "teachers_as_advantages"]

Route: TypeAlias = "str | Callable[[Sample], bool]"
"""``metadata.NAME=VALUE``, or a function of the sample."""


class Teacher:
    """A client of a teacher, which SGLang or vLLM serves.

    Args:
        url: of its ``/generate`` of SGLang, or its :class:`~rollouts.dtypes.Endpoint` with one URL.
        top_k: how many of the most probable ids at each sampled token are kept with their logprobs, in the form of
            :mod:`rollouts.rewards.teacher_top`; 0 for the sampled ids alone.
        student: the same for the server of the policy, with ``top_k``: its logprobs of the teacher's ids, for a trainer
            that takes their divergence, such as miles. SGLang only.
        route: which samples it scores; ``None``: all, where it is the only teacher.
        temperature: 1, that of prompt logprobs whatever the request says; the rollouts have to be sampled at it.
        tokenizers: those of the teacher and of the policy, by folder or name, to compare every id; ``None`` leaves that
            to the caller.
        options: of :class:`~rollouts.rewards.http.Poster`: ``api_key``, ``attempts``, ``seconds``, ``at_once``,
            ``outage_seconds``.

    Raises:
        ConfigError: an invalid argument.
    """

    def __init__(
        self,
        url: str | Endpoint,
        *,
        top_k: int = 0,
        student: str | Endpoint | None = None,
        route: Route | None = None,
        temperature: float = 1.0,
        tokenizers: tuple[str | Path, str | Path] | None = None,
        **options: Any,
    ) -> None:
        if not is_number(temperature) or temperature != 1:
            expected = "1: servers report prompt logprobs before the temperature"
            raise ConfigError.of("Teacher.temperature", temperature, expected)
        if not is_int(top_k, 0):
            raise ConfigError.of("Teacher.top_k", top_k, "an integer >= 0")
        if tokenizers is not None and (different := first_different_id(*tokenizers)) is not None:
            number, theirs, ours = different
            got = f"{tokenizers[0]}, whose id {number} is {theirs!r}"
            raise ConfigError.of("Teacher.tokenizers", got, f"{ours!r}, as in {tokenizers[1]}")
        self._name, self._value = _parts_of(route) if isinstance(route, str) else ("", "")
        self.route, self.top_k = route, top_k
        self._protocol, self._post = _client(url, options)
        self._student: Poster | None = None
        if student is not None:
            protocol, self._student = _client(student, options)
            if not top_k or protocol is not PROTOCOLS["sglang"]:
                got = f"top_k={top_k}, a server with {protocol.path}"
                raise ConfigError.of("Teacher.student", got, "top_k >= 1, and SGLang's /generate")

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
        """Set ``teacher_log_probs`` of a sample, and what ``metadata["scored_by"]`` has of the teacher.

        Raises:
            RewardFailure: no answer, or not a finite logprob of each sampled id, or wrong most probable ids.
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
        reply = await self._post(self._protocol.body(ids, start, self.top_k), "logprobs of the teacher")
        scores = self._protocol.read(reply, ids, start, self.top_k)
        top = await self._top(ids, start, np.flatnonzero(mask[start:]), scores) if self.top_k else None
        column = np.zeros(len(ids), np.float32)
        column[start:] = scores.logprobs
        sample.teacher_log_probs = np.where(mask, column, np.float32(0))
        set_top(sample, self._post.place, top)

    async def _top(self, ids: list[int], start: int, at: npt.NDArray[Any], scores: Scores) -> TeacherTop:
        """The most probable ids at the sampled tokens ``at``, counted from ``start``."""
        top = TeacherTop(scores.top_ids[at], scores.top_logprobs[at])
        checked_top(top, np.array(ids, np.int32)[start + at], scores.logprobs[at])
        if self._student is None:
            return top
        body = request_of_ids(ids, start, np.unique(top.ids).tolist())
        reply = await self._student(body, "logprobs of the student")
        return attrs.evolve(top, student=logprobs_of_ids(reply, ids, start, at, top.ids))


def first_different_id(teacher: str | Path, policy: str | Path) -> tuple[int, str | None, str | None] | None:
    """The first id that is not one token for the teacher and for the policy, with both tokens; ``None`` without any.

    Raises:
        ConfigError: a tokenizer does not load.
    """
    from rollouts.renderer.tokenizer import load_tokenizer  # here: a teacher of which this is not asked needs none

    theirs, ours = ({i: token for token, i in load_tokenizer(one).get_vocab().items()} for one in (teacher, policy))
    different = (i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i))
    return next(((i, theirs.get(i), ours.get(i)) for i in different), None)


def _client(server: str | Endpoint, options: Mapping[str, Any]) -> tuple[Protocol, Poster]:
    """The protocol of a server, and the client of its URL."""
    if not isinstance(server, Endpoint):
        return PROTOCOLS["sglang"], Poster(server, **options)
    if server.provider not in PROTOCOLS or len(server.base_url) != 1 or server.lora is not None:
        expected = "one URL of a server of token ids, without an adapter"
        raise ConfigError.of("Teacher(Endpoint)", server, expected)
    protocol = PROTOCOLS[server.provider]
    of_endpoint: dict[str, Any] = {"api_key": server.api_key, "seconds": server.request_seconds}
    of_endpoint["outage_seconds"] = server.outage_seconds
    if isinstance(server.concurrency, int):
        of_endpoint["at_once"] = server.concurrency
    return protocol, Poster(f"{server.base_url[0]}{protocol.path}", **{**of_endpoint, **options})


def _parts_of(route: str) -> tuple[str, str]:
    name, equals, value = route.partition("=")
    if not equals or not name.startswith("metadata.") or name == "metadata.":
        raise ConfigError.of("Teacher.route", route, "metadata.NAME=VALUE, or a function of the sample")
    return name.removeprefix("metadata."), value


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
        ConfigError: a sample has no logprobs of its policy, or of a teacher, or the teacher's most probable ids.
    """
    for sample, advantage in zip(samples, advantages, strict=True):
        check_without_top(sample, "a column of advantages")
        teacher, logprobs = sample.teacher_column, sample.logprob_column
        if teacher is None or logprobs is None:
            missing = "teacher_log_probs" if teacher is None else "rollout_log_probs"
            raise ConfigError.of(f"{sample!r}.{missing}", None, "a logprob of each sampled token")
        column = np.float32(advantage) + np.float32(weight) * (teacher - logprobs)
        sample.advantages = np.where(sample.mask_column, column, np.float32(0))
        sample.teacher_log_probs = None
