"""The laws of rollouts on a chat API, against a stub with every fault.

1. Scores: a fault of the API is a failure or is repaired by a retry; it never changes a reward.
2. Budget: what is spent is over the budget at most by what was in flight when it was reached.
3. Resume: a rollout that is stored is not played again, whatever ended the process.
4. Parity: the same greedy model gives the same rewards through the chat API of our gateway and by token ids.

``--long`` plays 2,000 rollouts for the first law instead of 200.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from rollouts.agent import run_agent
from rollouts.chat_api import Account, BudgetSpent, ChatEndpoint, Prices, chat_rollout_to_samples
from rollouts.commands import main
from rollouts.curation.encoding import Student
from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.inference.shared import shared_policy
from rollouts.programs.gateway.server import Gateway
from rollouts.programs.gateway.session import ProgramSession
from rollouts.recipes.configs.calculator import exact_answer_reward
from rollouts.renderer import renderer_for
from rollouts.testing.chat_server import FAULTS, ChatServer, Fault
from rollouts.training import Sample, trajectory_to_samples
from rollouts.training.evaluation import run_evaluation, task_key, task_scores
from rollouts.training.rows import trimmed
from tests.chat_api.sums import FILE, KEY, chat_sums, false_scores, solve, tasks
from tests.programs.gateway.programs import SAMPLING, demo_tokenizer

ROOT = Path(__file__).parents[2]
BUDGET = 0.04
"""Dollars: about twenty requests of some 800 tokens at 2 dollars a million."""


@pytest.fixture
def rollouts(request: pytest.FixtureRequest) -> int:
    return 2_000 if request.config.getoption("--long") else 200


def faulty(share: float) -> Any:
    """Each fault alike often; the chance is that of the number of the request."""

    def fault(number: int) -> Fault | None:
        rng = random.Random(number)
        return rng.choice(FAULTS) if rng.random() < share else None

    return fault


@pytest.mark.timeout(1400)  # --long takes 200 s of a quiet machine
async def test_a_fault_of_the_api_is_never_a_score(rollouts: int) -> None:
    """A fifth of the responses is faulty, of twelve kinds. No reward is false, and each failure has its type."""
    async with ChatServer(solve, fault=faulty(0.2), retry_after=0.05) as server:
        recipe = chat_sums(server.url, tasks(rollouts), endpoint_max_retries=8, patience=10_000)
        samples = await run_evaluation(recipe.config, recipe.data_buffer.prompts, 1)
    assert len(samples) == rollouts
    cut = [sample for sample in samples if sample.stop_reason == "context_overflow"]  # shorter than was asked for
    refused = [sample for sample in samples if sample.metrics.get("refusals")]
    others = [sample for sample in samples if sample not in cut and sample not in refused]
    assert false_scores(others) == []
    assert {sample.reward for sample in refused} == {0.0}, "a refusal is a reply, and no right answer"
    faults = server.faults
    assert set(faults) == set(FAULTS)
    assert [sample.failure for sample in samples if sample.failure is not None] == []
    assert len(refused) == faults["refusal"] + faults["content_filter"]
    assert len(cut) == faults["length"]
    assert {one.status for one in server.asked} == {200, 429, 500, 503}, "the API refused no request of ours"
    repeated = sum(faults[name] for name in FAULTS if name not in ("refusal", "content_filter", "length"))
    ended = faults["refusal"] + faults["content_filter"] + faults["length"]
    whole = rollouts - ended
    assert 2 * whole + ended <= len(server.asked) - repeated <= 2 * rollouts


class Watched(Account):
    """Records what was spent and in flight when each request began."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begun: list[tuple[float, int]] = []

    def request(self) -> contextlib.AbstractContextManager[None]:
        self.begun.append((self.spent, self.in_flight + 1))
        return super().request()


@pytest.mark.parametrize("at_once", [1, 16])
async def test_the_budget_is_exceeded_by_what_was_in_flight_at_most(at_once: int) -> None:
    """The requests that were in flight are answered, and rollouts that they complete are kept."""
    account = Watched(Prices(2.0, 8.0), BUDGET, settle_seconds=0.3)
    kept: list[Sample] = []
    async with ChatServer(solve, before=lambda: anyio.sleep(0.01)) as server:
        recipe = chat_sums(server.url, tasks(60), account, endpoint_concurrency=at_once)
        with pytest.raises(BudgetSpent, match=r"--budget: \$0.04 is spent"):
            await run_evaluation(
                recipe.config, recipe.data_buffer.prompts, 1, on_group=lambda group: kept.extend(group.samples)
            )
    prices = Prices(2.0, 8.0)
    costs = [prices.dollars(one.prompt_tokens, one.completion_tokens) for one in server.asked]
    assert sum(costs) == pytest.approx(account.spent)
    assert account.spent >= BUDGET
    assert all(spent < BUDGET for spent, _ in account.begun), "no request began after the budget was spent"
    in_flight = max(count for _, count in account.begun)
    assert in_flight <= at_once
    assert account.spent - BUDGET <= in_flight * max(costs)
    assert false_scores(kept) == []
    final = [one for one in server.asked if one.body["messages"][-1]["role"] == "tool"]
    assert len(kept) == len(final), "each rollout that got its last reply is stored"


