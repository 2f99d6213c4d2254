"""Rollouts of programs and of agent functions: what is data, what costs the rollout, and how much a rollout weighs."""

from __future__ import annotations

import functools
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.dtypes import Completion, Endpoint, Message, StopReason, VersionSpan
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError, EndpointAway, EndpointUnavailable, EnvironmentFailure, at, current_place
from rollouts.inference.base import CompletionRequest
from rollouts.inference.weights import update_weights
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch, normalise_rewards
from rollouts.integrations.trl import to_row
from rollouts.programs import Launch as ProgramLaunch
from rollouts.programs import ModelServer, script
from rollouts.programs.gateway import server as gateway_server
from rollouts.programs.gateway.address import PublicAddress
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.gateway.tree import Training
from rollouts.programs.generate import check_program
from rollouts.programs.launchers.workspace import FilesWorkspace
from rollouts.programs.recipe import program_recipe
from rollouts.recipe import Recipe
from rollouts.recipes.configs.calculator_program import SCRIPTS, workspace_reward
from rollouts.runs.resume import reopen
from rollouts.runs.start import begin
from rollouts.runs.verify import check_sample, verify_run
from rollouts.runs.writer import RunWriter
from rollouts.sandboxes import Image, ImageSandbox, NamespaceSandbox, ProcessSandbox, Sandbox, SandboxError, opened
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Group,
    Prompt,
    RolloutConfig,
    Sample,
    Status,
    agent_rollout_to_sample,
    function_rollout_to_samples,
    generate_program_batch,
    make_threshold_filter,
    program_rollout_to_samples,
)
from rollouts.training.batch import group_advantages, loss_weights
from rollouts.training.metrics import RunMetrics
from tests.batches import batch_metrics
from tests.integrations.slime.launches import Launch
from tests.peft_folders import write_adapter
from tests.programs.gateway.programs import GrammarPolicy, demo_renderer, replies, spoken
from tests.programs.programs import Chat, FakeSandbox, program

ENDPOINT = Endpoint(model=str(DEMO_MODEL))
PROMPT = Prompt("What is 5 + 3?", label="8", metadata={"row": 1}, group_index=7, index=57)


def policy_of(*messages: Message | str) -> ScriptedPolicy:
    return ScriptedPolicy(replies(*messages), max_context=4096)


async def rollout(act: Any, *, policy: Any = None, prompt: Any = PROMPT, **options: Any) -> list[Sample]:
    """One rollout of a function as the program of a fake sandbox."""
    sandbox = act if isinstance(act, FakeSandbox) else FakeSandbox(act)
    policy = policy or policy_of()
    given = {"program": program, "sandbox": sandbox, "endpoint": ENDPOINT, "tokenizer": demo_renderer()}
    samples = await program_rollout_to_samples(prompt, policy=policy, **{**given, **options})
    assert sandbox.counts["closed"] == sandbox.counts["opened"]
    assert [violation for sample in samples for violation in check_sample(sample) if sample.turns] == []
    return samples


async def opens_namespaces() -> None:
    """Skip the test where this machine makes no namespaces."""
    if sys.platform != "linux":
        pytest.skip("Linux only")
    try:
        await (await NamespaceSandbox().open()).close()
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")


async def ask_once(chat: Chat) -> int:
    """A program of one call."""
    await chat.ask(chat.env["TASK"])
    return 0


# -- what a rollout is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["process", "namespaces", "image"])
async def test_a_program_gives_the_ids_of_the_agent_loop(kind: str) -> None:
    """A script in a process has the tokens, mask and logprobs of the environment with the same tools and replies.

    Also in a separate network, where it reaches the gateway's listener and nothing else.
    """
    sandbox: Sandbox = ProcessSandbox()
    if kind == "namespaces":
        await opens_namespaces()
        sandbox = NamespaceSandbox(readable=[sys.prefix, sys.base_prefix])
    if kind == "image":
        sandbox = ImageSandbox(Image(["/"]), workdir="/workspace")  # this machine as an image: it has the interpreter
        try:
            async with opened(sandbox) as place:
                if (await place.exec([sys.executable, "-S", "-c", ""])).code:
                    pytest.skip("the interpreter is on another file system than the root")
        except SandboxError as error:
            pytest.skip(f"this machine makes no overlay over its root: {error}")
    said = ['\n<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>', "The answer is 8."]
    options: dict[str, Any] = {"endpoint": ENDPOINT, "tokenizer": demo_renderer()}
    looped = await agent_rollout_to_sample(
        PROMPT, environment_cls=CalculatorEnvironment, policy=policy_of(*said), **options
    )
    (sample,) = await program_rollout_to_samples(
        PROMPT,
        program=functools.partial(script, path=SCRIPTS / "agent.py", command=(sys.executable, "-S")),
        sandbox=sandbox,
        workspace=FilesWorkspace(["answer.txt", "none.txt"]),
        policy=policy_of(*said),
        **options,
    )
    assert [*map(list, (sample.tokens, sample.loss_mask))] == [*map(list, (looped.tokens, looped.loss_mask))]
    assert sample.rollout_log_probs == looped.rollout_log_probs
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.TASK_COMPLETED)
    assert (sample.group_index, sample.index, sample.rollout_id) == (7, 57, 57)
    assert sample.metadata["files"] == {"answer.txt": "The answer is 8.", "none.txt": None}
    assert workspace_reward(sample) == 1
    assert sample.metadata["program"]["exit_code"] == 0
    assert (sample.metadata["row"], sample.metrics["calls"], sample.metrics["tool_calls"]) == (1, 2, 1)
    assert check_sample(sample) == []


