"""Recipes: loaded from a file, built with options as text, and checked before a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import attrs
import PIL.Image
import pytest

from rollouts.commands import main
from rollouts.dtypes import Endpoint, Image, Limits, Message, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable, EnvironmentFailure
from rollouts.programs import claude_code
from rollouts.programs.recipe import function_recipe, program_recipe
from rollouts.recipe import (
    AllOptions,
    Recipe,
    RecipeOptions,
    agent_recipe,
    check_environment,
    check_recipe,
    preflight,
    recipe_defaults,
)
from rollouts.recipe.files import (
    GENERATE_OPTIONS,
    absolute,
    build,
    built_in,
    load_recipe,
    read_options,
    recipe_options,
    summary_of,
)
from rollouts.recipes.configs.search_r1 import STOP as SEARCH_R1_STOP
from rollouts.renderer import Renderer, RendererOptions, load_tokenizer
from rollouts.sandboxes import ProcessSandbox, SandboxError
from rollouts.seats import Seat
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample, agent_rollout_to_sample, load_run
from rollouts.training.failures import FailurePolicy
from rollouts.training.samplers import PoolSampler
from tests.harbor.folders import write_task

CALCULATOR = Path(__file__).parents[1] / "configs" / "calculator.py"

REQUIRED_OPTIONS = {
    "function_calling": ["data"],
    "geo3k": ["data"],
    "gsm8k": ["data"],
    "openreward": ["config", "data"],
    "retool": ["data"],
}


async def generate(prompts: Sequence[Prompt], **options: Any) -> list[Sample]:
    return [Sample() for _ in prompts]


def a_recipe(**fields: Any) -> Recipe:
    given = {
        "name": "test",
        "config": RolloutConfig(batch_size=1, generate_fn=generate, n_samples_per_prompt=2),
        "data_buffer": DataBuffer(["question"]),
        "endpoint": Endpoint(model=str(DEMO_MODEL)),
        "tokenizer": str(DEMO_MODEL),
        "environment_cls": CalculatorEnvironment,
    }
    return Recipe(**{**given, **fields})


def written(folder: Path, text: str) -> Path:
    path = folder / "some_recipe.py"
    path.write_text(text)
    return path


# -- the file --


def test_the_calculator_is_a_recipe() -> None:
    """The main job's recipe builds with its defaults: 32 groups of 8, half as many again in work."""
    recipe = build(load_recipe(CALCULATOR), Endpoint(model="m"), {})
    config = recipe.config
    assert (config.batch_size, config.n_samples_per_prompt, config.over_sampling_factor) == (32, 8, 1.5)
    assert recipe.endpoint.sampling.temperature == 1.0
    assert len(recipe.data_buffer) >= 200
    assert config.in_flight is None
    assert build(load_recipe(CALCULATOR), Endpoint(model="m"), {"in_flight": "48"}).config.in_flight == 48


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ("The answer is 7.", 1.0),
        ("The answer is 8.", 0.0),
        ("I say: The answer is 7.", 0.0),
        ("The answer is 7. The answer is 7.", 0.0),
        ("", 0.0),
    ],
)
def test_the_calculator_rewards_the_exact_sentence(last: str, reward: float) -> None:
    """Only the whole last reply with the right number scores."""
    reward_fn: Any = build(load_recipe(CALCULATOR), Endpoint(model="m"), {}).config.reward_fn
    assert reward_fn(Sample(label="7", messages=[{"role": "assistant", "content": last}])) == reward
    assert reward_fn(Sample(label="7", messages=[{"role": "tool", "content": "The answer is 7."}])) == 0.0


def test_importing_a_recipe_runs_its_guests_from_the_folder_above(tmp_path: Path) -> None:
    """A recipe in configs/ can import from the folder that contains configs/."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "guest_of_a_recipe.py").write_text("NAME = 'guest'\n")
    path = written(tmp_path / "configs", "from guest_of_a_recipe import NAME\ndef recipe(endpoint): return NAME\n")
    assert load_recipe(path)(None) == "guest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"some_recipe.py, line 2: importing the recipe raised ZeroDivisionError"),
        ("import no_such_module_anywhere\n", r"line 1: .*ModuleNotFoundError: No module named 'no_such_module"),
        ("def recipe(:\n", r"some_recipe.py, line 1: importing the recipe raised SyntaxError"),
        ("raise SystemExit(3)\n", r"line 1: importing the recipe raised SystemExit"),
        ("x = 1\n", r"some_recipe.py: recipe: got None; expected a function recipe\(endpoint"),
        ("recipe = 3\n", r"recipe: got 3; expected a function"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file, the line if there is one, and the expected value."""
    with pytest.raises(ConfigError, match=message):
        load_recipe(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "line"), [("X = 1\nimport no_such_module_anywhere\n", 2), ("X = 1\n\ndef f(:\n", 3), ("1 / 0\n", 1)]
)
def test_an_error_in_an_imported_module_is_named_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    """The recipe's line is the import; the cause has its own file and line."""
    module = f"broken_guest_{line}"
    (tmp_path / f"{module}.py").write_text(text)
    path = written(tmp_path, f"import os\nimport {module}\n")
    with pytest.raises(ConfigError, match=rf"some_recipe.py, line 2, at .*{module}.py, line {line}: importing"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["none.py", "."])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """A missing file and a folder are refused by name; the message lists the built-in recipes."""
    with pytest.raises(ConfigError, match=r"RECIPE: got '.*'; expected an existing .* recipe: calculator"):
        load_recipe(tmp_path / name)


