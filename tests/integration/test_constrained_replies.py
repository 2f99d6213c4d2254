"""Replies that a grammar constrains: how they are requested, recorded, interrupted and refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import msgspec
import pytest

from rollouts.dtypes import CONSTRAINTS, Completion, SamplingParams, VersionSpan, packed_tokens
from rollouts.errors import ConfigError
from rollouts.inference import generate_wire, vllm_wire
from rollouts.inference.base import CompletionRequest, ServerInfo
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.server_flags import check_flags

TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"], "type": "structural_tag"}
GIVEN = {
    "json_schema": '{"type": "object"}',
    "regex": "[0-9]+",
    "ebnf": 'root ::= "yes" | "no"',
    "structural_tag": json.dumps(TAG),
}
_SPAN = VersionSpan("v1", 0, 1)
VLLM_NAMES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_each_server_gets_its_own_fields(name: str) -> None:
    """SGLang by the same names, vLLM in ``structured_outputs``; neither without a constraint."""
    for sampling, given in ((SamplingParams(**{name: GIVEN[name]}), True), (SamplingParams(), False)):
        sglang = msgspec.json.decode(b'{"input_ids":[' + generate_wire.request_options(sampling, ()))["sampling_params"]
        assert {one: sglang[one] for one in CONSTRAINTS if one in sglang} == ({name: GIVEN[name]} if given else {})
        vllm = msgspec.json.decode(b'{"token_ids":[' + vllm_wire.request_options(sampling, ()))["sampling_params"]
        assert vllm.get("structured_outputs") == ({VLLM_NAMES[name]: GIVEN[name]} if given else None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"regex": "a", "ebnf": "b"}, "SamplingParams: got 'regex and ebnf'; expected at most one of"),
        ({"json_schema": "[1]"}, "json_schema.*expected a JSON schema"),
        ({"json_schema": "{"}, "json_schema.*expected a JSON schema"),
        ({"regex": ""}, "regex.*expected a non-empty string"),
    ],
)
def test_a_wrong_constraint_is_refused(given: dict[str, str], named: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**given)


def test_raw_logprobs_of_a_constrained_reply_are_refused() -> None:
    """A vLLM server in its raw mode reports them before the grammar."""
    with pytest.raises(
        ConfigError, match=r"got 'temperature 1, repetition_penalty 1, a grammar'; expected .*processed"
    ):
        vllm_wire.check_mode("raw", SamplingParams(regex="a"), "the server")
    vllm_wire.check_mode("processed", SamplingParams(regex="a"), "the server")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_server_without_grammars_is_found_before_the_run(name: str) -> None:
    """The embedded engine, and SGLang with ``--grammar-backend none``."""
    sampling = SamplingParams(**{name: GIVEN[name]})
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{name}: got .*; expected none: the server has no grammar"):
        check_flags(ServerInfo(has_grammars=False), sampling)
    check_flags(ServerInfo(has_grammars=True), sampling)
    check_flags(ServerInfo(has_grammars=False), SamplingParams())


def test_a_server_without_structural_tags_is_found_before_the_run() -> None:
    """SGLang with ``--grammar-backend outlines``; its other grammars are not refused."""
    sampling = SamplingParams(structural_tag=GIVEN["structural_tag"])
    with pytest.raises(ConfigError, match=r"structural_tag: got .*; expected none: the server's grammar backend"):
        check_flags(ServerInfo(has_grammars=True, has_structural_tags=False), sampling)
    check_flags(ServerInfo(has_grammars=True, has_structural_tags=True), sampling)
    check_flags(ServerInfo(has_grammars=True, has_structural_tags=False), SamplingParams(regex="a"))


class _Aborting:
    """A policy whose first replies are aborted after two tokens."""

    def __init__(self, aborts: int) -> None:
        self.left = aborts
        self.requests: list[CompletionRequest] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        finish: Any = "abort" if self.left else "stop"
        self.left -= bool(self.left)
        values: dict[str, Any] = {"prompt_tokens": len(request.tokens), "prompt_digest": 0, "request_id": "r"}
        spans = [attrs.evolve(_SPAN, stop=2)]
        return Completion([1, 2], [-1.0, -1.0], finish, spans, logprobs_of="constrained", **values)

    async def interrupt(self) -> None: ...

    async def describe(self) -> ServerInfo:
        return ServerInfo()

    async def aclose(self) -> None: ...


async def test_an_interrupted_reply_with_a_grammar_starts_again() -> None:
    """A server would begin the grammar in the middle of the reply; without one, the reply continues."""
    for sampling, count in ((SamplingParams(regex="ab"), 2), (SamplingParams(), 6)):
        inner = _Aborting(2)
        prompt = packed_tokens([5, 6, 7])
        reply = await ResumablePolicy(inner, backoff_seconds=0).complete(CompletionRequest(prompt, sampling))
        assert len(reply.tokens) == count
        assert [len(request.tokens) for request in inner.requests] == ([3, 3, 3] if count == 2 else [3, 5, 7])
