"""The whole loop, small: stored logprobs are those of the weights, through every update, and training can resume."""

from __future__ import annotations

import copy
import re
import shutil
from contextlib import AsyncExitStack, aclosing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec
import numpy as np
import pytest
from rich.console import Console

from rollouts.dtypes import Endpoint, Message, SamplingParams
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.environments.base import StepResult
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.errors import ConfigError
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import update_weights
from rollouts.recipe.files import build, load_recipe, read_options
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.credit import returns_to_go
from rollouts.training.evaluation import TaskScore
from rollouts.views.terminal.console import SafeConsole

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from training import duel as duels  # noqa: E402 - the guests need torch
from training import proposer as proposers  # noqa: E402
from training.board import draw_curve, read_steps  # noqa: E402
from training.grpo import GrpoConfig, GrpoTrainer  # noqa: E402
from training.learn import START_MODEL, Lesson, held_out_prompts, learn, lesson_of  # noqa: E402
from training.samplers import compare_samplers  # noqa: E402
from training.through_service import learn_through_service  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["calculator_grpo", "calculator_program"])
def test_a_command_line_names_the_recipe(recipe: str) -> None:
    """The recipe may stand behind the options; without one it is ``calculator_grpo``."""
    named = [recipe] if recipe != "calculator_grpo" else []
    lesson = lesson_of(["--out", "folder", "--kinds", "one_step_60_99", *named, "--steps", "2"])
    assert (lesson.recipe, lesson.kinds, lesson.steps) == (Path(recipe), ("one_step_60_99",), 2)


def test_a_command_line_names_the_credit() -> None:
    """An estimator of rewards with its discount; or a teacher, whose logprobs are the credit."""
    lesson = lesson_of(["--out", "folder", "--credit", "returns_to_go", "--discount", "0.5"])
    assert isinstance(lesson.credit, partial)
    assert (lesson.credit.func, lesson.credit.keywords) == (returns_to_go, {"discount": 0.5})
    assert lesson_of(["--out", "folder", "--teacher", "model"]).teacher == Path("model")
    for wrong in (["--discount", "0.5"], ["--teacher", "model", "--credit", "rloo"]):
        with pytest.raises(ConfigError, match=f"{wrong[0]}: got"):
            lesson_of(["--out", "folder", *wrong])


def exact(sample: Sample) -> float:
    last = sample.messages[-1] if sample.messages else {}
    return float(last.get("content") == f"The answer is {sample.label}.")


def config_at(url: str, environment_cls: Any = CalculatorEnvironment, **sizes: Any) -> RolloutConfig:
    endpoint = Endpoint(model=str(DEMO_MODEL), base_url=url, sampling=SamplingParams(max_new_tokens=48))
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=environment_cls,
        endpoint=endpoint,
        tokenizer=endpoint.model,
        max_turns=4,
    )
    return RolloutConfig(generate_fn=generate_fn, reward_fn=exact, n_samples_per_prompt=4, **sizes)


def model_of(folder: Path = DEMO_MODEL) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def stored(sample: Sample, which: Any) -> Any:
    assert sample.logprob_column is not None
    return sample.logprob_column[which]


async def test_the_trainer_finds_the_logprobs_that_were_stored() -> None:
    """With the same weights in float32, teacher forcing reproduces the stored logprob of every sampled token."""
    async with running_server(DEMO_MODEL) as url:
        config = config_at(url, batch_size=4)
        async with AsyncRolloutManager(config, DataBuffer(islice(calculator_prompts(1), 20))) as manager:
            samples = await manager.generate_batch()
    found = await anyio.to_thread.run_sync(GrpoTrainer(model_of(), GrpoConfig()).logprobs, samples)
    assert sum(len(values) for values in found) > 200
    for sample, values in zip(samples, found, strict=True):
        np.testing.assert_allclose(values.numpy(), stored(sample, sample.mask_column), atol=1e-3, rtol=0)


