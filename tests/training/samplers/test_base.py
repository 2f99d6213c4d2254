"""The laws of every sampler: its state follows from draws and outcomes in their order, and from nothing else."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.errors import ConfigError, RolloutsError
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.buffer_state import CLASS
from rollouts.training.data_buffer import Draw
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.mixing import mixed_prompts
from rollouts.training.samplers import LevelSampler, PassRateSampler, PoolSampler, Sampler

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "pass_rate": lambda: PassRateSampler(n=4),
    "pools": PoolSampler,
    "levels": lambda: LevelSampler(window=3, review=2),
}


def rows(count: int) -> list[Prompt]:
    return [Prompt(f"q{number}", metadata={"level": number % 4}) for number in range(count)]


def mixed(count: int) -> list[Prompt]:
    parts = {"a": (2.0, rows(count)), "b": (1.0, [Prompt(f"b{number}") for number in range(count)])}
    return mixed_prompts(parts, count)


def bytes_of(sampler: Sampler) -> bytes:
    return json.dumps(sampler.state_dict()).encode()


def played(buffer: DataBuffer, steps: int, rng: random.Random) -> tuple[list[Draw], list[bytes]]:
    """Draw and observe in a random order; returns the events, and the state after each."""
    assert buffer.sampler is not None
    events: list[Draw] = []
    states = []
    out: list[Prompt] = []
    for _ in range(steps):
        if out and rng.random() < 0.5:
            prompt = out.pop(rng.randrange(len(out)))
            rewards = [float(rng.random() < rng.choice([0, 0.5, 1])) for _ in range(4)]
            buffer.observe(prompt, rewards)
            assert prompt.group_index is not None
            events.append((prompt.group_index, None, rewards))
            buffer.mark_done(prompt)
        else:
            (prompt,) = buffer.get_prompts(1)
            out.append(prompt)
            assert prompt.group_index is not None
            events.append((prompt.group_index, buffer.position_of(prompt), None))
        states.append(bytes_of(buffer.sampler))
    return events, states


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), steps=st.integers(1, 120), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_every_prefix_of_the_record_gives_the_state_of_its_moment(
    name: str, size: int, steps: int, seed: int, shuffle: bool
) -> None:
    """Byte by byte; and the prompts that are out then come out again with their index."""
    order = seed if shuffle else None
    live = DataBuffer(rows(size), seed=order, sampler=SAMPLERS[name]())
    events, states = played(live, steps, random.Random(seed))
    for end in {1, steps // 2, steps - 1, steps} - {0}:
        resumed = DataBuffer(rows(size), seed=order, sampler=SAMPLERS[name]())
        recorded = {number: position for number, position, rewards in events[:end] if rewards is None}
        ended = {number for number, _, rewards in events[:end] if rewards is not None}
        resumed.resume_after(len(recorded), recorded.keys() - ended, events[:end])
        assert resumed.sampler is not None
        assert bytes_of(resumed.sampler) == states[end - 1]
        again = resumed.get_prompts(len(recorded.keys() - ended))
        assert {prompt.group_index: resumed.position_of(prompt) for prompt in again} == {
            number: recorded[number] for number in recorded.keys() - ended
        }


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 12), steps=st.integers(0, 100), seed=st.integers(0, 2**32))
def test_a_saved_state_continues_through_json(name: str, size: int, steps: int, seed: int) -> None:
    """A buffer that loads it draws the same prompts as the saved buffer."""
    first = DataBuffer(rows(size), seed=seed, sampler=SAMPLERS[name]())
    played(first, steps, random.Random(seed))
    second = DataBuffer(rows(size), seed=seed, sampler=SAMPLERS[name]())
    state = first.save_state()
    second.load_state(type(state).from_dict(json.loads(json.dumps(state.to_dict()))))
    assert first.sampler is not None
    assert second.sampler is not None
    assert bytes_of(second.sampler) == bytes_of(first.sampler)
    first.load_state(state)
    one, other = (played(buffer, 60, random.Random(1)) for buffer in (first, second))
    assert one == other


@pytest.mark.parametrize("name", ["pass_rate", "pools"])
def test_the_shares_of_the_environments_are_those_of_the_data(name: str) -> None:
    """A prompt that is skipped is replaced by another one of its environment, also if all prompts of one are dead."""
    buffer = DataBuffer(mixed(30), sampler=SAMPLERS[name]())
    uniform = DataBuffer(mixed(30))
    for _ in range(600):
        (prompt,), (plain,) = buffer.get_prompts(1), uniform.get_prompts(1)
        assert prompt.metadata["environment"] == plain.metadata["environment"]
        buffer.observe(prompt, [0.0] * 4 if prompt.metadata["environment"] == "a" else [0.0, 1.0, 0.0, 1.0])


def test_the_levels_of_several_environments_are_refused() -> None:
    """A level of one environment says nothing about another one."""
    part = {name: (1.0, rows(4)) for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"LevelSampler: got \['a', 'b'\]; expected prompts of one environment"):
        DataBuffer(mixed_prompts(part, 8), sampler=LevelSampler())


def test_a_state_of_another_sampler_is_refused() -> None:
    """Its class is named; and so is an object that is not a sampler, with the methods that it lacks."""
    state = DataBuffer(rows(3), sampler=PassRateSampler()).save_state()
    for sampler in (PoolSampler(), None):
        with pytest.raises(ConfigError, match=r"BufferState\.sampler: got 'PassRateSampler'"):
            DataBuffer(rows(3), sampler=sampler).load_state(state)
    wrong: Any = object()
    with pytest.raises(ConfigError, match="a sampler, with begin, next, drawn"):
        DataBuffer(rows(3), sampler=wrong)


@pytest.mark.parametrize("method", ["begin", "next", "observe", "state_dict", "load_state_dict", "drawn"])
def test_an_error_of_a_sampler_names_its_method(method: str) -> None:
    """With the line of the user's code; else a run would end with a bare ``KeyError``."""

    def broken(*_: Any) -> None:
        raise KeyError("no such pool")

    state = DataBuffer(rows(3), sampler=LevelSampler()).save_state()
    sampler: Any = type("Broken", (LevelSampler,), {method: broken})()

    def play() -> None:
        buffer = DataBuffer(rows(3), sampler=sampler)
        buffer.load_state(attrs.evolve(state, sampler={**(state.sampler or {}), CLASS: "Broken"}))
        (prompt,) = buffer.get_prompts(1)
        buffer.observe(prompt, [1.0])
        buffer.resume_after(1, [0], [(0, 0, None)])

    line = rf"{re.escape(__file__)}:\d+ in broken"
    with pytest.raises(RolloutsError, match=rf"^Broken\.{method} raised KeyError: 'no such pool' \({line}\)$"):
        play()


