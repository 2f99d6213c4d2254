"""Law 8: the stored logprobs are those of the weights that the tokens name, and faults of servers are found."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
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
    import numpy as np

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