def test_a_built_in_recipe_has_a_name_in_every_folder() -> None:
    """By its name, or by the path of its file, it is the module of the package."""
    assert load_recipe("calculator") is load_recipe(CALCULATOR)
    assert load_recipe("calculator").__module__ == "rollouts.recipes.configs.calculator"
    assert str(absolute("calculator")) == "calculator"
    assert absolute("calculator.py") == Path.cwd() / "calculator.py"


def test_loading_a_built_in_recipe_leaves_the_import_path() -> None:
    """Modules of the package do not become importable as top-level modules."""
    before = list(sys.path)
    load_recipe(CALCULATOR)
    load_recipe("mixed")
    assert sys.path == before


@pytest.mark.parametrize("name", built_in())
def test_each_built_in_recipe_describes_itself(name: str) -> None:
    """Each has a summary and options with defaults; required options are marked."""
    function = load_recipe(name)
    options = {option.name: option for option in recipe_options(function)}
    assert summary_of(function).endswith((".", "trajectories."))
    assert options["seed"].default == 0
    assert [option.name for option in options.values() if option.required] == REQUIRED_OPTIONS.get(name, [])


def test_other_endpoints_are_no_option() -> None:
    """A parameter ``endpoints`` gets those of the launch, none in ``rollouts run``, and is on no command line."""
    seen: list[Any] = []

    def judged(endpoint: Endpoint, *, endpoints: dict[str, Endpoint], count: int = 1) -> Any:
        seen.append(endpoints)
        return load_recipe(CALCULATOR)(endpoint)

    assert [option.name for option in recipe_options(judged)] == ["count"]
    ref = {"ref": Endpoint(model="ref")}
    build(judged, Endpoint(), {})
    build(judged, Endpoint(), {"count": "2"}, ref)
    assert seen == [{}, ref]
    with pytest.raises(ConfigError, match="endpoints"):
        build(judged, Endpoint(), {"endpoints": "{}"})


# -- options --


