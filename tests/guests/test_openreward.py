"""OpenReward's training kit: its file, its rows, its rewards, its events, and rollouts of it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from rollouts.commands import main
from rollouts.dtypes import Endpoint, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments.ors import CallRecord
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.integrations.ors_server.app import environment_server
from rollouts.integrations.slime.buffer import TrainerBuffer
from rollouts.recipe.files import build, load_recipe
from rollouts.recipes.environments.openreward import (
    Trajectories,
    events_of,
    generate,
    group_reward,
    load_settings,
    prepare_tasks,
    reward,
)
from rollouts.recipes.environments.openreward.tasks import write_tasks
from rollouts.renderer import renderer_for
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Sample, load_prompts
from tests import ors_recipe

ROOT = Path(__file__).parents[2]
KIT = """
environments:
  org/sums:
    splits: [train]
    base_url: {url}
    {more}
{rest}
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = ors_recipe.recipe(Endpoint())
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(environment_server(made)) as url:
        yield url


def kit(folder: Path, url: str, more: str = "max_turns: 4", rest: str = "") -> Path:
    path = folder / "train_config.yaml"
    path.write_text(KIT.format(url=url, more=more, rest=rest))
    return path


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "rest", "words"),
    [
        ("max_turn: 4", "", "unknown field `max_turn`"),
        ("reward_reduction: median", "", "Invalid enum value 'median'"),
        ("max_turns: 0", "", "max_turns and num_samples of at least 1"),
        ("weight: 0", "", r"org/sums\.weight: got 0\.0; expected a number > 0"),
        ("max_turns: 4", "thinking: perhaps", "Expected `bool`, got `str` - at `[$].thinking`"),
        ("max_turns: 4", "system_prompt_template: 'use {tool}'", "system_prompt_template: got KeyError.'tool'."),
        ("max_turns: [", "", "no YAML"),
    ],
)
def test_errors_in_the_file_are_named(tmp_path: Path, more: str, rest: str, words: str) -> None:
    """The error names the file, the place, the value and the expected value."""
    with pytest.raises(ConfigError, match=words):
        load_settings(kit(tmp_path, "http://127.0.0.1:1", more, rest))


def test_the_kits_own_file_is_read(tmp_path: Path) -> None:
    """It has the fields and defaults of the kit."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "environments:\n  GeneralReasoning/WhoDunit:\n    splits: [train]\n    nonterminal_reward: 0.0\n"
        "    reward_reduction: sum\n    max_turns: 20\nsecrets:\n  openai_api_key: null\n"
        'system_prompt_template: |\n  Tools:\n  {tools}\n  Write {{"name": …}}.\nthinking: false\n'
    )
    settings = load_settings(path)
    entry = settings.of("GeneralReasoning/WhoDunit")
    assert (entry.splits, entry.num_samples, entry.max_turns, settings.tools_in_prompt) == (("train",), None, 20, True)
    assert load_settings(ROOT / "environments/openreward/train_config.yaml").of("calculator").max_turns == 6


def test_a_cloud_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before any request."""
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.delenv("OPENREWARD_SESSION_URL", raising=False)
    path = tmp_path / "c.yaml"
    path.write_text("environments: {org/name: {}}")
    with pytest.raises(ConfigError, match="OPENREWARD_API_KEY: got None; expected a key for https://sessions"):
        load_settings(path).server("org/name")


def test_secrets_are_read_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``null`` reads an environment variable, also in capitals; errors name secrets without a value."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    rest = "secrets: {openai_api_key: null, tavily_api_key: null}"
    settings = load_settings(kit(tmp_path, "http://127.0.0.1:1", "secrets: {own: sk-own}", rest))
    server = settings.server("org/sums")
    assert server._connection.secret_values == {"openai_api_key": "sk-hidden", "own": "sk-own"}
    shown = repr(settings) + repr(settings.of("org/sums")) + repr(server)
    assert "sk-" not in shown
    assert server._connection._error_text("no search") == (
        "no search (secrets without a value, so not sent: tavily_api_key)"
    )


# -- rows -------------------------------------------------------------------------------------------------------------