async def test_an_exit_code_is_data() -> None:
    """The code, the ends of the output and the seconds are in the metadata; the rollout is sound."""

    async def act(chat: Chat) -> int:
        await ask_once(chat)
        return 3

    (sample,) = await rollout(act)
    assert (sample.status, sample.failure) == (Status.COMPLETED, None)
    assert sample.metadata["program"] == {
        "name": "program",
        "exit_code": 3,
        "seconds": 0.5,
        "stdout": "said",
        "stderr": "error of What is 5 + 3?",
        "truncated": False,
    }
    assert (sample.metrics["program_failed"], sample.metrics["program_seconds"]) == (1, 0.5)


async def test_no_call_is_a_failure_by_name() -> None:
    """A program that never asks the model has no reply to train; its exit code and error output are in the message."""

    async def nothing(chat: Chat) -> int:
        return 5

    (sample,) = await rollout(nothing)
    assert (sample.status, len(sample), sample.rollout_id) == (Status.FAILED, 0, 57)
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.cause) == ("NoReply", "generate")
    assert "exit code 5: error of What is" in sample.failure.message


async def test_a_program_that_is_not_installed_is_a_failure_by_name() -> None:
    """Also in a real sandbox: the message has what the system says of the command."""

    def missing(task: str, server: ModelServer) -> ProgramLaunch:
        return ProgramLaunch(("no-such-program",), {})

    options: dict[str, Any] = {"endpoint": ENDPOINT, "tokenizer": demo_renderer(), "policy": policy_of()}
    (sample,) = await program_rollout_to_samples("q", program=missing, sandbox=ProcessSandbox(), **options)
    assert sample.failure is not None
    assert "exit code 127: no-such-program: No such file" in sample.failure.message


@pytest.mark.parametrize(
    ("limits", "reason", "calls"),
    [
        (SessionLimits(max_calls=2), StopReason.MAX_TURNS, 2),
        (SessionLimits(max_sampled_tokens=3), StopReason.MAX_TOKENS, 1),
        (SessionLimits(max_seconds=0.3), StopReason.DEADLINE, 3),
    ],
)
async def test_a_limit_kills_the_program_and_keeps_what_it_did(
    limits: SessionLimits, reason: StopReason, calls: int
) -> None:
    """A limit of the session is the stop reason; the program is not left to retry, and its replies are trained."""

    async def endless(chat: Chat) -> int:
        for number in range(3):
            await chat.ask(f"question {number}")
        await anyio.sleep_forever()
        return 0

    sandbox = FakeSandbox(endless)
    samples = await rollout(sandbox, limits=limits)
    assert (samples[-1].stop_reason, samples[-1].status) == (reason, Status.TRUNCATED)
    assert samples[-1].metrics["calls"] == calls
    assert sum(sample.turns for sample in samples) == calls
    assert sandbox.counts["killed"] == 1
    assert samples[-1].metadata["program"]["exit_code"] == -9


@pytest.mark.parametrize(
    ("step", "cause"), [("open", "environment_start"), ("write", "environment_step"), ("run", "environment_step")]
)
async def test_a_failure_of_the_sandbox_costs_one_rollout(step: str, cause: str) -> None:
    """It is the typed failure of that rollout, with the exception of the sandbox."""
    (sample,) = await rollout(FakeSandbox(ask_once, fails_at=step))
    assert sample.status is Status.FAILED
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.cause) == ("EnvironmentFailure", cause)
    assert f"SandboxError: planted at {step}" in sample.failure.message


async def test_a_workspace_that_cannot_be_read_costs_the_rollout() -> None:
    """Its reward would be that of another workspace; the tokens are kept with the failure."""

    class Unreadable(FilesWorkspace):
        async def take(self, prompt: Prompt, place: Any, filled: None) -> dict[str, Any]:
            raise OSError("planted")

    (sample,) = await rollout(ask_once, workspace=Unreadable(["a"]))
    assert (sample.status, sample.turns) == (Status.FAILED, 1)
    assert sample.failure is not None
    assert sample.failure.cause == "environment_step"


@pytest.mark.parametrize("reward", ["0.5", float("nan")])
async def test_a_workspace_that_takes_no_number_as_reward_costs_the_rollout(reward: Any) -> None:
    """A failure by name: it would be an error of the run, or the advantage of its group."""

    class Graded(FilesWorkspace):
        async def take(self, prompt: Prompt, place: Any, filled: None) -> dict[str, Any]:
            return {"reward": reward}

    (sample,) = await rollout(ask_once, workspace=Graded(["a"]))
    assert sample.failure is not None
    assert (sample.status, sample.reward, sample.turns) == (Status.FAILED, None, 1)
    assert "Graded.take: got" in sample.failure.message


