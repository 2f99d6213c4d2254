"""A page holds exactly the data that the reader of the run reads: every token, mask bit, version, place and number."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollouts.dtypes import VersionSpan
from rollouts.runs.folder import read_rows
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.views.page.payload import Payload, build_payload
from rollouts.views.page.source import open_source
from tests.stored_runs import store_run


def decode(ids: Any) -> str:
    """A tokenizer whose ids are characters."""
    return "".join(chr(0x100 + int(token)) for token in ids)


def head_of(payload: Payload) -> dict[str, Any]:
    return msgspec.json.decode(zlib.decompress(payload.head), type=dict[str, Any])


def samples_of(payload: Payload) -> list[dict[str, Any]]:
    """The samples of all chunks, with their columns."""
    head = head_of(payload)
    found = []
    for chunk in payload.chunks:
        data = zlib.decompress(chunk.data)
        (length,) = struct.unpack("<I", data[:4])
        text = msgspec.json.decode(data[4 : 4 + length])
        wide = np.dtype("<u4" if text["wide"] else "<u2")
        total = sum(sample["n"] for sample in text["samples"])
        numbers = np.frombuffer(data, wide, total, 4 + length)
        planes = np.frombuffer(data, np.uint8, -1, 4 + length + total * wide.itemsize).reshape(2, -1)
        logprobs = ((planes[0].astype(np.uint32) << 24) | (planes[1].astype(np.uint32) << 16)).view(np.float32)
        token = trained = 0
        for sample in text["samples"]:
            runs = np.array(sample["mask"], int).reshape(-1, 2)
            mask = np.zeros(sample["n"], bool)
            for start, stop in runs:
                mask[start:stop] = True
            count = 0 if sample.get("logprobs") is False else int(mask.sum())
            ids = [head["vocabulary"]["ids"][number] for number in numbers[token : token + sample["n"]]]
            found.append({**sample, "ids": ids, "mask": mask, "values": logprobs[trained : trained + count]})
            token, trained = token + sample["n"], trained + count
    return found


async def test_every_token_and_number_is_there(tmp_path: Path) -> None:
    """Kept, dropped and failed groups of a run with two versions."""
    await store_run(tmp_path / "run")
    payload = build_payload(open_source(tmp_path / "run"), decode)
    head, found = head_of(payload), samples_of(payload)
    rows = list(read_rows(tmp_path / "run", "all"))
    stored = [row.sample() for row in rows]
    assert len(found) == len(stored) == len(head["samples"]["index"])
    for got, sample in zip(found, stored, strict=True):
        assert got["ids"] == list(sample.tokens)
        assert got["mask"].tolist() == sample.mask_column.tolist()
        spans = [[head["names"]["version"][number], start, stop] for number, start, stop in got["versions"]]
        assert spans == [[span.version, span.start, span.stop] for span in sample.versions]
        assert [call[:2] for call in got["completions"]] == [[call.start, call.stop] for call in sample.completions]
        assert got["steps"] == sample.step_rewards
        column = sample.logprob_column
        assert column is None or np.allclose(got["values"], column[sample.mask_column], rtol=2**-7)
    assert head["samples"]["reward"] == [sample.reward for sample in stored]
    assert head["samples"]["trained"] == [sample.sampled_tokens for sample in stored]
    assert {head["names"]["outcome"][number] for number in head["groups"]["outcome"]} == {row.outcome for row in rows}
    assert [failure["count"] for failure in head["failures"]] == [sum(s.failure is not None for s in stored)]
    assert head["report"]["ok"]
    assert head["metrics"] == open_source(tmp_path / "run").metrics


async def test_messages_are_places_in_the_tokens_or_texts(tmp_path: Path) -> None:
    """Text that the tokens spell is not stored again; offsets count as JavaScript does; arguments are JSON."""
    ids = [0x1F600 - 0x100, *(ord(letter) - 0x100 for letter in "ĀĀāĂ"), 3]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [{"role": "user", "content": "āĂ"}, {"role": "assistant", "content": "elsewhere", "tool_calls": calls}]
    sample = Sample("?", "", ids, [0, 0, 0, 0, 0, 1], 0.0, group_index=0, index=0, rollout_id=0, messages=messages)
    writer = RunWriter(tmp_path / "run")
    writer.write_batch([sample], {})
    (found,) = samples_of(build_payload(open_source(tmp_path / "run", verify=False), decode))
    assert found["messages"] == [["user", [4, 2]], ["assistant", "elsewhere", [["add", '{"a":1}']]]]
    assert found["logprobs"] is False


async def test_chunks_hold_whole_groups_in_order(tmp_path: Path) -> None:
    """A run with more tokens than a chunk holds has several; each begins where the one before it ends."""
    writer = RunWriter(tmp_path / "run")
    samples = [Sample("?", "", np.zeros(90_000, np.int32), None, 1.0, group_index=n // 2, index=n) for n in range(6)]
    writer.write_batch(samples, {})
    payload = build_payload(open_source(tmp_path / "run", verify=False), None)
    assert [(chunk.first, chunk.groups) for chunk in payload.chunks] == [(0, 1), (1, 1), (2, 1)]
    assert payload.tokens == 540_000
    assert len(samples_of(payload)) == 6


async def test_more_than_65536_ids_are_kept(tmp_path: Path) -> None:
    """The index of a token grows to 32 bits."""
    ids = np.arange(70_000, dtype=np.int32)
    versions = [VersionSpan("v", 0, len(ids))]
    sample = Sample("?", "", ids, np.ones(len(ids), bool), 1.0, group_index=0, index=0, versions=versions)
    sample.rollout_log_probs = np.full(len(ids), -0.5, np.float32)
    RunWriter(tmp_path / "run").write_batch([sample], {})
    (found,) = samples_of(build_payload(open_source(tmp_path / "run", verify=False), None))
    assert found["ids"] == ids.tolist()
    assert set(found["values"].tolist()) == {-0.5}
