"""Environments of skyrl-gym 0.4, from its own registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollouts.dtypes import Message, Prompt
from rollouts.environments.adapters.skyrl_gym import SkyRLGymEnvironment
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.testing.playing import play

skyrl_gym: Any = pytest.importorskip("skyrl_gym")
TextEnv: Any = pytest.importorskip("skyrl_gym.envs.base_text_env").BaseTextEnv
pytestmark = pytest.mark.extra


class Echo(TextEnv):  # type: ignore[misc]
    """Two turns; it rewrites a reply that asks for it."""

    def __init__(self, extras: dict[str, Any], env_config: Any = None) -> None:
        super().__init__()
        self.extras, self.config, self.closed = extras, env_config, False

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": f"{self.extras['topic']}"}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        said = [{"role": "user", "content": f"<got>{action}</got>"}]
        step = {"observations": said, "reward": 0.5, "done": self.turns == 2, "metadata": {}}
        return {**step, "postprocessed_action": "short"} if "rewrite" in action else step

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, "name": "echo"}


@pytest.fixture(autouse=True, scope="module")
def echo() -> None:
    """Registers :class:`Echo`."""
    skyrl_gym.register(id="echo", entry_point=Echo)


async def test_gsm8k_scores_the_last_reply(compared: Callable[..., None]) -> None:
    """Their reward function on our text; the label is the ground truth where the row has no reward_spec."""
    environment = partial(SkyRLGymEnvironment, "gsm8k")
    row = Prompt("6 * 7?", metadata={"reward_spec": {"ground_truth": "42", "method": "rule"}})
    assert (await play(environment(), row, ["It is #### 42"])).rewards == [1.0]
    assert (await play(environment(), Prompt("6 * 7?", label="42"), ["It is #### 41"])).rewards == [0.0]
    compared("SkyRL, skyrl-gym 0.4.0", "c", "gsm8k as our environment: its rewards", 0.0)


async def test_a_prompt_without_ground_truth_is_refused() -> None:
    """Their environment would fail with an assertion."""
    with pytest.raises(ConfigError, match=r"metadata\['reward_spec'\]: got None"):
        await play(SkyRLGymEnvironment("gsm8k"), "6 * 7?", [])


async def test_an_episode_of_several_turns_is_theirs(compared: Callable[..., None]) -> None:
    """The opening of ``init``, observations as messages, a reward for each step, metrics at the end."""
    prompt = Prompt("Hi", label="x", metadata={"topic": "Echo."})
    played = await play(SkyRLGymEnvironment("echo"), prompt, ["a", "b"])
    assert [message.content for message in played.messages] == ["Echo.", "Hi", "a", "<got>a</got>", "b"]
    assert (played.rewards, played.steps[-1].metrics) == ([0.5, 0.5], {"turns": 2.0})
    compared("SkyRL, skyrl-gym 0.4.0", "c", "several turns: messages, rewards, metrics", 0.0)


async def test_observations_can_go_on_in_the_turn_of_the_reply() -> None:
    """SkyRL's ``use_conversation_multi_turn=false``: no chat markup between reply and observation."""
    prompt = Prompt("Hi", label="x", metadata={"topic": "Echo."})
    played = await play(SkyRLGymEnvironment("echo", same_turn=True), prompt, ["a", "b"])
    assert played.messages[-1] == Message("assistant", "a<got>a</got>b")


async def test_a_rewritten_reply_fails_the_rollout() -> None:
    """The trained tokens would not be the tokens that the environment rewarded."""
    prompt = Prompt("Hi", label="x", metadata={"topic": "Echo."})
    with pytest.raises(EnvironmentFailure, match=r"Echo.step: postprocessed_action: got 'short'; expected none"):
        await play(SkyRLGymEnvironment("echo"), prompt, ["rewrite it"])