@pytest.mark.parametrize("raises", [SandboxError, OSError])
async def test_a_sandbox_that_does_not_close_is_counted(raises: type[Exception]) -> None:
    """The rollout has ended: what it did is whole."""
    (sample,) = await rollout(FakeSandbox(ask_once, fails_at="close", raises=raises))
    assert (sample.status, sample.metrics["close_failures"]) == (Status.COMPLETED, 1)


class FailingPolicy(ScriptedPolicy):
    """A policy whose first calls raise."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(replies(), max_context=4096)
        self._errors = list(errors)
        self.places: list[str] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.places.append(current_place())
        if self._errors:
            raise self._errors.pop(0)
        return await super().complete(request)


async def test_a_call_that_the_server_did_not_answer_costs_the_rollout() -> None:
    """A program that gives up on an error of the server is not a sample of the policy; a program that retries is."""

    lost = await rollout(ask_once, policy=FailingPolicy(EndpointUnavailable("planted")))
    assert lost[-1].failure is not None
    assert (lost[-1].status, lost[-1].failure.cause) == (Status.FAILED, "endpoint")
    sound = await rollout(ask_until_answered, policy=FailingPolicy(EndpointUnavailable("planted")))
    assert (sound[-1].status, sound[-1].metrics["failed_calls"]) == (Status.COMPLETED, 1)


async def ask_until_answered(chat: Chat) -> int:
    """A program that repeats its call until it is answered."""
    while not await chat.ask("first"):
        pass
    return 0


async def test_a_server_that_stays_away_ends_the_run() -> None:
    """As in the agent loop: no rollout is lost to it."""
    with pytest.raises(EndpointAway, match="planted"):
        await rollout(ask_once, policy=FailingPolicy(EndpointAway("planted")))


async def test_generations_belong_to_the_rollout() -> None:
    """Waits and failures name the rollout whose program asked, not the rollout whose task opened the gateway."""
    policy = FailingPolicy()

    async def one(place: str) -> None:
        with at(place):
            await rollout(ask_once, policy=policy)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(one, f"rollout {number}")
    assert sorted(policy.places) == ["rollout 0", "rollout 1", "rollout 2"]


@pytest.mark.parametrize("recovers", [False, True])
async def test_an_overflow_is_a_stop_reason(recovers: bool) -> None:
    """The last call did not fit; a program that continues with a shorter history has completed its task."""

    async def act(chat: Chat) -> int:
        await chat.ask("first")
        await chat.ask("long " * 300)
        if recovers:
            await chat.ask("short")
        return 1

    samples = await rollout(act, context_window=400)
    expected = StopReason.TASK_COMPLETED if recovers else StopReason.CONTEXT_OVERFLOW
    assert (samples[-1].stop_reason, samples[-1].metrics["overflow"]) == (expected, 1)


async def test_all_rollouts_of_a_loop_share_one_gateway() -> None:
    """It is closed with its last user."""
    urls: list[str] = []
    together = anyio.Event()

    async def act(chat: Chat) -> int:
        urls.append(chat.env["URL"].partition("/s/")[0])
        if len(urls) == 3:
            together.set()
        await together.wait()
        return await ask_once(chat)

    samples = await generate_program_batch(
        ["a", "b", "c"],
        program=program,
        sandbox=FakeSandbox(act),
        endpoint=ENDPOINT,
        tokenizer=demo_renderer(),
        policy=policy_of(),
    )
    assert [sample.prompt for sample in samples] == ["a", "b", "c"]
    assert len(set(urls)) == 1
    assert all(shared.gateway is None for gateways in gateway_server._SHARED.values() for shared in gateways.values())


# -- a rollout weighs once --------------------------------------------------------------------------------------------


async def with_agents(chat: Chat) -> int:
    """A program with two sub-agents at the same time, for tasks that contain ``many``."""
    names = ["one", "two"] if "many" in chat.env["TASK"] else []
    call = await chat.ask(chat.env["TASK"])
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(chat.ask, f"agent {name}")
    await chat.ask(chat.env["TASK"], call, "go on")
    return 0


def config_of(
    reward_fn: Any, act: Any = with_agents, policy: Any = None, training: Training | None = None, **options: Any
) -> RolloutConfig:
    return RolloutConfig(
        generate_fn=functools.partial(
            generate_program_batch,
            program=program,
            sandbox=FakeSandbox(act),
            endpoint=ENDPOINT,
            tokenizer=demo_renderer(),
            policy=policy or policy_of(),
            training=training,
        ),
        reward_fn=reward_fn,
        **{"batch_size": 1, "n_samples_per_prompt": 2, "over_sampling_factor": 1.0, **options},
    )


def by_index(low: float, high: float) -> Callable[[Sample], float]:
    def reward(sample: Sample) -> float:
        assert sample.index is not None
        return high if sample.index % 2 else low

    return reward


async def test_sandboxes_count_as_slots() -> None:
    """At most ``in_flight`` sandboxes are open at once, also where rollouts fail and are tried again."""
    open_at_once: list[int] = []

    async def act(chat: Chat) -> int:
        counts = sandbox.counts
        open_at_once.append(counts["opened"] - counts["closed"])
        if len(open_at_once) % 5 == 0:
            raise ValueError("planted")
        return await ask_once(chat)

    config = config_of(by_index(0.0, 1.0), act, in_flight=3, batch_size=3, over_sampling_factor=4.0, max_attempts=3)
    sandbox = config.generate_fn.keywords["sandbox"]  # type: ignore[attr-defined]
    async with AsyncRolloutManager(config, DataBuffer(["task"] * 20)) as manager:
        await manager.generate_batch()
        await manager.generate_batch()
    assert max(open_at_once) == 3
    assert sandbox.counts["opened"] == sandbox.counts["closed"]


async def batch_with_agents(**options: Any) -> list[Sample]:
    """A group of two rollouts, of which the second has three conversations: a prompt and two agents."""

    async def act(chat: Chat) -> int:
        count.append(1)
        chat.env = {**chat.env, "TASK": "many" if len(count) == 2 else "few"}
        return await with_agents(chat)

    count: list[int] = []
    config = config_of(by_index(0.0, 1.0), act, **options)
    async with AsyncRolloutManager(config, DataBuffer(["task"], epochs=1)) as manager:
        return await manager.generate_batch()


async def test_one_rollout_weighs_once_however_many_branches_it_has() -> None:
    """One reward for all branches, one place in the mean of its group, loss weights that sum to one rollout's."""
    samples = await batch_with_agents()
    rollouts: dict[int | None, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id, []).append(sample)
    few, many = sorted(rollouts.values(), key=len)
    assert (len(few), len(many)) == (1, 3)
    assert len({sample.reward for sample in many}) == 1
    assert {sample.stop_reason for sample in many[:-1]} == {StopReason.FORKED}
    whole = [few[0], many[-1]]
    advantages = {id(s): float(value) for s, value in zip(samples, group_advantages(samples), strict=True)}
    assert {advantages[id(sample)] for sample in many} == {float(group_advantages(whole)[1])}
    weights = {id(s): float(value) for s, value in zip(samples, loss_weights(samples), strict=True)}
    sums = [sum(weights[id(s)] * int(np.sum(s.loss_mask)) for s in one) for one in (few, many)]
    assert sums == pytest.approx([0.5, 0.5])
    metrics = batch_metrics(samples)
    assert (metrics["reward/mean"], metrics["status/completed"]) == (0.5, 1.0)
    assert metrics["turns/mean"] == pytest.approx((2 + 4) / 2)
    assert metrics["episode/calls"] == pytest.approx((2 + 4) / 2)
    totals = RunMetrics()
    totals.add(Group(Prompt("task", group_index=0), tuple(samples), "kept"))
    assert (totals.mean_reward, totals.rollouts) == (0.5, 2)
    assert make_threshold_filter(0.4, 0.6)(samples)


