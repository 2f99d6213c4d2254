"""The code of the integration guide, the README and the docs runs as written.

Names, keywords and argument orders are the guide's; only the server is a loopback one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import tomllib
from argparse import Namespace
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.commands import VERBS, main
from rollouts.commands.check_env import load_environment
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime import close_rollouts
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.programs import claude_code, function_recipe
from rollouts.programs.gateway.session import SessionLimits
from rollouts.programs.launchers.workspace import RepositoryWorkspace
from rollouts.programs.reward import repository_reward
from rollouts.recipe.files import build, load_recipe
from rollouts.recipes.environments.repositories.tasks import TASKS
from rollouts.renderer import load_tokenizer
from rollouts.sandboxes import NamespaceSandbox
from rollouts.testing.chat_server import ChatServer
from rollouts.testing.environment_check import CheckOptions, examine
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Prompt,
    RolloutConfig,
    Sample,
    Status,
    agent_rollout_to_sample,
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    filters,
    generate_rollout_batch,
    load_run,
    make_length_filter,
    make_threshold_filter,
)
from tests.chat_api.sums import count_fruit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
async def endpoint(tokenizer: Any) -> AsyncIterator[Endpoint]:
    """A server whose model calls ``add`` once and then answers 8 or, every third time, 9."""
    answers = iter(range(10**6))

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        text = tokenizer.decode(input_ids)
        answer = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'
        if "<tool_response>" in text:
            answer = "The answer is 9." if next(answers) % 3 == 0 else "The answer is 8."
        return list(tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False))

    async with StubServer(reply=reply) as server:
        yield Endpoint(provider="sglang", model="Qwen/Qwen2.5-7B-Instruct", base_url=server.url)


def calc_reward(sample: Sample) -> float:
    ground_truth = sample.metadata.get("ground_truth")
    return 1.0 if ground_truth in sample.response else 0.0


PROMPTS = [{"prompt": f"What is 5 + 3? ({n})", "metadata": {"ground_truth": "8."}} for n in range(40)]


async def test_agent_rollout_to_sample(endpoint: Endpoint, tokenizer: Any) -> None:
    """One rollout: the loss mask has the replies and not the tool messages."""
    sample = await agent_rollout_to_sample(
        prompt="What is 5 + 3?",
        environment_cls=CalculatorEnvironment,
        endpoint=endpoint,
        tokenizer=tokenizer,
        max_turns=10,
    )
    trained = [token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight > 0]
    text = tokenizer.decode(trained)
    assert "tool_response" not in text
    assert text.startswith("<tool_call>")
    assert text.count("<|im_end|>") == 2
    assert "<tool_response>\n8\n</tool_response>" in sample.response
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.rollout_log_probs)
    assert sample.status is Status.COMPLETED


async def test_the_manager_fills_a_batch(endpoint: Endpoint, tokenizer: Any) -> None:
    """The guide's first example."""
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=CalculatorEnvironment,
        endpoint=endpoint,
        tokenizer=tokenizer,
        max_turns=10,
    )
    config = RolloutConfig(
        batch_size=4,
        n_samples_per_prompt=8,
        over_sampling_factor=1.5,
        generate_fn=generate_fn,
        reward_fn=calc_reward,
        filter_fn=check_reward_nonzero_std,
    )
    data_buffer = DataBuffer(PROMPTS)
    manager = AsyncRolloutManager(config, data_buffer)
    samples = await manager.generate_batch()
    assert len(samples) == 32
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    assert all(check_reward_nonzero_std(samples[start : start + 8]) for start in range(0, 32, 8))


