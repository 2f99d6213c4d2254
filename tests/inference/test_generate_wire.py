"""SGLang's ``/generate`` format: request bodies, and completions or errors from any response body."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.dtypes import LOGPROB_TOLERANCE, Completion, SamplingParams, VersionSpan
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointUnavailable,
)
from rollouts.http.answers import loads, message_of
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.completions import BrokenNumbers, SentRequest, max_response_bytes
from rollouts.inference.generate_wire import (
    MissingField,
    read_completion,
    request_body,
    request_options,
)
from rollouts.inference.token_json import EncodedIds
from rollouts.inference.wire_errors import error_of

IDS = EncodedIds((b"1,2,", b"3,4,5"), 5, 0)
TRIPLES = [[-0.5, 7, None], [-1.5, 8, "x"], [0, 9, None, "more"]]


def reply(*, output_ids: Any = (7, 8, 9), **meta: Any) -> bytes:
    meta = {"finish_reason": {"type": "stop", "matched": 9}, "output_token_logprobs": TRIPLES, **meta}
    return msgspec.json.encode({"output_ids": output_ids, "meta_info": meta})


def read(payload: bytes, **options: Any) -> Completion:
    return read_completion(payload, SentRequest("r", IDS, **options))


def test_a_body_is_one_json_object() -> None:
    """It consists of the rid, the ids and the options."""
    own: dict[str, Any] = {"min_new_tokens": 3, "repetition_penalty": 1.5}
    params = loads(request_body("r", IDS, request_options(SamplingParams(**own), ()))[0])["sampling_params"]
    assert own.items() <= params.items()
    body = loads(request_body("abc", IDS, request_options(SamplingParams(), ()))[0])
    assert own.keys().isdisjoint(body["sampling_params"])
    assert (body["rid"], body["input_ids"]) == ("abc", [1, 2, 3, 4, 5])


def test_stop_ids_may_come_from_a_column() -> None:
    """NumPy's integers are integers."""
    assert loads(request_body("r", IDS, request_options(SamplingParams(), np.array([4])))[0])["sampling_params"][
        "stop_token_ids"
    ] == [4]


def test_a_seed_above_64_bits_is_a_config_error() -> None:
    """Not an error of the encoder."""
    with pytest.raises(ConfigError, match="64 bits"):
        request_options(SamplingParams(seed=2**70), ())


def test_logprobs_belong_to_the_sampled_ids() -> None:
    """The text in each triple is ignored; integers are valid logprobs."""
    completion = read(reply())
    assert completion.tokens.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-0.5, -1.5, 0.0]


@pytest.mark.parametrize(
    ("meta", "versions"),
    [
        ({}, [("default", 0, 3)]),
        ({"weight_version": "v2"}, [("v2", 0, 3)]),
        ({"weight_version": 7, "weight_versions": []}, [("7", 0, 3)]),
        (
            {"weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": 2, "start": 1, "end": 3}]},
            [("a", 0, 1), ("2", 1, 3)],
        ),
        (
            {"weight_versions": [{"version": "a", "start": 0, "end": 0}, {"version": "b", "start": 0, "end": 3}]},
            [("b", 0, 3)],
        ),
    ],
)
def test_versions_cover_every_token(meta: dict[str, Any], versions: list[tuple[str, int, int]]) -> None:
    """Spans if there are any, else the single version, else a default; empty spans are ignored."""
    assert read(reply(**meta)).versions == tuple(VersionSpan(*span) for span in versions)


@pytest.mark.parametrize("edges", [[(0, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 4)], [(1, 3)], [(0, 5), (5, 3)]])
def test_versions_with_gaps_are_refused(edges: list[tuple[int, int]]) -> None:
    """A token of unknown policy version must not be trained."""
    spans = [{"version": "a", "start": start, "end": end} for start, end in edges]
    with pytest.raises(EndpointRefused, match="weight_versions"):
        read(reply(weight_versions=spans))


@pytest.mark.parametrize("field", ["cached_tokens", "prompt_tokens"])
def test_a_count_of_tokens_has_31_bits(field: str) -> None:
    """A larger one fits no column of a stored run, so that neither this run nor a resumed one could write its batch."""
    with pytest.raises(EndpointRefused, match=rf"<= 2147483647.*{field}"):
        read(reply(**{field: 2**31}))


@pytest.mark.parametrize("logprob", [None, 1e300, -1e39])
def test_a_logprob_is_a_finite_float32(logprob: float | None) -> None:
    """Servers write NaN as null; an overflow is refused, too."""
    with pytest.raises(BrokenNumbers, match=r"output_token_logprobs\[1\]"):
        read(reply(output_token_logprobs=[TRIPLES[0], [logprob, 8, None], TRIPLES[2]]))


