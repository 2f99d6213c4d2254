"""Teachers score the sampled ids of kept groups: one teacher a rollout, exactly its ids, and no zeros for failures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from rollouts.dtypes import Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, DataExhausted, GenerateFailure
from rollouts.integrations.prime_rl import training_columns
from rollouts.integrations.tinker import datum_columns
from rollouts.rewards import Teacher, scored_by_teachers, teachers_as_advantages
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from rollouts.training.types import Group
from tests.stored_runs import some_sample, spread


def answering(scale: float = 1024.0, **changed: Any) -> Callable[[list[int], dict[str, Any]], Mapping[str, Any]]:
    """A teacher whose logprob of an id is minus the id over ``scale``; the first id has none."""

    def answer(input_ids: list[int], params: dict[str, Any]) -> Mapping[str, Any]:
        rows = [[None if at == 0 else -token / scale, token, None] for at, token in enumerate(input_ids)]
        return {"text": "", "meta_info": {"input_token_logprobs": rows, **changed}}

    return answer


async def play(filter_fn: Any, *, batches: int = 1, groups: int = 6) -> tuple[list[Sample], list[Group]]:
    """Batches of 2 groups of 4 random rollouts, from even and odd tasks; and all settled groups."""
    settled: list[Group] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        return [some_sample(prompt, 0) for prompt in prompts]

    config = RolloutConfig(
        generate_fn=generate, batch_size=2, n_samples_per_prompt=4, over_sampling_factor=1.0, filter_fn=filter_fn
    )
    rows = [{"prompt": f"q{n}", "metadata": {"kind": "even" if n % 2 == 0 else "odd"}} for n in range(groups)]
    kept: list[Sample] = []
    async with AsyncRolloutManager(config, DataBuffer(rows, epochs=1), on_group=settled.append) as manager:
        try:
            for _ in range(batches):
                kept += await manager.generate_batch()
        except (DataExhausted, GenerateFailure):  # the second where all groups fail alike
            pass
    return kept, settled


def expected(sample: Sample, scale: float) -> list[float]:
    column = -sample.token_column.astype(np.float32) / np.float32(scale)
    return [float(x) for x in np.where(sample.mask_column, column, np.float32(0))]


async def test_each_sample_is_scored_by_the_teacher_of_its_route() -> None:
    """Two teachers by metadata: the column has the logprobs of the right one, 0 on context."""
    async with StubServer(answering(1024)) as even, StubServer(answering(4096)) as odd:
        teachers = [
            Teacher(f"{even.url}/generate", route="metadata.kind=even"),
            Teacher(f"{odd.url}/generate", route=lambda sample: sample.metadata["kind"] == "odd"),
        ]
        samples, _ = await play(scored_by_teachers(teachers))
        assert len(samples) == 8
        for sample in samples:
            scale = 1024 if sample.metadata["kind"] == "even" else 4096
            assert sample.teacher_column is not None
            assert sample.teacher_column.tolist() == pytest.approx(expected(sample, scale))
        request = even.requests[0]
        assert request.sampling_params["max_new_tokens"] == 0
        assert request.body["return_logprob"] is True


async def test_a_dropped_group_is_not_sent() -> None:
    """Only groups that the filter keeps are scored, and the reason of the others is the filter's."""
    async with StubServer(answering()) as server:
        filter_fn = scored_by_teachers([Teacher(f"{server.url}/generate")], spread)
        samples, settled = await play(filter_fn, batches=9, groups=12)
        dropped = [group for group in settled if group.outcome == "dropped"]
        kept = [group for group in settled if group.outcome == "kept"]
        assert dropped
        assert {group.reason for group in dropped} == {"spread"}
        assert len(server.requests) == 4 * len(kept)
        assert samples
        assert all(sample.teacher_column is None for group in dropped for sample in group.samples)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "input_token_logprobs"),
        ([[-0.5, 1, None]], "other ids"),
        ([[float("nan"), 1, None]] * 99, "other ids"),
        ("text", "expected one for each id"),
    ],
)
async def test_a_wrong_answer_fails_the_group(rows: Any, words: str) -> None:
    """The group is recorded as failed with the reason, and no sample has a column of zeros."""
    async with StubServer(answering(input_token_logprobs=rows)) as server:
        _, settled = await play(scored_by_teachers([Teacher(f"{server.url}/generate", attempts=1)]), batches=3)
        assert settled
        assert {group.outcome for group in settled} == {"failed"}
        assert all(words in group.reason for group in settled)
        assert all(sample.teacher_column is None for group in settled for sample in group.samples)


async def test_a_lost_request_is_sent_again() -> None:
    """A server error is retried; the group is kept."""
    async with StubServer(answering(), faults=["error_500"] * 2) as server:
        samples, settled = await play(
            scored_by_teachers([Teacher(f"{server.url}/generate", backoff_seconds=0.0, at_once=1)])
        )
        assert {group.outcome for group in settled} == {"kept"}
        assert all(sample.teacher_column is not None for sample in samples)


