"""The effect of a launch and its recipe on a rollout: seeds, text, the recipe's filter, and the first tests."""

from __future__ import annotations

import asyncio
import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.dtypes import Endpoint, Prompt, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError, EnvironmentFailure, FilterFailure, GenerateFailure
from rollouts.inference.base import CompletionRequest
from rollouts.inference.shared import shared_policy
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.single_turn import codec_of, generate_single_turn, prompt_ids
from rollouts.recipe import Recipe, agent_recipe
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from rollouts.training import Sample, check_reward_nonzero_std
from tests.integrations.slime.launches import DEFAULT, Launch, Source, made_sample
from tests.integrations.slime.launches import recipe as launch_recipe
from tests.integrations.slime.test_evaluation import data_set
from tests.integrations.slime.test_returned_samples import filled, plain_args

Serve = Callable[..., StubServer]


def single_turn(stub: StubServer, **overrides: Any) -> Namespace:
    """A launch of one reply for each prompt."""
    host, port = stub.url.removeprefix("http://").split(":")
    values = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port)}
    values |= {"custom_generate_function_path": None, "custom_rm_path": f"{__name__}.one"}
    return plain_args("", **{**values, **overrides})


async def one(args: Any, sample: Any, **_: Any) -> float:
    return 1.0


def test_a_tokenizer_is_loaded_and_a_prompt_encoded_once(serve: Serve) -> None:
    """The rollouts of a launch start together: they share one tokenizer, and those of a group the ids of its prompt."""
    codec_of.cache_clear()
    prompt_ids.cache_clear()
    args = single_turn(stub := serve(), n_samples_per_prompt=4)
    generate_rollout_batch(args, 0, Source(4))
    assert codec_of.cache_info().misses == 1
    codec, _ = codec_of(str(DEMO_MODEL))
    prompts = {tuple(request.input_ids) for request in stub.requests}
    assert codec.encoded_tokens == sum(map(len, prompts))


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_siblings_have_seeds_of_their_own(serve: Serve, tmp_path: Path) -> None:
    """With deterministic inference each rollout of a prompt has the next seed; without one, all would be the same."""
    stub = serve()
    flags = {"sglang_enable_deterministic_inference": True, "rollout_seed": 100, "n_samples_per_prompt": 3}
    sets = [data_set(tmp_path, "one", 2, n_samples_per_eval_prompt=2)]
    args = single_turn(stub, **flags, eval_datasets=sets)
    generate_rollout_batch(args, 0, Source(3))
    assert sorted(request.sampling_params["sampling_seed"] for request in stub.requests) == [
        100,
        100,
        101,
        101,
        102,
        102,
    ]
    stub.requests.clear()
    generate_rollout_batch(args, 0, Source(3), evaluation=True)
    assert sorted(request.sampling_params["sampling_seed"] for request in stub.requests) == [100, 100, 101, 101]


async def notes_seed(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append((sample.index, sampling_params.get("sampling_seed")))
    return filled(sample, reward=1.0)


def test_a_custom_function_gets_the_seed() -> None:
    """Under slime's name, and only with deterministic inference."""
    path = f"{__name__}.notes_seed"
    args = plain_args("", custom_generate_function_path=path, sglang_enable_deterministic_inference=True)
    generate_rollout_batch(args, 0, Source(2))
    assert sorted(args.calls) == [(0, 42), (1, 43), (2, 42), (3, 43)]
    args = plain_args("", custom_generate_function_path=path)
    generate_rollout_batch(args, 0, Source(2))
    assert {seed for _, seed in args.calls} == {None}


# -- deadlines and patience --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollouts_request_seconds": 0.05}, r"POST .* 0\.05 s"),
        ({"rollouts_rollout_seconds": 0.05}, r"generate_fn .* 0\.05 s"),
    ],
)
def test_a_launch_may_set_its_deadlines(serve: Serve, flags: dict[str, Any], message: str) -> None:
    """Of one request, and of an attempt at a rollout."""
    args = single_turn(serve(latency=never), rollouts_max_attempts=1, **flags)
    with pytest.raises(GenerateFailure, match=message):
        generate_rollout_batch(args, 0, Source(2))