def test_nan_happened_is_a_failure_unless_it_is_a_stop_string() -> None:
    """The server's marker of a numerical failure may also be a stop string of the request."""
    payload = reply(finish_reason={"type": "stop", "matched": "NaN happened"})
    with pytest.raises(BrokenNumbers):
        read(payload)
    assert read(payload, stop=("NaN happened",)).finish_reason == "stop"


@pytest.mark.parametrize("output_ids", [[7, 8], [7, 8, 9, 9], [7, 7, 9], []])
def test_ids_without_their_logprobs_are_refused(output_ids: list[int]) -> None:
    """More, fewer or others."""
    with pytest.raises(EndpointRefused):
        read(reply(output_ids=output_ids))


@pytest.mark.parametrize("rid", ["another", 7, ["r"], ""])
def test_a_reply_to_another_request_is_refused(rid: Any) -> None:
    """The id may be of any type, and may be missing."""
    with pytest.raises(EndpointRefused, match="renames requests"):
        read(reply(id=rid))
    assert read(reply(id=None)).request_id == "r"


def test_the_server_counts_what_was_sent() -> None:
    """Another count means other tokens; the count of a request aborted in the queue is ignored."""
    with pytest.raises(EndpointRefused, match="5 ids were sent; the server counts 6"):
        read(reply(prompt_tokens=6))
    with pytest.raises(EndpointRefused, match=r"counts 4\. Does it .* without --allow-auto-truncate"):
        read(reply(prompt_tokens=4))
    queued = {"prompt_tokens": 0, "finish_reason": {"type": "abort"}, "output_token_logprobs": []}
    assert read(reply(output_ids=[], **queued)).finish_reason == "abort"


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        ({"type": "abort", "message": "full", "status_code": 503}, EndpointUnavailable),
        ({"type": "abort", "message": "no", "status_code": 400}, EndpointRefused),
        ({"type": "abort", "message": "longer than the model's context length", "status_code": 400}, ContextOverflow),
        ({"type": "else"}, EndpointRefused),
        (None, EndpointRefused),
    ],
)
def test_a_finish_reason_may_be_an_error(finish: Any, kind: type[EndpointError]) -> None:
    """An abort with a status is that error; an unknown finish reason is refused."""
    with pytest.raises(kind):
        read(reply(finish_reason=finish))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"x","code":503}}', EndpointUnavailable),
        (b'{"error":{"message":"x","code":400}}', EndpointRefused),
        (b'{"error":{"message":"x","type":"invalid_request_error"}}', EndpointRefused),
        (b'{"error":"x"}', EndpointUnavailable),
        (b'{"object":"error","message":"x","code":"404"}', EndpointRefused),
        (b"<html>", EndpointUnavailable),
        (b"", EndpointUnavailable),
        (b"[]", EndpointRefused),
        (b"[" * 100_000, EndpointUnavailable),
    ],
)
def test_an_error_with_status_200_is_an_error(body: bytes, kind: type[EndpointError]) -> None:
    """Its own code counts; without one it is transient, unless its type declares an invalid request."""
    with pytest.raises(kind):
        read(body)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
NUMBERS = st.integers(-1, 4) | st.just(10**30)
TRIPLE = st.tuples(st.floats() | st.none(), st.integers(-5, 2**40) | st.integers(0, 3), st.none())
SPAN = st.fixed_dictionaries({"version": st.just("v") | st.integers(), "start": NUMBERS, "end": NUMBERS})
KIND = st.sampled_from(["stop", "length", "abort", "x"])
FINISH = st.fixed_dictionaries({"type": KIND}, optional={"status_code": ANYTHING, "message": ANYTHING})
META = st.fixed_dictionaries(
    {"finish_reason": FINISH | ANYTHING},
    optional={
        "id": ANYTHING | st.just("r"),
        "output_token_logprobs": st.lists(TRIPLE, max_size=4) | ANYTHING,
        "prompt_tokens": st.just(5) | ANYTHING,
        "cached_tokens": ANYTHING,
        "weight_version": ANYTHING,
        "weight_versions": st.lists(SPAN, max_size=3) | ANYTHING,
    },
)
ERROR = st.fixed_dictionaries({}, optional={"message": ANYTHING, "code": ANYTHING, "type": ANYTHING})
REPLY = st.fixed_dictionaries(
    {"meta_info": META}, optional={"output_ids": st.lists(st.integers(0, 3), max_size=4) | ANYTHING}
)
ERRONEOUS = st.fixed_dictionaries({"error": ERROR | ANYTHING}, optional={"object": ANYTHING, "code": ANYTHING})


