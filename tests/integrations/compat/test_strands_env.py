"""strands-env's API: the code of its guide runs with other import lines, in each version of its names."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime.records import records
from rollouts.testing.server import StubServer

strands = pytest.importorskip("strands")

from rollouts.integrations.compat.strands_env import (  # noqa: E402 - after the check that it can be imported
    Action,
    Environment,
    RewardFunction,
    RewardResult,
    Task,
    TaskContext,
    TerminationReason,
    sglang_model_factory,
)
from rollouts.integrations.compat.strands_sglang import SGLangClient  # noqa: E402

pytestmark = pytest.mark.extra

IMPORTS = "from rollouts.integrations.compat.strands_env import "


@strands.tool
def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Adding(Environment):
    def get_tools(self) -> list[Any]:
        return [add]


class Answered(RewardFunction):
    """With the argument names of the guide."""

    async def compute(self, action: Any, step_result: Any) -> RewardResult:
        said = step_result.observation.final_response
        return RewardResult(reward=float(action.task_context.ground_truth in said), info={"said": said})


def guide(asset: Callable[[str], Path]) -> str:
    """The code of the guide, with the package's name in its import lines replaced."""
    text = asset("../source-documents/000_ae10e6da68e02f84.txt").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return re.sub(r"^from strands_env\S* import ", IMPORTS, code, flags=re.MULTILINE)


async def run_guide(asset: Any, url: str, tokenizer: Any, **sampling: Any) -> tuple[Any, float]:
    """``generate`` and ``reward_func`` of the guide on a sample of slime's."""
    names: dict[str, Any] = {"tokenizer": tokenizer, "YourEnv": Adding, "YourRewardFunction": Answered}
    exec(compile(guide(asset), "the guide", "exec"), names)
    host, _, port = url.removeprefix("http://").partition(":")
    args = Namespace(hf_checkpoint="demo", sglang_router_ip=host, sglang_router_port=int(port))
    sample = records().sample(prompt="What is 5 + 3?", label="8")
    sample = await names["generate"](args, sample, {"temperature": 1.0, "max_new_tokens": 256, **sampling})
    return sample, await names["reward_func"](args, sample)


async def test_the_code_of_the_guide_runs_and_is_exact(asset: Any, server: StubServer, demo_tokenizer: Any) -> None:
    """With a server whose token ids no tokenizer would choose: every request is a prefix of the tokens."""
    sample, reward = await run_guide(asset, server.url, demo_tokenizer)
    assert reward == 1.0
    assert len(server.requests) == 3
    for request in server.requests:
        assert sample.tokens[: len(request.input_ids)] == request.input_ids
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert len(sample.tokens) - sample.response_length == len(server.requests[0].input_ids)
    assert sample.loss_mask[0] == 1
    assert sample.tokens != demo_tokenizer.encode(demo_tokenizer.decode(sample.tokens), add_special_tokens=False)


async def test_the_code_of_the_guide_runs_on_the_embedded_engine(
    asset: Any, engine_url: str, demo_tokenizer: Any
) -> None:
    """With a real model, whose replies are arbitrary."""
    sample, _ = await run_guide(asset, engine_url, demo_tokenizer, max_new_tokens=300)
    assert sum(sample.loss_mask) > 0
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length


def factory(server: StubServer, tokenizer: Any, **options: Any) -> Any:
    return sglang_model_factory(client=SGLangClient(server.url, max_retries=0), tokenizer=tokenizer, **options)


async def test_the_newer_names_mean_the_same(server: StubServer, demo_tokenizer: Any) -> None:
    """``Task`` and ``rollout``, with a reward of the environment's and metrics of the tools."""

    class New(RewardFunction):
        async def compute(self, task: Any, result: Any) -> RewardResult:
            return RewardResult(reward=float(task.context.ground_truth in result.final_response))

    environment = Adding(model_factory=factory(server, demo_tokenizer), reward_fn=New(), system_prompt="Be brief.")
    result = await environment.rollout(Task(message="5 + 3?", context=TaskContext(ground_truth="8", difficulty=3)))
    assert result.termination_reason == "task_complete"
    assert result.reward_result.reward == 1.0
    assert result.rollout.token_ids == result.observation.tokens.token_ids
    assert (result.metrics["tool_iters"], result.metrics["per_tool_metrics"]["add"]["successes"]) == (2, 2)
    assert "Be brief." in demo_tokenizer.decode(result.observation.tokens.initial_prompt_token_ids)


@pytest.mark.parametrize("limit", [{"max_tool_iters": 1}, {"max_tool_iterations": 1}], ids=["new", "old"])
async def test_an_error_that_ends_an_episode_becomes_its_reason(
    server: StubServer, demo_tokenizer: Any, limit: dict[str, int]
) -> None:
    """A limit keeps the tokens; an unreachable server is a connection error."""
    environment = Adding(model_factory=factory(server, demo_tokenizer), **limit)
    result = await environment.step(Action(message="5 + 3?", task_context=TaskContext()))
    assert result.termination_reason is TerminationReason.MAX_TOOL_ITERATIONS_REACHED
    assert result.observation.tokens.rollout_loss_mask[-1] == 1
    async with StubServer() as gone:
        pass
    lost = await Adding(model_factory=factory(gone, demo_tokenizer)).step(Action(message="5 + 3?"))
    assert (lost.termination_reason, lost.error is None) == (TerminationReason.CONNECTION_ERROR, False)


async def test_a_conversation_history_is_continued(server: StubServer, demo_tokenizer: Any) -> None:
    """The model sees the history of a task; the result contains only new messages."""
    history = [{"role": "user", "content": [{"text": "Hello."}]}, {"role": "assistant", "content": [{"text": "Hi."}]}]
    environment = Adding(model_factory=factory(server, demo_tokenizer))
    result = await environment.step(Action(message="5 + 3?", task_context=TaskContext(conversation_history=history)))
    assert result.messages[0]["content"] == [{"text": "5 + 3?"}]
    assert "Hi." in demo_tokenizer.decode(result.rollout.token_ids)


def test_unknown_options_are_refused() -> None:
    """The error names them."""
    with pytest.raises(ConfigError, match="max_turns"):
        Environment(model_factory=lambda: None, max_turns=3)
