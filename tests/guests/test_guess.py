"""Guess: the rewards of recorded games, snapshots of the state, and invalid prompts."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Message, Prompt
from rollouts.errors import ConfigError
from rollouts.recipes.environments.guess import GuessEnvironment, guess_prompts, guess_reward
from rollouts.testing.playing import play
from rollouts.training import Sample


def game(secret: int = 6, high: int = 8, guesses: int = 4) -> Prompt:
    return Prompt("Guess.", label=secret, metadata={"low": 1, "high": high, "guesses": guesses})


async def test_a_recorded_game() -> None:
    """Of 8 numbers, guess 4 leaves 4 and guess 7 leaves 2: 1 of 3 bits each; the number earns the last bit and 0.5."""
    played = await play(GuessEnvironment(), game(), ["I say 4", "7", "6!"])
    assert [message.content for message in played.messages if message.role == "user"] == ["Guess.", "Higher.", "Lower."]
    assert played.rewards == pytest.approx([1 / 6, 1 / 6, 0.5 + 1 / 6])
    assert played.done


async def test_the_rewards_of_a_found_number_add_up_to_one() -> None:
    """This holds for any guesses, also for a first hit and for a range of one number."""
    for replies in (["6"], ["1", "8", "2", "6"], ["7", "5", "6"]):
        assert sum((await play(GuessEnvironment(), game(), replies)).rewards) == pytest.approx(1)
    assert (await play(GuessEnvironment(), game(1, 1), ["1"])).rewards == [1.0]


def test_a_game_that_was_cut_before_a_guess_earned_nothing() -> None:
    """Its reward is 0, not a failure; any other game earns the sum of its steps."""
    assert guess_reward(Sample()) == 0.0
    assert guess_reward(Sample(step_rewards=[0.25, 0.5])) == 0.75


async def test_an_invalid_guess_earns_nothing_and_uses_a_guess() -> None:
    """A reply without a number, or a number outside the range, uses a guess; the last guess ends the game."""
    played = await play(GuessEnvironment(), game(), ["hm", "4", "3", "99"])
    assert played.rewards == pytest.approx([0, 0.5 * (1 - math.log2(4) / 3), 0, 0])
    assert played.messages[2].content == "Say one whole number."
    assert played.messages[6].content == "It is between 5 and 8."
    assert played.done


async def test_a_game_resumes_from_a_snapshot() -> None:
    """A snapshot survives MessagePack; the new environment returns the same replies and rewards."""
    first, second = GuessEnvironment(), GuessEnvironment()
    await first.start(game())
    await first.step(Message("assistant", "4"))
    await second.restore(game(), msgspec.msgpack.decode(msgspec.msgpack.encode(await first.snapshot())))
    for text in ("7", "3", "5"):
        assert await first.step(Message("assistant", text)) == await second.step(Message("assistant", text))


@pytest.mark.parametrize("change", [{"label": None}, {"label": 9}, {"low": None}, {"guesses": 0}], ids=repr)
async def test_an_invalid_prompt_is_refused(change: dict[str, Any]) -> None:
    """The error names the expected fields."""
    prompt = game()
    metadata = {**prompt.metadata, **{key: value for key, value in change.items() if key != "label"}}
    with pytest.raises(ConfigError, match="label, low, high, guesses: got"):
        await GuessEnvironment().start(Prompt("?", label=change.get("label", prompt.label), metadata=metadata))


def test_games_are_the_same_for_the_same_seed() -> None:
    """Games are the same for the same seed and differ from each other."""
    first, second = guess_prompts(3), guess_prompts(3)
    labels = [next(first).label for _ in range(20)]
    assert labels == [next(second).label for _ in range(20)]
    assert len(set(labels)) > 5