async def never(request: Request) -> None:
    await anyio.sleep_forever()


async def judged_late(args: Any, sample: Any, **_: Any) -> float:
    await anyio.sleep_forever()
    return 1.0


@pytest.mark.parametrize("recipe", [False, True], ids=["single turn", "recipe"])
def test_a_launch_may_set_the_deadline_of_its_reward(serve: Serve, recipe: bool) -> None:
    """Without a recipe, and in place of the recipe's."""
    flags = {"custom_rm_path": f"{__name__}.judged_late", "rollouts_reward_seconds": 0.05, "rollouts_max_attempts": 1}
    args = Launch().args(**flags) if recipe else single_turn(serve(), **flags)
    with pytest.raises(GenerateFailure, match=r"reward .* 0\.05 s"):
        generate_rollout_batch(args, 0, Source(2))


def drops_all(args: Any, samples: list[Any], **_: Any) -> bool:
    return False


def test_a_launch_may_set_its_patience(serve: Serve) -> None:
    """slime's own function never gives up on a filter; this one says so after a number of groups that can be set."""
    path = f"{__name__}.drops_all"
    args = single_turn(serve(), dynamic_sampling_filter_path=path, rollouts_patience=3, over_sampling_batch_size=2)
    with pytest.raises(FilterFailure, match=r"accepted none of the last [34] groups"):
        generate_rollout_batch(args, 0, Source(2))


# -- text and images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
def test_the_response_may_leave_out_special_tokens(serve: Serve, skip: bool) -> None:
    """``--rollout-skip-special-tokens`` concerns the text for slime's functions; the tokens stay."""
    codec = Codec(load_tokenizer(DEMO_MODEL))
    ids = codec.encode("The answer is 3.<|im_end|>").tolist()
    args = single_turn(serve(reply=lambda input_ids, params: ids), rollout_skip_special_tokens=skip)
    for sample in leaves(generate_rollout_batch(args, 0, Source(2)).samples):
        assert sample.tokens[-len(ids) :] == ids
        assert sample.response == ("The answer is 3." if skip else "The answer is 3.<|im_end|>")


async def test_a_text_has_the_temperature_of_its_completion() -> None:
    """As a conversation has it: trainers divide logits by it."""
    sampling, endpoint = SamplingParams(temperature=0.7), Endpoint(model=str(DEMO_MODEL))
    policy = ScriptedPolicy([[5, 6]])
    sample = await generate_single_turn(Prompt("2 + 1 ="), policy=policy, endpoint=endpoint, sampling=sampling)
    assert [one.temperature for one in sample.completions] == [0.7]


def test_a_reply_of_another_temperature_is_refused() -> None:
    """slime divides logits by ``--rollout-temperature``; a recipe's own function may sample at another one."""

    async def play(prompt: Prompt) -> list[Sample]:
        sample = made_sample(prompt)
        tempered = [attrs.evolve(one, temperature=0.7) for one in sample.completions]
        return [attrs.evolve(sample, completions=tempered)]

    launch = Launch(play=play)
    with pytest.raises(GenerateFailure, match=r"temperature: got 0\.7; expected 1, by which slime divides logits"):
        generate_rollout_batch(launch.args(rollouts_max_attempts=1), 0, launch.source())
    assert generate_rollout_batch(launch.args(rollout_temperature=0.7), 0, launch.source()).samples


class Pictures(Source):
    """Prompts with media, without a flag of the launch that says so."""

    def __init__(self, media: dict[str, Any] | None) -> None:
        super().__init__(2)
        self.media = media

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.multimodal_inputs = self.media
        return groups