async def test_a_custom_filter_over_lists_of_samples(endpoint: Endpoint, tokenizer: Any) -> None:
    """The guide's second example: a filter with torch that returns a tensor."""
    torch = pytest.importorskip("torch")

    def check_math_quality(samples: list[Sample]) -> bool:
        rewards = [s.reward for s in samples]
        std = torch.tensor(rewards).std()
        max_reward = max(rewards)
        return std > 0.0 and max_reward >= 0.8

    def only_spread(samples: list[Sample]) -> bool:
        return torch.tensor([s.reward for s in samples]).std() > 0.0

    for filter_fn in (check_math_quality, only_spread):
        config = RolloutConfig(
            batch_size=2,
            generate_fn=partial(
                generate_rollout_batch,
                environment_cls=CalculatorEnvironment,
                endpoint=endpoint,
                tokenizer=tokenizer,
                max_turns=10,
            ),
            reward_fn=calc_reward,
            filter_fn=filter_fn,
        )
        manager = AsyncRolloutManager(config, DataBuffer(PROMPTS))
        assert len(await manager.generate_batch()) == 2 * config.n_samples_per_prompt


def test_the_eight_filters_take_a_group_and_return_a_bool() -> None:
    """Every filter of the guide, by name, on samples with the guide's fields."""
    samples = [
        Sample(
            prompt="What is 5+3?",
            response=f"The answer is {n}",
            tokens=[1, 2, 3],
            loss_mask=[0.0, 1.0, 1.0],
            reward=float(n % 2),
            metadata={},
            group_index=0,
            status=Status.COMPLETED,
            rollout_log_probs=[0.0, -0.1, -0.2],
        )
        for n in range(4)
    ]
    for check in (
        check_reward_nonzero_std,
        check_min_reward,
        check_response_diversity,
        check_reasonable_length,
        check_any_success,
        check_quality_and_diversity,
        make_threshold_filter(0.1, 0.9),
        make_length_filter(1, 10),
    ):
        assert check(samples) is True


def test_the_code_of_the_readme_runs(engine_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unchanged, except for the model and the server."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    manager, environment = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    code = manager.replace("Qwen/Qwen2.5-7B-Instruct", str(DEMO_MODEL)).replace("http://127.0.0.1:30000", engine_url)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[")
    names: dict[str, Any] = {}
    exec(compile(environment, "README.md", "exec"), names)
    assert [tool.name for tool in names["Library"]().tools] == ["search"]


async def test_the_environment_of_the_page_is_sound_and_runs(engine_url: str, tmp_path: Path) -> None:
    """``docs/environments.md``: the 15 lines pass the check and fill a batch, and the test below them passes."""
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    file, test = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    lines = [line for line in file.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("from", "CAPITALS"))]) <= 15
    path = tmp_path / "atlas.py"
    path.write_text(file)
    findings = await examine(*load_environment(path, {}), CheckOptions(stall_seconds=2.0))
    assert [finding for finding in findings if finding.verdict == "bad"] == []
    recipe = build(load_recipe(path), Endpoint(model=str(DEMO_MODEL), base_url=engine_url), {})
    async with AsyncRolloutManager(recipe.config, recipe.data_buffer) as manager:
        assert len(await manager.generate_batch()) == 8
    body = "\n".join(f"    {line}" for line in test.splitlines())
    names: dict[str, Any] = {}
    exec(compile(f"{file}\nasync def test():\n{body}", "environments.md", "exec"), names)
    await names["test"]()


