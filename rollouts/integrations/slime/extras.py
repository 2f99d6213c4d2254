"""Columns that slime's trainer and dashboards read beyond tokens and logprobs, from the extras of completions.

Invariant: a column of :func:`add_extras` covers its sample completely, or :class:`ConfigError` is raised. The routing
of a position is that of the request which first had it, so it belongs to the weights that sampled the next token.

This module knows no server and no schedule.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rollouts.dtypes import Extras
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.inference.base import ExtrasRequest
from rollouts.integrations.slime.records import family, records
from rollouts.training.types import Sample

__all__ = ["Replay", "add_extras", "add_spans"]

_SPAN = "sglang_generate"
"""The name of a request's span (slime 0.3.1, observability/rollout_metrics.py: _iter_sglang_generate_attrs)."""
_TRACED = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")
_SPECULATIVE = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")


@attrs.frozen
class Replay:
    """The columns that a launch replays in training."""

    experts: tuple[int, int] | None = None
    """Layers and top-k of ``--use-rollout-routing-replay``; ``None`` without it."""
    top_p_sets: bool = False
    """Whether ``--rollout-top-p`` is not 1, so that the trainer needs the ids that it kept."""
    speculative: bool = False
    """Whether the engines decode speculatively: their counters are kept."""

    @classmethod
    def of(cls, args: Any) -> Replay:
        """Read slime's namespace.

        Raises:
            ConfigError: a size of the routed experts is missing.
        """
        experts = None
        if getattr(args, "use_rollout_routing_replay", False):
            sizes = {name: getattr(args, name, None) for name in ("num_layers", "moe_router_topk")}
            for name, size in sizes.items():
                if not isinstance(size, int) or size < 1:
                    expected = "an integer >= 1: --use-rollout-routing-replay needs the sizes of the routed experts"
                    raise ConfigError.of(f"args.{name}", size, expected)
            experts = (int(args.num_layers), int(args.moe_router_topk))
        top_p = getattr(args, "rollout_top_p", None)
        return cls(
            experts=experts,
            top_p_sets=top_p is not None and top_p != 1.0 and family().replays_top_p,
            speculative=bool(getattr(args, "sglang_speculative_algorithm", None)),
        )

    def in_evaluation(self) -> Replay:
        """The same for an evaluation, which does not need the sets of ``top_p``."""
        return attrs.evolve(self, top_p_sets=False)

    def request(self) -> ExtrasRequest:
        """The extras of each completion."""
        width = None if self.experts is None else self.experts[0] * self.experts[1]
        return ExtrasRequest(experts_width=width, top_p_sets=self.top_p_sets)

    @property
    def fields(self) -> Mapping[str, str]:
        """The flag for each field of slime's sample that training then needs."""
        experts = {"rollout_routed_experts": "use_rollout_routing_replay"} if self.experts else {}
        return {**experts, **({"rollout_top_p_token_offsets": "rollout_top_p"} if self.top_p_sets else {})}


def add_extras(record: Any, sample: Sample, replay: Replay) -> None:
    """Set the columns, counters and spans of slime's sample, which has its tokens and response length.

    Raises:
        ConfigError: a column does not cover the sample.
    """
    calls = [(call, call.extras) for call in sample.completions if call.extras is not None]
    if not calls:
        return
    if replay.experts is not None:
        record.rollout_routed_experts = _experts(record, sample, [extras for _, extras in calls], replay.experts)
    if replay.top_p_sets:
        record.rollout_top_p_token_ids, record.rollout_top_p_token_offsets = _sets(record, sample)
    requests = [request for _, extras in calls for request in extras.requests]
    if replay.speculative:
        counters = {name: int(sum(request.get(name, 0) for request in requests)) for name in _SPECULATIVE}
        tokens = int(sum(request["completion_tokens"] for request in requests))
        record.spec_info = records().sample.SpecInfo(completion_token_num=tokens, **counters)
    if family().traces:
        record.trace = _trace(record, requests)