class Gate:
    """Delays the environments of the first episodes until the first new weights are served."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.episodes = 0


class GatedCalculator(CalculatorEnvironment):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.waits = gate.episodes % 4 == 3 and gate.episodes >= 8
        gate.episodes += 1

    async def step(self, reply: Message) -> StepResult:
        if self.waits:
            await self.gate.open.wait()
        return await super().step(reply)


async def test_each_token_has_the_logprob_of_the_weights_that_it_names(tmp_path: Path) -> None:
    """Five asynchronous updates with requests in flight: stored logprobs equal those of each version's weights."""
    trainer = GrpoTrainer(model_of(), GrpoConfig(warmup_steps=1))
    folders = {"default": DEMO_MODEL}
    seen: list[Sample] = []
    gate = Gate()
    async with running_server(DEMO_MODEL) as url:
        config = config_at(url, partial(GatedCalculator, gate), batch_size=2, over_sampling_factor=4)
        endpoint = Endpoint(base_url=url)
        buffer = DataBuffer(islice(calculator_prompts(2), 200))
        async with AsyncRolloutManager(config, buffer) as manager:
            manager.announce_version("default")
            async with aclosing(manager.stream(max_staleness=3, policy="pace")) as batches:
                for version in ("1", "2", "3", "4", "5"):
                    samples = await anext(batches)
                    seen += copy.deepcopy(samples)
                    await anyio.to_thread.run_sync(trainer.step, samples)
                    folders[version] = tmp_path / version
                    await anyio.to_thread.run_sync(trainer.model.save_pretrained, folders[version])
                    await update_weights(endpoint, folders[version], version, while_running="retract")
                    manager.announce_version(version)
                    gate.open.set()
    versions = {version for sample in seen for version in sample.weight_versions}
    assert len(versions) >= 2
    assert any(len(sample.weight_versions) > 1 for sample in seen), "an episode that lived through an update"
    for version in versions:
        under = [sample for sample in seen if version in sample.weight_versions]
        found = GrpoTrainer(model_of(folders[version]), GrpoConfig()).logprobs(under)
        for sample, values in zip(under, found, strict=True):
            of_version = np.zeros(len(sample), bool)
            for span in sample.versions:
                of_version[span.start : span.stop] = span.version == version
            which = of_version[sample.mask_column]
            np.testing.assert_allclose(values.numpy()[which], stored(sample, of_version), atol=1e-3, rtol=0)


def test_the_command_of_the_page_of_samplers_is_a_lesson() -> None:
    """Its options are those of the parser and of the recipe."""
    page = " ".join((ROOT / "docs" / "recipes.md").read_text().split())
    (line,) = re.findall(r"`scripts/learn (--lr[^`]*)`", page)
    lesson = lesson_of(["--out", "folder", "--kinds", "one_step_60_99", *line.split()])
    assert (lesson.until, lesson.options["sampler"], lesson.options["kind"]) == (0.95, "pass_rate", "mislabelled")
    read_options(load_recipe(lesson.recipe), lesson.options)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_lesson_is_learned_and_resumed(tmp_path: Path, asynchronous: bool) -> None:
    """It writes CSV rows, a valid checkpoint and a result; resumed, it takes the next step with new prompts.

    In a separate engine; asynchronously on a server that runs, and has the checkpoint's weights when it resumes.
    """
    async with AsyncExitStack() as servers:
        url = await servers.enter_async_context(running_server(START_MODEL)) if asynchronous else None
        await _learn_and_resume(tmp_path, None if url is None else Endpoint(base_url=url))


async def _learn_and_resume(tmp_path: Path, server: Endpoint | None) -> None:
    asynchronous = server is not None
    lesson = Lesson(
        recipe=ROOT / "configs" / "calculator_grpo.py",
        out=tmp_path,
        options={
            "batch_size": "4",
            "n_samples_per_prompt": "4",
            "prompts": "100",
            "over_sampling_factor": "1.5" if asynchronous else "1",
        },
        grpo=GrpoConfig(warmup_steps=0),
        steps=2,
        held_out=4,
        held_out_rollouts=2,
        kinds=("unseen_pairs_60_99",),
        asynchronous=asynchronous,
        endpoint=server,
    )
    console = Console(quiet=True)
    result = await learn(lesson, console)
    rows = read_steps(tmp_path / "steps.csv")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["reward"] <= 1 and row["logprob_diff"] < (1.0 if asynchronous else 1e-4) for row in rows)
    assert all(0 <= row["tools"] <= 1 for row in rows)
    assert rows[0]["started_groups"] >= 4
    assert result["seconds"]["total"] > result["seconds"]["learning"]
    assert set(result["before"]) == set(result["after"]) == {"as trained", "unseen_pairs_60_99"}
    for scores in result["after"].values():
        assert set(scores) == {"sampled", "greedy", "pass@1", "pass@2", "tools_sampled", "tools_greedy", "calls"}
    assert result["before"]["as trained"]["tools_greedy"] == 0, "the start model guesses"
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes())["after"] == result["after"]
    first = model_of(tmp_path / "checkpoint").state_dict()
    assert any(not torch.equal(value, first[name]) for name, value in model_of(START_MODEL).state_dict().items())
    result = await learn(attrs.evolve(lesson, steps=3, resume=True), console)
    assert result["steps"] == 3
    assert [row["step"] for row in read_steps(tmp_path / "steps.csv")] == [1, 2, 3]