async def test_all_sampled_tokens_of_all_branches_are_trained_once() -> None:
    """The masks of the branches together have as many tokens as the policy sampled."""
    policy = policy_of()
    samples = await rollout(with_agents, policy=policy, prompt="many")
    assert len(samples) == 3
    sampled = sum(call.stop - call.start for sample in samples for call in sample.completions)
    assert sum(int(np.sum(sample.loss_mask)) for sample in samples) == sampled
    assert len(policy.requests) == 4


@pytest.mark.parametrize("constrained", ["drop", "train", "free"])
async def test_a_run_trains_no_reply_of_a_requested_form_by_default(tmp_path: Path, constrained: Any) -> None:
    """A whole run: they are sampled, counted and not trained; ``train`` trains them, ``free`` requests no form."""

    async def act(chat: Chat) -> int:
        first = await chat.ask("Hi", tools=())
        await chat.ask("Hi", first, "As JSON.", tools=(), response_format={"type": "json_object"})
        return 0

    policy = GrammarPolicy()
    training = None if constrained == "drop" else Training(constrained=constrained)
    config = config_of(by_index(0.0, 1.0), act, policy=policy, training=training)
    writer = RunWriter(tmp_path / "a", {"recipe": "test", "config": config.describe()})
    async with AsyncRolloutManager(config, DataBuffer(["task"], epochs=1), on_group=writer.on_group) as manager:
        samples = await manager.generate_batch()
        writer.write_batch(samples, manager.metrics, attrs.evolve(manager.accounting))
        writer.finish("finished", manager.accounting)
    enforced, trained = constrained != "free", constrained != "drop"
    asked = [one.json_schema for one in policy.samplings]
    assert asked.count('{"type":"object"}') == (2 if enforced else 0)
    of = "constrained" if enforced else "tempered"
    for sample in samples:
        assert [call.logprobs_of for call in sample.completions] == (["tempered", of] if trained else ["tempered"])
        assert (sample.metrics.get("untrained_tokens/constrained", 0) > 0) == (not trained)
        assert sample.metrics.get("constrained_calls", 0) == enforced
        assert sample.metrics.get("not_enforced/response_format", 0) == (not enforced)
    assert verify_run(tmp_path / "a").violations == []


