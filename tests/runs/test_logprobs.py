"""Law 8: the stored logprobs are those of the weights that the tokens name, and faults of servers are found."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.runs.logprobs import check_logprobs
from rollouts.runs.teacher_logprobs import check_teachers
from rollouts.runs.verify import verify_run
from tests.engine_requests import control, read, until_it_samples
from tests.peft_folders import write_adapter
from tests.stored_runs import edit_info, edit_line, store_run
from tests.vllm_server import vllm_server

pytest.importorskip("torch")

RECIPE = """
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe

def length(sample):
    return float(len(sample.response))

def recipe(endpoint, *, temperature: float = 1.0, groups: int = 2, most: int = 12, least: int = 0, lora: str = "",
    seed: int = 0):
    prompts = [f"What is {number} + 3?" for number in range(10 * groups)]
    sizes = {"batch_size": groups, "n_samples_per_prompt": 2, "max_turns": 1, "max_new_tokens": most}
    sizes |= {"temperature": temperature, "min_new_tokens": least, "lora": lora or None, "seed": seed}
    return agent_recipe("small", endpoint, CalculatorEnvironment, prompts, reward_fn=length, keep="all", **sizes)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with weights that are a little different."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    moved = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(RECIPE)
    return tmp_path / "small.py"


async def play(out: Path, *, resume: bool = False, **target: Any) -> None:
    console = Console(file=io.StringIO())
    target = {"recipe": None, "batches": 1, **target}
    result = await launch(RunTarget(**target), out, "jsonl", False, console, resume=resume)
    assert result is not None
    assert result.error is None, result.error


@contextlib.asynccontextmanager
async def busy(url: str) -> AsyncIterator[None]:
    """A request is in the middle of its reply, and the server is paused, so that an update in place cannot flush."""
    long = SamplingParams(max_new_tokens=900, min_new_tokens=900)
    async with SGLangPolicy(Endpoint(base_url=url)) as policy, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: policy.complete(CompletionRequest(packed_tokens([5, 6, 7]), long)))
        await until_it_samples(policy, long)
        await control(url, "/pause_generation", mode="in_place")
        assert b'"num_running_reqs":1' in await read(f"{url}/v1/loads")
        yield
        tasks.cancel_scope.cancel()


async def updated_run(path: Path, recipe: Path, weights: Path, while_running: WhileRunning, **faults: bool) -> Path:
    """A run under the version ``v1``, of a server whose cache has the same prompts from a run before the update."""
    async with running_server(DEMO_MODEL, **faults) as url, contextlib.AsyncExitStack() as stack:
        await play(path / "before", recipe=recipe, urls=(url,))
        if while_running == "in_place":
            await stack.enter_async_context(busy(url))
        await update_weights(Endpoint(base_url=url), weights, "v1", while_running=while_running)
        await play(path / "run", recipe=recipe, urls=(url,))
    return path / "run"


@pytest.mark.parametrize(
    ("while_running", "faults", "code"),
    [
        ("retract", {}, 0),
        ("in_place", {}, 0),
        pytest.param("retract", {"stale_cache": True}, 1, id="stale cache after an update"),
        pytest.param("in_place", {"shared_prefixes": True}, 1, id="prefixes that an update in place poisoned"),
    ],
)
async def test_a_run_after_an_update(
    other: Path, recipe: Path, tmp_path: Path, while_running: WhileRunning, faults: dict[str, bool], code: int
) -> None:
    """An honest run passes; one whose conversations read K/V of the old weights keeps laws 1 to 5, and breaks law 8."""
    run = await updated_run(tmp_path, recipe, other, while_running, **faults)
    assert verify_run(run).ok
    assert main(["verify", str(run), "--model", f"v1={other}"]) == code


async def test_a_run_on_vllm(other: Path, recipe: Path, tmp_path: Path) -> None:
    """Law 8 does not depend on the protocol: two versions, tempered, resumed with the provider of the start."""
    async with vllm_server() as server:
        target = {"urls": (server.url,), "provider": "vllm", "options": {"temperature": "0.7"}}
        await play(tmp_path / "run", recipe=recipe, **target)
        await update_weights(Endpoint(provider="vllm", base_url=server.url), other, "v1")
        await play(tmp_path / "run", resume=True, batches=2)
    assert verify_run(tmp_path / "run").ok
    line = ["verify", str(tmp_path / "run"), "--tolerance", "5e-5", "--model", f"v1={other}"]
    assert main([*line, f"default={DEMO_MODEL}"]) == 0
    assert main([*line, f"default={other}"]) == 1