def test_a_sampler_whose_state_is_no_dict_is_named() -> None:
    """E.g. a ``state_dict`` without ``return``."""
    sampler: Any = type("Silent", (LevelSampler,), {"state_dict": lambda self: None})()
    with pytest.raises(ConfigError, match=r"^Silent\.state_dict\(\): got None; expected a dict"):
        DataBuffer(rows(3), sampler=sampler).save_state()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"pool": "hard"}, r"Odd\.metrics\(\)\['pool'\]: got 'hard'; expected a number"),
        ({"pool": None}, r"Odd\.metrics\(\)\['pool'\]: got None; expected a number"),
        ({"pool": [1.0]}, r"Odd\.metrics\(\)\['pool'\]: got \[1.0\]; expected a number"),
        ({3: 1.0}, r"Odd\.metrics\(\), a key: got 3; expected a string"),
        (None, r"Odd\.metrics\(\): got None; expected a dict of numbers by name"),
    ],
)
async def test_a_metric_of_a_sampler_that_is_no_number_is_named(numbers: Any, message: str) -> None:
    """It would else reach ``metrics.jsonl``, or end a logger."""
    sampler: Any = type("Odd", (LevelSampler,), {"metrics": lambda self: numbers})()
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, generate_fn=play)
    with pytest.raises(ConfigError, match=f"^{message}"):
        await AsyncRolloutManager(config, DataBuffer(rows(3), sampler=sampler)).generate_batch()


async def test_numbers_of_numpy_are_metrics_of_a_sampler() -> None:
    """And NaN, of a mean over nothing."""
    numbers = {"a": np.float32(0.5), "b": np.int64(2), "c": 3, "d": math.nan}
    sampler: Any = type("Even", (LevelSampler,), {"metrics": lambda self: numbers})()
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, generate_fn=play)
    manager = AsyncRolloutManager(config, DataBuffer(rows(3), sampler=sampler))
    await manager.generate_batch()
    assert [manager.metrics[f"sampler/{name}"] for name in "abc"] == [0.5, 2, 3]
    assert math.isnan(manager.metrics["sampler/d"])


async def play(prompts: Sequence[Prompt]) -> list[Sample]:
    return [Sample(tokens=[1, 2], loss_mask=[0, 1], reward=1.0)]


def test_a_run_without_a_sampler_continues_with_one() -> None:
    """Its draws have no positions; they are those of the epochs, which the sampler goes through, too."""
    uniform = DataBuffer(rows(9), seed=3)
    taken = [str(prompt.prompt) for prompt in uniform.get_prompts(14)]
    buffer = DataBuffer(rows(9), seed=3, sampler=PassRateSampler(n=4))
    draws: list[Draw] = [(number, None, None) for number in range(14)]
    buffer.resume_after(14, range(14), draws)
    assert [str(prompt.prompt) for prompt in buffer.get_prompts(14)] == taken
    assert buffer.get_prompts(4) == uniform.get_prompts(4)


class Lost(PassRateSampler):
    """A sampler with a wrong position."""

    def next(self, draw: int) -> int:
        return 3


def test_a_position_outside_of_the_data_is_refused() -> None:
    """With the sampler, the draw and the number of prompts."""
    buffer = DataBuffer(rows(3), sampler=Lost())
    with pytest.raises(ConfigError, match=r"Lost\.next\(0\): got 3; expected a position, 0 to 2"):
        buffer.get_prompts(1)


def test_prompts_that_are_held_out_are_not_drawn() -> None:
    """The sampler begins again with the data that are left."""
    buffer = DataBuffer(rows(8), seed=1, sampler=PassRateSampler(n=4))
    held_out = {str(prompt.prompt) for prompt in buffer.hold_out(3)}
    drawn = {str(prompt.prompt) for prompt in buffer.get_prompts(15)}
    assert len(drawn) == 5
    assert not drawn & held_out
