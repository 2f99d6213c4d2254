"""Strict tools: their calls are held to their schemas where the server can, and are counted where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Prompt, Tool
from rollouts.errors import ConfigError
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.strict_tools import strict_tag
from rollouts.programs.gateway.tree import Training
from rollouts.programs.gateway.types import ApiError
from rollouts.programs.gateway.wire import Wire
from rollouts.runs.folder import Row
from rollouts.runs.samplings import Samplings
from rollouts.training import trajectory_to_samples
from tests.families import REAL
from tests.programs.gateway.programs import LOOK, SAMPLING, GrammarPolicy, asks, demo_renderer, session_of

ENFORCED = Training(strict_tools="enforce")
OTHER = Tool("other", "Does.", {"type": "object", "properties": {"b": {"type": "integer"}}})
USER = [{"role": "user", "content": "Hi"}]


def test_the_tag_has_the_form_of_the_template() -> None:
    """A strict tool with its schema, another tool with any object; text outside of calls is free."""
    tag = json.loads(strict_tag(demo_renderer(), (LOOK, OTHER), {"look"}) or "")
    assert tag == {
        "type": "structural_tag",
        "structures": [
            {
                "begin": '<tool_call>\n{"name": "look", "arguments": ',
                "schema": dict(LOOK.parameters),
                "end": "}\n</tool_call>",
            },
            {
                "begin": '<tool_call>\n{"name": "other", "arguments": ',
                "schema": {"type": "object"},
                "end": "}\n</tool_call>",
            },
        ],
        "triggers": ["<tool_call>"],
    }


@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("Qwen3", '<tool_call>\n{"name": "look", "arguments": '),
        ("Granite 4", '<tool_call>\n{"name": "look", "arguments": '),
        ("GLM-4.6", None),
        ("Qwen3-Coder", None),
        ("DeepSeek-V3.1", None),
        ("gpt-oss", None),
    ],
)
def test_the_form_is_read_from_published_templates(family: str, begin: str | None, request: Any) -> None:
    """None where arguments are not JSON, where calls share marks, or where no mark begins a call."""
    tag = strict_tag(REAL[family].make(request), (LOOK,), {"look"})
    assert (None if tag is None else json.loads(tag)["structures"][0]["begin"]) == begin


@pytest.mark.parametrize(
    ("wire", "tool"),
    [
        (chat, {"type": "function", "function": {"name": "f", "strict": True}}),
        (responses, {"type": "function", "name": "f", "strict": True}),
        (messages, {"name": "f", "input_schema": {}, "strict": True}),
    ],
)
def test_each_api_names_strict_tools(wire: Wire, tool: dict[str, Any]) -> None:
    """By a field of the tool."""
    read = wire.read({"max_tokens": 9, wire.HISTORY: USER, "tools": [tool]})
    assert (read.strict, read.counts.keys() - {"unknown_field/max_tokens"}) == ({"f"}, set())


async def test_strict_tools_reach_the_server_and_the_record(tmp_path: Path) -> None:
    """The request has the tag; the record says of which distribution the logprobs are, and law 8 refuses it."""
    policy = GrammarPolicy()
    async with session_of(policy, training=ENFORCED) as session:
        await session.call(asks("Hi", strict=frozenset({"look"})), lineage={})
        (call,) = session.tree.calls
        session.tree.delivered(call)
        session.end()
        assert [one.structural_tag for one in policy.samplings] == [strict_tag(demo_renderer(), (LOOK,), {"look"})]
        assert session.counts == {"constrained_calls": 1}
        assert session.branches() == []
        assert session.tree.untrained == {"constrained": session.tree.sampled}
        (branch,) = session.tree.branches(training=attrs.evolve(ENFORCED, constrained="train"))
    (sample,) = trajectory_to_samples([branch], Prompt("p", index=0), demo_renderer().decode)
    with pytest.raises(ConfigError, match="the ids that a grammar allowed are not recorded"):
        Samplings(tmp_path).of(sample, Row(tmp_path, "batches/0", 1, "kept", {}))


@pytest.mark.parametrize("why", ["default", "no tags", "unknown", "free", "not offered", "the run's"])
async def test_strict_tools_that_are_not_enforced_are_counted(why: str) -> None:
    """Where the run does not ask for it or has a form itself, and where the server has no tags or does not say so."""
    policy = GrammarPolicy(grammars={"no tags": False, "unknown": None}.get(why, True))
    training = attrs.evolve(ENFORCED, constrained="free") if why == "free" else ENFORCED
    options: dict[str, Any] = {} if why == "default" else {"training": training}
    if why == "the run's":
        options["sampling"] = attrs.evolve(SAMPLING, regex="a+")
    async with session_of(policy, **options) as session:
        await session.call(
            asks("Hi", tools=() if why == "not offered" else (LOOK,), strict=frozenset({"look"})), lineage={}
        )
        assert policy.samplings[0].structural_tag is None
        field = {"the run's": "sampling_overridden", "not offered": ""}.get(why, "not_enforced")
        assert session.counts == ({f"{field}/strict": 1} if field else {})


async def test_a_tag_that_the_server_refuses_is_the_programs_mistake() -> None:
    """Such as a schema that its grammars do not have."""
    async with session_of(GrammarPolicy(refuses=True), training=ENFORCED) as session:
        with pytest.raises(ApiError, match=r"strict: .* cannot be compiled"):
            await session.call(asks("Hi", strict=frozenset({"look"})), lineage={})
        assert session.denied is None