async def test_the_own_data_of_the_page_is_played(tokenizer: Any, tmp_path: Path) -> None:
    """``docs/environments.md``: the recipe reads a Parquet file, tools use the row, its filter is the config's."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)[0], "environments.md", "exec"), names)
    row = {"question": "Who wrote it?", "answer": "Ada", "pages": [{"title": "Notes", "text": "written by Ada"}]}
    parquet.write_table(arrow.Table.from_pylist([row] * 2), tmp_path / "train.parquet")
    recipe = names["recipe"](Endpoint(model=str(DEMO_MODEL)), data=tmp_path / "train.parquet")
    calls = [("search", "words", "Ada"), ("read", "title", "Notes")]
    texts = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "{value}"}}}}\n</tool_call>'
        for name, key, value in calls
    ]
    replies = [f"{text}<|im_end|>" for text in (*texts, "The answer is Ada.")]
    policy = ScriptedPolicy([tokenizer.encode(text, add_special_tokens=False) for text in replies])
    (prompt,) = recipe.data_buffer.get_prompts(1)
    (sample,) = await recipe.config.generate_fn([prompt], policy=policy)
    assert [message["content"] for message in sample.messages if message["role"] == "tool"] == [
        "Notes",
        "written by Ada",
    ]
    assert recipe.config.reward_fn(sample) == 1.0
    assert recipe.config.filter_fn is names["useful"]


async def test_the_text_in_the_same_turn_of_the_page_runs(tokenizer: Any) -> None:
    """``docs/environments.md``: the second example answers in the turn of the reply, and its recipe is sound."""
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    code = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)[2]
    names: dict[str, Any] = {}
    exec(compile(code, "environments.md", "exec"), names)
    recipe = names["recipe"](Endpoint(model=str(DEMO_MODEL)))
    texts = ["<search>Ada</search>", "<answer>Ada</answer><|im_end|>"]
    policy = ScriptedPolicy([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    (prompt,) = recipe.data_buffer.get_prompts(1)
    (sample,) = await recipe.config.generate_fn([prompt], policy=policy)
    assert sample.response == f"{texts[0]}\n\n<information>Nothing about Ada.</information>\n\n{texts[1]}"
    assert recipe.config.reward_fn(sample) == 1.0
    assert recipe.endpoint.sampling.stop == ("</search>", "</answer>")


def test_the_code_of_the_page_about_rewards_runs() -> None:
    """``docs/rewards.md``: the code builds the weighted sum."""
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], "rewards.md", "exec"), names)
    assert repr(names["reward_fn"]) == "<WeightedSum 1 * right + 0.2 * polite>"


def test_the_page_about_filters_has_all_with_their_defaults() -> None:
    """``docs/rewards.md``: each filter of the package, and the defaults of its bounds."""
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").partition("## Filters")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", page, flags=re.MULTILINE))
    assert sorted(rows) == sorted(filters.__all__)
    for name, arguments in rows.items():
        parameters = inspect.signature(getattr(filters, name)).parameters.values()
        bounds = [f"={each.default!r}" * name.startswith("check_") for each in parameters if each.name != "samples"]
        names = [each.name for each in parameters if each.name != "samples"]
        given = ["samples"] * name.startswith("check_") + [a + b for a, b in zip(names, bounds, strict=True)]
        assert arguments == ", ".join(given)


def test_the_recipes_of_the_page_about_programs_build(tmp_path: Path) -> None:
    """``docs/programs.md``: a script, Claude Code and an async function; their names are those of the package."""
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8").replace('["/opt/node"]', f"[{str(tmp_path)!r}]")
    names: dict[str, Any] = {
        "Prompt": Prompt,
        "NamespaceSandbox": NamespaceSandbox,
        "RepositoryWorkspace": RepositoryWorkspace,
        "SessionLimits": SessionLimits,
        "TASKS": TASKS,
        "claude_code": claude_code,
        "function_recipe": function_recipe,
        "repository_reward": repository_reward,
    }
    kinds = []
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "programs.md", "exec"), names)
        kinds.append(names["recipe"](Endpoint(model=str(DEMO_MODEL))).config.generate_fn.func.__name__)
    assert kinds == ["generate_program_batch", "generate_program_batch", "generate_function_batch"]


# -- docs/tutorial.md -------------------------------------------------------------------------------------------------

REAL_MODEL, REAL_SERVER = "Qwen/Qwen3-0.6B", "http://127.0.0.1:30000"
SMALL_GSM8K = ("batch_size=1", "n_samples_per_prompt=2", "max_new_tokens=16", "keep=all")
"""Settings of the GSM8K run, which the demo model solves too rarely for groups with spread."""


def steps_of_the_tutorial() -> list[tuple[str, str]]:
    """The snippets (``python``) and the commands (``shell``) of the page in order, also those within a sentence."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    steps = []
    for language, block, inline in re.findall(r"```(\w*)\n(.*?)```|`((?:rollouts |scripts/)[^`]*)`", page, re.DOTALL):
        if language:
            steps.append((language, block))
        else:
            lines = (block or inline).replace("\\\n", " ").splitlines()
            steps += [("shell", line) for line in lines if line.strip()]
    return steps