def function(
    endpoint: Endpoint,
    *,
    data: Path,
    count: int = 1,
    share: float = 0.5,
    flag: bool = False,
    limit: int | None = None,
    kind: Literal["a", "b"] = "a",
    names: tuple[str, ...] = (),
    text: str = "",
    judge: Callable[[], float] | None = None,
) -> Any:
    return a_recipe(name=text or "test")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "12", 12),
        ("share", "2", 2.0),
        ("flag", "true", True),
        ("flag", "0", False),
        ("limit", "7", 7),
        ("limit", "null", None),
        ("kind", "b", "b"),
        ("names", '["x", "y"]', ("x", "y")),
        ("text", "12", "12"),
        ("data", "/a/b", Path("/a/b")),
    ],
)
def test_texts_become_what_the_annotation_says(name: str, text: str, value: Any) -> None:
    """Numbers, flags, None, choices, lists (as JSON), paths and texts."""
    assert read_options(function, {"data": "x", name: text})[name] == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cuont": "1"},
            r"--set: got 'cuont'; expected an option of the recipe .did you mean count\?.: data \(Path\), count",
        ),
        ({"data": "x", "count": "many"}, r"--set count: got 'many'; expected int"),
        ({"data": "x", "count": "1.5"}, r"--set count: got '1.5'; expected int"),
        ({"data": "x", "kind": "c"}, r"--set kind: got 'c'; expected Literal\['a', 'b'\]"),
        ({"data": "x", "judge": "f"}, r"--set judge: got 'f'; expected"),
        ({}, r"--data: got None; expected Path: the recipe needs it"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    """The message names the option, its value, and the expected value."""
    with pytest.raises(ConfigError, match=message):
        read_options(function, options)


def test_data_for_a_recipe_that_makes_its_prompts_are_refused_as_data() -> None:
    """Also if columns of the file are named: the recipe has no option for the file."""
    message = r"--data: got 'a\.parquet'; expected no data: the recipe writes its own prompts, and has no option data"
    with pytest.raises(ConfigError, match=message):
        read_options(load_recipe("calculator"), {"input_key": "question", "data": "a.parquet"})


def test_an_error_in_a_recipe_is_reported() -> None:
    """A recipe function that raises is bad input, with its cause."""

    def broken(endpoint: Endpoint) -> Recipe:
        raise KeyError("column")

    with pytest.raises(
        ConfigError, match=r"recipe broken raised KeyError: 'column' \(.*test_recipe.py, line \d+"
    ) as caught:
        build(broken, Endpoint(), {})
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_recipe_returns_a_recipe() -> None:
    """Anything else is named."""
    with pytest.raises(ConfigError, match=r"the value that the recipe returned: got None; expected a Recipe"):
        build(lambda endpoint: None, Endpoint(), {})  # type: ignore[arg-type,return-value]


# -- the value --


@pytest.mark.parametrize("name", ["name", "config", "data_buffer", "endpoint", "environment_cls", "batches", "seed"])
def test_each_field_is_checked(name: str) -> None:
    """A field of the wrong type is refused by its name."""
    with pytest.raises(ConfigError, match=rf"Recipe\.{name}: got \[\]; expected"):
        a_recipe(**{name: []})


def test_no_secret_is_described() -> None:
    """``run.json`` has neither keys nor a password in a URL, also of an endpoint inside another argument."""
    endpoint = Endpoint(model="m", base_url="http://user:geheim@host:1/x")
    generate_fn = partial(generate, endpoint=endpoint, max_turns=3)
    config = RolloutConfig(batch_size=1, generate_fn=generate_fn, n_samples_per_prompt=2)
    described = a_recipe(endpoint=endpoint, config=config).describe()
    assert described["generate"] == {"max_turns": 3}
    assert described["endpoint"]["base_url"] == ["http://host:1/x"]
    assert "geheim" not in str(described)
    assert "secret" not in str(a_recipe(endpoint=Endpoint(api_key="sk-secret")).describe())
    seats = {"judge": Seat(endpoint=Endpoint(model="other", api_key="sk-secret", admin_key="secret"))}
    bound = RolloutConfig(batch_size=1, generate_fn=partial(generate, seats=seats), n_samples_per_prompt=2)
    described = a_recipe(config=bound).describe()
    assert described["generate"]["seats"]["judge"]["endpoint"]["model"] == "other"
    assert "secret" not in str(described)


# -- before the work --


@pytest.mark.parametrize(
    ("version", "warned"), [("0.5.20", True), ("0.5.22", False), ("0.6.0.dev1", False), ("x", False)]
)
async def test_preflight_warns_of_an_old_server(version: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before 0.5.22 replies and updates lack fields that exact versions and caches need."""
    async with StubServer(model_info={"model_path": "m", "version": version}) as server:
        await preflight(a_recipe(endpoint=Endpoint(base_url=server.url)))
    assert ("the server is SGLang 0.5.20; expected at least 0.5.22" in caplog.text) is warned


async def test_preflight_says_what_the_server_is() -> None:
    """With a sound environment, template and server, preflight returns the server's description."""
    async with StubServer(max_context=512) as server:
        info = await preflight(a_recipe(endpoint=Endpoint(base_url=server.url)))
    assert (info.model, info.max_context) == ("stub", 512)


async def test_no_server_is_found_before_work_starts() -> None:
    """A missing server is reported with its URL."""
    async with StubServer() as server:
        url = server.url
    with pytest.raises(EndpointUnavailable, match=url):
        await preflight(a_recipe(endpoint=Endpoint(base_url=url)))


async def test_a_server_that_is_not_sglang_is_refused() -> None:
    """A server with another protocol is distinguished from a missing one."""
    async with StubServer(model_info=None) as server:
        with pytest.raises(EndpointRefused, match="is not an SGLang server"):
            await preflight(a_recipe(endpoint=Endpoint(base_url=server.url)))


async def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path) -> None:
    """The error names the folder and comes before any request to the server."""
    with pytest.raises(ConfigError, match=r"tokenizer: .*does not load"):
        await preflight(a_recipe(tokenizer=str(tmp_path)))


class NoSteps:
    tools = ()


class Broken(CalculatorEnvironment):
    def __init__(self) -> None:
        raise OSError("no such world")


async def test_an_environment_must_be_one() -> None:
    """An object without the protocol's methods is refused."""
    with pytest.raises(ConfigError, match=r"environment_cls\(\): .* expected an object with tools, start, step"):
        await preflight(a_recipe(environment_cls=NoSteps))


class ClosedAtOnce(CalculatorEnvironment):
    def close(self) -> None:  # type: ignore[override]
        self.closed = True


async def test_the_methods_of_an_environment_may_be_sync() -> None:
    """``close``, as ``start`` and ``step``: an episode calls both kinds, and so does the preflight."""
    assert await check_environment(a_recipe(environment_cls=ClosedAtOnce))


class WrongTools(CalculatorEnvironment):
    closed = 0

    @property
    def tools(self) -> Any:
        return (3,)

    async def close(self) -> None:
        type(self).closed += 1


async def test_an_environment_with_wrong_tools_is_closed() -> None:
    """It may hold a sandbox or a session."""
    with pytest.raises(EnvironmentFailure, match=r"WrongTools\.tools: got 3; expected Tools"):
        await check_environment(a_recipe(environment_cls=WrongTools))
    assert WrongTools.closed == 1


async def test_an_environment_must_be_makeable() -> None:
    """An error while creating it is reported."""
    with pytest.raises(EnvironmentFailure, match=r"Broken\(\) raised OSError: no such world"):
        await preflight(a_recipe(environment_cls=Broken))


async def test_25_limits_that_contradict_max_turns_are_found_before_the_run() -> None:
    """The check before a run names both, and no prompt is taken."""
    bound = partial(generate, limits=Limits(max_turns=3), max_turns=4)
    recipe = a_recipe(config=RolloutConfig(batch_size=1, generate_fn=bound, n_samples_per_prompt=2))
    with pytest.raises(ConfigError, match=r"max_turns: got 4; expected nothing, since limits=.*max_turns=3"):
        await preflight(recipe)
    assert recipe.data_buffer.get_prompts(1)[0].group_index == 0


# -- options of the renderer --

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template with the switch of Qwen3."""
ENDPOINT = Endpoint(model=str(DEMO_MODEL))
WITHOUT_DATA = ("calculator", "calculator_grpo", "countdown", "guess", "mixed", "search", "visual")


def rendered(recipe: Recipe) -> str:
    """The opening of a conversation with the recipe's renderer."""
    renderer = recipe.renderer()
    return renderer.decode(renderer.opening([Message("user", "Hi")]))


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_every_recipe_takes_the_options_of_the_renderer(name: str, tmp_path: Path) -> None:
    """History policy, template, its variables, dialect and stop ids are bound to the generate function."""
    (tmp_path / "chat.jinja").write_text(SWITCHED)
    texts = {
        "history": "fork",
        "template_kwargs": '{"enable_thinking": false}',
        "chat_template": str(tmp_path / "chat.jinja"),
        "dialect": "plain",
        "stop_token_ids": "[3]",
        "special_text": "as_text",
        "calls": "unchecked",
        "images": "false",
    }
    assert texts.keys() == GENERATE_OPTIONS.keys()
    recipe = build(load_recipe(CALCULATOR.with_stem(name)), ENDPOINT, texts)
    bound: Any = recipe.config.generate_fn
    assert bound.keywords["history"] == "fork"
    assert rendered(recipe).endswith("<think>\n\n</think>\n\n")
    assert recipe.renderer().dialect.name == "plain"
    assert recipe.renderer().stop_token_ids == (3,)
    assert bound.keywords["special_text"] == "as_text"
    assert recipe.describe()["generate"]["template_kwargs"] == {"enable_thinking": False}


def test_a_generate_function_that_does_not_take_an_option_is_named() -> None:
    """An option that would have no effect is refused."""
    with pytest.raises(ConfigError, match=r"history: got 'fork'; expected no value: generate_fn .*no_options of the"):
        build(lambda endpoint: a_recipe(config=_config(partial(no_options))), ENDPOINT, {"history": "fork"})
    with pytest.raises(ConfigError, match=r"history: got 'fork'; expected no value: generate_fn generate of the"):
        build(lambda endpoint: a_recipe(), ENDPOINT, {"history": "fork"})


async def no_options(prompts: Sequence[Prompt]) -> list[Sample]:
    return [Sample() for _ in prompts]


def _config(generate_fn: Any) -> RolloutConfig:
    return RolloutConfig(batch_size=1, generate_fn=generate_fn, n_samples_per_prompt=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--template-kwargs", '{"enable_thinkin": false}'],
            "template_kwargs: got 'enable_thinkin'; expected a variable",
        ),
        (["--template-kwargs", "enable_thinking"], "--set template_kwargs: got 'enable_thinking'; expected dict"),
        (["--chat-template", "none.jinja"], "chat_template: got 'none.jinja'; expected a file with a chat template"),
        (["--dialect", "klingon"], "dialect: got 'klingon'"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "run"])