def versioned(*messages: Message | str) -> ScriptedPolicy:
    """A policy whose tokens have the version 1, as a trainer numbers them."""
    answer = replies(*messages)

    def reply(tokens: Any) -> Reply:
        ids = answer(tokens)
        return Reply(ids, versions=[VersionSpan("1", 0, len(ids))])

    return ScriptedPolicy(reply, max_context=4096)


def test_slime_takes_the_branches_as_one_rollout() -> None:
    """A third level with one ``rollout_id`` and one reward, and advantages that count rollouts."""

    async def play(prompt: Prompt) -> list[Sample]:
        task = "many" if (prompt.index or 0) % 2 else "few"
        return await rollout(with_agents, policy=versioned(), prompt=attrs.evolve(prompt, prompt=task))

    launch = Launch(batch_size=1, n=2, play=play)
    args = launch.args()
    (group,) = generate_rollout_batch(args, 0, launch.source()).samples
    assert [len(branches) for branches in group] == [1, 3]
    assert [len({sample.rollout_id for sample in branches}) for branches in group] == [1, 1]
    assert [{sample.reward for sample in branches} for branches in group] == [{0.0}, {1.0}]
    _, advantages = normalise_rewards(args, [sample for branches in group for sample in branches])
    assert advantages == pytest.approx([-0.7071, 0.7071, 0.7071, 0.7071], abs=1e-4)
    trained = [sum(sample.loss_mask) for sample in group[1]]
    assert all(trained)
    assert len(trained) == 3


def slime_recipe(endpoint: Endpoint) -> Recipe:
    """A program with sub-agents as slime names it; the reward is the parity of the rollout."""
    recipe = program_recipe("agents", endpoint, program, ["unused"], sandbox=FakeSandbox(long_and_short))
    return attrs.evolve(recipe, config=attrs.evolve(recipe.config, reward_fn=by_index(0.0, 1.0)))


async def long_and_short(chat: Chat) -> int:
    """A program with a prompt that exceeds slime's limit of the context, and a shorter prompt."""
    await chat.ask("long " * 300)
    await chat.ask("short")
    return 0


def test_a_recipe_of_a_program_runs_behind_slimes_door() -> None:
    """The launch's engines sample, with its sampling and its limit of the context."""
    with start_blocking_portal() as portal:
        stub = StubServer(lambda ids, params: spoken("done"))
        with portal.wrap_async_context_manager(stub) as server:
            host, port = server.url.removeprefix("http://").split(":")
            args = Launch(batch_size=1, n=2).args(
                hf_checkpoint=str(DEMO_MODEL),
                sglang_router_ip=host,
                sglang_router_port=int(port),
                rollouts_recipe=f"{__name__}.slime_recipe",
                rollouts_recipe_options={},
                rollout_max_context_len=200,
            )
            try:
                (group,) = generate_rollout_batch(args, 0, Launch(batch_size=1, n=2).source()).samples
            finally:
                close_rollouts()
            assert {request.sampling_params["max_new_tokens"] for request in server.requests} == {32}
    assert [sample.reward for sample in group] == [0.0, 1.0]
    assert all(sample.loss_mask == [1] * len(spoken("done")) for sample in group)


async def test_trl_takes_each_branch_as_a_row() -> None:
    """With the advantage of its rollout; no sampled token is in two rows."""
    policy = versioned()
    samples = await batch_with_agents(policy=policy)
    rows = [to_row(sample, float(a)) for sample, a in zip(samples, group_advantages(samples), strict=True)]
    assert len(rows) == 4
    assert sum(int(row.completion_mask.sum()) for row in rows) == sum(sample.sampled_tokens for sample in samples)
    assert len({row.advantage for row in rows}) == 2


async def test_a_resumed_run_keeps_finished_programs_and_counts_those_that_begin_again(tmp_path: Path) -> None:
    """A program cannot be restored: one under way begins again, and ``restarted_at_resume`` says so."""
    started: list[str] = []
    under_way = anyio.Event()

    async def act(chat: Chat) -> int:
        started.append("first")
        number = len(started)
        await ask_once(chat)
        if number > 2:
            if len(started) == 4:
                under_way.set()
            await anyio.sleep_forever()
        return 0

    async def again(chat: Chat) -> int:
        started.append("again")
        return await ask_once(chat)

    config = config_of(by_index(0.0, 1.0), act, n_samples_per_prompt=4)
    description = {"recipe": "test", "config": config.describe()}
    data = DataBuffer(["task"], epochs=1)
    writer, journal = RunWriter(tmp_path / "a", description), begin(tmp_path / "a", description, data)
    with journal.journal:
        manager = AsyncRolloutManager(config, data, on_group=writer.on_group, rollout_log=journal)
        async with manager, anyio.create_task_group() as tasks:
            tasks.start_soon(manager.generate_batch)
            with anyio.fail_after(10):
                await under_way.wait()
                while len(manager.finished_rollouts(0)) < 2:
                    await anyio.lowlevel.checkpoint()
            await journal.journal.commit()
            shutil.copytree(tmp_path / "a", tmp_path / "killed")
            tasks.cancel_scope.cancel()
    config = config_of(by_index(0.0, 1.0), again, n_samples_per_prompt=4)
    data = DataBuffer(["task"], epochs=1)
    opened = reopen(tmp_path / "killed", description, data)
    with opened.run_journal.journal:
        manager = AsyncRolloutManager(config, data, on_group=opened.writer.on_group, rollout_log=opened.run_journal)
        manager.restore(opened.state)
        async with manager:
            samples = await manager.generate_batch()
            await opened.run_journal.journal.commit()
            opened.writer.write_batch(samples, manager.metrics, attrs.evolve(manager.accounting))
        opened.writer.finish("finished", manager.accounting)
    assert Counter(started) == {"first": 4, "again": 2}
    assert [sample.metrics.get("restarted_at_resume", 0) for sample in samples] == [0, 0, 1, 1]
    assert manager.metrics["resumed/restarted"] == 2
    report = verify_run(tmp_path / "killed")
    assert report.violations == []
    assert report.checked[3]["rollouts of programs"] == 4