async def test_a_run_of_another_distribution_does_not_start(recipe: Path, tmp_path: Path) -> None:
    """Raw logprobs of a tempered run are refused before its first rollout, with the flag that the server needs."""
    async with vllm_server(mode="raw") as server:
        target = {"urls": (server.url,), "provider": "vllm", "options": {"temperature": "0.7"}}
        with pytest.raises(ConfigError, match="Start it with --logprobs-mode processed_logprobs"):
            await play(tmp_path / "run", recipe=recipe, **target)
    assert server.bodies == []


@pytest.mark.parametrize(("weights", "code"), [("other", 0), ("demo", 1)])
async def test_a_run_that_goes_on_elsewhere(
    other: Path, recipe: Path, tmp_path: Path, weights: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run on a server that names the run's model and serves the demo model breaks law 8 from there on."""
    run = tmp_path / "run"
    async with running_server(other) as url:
        await play(run, recipe=recipe, urls=(url,))
    port = int(url.rpartition(":")[2])
    served = other if weights == "other" else DEMO_MODEL
    async with running_server(served, port=port, reported_model=other):
        await play(run, resume=True, batches=2)
    assert verify_run(run).ok
    assert main(["verify", str(run), "--model", str(other)]) == code
    out, err = capsys.readouterr()
    assert "law 8 (logprobs): " in out
    assert f"version 'default' against {other}: " in out
    assert ("law 8 (logprobs) broken: " in err) == bool(code)
    if code:
        assert re.search(r"(batch-000001|unbatched)\.jsonl, line ", err)
        assert main(["verify", str(run), "--model", str(other), "--tolerance", "9"]) == 0


async def test_greedy_logprobs_are_those_of_temperature_1(recipe: Path, tmp_path: Path) -> None:
    """A server does not divide the logits of a greedy token."""
    async with running_server(DEMO_MODEL) as url:
        await play(tmp_path / "run", recipe=recipe, urls=(url,), options={"temperature": "0"})
    report = check_logprobs(tmp_path / "run", {None: DEMO_MODEL})
    assert (report.violations, report.temperatures) == ([], [0.0])
    assert report.versions[0].largest < 1e-4


async def test_a_minimum_masks_the_stop_ids(recipe: Path, tmp_path: Path) -> None:
    """The first tokens of a reply with ``min_new_tokens`` have logprobs of a distribution without stop ids."""
    run = tmp_path / "run"
    async with running_server(DEMO_MODEL) as url:
        await play(run, recipe=recipe, urls=(url,), options={"least": "8", "temperature": "0.7"})
    report = check_logprobs(run, {None: DEMO_MODEL})
    assert report.ok, report
    assert report.versions[0].largest < 1e-4
    shutil.rmtree(run / "journal")
    edit_info(run, lambda info: info["settings"]["sampling"].update(min_new_tokens=0))
    assert not check_logprobs(run, {None: DEMO_MODEL}).ok


async def test_penalised_logprobs_are_refused_by_name(recipe: Path, tmp_path: Path) -> None:
    """They depend on the tokens before in a way that is not modelled."""
    run = tmp_path / "run"
    async with running_server(DEMO_MODEL) as url:
        await play(run, recipe=recipe, urls=(url,))
    shutil.rmtree(run / "journal")
    edit_info(run, lambda info: info["settings"]["sampling"].update(repetition_penalty=1.2))
    with pytest.raises(ConfigError, match=r"settings\.sampling\.repetition_penalty: got 1\.2; expected 1"):
        check_logprobs(run, {None: DEMO_MODEL})


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with noise of 0.3 % of the standard deviation of each tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "neighbour"
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    moved = {name: value + 0.003 * value.std() * torch.randn_like(value) for name, value in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("served", "code"), [("own", 0), ("neighbour", 1)])
async def test_neighbouring_weights_are_found_in_bfloat16(
    neighbour: Path, recipe: Path, tmp_path: Path, served: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 3,000 tokens, although no token shows it; a run of the right weights passes."""
    run, options = tmp_path / "run", {"groups": "32", "most": "60", "least": "40"}
    weights = neighbour if served == "neighbour" else DEMO_MODEL
    async with running_server(weights, reported_model=DEMO_MODEL, dtype="bfloat16") as url:
        await play(run, recipe=recipe, urls=(url,), options=options)
    line = ["verify", str(run), "--dtype", "bfloat16", "--model", f"default={DEMO_MODEL}"]
    assert main([*line, f"near={neighbour}"]) == code
    printed = capsys.readouterr()
    assert "signed mean" in printed.out
    slope = re.search(r"(\d+) tokens, .*slope towards .*neighbour: (-?[\d.]+) ± ([\d.]+)", printed.out)
    assert slope is not None, printed.out
    assert 2500 <= int(slope[1]) <= 4500
    assert abs(float(slope[2]) - code) < 0.2
    assert float(slope[3]) < 0.03
    assert ("logprobs of" in printed.err) == bool(code)


@pytest.mark.timeout(900)  # 20 runs: 225 s on two cores
async def test_twenty_honest_runs_in_bfloat16_pass(
    neighbour: Path, recipe: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """20 of 20 runs of 3,000 tokens, each of another seed, against the right weights and their neighbour."""
    if not request.config.getoption("--long"):
        pytest.skip("with --long: one honest run passes always")
    options = {"groups": "32", "most": "60", "least": "40"}
    async with running_server(DEMO_MODEL, dtype="bfloat16") as url:
        for seed in range(20):
            await play(tmp_path / f"{seed}", recipe=recipe, urls=(url,), options={**options, "seed": f"{seed}"})
    slopes = []
    for seed in range(20):
        report = check_logprobs(tmp_path / f"{seed}", {"default": DEMO_MODEL, "near": neighbour}, dtype="bfloat16")
        assert report.ok, f"seed {seed}: {report}"
        assert 2500 <= report.versions[0].tokens <= 4500
        slopes.append(report.versions[0].slopes[0].value)
    assert len(set(slopes)) == 20, "other tokens in each run"
    assert max(slopes) < 0.2


async def test_each_completion_has_its_own_temperature(recipe: Path, tmp_path: Path) -> None:
    """The record of a completion goes before ``run.json``, which counts only for records that have none."""
    run = tmp_path / "run"
    async with running_server(DEMO_MODEL) as url:
        await play(run, recipe=recipe, urls=(url,), options={"temperature": "0.5"})
    shutil.rmtree(run / "journal")
    batch = run / "batches" / "batch-000000.jsonl"

    def holds(of_run: float, first: float | None = 0.5, others: float | None = 0.5, of: str = "tempered") -> bool:
        edit_info(run, lambda info: info["settings"]["sampling"].update(temperature=of_run))
        for number in range(4):
            fields = {"temperature": others if number else first, "logprobs_of": of}
            edit_line(batch, number, lambda row, fields=fields: row["completions"][0].update(fields))
        return check_logprobs(run, {None: DEMO_MODEL}).ok

    assert holds(1.0)
    assert check_logprobs(run, {None: DEMO_MODEL}).temperatures == [0.5]
    assert not holds(0.5, first=1.0)
    assert check_logprobs(run, {None: DEMO_MODEL}).temperatures == [0.5, 1.0]
    assert holds(0.5, first=None, others=None)
    assert not holds(1.0, first=None)
    assert not holds(0.5, of="raw")
    with pytest.raises(ConfigError, match=r"line 1, completions\[0\]\.logprobs_of: got 'processed'; expected raw or"):
        holds(0.5, of="processed")


async def test_long_sequences_are_computed_in_parts() -> None:
    """The parts of a sequence share one cache: the result is that of a single pass."""
    from rollouts.engine import teacher

    tokens = packed_tokens([(7 * number) % 500 for number in range(90)])
    positions = np.array([1, 5, 31, 32, 33, 34, 64, 65, 89])
    model = teacher.Teacher(DEMO_MODEL, "float32")
    whole = model.logprobs(tokens, positions, 0.7)
    parts = model.logprobs(tokens, positions, 0.7, chunk=32)
    assert whole == pytest.approx(parts, abs=1e-5)


async def test_every_version_needs_a_folder(tmp_path: Path) -> None:
    """A version without weights is refused by name, before any weights load."""
    await store_run(tmp_path / "run")
    edit_info(tmp_path / "run", lambda info: info.update(settings={"sampling": {"temperature": 1.0}}))
    with pytest.raises(ConfigError, match=r"--model: got \['v1=.*'\]; expected a folder .*, also for v2=DIR"):
        check_logprobs(tmp_path / "run", {"v1": DEMO_MODEL})
    edit_info(tmp_path / "run", lambda info: info.pop("settings"))
    with pytest.raises(ConfigError, match=r"settings\.sampling\.temperature: got None; expected one number"):
        check_logprobs(tmp_path / "run", {None: DEMO_MODEL})


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (["nowhere"], "--model: got 'nowhere'; expected a folder with a model"),
        (["v1=nowhere"], "--model: got 'v1=nowhere'; expected a folder with a model"),
        ([str(DEMO_MODEL), str(DEMO_MODEL)], "expected one folder for each version"),
    ],
)
def test_a_wrong_model_is_refused(capsys: pytest.CaptureFixture[str], models: list[str], named: str) -> None:
    """The message quotes the argument; the exit code is that of bad input."""
    assert main(["verify", "runs/none", "--model", *models]) == 2
    assert named in capsys.readouterr().err


async def test_a_run_with_adapters(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each version is compared with the base model and its adapter; another adapter, or none, is noticed."""
    adapters = [write_adapter(tmp_path / f"a{number}", number) for number in range(2)]
    run = tmp_path / "run"
    async with running_server(DEMO_MODEL) as url:
        endpoint = Endpoint(base_url=url, lora="math")
        await update_weights(endpoint, lora=adapters[0], name="math-v0")
        await play(run, recipe=recipe, urls=(url,), options={"lora": "math"})
        await update_weights(endpoint, lora=adapters[1], name="math-v1")
        await play(run, resume=True, batches=2)
    assert verify_run(run).ok
    line = ["verify", str(run), "--tolerance", "5e-5", "--model", str(DEMO_MODEL)]
    assert main([*line, "--lora", f"math-v0={adapters[0]}", f"math-v1={adapters[1]}"]) == 0
    assert f"version 'math-v1' against {adapters[1]}: " in capsys.readouterr().out
    assert main([*line, "--lora", f"math-v0={adapters[1]}", f"math-v1={adapters[1]}"]) == 1
    assert main(line) == 2
    assert "--lora" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["adapter", "math-v0=", f"math-v0={DEMO_MODEL}"])
def test_what_is_not_an_adapter_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the flag and what it takes."""
    assert main(["verify", str(tmp_path), "--model", str(DEMO_MODEL), "--lora", text]) == 2
    assert f"--lora: got {text!r}; expected VERSION=folder" in capsys.readouterr().err


OF_TEACHERS = """
from rollouts.dtypes import Endpoint
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe
from rollouts.rewards import Teacher, scored_by_teachers

def length(sample):
    return float(len(sample.response))

def recipe(endpoint, *, even: str, odd: str):
    prompts = [{"prompt": f"What is {n} + 3?", "metadata": {"kind": "odd" if n % 2 else "even"}} for n in range(20)]
    servers = {"even": Endpoint(base_url=even), "odd": Endpoint(base_url=odd)}
    teachers = [Teacher(server, top_k=4, route=f"metadata.kind={kind}") for kind, server in servers.items()]
    sizes = {"batch_size": 4, "n_samples_per_prompt": 2, "max_turns": 1, "max_new_tokens": 12}
    scored = scored_by_teachers(teachers)
    return agent_recipe("taught", endpoint, CalculatorEnvironment, prompts, reward_fn=length, filter_fn=scored, **sizes)
"""


@attrs.frozen
class Taught:
    """A run whose samples two teachers scored: ``other`` the even tasks, the demo model the odd ones."""

    run: Path
    even: str
    odd: str

    def judge(self, *folders: str) -> int:
        return main(["check-run", str(self.run), "--teacher-model", *folders])


@pytest.fixture(scope="module")
def of_teachers(other: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    path = tmp_path_factory.mktemp("taught")
    (path / "taught.py").write_text(OF_TEACHERS)

    async def store() -> Taught:
        async with running_server(DEMO_MODEL) as url, running_server(other) as even:
            target = {"recipe": path / "taught.py", "urls": (url,), "options": {"even": even, "odd": url}}
            await play(path / "run", **target)
        return Taught(path / "run", f"{even}/generate", f"{url}/generate")

    return anyio.run(store)


@pytest.fixture
def taught(of_teachers: Taught, tmp_path: Path) -> Taught:
    """A copy without the journal, which would show the edit of a row."""
    shutil.copytree(of_teachers.run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "journal")
    return attrs.evolve(of_teachers, run=tmp_path / "run")


def test_honest_teachers_pass(of_teachers: Taught, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each teacher's column, and its most probable ids, are those of its folder."""
    folders = [f"{of_teachers.even}={other}", str(DEMO_MODEL)]
    assert of_teachers.judge(*folders, "--model", str(DEMO_MODEL)) == 0
    printed = capsys.readouterr().out
    found = re.findall(r"teacher '(.*)' against (.*): (\d+) tokens, largest difference (\S+), ", printed)
    assert {url: folder for url, folder, _, _ in found} == {
        of_teachers.even: str(other), of_teachers.odd: str(DEMO_MODEL)
    }  # fmt: skip
    assert all(int(tokens) > 20 and float(largest) < 2e-4 for _, _, tokens, largest in found)
    assert re.search(r"of teachers: holds, \d+ tokens compared, the most probable ids of \d+ \(", printed)
    assert "note" not in printed


def test_teachers_that_served_other_weights_are_found(
    of_teachers: Taught, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that served the policy's weights, and two that are exchanged; laws 1 to 5 hold."""
    assert verify_run(of_teachers.run).ok
    assert of_teachers.judge(str(other)) == 1
    wrong = capsys.readouterr()
    place = rf"law 8 \(logprobs\) broken: .*teacher_log_probs, position \d+: .* of teacher '{of_teachers.odd}'"
    assert re.search(place, wrong.err)
    assert of_teachers.judge(f"{of_teachers.even}={DEMO_MODEL}", f"{of_teachers.odd}={other}") == 1
    assert "most probable" in capsys.readouterr().out


def plant_in_record(planted: str, row: dict[str, Any]) -> None:
    """Contradict the record of a teacher's logprobs."""
    column, stored, first = row["teacher_log_probs"], row["metadata"]["scored_by"], row["loss_mask"].index(1)
    if planted == "no column":
        row["teacher_log_probs"] = None
    elif planted == "no url":
        stored.pop("url")
    elif planted == "torn top":
        stored["top_ids"] = stored["top_ids"][:-4]
    elif planted == "on context":
        column[first - 1] = -0.5
    else:
        column[first] = 0.5


def test_records_that_contradict_themselves_are_found(taught: Taught, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights: each by its row and field."""
    batch = taught.run / "batches" / "batch-000000.jsonl"
    planted = ["torn top", "above 0", "on context", "no column", "no url"]
    for number, kind in enumerate(planted):
        edit_line(batch, number, functools.partial(plant_in_record, kind))
    assert verify_run(taught.run).ok
    assert taught.judge(str(DEMO_MODEL)) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 5
    for number, words in enumerate(["a row for each", "at most 0", "not sampled", "got none", "no url"]):
        assert any(f"line {number + 1} (group" in line and words in line for line in err), (number, err)


def plant_in_values(planted: str, row: dict[str, Any]) -> None:
    """Change a value that no other field contradicts."""
    column, stored, first = row["teacher_log_probs"], row["metadata"]["scored_by"], row["loss_mask"].index(1)
    shape = sum(row["loss_mask"]), 4
    ids = np.frombuffer(base64.b64decode(stored["top_ids"]), "<i4").reshape(shape).copy()
    values = np.frombuffer(base64.b64decode(stored["top_log_probs"]), "<f4").reshape(shape).copy()
    sampled = row["tokens"][first:]
    at = next(number for number in range(len(ids)) if sampled[number] not in ids[number][1:])
    other = next(token for token in range(500) if token not in (*ids[at], sampled[at]))
    if planted == "logprob":  # in both places
        at = next(n for n in range(len(ids)) if sampled[n] == ids[n][0] and values[n][0] - values[n][1] > 0.1)
        values[at][0] -= 0.01
        column[first + at] = float(values[at][0])
    elif planted == "top id":
        ids[at][2] = other
    elif planted == "top logprob":
        values[at][3] -= 0.5
    else:  # the third most probable id is left out
        ids[at][2:], values[at][2:] = (ids[at][3], other), (values[at][3], values[at][3] - 5)
    stored |= {"top_ids": base64.b64encode(ids.tobytes()).decode()}
    stored |= {"top_log_probs": base64.b64encode(values.tobytes()).decode()}


def test_values_that_the_weights_do_not_give_are_found(
    taught: Taught, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One logprob of a column; one of the most probable ids, its logprob, an id that is left out: each in a row."""
    batch = taught.run / "batches" / "batch-000000.jsonl"
    for number, kind in enumerate(["top id", "top logprob", "left out", "logprob"]):
        edit_line(batch, number, functools.partial(plant_in_values, kind))
    assert verify_run(taught.run).ok
    assert taught.judge(f"{taught.even}={other}", str(DEMO_MODEL)) == 1
    err = capsys.readouterr().err
    assert {int(number) for number in re.findall(r"line (\d+) \(group", err)} == {1, 2, 3, 4}, err


def test_what_cannot_be_compared_is_named(taught: Taught, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples without a column, columns without a teacher, and a tokenizer that is not there are notes, not passes."""
    batch = taught.run / "batches" / "batch-000000.jsonl"
    kinds = [json.loads(line)["metadata"]["kind"] for line in batch.read_bytes().splitlines()]
    for number in (number for number, kind in enumerate(kinds) if kind == "even"):
        edit_line(batch, number, lambda row: row.update(teacher_log_probs=None, metadata={"kind": "even"}))
    edit_line(batch, kinds.index("odd"), lambda row: row["metadata"].pop("scored_by"))
    edit_info(taught.run, lambda info: info.update(tokenizer="other/model"))
    (taught.run / "unbatched.jsonl").unlink(missing_ok=True)
    report = check_teachers(taught.run, {None: DEMO_MODEL})
    assert report.ok
    assert report.notes == [
        f"{kinds.count('even')} of 8 samples in batches have no logprobs of a teacher",
        'the columns of 1 samples name no teacher (metadata["scored_by"])',
        f"the tokenizers of {DEMO_MODEL} and of the policy, other/model, are not both on this machine",
    ]


def test_a_teacher_with_other_ids_is_found(
    of_teachers: Taught, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal weights and one token with another id: law T3, which no logprob shows."""
    folder = shutil.copytree(other, tmp_path / "renamed")
    text = (folder / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == at) for at in (10, 11))
    text = text.replace(f'"{first}": 10,', f'"{first}": 11,').replace(f'"{second}": 11,', f'"{second}": 10,')
    (folder / "tokenizer.json").write_text(text)
    assert of_teachers.judge(f"{of_teachers.even}={folder}", str(DEMO_MODEL)) == 1
    assert re.search(r"tokenizer of .*renamed: got id 10 is '.*'; expected '.*', as in ", capsys.readouterr().err)


@pytest.mark.parametrize("given", ["nowhere", "http://t:1/generate=nowhere", "unknown", "missing", "twice"])
def test_a_wrong_teacher_model_is_refused(of_teachers: Taught, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message quotes the argument, or names the teachers of the run."""
    folders = {
        "unknown": [f"http://t:1/generate={DEMO_MODEL}", str(DEMO_MODEL)],
        "missing": [f"{of_teachers.odd}={DEMO_MODEL}"],
        "twice": [str(DEMO_MODEL)] * 2,
    }.get(given, [given])
    assert of_teachers.judge(*folders) == 2
    err = capsys.readouterr().err
    assert "--teacher-model: got " in err
    assert (f"{of_teachers.even}=DIR" in err) == (given in ("unknown", "missing"))


async def test_a_run_without_teachers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to compare is not a pass."""
    await store_run(tmp_path / "run")
    assert main(["check-run", str(tmp_path / "run"), "--teacher-model", str(DEMO_MODEL)]) == 2
    assert "expected a run whose samples have teacher_log_probs: none has" in capsys.readouterr().err


async def test_a_teacher_in_bfloat16_that_served_the_policy_is_found(
    neighbour: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """No token shows it; the slope towards the weights of ``--model`` does."""
    if not request.config.getoption("--long"):
        pytest.skip("with --long: as for a policy")
    (tmp_path / "taught.py").write_text(
        OF_TEACHERS.replace('"batch_size": 4', '"batch_size": 10').replace(": 12", ": 60")
    )
    async with running_server(DEMO_MODEL, dtype="bfloat16") as url:
        target = {"recipe": tmp_path / "taught.py", "urls": (url,), "options": {"even": url, "odd": url}}
        await play(tmp_path / "run", **target)
    line = ["check-run", str(tmp_path / "run"), "--dtype", "bfloat16", "--model", str(DEMO_MODEL), "--teacher-model"]
    assert main([*line, str(neighbour)]) == 1
    assert re.search(r"got logprobs of .* \(slope (0\.[89]|1\.[01])", capsys.readouterr().err)