async def test_rows_are_read_by_slime_and_by_us(tmp_path: Path, url: str) -> None:
    """Metadata is JSON text, which slime and ``rollouts run`` both read."""
    settings = load_settings(kit(tmp_path, url))
    rows = await prepare_tasks(settings)
    write_tasks(rows, tmp_path / "rows.jsonl")
    prompts = load_prompts(tmp_path / "rows.jsonl")
    assert len(prompts) == 4
    first = prompts[0].metadata
    assert (first["env_name"], first["environment_name"], first["namespace"]) == ("org/sums", "sums", "org")
    assert prompts[0].prompt == f"[org/sums:train:{first['task_hash']}]"

    class Source:
        def get_samples(self, count: int) -> list[list[Any]]:
            row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
            return [[Namespace(prompt=row["prompt"], label=row["label"], metadata=row["metadata"]) for _ in range(2)]]

    buffer = TrainerBuffer(Source(), 2)
    assert buffer.get_prompts(1)[0].metadata == first
    assert all(isinstance(sample.metadata, dict) for sample in buffer.taken[0].group)


async def test_weights_set_the_shares_of_the_rows(tmp_path: Path, url: str) -> None:
    """The number of rows stays that of the tasks, in the given shares."""
    path = tmp_path / "c.yaml"
    entries = "".join(f"  {name}: {{base_url: '{url}', weight: {weight}}}\n" for name, weight in (("a", 3), ("b", 1)))
    path.write_text("environments:\n" + entries)
    rows = await prepare_tasks(load_settings(path))
    names = [json.loads(row["metadata"])["env_name"] for row in rows]
    assert (names.count("a"), names.count("b")) == (6, 2)


async def test_a_wrong_split_and_a_dead_server_are_named(tmp_path: Path, url: str) -> None:
    """Each raises its own error before any work."""
    with pytest.raises(ConfigError, match="split: got 'dev'; expected one of train"):
        await prepare_tasks(_other_split(tmp_path, url))
    with pytest.raises(EnvironmentFailure, match="cannot connect"):
        await prepare_tasks(load_settings(kit(tmp_path, "http://127.0.0.1:9")))


def _other_split(folder: Path, url: str) -> Any:
    path = folder / "dev.yaml"
    path.write_text(f"environments: {{sums: {{base_url: '{url}', splits: [dev]}}}}")
    return load_settings(path)


# -- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "rewards", "ended", "expected"),
    [
        ("reward_reduction: sum", [0.5, 0.25], True, 0.75),
        ("reward_reduction: mean", [0.5, 0.25], True, 0.375),
        ("reward_reduction: max", [0.5, 0.25], True, 0.5),
        ("reward_reduction: min", [0.5, 0.25], True, 0.25),
        ("nonterminal_reward: -1.0", [0.5], False, -0.5),
        ("nonterminal_reward: -1.0", [0.5], True, 0.5),
        ("{nonterminal_reward: -1.0, reward_reduction: mean}", [0.5], False, -0.25),
        ("nonterminal_reward: -1.0", [], False, -1.0),
        ("max_turns: 3", [], False, 0.0),
        ("max_reward: 0.3", [0.5, 0.25], True, 0.3),
        ("min_reward: 0.1", [], True, 0.1),
    ],
)
def test_the_reduction_of_step_rewards(
    tmp_path: Path, more: str, rewards: list[float], ended: bool, expected: float
) -> None:
    """The penalty joins the rewards before the reduction; bounds come last."""
    path = tmp_path / "c.yaml"
    entry = more if more.startswith("{") else f"{{{more}}}"
    path.write_text(f"environments: {{e: {entry}}}")
    sample = Sample(
        step_rewards=rewards,
        metadata={"env_name": "e", "stop_reason": "reached_terminal_state" if ended else "max_turns"},
    )
    assert reward(sample, settings=load_settings(path)) == expected


