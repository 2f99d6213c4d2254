"""The most probable ids of a teacher: of sampled tokens alone, as the model has them; refused where they are lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, RewardFailure
from rollouts.integrations.prime_rl import training_columns
from rollouts.integrations.slime.convert import to_slime
from rollouts.rewards import Teacher, teachers_as_advantages
from rollouts.rewards.teacher_top import SCORED_BY, TeacherTop, reverse_kl, set_top, top_of
from rollouts.runs.reader import load_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.training import Sample
from tests.trainer_samples import scored_groups
from tests.vllm_server import vllm_server

K = 5
VOCAB = 12


def samples(count: int = 4, vocab: int = VOCAB) -> list[Sample]:
    """Rollouts of one to three turns, of ids below ``vocab``, at temperature 1."""
    made = scored_groups(1, count)
    for sample in made:
        sample.tokens = [token % vocab for token in sample.tokens]
        sample.completions = []
    return made


def logprobs_of(position: int) -> list[float]:
    """The logprobs of a made-up model: of every id at a position."""
    logits = [math.sin(7.0 * token + position) for token in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def sglang(asked: Asked) -> dict[str, Any]:
    """The reply of SGLang to a request that scores a prompt; its first entries are null."""
    ids, start = asked.body["input_ids"], asked.body["logprob_start_len"]
    assert asked.body["sampling_params"]["max_new_tokens"] == 0
    meta: dict[str, list[Any]] = {"input_token_logprobs": [], "input_top_logprobs": [], "input_token_ids_logprobs": []}
    of_student = "token_ids_logprob" in asked.body
    for position in range(start, len(ids)):
        every = [logprob / (2 if of_student else 1) for logprob in logprobs_of(position)]
        if position == start:
            own, tops, wanted = None, None, None
        else:
            own = every[ids[position]]
            order = sorted(range(VOCAB), key=lambda token: -every[token])
            tops = [[every[token], token, None] for token in order[: asked.body.get("top_logprobs_num", 0)]]
            wanted = [[every[token], token, None] for token in asked.body.get("token_ids_logprob", ())]
        meta["input_token_logprobs"].append([own, ids[position], None])
        meta["input_top_logprobs"].append(tops)
        meta["input_token_ids_logprobs"].append(wanted)
    return {"meta_info": meta}


def expected_top(sample: Sample) -> tuple[list[list[int]], list[list[float]]]:
    rows = [logprobs_of(position) for position in np.flatnonzero(sample.mask_column)]
    ids = [sorted(range(VOCAB), key=lambda token: -row[token])[:K] for row in rows]
    return ids, [[row[token] for token in order] for row, order in zip(rows, ids, strict=True)]


async def test_each_sampled_token_has_the_most_probable_ids() -> None:
    """A row for each sampled token, none for context; sampled logprobs as without ``top_k``, and the teacher's name."""
    async with JsonServer(sglang) as server:
        teacher, plain = Teacher(f"{server.url}/generate", top_k=K), Teacher(f"{server.url}/generate")
        for sample in samples():
            await plain.score(sample)
            sampled = sample.teacher_column
            assert top_of(sample) is None
            await teacher.score(sample)
            top = top_of(sample)
            assert top is not None
            assert sampled is not None
            assert np.array_equal(sample.teacher_column, sampled)  # type: ignore[arg-type]
            assert top.ids.shape == top.logprobs.shape == (sample.sampled_tokens, K)
            assert (top.ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
            ids, values = expected_top(sample)
            assert top.ids.tolist() == ids
            assert top.logprobs == pytest.approx(np.array(values), abs=1e-6)
            assert sample.metadata[SCORED_BY]["url"] == f"{server.url}/generate"


@pytest.fixture(scope="module")
def model_top() -> Callable[[Sequence[int]], tuple[Any, Any]]:
    """K ids and logprobs at each position after the first, of one forward pass of the demo model."""
    torch = pytest.importorskip("torch")
    from rollouts.engine.loading import load_weights

    model = load_weights(DEMO_MODEL, "float32")

    def top(ids: Sequence[int]) -> tuple[Any, Any]:
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float().log_softmax(-1).topk(K)
        return found.indices.numpy(), found.values.numpy()

    return top


@pytest.mark.parametrize("provider", ["sglang", "vllm"])
async def test_the_columns_are_those_of_the_model(
    provider: Any, engine_url: str, model_top: Callable[[Sequence[int]], tuple[Any, Any]]
) -> None:
    """Through an endpoint of either protocol: ids and logprobs of a forward pass by transformers."""

    async def check(url: str) -> None:
        teacher = Teacher(Endpoint(provider=provider, base_url=url), top_k=K)
        for sample in samples(3, 500):
            await teacher.score(sample)
            top, sampled = top_of(sample), np.flatnonzero(sample.mask_column)
            assert top is not None
            ids, values = model_top(sample.tokens)
            assert top.logprobs == pytest.approx(values[sampled - 1], abs=2e-4)
            near = np.diff(values[sampled - 1], axis=1) > -1e-3  # two ids that are as probable may change places
            assert (top.ids == ids[sampled - 1])[:, :-1][~near].all()

    if provider == "sglang":
        await check(engine_url)
        return
    async with vllm_server() as server:
        await check(server.url)


Edit = Callable[[list[Any]], Any]


def _edit(place: int, value: Any) -> Edit:
    def edit(row: list[Any]) -> Any:
        row[1][place] = value(row) if callable(value) else value
        return row

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda row: row[:-1], r"\[4, 5\] most probable ids at a position; expected 5"),
        (lambda row: None, "or a null entry"),
        (_edit(1, lambda row: row[0][1]), "an id twice"),
        (_edit(1, -1), "an id twice, or below 0"),
        (_edit(0, 0.5), "above 0"),
        (_edit(0, float("nan")), "not finite|input_top_logprobs|JSON"),
        (lambda row: row[::-1], "that do not descend"),
        (lambda row: [[-0.1 - 0.01 * at, one[1], None] for at, one in enumerate(row)], "probabilities above 1"),
        (lambda row: [[one[0] - 1.0, one[1], None] for one in row], "another logprob of the sampled id"),
        (lambda row: [["a", one[1], None] for one in row], "without pairs of logprob and id"),
        (lambda row: [[one[0], one[1] + 0.25, None] for one in row], "without pairs of logprob and id"),
        (lambda row: [None, *row[1:]], "without pairs of logprob and id"),
    ],
)
async def test_a_wrong_row_fails_the_sample(edit: Edit, words: str) -> None:
    """At one sampled token of the reply; the sample keeps no column."""
    (sample,) = samples(1)
    last = int(np.flatnonzero(sample.mask_column)[-1])

    def answer(asked: Asked) -> Any:
        reply = sglang(asked)
        rows = reply["meta_info"]["input_top_logprobs"]
        at = last - asked.body["logprob_start_len"]
        rows[at] = edit([[*one] for one in rows[at]])
        return reply

    async with JsonServer(answer) as server:
        with pytest.raises(RewardFailure, match=words):
            await Teacher(f"{server.url}/generate", top_k=K, attempts=1).score(sample)
    assert sample.teacher_column is None
    assert SCORED_BY not in sample.metadata