@pytest.mark.parametrize(
    ("recipe", "media", "message"),
    [
        (False, {"images": None, "videos": ["raw"]}, r"multimodal_inputs: got \['videos'\]; expected images only"),
        (True, {"images": ["raw"], "videos": None}, r"prompt: got 'prompt 0'; expected messages with its images"),
    ],
)
def test_media_that_are_not_shown_are_refused(serve: Serve, recipe: bool, media: Any, message: str) -> None:
    """A rollout of the text alone would train on another prompt; no request is sent."""
    stub = serve()
    args = Launch().args() if recipe else single_turn(stub)
    with pytest.raises(ConfigError, match=message):
        generate_rollout_batch(args, 0, Pictures(media))
    assert stub.requests == []


def test_a_model_with_a_processor_may_play_text(serve: Serve) -> None:
    """slime sets the field on every prompt of such a model, without a value."""
    for media in (None, {}, {"images": None, "videos": None}):
        assert generate_rollout_batch(single_turn(serve()), 0, Pictures(media)).samples


class WithIds(Pictures):
    """Samples that bring ids: those of their prompts, or with media also a response of one."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.tokens, sample.response_length = [5, 6, 7], int(self.media is not None)
        return groups


@pytest.mark.parametrize(
    ("recipe", "media", "expected"),
    [
        (True, None, "nothing with a recipe, which renders the prompt itself"),
        (False, {"images": ["raw"]}, "no response with images: slime sends the text of the prompt alone"),
    ],
)
def test_ids_of_samples_that_are_not_sent_are_refused(serve: Serve, recipe: bool, media: Any, expected: str) -> None:
    """A rollout of other ids would train on another prompt; no request is sent."""
    stub = serve()
    args = Launch().args() if recipe else single_turn(stub)
    with pytest.raises(ConfigError, match=rf"slime sample \d\.tokens: got '3 ids'; expected {expected}"):
        generate_rollout_batch(args, 0, WithIds(media))
    assert stub.requests == []


class WithFunctions(Source):
    """Samples that name a generate function, as rows of several tasks do."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.generate_function_path = f"{__name__}.fails"
        return groups


@pytest.mark.parametrize(
    ("source", "flags", "named"),
    [
        (WithFunctions, {}, r"slime sample \d\.generate_function_path"),
        (Source, {"custom_generate_function_path": f"{__name__}.fails"}, r"args\.custom_generate_function_path"),
        (
            Source,
            {"eval_datasets": [Namespace(name="one", path="", custom_generate_function_path=f"{__name__}.fails")]},
            r"eval data set one\.custom_generate_function_path",
        ),
    ],
    ids=["sample", "launch", "data set"],
)
def test_a_generate_function_is_refused_with_a_recipe(source: Any, flags: dict[str, Any], named: str) -> None:
    """Either would have to be ignored: of a sample, of the launch, or of a data set of its evaluation."""
    launch = Launch()
    with pytest.raises(ConfigError, match=rf"{named}: .* expected none with a recipe"):
        generate_rollout_batch(launch.args(**flags), 0, source(launch.n))
    assert not launch.played


def test_ids_of_samples_need_slimes_own_function(serve: Serve) -> None:
    """It continues them; where slime is not installed, they are refused before a request."""
    if records().is_slime:
        pytest.skip("slime is installed")
    stub = serve()
    with pytest.raises(ConfigError, match=r"slime sample \d\.tokens: got '3 ids'; expected nothing without slime"):
        generate_rollout_batch(single_turn(stub), 0, WithIds(None))
    assert stub.requests == []


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_a_recipes_filter_acts_only_where_the_launch_asks_for_it() -> None:
    """A launch without a dynamic filter trains every group, as in slime."""
    launch = Launch(batch_size=2, n=2, reward=lambda sample: 0.0, filter_fn=check_reward_nonzero_std)
    output = generate_rollout_batch(launch.args(**DEFAULT), 0, launch.source())
    assert [group[0].group_index for group in output.samples] == [0, 1]
    assert launch.played.total() == 4