def test_the_command_line_takes_the_options_of_the_renderer(
    verb: str, arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong values are named by ``run`` and ``check`` before anything is sampled."""
    server = ["--endpoint", "http://127.0.0.1:9", "--model", str(DEMO_MODEL)]
    line = [str(CALCULATOR), "--out", str(tmp_path / "run"), *server] if verb == "run" else server[2:]
    assert main([verb, *line, *arguments]) == 2
    assert message in capfd.readouterr().err


async def test_a_renderer_may_stand_for_the_tokenizer() -> None:
    """``preflight`` and the rollouts use it; options that it has already are refused with the remedy."""
    renderer = Renderer(load_tokenizer(DEMO_MODEL), chat_template=SWITCHED, dialect="plain")
    async with StubServer() as server:
        endpoint = Endpoint(model=str(DEMO_MODEL), base_url=server.url)
        recipe = agent_recipe("mine", endpoint, CalculatorEnvironment, ["Hi"], tokenizer=renderer)
        for given in (recipe, a_recipe(endpoint=endpoint, tokenizer=renderer)):
            await preflight(given)
            assert given.renderer() is renderer
            assert given.describe()["tokenizer"] == str(DEMO_MODEL)
    twice = recipe.with_options(template_kwargs={"enable_thinking": False})
    with pytest.raises(
        ConfigError, match=r"template_kwargs: .*; expected no value: the renderer .* has options already"
    ):
        await preflight(twice)


def test_the_sampling_of_a_recipe_is_changed_where_it_is_used() -> None:
    """In the endpoint of the generate function and in that of the recipe; the original recipe stays."""
    recipe = build(load_recipe(CALCULATOR), Endpoint(), {})
    greedy = recipe.with_sampling(temperature=0.0)
    assert greedy.endpoint == greedy.bound["endpoint"]
    assert greedy.endpoint.sampling.temperature == 0
    assert greedy.endpoint.sampling.max_new_tokens == recipe.endpoint.sampling.max_new_tokens
    assert recipe.endpoint.sampling.temperature == recipe.bound["endpoint"].sampling.temperature == 1
    with pytest.raises(ConfigError, match=r"generate_fn: got .* that is bound to an Endpoint"):
        a_recipe().with_sampling(temperature=0.0)


async def test_a_prompt_may_set_variables_of_the_template() -> None:
    """Its metadata overrides the variables of the run, for this prompt only."""
    prompts = [Prompt("Hi"), Prompt("Hi", metadata={"template_kwargs": {"enable_thinking": False}})]
    policy = ScriptedPolicy([[5], [5]])
    for prompt in prompts:
        await agent_rollout_to_sample(
            prompt,
            environment_cls=CalculatorEnvironment,
            endpoint=ENDPOINT,
            tokenizer=str(DEMO_MODEL),
            policy=policy,
            max_turns=1,
            chat_template=SWITCHED,
            dialect="plain",
            template_kwargs={"enable_thinking": True},
        )
    plain, quick = [load_tokenizer(DEMO_MODEL).decode(request.tolist()) for request in policy.requests]
    assert quick == f"{plain}<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"enable_thinkin": False}, r"template_kwargs: got 'enable_thinkin'; expected a variable .*: enable_thinking"),
        ("no", r"Prompt.metadata\['template_kwargs'\]: got 'no'; expected a mapping of variables of the template"),
    ],
)
async def test_wrong_variables_of_a_prompt_are_found_before_the_run(own: Any, message: str) -> None:
    """``preflight`` looks at the metadata of all prompts."""
    prompts = [Prompt("Hi"), Prompt("Ho", metadata={"template_kwargs": own})]
    options: dict[str, Any] = {"chat_template": SWITCHED, "dialect": "plain"}
    with pytest.raises(ConfigError, match=message):
        await preflight(agent_recipe("mine", ENDPOINT, CalculatorEnvironment, prompts, **options))


@pytest.mark.parametrize("name", ["repositories", "retool", "search_r1"])
def test_a_recipe_for_asynchronous_training_keeps_its_slots_busy(name: str) -> None:
    """At its defaults at least a batch of rollouts runs, and the open groups have more rollouts than may run."""
    defaults = {option.name: option.default for option in recipe_options(load_recipe(name))}
    batch = defaults["batch_size"] * defaults["n_samples_per_prompt"]
    assert batch <= defaults["in_flight"] < batch * defaults["over_sampling_factor"]


def test_the_options_of_a_typed_dict_are_listed_with_the_defaults_of_the_recipe() -> None:
    """``**options: Unpack[RecipeOptions]`` is each of them, with its type and the default that the recipe gives it."""

    @recipe_defaults(batch_size=3)
    def mine(endpoint: Endpoint, *, count: int = 1, **options: Unpack[RecipeOptions]) -> Recipe:
        """Mine."""
        return agent_recipe("mine", endpoint, CalculatorEnvironment, ["Hi"] * count, **options)

    listed = {option.name: (option.kind_name, option.default) for option in recipe_options(mine)}
    assert list(listed) == ["count", *RecipeOptions.__annotations__]
    assert listed["batch_size"] == ("int", 3)
    assert listed["n_samples_per_prompt"] == ("int", 8)
    assert listed["epochs"] == ("int | null", None)
    recipe = build(mine, Endpoint(model="m"), {"n_samples_per_prompt": "2", "keep": "all", "history": "error"})
    assert (recipe.config.batch_size, recipe.config.n_samples_per_prompt, recipe.config.filter_fn) == (3, 2, None)
    assert recipe.bound["history"] == "error"
    with pytest.raises(ConfigError, match=r"--set batch_size: got 'many'; expected int"):
        build(mine, Endpoint(model="m"), {"batch_size": "many"})
    with pytest.raises(ConfigError, match=r"--set epochs: got 'None'; expected int \| null"):
        build(mine, Endpoint(model="m"), {"epochs": "None"})
    with pytest.raises(
        ConfigError,
        match=r"--set: got 'bacth'; expected an option of the recipe .did you mean batches\?.: count \(int\), batch",
    ):
        build(mine, Endpoint(model="m"), {"bacth": "1"})


# -- agent_recipe --


def test_the_typed_options_are_the_fields_that_they_set() -> None:
    """A field that is added to the config, the sampling or the renderer is an option that type checkers know."""
    fields = {field.name for kind in (RolloutConfig, SamplingParams) for field in attrs.fields(kind)}
    others = {"keep", "history", "epochs", "batches", "shuffled", "tokenizer"}
    others |= {"sampler", "sampler_runs", "prompt_sampler", "lora"}
    expected = (fields - {"generate_fn"}) | RendererOptions.__annotations__.keys() | others
    assert AllOptions.__annotations__.keys() == expected


def test_the_usual_recipe_takes_every_field_of_the_config() -> None:
    """Filter, group reward, failure policies, limits, patience and sampling need no second step."""

    def keeps(samples: Sequence[Sample]) -> bool:
        return True

    def scores(samples: Sequence[Sample]) -> list[float]:
        return [0.0] * len(samples)

    failures = {"environment_step": FailurePolicy(attempts=3)}
    recipe = agent_recipe(
        "mine",
        ENDPOINT,
        CalculatorEnvironment,
        ["Hi"],
        reward_fn=scores,
        group_rm=True,
        filter_fn=keeps,
        failures=failures,
        patience=5,
        limits=Limits(max_turns=3, max_tool_calls=2),
        top_p=0.9,
        stop="\n",
    )
    config = recipe.config
    assert (config.filter_fn, config.reward_fn, config.group_rm, config.patience) == (keeps, scores, True, 5)
    assert config.failures == failures
    assert (recipe.endpoint.sampling.top_p, recipe.endpoint.sampling.stop) == (0.9, ("\n",))
    bound: Any = config.generate_fn
    assert bound.keywords["limits"] == Limits(max_turns=3, max_tool_calls=2)
    assert "max_turns" not in bound.keywords


OF_ENDPOINT: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "max_new_tokens": 33,
    "stop": ("END",),
    "seed": 11,
    "min_new_tokens": 2,
    "repetition_penalty": 1.1,
    "json_schema": '{"type": "object"}',
}
"""A value for each sampling parameter that is neither its default nor that of a recipe."""
NAMED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.2,
    "max_new_tokens": 44,
    "stop": ("STOP",),
    "seed": 12,
    "min_new_tokens": 3,
    "repetition_penalty": 1.2,
    "json_schema": '{"type": "array"}',
}
"""Another value for each."""


async def answer(client: Any, prompt: Prompt) -> float:
    return 0.0


RECIPE_FUNCTIONS: dict[str, Callable[..., Recipe]] = {
    "agent": lambda endpoint, **options: agent_recipe("mine", endpoint, CalculatorEnvironment, ["Hi"], **options),
    "program": lambda endpoint, **options: program_recipe(
        "mine", endpoint, claude_code, ["Hi"], sandbox=ProcessSandbox(), **options
    ),
    "function": lambda endpoint, **options: function_recipe("mine", endpoint, answer, ["Hi"], **options),
}


def test_each_sampling_parameter_has_a_value_that_is_not_its_default() -> None:
    """The tests below would not notice that a parameter is dropped if its value were the default."""
    others = {"regex", "ebnf", "structural_tag"}  # at most one constraint may be given
    for values in (OF_ENDPOINT, NAMED):
        fields = [field for field in attrs.fields(SamplingParams) if field.name not in others]
        assert {field.name for field in fields if values[field.name] != field.default} == values.keys()
    assert all(OF_ENDPOINT[name] != value for name, value in NAMED.items())


@pytest.mark.parametrize("function", RECIPE_FUNCTIONS)
def test_a_recipe_keeps_the_sampling_of_its_endpoint(function: str) -> None:
    """In the recipe's endpoint and in that of its generate function."""
    endpoint = Endpoint(model="m", sampling=SamplingParams(**OF_ENDPOINT))
    recipe = RECIPE_FUNCTIONS[function](endpoint)
    assert recipe.endpoint == recipe.bound["endpoint"] == endpoint


@pytest.mark.parametrize("function", RECIPE_FUNCTIONS)
@pytest.mark.parametrize("name", NAMED)
def test_a_named_option_replaces_that_sampling_parameter_of_the_endpoint(name: str, function: str) -> None:
    """No other parameter changes."""
    endpoint = Endpoint(model="m", sampling=SamplingParams(**OF_ENDPOINT))
    recipe = RECIPE_FUNCTIONS[function](endpoint, **{name: NAMED[name]})
    assert recipe.endpoint.sampling == recipe.bound["endpoint"].sampling
    assert recipe.endpoint.sampling == SamplingParams(**{**OF_ENDPOINT, name: NAMED[name]})


@pytest.mark.parametrize("function", RECIPE_FUNCTIONS)
def test_the_sampling_of_a_recipe_has_the_usual_defaults(function: str) -> None:
    """Without parameters of the endpoint and without options; the replies are seeded."""
    recipe = RECIPE_FUNCTIONS[function](Endpoint(model="m"))
    assert recipe.endpoint.sampling == SamplingParams(seed=0)
    assert (recipe.seed, recipe.data_buffer.seed) == (0, 0)


def test_the_seed_of_a_recipe_is_that_of_its_data_and_of_its_replies() -> None:
    """A seed of the endpoint is that of replies only."""
    endpoint = Endpoint(model="m", sampling=SamplingParams(seed=11))
    recipe = agent_recipe("mine", endpoint, CalculatorEnvironment, ["Hi"])
    assert (recipe.endpoint.sampling.seed, recipe.seed, recipe.data_buffer.seed) == (11, 0, 0)
    recipe = agent_recipe("mine", endpoint, CalculatorEnvironment, ["Hi"], seed=5)
    assert (recipe.endpoint.sampling.seed, recipe.seed, recipe.data_buffer.seed) == (5, 5, 5)


DATA = {
    "function_calling": "datasets/bfcl_simple_python.jsonl",
    "gsm8k": "datasets/gsm8k_test.jsonl",
    "retool": "datasets/math500.jsonl",
}
SETTINGS = "environments: {sums: {splits: [train], base_url: 'http://127.0.0.1:9', max_turns: 4}}"
GEO3K = {"images": [Image.of(PIL.Image.new("RGB", (4, 3))).url], "problem": "<image>Compare.", "answer": 5}


@pytest.mark.parametrize("name", built_in())
def test_each_built_in_recipe_keeps_the_sampling_of_its_endpoint(
    name: str, asset: Callable[[str], Path], tmp_path: Path
) -> None:
    """Except for the parameters that are options of the recipe, and the stop strings of its environment."""
    pytest.importorskip({"search": "bm25s", "search_r1": "bm25s"}.get(name, "rollouts"))
    function = load_recipe(name)
    of_recipe = {option.name for option in recipe_options(function)}
    options: dict[str, Any] = {option: value for option, value in NAMED.items() if option in of_recipe}
    if name in DATA:
        options |= {"data": asset(DATA[name]), "limit": 3}
    elif name in ("geo3k", "openreward"):
        row = GEO3K if name == "geo3k" else {"prompt": "x", "metadata": {"env_name": "sums"}}
        options["data"] = tmp_path / "rows.jsonl"
        options["data"].write_text(json.dumps(row))
    if name == "openreward":
        options["config"] = tmp_path / "config.yaml"
        options["config"].write_text(SETTINGS)
    if name == "harbor":
        task = write_task(tmp_path / "task")
        options |= {"data": task, "program": "claude_code", "grade": "keep", "root": str(tmp_path)}
    recipe = function(Endpoint(model="m", sampling=SamplingParams(**OF_ENDPOINT)), **options)
    expected = {key: options.get(key, value) for key, value in OF_ENDPOINT.items()}
    if name == "search_r1":
        expected["stop"] = SEARCH_R1_STOP
    assert recipe.endpoint.sampling == recipe.bound["endpoint"].sampling == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"patince": 3},
            r"agent_recipe.patince.: got 3; expected an option .did you mean patience.*max_turns, .*reward_fn.*top_p",
        ),
        ({"generate_fn": generate}, r"agent_recipe\(generate_fn\): got"),
        ({"keep": "all", "filter_fn": bool}, r"keep: got 'all'; expected none with filter_fn"),
        ({"keep": "some"}, r"keep: got 'some'; expected \"spread\" or \"all\""),
        ({"sampler": "some"}, r"sampler: got 'some'; expected \"uniform\", \"pass_rate\", \"pools\" or \"levels\""),
        (
            {"sampler": "pools", "prompt_sampler": PoolSampler()},
            r"sampler: got 'pools'; expected none with prompt_sampler",
        ),
        (
            {"sampler_runs": ("runs/a",)},
            r"sampler_runs: got \('runs/a',\); expected none without sampler=\"pass_rate\"",
        ),
        (
            {"sampler": "pass_rate", "n_samples_per_prompt": 1, "keep": "all"},
            r"PassRateSampler\.n: got 1; expected an integer >= 2",
        ),
        ({"sampler": "levels"}, r"prompts\[0\]\.metadata\['level'\]: got None; expected a number"),
        ({"group_rm": True}, r"RolloutConfig.reward_fn: got None; expected a function of the group"),
        ({"temperature": -1}, r"SamplingParams.temperature: got -1; expected a number >= 0"),
        ({"patience": 0}, r"RolloutConfig.patience: got 0; expected an integer >= 1"),
    ],
)
def test_wrong_arguments_of_the_usual_recipe_are_named(options: dict[str, Any], message: str) -> None:
    """An unknown name lists the known ones, and contradictions are refused."""
    with pytest.raises(ConfigError, match=message):
        agent_recipe("mine", ENDPOINT, CalculatorEnvironment, ["Hi"], **options)