async def test_a_wrong_row_of_context_is_not_looked_at() -> None:
    """Context between two replies has no row."""
    sample = next(one for one in samples() if not one.mask_column[one.mask_column.argmax() :].all())
    start = int(sample.mask_column.argmax())
    context = start + int(sample.mask_column[start:].argmin())

    def answer(asked: Asked) -> Any:
        reply = sglang(asked)
        row = reply["meta_info"]["input_top_logprobs"][context - asked.body["logprob_start_len"]]
        row[1][1] = row[0][1]
        return reply

    async with JsonServer(answer) as server:
        await Teacher(f"{server.url}/generate", top_k=K).score(sample)
    assert top_of(sample) is not None


async def test_the_student_is_asked_for_the_ids_of_the_teacher() -> None:
    """Each id of the teacher at each sampled token has the student's logprob there; a missing one is a failure."""
    async with JsonServer(sglang) as server:
        teacher = Teacher(f"{server.url}/generate", top_k=K, student=Endpoint(base_url=server.url))
        for sample in samples():
            await teacher.score(sample)
            top = top_of(sample)
            assert top is not None
            assert top.student is not None
            assert top.student == pytest.approx(top.logprobs / 2)

    def forgetful(asked: Asked) -> Any:
        reply = sglang(asked)
        if "token_ids_logprob" in asked.body:
            reply["meta_info"]["input_token_ids_logprobs"][-1].pop()
        return reply

    async with JsonServer(forgetful) as server:
        teacher = Teacher(f"{server.url}/generate", top_k=VOCAB, student=f"{server.url}/generate", attempts=1)
        with pytest.raises(RewardFailure, match="student: got no logprob of an id of the teacher"):
            await teacher.score(next(one for one in samples() if one.mask_column[-1]))


async def test_the_students_rows_of_other_tokens_are_a_failure() -> None:
    """Rows that are moved by one have the ids that were sent, but another logprob of the sampled id."""

    def moved(asked: Asked) -> Any:
        reply = sglang(asked)
        rows = reply["meta_info"]["input_token_ids_logprobs"]
        rows[:] = [None, *rows[2:], rows[1]]
        return reply

    async with JsonServer(moved) as server:
        teacher = Teacher(f"{server.url}/generate", top_k=VOCAB, student=f"{server.url}/generate", attempts=1)
        with pytest.raises(RewardFailure, match="student: got another logprob of the sampled id"):
            await teacher.score(next(one for one in samples() if one.sampled_tokens > 2))