def to_json(value: Any) -> str:
    """JSON with values that careful encoders reject: NaN, huge integers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{to_json(str(key))}:{to_json(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(to_json, value))}]"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return msgspec.json.encode(value).decode()


BODIES = st.binary(max_size=30) | (ANYTHING | REPLY | ERRONEOUS).map(lambda value: to_json(value).encode())


@settings(max_examples=250, deadline=None)
@given(body=BODIES, status=st.sampled_from([200, 400, 404, 429, 500, 503]))
def test_any_answer_is_a_completion_or_a_typed_error(body: bytes, status: int) -> None:
    """No response body raises any other exception."""
    assert isinstance(error_of(status, message_of(body)), EndpointError)
    try:
        completion = read(body)
    except EndpointError:
        return
    assert len(completion.tokens) == len(completion.logprobs)
    assert np.isfinite(completion.logprobs).all()


@settings(max_examples=250, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-50, 0, width=32), st.integers(0, 2**31 - 1)), max_size=20),
    cut=st.integers(0, 20),
    kind=st.sampled_from(["stop", "length", "abort"]),
)
def test_a_valid_response_is_read_exactly(tokens: list[tuple[float, int]], cut: int, kind: str) -> None:
    """Ids, float32 logprobs and version spans arrive as they were sent."""
    ids = [token for _, token in tokens]
    edges = [0, min(cut, len(ids)), len(ids)]
    spans = [{"version": f"v{n}", "start": edges[n], "end": edges[n + 1]} for n in range(2)]
    payload = reply(
        output_ids=ids,
        output_token_logprobs=[[logprob, token, None] for logprob, token in tokens],
        finish_reason={"type": kind},
        weight_versions=spans,
    )
    completion = read(payload)
    assert completion.tokens.tolist() == ids
    assert completion.logprobs.tolist() == [logprob for logprob, _ in tokens]
    assert completion.finish_reason == kind
    assert sum(span.stop - span.start for span in completion.versions) == len(ids)


SAMPLED = st.tuples(
    st.sampled_from([b"-0.5", b"0", b"-0.0", b"-1e-3", b"-1.5E+1", b"-0.734210848"]), st.integers(0, 12)
)
BROKEN = st.sampled_from([b"null", b"1e39", b'"0"', b"[]", b"--1"])
NEAR = st.sampled_from([b"7.0", b"1e1", b"-1", b"-0", b"07", b"2147483647", b"2147483648", b'"7"', b"null", b"[7]"])
TEXT = st.sampled_from([b"null", b'"x"', rb'"\\"', rb'"],[\"\u00e9"', b'"\xff"', b"7", b'["a",{"b":[]}]'])
SPACE = st.sampled_from([b"", b"", b"", b" ", b"\n\t", b"x"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Mostly valid bodies; with or without ``output_ids``, keys in any order and repeated."""
    tail = draw(st.sampled_from([b"", b" "]))
    comma, text = b"," + tail, draw(st.just(b"null") | TEXT)
    sampled = draw(st.lists(SAMPLED, max_size=4))
    ids = [b"%d" % token for _, token in sampled]
    output_ids = draw(st.just(ids) | st.lists(NEAR | st.sampled_from(ids or [b"1"]), max_size=4))
    first = draw(st.just(b"-1") | st.just(b"-1") | BROKEN)
    triples = [
        b"[" + comma.join((logprob, token, text)) + b"]" for (logprob, _), token in zip(sampled, ids, strict=True)
    ]
    if sampled and first != b"-1":
        triples[0] = b"[" + first + triples[0][len(sampled[0][0]) + 1 :]
    meta = b'"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":%b[' % draw(SPACE)
    meta += comma.join(triples) + b"]" + tail + b"}"
    output = b'"output_ids":%b[%b]' % (draw(SPACE), comma.join(output_ids))
    more = st.sampled_from(
        [output, meta, b'"output_ids":null', b'"output_ids":[7]', b'"text":"\xff"', b'"x":{"y":[0]}']
    )
    fields = [meta, *([output] if draw(st.booleans()) else []), *draw(st.lists(more, max_size=2))]
    return b"{" + comma.join(draw(st.permutations(fields))) + b"}" + draw(SPACE)