def check_command(words: list[str]) -> None:
    """Check that a script exists, or that the parser of a verb knows the options."""
    if words[0] != "rollouts":
        assert os.access(ROOT / words[0], os.X_OK), words[0]
        return
    verbs = argparse.ArgumentParser(allow_abbrev=False).add_subparsers()
    importlib.import_module(f"rollouts.commands.{VERBS[words[1]].module}").add(verbs)
    verbs.choices[words[1]].parse_args(words[2:])


def run_command(words: list[str], engine_url: str) -> None:
    """Run a command of the page with the demo model; a run without a server uses the engine of the tests."""
    words = [{REAL_MODEL: str(DEMO_MODEL), REAL_SERVER: engine_url}.get(word, word) for word in words[1:]]
    if words[:2] == ["run", "atlas.py"]:
        words += ["--endpoint", engine_url]
    if words[:2] in (["run", "gsm8k"], ["eval", "gsm8k"]):
        words += [word for setting in SMALL_GSM8K for word in ("--set", setting)]
    assert main(words) == 0, words


def test_the_commands_of_the_tutorial_run(engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``docs/tutorial.md``: every command and snippet in order; those for a real server are checked, not run.

    This takes more than 2 s of CPU: each command works on the files of the one before.
    """
    atlas = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "atlas.py").write_text(atlas[0])
    row = json.dumps({"question": "How many are 2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"})
    for name in ("train", "test"):
        (tmp_path / f"gsm8k_{name}.jsonl").write_text(f"{row}\n" * 2)
    verbs = []
    with contextlib.chdir(tmp_path):
        for language, text in steps_of_the_tutorial():
            if language == "python":
                capsys.readouterr()
                exec(compile(text, "tutorial.md", "exec"), {})
                assert len(capsys.readouterr().out.splitlines()) == 8
                continue
            words = shlex.split(text, comments=True)
            check_command(words)
            if words[0] == "rollouts" and words[1] != "check-server":  # its points have other tests
                run_command(words, engine_url)
                verbs.append(words[1])
        assert Path("atlas.html").stat().st_size > 10_000
        assert len(load_run("runs/atlas")) == 4 * 8
        assert len(load_run("runs/gsm8k")) == 2 * 2
    expected = ["check-env", "run", "show", "view", "check-run", "run", "check-model", "eval", "run", "plan"]
    assert verbs == expected


def test_the_commands_of_the_page_about_chat_apis_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``docs/chat_api.md``: its file and its commands, from a key to a training set, on a stub of the API."""
    page = (ROOT / "docs" / "chat_api.md").read_text(encoding="utf-8")
    file, snippet = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "stock.py").write_text(file)
    exec(compile(snippet, "chat_api.md", "exec"), {"key": "sk-stub"})
    commands = re.findall(r"^rollouts .*", page, re.MULTILINE)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-stub")
    monkeypatch.chdir(tmp_path)
    with start_blocking_portal() as portal:
        stub = ChatServer(count_fruit, model="gpt-4.1-mini")
        with portal.wrap_async_context_manager(stub) as server:
            for command in commands:
                words = shlex.split(command.replace("Qwen/Qwen3-0.6B", str(DEMO_MODEL)))
                check_command(words)
                assert main([*words[1:], *(["--base-url", server.url] if "openai" in words else [])]) == 0
    assert [shlex.split(command)[1] for command in commands] == ["check-env", "eval", "run", "curate"]
    (rows,) = (tmp_path / "data" / "sft" / "data").iterdir()
    account = json.loads((tmp_path / "data" / "sft" / "curation.json").read_text())["account"]
    assert (account["read"], account["written"], rows.stat().st_size > 0) == (12, 6, True), "six are duplicates"


