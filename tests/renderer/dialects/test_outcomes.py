"""The outcome of a reply is the same in every dialect: the calls that run, the errors shown to the model, the counters.
Played through the agent loop, with the marks of the dialect.
"""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Fault, Limits, Message, Prompt, SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.environments import ToolEnvironment, tool
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.renderer.dialects import DIALECTS, get_dialect
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training.samples import trajectory_to_sample
from rollouts.trajectory import Trajectory
from tests.batches import batch_metrics
from tests.dialects import IN_TAGS, MALFORMED, OF_MESSAGES, TEMPLATES, TOOLS, WRITTEN

CALLING = sorted(set(DIALECTS) - {"plain"})


class World(ToolEnvironment):
    """Records the calls that ran."""

    def __init__(self, ran: list[Any]) -> None:
        self.ran = ran

    @tool
    def weather(self, city: str, days: int) -> str:
        """The weather of a city."""
        self.ran.append((city, days))
        return f"rain in {city}"

    @tool
    def now(self) -> str:
        """The time."""
        self.ran.append("now")
        return "noon"


@cache
def renderer_of(name: str) -> Renderer:
    """The renderer of a dialect: its first self-test costs more than the conversations."""
    return Renderer(_tokenizer(), chat_template=TEMPLATES[name], dialect=name)


_tokenizer = cache(partial(load_tokenizer, DEMO_MODEL))


async def play(name: str, text: str, **options: Any) -> tuple[list[Any], Trajectory]:
    """Play one reply in a dialect, and a last one without calls."""
    renderer = renderer_of(name)
    ran: list[Any] = []
    policy = ScriptedPolicy([renderer.encode(f"{reply}<|im_end|>").tolist() for reply in (text, "Done.")])
    trajectory = await run_agent(
        Prompt("Well?", index=0),
        partial(World, ran),
        policy,
        renderer,
        sampling=SamplingParams(max_new_tokens=100_000),
        **options,
    )
    assert trajectory.stop_reason is not StopReason.FAILED, trajectory.failure
    return ran, trajectory


def answers(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


def thought(name: str, text: str) -> str:
    """The text as a thought in the dialect, followed by an answer."""
    if name == "harmony":
        draft = text.replace("<|", "< |")  # an analysis message cannot contain its own marks
        return f"<|channel|>analysis<|message|>{draft}<|end|><|start|>assistant<|channel|>final<|message|>No."
    opening, closing = getattr(DIALECTS[name], "reasoning")  # noqa: B009 - no part of the protocol
    if name == "inkling":
        return f"{opening}weather: {text.partition('<|end')[0]}{closing}<|message_model|><|content_text|>No."
    if name == "muse":
        return f"{opening}{text.replace('<|', '< |')}{closing}<|start|>assistant to=user<|message|>No."
    return f"{opening}{text}{closing}No."


@pytest.mark.parametrize("name", CALLING)
async def test_parallel_calls_run_in_order(name: str) -> None:
    """Each runs with typed arguments, and the results are in the order of the calls."""
    ran, trajectory = await play(name, WRITTEN[name])
    assert ran == [("Köln", 2), "now"]
    assert answers(trajectory) == ["rain in Köln", "noon"]
    assert trajectory.metrics["tool_calls"] == 2
    assert "malformed_tool_calls" not in trajectory.metrics


@pytest.mark.parametrize("name", CALLING)
async def test_a_draft_in_a_thought_does_not_run(name: str) -> None:
    """The reply has no calls."""
    ran, trajectory = await play(name, thought(name, WRITTEN[name]))
    assert ran == []
    reply = trajectory.messages[-1]
    assert (reply.content, reply.tool_calls) == ("No.", ())
    assert "weather" in (reply.reasoning or "")


@pytest.mark.parametrize("name", sorted(set(CALLING) - OF_MESSAGES))
def test_a_thought_that_the_prompt_opened_ends_where_it_is_closed(name: str) -> None:
    """If only the closing mark was sampled, calls before it are drafts; without it, all text is reasoning."""
    _, closing = getattr(DIALECTS[name], "reasoning")  # noqa: B009 - no part of the protocol
    parse = partial(get_dialect(name).parse, tools=TOOLS, reasoning_open=True)
    both = parse(f"{WRITTEN[name]}{closing}\n\n{WRITTEN[name]}")
    assert [call.name for call in both.tool_calls] == ["weather", "now"]
    assert both.reasoning == WRITTEN[name]
    assert parse(WRITTEN[name]).tool_calls == ()


@pytest.mark.parametrize("name", CALLING)
async def test_an_unknown_tool_is_answered_with_an_error_and_the_others_run(name: str) -> None:
    """The error lists the known tools; the call is counted as unknown."""
    ran, trajectory = await play(name, WRITTEN[name].replace("now", "fly"))
    assert ran == [("Köln", 2)]
    first, second = answers(trajectory)
    assert first == "rain in Köln"
    assert "no tool 'fly'; the tools are: weather, now" in second
    assert trajectory.metrics["unknown_tool_calls"] == 1


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in CALLING for case in MALFORMED[name]])
async def test_a_malformed_call_is_answered_with_an_error_and_counted_by_its_fault(
    name: str, case: tuple[str, Fault, str]
) -> None:
    """Nothing runs, the model sees the reason, and sample and batch have the count."""
    text, fault, words = case
    ran, trajectory = await play(name, text)
    assert ran == []
    (answer,) = answers(trajectory)
    assert answer.startswith("Error: ")
    assert words in answer
    counts = {key: number for key, number in trajectory.metrics.items() if "malformed" in key}
    assert counts == {"malformed_tool_calls": 1, f"malformed_tool_calls/{fault}": 1}
    sample = trajectory_to_sample(trajectory, Prompt("q", index=0, group_index=0), str)
    assert batch_metrics([sample])[f"episode/malformed_tool_calls/{fault}"] == 1