def with_tools(endpoint: Endpoint, *, dialect: str = "", max_turns: int = 4) -> Recipe:
    """Agents with a tool."""
    return agent_recipe(
        "tools",
        endpoint,
        CalculatorEnvironment,
        ["p"],
        max_turns=max_turns,
        **({"dialect": dialect} if dialect else {}),
    )


JUDGED: dict[str, Any] = {}
"""The recipe's other endpoints, and how its launch plays."""


def with_judge(endpoint: Endpoint, *, endpoints: dict[str, Endpoint], name: str) -> Recipe:
    """Rewards that ask another model."""
    JUDGED.update(endpoints)

    async def reward(sample: Any) -> float:
        ids = packed_tokens([sample.group_index + 1])
        completion = await shared_policy(endpoints["ref"]).complete(
            CompletionRequest(ids, SamplingParams(max_new_tokens=1))
        )
        return float(len(completion.tokens))

    made = launch_recipe(endpoint, name=name)
    return attrs.evolve(made, config=attrs.evolve(made.config, reward_fn=reward))


def test_other_models_are_reached_by_name_and_never_stopped(serve: Serve) -> None:
    """A recipe gets the routers of the launch; the end of a batch pauses the trained model's only."""
    later, all_there = 0, asyncio.Event()

    async def later_groups_wait(request: Request) -> None:
        nonlocal later
        if request.input_ids[0] > 2:
            later += 1
            if later == 4:
                all_there.set()
            await anyio.sleep_forever()
        await all_there.wait()  # the batch ends when the other groups are with the judge, too

    actor, judge = serve(loads=dict), serve(latency=later_groups_wait, loads=dict)
    host, port = judge.url.removeprefix("http://").split(":")
    launch = Launch(over_sampling_factor=2.0)
    flags = {"sglang_model_routers": {"ref": (host, int(port))}, "rollouts_recipe": f"{__name__}.with_judge"}
    place = actor.url.removeprefix("http://").split(":")
    args = launch.args(**flags, sglang_router_ip=place[0], sglang_router_port=int(place[1]))
    output = generate_rollout_batch(args, 0, launch.source())
    assert [group[0].reward for group in output.samples] == [1.0, 1.0]
    assert JUDGED.keys() == {"ref"}
    assert JUDGED["ref"].base_url == (judge.url,)
    assert len(judge.live) == 4
    assert judge.aborted == []


@pytest.mark.parametrize("routers", [["ref"], {"ref": 5}, {"ref": ("host",)}])
def test_routers_are_host_and_port_by_name(routers: Any) -> None:
    """Anything else is named."""
    with pytest.raises(ConfigError, match=r"args\.sglang_model_routers"):
        generate_rollout_batch(Launch().args(sglang_model_routers=routers), 0, Source(2))


def broken(endpoint: Endpoint) -> Recipe:
    """An environment that cannot be made."""
    return agent_recipe("broken", endpoint, functools.partial(CalculatorEnvironment, no_such_option=1), ["p"])


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer whose template names no tools."""
    loaded = load_tokenizer(DEMO_MODEL)
    loaded.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tmp_path_factory.mktemp("silent")
    loaded.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("with_tools", {}, "tool"),
        ("with_tools", {"dialect": "klingon"}, "klingon"),
        ("broken", {}, "takes no arguments"),
    ],
)
def test_a_recipe_is_tested_before_the_first_request(
    serve: Serve, silent: str, function: str, options: dict[str, Any], message: str
) -> None:
    """A template without tools, an unknown dialect or a broken environment would make every rollout worthless."""
    stub = serve()
    flags = {"rollouts_recipe": f"{__name__}.{function}", "rollouts_recipe_options": options, "hf_checkpoint": silent}
    source = Source(2)
    with pytest.raises((ConfigError, EnvironmentFailure), match=message):
        generate_rollout_batch(single_turn(stub, **flags), 0, source)
    assert (stub.requests, source.given) == ([], [])