def with_top(count: int = 2, *, student: bool = True) -> list[Sample]:
    """Samples that a teacher scored, at made-up logprobs."""
    made = scored_groups(1, count)
    for number, sample in enumerate(made):
        rng = np.random.default_rng(number)
        shape = sample.sampled_tokens, K
        ids = np.argsort(rng.random((shape[0], 300)), axis=1)[:, :K].astype(np.int32)
        values = -np.sort(rng.exponential(2.0, shape) + 2.0, axis=1).astype(np.float32)
        others = -(rng.exponential(2.0, shape) + 1.0).astype(np.float32)
        sample.teacher_log_probs = np.where(sample.mask_column, np.float32(-0.5), np.float32(0))
        set_top(sample, "http://teacher/generate", TeacherTop(ids, values, others if student else None))
    return made


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_run_keeps_them_bit_for_bit(format: Any, tmp_path: Path) -> None:
    """As the other column of the teacher: in the file of the batch, and in the sample that is read from it."""
    if format == "parquet":
        pytest.importorskip("pyarrow")
    made = with_top()
    writer = RunWriter(tmp_path / "run", {"recipe": "test"}, format=format)
    writer.write_batch(made, {})
    writer.finish("finished")
    (group,) = load_run(tmp_path / "run").groups()
    for sample, before in zip(group, made, strict=True):
        for name in ("ids", "logprobs", "student"):
            assert getattr(top_of(sample), name).tobytes() == getattr(top_of(before), name).tobytes()


def test_stored_arrays_of_another_width_are_refused() -> None:
    """A row for each sampled token, or an error that names the sample."""
    (sample,) = with_top(1)
    sample.metadata[SCORED_BY]["top_k"] += 1
    with pytest.raises(ConfigError, match=r"metadata\['scored_by'\]: got .*expected arrays of"):
        top_of(sample)


def test_a_divergence_is_the_weighted_mean_of_the_differences() -> None:
    """By the student's probabilities, the teacher's, or alike; without the student's logprobs there is none."""
    teacher, student = np.log([[0.5, 0.25]], dtype=np.float32), np.log([[0.2, 0.6]], dtype=np.float32)
    top = TeacherTop(np.array([[1, 2]], np.int32), teacher, student)
    differences = (student - teacher)[0]
    for weights, shares in (("student_p", [0.25, 0.75]), ("teacher_p", [2 / 3, 1 / 3]), ("none", [0.5, 0.5])):
        assert reverse_kl(top, weights).tolist() == pytest.approx([float(differences @ shares)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected Teacher\(top_k=K, student=\.\.\.\)"):
        reverse_kl(attrs.evolve(top, student=None))
    with pytest.raises(ConfigError, match="weights: got 'both'"):
        reverse_kl(top, "both")  # type: ignore[arg-type]


def of_prime_rl(sample: Sample) -> Any:
    return training_columns(sample, 0.5, env_name="rollouts")


def of_advantages(sample: Sample) -> Any:
    return teachers_as_advantages([sample], [0.0])


@pytest.mark.parametrize("door", [of_prime_rl, of_advantages, to_slime])
def test_a_door_without_a_place_for_them_refuses(door: Any) -> None:
    """Those that take the logprobs of the sampled ids; all others refuse ``teacher_log_probs``."""
    if door is to_slime:
        pytest.importorskip("torch")
    (sample,) = with_top(1)
    with pytest.raises(ConfigError, match=r"the 5 most probable ids of a teacher.*Teacher\(top_k=0\): .* has no field"):
        door(sample)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": -1}, r"Teacher\.top_k"),
        ({"top_k": True}, r"Teacher\.top_k"),
        ({"student": "http://s/generate"}, r"Teacher\.student: .*top_k >= 1"),
        ({"student": Endpoint(provider="vllm"), "top_k": 2}, r"Teacher\.student: .*SGLang's"),
        ({"url": Endpoint(base_url=("http://a", "http://b"))}, "one URL"),
        ({"url": Endpoint(lora="math")}, "without an adapter"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    """The error names the argument."""
    with pytest.raises(ConfigError, match=words):
        Teacher(**{"url": "http://127.0.0.1:9/generate", **options})


def test_verl_has_the_entry_of_the_next_id() -> None:
    """Entry t is of id t + 1, int32 and float32 ``[n, K]``, 0 where nothing was sampled; without ``top_k`` K is 1."""
    pytest.importorskip("torch")
    from rollouts.integrations.verl import teacher_columns
    from rollouts.training.rows import trimmed

    for sample in with_top(3):
        row, top = trimmed(sample), top_of(sample)
        assert top is not None
        columns = teacher_columns(sample)
        sampled = np.flatnonzero(row.mask_column)
        assert columns["teacher_ids"].shape == columns["teacher_logprobs"].shape == (len(row), K)
        assert columns["teacher_ids"][sampled - 1].tolist() == top.ids.tolist()
        assert columns["teacher_logprobs"][sampled - 1].tolist() == top.logprobs.tolist()
        others = np.setdiff1d(np.arange(len(row)), sampled - 1)
        assert not columns["teacher_ids"][others].any()
        del sample.metadata[SCORED_BY]
        one = teacher_columns(sample)
        assert one["teacher_ids"][sampled - 1, 0].tolist() == row.token_column[sampled].tolist()
        assert set(one["teacher_logprobs"][sampled - 1, 0].tolist()) == {-0.5}
        sample.teacher_log_probs = None
        with pytest.raises(ConfigError, match=r"a column, of rewards\.Teacher"):
            teacher_columns(sample)
