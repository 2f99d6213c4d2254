"""slime's namespace: parsed once; an unsupported flag is an error with its name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime.pipeline import find_recipe
from rollouts.integrations.slime.records import use_family
from rollouts.integrations.slime.settings import OWN_KEYS, RECIPE_VARIABLE, Settings
from tests.integrations.slime.launches import DEFAULT, Launch


def read(**flags: Any) -> Settings:
    return Settings.from_args(Launch().args(**flags))


def test_sizes_sampling_and_address() -> None:
    """slime's names and defaults."""
    found = read(rollout_temperature=0.8, rollout_top_k=20, rollout_stop="END", rollout_stop_token_ids=[7])
    assert (found.batch_size, found.n_samples_per_prompt) == (2, 2)
    sampling = found.endpoint.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.max_new_tokens) == (0.8, 20, ("END",), 32)
    assert found.endpoint.base_url == ("http://127.0.0.1:9",)
    assert found.params["stop_token_ids"] == [7]


@pytest.mark.parametrize("flag", [{"enable_thinking": False}, '{"enable_thinking": false}'])
@pytest.mark.parametrize("options", [{}, {"template_kwargs": {"enable_thinking": True, "add_vision_id": True}}])
def test_variables_of_the_template_reach_the_recipe(flag: Any, options: dict[str, Any]) -> None:
    """From slime's flag and from the YAML's recipe options; the flag wins. The history policy comes from the YAML."""
    recipe = "calculator"
    yaml = {"rollouts_recipe": recipe, "rollouts_recipe_options": {**options, "history": "fork"}}
    found = find_recipe(read(**yaml, apply_chat_template_kwargs=flag))
    assert found is not None
    bound: Any = found.config.generate_fn
    assert bound.keywords["template_kwargs"] == {**options.get("template_kwargs", {}), "enable_thinking": False}
    assert bound.keywords["history"] == "fork"


def test_variables_of_the_template_are_a_mapping() -> None:
    """Any other value is named."""
    with pytest.raises(ConfigError, match=r"args.apply_chat_template_kwargs: got 'no'; expected a mapping"):
        read(apply_chat_template_kwargs="no")


def test_an_ipv6_router_gets_its_brackets() -> None:
    """As slime writes its URLs."""
    assert read(sglang_router_ip="::1").endpoint.base_url == ("http://[::1]:9",)


def test_concurrency_counts_engines() -> None:
    """``--sglang-server-concurrency`` is the limit of one engine."""
    assert read(sglang_server_concurrency=10, rollout_num_gpus=8, rollout_num_gpus_per_engine=2).at_most == 40
    assert read(sglang_server_concurrency=10, rollout_num_engines=3).at_most == 30
    assert read().at_most == 512


def test_the_recipe_comes_from_the_launch_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch wins."""
    monkeypatch.setenv(RECIPE_VARIABLE, "here.py")
    assert read(rollouts_recipe=None).recipe == "here.py"
    assert read(rollouts_recipe="there.py").recipe == "there.py"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"use_rollout_routing_replay": True}, r"args\.num_layers"),
        ({"rollout_temperature": 0.0}, "rollout_temperature"),
        ({"rollout_global_dataset": False}, "rollout_global_dataset"),
        ({"hf_checkpoint": None}, "hf_checkpoint"),
        ({"sglang_router_ip": None}, "sglang_router_ip"),
    ],
)
def test_an_unsupported_flag_is_refused(flags: dict[str, Any], named: str) -> None:
    """Before a prompt is taken."""
    with pytest.raises(ConfigError, match=named):
        read(**flags)


def test_deadlines_leave_time_for_the_longest_reply() -> None:
    """slime has none: 32768 tokens take 27 minutes at 20 tokens a second. Those of the evaluation count, too."""
    assert read().endpoint.request_seconds == 3600
    assert read(rollout_max_response_len=65536).endpoint.request_seconds == 65536 / 5
    sets = [Namespace(name="one", path="rows.jsonl", max_response_len=32768)]
    assert read(eval_datasets=sets).endpoint.request_seconds == 32768 / 5
    assert read(rollouts_request_seconds=9.5).endpoint.request_seconds == 9.5


@pytest.mark.parametrize("value", [0, -1, "600", True])
@pytest.mark.parametrize("name", ["rollouts_request_seconds", "rollouts_rollout_seconds", "rollouts_reward_seconds"])
def test_a_deadline_is_a_number_of_seconds(name: str, value: Any) -> None:
    """Any other value is named."""
    with pytest.raises(ConfigError, match=rf"args\.{name}: got .*; expected a number > 0"):
        read(**{name: value})


def test_equal_launches_are_equal() -> None:
    """A session persists as long as nothing changes."""
    args = Launch().args()
    assert Settings.from_args(args) == Settings.from_args(Namespace(**vars(args)))


def test_our_keys_are_documented() -> None:
    """Each in one sentence."""
    assert all(key.startswith("rollouts_") and text for key, text in OWN_KEYS.items())


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("rollouts_max_stalenes", "rollouts_max_staleness"),
        ("rollouts_receipt", "rollouts_recipe"),
        ("rollouts_inner_data_source", "rollouts_inner_data_source_path"),
    ],
)
def test_a_key_that_does_not_exist_is_refused(name: str, closest: str) -> None:
    """A mistyped key would leave its default in force; the message has the closest key."""
    with pytest.raises(ConfigError, match=rf"args\.{name}: got 2; expected no such key; the closest is {closest}$"):
        read(**{name: 2})


def test_a_group_reward_has_no_evaluation() -> None:
    """slime's evaluation asserts ``--group-rm`` off: it plays rollouts, not groups. Without one the flag is served."""
    sets = [Namespace(name="one", path="rows.jsonl")]
    with pytest.raises(ConfigError, match=r"args\.group_rm: got True; expected off with an evaluation"):
        read(group_rm=True, eval_datasets=sets, eval_interval=5)
    assert read(group_rm=True, eval_datasets=sets).group_rm
    assert read(group_rm=True, eval_interval=5).group_rm