@pytest.mark.parametrize("name", CALLING)
async def test_a_reply_that_is_cut_in_a_call_runs_nothing(name: str) -> None:
    """By default the episode ends; with ``on_cut="continue"`` the unclosed call is answered with an error."""
    renderer = renderer_of(name)
    text = WRITTEN[name][: WRITTEN[name].index("2")]
    for on_cut, reason in (("stop", StopReason.MAX_TOKENS), ("continue", StopReason.TASK_COMPLETED)):
        ran: list[Any] = []
        cut = renderer.encode(text).tolist()
        replies = [Reply(cut, "length"), renderer.encode("Done.<|im_end|>").tolist()]
        trajectory = await run_agent(
            Prompt("Well?", index=0),
            partial(World, ran),
            ScriptedPolicy(replies),
            renderer,
            sampling=SamplingParams(max_new_tokens=len(cut)),
            limits=Limits(on_cut=on_cut),  # type: ignore[arg-type]
        )
        assert (ran, trajectory.stop_reason) == ([], reason)
    assert trajectory.metrics["malformed_tool_calls"] == 1


def brief(name: str, text: str) -> list[tuple[str, Mapping[str, Any], Fault | None]]:
    return [(c.name, dict(c.arguments), c.fault) for c in get_dialect(name).parse(text, tools=TOOLS).tool_calls]


@pytest.mark.parametrize("name", CALLING)
def test_arguments_as_a_string_are_never_parsed(name: str) -> None:
    """As one object they are malformed; in tags or named arguments the value stays text."""
    if name in IN_TAGS:
        ((_, arguments, _),) = brief(name, IN_TAGS[name])
        assert arguments in ({"tags": "[]"}, {"tags": '"[]"'}, {})
    elif name in ("llama_pythonic", "olmo3"):
        marks = ("[", "]") if name == "llama_pythonic" else ("<function_calls>", "</function_calls>")
        assert brief(name, "weather(tags='[]')".join(marks)) == [("weather", {"tags": "[]"}, None)]
    else:
        assert "string_arguments" in [fault for _, fault, _ in MALFORMED[name]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi_k2", WRITTEN["kimi_k2"].replace("now:1", "weather:0")),
        (
            "mistral",
            "[TOOL_CALLS]" + json.dumps([{"name": "now", "arguments": {}, "id": "abcdefghi"} for _ in range(2)]),
        ),
        (  # an id of the form of ours, which the model may have seen in the history
            "mistral",
            "[TOOL_CALLS]" + json.dumps([{"name": "now", "arguments": {}, "id": "call00001"} for _ in range(2)]),
        ),
    ],
)
async def test_a_duplicate_call_id_is_replaced(name: str, text: str) -> None:
    """In dialects with ids: both calls run, and each result has a different id."""
    _, trajectory = await play(name, text)
    calls = next(message for message in trajectory.messages if message.tool_calls).tool_calls
    assert len({call.id for call in calls}) == 2
    assert [m.tool_call_id for m in trajectory.messages if m.role == "tool"] == [call.id for call in calls]
    assert trajectory.metrics["duplicate_call_ids"] == 1


def test_a_plain_reply_has_no_calls() -> None:
    """For templates without tools."""
    for text in WRITTEN.values():
        assert get_dialect("plain").parse(text).tool_calls == ()
    assert Message("assistant", get_dialect("plain").parse("Yes.").content).content == "Yes."