# -- every page -------------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[tuple[list[str], bool]]:
    """The commands of a page that begin with ``rollouts`` or ``scripts/``, and whether each is whole.

    Those within a sentence may name the option that it is about, and leave the rest out.
    """
    found = []
    for language, block, inline in re.findall(
        r"```(\w*)\n(.*?)```|`((?:rollouts |scripts/)[^`\n]*)`", page.read_text(encoding="utf-8"), re.DOTALL
    ):
        if language in ("", "bash", "sh"):
            for line in (block or inline).replace("\\\n", " ").splitlines():
                command = line.partition(" #")[0].partition(" > ")[0].split(" && ")[0]
                if re.match(r"(\w+=\S+ )*(rollouts \S|scripts/)", command):
                    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
                    found.append((words, bool(block) and not {"...", "…"} & set(words)))
    return found


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("training/**/*.md")])
STANDS_FOR_A_RECIPE = {"RECIPE", "FILE", "my_recipe.py", "chess"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """Each script is there, each verb is known, and its parser takes the options."""
    for words, whole in commands_of(page):
        if words[0] != "rollouts":
            assert (ROOT / words[0]).exists(), words
            continue
        verb = words[1]
        if verb.isupper() or verb.startswith("-") or verb == "rate":  # rollouts VERB --help, and a plug-in's verb
            continue
        assert verb in VERBS, words
        if whole and words[2:] != ["--help"]:
            try:
                check_command([dict.fromkeys(STANDS_FOR_A_RECIPE, "calculator").get(word, word) for word in words])
            except SystemExit as error:
                raise AssertionError(f"the parser refuses {shlex.join(words)}") from error
        else:
            verbs = argparse.ArgumentParser(allow_abbrev=False).add_subparsers()
            importlib.import_module(f"rollouts.commands.{VERBS[verb].module}").add(verbs)
            known = verbs.choices[verb]._option_string_actions
            assert [word for word in words[2:] if word.startswith("--") and word not in known] == [], words


# -- docs/slime.md ----------------------------------------------------------------------------------------------------


def blocks_of_the_slime_page(language: str) -> list[str]:
    page = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def flags_of_the_launch() -> dict[str, Any]:
    """The flags of ``launch.sh`` as slime's parser would name them."""
    words = shlex.split(blocks_of_the_slime_page("bash")[0].partition('"${MODEL_ARGS[@]}"')[2])
    flags: dict[str, Any] = {}
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            flags[name] = True if value.startswith("--") else int(value) if value.isdigit() else value
    return flags


class Rows:
    """slime's data source on the file of the page."""

    def __init__(self, path: Path, flags: dict[str, Any]) -> None:
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.flags, self.taken = flags, 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = []
        for _ in range(num_samples):
            row, size = self.rows[self.taken % len(self.rows)], self.flags["n_samples_per_prompt"]
            texts = {"prompt": row[self.flags["input_key"]], "label": row[self.flags["label_key"]]}
            groups.append(
                [records().sample(**texts, group_index=self.taken, index=size * self.taken + i) for i in range(size)]
            )
            self.taken += 1
        return groups


def test_the_launch_of_the_slime_page_fills_a_batch(tmp_path: Path, tokenizer: Any) -> None:
    """``docs/slime.md``: its environment, data, YAML and flags, up to the batch that the trainer gets."""
    file = tmp_path / "atlas.py"
    file.write_text(blocks_of_the_slime_page("python")[0])
    program = runpy.run_path(str(file))
    (tmp_path / "atlas.jsonl").write_text("".join(json.dumps(row) + "\n" for row in program["ROWS"]))
    yaml = blocks_of_the_slime_page("yaml")[0]
    keys = dict(line.split(": ", 1) for line in yaml.splitlines())
    assert keys == {"rollouts_recipe": "/path/to/atlas.py", "rollouts_recipe_options": "{max_turns: 3}"}
    countries, asked = program["CAPITALS"], iter(range(10**6))

    def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
        text = tokenizer.decode(input_ids)
        country = next(name for name in countries if f"capital of {name}?" in text)
        answer = f'<tool_call>\n{{"name": "capital", "arguments": {{"country": "{country}"}}}}\n</tool_call>'
        if "<tool_response>" in text:
            answer = f"The answer is {countries[country] if next(asked) % 3 else 'Rome'}."
        return list(tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False))

    flags = flags_of_the_launch()
    assert len(flags) > 30
    assert load_function(flags["data_source_path"])
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(StubServer(reply=reply)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        args = Namespace(
            **{**flags, "rollout_temperature": 1.0, "hf_checkpoint": str(DEMO_MODEL), "advantage_estimator": "grpo"},
            sglang_router_ip=host,
            sglang_router_port=int(port),
            rollouts_recipe=str(file),
            rollouts_recipe_options={"max_turns": 3},
        )
        source = Rows(tmp_path / "atlas.jsonl", flags)
        try:
            output = load_function(flags["rollout_function_path"])(args, 0, source, evaluation=False)
        finally:
            close_rollouts()
    assert [len(group) for group in output.samples] == [4] * 4
    for group in output.samples:
        assert {sample.reward for sample in group} == {0.0, 1.0}
        for sample in group:
            assert 0 < sum(sample.loss_mask) < sample.response_length == len(sample.rollout_log_probs)
    raw, advantages = load_function(flags["custom_reward_post_process_path"])(args, [*leaves(output.samples)])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-4)
    assert set(raw) == {0.0, 1.0}