async def test_a_policy_has_nothing_to_learn_from_itself(tmp_path: Path) -> None:
    """As its own teacher it finds its own logprobs: the advantages of its tokens are 0, and groups need no spread."""
    async with running_server(START_MODEL) as url:
        lesson = Lesson(
            recipe=Path("calculator_grpo"),
            out=tmp_path,
            options={"batch_size": "2", "n_samples_per_prompt": "2", "prompts": "20", "max_turns": "1"},
            grpo=GrpoConfig(minibatches=1),
            steps=1,
            held_out=0,
            teacher=START_MODEL,
            endpoint=Endpoint(base_url=url),
        )
        await learn(lesson, Console(quiet=True))
    (row,) = read_steps(tmp_path / "steps.csv")
    assert (row["groups"], row["kept_groups"]) == (2, 2)
    assert row["grad_norm"] < 1e-3


@pytest.mark.parametrize("recipe", ["calculator_grpo", "calculator_program"])
async def test_a_lesson_on_a_running_server(recipe: str, tmp_path: Path) -> None:
    """The server of ``--endpoint`` has other weights; it gets those that training starts from, then each version.

    Through a program, too: the trainer finds the logprobs of what a script's process was answered.
    """
    start = tmp_path / "start"
    shutil.copytree(START_MODEL, start)
    model = model_of(START_MODEL)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.1)
    model.save_pretrained(start)
    async with running_server(START_MODEL) as url:
        lesson = Lesson(
            recipe=Path(recipe),
            out=tmp_path / "out",
            model=start,
            options={"batch_size": "2", "n_samples_per_prompt": "4", "prompts": "20", "over_sampling_factor": "1"},
            steps=1,
            held_out=0,
            endpoint=Endpoint(base_url=url),
        )
        lesson.out.mkdir()
        result = await learn(lesson, Console(quiet=True))
        served = await SGLangPolicy(Endpoint(base_url=url)).describe()
    assert result["steps"] == 1
    assert served.weight_version == "1"
    assert read_steps(lesson.out / "steps.csv")[0]["logprob_diff"] < 1e-4, "the trainer's weights sampled"
    assert not (lesson.out / "engine.log").exists()