async def test_a_groups_score_is_added_and_both_are_kept(tmp_path: Path) -> None:
    """The environment's group score is added to each rollout's own reward."""
    made = ors_recipe.recipe(Endpoint(), group_rm=True)
    async with environment_server(made) as url:
        settings = load_settings(kit(tmp_path, url, "group_score: true"))
        (row, *_) = await prepare_tasks(settings)
        known = json.loads(row["metadata"])
        answer = _answer(known["task_spec"]["index"])
        samples = [
            Sample(
                step_rewards=[0.5],
                metadata={**known, "stop_reason": "reached_terminal_state"},
                messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
            )
            for text in (f"The answer is {answer}.", "no")
        ]
        assert await group_reward(samples, settings=settings) == [1.5, 0.5]
        assert (samples[0].metadata["own_reward"], samples[0].metadata["group_score"]) == (0.5, 1.0)
        await settings.server("org/sums", "sums").aclose()


def _answer(index: int) -> str:
    fresh = ors_recipe.recipe(Endpoint())
    return str(fresh.data_buffer.get_prompts(4)[index].label)


# -- rollouts ---------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'


async def test_a_rollout_has_the_kits_metadata(tmp_path: Path, url: str) -> None:
    """The metadata has rewards, stop reason and counts; only the system prompt lists the tools."""
    rest = "system_prompt_template: 'Tools are: {tools} Call {{them}}.'"
    settings = load_settings(kit(tmp_path, url, "max_turns: 3", rest))
    (row, *_) = await prepare_tasks(settings)
    prompt = Prompt(row["prompt"], metadata=row["metadata"])
    renderer = renderer_for(str(DEMO_MODEL))

    def said(text: str) -> list[int]:
        return [*renderer.encode(text).tolist(), renderer.stop_token_ids[0]]

    policy = ScriptedPolicy([said(CALL), said(CALL.replace("add", "fly")), said("no idea")])
    export = Trajectories(tmp_path / "events.jsonl")
    (sample,) = await generate(
        [prompt],
        settings=settings,
        endpoint=Endpoint(),
        tokenizer=str(DEMO_MODEL),
        policy=policy,
        sampling=SamplingParams(max_new_tokens=300),
        trajectories=export,
    )
    await settings.server("org/sums", "sums").aclose()
    opening = renderer.decode(policy.requests[0])
    assert opening.count('"name": "add", "arguments_schema"') == 1
    assert "Call {them}." in opening
    assert "# Tools" not in opening
    assert (sample.metadata["rewards"], sample.metadata["stop_reason"]) == ([0.0], "reached_terminal_state")
    assert (sample.metadata["num_tool_calls"], sample.metadata["num_failed_tool_calls"]) == (2, 1)
    assert reward(sample, settings=settings) == 0.0
    kinds = [json.loads(line).get("type") for line in export.path.read_text().splitlines()]
    assert kinds == [
        None,
        "system_message",
        "system_message",
        "user_message",
        "tool_call",
        "tool_result",
        "tool_call",
        "tool_result",
        "assistant_message",
        "tool_result",
    ]


def test_the_recipe_runs_on_the_embedded_engine(tmp_path: Path, url: str) -> None:
    """``prepare_tasks``, ``rollouts run``, ``rollouts check-run``: exact tokens, and every trajectory in the file."""
    config = kit(tmp_path, url, "max_turns: 3\n    nonterminal_reward: -1.0")
    write_tasks(anyio.run(prepare_tasks, load_settings(config)), tmp_path / "rows.jsonl")
    line = ["run", str(ROOT / "configs/openreward.py"), "--data", str(tmp_path / "rows.jsonl")]
    options = {
        "config": config,
        "batch_size": 2,
        "n_samples_per_prompt": 2,
        "max_new_tokens": 48,
        "trajectories": tmp_path / "events.jsonl",
    }
    for name, value in options.items():
        line += ["--set", f"{name}={value}"]
    assert main([*line, "--out", str(tmp_path / "run")]) == 0
    assert verify_run(tmp_path / "run").ok
    kept = load_run(tmp_path / "run")
    assert len(kept) >= 4
    assert all(
        sample.metadata["stop_reason"] in ("reached_terminal_state", "max_turns", "max_tokens") for sample in kept
    )
    begun = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len([event for event in begun if event["eventType"] == "rollout"]) >= len(kept)