def test_the_recipe_of_the_slime_page_runs_on_the_built_in_model(tmp_path: Path) -> None:
    """``rollouts run atlas.py`` of the page fills a batch although that model is never right, and repeats no prompt."""
    file = tmp_path / "atlas.py"
    file.write_text(blocks_of_the_slime_page("python")[0])
    program = runpy.run_path(str(file))
    config = program["recipe"](Endpoint(base_url="http://127.0.0.1:9", model=str(DEMO_MODEL))).config
    assert config.filter_fn is None
    assert config.batch_size <= len(program["ROWS"])


def test_the_slime_page_names_every_package() -> None:
    """Each dependency of the package is installed by its line, or is in slime's image."""
    page = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    in_the_image = ("numpy", "transformers", "jinja2")
    assert [name for name in needed if not name.startswith(in_the_image) and f'"{name}"' not in page] == []


def test_the_comparison_with_slime_names_tests_that_exist() -> None:
    """``SLIME_vs_ROLLOUTS.md``: each row's test or script is there."""
    page = (ROOT / "SLIME_vs_ROLLOUTS.md").read_text(encoding="utf-8")
    file, missing = "", []
    for path, test in re.findall(r"`((?:[\w/]+\.py)?)(?:::)?(test_\w+)?`", page):
        if not path and not test:
            continue
        file = path or file
        places = [ROOT / file, ROOT / "tests/integrations/slime" / file]
        texts = [place.read_text() for place in places if place.is_file()]
        if not path:
            texts += [each.read_text() for each in (ROOT / "tests/integrations/slime").glob("test_*.py")]
        if not texts or (test and not any(f"def {test}(" in text for text in texts)):
            missing.append((file, test))
    assert missing == []
    assert all((ROOT / script).exists() for script in re.findall(r"`(scripts/\w+)", page))


def test_the_page_of_internals_names_files_and_their_lines() -> None:
    """``docs/internals.md``: each part exists, and has at most a quarter more or fewer lines than the page says."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "internals.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## `(.*?)` \((\d+) lines\)", page, flags=re.MULTILINE)
    assert len(parts) >= 7
    for name, lines in parts:
        path = root / "rollouts" / name
        files = [path] if name.endswith(".py") else sorted(path.glob("*.py"))
        found = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert 0.75 * int(lines) <= found <= 1.25 * int(lines), (name, found)


def test_the_guide_is_short_enough_to_read() -> None:
    """The pages for a newcomer (``Guide`` in ``mkdocs.yml``) have at most 8,000 words; all others are reference."""
    nav = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("  - Guide:\n")[2].partition("  - Reference:\n")[0]
    )
    pages = re.findall(r": (\w+\.md)$", nav, flags=re.MULTILINE)
    assert [page.removesuffix(".md") for page in pages] == [
        "tutorial",
        "core",
        "environments",
        "rewards",
        "runs",
        "slime",
        "programs",
    ]
    assert sum(len((ROOT / "docs" / page).read_text(encoding="utf-8").split()) for page in pages) <= 8000
