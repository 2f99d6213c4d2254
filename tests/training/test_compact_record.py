"""Compact storage of samples: every field reads the same as before."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.dtypes import Completion, Message, Prompt, StopReason, ToolCall, VersionSpan
from rollouts.errors import ConfigError
from rollouts.training.compact_record import CompactRecord
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory, digest

LONG = "a text that is so long that it is worth a place of its own"


def decode(tokens: Any) -> str:
    """Each id is a character."""
    return "".join(map(chr, np.asarray(tokens).tolist()))


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int32)


def played(turns: Sequence[tuple[str, str]], prompt: str = "What?", **calls: Any) -> Trajectory:
    """A trajectory of replies and tool results."""
    trajectory = Trajectory()
    trajectory.add_context(ids(prompt), [Message("user", prompt)])
    for number, (reply, result) in enumerate(turns):
        tokens = ids(reply)
        completion = Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, np.float32),
            finish_reason="stop",
            versions=[VersionSpan(f"v{number // 2}", 0, len(tokens))],
            prompt_tokens=len(trajectory),
            prompt_digest=digest(trajectory.tokens),
            request_id=f"r{number}",
        )
        call = ToolCall("look", {"at": [1, {"x": None}], **calls}, id=f"call{number}")
        trajectory.add_reply(completion, Message("assistant", reply.strip(), tool_calls=(call,), reasoning=reply))
        trajectory.add_context(ids(f"<{result}>"), [Message("tool", result, tool_call_id=call.id, name="look")])
    return trajectory.seal(StopReason.TASK_COMPLETED)


def sample_of(trajectory: Trajectory) -> Sample:
    return trajectory_to_sample(trajectory, Prompt("What?", index=3, group_index=1), decode)


TRAJECTORY = played([(f"first {LONG}", f"result {LONG}"), (f"second {LONG}", "ok"), (f"third {LONG}", LONG)])


def is_small(sample: Sample) -> bool:
    return all(
        isinstance(getattr(sample, f"_{name}"), CompactRecord)
        for name in ("response", "messages", "completions", "versions")
    )


def check(sample: Sample, trajectory: Trajectory) -> None:
    first = trajectory.completions[0].start
    assert sample.response == decode(trajectory.tokens[first:])
    assert sample.messages == [message.to_chat() for message in trajectory.messages]
    assert sample.completions == trajectory.completions
    assert sample.versions == list(trajectory.versions)


TEXT = st.one_of(st.text(min_size=1, max_size=5), st.sampled_from([LONG, f" {LONG} ", LONG * 2, LONG[:40]]))


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), TEXT)
def test_values_are_read_back_as_stored(turns: list[tuple[str, str]], prompt: str) -> None:
    """For texts that occur in the decoded tokens once, more than once, in part, or not at all."""
    turns = [(reply.encode("utf-8", "replace").decode(), result) for reply, result in turns]
    trajectory = played(turns, prompt)
    sample = sample_of(trajectory)
    assert is_small(sample)
    check(sample, trajectory)
    check(sample.pack(), trajectory)


def test_a_copy_with_other_values_reads_the_same() -> None:
    """``attrs.evolve`` keeps compact storage; with other columns the copy is checked against those."""
    sample = sample_of(TRAJECTORY)
    other = attrs.evolve(sample, reward=1.0)
    assert (other.reward, other.response, other.messages) == (1.0, sample.response, sample.messages)
    assert (other.completions, other.versions, other.tokens) == (sample.completions, sample.versions, sample.tokens)
    with pytest.raises(ConfigError, match=r"Sample\.versions"):
        attrs.evolve(sample_of(TRAJECTORY), loss_mask=[0] * len(sample))


def test_a_sample_stays_compact_while_it_is_only_read() -> None:
    """Also while its messages and completions are read."""
    sample = sample_of(TRAJECTORY)
    assert LONG in sample.response
    assert sample.weight_versions == copy.copy(sample).weight_versions == ["v0", "v1"]
    starts = [completion.start for completion in sample.completions]
    assert sample.prefix == copy.copy(sample).prefix == (sum(starts), 0), "packed, and as lists"
    assert sample.to_dict()["messages"] == [message.to_chat() for message in TRAJECTORY.messages]
    assert len(sample.messages) == 7
    assert len(sample.completions) == 3
    assert is_small(sample)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("messages", lambda messages: messages.append({"role": "user", "content": "more"})),
        ("messages", lambda messages: messages[0].update(content="Who?")),
        ("messages", lambda messages: messages[1]["tool_calls"][0]["function"].pop("arguments")),
        ("completions", lambda completions: completions.clear()),
        ("versions", lambda versions: versions.__setitem__(0, VersionSpan("v0", 0, 1))),
    ],
)
def test_an_edit_in_place_of_a_compact_record_is_refused(name: str, edit: Callable[[Any], object]) -> None:
    """At any depth: each read unpacks it, so the edit would be lost."""
    sample = sample_of(TRAJECTORY)
    with pytest.raises(TypeError, match=rf"Sample\.{name}: got an edit in place"):
        edit(getattr(sample, name))
    check(sample, TRAJECTORY)


def test_read_only_messages_are_json_and_copies_are_plain() -> None:
    """Equal to the plain ones for every encoder; a deep copy may be edited."""
    messages = sample_of(TRAJECTORY).messages
    plain = [message.to_chat() for message in TRAJECTORY.messages]
    assert json.loads(json.dumps(messages)) == msgspec.json.decode(msgspec.json.encode(messages)) == plain
    twin = copy.deepcopy(messages)
    twin[1]["tool_calls"][0]["function"].pop("arguments")
    assert messages == plain != twin


def test_what_is_assigned_stays() -> None:
    """Packing keeps each field that was assigned."""
    sample = sample_of(TRAJECTORY)
    sample.messages = [{"role": "user", "content": "Who?"}]
    sample.completions = sample.completions[:2]
    sample.response = "other"
    sample.versions = []
    sample.pack()
    assert sample.messages == [{"role": "user", "content": "Who?"}]
    assert (len(sample.completions), sample.response, sample.versions) == (2, "other", [])


def test_the_response_is_that_of_the_tokens_as_they_were() -> None:
    """A change of the tokens does not change the stored response."""
    sample = sample_of(TRAJECTORY)
    before = sample.response
    sample.tokens = [*sample.tokens[:-1], ord("!")]
    for _ in range(4):
        sample_of(played([("x", "y")]))  # removes the first response from the cache
    assert sample.pack().response == before


def test_changed_columns_are_checked() -> None:
    """Versions were checked against the former columns."""
    sample = sample_of(TRAJECTORY)
    sample.loss_mask = [1, *sample.loss_mask[1:]]
    with pytest.raises(ConfigError, match="versions"):
        sample.pack()
    sample = sample_of(TRAJECTORY)
    sample.versions = [VersionSpan("v0", 0, 1), *sample.versions[1:]]
    with pytest.raises(ConfigError, match="versions"):
        sample.pack()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda sample: pickle.loads(pickle.dumps(sample))])
def test_copies_are_whole(copied: Any) -> None:
    """Copies and pickles contain all fields in plain form, and need no tokenizer."""
    sample = sample_of(TRAJECTORY)
    twin = copied(sample)
    assert is_small(sample)
    assert twin == sample
    check(twin, TRAJECTORY)
    twin.messages.clear()
    check(sample, TRAJECTORY)


def test_a_value_that_cannot_be_pickled_is_stored_as_it_is() -> None:
    """A message may contain a value that cannot be pickled."""
    value = (part for part in "abc")
    sample = sample_of(played([(LONG, LONG)], given=value))
    assert sample.messages[1]["tool_calls"][0]["function"]["arguments"]["given"] is value
    assert sample.pack().response == f"{LONG}<{LONG}>"


def test_a_finished_sample_is_few_objects() -> None:
    """At most eight objects tracked by the garbage collector, for any number of turns."""
    trajectories = [played([(LONG, LONG)] * turns) for turns in [2, 16] * 10]
    sample_of(trajectories[0])
    gc.collect()
    before = len(gc.get_objects())
    samples = [sample_of(trajectory).pack() for trajectory in trajectories]
    gc.collect()
    assert (len(gc.get_objects()) - before) / len(samples) <= 8


def test_the_counts_of_a_mask_are_those_of_its_values() -> None:
    """The stored counts hold for the mask that they were counted in; a mask that was edited is counted again."""
    sample = sample_of(played([("one", "1"), ("two", "2")]))
    plain = Sample(tokens=sample.tokens, loss_mask=sample.loss_mask)
    assert sample.sizes == plain.sizes == (len(sample), sample.sampled_tokens, sample.response_length)
    assert sample.sampled_tokens == sum(sample.loss_mask)
    mask = sample.mask_column
    owner = mask if mask.base is None else mask.base
    owner.flags.writeable = True
    owner[int(mask.argmax())] = False
    assert sample.sampled_tokens == plain.sampled_tokens - 1
    assert sample.response_length == plain.response_length - 1
    sample.loss_mask = [0] * len(sample)
    assert sample.sizes == (len(sample), 0, 0)