# -- functions --------------------------------------------------------------------------------------------------------


async def chat_of(server: ModelServer, *questions: Any) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as http:
        chat = Chat({"URL": server.openai_url, "KEY": server.api_key}, http)
        for question in questions:
            await chat.ask(question)


async def by_function(function: Any, **options: Any) -> list[Sample]:
    given = {"prompt": PROMPT, "endpoint": ENDPOINT, "tokenizer": demo_renderer(), "policy": policy_of()}
    return await function_rollout_to_samples(function=function, **{**given, **options})


@pytest.mark.parametrize(
    ("returned", "reward", "added"),
    [
        (0.25, 0.25, {}),
        (None, None, {}),
        ({"reward": 1, "note": "n"}, 1.0, {"note": "n"}),
        ({"note": 2}, None, {"note": 2}),
    ],
)
async def test_a_function_returns_the_reward_or_metadata(returned: Any, reward: Any, added: Any) -> None:
    """A number, a dict with the reward, or nothing; no process is started."""

    async def agent(server: ModelServer, prompt: Prompt) -> Any:
        assert (prompt.label, prompt.turn_log, server.model) == ("8", None, str(DEMO_MODEL))
        await chat_of(server, "one", "two")
        return returned

    samples = await by_function(agent)
    assert [sample.reward for sample in samples] == [reward, reward]
    assert samples[-1].metadata == {"row": 1, **added}
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert [violation for sample in samples for violation in check_sample(sample)] == []


async def test_a_function_that_edits_the_label_in_place_changes_no_sample() -> None:
    """Its group keeps one label, as law 5 wants it; also where the function asks nothing."""
    prompt = attrs.evolve(PROMPT, label={"answer": 8, "tries": []})

    async def agent(server: ModelServer, prompt: Prompt) -> None:
        prompt.label["tries"].append(1)
        await chat_of(server, "one")

    async def idle(server: ModelServer, prompt: Prompt) -> None:
        prompt.label["tries"].append(1)

    for function in (agent, idle):
        (sample,) = await by_function(function, prompt=prompt)
        assert sample.label == {"answer": 8, "tries": []}


async def test_a_session_keeps_its_adapter(tmp_path: Path) -> None:
    """All conversations of a program have the LoRA adapter with which it began; the next program has the newest."""
    async with running_server(DEMO_MODEL) as url:
        endpoint = attrs.evolve(ENDPOINT, base_url=url, lora="math")

        async def load(number: int) -> None:
            folder = write_adapter(tmp_path / str(number), number)
            await update_weights(endpoint, lora=folder, name=f"math-v{number}")

        async def agent(server: ModelServer, prompt: Prompt) -> None:
            await chat_of(server, "one")
            await load(1)
            await chat_of(server, "two")

        async def short(server: ModelServer, prompt: Prompt) -> None:
            await chat_of(server, "one")

        await load(0)
        first = await by_function(agent, endpoint=endpoint, policy=None)
        second = await by_function(short, endpoint=endpoint, policy=None)
    versions = [{span.version for sample in samples for span in sample.versions} for samples in (first, second)]
    assert versions == [{"math-v0"}, {"math-v1"}]


@pytest.mark.parametrize(
    ("returned", "words"), [("good", "got 'good'; expected a number"), (float("nan"), "expected a number")]
)
async def test_a_function_that_returns_something_else_costs_the_rollout(returned: Any, words: str) -> None:
    """Its message names what came back."""

    async def agent(server: ModelServer, prompt: Prompt) -> Any:
        await chat_of(server, "one")
        return returned

    (sample,) = await by_function(agent)
    assert sample.failure is not None
    assert (sample.status, words in sample.failure.message) == (Status.FAILED, True)


async def test_an_exception_of_a_function_costs_the_rollout() -> None:
    """With its line; the tokens that it had are kept with the failure."""

    async def agent(server: ModelServer, prompt: Prompt) -> None:
        await chat_of(server, "one")
        raise KeyError("planted")

    (sample,) = await by_function(agent)
    assert sample.failure is not None
    assert (sample.status, sample.turns, sample.failure.kind) == (Status.FAILED, 1, "GenerateFailure")
    assert "agent agent raised KeyError: 'planted'" in sample.failure.message
    assert "test_generate.py" in sample.failure.message