@settings(max_examples=300, deadline=None)
@given(body=bodies())
def test_a_completion_does_not_depend_on_the_json_style(body: bytes) -> None:
    """Differential test against the ``json`` module; the ids are in the body once or twice."""
    try:
        completion = read(body)
    except EndpointError:
        completion = None
    try:
        decoded = json.loads(body.decode("utf-8", "replace"))
    except ValueError:
        assert completion is None
        return
    triples = decoded["meta_info"]["output_token_logprobs"]
    sampled, output_ids = [triple[1] for triple in triples], decoded.get("output_ids")
    numbers = all(type(triple[0]) in (int, float) and abs(triple[0]) < 1e38 for triple in triples)
    ids = all(type(token) is int and 0 <= token < 2**31 for token in output_ids or ())
    if not (numbers and ids and output_ids in (None, sampled)):
        assert completion is None
        return
    assert completion is not None
    assert completion.tokens.tolist() == sampled
    assert completion.logprobs.tobytes() == np.array([triple[0] for triple in triples], np.float32).tobytes()


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 2**64])
def test_an_id_has_31_bits(token: int) -> None:
    """With and without ``output_ids``."""
    triples = b'"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[-1,%d,null]]}' % token
    for body in (b"{%b}" % triples, b'{"output_ids":[%d],%b}' % (token, triples)):
        with pytest.raises(EndpointRefused):
            read(body)


@pytest.mark.parametrize("text", [b"5", b"{}", b"[7.5]", b'["7"]', b"[[7]]", b"[-7]", b"[2147483648]"])
def test_output_ids_are_ids(text: bytes) -> None:
    """Anything else is refused; the message names the field."""
    triples = b'"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[-1,7,null]]}'
    with pytest.raises(EndpointRefused, match="output_ids"):
        read(b'{"output_ids":%b,%b}' % (text, triples))


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_a_logprob_may_be_as_small_as_a_float32(sign: bytes) -> None:
    """A larger magnitude is not finite in float32."""
    body = b'{"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[[0,7,null],[%b,7,null]]}}'
    assert read(body % b"-3.402823e38").logprobs[1] == np.float32(-3.402823e38)
    with pytest.raises(BrokenNumbers, match=r"output_token_logprobs\[1\]"):
        read(body % (sign + b"3.402824e38"))


@pytest.mark.parametrize("logprob", [5.0, 1.1e-4, 3.4028234e38])
def test_a_logprob_above_0_is_refused(logprob: float) -> None:
    """No probability is above 1; the message names the position and the value."""
    expected = r"output_token_logprobs\[1\]: got .*; expected a logprob <= 0, with a tolerance of 0\.0001 for rounding"
    with pytest.raises(EndpointRefused, match=expected):
        read(reply(output_token_logprobs=[TRIPLES[0], [logprob, 8, None], TRIPLES[2]]))


def test_rounding_above_0_is_stored_unchanged() -> None:
    """Up to the tolerance of the laws of stored samples."""
    completion = read(reply(output_token_logprobs=[TRIPLES[0], [LOGPROB_TOLERANCE, 8, None], TRIPLES[2]]))
    assert completion.logprobs[1] == np.float32(LOGPROB_TOLERANCE)


@pytest.mark.parametrize(("vocab_size", "valid"), [(9, False), (10, True), (None, True)])
def test_ids_outside_the_vocabulary_are_refused(vocab_size: int | None, valid: bool) -> None:
    """The message contains position and id; without a known vocabulary size every id passes."""
    if valid:
        assert read(reply(), vocab_size=vocab_size).tokens.tolist() == [7, 8, 9]
        return
    with pytest.raises(EndpointRefused, match=r"output_ids\[2\]: got id 9; expected 0 <= id < 9 \(vocab_size\)"):
        read(reply(), vocab_size=vocab_size)


# -- extras -----------------------------------------------------------------------------------------------------------

EXPERTS, SETS = ExtrasRequest(experts_width=2), ExtrasRequest(top_p_sets=True)
ROWS = list(range(14))
"""Seven rows of two: five prompt ids and three sampled ones, but the last."""