@pytest.mark.parametrize("routes", [["metadata.kind=even"], [None, "metadata.kind=odd"]])
async def test_a_sample_has_exactly_one_teacher(routes: list[Any]) -> None:
    """None or two fails the group, with the metadata and the teachers; the others are scored."""
    async with StubServer(answering()) as server:
        teachers = [Teacher(f"{server.url}/generate", route=route) for route in routes]
        _, settled = await play(scored_by_teachers(teachers), batches=3)
    outcomes = {(group.samples[0].metadata["kind"], group.outcome) for group in settled}
    assert outcomes == {("even", "kept"), ("odd", "failed")}
    assert all("exactly one of" in group.reason for group in settled if group.outcome == "failed")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"url": "teacher:8000"}, "url"),
        ({"route": "kind=even"}, r"Teacher\.route"),
        ({"temperature": 0}, r"Teacher\.temperature"),
        ({"temperature": 0.7}, r"Teacher\.temperature.*before the temperature"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], name: str) -> None:
    """The error names the argument."""
    with pytest.raises(ConfigError, match=name):
        Teacher(**{"url": "http://127.0.0.1:9/generate", **options})
    with pytest.raises(ConfigError, match="teachers"):
        scored_by_teachers([])


def scored() -> Sample:
    sample = some_sample(Prompt("q", index=0, group_index=0), 1)
    sample.teacher_log_probs = np.where(sample.mask_column, np.float32(-0.25), np.float32(0))
    sample.completions = [type(one)(**{**one.to_dict(), "temperature": 1.0}) for one in sample.completions]
    return sample.pack()


def test_a_teacher_of_other_ids_is_refused(tmp_path: Path) -> None:
    """By the first id that is another token; equal tokenizers in two folders pass."""
    same, other = (Path(shutil.copytree(DEMO_MODEL, tmp_path / name)) for name in ("same", "other"))
    file = other / "tokenizer.json"
    model = json.loads(file.read_bytes())
    vocab = model["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.__getitem__)[7:9]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(model), encoding="utf-8")
    Teacher("http://x", tokenizers=(same, DEMO_MODEL))
    with pytest.raises(ConfigError, match=r"Teacher\.tokenizers: got .*other, whose id 7 is .*; expected .*demo_model"):
        Teacher("http://x", tokenizers=(other, DEMO_MODEL))


async def test_a_sample_of_another_temperature_is_not_scored() -> None:
    """The teacher's logprobs are of temperature 1, whatever is asked for; nothing is sent and no column is set."""
    async with StubServer(answering()) as server:
        teacher = Teacher(f"{server.url}/generate")
        for temperature in (0.7, 0.0):
            sample = scored()
            sample.teacher_log_probs = None
            records = sample.read_record("completions")
            sample.completions = [type(one)(**{**one.to_dict(), "temperature": temperature}) for one in records]
            with pytest.raises(ConfigError, match="at temperature 1"):
                await teacher.score(sample)
            assert sample.teacher_column is None
        assert server.requests == []
        sample = scored()
        await teacher.score(sample)
        assert sample.teacher_column is not None


def test_prime_rl_gets_them_as_reference_logprobs() -> None:
    """``ref_logprobs`` and ``ref_kl_weights`` are as wide as the ids, and 0 on context; a weight is the sample's."""
    sample = scored()
    columns = training_columns(sample, 0.5, env_name="rollouts", ref_kl_weight=0.5)
    mask = columns["mask"]
    assert columns["ref_logprobs"] == [-0.25 if one else 0.0 for one in mask]
    assert columns["ref_kl_weights"] == [0.5 if one else 0.0 for one in mask]
    sample.loss_multiplier = 0.0
    assert not any(training_columns(sample, 0.5, env_name="rollouts")["ref_kl_weights"])
    sample.teacher_log_probs = None
    assert not {"ref_logprobs", "ref_kl_weights"} & training_columns(sample, 0.5, env_name="rollouts").keys()


def test_tinker_gets_them_as_advantages() -> None:
    """The advantage of a token is that of its sample plus the difference of both logprobs."""
    sample = scored()
    with pytest.raises(ConfigError, match="teacher_log_probs"):
        datum_columns(sample, 0.5)
    logprobs = sample.logprob_column
    assert logprobs is not None
    teachers_as_advantages([sample], [0.5], weight=2.0)
    want = np.where(sample.mask_column, 0.5 + 2.0 * (-0.25 - logprobs), 0.0)[1:]
    columns = datum_columns(sample, 7.0)
    assert columns["advantages"].tolist() == pytest.approx(want[: len(columns["advantages"])].tolist())
    with pytest.raises(ConfigError, match="teacher_log_probs"):
        teachers_as_advantages([sample], [0.5])
