"""The most probable ids of a teacher at each sampled token: a column of a sample, and its use for distillation.

Invariant: the arrays have a row for each sampled token, in order, and none for context. They are stored in
``sample.metadata["scored_by"]`` with the URL of the teacher, as base64 of little-endian int32 and float32, so that
every file of a run, a lease and a copy of the sample has them bit for bit. This module sends nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, RewardFailure
from rollouts.training.continuation import SCORED_BY
from rollouts.training.types import Sample

__all__ = [
    "SCORED_BY",
    "TOLERANCE",
    "TeacherTop",
    "check_without_top",
    "checked_top",
    "reverse_kl",
    "set_top",
    "top_of",
]

TOLERANCE = 1e-3
"""A logprob of a token that is certain may be this much above 0 in bfloat16; so may a sum of probabilities above 1."""


@attrs.frozen(eq=False)
class TeacherTop:
    """The K most probable ids at each of n sampled tokens, the most probable first."""

    ids: npt.NDArray[np.int32]
    """``[n, K]``"""
    logprobs: npt.NDArray[np.float32]
    """Under the teacher, ``[n, K]``."""
    student: npt.NDArray[np.float32] | None = None
    """Of the same ids under the student, ``[n, K]``; ``None`` unless it was asked."""


def checked_top(top: TeacherTop, sampled: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> TeacherTop:
    """The value itself, if it can be that of a teacher.

    Args:
        top: for each sampled id.
        sampled: the ids, ``[n]``.
        logprobs: those of the sampled ids under the teacher, ``[n]``.

    Raises:
        RewardFailure: an id twice at a position; logprobs that are not finite, above 0, not descending, or of more than
            all probability; or a sampled id that has another logprob among them, or should be among them.
    """
    ids, values = top.ids, top.logprobs
    if ids.shape != values.shape or len(ids) != len(sampled):
        raise RewardFailure(f"teacher: got top ids of {ids.shape}, logprobs of {values.shape}; expected {len(sampled)}")
    ordered = np.sort(ids, axis=1)
    found = ids == sampled[:, None]
    own = np.where(found, values, -np.inf).max(1)
    among = found.any(1)
    faults = {
        "an id twice, or below 0": (ordered[:, 1:] == ordered[:, :-1]).any(1) | (ids < 0).any(1),
        "a logprob that is not finite, or above 0": (~np.isfinite(values) | (values > TOLERANCE)).any(1),
        "logprobs that do not descend": (np.diff(values, axis=1) > 0).any(1),
        "a sum of probabilities above 1": np.exp(values.astype(np.float64)).sum(1) > 1 + TOLERANCE,
        "another logprob of the sampled id": np.where(
            among, ~np.isclose(own, logprobs, rtol=0, atol=TOLERANCE), logprobs > values[:, -1] + TOLERANCE
        ),
    }
    for fault, rows in faults.items():
        if rows.any():
            raise RewardFailure(f"teacher: got {fault} among the top ids of sampled token {int(rows.argmax())}")
    return top


def set_top(sample: Sample, url: str, top: TeacherTop | None) -> None:
    """Store the name of a teacher in the metadata of a sample, and its most probable ids."""
    stored: dict[str, Any] = {"url": url}
    if top is not None:
        stored |= {"top_k": top.ids.shape[1], "top_ids": _text(top.ids, "<i4"), "top_log_probs": _text(top.logprobs)}
        if top.student is not None:
            stored["student_log_probs"] = _text(top.student)
    sample.metadata[SCORED_BY] = stored


def top_of(sample: Sample) -> TeacherTop | None:
    """The most probable ids of the teacher; ``None`` if they were not asked for.

    Raises:
        ConfigError: what is stored is not a row for each sampled token.
    """
    stored = sample.metadata.get(SCORED_BY)
    if not isinstance(stored, Mapping) or "top_k" not in stored:
        return None
    shape = sample.sampled_tokens, stored["top_k"]
    try:
        student = stored.get("student_log_probs")
        return TeacherTop(
            _array(stored["top_ids"], "<i4", np.int32, shape),
            _array(stored["top_log_probs"], "<f4", np.float32, shape),
            None if student is None else _array(student, "<f4", np.float32, shape),
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError.of(
            f"{sample!r}.metadata[{SCORED_BY!r}]", str(error), f"arrays of {list(shape)}: a row for each sampled token"
        ) from None


def check_without_top(sample: Sample, trainer: str) -> None:
    """Check that no teacher's most probable ids would be lost at a trainer that takes logprobs of sampled ids only.

    Raises:
        ConfigError: there are some.
    """
    if (top := top_of(sample)) is not None:
        name, expected = f"{sample!r}.metadata[{SCORED_BY!r}]", f"Teacher(top_k=0): {trainer} has no field for them"
        raise ConfigError.of(name, f"the {top.ids.shape[1]} most probable ids of a teacher", expected)


def reverse_kl(top: TeacherTop, weights: Literal["student_p", "teacher_p", "none"] = "student_p") -> Any:
    """The reverse KL divergence at each sampled token, over the teacher's most probable ids.

    As miles computes ``opd_reverse_kl`` with ``--opd-top-k-strategy only-teacher``
    (miles 31f1ca9, rollout/on_policy_distillation.py: _compute_topk_reverse_kl).

    Args:
        top: with the student's logprobs.
        weights: what weighs the differences, normalised over the ids of a position (``--opd-reward-weight-mode``).

    Returns:
        float32 ``[n]``

    Raises:
        ConfigError: no logprobs of the student, or another word.
    """
    if top.student is None:
        raise ConfigError.of("reverse_kl(top)", "no logprobs of the student", "Teacher(top_k=K, student=...)")
    student, teacher = top.student.astype(np.float64), top.logprobs.astype(np.float64)
    logits = {"student_p": student, "teacher_p": teacher, "none": np.zeros_like(student)}.get(weights)
    if logits is None:
        raise ConfigError.of("weights", weights, '"student_p", "teacher_p" or "none"')
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return ((shares / shares.sum(1, keepdims=True)) * (student - teacher)).sum(1).astype(np.float32)


def _text(array: npt.NDArray[Any], kind: str = "<f4") -> str:
    return base64.b64encode(array.astype(kind).tobytes()).decode()


def _array(text: str, kind: str, dtype: Any, shape: tuple[int, int]) -> Any:
    array = np.frombuffer(base64.b64decode(text, validate=True), kind).astype(dtype).reshape(shape)
    array.flags.writeable = False
    return array
