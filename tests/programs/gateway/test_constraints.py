"""Wishes for replies of one form: they constrain decoding where the server can, and are counted where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.tree import Training
from rollouts.programs.gateway.types import ApiError, Constraint
from rollouts.programs.gateway.wire import Wire
from rollouts.runs.folder import Row
from rollouts.runs.samplings import Samplings
from rollouts.training import trajectory_to_samples
from tests.programs.gateway.programs import LOOK, SAMPLING, GrammarPolicy, asks, demo_renderer, session_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("wire", "fields", "expected"),
    [
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
         Constraint("response_format", "json_schema", TEXT)),
        (chat, {"response_format": {"type": "json_object"}},
         Constraint("response_format", "json_schema", '{"type":"object"}')),
        (chat, {"regex": "a+"}, Constraint("regex", "regex", "a+")),
        (chat, {"ebnf": 'root ::= "a"'}, Constraint("ebnf", "ebnf", 'root ::= "a"')),
        (chat, {"guided_json": SCHEMA}, Constraint("guided_json", "json_schema", TEXT)),
        (chat, {"guided_json": TEXT}, Constraint("guided_json", "json_schema", TEXT)),
        (chat, {"structured_outputs": {"grammar": "g"}}, Constraint("structured_outputs", "ebnf", "g")),
        (responses, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
         Constraint("text.format", "json_schema", TEXT)),
        (messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         Constraint("output_config.format", "json_schema", TEXT)),
        (messages, {"output_format": {"type": "json_schema", "schema": SCHEMA}},
         Constraint("output_config.format", "json_schema", TEXT)),
        (chat, {"response_format": {"type": "text"}, "regex": None}, None),
    ],
)  # fmt: skip
def test_the_form_of_a_reply_is_read(wire: Wire, fields: dict[str, Any], expected: Constraint | None) -> None:
    """From the fields of the three APIs, and those of SGLang's and vLLM's chat servers."""
    assert wire.read({"max_tokens": 9, wire.HISTORY: USER, **fields}).constraint == expected


@pytest.mark.parametrize(
    ("wire", "fields", "path"),
    [
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (chat, {"response_format": "json"}, "response_format"),
        (chat, {"regex": ""}, "regex"),
        (chat, {"guided_json": 5}, "guided_json"),
        (chat, {"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        (chat, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format and regex"),
        (messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_wrong_form_is_refused(wire: Wire, fields: dict[str, Any], path: str) -> None:
    """By its path; and two forms at once."""
    with pytest.raises(ApiError, match=path.replace(".", r"\.")):
        wire.read({"max_tokens": 9, wire.HISTORY: USER, **fields})


WANTED = Constraint("response_format", "json_schema", TEXT)


async def test_a_constraint_reaches_the_server_and_the_record(tmp_path: Path) -> None:
    """The request has the parameter; the record says of which distribution the logprobs are, and law 8 refuses it."""
    policy = GrammarPolicy()
    async with session_of(policy) as session:
        await session.call(asks("Hi", tools=(), constraint=WANTED), lineage={})
        (call,) = session.tree.calls
        session.tree.delivered(call)
        session.end()
        assert [one.json_schema for one in policy.samplings] == [TEXT]
        assert session.counts == {"constrained_calls": 1}
        assert session.branches() == []
        assert session.tree.untrained == {"constrained": session.tree.sampled}
        (branch,) = session.tree.branches(training=Training(constrained="train"))
    assert [one.logprobs_of for one in branch.completions] == ["constrained"]
    (sample,) = trajectory_to_samples([branch], Prompt("p", index=0), demo_renderer().decode)
    with pytest.raises(ConfigError, match="the ids that a grammar allowed are not recorded"):
        Samplings(tmp_path).of(sample, Row(tmp_path, "batches/0", 1, "kept", {}))


@pytest.mark.parametrize("why", ["no grammars", "unknown", "tools"])
async def test_a_constraint_that_is_not_enforced_is_counted(why: str) -> None:
    """Where the server has no grammars or does not say so, and where the reply may be a call."""
    policy = GrammarPolicy(grammars={"no grammars": False, "unknown": None, "tools": True}[why])
    async with session_of(policy) as session:
        tools = (LOOK,) if why == "tools" else ()
        await session.call(asks("Hi", tools=tools, constraint=WANTED), lineage={})
        assert not policy.samplings[0].constrained
        assert session.counts == {"not_enforced/response_format": 1}


async def test_the_constraint_of_the_run_stays() -> None:
    """As the other sampling parameters of the run."""
    policy = GrammarPolicy()
    async with session_of(policy, sampling=attrs.evolve(SAMPLING, regex="a+")) as session:
        await session.call(asks("Hi", tools=(), constraint=WANTED), lineage={})
        assert (policy.samplings[0].regex, policy.samplings[0].json_schema) == ("a+", None)
        assert session.counts == {"sampling_overridden/response_format": 1}


async def test_a_grammar_that_the_server_refuses_is_the_programs_mistake() -> None:
    """The program gets a 400 with the server's words; the rollout has not failed."""
    async with session_of(GrammarPolicy(refuses=True)) as session:
        with pytest.raises(ApiError, match=r"response_format: .* cannot be compiled") as refused:
            await session.call(asks("Hi", tools=(), constraint=WANTED), lineage={})
        assert refused.value.error_kind == "invalid_request"
        assert session.denied is None


async def test_a_wrong_key_is_not_the_programs_mistake() -> None:
    """Only a refusal of the content is: any other is a failure of the rollout."""
    async with session_of(GrammarPolicy(refuses=True, status=401)) as session:
        with pytest.raises(ApiError) as refused:
            await session.call(asks("Hi", tools=(), constraint=WANTED), lineage={})
        assert refused.value.error_kind == "server"
        assert session.denied is not None
