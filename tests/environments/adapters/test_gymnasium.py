"""Text environments with the interface of Gymnasium: a class of the test, and one of Gymnasium itself."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import PIL.Image
import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Image, Limits, Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments.adapters.gymnasium import GymnasiumEnvironment
from rollouts.errors import ConfigError
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.testing.playing import play
from rollouts.testing.policy import ScriptedPolicy


class Guess:
    """A number from the seed; GEM's environments look like this, without ``close``."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.number = (seed or 0) % (options or {}).get("most", 10)
        return "Guess a number.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == self.number:
            return "Right.", 1.0, True, False, {}
        return "Higher." if action < self.number else "Lower.", -0.1, False, action > 99, {}


def guess() -> GymnasiumEnvironment:
    return GymnasiumEnvironment(Guess, action=int)


async def test_an_episode_is_played_from_the_seed_of_its_prompt() -> None:
    """The observation joins the prompt, each reply is a step, each step has its reward."""
    played = await play(guess(), Prompt("Play!", metadata={"seed": 17}), ["3", "9", "7"])
    texts = [message.content for message in played.messages]
    assert texts == ["Play!\n\nGuess a number.", "3", "Higher.", "9", "Lower.", "7"]
    assert (played.rewards, played.done) == ([-0.1, -0.1, 1.0], True)


async def test_options_reach_reset_and_a_truncated_episode_ends() -> None:
    """Both ways of ending an episode are its end."""
    prompt = Prompt("Play!", metadata={"seed": 17, "options": {"most": 5}})
    assert (await play(guess(), prompt, ["2"])).done
    assert (await play(guess(), prompt, ["100", "2"])).rewards == [-0.1]


async def test_a_prompt_without_a_seed_is_refused() -> None:
    """Rollouts of one group would start from different states."""
    with pytest.raises(ConfigError, match=r"metadata\['seed'\]: got None; expected an integer"):
        await play(guess(), Prompt("Play!"), ["1"])


async def test_a_reply_that_is_no_action_is_a_message_to_the_model() -> None:
    """It costs a turn, is counted, and the environment does not see it."""
    played = await play(guess(), Prompt("Play!", metadata={"seed": 1}), ["one", "1"])
    assert "invalid literal" in played.messages[2].content
    assert [step.metrics["invalid_actions"] for step in played.steps] == [1, 0]
    assert played.rewards == [1.0]


async def test_an_observation_may_be_an_image() -> None:
    """A picture of the state, alone or with text; ``observe`` makes one of an array."""

    class Screen(Guess):
        def reset(self, **options: Any) -> Any:
            return np.full((3, 5, 3), 7, np.uint8), {}

        def step(self, action: int) -> Any:
            return np.full((3, 5, 3), action, np.uint8), 0.0, False, False, {}

    environment = GymnasiumEnvironment(Screen, action=int, observe=lambda array: ["Now:", PIL.Image.fromarray(array)])
    played = await play(environment, Prompt("Play!", metadata={"seed": 1}), ["4"])
    first, second = (Image.of(PIL.Image.new("RGB", (5, 3), (grey,) * 3)) for grey in (7, 4))
    assert played.messages[0].content == ("Play!", "\n\nNow:", first)
    assert played.messages[2].content == ("Now:", second)


async def test_an_observation_that_is_no_text_is_refused_without_observe() -> None:
    """``str`` of an array would be a silent choice."""

    class Numbers(Guess):
        def reset(self, **options: Any) -> Any:
            return (1, 2), {}

    with pytest.raises(ConfigError, match=r"observation: got \(1, 2\); expected a string"):
        await play(GymnasiumEnvironment(Numbers), Prompt("", metadata={"seed": 1}), [])
    with pytest.raises(ConfigError, match=r"observation: got \[\]; expected a string, an image, or a list"):
        await play(GymnasiumEnvironment(Numbers, observe=lambda _: []), Prompt("", metadata={"seed": 1}), [])
    shown = GymnasiumEnvironment(Numbers, observe=str)
    assert (await play(shown, Prompt("", metadata={"seed": 1}), [])).messages[0].content == "(1, 2)"


async def test_a_step_that_hangs_ends_at_the_deadline_of_the_episode() -> None:
    """The call in the thread is abandoned, and the rollout ends."""
    stuck, release = anyio.Event(), threading.Event()

    class Stuck(Guess):
        def step(self, action: Any) -> Any:
            anyio.from_thread.run_sync(stuck.set)
            release.wait(20)
            return "", 0.0, True, False, {}

    environment = GymnasiumEnvironment(Stuck)
    await environment.start(Prompt("", metadata={"seed": 1}))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(environment.step, Message("assistant", "1"))
        await stuck.wait()
        tasks.cancel_scope.cancel()
    assert not release.is_set()
    release.set()


async def test_the_agent_plays_it() -> None:
    """Tokens, rewards and the end come from our agent loop."""
    renderer = renderer_for(load_tokenizer(DEMO_MODEL), dialect="plain")
    policy = ScriptedPolicy([renderer.encode(text).tolist() for text in ("3", "7")])
    prompt = Prompt("Play!", metadata={"seed": 17})
    trajectory = await run_agent(prompt, guess, policy, renderer, sampling=SamplingParams(), limits=Limits())
    assert trajectory.step_rewards == [-0.1, 1.0]


@pytest.mark.extra
async def test_an_environment_of_gymnasium_is_played() -> None:
    """Blackjack of Gymnasium 1.4, whose observations are numbers."""
    gymnasium = pytest.importorskip("gymnasium")
    make = partial(gymnasium.make, "Blackjack-v1")
    environment = partial(GymnasiumEnvironment, make, action=int, observe=str)
    prompt = Prompt("1 to hit, 0 to stick.", metadata={"seed": 3})
    first = await play(environment(), prompt, ["0"])
    assert first.messages[0].content.startswith("1 to hit, 0 to stick.\n\n(")
    assert first.done
    assert first.messages == (await play(environment(), prompt, ["0"])).messages