async def test_a_function_is_cancelled_at_a_limit() -> None:
    """Its calls are kept, with the limit as the stop reason."""

    async def agent(server: ModelServer, prompt: Prompt) -> float:
        await chat_of(server, "one", "two", "three")
        return 1.0

    samples = await by_function(agent, limits=SessionLimits(max_calls=2))
    assert (samples[-1].stop_reason, samples[-1].status) == (StopReason.MAX_TURNS, Status.TRUNCATED)
    assert sum(sample.turns for sample in samples) == 2


async def test_a_function_that_knows_the_end_of_its_session_is_not_cancelled() -> None:
    """With a third parameter ``over`` it ends by itself at a limit, and its reward counts."""

    async def agent(server: ModelServer, prompt: Prompt, over: anyio.Event) -> float:
        await chat_of(server, "one", "two", "three")
        await over.wait()
        await anyio.lowlevel.checkpoint()
        return 0.5

    samples = await by_function(agent, limits=SessionLimits(max_calls=2))
    assert (samples[-1].stop_reason, samples[-1].status) == (StopReason.MAX_TURNS, Status.TRUNCATED)
    assert samples[-1].reward == 0.5
    assert sum(sample.turns for sample in samples) == 2


async def test_a_function_may_end_its_session_before_it_returns() -> None:
    """After ``done`` no call of its agent is answered, and no limit applies: it grades the work then."""

    async def agent(server: ModelServer, prompt: Prompt, over: anyio.Event, done: Callable[[], None]) -> float:
        await chat_of(server, "one")
        assert not over.is_set()
        done()
        assert over.is_set()
        await chat_of(server, "two", "three")
        return 0.5

    [sample] = await by_function(agent, limits=SessionLimits(max_calls=1))
    assert (sample.stop_reason, sample.status) == (StopReason.TASK_COMPLETED, Status.COMPLETED)
    assert (sample.reward, sample.turns) == (0.5, 1)


async def test_a_function_that_fails_behind_the_end_of_its_session_costs_the_rollout() -> None:
    """Without its reward the rollout is not complete, although its agent ended."""

    async def agent(server: ModelServer, prompt: Prompt, over: anyio.Event, done: Callable[[], None]) -> float:
        await chat_of(server, "one")
        done()
        raise KeyError("planted")

    [sample] = await by_function(agent)
    assert sample.failure is not None
    assert (sample.status, sample.turns, "KeyError" in sample.failure.message) == (Status.FAILED, 1, True)


async def test_a_function_that_asks_nothing_is_a_failure_by_name() -> None:
    """As a program without a call."""

    async def agent(server: ModelServer, prompt: Prompt) -> float:
        return 1.0

    (sample,) = await by_function(agent)
    assert sample.failure is not None
    assert sample.failure.kind == "NoReply"


async def test_calls_with_another_key_are_named_in_the_failure() -> None:
    """They are refused, and the session that their path names counts them: a program with a wrong key is found."""

    async def agent(server: ModelServer, prompt: Prompt) -> float:
        await chat_of(attrs.evolve(server, api_key="$OPENAI_API_KEY"), "one")
        return 1.0

    (sample,) = await by_function(agent)
    assert sample.failure is not None
    assert "no call of the model was answered, refused/authentication 1;" in sample.failure.message
    assert sample.metrics["refused/authentication"] == 1


@pytest.mark.extra
async def test_a_function_may_ask_for_a_client() -> None:
    """A first parameter ``client`` is the SDK's; the function needs no address and no key."""
    pytest.importorskip("openai")

    async def agent(client: Any, prompt: Prompt) -> float:
        messages = [{"role": "user", "content": prompt.messages[0].content}]
        answer = await client.chat.completions.create(model="any", messages=messages)
        return float(answer.choices[0].message.content == "reply number 1")

    (sample,) = await by_function(agent)
    assert (sample.reward, sample.turns) == (1.0, 1)


@pytest.mark.extra
async def test_the_client_of_a_function_has_no_deadline_of_its_own() -> None:
    """A reply may wait for as long as an outage lasts, in which the deadline of the session does not run."""
    pytest.importorskip("openai")

    async def agent(client: Any, prompt: Prompt) -> float:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "one"}])
        return float(client.timeout is None)

    (sample,) = await by_function(agent)
    assert sample.reward == 1.0


def not_async(server: Any, prompt: Prompt) -> float:
    return 1.0


async def without_prompt(server: Any) -> float:
    return 1.0


@pytest.mark.parametrize("function", [not_async, without_prompt, 5])
async def test_what_is_no_agent_function_is_refused(function: Any) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=r"^function: got .*; expected async def agent\(client, prompt\)"):
        await by_function(function)


# -- arguments --------------------------------------------------------------------------------------------------------


async def test_a_conversation_is_no_task() -> None:
    """A program gets one string: a reply in it would be read as the user's."""
    prompt = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    with pytest.raises(ConfigError, match=r"prompt\[1\].role: got 'assistant'; expected system or user"):
        await rollout(ask_once, prompt=prompt)


async def test_a_server_without_a_context_needs_a_window() -> None:
    """The program has to know when to compact its history."""
    with pytest.raises(ConfigError, match="context_window: got None; expected a number of tokens"):
        await rollout(ask_once, policy=ScriptedPolicy(replies()))