async def test_a_lesson_through_a_service(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Each step takes a lease, acknowledges it and publishes its weights; the service has no batch left at the end."""
    if not request.config.getoption("--long"):
        pytest.skip("four processes; scripts/test --long runs it")
    lesson = Lesson(
        recipe=Path("calculator_grpo"),
        out=tmp_path,
        options={"batch_size": "2", "n_samples_per_prompt": "2", "prompts": "20"},
        steps=2,
        held_out=0,
        slots=8,
    )
    assert (await learn_through_service(lesson, 2, Console(quiet=True)))["steps"] == 2
    assert [row["step"] for row in read_steps(tmp_path / "steps.csv")] == [1, 2]
    samples = load_run(tmp_path / "run")
    assert len(samples) == 8
    assert verify_run(tmp_path / "run").ok
    assert {version for sample in samples for version in sample.weight_versions} <= {"default", "step-1", "step-2"}


async def test_a_seat_learns_against_a_frozen_one(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A batch has no sample of the rival, whose engine keeps the weights; rewards are differences."""
    if not request.config.getoption("--long"):
        pytest.skip("three processes; scripts/test --long runs it")
    lesson = Lesson(
        recipe=Path(duels.__file__),
        out=tmp_path,
        options={"batch_size": "2", "n_samples_per_prompt": "8", "prompts": "20"},
        steps=1,
        held_out=4,
        held_out_rollouts=1,
        keep_weights=True,
        slots=8,
    )
    result = await duels.duel(lesson, SafeConsole(quiet=True))
    lines = (tmp_path / "weights/1/batch.jsonl").read_bytes().splitlines()
    samples = [msgspec.json.decode(line) for line in lines]
    assert len(samples) == 16
    assert {sample["seat"] for sample in samples} == {"solver"}
    assert {sample["reward"] for sample in samples} <= {-1.0, 0.0, 1.0}
    assert set(result["before"]) == {"as trained"}


def test_a_proposal_is_a_call_within_the_trained_numbers() -> None:
    """Its problem and answer are those of the call; other replies are not a proposal."""

    def of(name: str, arguments: Any) -> Any:
        return proposers.proposal(
            [{"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]
        )

    assert [of("subtract", {"a": 3, "b": 12}).label, of("multiply", '{"a": 3, "b": 12}').label] == ["-9", "36"]
    assert {"3", "12"} <= set(re.findall("[0-9]+", of("add", {"a": 3, "b": 12}).prompt))
    refused = [{"a": 60, "b": 1}, {"a": 0, "b": 1}, {"a": 1.5, "b": 1}, {"a": True, "b": 1}, {"a": 1}, "[", "[1]"]
    assert [of("add", arguments) for arguments in refused] == [None] * len(refused)
    assert of("divide", {"a": 3, "b": 12}) is None
    assert proposers.proposal([{"role": "assistant", "content": "The answer is 3."}]) is None


async def test_solvers_learn_on_the_problems_of_a_proposer(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A rollout has its proposer and, after a proposal, four solvers; a held-out problem has one solver."""
    if not request.config.getoption("--long"):
        pytest.skip("two processes; scripts/test --long runs it")
    lesson = Lesson(
        recipe=Path(proposers.__file__),
        out=tmp_path,
        options={"prompts": "20"},
        steps=1,
        held_out=2,
        held_out_rollouts=1,
        kinds=("one_step_60_99",),
        keep_weights=True,
        slots=8,
    )
    result = await learn(lesson, Console(quiet=True))
    samples = [msgspec.json.decode(line) for line in (tmp_path / "weights/1/batch.jsonl").read_bytes().splitlines()]
    seats: dict[Any, list[str]] = {}
    for sample in samples:
        seats.setdefault(sample["rollout_id"], []).append(sample["seat"])
    assert len(seats) == 32
    assert {tuple(names) for names in seats.values()} == {("proposer",), ("proposer", *["solver"] * 4)}
    assert set(result["after"]) == {"as trained", "one_step_60_99"}


def test_samplers_are_compared_by_seed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Each trains with the same seed, until the score; a row has the tokens that were sampled until then."""
    if not request.config.getoption("--long"):
        pytest.skip("two trainings; scripts/test --long runs it")
    lesson = Lesson(
        recipe=Path("calculator_grpo"),
        out=tmp_path,
        options={"kind": "mislabelled", "keep": "spread", "prompts": "30", "batch_size": "2"},
        steps=4,
        until=0.0,
        check_every=1,
        held_out=2,
        held_out_rollouts=1,
        kinds=("one_step_60_99",),
        slots=8,
    )
    rows = compare_samplers(lesson, [1], SafeConsole(quiet=True))
    assert [(row["seed"], row["sampler"], row["steps"]) for row in rows] == [(1, "uniform", 1), (1, "pass_rate", 1)]
    assert all(row["sampled_tokens"] > 0 and row["started_groups"] >= 2 for row in rows)
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes()) == rows


@pytest.mark.parametrize(
    ("recipe", "kinds", "words"),
    [("calculator", ("large",), "a recipe with an option kind"), ("calculator_grpo", ("trained",), "not trained on")],
)
def test_kinds_that_cannot_be_held_out_are_refused(recipe: str, kinds: tuple[str, ...], words: str) -> None:
    """A recipe without kinds, and a kind whose prompts are in the data."""
    lesson = Lesson(recipe=Path(recipe), out=Path(), options={"prompts": "30"}, held_out=4, kinds=kinds)
    with pytest.raises(ConfigError, match=words):
        held_out_prompts(lesson, Endpoint(model=str(START_MODEL)), build(load_recipe(recipe), Endpoint(), {}))


def test_a_curve_of_perfect_and_failed_evaluations_is_drawn(tmp_path: Path) -> None:
    """Error bars of scores that are all 0 before and all 1 after have no negative length."""
    pytest.importorskip("matplotlib")
    (tmp_path / "steps.csv").write_text("step,reward,elapsed\n1,0.5,2\n2,1.0,4\n")
    before, after = ([TaskScore(str(n), "", 1, won, 0, float(won)) for n in range(64 - 16 * won)] for won in (0, 1))
    picture = draw_curve(tmp_path / "steps.csv", tmp_path / "curve.png", before=before, after=after)
    assert picture is not None
    assert picture.stat().st_size > 1000