def test_a_row_of_an_environment_that_is_not_in_the_file_is_refused(tmp_path: Path, url: str) -> None:
    """The error is raised before the run begins."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "metadata": {"env_name": "other"}}\n')
    options = {"config": str(kit(tmp_path, url)), "data": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match=r'metadata\["env_name"\]: got .other.; expected one of org/sums'):
        build(load_recipe(ROOT / "configs/openreward.py"), Endpoint(), options)


# -- trajectories -----------------------------------------------------------------------------------------------------


def played() -> tuple[Sample, list[CallRecord]]:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c0"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "c1"}]},
    ]
    calls = [
        CallRecord("c0", "add", "2", 0.5, False, False, {"k": 1}),
        CallRecord("c1", "add", "3", 1.0, True, False, None),
    ]
    metadata = {"env_name": "e", "split": "train", "task_spec": {"a": 1}, "task_hash": "h"}
    return Sample(messages=messages, metadata=metadata, step_rewards=[0.5, 1.0], reward=1.5), calls


class Api:
    """An API that rejects a number of requests before it accepts one."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.events: list[dict[str, Any]] = []

    async def take(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=500, text="not now")
        self.events += json.loads(await request.read())["events"]
        return web.json_response({})

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/rollouts", self.take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


async def test_unconfirmed_events_are_sent_again(tmp_path: Path) -> None:
    """Events are in the file first; rejected and unsent events are sent with the next ones, a part of one never."""
    api = Api(refusals=1)
    url = await api.start()
    sample, calls = played()
    export = Trajectories(tmp_path / "t.jsonl", key="k", url=url)
    await export.add(sample, calls, run_name="r")
    assert (api.events, export.problem, export.left > 0) == ([], "status 500: not now", True)
    await Trajectories(tmp_path / "t.jsonl", key="k", url="http://127.0.0.1:9").send()
    part = '{"eventId": "0'
    with (tmp_path / "t.jsonl").open("a") as file:  # a process was killed as it wrote
        file.write(part)
    await Trajectories(tmp_path / "t.jsonl", key="k", url=url).add(sample, calls, run_name="r")
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines if line != part]
    assert api.events == written
    assert (Trajectories(tmp_path / "t.jsonl").left, len(written)) == (0, 16)
    await api.runner.cleanup()


@pytest.mark.extra
def test_events_have_the_form_of_the_real_client(tmp_path: Path) -> None:
    """The events equal those of ``openreward`` for the same conversation, field by field."""
    openreward = pytest.importorskip("openreward.api.rollouts.rollout", exc_type=ImportError)
    background = pytest.importorskip("openreward.api.rollouts.background")
    models = pytest.importorskip("openreward.models")
    base = pytest.importorskip("openreward.api.rollouts.serializers.base")
    sample, calls = played()
    ours = events_of(sample, calls, run_name="r", now=5)
    said = [
        (base.UserMessage("go"), {}),
        (base.ReasoningItem("hm"), {}),
        (base.AssistantMessage("so"), {}),
        (base.ToolCall("add", '{"a":1}', "c0"), {}),
        (base.ToolResult("2", "c0"), {"reward": 0.5, "metadata": {"k": 1}}),
        (base.ToolCall("add", '{"a":1}', "c1"), {}),
        (base.ToolResult("3", "c1"), {"reward": 1.0, "isFinished": True}),
    ]
    assert openreward is not None
    theirs = []
    for index, (message, more) in enumerate(said):
        event = base.base_to_normalized([message])[0]
        fields = {"metadata": {}, "isFinished": False, **more}
        logged = models.LogMessageEvent(
            eventId="", timestamp=5, index=index, rolloutEventId="", type=event.type, content=event.content,
            summary=event.summary, name=event.name, callId=event.call_id, **fields,
        )  # fmt: skip
        theirs.append(json.loads(background._encode_event(logged)))
    for event in ours[1:]:
        event["eventId"] = event["rolloutEventId"] = ""
    assert ours[1:] == theirs
    config = models.RolloutConfig(
        run_name="r",
        rollout_name=ours[0]["rolloutName"],
        environment="e",
        split="train",
        metadata=ours[0]["metadata"],
        task_spec={"a": 1},
    )
    started = models.RolloutStartedEvent.from_config(ours[0]["eventId"], 5, config)
    assert json.loads(background._encode_event(started)) == ours[0]