def base64_of(numbers: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()


def test_extras_are_requested_only_where_they_are_wanted() -> None:
    """Routed experts from a position on, the sets of top_p among the sampling parameters."""
    wanted = ExtrasRequest(experts_width=2, experts_start=4, top_p_sets=True)
    body, start = request_body("r", IDS, request_options(SamplingParams(), (), top_p_sets=True), "", wanted)
    sent = loads(body)
    assert (sent["return_routed_experts"], sent["routed_experts_start_len"]) == (True, 4)
    assert sent["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}
    assert body[start:].startswith(b"1,2,3,4,5]")
    plain = loads(request_body("r", IDS, request_options(SamplingParams(), ()), "", ExtrasRequest())[0])
    assert plain.keys() == {"rid", "input_ids", "return_logprob", "logprob_start_len", "stream", "sampling_params"}
    assert "custom_params" not in plain["sampling_params"]
    bound = max_response_bytes(100, SamplingParams(), 5, ExtrasRequest())
    assert max_response_bytes(100, SamplingParams(), 5, wanted) > bound == max_response_bytes(100, SamplingParams())


@pytest.mark.parametrize("form", [list, base64_of], ids=["list", "base64"])
def test_routed_experts_are_rows_of_positions(form: Any) -> None:
    """All positions but the last token's, or those from the start on that the server names."""
    extras = read(reply(routed_experts=form(ROWS)), extras=EXPERTS).extras
    assert extras is not None
    assert extras.experts is not None
    assert extras.experts.tolist() == [[row, row + 1] for row in range(0, 14, 2)]
    later = reply(routed_experts=form(ROWS[8:]), routed_experts_start_len=4)
    extras = read(later, extras=ExtrasRequest(experts_width=2, experts_start=4)).extras
    assert extras is not None
    assert extras.experts is not None
    assert (extras.experts_start, extras.experts.shape) == (4, (3, 2))


@pytest.mark.parametrize("names", ["top_p_{}", "top_p_kept_{}"])
def test_sets_of_top_p_are_counted(names: str) -> None:
    """Under both names of their fields."""
    fields = {names.format("token_ids"): [7, 8, 1, 9], names.format("token_offsets"): base64_of([0, 1, 3, 4])}
    extras = read(reply(**fields), extras=SETS).extras
    assert extras is not None
    assert extras.top_p_ids is not None
    assert extras.top_p_counts is not None
    assert (extras.top_p_ids.tolist(), extras.top_p_counts.tolist()) == ([7, 8, 1, 9], [1, 2, 1])


BAD_EXTRAS: list[tuple[ExtrasRequest, dict[str, Any], str]] = [
    (EXPERTS, {}, r"meta_info\.routed_experts: got none"),
    (EXPERTS, {"routed_experts": ROWS[:-1]}, "got 13 numbers; expected 7 rows of 2"),
    (EXPERTS, {"routed_experts": "no base64!"}, "routed_experts: .*expected int32 numbers"),
    (EXPERTS, {"routed_experts": 5}, "routed_experts: .*expected int32 numbers"),
    (EXPERTS, {"routed_experts": ROWS, "routed_experts_start_len": 1}, "start_len: got 1; expected 0 to 0"),
    (EXPERTS, {"routed_experts": ROWS, "routed_experts_start_len": "x"}, "start_len: got x"),
    (SETS, {}, r"meta_info\.top_p_token_ids: got none"),
    (SETS, {"top_p_token_ids": [1]}, r"meta_info\.top_p_token_offsets: got none"),
    (SETS, {"top_p_token_ids": [1], "top_p_token_offsets": [0, 1]}, "expected 4, rising from 0"),
    (SETS, {"top_p_token_ids": [1], "top_p_token_offsets": [0, 2, 1, 1]}, "rising from 0"),
    (SETS, {"top_p_token_ids": [1], "top_p_token_offsets": [0, 0, 0, 2]}, "rising from 0"),
]


@pytest.mark.parametrize(("wanted", "fields", "message"), BAD_EXTRAS)
def test_extras_that_do_not_fit_are_refused(wanted: ExtrasRequest, fields: dict[str, Any], message: str) -> None:
    """By the name of the field; a request without extras does not read them."""
    with pytest.raises(EndpointRefused, match=message):
        read(reply(**fields), extras=wanted)
    assert read(reply(**fields)).extras is None


def test_an_aborted_request_may_lack_its_columns() -> None:
    """It was aborted in the queue; the numbers of its request are known."""
    aborted = reply(output_ids=(), output_token_logprobs=[], finish_reason={"type": "abort"}, e2e_latency="no number")
    extras = read(aborted, extras=ExtrasRequest(experts_width=2, top_p_sets=True)).extras
    assert extras is not None
    assert (extras.experts, extras.top_p_ids) == (None, None)
    assert extras.requests[0].keys() == {"ended", "seconds", "prompt_tokens", "completion_tokens", "cached_tokens"}
    with pytest.raises(MissingField):
        read(reply(finish_reason={"type": "abort"}), extras=SETS)