def test_a_sampler_is_an_option_of_every_recipe(tmp_path: Path) -> None:
    """By name, with the size of a group and the seed of the run; the run describes it with its numbers."""
    mine = load_recipe("calculator")
    recipe = build(mine, Endpoint(model="m"), {"sampler": "pass_rate", "n_samples_per_prompt": "4", "seed": "3"})
    described = recipe.describe()["sampler"]
    assert (described["name"], described["n"]) == ("PassRateSampler", 4)
    plain = build(mine, Endpoint(model="m"), {"seed": "3"})
    assert plain.describe()["sampler"] is None
    assert plain.data_buffer.fingerprint == recipe.data_buffer.fingerprint
    count = len(plain.data_buffer)
    assert plain.data_buffer.get_prompts(count) == recipe.data_buffer.get_prompts(count), "nothing is known yet"
    pools = agent_recipe("mine", ENDPOINT, CalculatorEnvironment, ["Hi"], prompt_sampler=PoolSampler(hard=0.1))
    assert pools.describe()["sampler"]["hard"] == 0.1
    with pytest.raises(ConfigError, match=r"run\.json"):
        build(mine, Endpoint(model="m"), {"sampler": "pass_rate", "sampler_runs": f'["{tmp_path}"]'})


def test_a_sampler_is_refused_where_others_choose_the_prompts() -> None:
    """By its name and that of the chooser."""
    recipe = agent_recipe("mine", ENDPOINT, CalculatorEnvironment, ["Hi"], sampler="pools")
    with pytest.raises(ConfigError, match=r"sampler: got 'PoolSampler'; expected \"uniform\": the trainer chooses"):
        recipe.refuse_sampler("the trainer")


