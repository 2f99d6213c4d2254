"""The requests to a teacher and its replies, in the protocols of SGLang and vLLM.

Invariant: a reply becomes logprobs only if it repeats the ids that were sent; what is missing, not finite or of other
ids is a :class:`RewardFailure`, never a zero. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import RewardFailure
from rollouts.rewards.teacher_top import TOLERANCE

__all__ = ["PROTOCOLS", "Protocol", "Scores", "logprobs_of_ids", "request_of_ids", "teacher_logprobs"]

_MISSING = -9999.0
"""Stands for a logprob that vLLM does not have (vLLM 0.32.0, entrypoints/scale_out/token_in_token_out/serving.py)."""


class Scores(NamedTuple):
    """The logprobs of the last m ids of a sequence under a teacher."""

    logprobs: npt.NDArray[np.float32]
    """``[m]``"""
    top_ids: npt.NDArray[np.int32]
    """The most probable ids at their positions, ``[m, K]``."""
    top_logprobs: npt.NDArray[np.float32]
    """``[m, K]``"""


@attrs.frozen
class Protocol:
    """A server's form of requests for the logprobs of a prompt."""

    path: str
    body: Callable[[list[int], int, int], dict[str, Any]]
    """Of the ids, the position of the first that is scored, and K."""
    read: Callable[[Any, list[int], int, int], Scores]
    """Of the reply, the ids, the position of the first that is scored, and K."""


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang_body(ids: list[int], start: int, top_k: int) -> dict[str, Any]:
    """``/generate`` (SGLang 0.5.23, managers/io_struct.py: GenerateReqInput)."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": max(0, start - 1),
    }
    return body | ({"top_logprobs_num": top_k} if top_k else {})


def _read_sglang(reply: Any, ids: list[int], start: int, top_k: int) -> Scores:
    """``input_token_logprobs`` and ``input_top_logprobs`` of ``[logprob, id, text]``, the first of which is null.

    (SGLang 0.5.23, managers/tokenizer_manager.py)
    """
    width = len(ids) - start
    logprobs = teacher_logprobs(reply, ids, width)
    if not top_k:
        return _scores(logprobs, [[]] * width, 0)
    return _scores(logprobs, _meta(reply, "input_top_logprobs", width), top_k)


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
    return _sound(logprobs)


def request_of_ids(ids: list[int], start: int, wanted: Sequence[int]) -> dict[str, Any]:
    """The body of a request to SGLang for the logprobs of these ids at each position."""
    return {**_sglang_body(ids, start, 0), "token_ids_logprob": [int(one) for one in wanted]}


def logprobs_of_ids(reply: Any, ids: list[int], start: int, at: npt.NDArray[Any], asked: Any) -> Any:
    """The logprobs of some ids at some positions, in the reply to :func:`request_of_ids`.

    Args:
        reply: its body.
        ids: the sequence that was sent.
        start: the position of the first that is scored.
        at: the positions, from there on, ``[n]``.
        asked: the ids at each, ``[n, K]``.

    Returns:
        float32 ``[n, K]``

    Raises:
        RewardFailure: one is missing or not finite, or they are of other ids than were sent, or of another position:
            a sampled id that is among them has another logprob than the reply has of it.
    """
    own = teacher_logprobs(reply, ids, len(ids) - start)[at]
    rows = _meta(reply, "input_token_ids_logprobs", len(ids) - start)
    try:
        found = [{one[1]: one[0] for one in rows[position]} for position in at]
        column = [[row[one] for one in wanted] for row, wanted in zip(found, asked.tolist(), strict=True)]
        logprobs = _sound(np.array(column, np.float32))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RewardFailure(f"student: got no logprob of an id of the teacher ({error!r}); expected each") from None
    among = asked == np.array(ids, np.int32)[start + at][:, None]
    if (among & ~np.isclose(logprobs, own[:, None], rtol=0, atol=TOLERANCE)).any():
        raise RewardFailure("student: got another logprob of the sampled id among those of the teacher's ids")
    return logprobs


def _meta(reply: Any, name: str, width: int) -> Any:
    """The last ``width`` entries of a list in ``meta_info``, none of which is null."""
    found = reply["meta_info"].get(name)
    rows = found[-width:] if isinstance(found, list) else None
    if rows is None or len(rows) < width or not all(isinstance(row, list) for row in rows):
        got = None if rows is None else f"{len(rows)} entries, or a null entry"
        raise RewardFailure(f"teacher: got meta_info.{name}: {got}; expected a list for each of {width} ids")
    return rows


# -- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm_body(ids: list[int], start: int, top_k: int) -> dict[str, Any]:
    """``/inference/v1/generate``; the field ``prompt_logprobs`` is K more than the sampled id.

    (vLLM 0.32.0, entrypoints/scale_out/token_in_token_out/protocol.py)
    """
    params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top_k}
    return {"token_ids": ids, "sampling_params": params, "return_token_ids": True, "stream": False}


def _read_vllm(reply: Any, ids: list[int], start: int, top_k: int) -> Scores:
    """``prompt_logprobs``: for each id but the first an object of logprobs by id, of K ids or K and the sampled one."""
    if not isinstance(reply, Mapping) or reply.get("prompt_token_ids") != ids:
        raise RewardFailure(f"teacher: got logprobs of other ids than the {len(ids)} that were sent")
    width = len(ids) - start
    try:
        rows = reply["prompt_logprobs"][-width:]
        logprobs = [row[str(token)]["logprob"] for row, token in zip(rows, ids[start:], strict=True)]
        tops = [
            sorted(((one["logprob"], int(token)) for token, one in row.items()), key=lambda pair: -pair[0])[:top_k]
            for row in rows
        ]
        found = np.array(logprobs, np.float32)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RewardFailure(f"teacher: got no prompt_logprobs by id ({error!r}); expected one for each id") from None
    return _scores(_sound(found), tops, top_k)


# -- both -------------------------------------------------------------------------------------------------------------


def _sound(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(logprobs).all() or (logprobs > TOLERANCE).any() or (logprobs <= _MISSING).any():
        raise RewardFailure("teacher: got a logprob that is not finite, or above 0; expected one for each token")
    return logprobs


def _scores(logprobs: npt.NDArray[np.float32], tops: Sequence[Sequence[Any]], top_k: int) -> Scores:
    """Logprobs with the pairs of logprob and id at each position."""
    counts = {len(row) for row in tops}
    if counts - {top_k}:
        raise RewardFailure(f"teacher: got {sorted(counts)} most probable ids at a position; expected {top_k}")
    shape = len(tops), top_k
    try:
        found = [pair[1] for row in tops for pair in row]
        if not all(type(one) is int for one in found):
            raise TypeError("ids are integers")
        ids = np.array(found, np.int32).reshape(shape)
        values = np.array([pair[0] for row in tops for pair in row], np.float32).reshape(shape)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise RewardFailure(f"teacher: got most probable ids without pairs of logprob and id ({error!r})") from None
    return Scores(logprobs, ids, values)


PROTOCOLS: Mapping[str, Protocol] = {
    "sglang": Protocol("/generate", _sglang_body, _read_sglang),
    "vllm": Protocol("/inference/v1/generate", _vllm_body, _read_vllm),
}