def test_images_of_an_evaluation_are_refused_with_miles() -> None:
    """By the data set, as the launch's flag is: its rollouts with images are compared with nothing."""
    sets = [Namespace(name="one", path="rows.jsonl", multimodal_keys={"image": "images"})]
    use_family("miles")
    try:
        with pytest.raises(ConfigError, match=r"eval data set one\.multimodal_keys: got .*; expected none: rollouts"):
            read(eval_datasets=sets)
    finally:
        use_family("slime")


def test_a_path_that_leads_nowhere_is_named() -> None:
    """As ``package.module.function`` or ``module:name``."""
    assert load_function("math.sqrt")(4) == load_function("math:sqrt")(4) == 2.0
    for path in ("nowhere.at.all", "math.nothing", "math:nothing", "justaname"):
        with pytest.raises(ConfigError, match=path):
            load_function(path)


def test_the_flags_of_age_are_read_apart() -> None:
    """Default: batch-sized over-sampling, nothing carried, bound 0. Each flag changes its own."""
    found = read(**DEFAULT)
    assert (found.over_sampling_factor, found.carry_over, found.max_staleness) == (1.0, False, 0)
    assert read(**DEFAULT, over_sampling_batch_size=5).over_sampling_factor == 2.5
    assert read(over_sampling_batch_size=5, rollouts_over_sampling_factor=3.0).over_sampling_factor == 3.0
    for flag in ("partial_rollout", "rollouts_carry_over", "rollouts_fully_async"):
        found = read(**DEFAULT | {flag: True})
        assert (found.over_sampling_factor, found.carry_over, found.max_staleness) == (1.0, True, None)
    assert read(**DEFAULT | {"rollouts_carry_over": True, "rollouts_max_staleness": 2}).max_staleness == 2


@pytest.mark.parametrize(
    "flags",
    [
        {"rollouts_max_staleness": 1},
        {"rollouts_max_staleness": -1, "rollouts_carry_over": True},
        {"rollouts_max_staleness": "2", "rollouts_carry_over": True},
        {"over_sampling_batch_size": 1},
    ],
)
def test_contradictory_flags_are_refused(flags: dict[str, Any]) -> None:
    """A bound without carry-over, a bound that is not a number, over-sampling below the batch: each names the flag."""
    with pytest.raises(ConfigError, match=next(iter(flags))):
        read(**DEFAULT | flags)


def test_a_bound_on_age_names_the_flags_with_which_tokens_have_one() -> None:
    """A reader of the message knows what to set."""
    with pytest.raises(ConfigError, match="rollouts_carry_over, rollouts_fully_async or --partial-rollout"):
        read(**DEFAULT, rollouts_max_staleness=1)


def test_the_number_of_rollouts_is_a_flag() -> None:
    """Without it the recipe's number is used, or none; a wrong value is refused by name."""
    assert read(**DEFAULT).in_flight is None
    assert read(**DEFAULT, rollouts_in_flight=48).in_flight == 48
    for wrong in (0, -3, 1.5, "48", True):
        with pytest.raises(ConfigError, match=r"args\.rollouts_in_flight: got .*; expected an integer >= 1"):
            read(**DEFAULT, rollouts_in_flight=wrong)