async def test_a_run_is_refused_before_its_first_prompt(tmp_path: Path) -> None:
    """A script that is missing, a prompt that is not an argument: every value that a launch refuses."""
    bound = {"program": functools.partial(script, path=tmp_path / "none.py"), "sandbox": FakeSandbox(ask_once)}
    with pytest.raises(ConfigError, match=r"^path: got .*none.py.*; expected a file that exists"):
        await check_program(bound, [Prompt("a")])
    bound["program"] = functools.partial(script, path=__file__)
    with pytest.raises(ConfigError, match=r"^task: got '--help'"):
        await check_program(bound, [Prompt("a"), Prompt("--help")])
    await check_program(bound, [Prompt("a")])


# -- a sandbox for each prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_chooses_the_kind_of_a_prompt(is_async: bool) -> None:
    """It gets the prompt; the rollout opens and closes the kind that it returns."""
    kinds = {"a": FakeSandbox(ask_once), "b": FakeSandbox(ask_once)}

    def choose(prompt: Prompt) -> Sandbox:
        return kinds[prompt.metadata["image"]]

    async def choose_later(prompt: Prompt) -> Sandbox:
        await anyio.lowlevel.checkpoint()
        return choose(prompt)

    chosen = choose_later if is_async else choose
    (sample,) = await rollout(ask_once, prompt=Prompt("q", metadata={"image": "b"}), sandbox=chosen)
    assert (sample.status, kinds["a"].counts["opened"]) == (Status.COMPLETED, 0)
    assert (kinds["b"].counts["opened"], kinds["b"].counts["closed"]) == (1, 1)


@pytest.mark.parametrize("returned", [None, "ubuntu", ProcessSandbox])
async def test_a_function_that_returns_no_kind_costs_its_rollout(returned: Any) -> None:
    """With its name and the value, or its exception."""
    (sample,) = await rollout(ask_once, sandbox=lambda prompt: returned)
    assert sample.failure is not None
    assert "expected a kind of sandbox" in sample.failure.message
    (sample,) = await rollout(ask_once, sandbox=lambda prompt: 1 / 0)
    assert sample.failure is not None
    assert "ZeroDivisionError" in sample.failure.message


async def test_before_a_run_the_different_kinds_of_the_first_prompts_are_opened() -> None:
    """Each once; a kind that this machine cannot open is refused before a prompt is taken."""
    kinds = [FakeSandbox(ask_once), FakeSandbox(ask_once), FakeSandbox(ask_once, fails_at="open")]
    bound: dict[str, Any] = {"program": program, "sandbox": lambda prompt: kinds[prompt.metadata["kind"]]}
    await check_program(bound, [Prompt("a", metadata={"kind": number % 2}) for number in range(10)])
    assert [kind.counts["opened"] for kind in kinds] == [1, 1, 0]
    with pytest.raises(EnvironmentFailure, match="planted at open"):
        await check_program(bound, [Prompt("a", metadata={"kind": number}) for number in range(3)])
    with pytest.raises(ConfigError, match="sandbox: got 'docker'; expected a kind of sandbox, or a function"):
        await check_program({"program": program, "sandbox": "docker"}, [Prompt("a")])


# -- the address of the gateway ---------------------------------------------------------------------------------------


async def test_a_program_reaches_the_gateway_at_its_public_address() -> None:
    """Two rollouts at once, through one listener; its port is free afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = PublicAddress(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")
    said = ['\n<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>', "The answer is 8."]
    run = functools.partial(
        program_rollout_to_samples,
        program=functools.partial(script, path=SCRIPTS / "agent.py", command=(sys.executable, "-S")),
        sandbox=ProcessSandbox(),
        gateway=address,
        workspace=FilesWorkspace(["answer.txt"]),
        endpoint=ENDPOINT,
        tokenizer=demo_renderer(),
    )
    found: list[Sample] = []

    async def one() -> None:
        found.extend(await run(PROMPT, policy=policy_of(*said)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    assert [sample.metadata["files"] for sample in found] == [{"answer.txt": "The answer is 8."}] * 2
    assert [violation for sample in found for violation in check_sample(sample)] == []
    socket.create_server(("127.0.0.1", port)).close()


async def test_an_address_of_another_type_is_refused() -> None:
    """Before a run, by name."""
    with pytest.raises(ConfigError, match="gateway: got 'https://a'; expected a PublicAddress"):
        await check_program({"program": program, "sandbox": ProcessSandbox(), "gateway": "https://a"}, [Prompt("a")])


async def test_a_public_address_that_leads_nowhere_is_refused() -> None:
    """A port that is in use, and a sandbox that reaches only its own listener."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = PublicAddress("https://a.example", f"127.0.0.1:{used.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"host:port: got '127.0.0.1:.*'; expected an address to listen on"):
            await check_program({"sandbox": FakeSandbox(ask_once), "gateway": address}, [])
    await opens_namespaces()
    with pytest.raises(ConfigError, match=r"gateway: got PublicAddress.*; expected None: this sandbox reaches only"):
        await check_program({"sandbox": NamespaceSandbox(), "gateway": address}, [])