def _experts(record: Any, sample: Sample, extras: list[Extras], shape: tuple[int, int]) -> Any:
    """slime's column of routed experts: int32, ``(tokens - 1, layers, top_k)``."""
    try:
        joined = Extras.joined(extras)
    except ValueError as error:
        raise ConfigError(f"{sample!r}.completions: {error}") from error
    rows = 0 if joined.experts is None else len(joined.experts)
    if joined.experts is None or joined.experts_start or rows != len(record.tokens) - 1:
        got = f"rows {joined.experts_start} to {joined.experts_start + rows}"
        expected = f"rows 0 to {len(record.tokens) - 1}, one for each token but the last"
        raise ConfigError.of(f"{sample!r}: routed experts", got, expected)
    column = joined.experts.reshape(rows, *shape).copy()
    if family().numpy_columns:
        return column

    import torch

    return torch.from_numpy(column)


def _sets(record: Any, sample: Sample) -> tuple[Any, Any]:
    """slime's columns of the ids that ``top_p`` kept; the tokens of the environment have empty sets."""
    import torch

    first = len(sample) - sample.response_length
    sizes = np.zeros(record.response_length, np.int64)
    ids = []
    for call in sample.completions:
        if call.start == call.stop:
            continue
        extras = call.extras
        if extras is None or extras.top_p_ids is None or extras.top_p_counts is None:
            raise ConfigError.of(f"{sample!r}: top_p sets", None, f"those of tokens {call.start} to {call.stop}")
        sizes[call.start - first : call.stop - first] = extras.top_p_counts
        ids.append(extras.top_p_ids)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(offsets)


def add_spans(rollouts: Sequence[Sequence[Any]], started: Sequence[float | None], *, of_group: bool = True) -> None:
    """Put the spans of rollouts, and of their group, around the events of slime's samples, where they have a trace.

    ``started`` is the unix time at which each began; ``None`` for a rollout of another process.
    (slime 0.3.1, rollout/sglang_rollout.py: generate_and_rm_group, generate_and_rm)
    """
    traces = [[sample.trace for sample in rollout if getattr(sample, "trace", None)] for rollout in rollouts]
    times = [event["ts"] for rollout in traces for trace in rollout for event in trace["events"]]
    known = [time for time in started if time is not None]
    if not times or len(known) < len(started):
        return
    for rollout, start in zip(traces, known, strict=True):
        for trace in rollout:
            inner = [event for event in trace["events"] if event["name"] != "group_reward_model"]
            outer = [event for event in trace["events"] if event["name"] == "group_reward_model"]
            last = max((event["ts"] for event in inner), default=start)
            events = [*_around(trace, "generate_and_rm", start, last, inner), *outer]
            if of_group:
                events = _around(trace, "generate_and_rm_group", min(known), max(times), events)
                events[0]["attrs"] = {"group_size": len(rollouts)}
            trace["events"] = events


def _around(
    trace: Mapping[str, Any], name: str, start: float, end: float, inside: Sequence[Any] = (), attributes: Any = None
) -> list[Any]:
    """Events inside a span of this name."""
    ids = {key: trace[key] for key in ("trace_id", "sample_id", "group_id", "attempt")}
    span = {**ids, "name": name, "span_id": uuid.uuid4().hex}
    for event in inside:
        if event["type"] != "span_end":
            event.setdefault("parent_span_id", span["span_id"])
    ended = {"type": "span_end", "ts": end, **span, **({} if attributes is None else {"attrs": attributes})}
    return [{"type": "span_start", "ts": start, **span}, *inside, ended]


def _trace(record: Any, requests: list[Mapping[str, float]]) -> dict[str, Any]:
    """slime's trace of a sample, with a span for each request."""
    ids = {"trace_id": uuid.uuid4().hex, "sample_id": record.index, "group_id": record.group_index, "attempt": 0}
    events: list[Any] = []
    for request in requests:
        attributes = {name: request[name] for name in _TRACED if name in request}
        events += _around(ids, _SPAN, request["ended"] - request["seconds"], request["ended"], attributes=attributes)
    return {"version": 1, "events": events, **ids}