async def test_preflight_refuses_a_prompt_with_an_image_for_a_model_of_text() -> None:
    """Of all prompts, not of the first alone, and before the server is asked."""
    prompt = Prompt([Message("user", [Image.of(PIL.Image.new("RGB", (4, 4))), "What?"])])
    with pytest.raises(ConfigError, match=r"content of a user message: got <Image 4x4 .* has no images"):
        await preflight(a_recipe(data_buffer=DataBuffer(["question", prompt])))


async def test_preflight_loads_the_processor_and_refuses_servers_without_images() -> None:
    """``images=True`` of the recipe; vLLM's requests have no images, which is an error before the server is asked."""
    prompts = [Prompt([Message("user", [Image.of(PIL.Image.new("RGB", (4, 4))), "What?"])])]
    endpoint = Endpoint(model=str(DEMO_MODEL), provider="vllm")
    recipe = agent_recipe("mine", endpoint, CalculatorEnvironment, prompts, images=True)
    assert (await check_recipe(recipe)).images is not None
    with pytest.raises(ConfigError, match=r"images: got <VLLMPolicy .*expected none: requests of this policy"):
        await preflight(recipe)


# -- programs ---------------------------------------------------------------------------------------------------------


def test_the_program_recipes_build_and_are_described() -> None:
    """A recipe of a program has no environment, says so in run.json, and takes the options of every recipe."""
    built = build(load_recipe("calculator_program"), Endpoint(model=str(DEMO_MODEL)), {"history": "fork"})
    assert (built.environment_cls, built.describe()["environment"]) == (None, None)
    assert built.bound["history"] == "fork"
    assert built.describe()["generate"]["program"] == "script"
    repositories = build(load_recipe("repositories"), Endpoint(model="m"), {"program": "codex"})
    described = repositories.describe()["generate"]
    assert (described["program"], described["workspace"]["tasks"]) == ("codex", "10 tasks")
    assert described["limits"]["max_calls"] == 60
    assert len(repositories.data_buffer) == 10
    with pytest.raises(ConfigError, match="serve-env: recipe calculator_program has no environment; its agents are"):
        built.environment_for("serve-env")


