"""Tools of a run: each list of schemas is one file, samples name it by hash, and runs without it are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Endpoint, Limits, Message, Prompt, Tool
from rollouts.dtypes.tools import tools_json
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import StepResult
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.renderer import renderer_for
from rollouts.runs.export import export_rows
from rollouts.runs.folder import read_rows
from rollouts.runs.reader import load_run
from rollouts.runs.run_history import RunHistory
from rollouts.runs.start import begin
from rollouts.runs.tools import TOOLS, ToolFolder
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from tests.stored_runs import some_sample

CALCULATOR = tools_json(CalculatorEnvironment().tools)


class Two:
    """An environment with two tools, of which each task has one."""

    def __init__(self) -> None:
        self.tools: Sequence[Tool] = ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.tools = [Tool("even" if prompt.metadata["n"] % 2 == 0 else "odd")]
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        return StepResult(done=True, reward=float(len(reply.content or "")))

    async def close(self) -> None: ...


async def stored(path: Path, *, format: Format = "jsonl", journaled: bool = False) -> None:
    """A run of one batch of 4 groups of 2; even and odd tasks have different tools."""
    renderer = renderer_for(str(DEMO_MODEL))
    reply = renderer.encode("12<|im_end|>").tolist()
    generate = partial(
        generate_rollout_batch,
        environment_cls=Two,
        endpoint=Endpoint(),
        tokenizer=renderer,
        policy=ScriptedPolicy(lambda tokens: reply),
        limits=Limits(max_turns=2),
    )
    config = RolloutConfig(generate_fn=generate, batch_size=4, n_samples_per_prompt=2, over_sampling_factor=1.0)
    data = DataBuffer([{"prompt": f"question {n}", "metadata": {"n": n}} for n in range(4)])
    writer = RunWriter(path, {"config": config.describe()}, format=format)
    run_journal = begin(path, {"config": config.describe()}, data) if journaled else None
    async with AsyncRolloutManager(config, data, on_group=writer.on_group, rollout_log=run_journal) as manager:
        writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
    writer.finish("finished", manager.accounting)
    if run_journal is not None:
        run_journal.journal.close()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_each_list_of_tools_is_stored_once_and_read_with_its_samples(tmp_path: Path, format: Format) -> None:
    """Eight rollouts with two lists of tools have two files, and each sample has the tools of its task."""
    await stored(tmp_path / "run", format=format)
    assert len(ToolFolder(tmp_path / "run").names()) == 2
    samples = load_run(tmp_path / "run")
    assert len(samples) == 8
    for sample in samples:
        (tool,) = json.loads(sample.tools or "[]")
        assert tool["function"]["name"] == ("even" if sample.metadata["n"] % 2 == 0 else "odd")
    report = verify_run(tmp_path / "run")
    assert report.ok
    assert report.checked[4]["lists of tools"] == 2


async def test_the_journal_has_the_tools_too(tmp_path: Path) -> None:
    """A group that only the journal has is read with its tools."""
    await stored(tmp_path / "run", journaled=True)
    history = RunHistory.read(tmp_path / "run" / "journal")
    names = {json.loads(sample.tools or "[]")[0]["function"]["name"] for sample in history.group_samples(1)}
    assert len(names) == 1
    assert names <= {"even", "odd"}


async def test_a_changed_list_of_tools_is_damage(tmp_path: Path) -> None:
    """``verify`` names the file whose bytes do not have its hash, and a reader refuses it."""
    await stored(tmp_path / "run")
    file = next((tmp_path / "run" / TOOLS).glob("*.json"))
    file.write_bytes(file.read_bytes().replace(b"parameters", b"Parameters"))
    assert any(file.stem in str(violation) for violation in verify_run(tmp_path / "run").violations)
    with pytest.raises(ConfigError, match=file.stem):
        list(load_run(tmp_path / "run"))


async def test_an_export_has_the_schemas(tmp_path: Path) -> None:
    """A row of an export has the tools themselves: it has no folder of tools."""
    await stored(tmp_path / "run")
    (file,) = export_rows(tmp_path / "run", tmp_path / "rows.jsonl", "jsonl")
    rows = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert {json.loads(row["tools"])[0]["function"]["name"] for row in rows} == {"even", "odd"}


def test_samples_without_tools_are_unknown_not_none_offered(tmp_path: Path) -> None:
    """A row of an earlier version, which has no such field, is read with ``tools=None``."""
    sample = some_sample(Prompt("a", index=0, group_index=0), 1)
    writer = RunWriter(tmp_path / "run", format="jsonl")
    writer.write_batch([sample], {})
    writer.finish("finished")
    (row,) = read_rows(tmp_path / "run")
    assert row.data.pop("tools") is None
    assert row.sample().tools is None
    assert not (tmp_path / "run" / TOOLS).exists()


def test_a_sample_is_plain_data_with_its_tools() -> None:
    """``to_dict`` has the schemas, so that a sample is read without any folder."""
    sample = some_sample(Prompt("a", index=0, group_index=0), 1)
    sample.tools = CALCULATOR
    fields: dict[str, Any] = sample.to_dict()
    assert Sample.from_dict(fields).tools == CALCULATOR