async def test_a_second_part_with_a_budget_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rollouts eval --resume`` plays what is missing; each task is finished once over all parts."""
    monkeypatch.setenv("STUB_KEY", KEY)
    out = tmp_path / "exam"
    async with ChatServer(solve) as server:
        command = ["eval", FILE, "--set", "tasks=30", *provider(server), "--at-once", "4"]
        command += ["--price-in", "2", "--price-out", "8"]
        first = await anyio.to_thread.run_sync(main, [*command, "--budget", str(BUDGET), "--out", str(out)])
        before = finished(server)
        stored = [*(out / "rollouts.jsonl").read_bytes().splitlines()]
        second = await anyio.to_thread.run_sync(main, [*command, "--resume", str(out)])
    assert (first, second) == (2, 0)
    assert 0 < len(stored) == sum(before.values()) < 30
    assert set(finished(server).values()) == {1}
    assert len(finished(server)) == 30


def provider(server: ChatServer) -> list[str]:
    return ["--provider", "openai", "--base-url", server.url, "--model", "stub", "--api-key-env", "STUB_KEY"]


def finished(server: ChatServer) -> Counter[str]:
    """The number of last replies by the question."""
    bodies = [one.body for one in server.asked if one.status == 200]
    return Counter(body["messages"][1]["content"] for body in bodies if body["messages"][-1]["role"] == "tool")


async def test_a_killed_evaluation_repeats_no_stored_rollout(tmp_path: Path) -> None:
    """The stub counts: no request after the kill is of a task whose rollout was on disk."""
    out = tmp_path / "exam"
    async with ChatServer(solve, before=lambda: anyio.sleep(0.02)) as server:
        command = [sys.executable, "-m", "rollouts", "eval", FILE, "--set", "tasks=60", *provider(server)]
        environment = {"STUB_KEY": KEY, "PATH": "", "PYTHONPATH": str(ROOT)}
        first = [*command, "--at-once", "4", "--out", str(out)]
        file = out / "rollouts.jsonl"
        async with await anyio.open_process(first, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            with anyio.fail_after(60):
                while not file.exists() or file.read_bytes().count(b"\n") < 10:  # noqa: ASYNC110 - of another process
                    await anyio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        lines = file.read_bytes()
        stored = [msgspec.json.decode(line)["prompt"] for line in lines[: lines.rfind(b"\n") + 1].splitlines()]
        asked = len(server.asked)
        done = await anyio.run_process([*command, "--resume", str(out)], env=environment, cwd=ROOT)
    assert done.returncode == 0
    assert b"pass@1  0.667" in done.stdout
    again = {one.body["messages"][1]["content"] for one in server.asked[asked:]}
    assert len(stored) >= 10
    assert again.isdisjoint(stored)
    assert len(again) == 60 - len(set(stored))


async def test_the_gateway_as_provider_gives_the_rewards_of_token_ids(engine_url: str) -> None:
    """Greedy: the demo model by ids, and by the chat API of our gateway, has equal rewards and equal conversations."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=128)
    prompts = [prompt for prompt, _ in zip(calculator_prompts(5), range(8), strict=False)]
    policy, renderer = shared_policy(Endpoint(base_url=engine_url)), renderer_for(demo_tokenizer())
    session = ProgramSession(policy, renderer, SamplingParams(temperature=0.0, max_new_tokens=SAMPLING.max_new_tokens))
    pairs: list[tuple[Sample, Sample]] = []
    limits = Limits(max_turns=2)  # too few for some
    async with session, Gateway("127.0.0.1", 0, model="demo") as gateway:
        url = f"{gateway.open(session)}/v1"
        endpoint = ChatEndpoint(model="demo", base_url=url, api_key=session.key, sampling=sampling)
        for prompt in prompts:
            trajectory = await run_agent(
                prompt, CalculatorEnvironment, policy, renderer, sampling=sampling, limits=limits
            )
            (direct,) = trajectory_to_samples([trajectory], prompt, renderer.decode)
            (chat,) = await chat_rollout_to_samples(
                prompt, environment_cls=CalculatorEnvironment, endpoint=endpoint, limits=limits
            )
            pairs.append((direct, chat))
    rewards = [(exact_answer_reward(direct), exact_answer_reward(chat)) for direct, chat in pairs]
    assert [direct for direct, _ in rewards] == [chat for _, chat in rewards]
    assert {direct for direct, _ in rewards} == {0.0, 1.0}, "it solves some of them"
    for direct, chat in pairs:
        assert chat.stop_reason == direct.stop_reason
        assert [said(message) for message in chat.messages] == [said(message) for message in direct.messages]
        encoded = Student(renderer).encode(chat.messages, chat.tools or "")
        assert not isinstance(encoded, str)
        whole = trimmed(direct)
        assert encoded[0].tolist() == list(whole.tokens), "text that is encoded for the student is what it sampled"
        assert encoded[1].tolist() == list(whole.loss_mask)


def said(message: Any) -> tuple[Any, ...]:
    """A message without the ids of its calls."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"].strip(), calls


async def test_a_failed_rollout_passes_nowhere() -> None:
    """In the scores of an evaluation, it is counted as failed, and not as a wrong reply."""
    async with ChatServer(solve, fault=lambda number: "server_error" if number % 4 == 0 else None) as server:
        of_endpoint: dict[str, Any] = {"endpoint_concurrency": 1, "endpoint_max_retries": 0}
        recipe = chat_sums(server.url, tasks(8, 4), patience=1000, **of_endpoint)
        samples = await run_evaluation(recipe.config, recipe.data_buffer.prompts, 1)
    scores = {score.key: score for score in task_scores(samples)}
    for sample in samples:
        score = scores[task_key(sample.prompt, sample.label)]
        assert (score.failed, score.passed) == (int(sample.failure is not None), int((sample.reward or 0) >= 1))
    assert sum(score.failed for score in scores.values()) == server.faults["server_error"] > 0