def test_an_unknown_option_of_a_program_recipe_is_named() -> None:
    """The message has the options of a program and the options of every recipe."""
    with pytest.raises(
        ConfigError, match=r"^program_recipe\(max_turns\): got 3; expected an option .*sandbox.*batch_size"
    ):
        program_recipe("x", Endpoint(model="m"), claude_code, ["a"], sandbox=ProcessSandbox(), max_turns=3)


async def test_the_preflight_of_a_program_opens_its_sandbox_and_tries_every_launch() -> None:
    """A defect that would fail every rollout is refused before a prompt is taken."""

    class NoSandbox(ProcessSandbox):
        async def open(self) -> Any:
            raise SandboxError("planted")

    endpoint = Endpoint(model=str(DEMO_MODEL))
    with pytest.raises(ConfigError, match=r"^task: got '--help'"):
        await check_recipe(program_recipe("x", endpoint, claude_code, ["a", "--help"], sandbox=ProcessSandbox()))
    with pytest.raises(EnvironmentFailure, match=r"NoSandbox\.open raised SandboxError: planted"):
        await check_recipe(program_recipe("x", endpoint, claude_code, ["a"], sandbox=NoSandbox()))
    await check_recipe(program_recipe("x", endpoint, claude_code, ["a"], sandbox=ProcessSandbox()))


@pytest.mark.parametrize("agent_is", ["script", "function"])
def test_a_run_of_programs_is_stored_and_verified(agent_is: str, engine_url: str, tmp_path: Path) -> None:
    """``rollouts run`` with a process for each rollout, and with a function: the run holds every law."""
    if agent_is == "function":
        pytest.importorskip("openai")
    sizes = ["batch_size=1", "n_samples_per_prompt=2", f"agent_is={agent_is}"]
    options = [word for size in sizes for word in ("--set", size)]
    assert main(["run", "calculator_program", "--endpoint", engine_url, "--out", str(tmp_path / "run"), *options]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0
    samples = load_run(tmp_path / "run")
    assert len(samples) == 2
    assert all(sample.metrics["calls"] >= 1 for sample in samples)


def test_a_rollout_of_a_program_is_played(engine_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``rollouts play`` prints it at its end: its calls are a tree."""
    assert main(["play", "calculator_program", "--endpoint", engine_url]) == 0
    assert "completed (task_completed)" in capsys.readouterr().out


def test_a_recording_needs_an_environment(engine_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program receives more from outside than a recording has: the run is refused before it begins."""
    line = ["run", "calculator_program", "--endpoint", engine_url, "--out", str(tmp_path / "run"), "--record"]
    assert main(line) == 2
    assert "--record: recipe calculator_program has no environment" in capsys.readouterr().err
