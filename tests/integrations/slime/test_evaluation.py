"""Evaluation: every configured data set, in order, and a failure that costs one rollout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.evaluation import load_eval_rows
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import Settings
from rollouts.recipe import Recipe, agent_recipe
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.server import StubServer
from rollouts.training import Prompt, Sample, Status
from tests.integrations.slime.launches import Launch, made_sample


def data_set(folder: Path, name: str, rows: int, **fields: Any) -> Namespace:
    path = folder / f"{name}.jsonl"
    path.write_bytes(
        b"".join(msgspec.json.encode({"q": f"{name} {i}", "a": str(i), "meta": {"i": i}}) + b"\n" for i in range(rows))
    )
    values = {"name": name, "path": str(path), "input_key": "q", "label_key": "a", "metadata_key": "meta"}
    return Namespace(**{**values, "n_samples_per_eval_prompt": 1, **fields})


def test_every_data_set_is_played_in_order(tmp_path: Path) -> None:
    """Rewards, truncations and samples of each, equally long, by row and repetition."""

    async def play(prompt: Prompt) -> list[Sample]:
        cut = prompt.metadata["i"] == 1
        return [made_sample(prompt, status=Status.TRUNCATED if cut else Status.COMPLETED)]

    launch = Launch(play=play, reward=lambda sample: float(sample.label))
    sets = [data_set(tmp_path, "one", 3, n_samples_per_eval_prompt=2), data_set(tmp_path, "two", 2)]
    output = generate_rollout_batch(launch.args(eval_datasets=sets), 5, launch.source(), evaluation=True)
    assert isinstance(output, records().eval_output)
    assert list(output.data) == ["one", "two"]
    assert output.data["one"]["rewards"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert output.data["one"]["truncated"] == [False, False, True, True, False, False]
    samples = output.data["one"]["samples"]
    assert [sample.prompt for sample in samples] == [f"one {i // 2}" for i in range(6)]
    assert [sample.index for sample in samples] == list(range(6))
    assert {sample.group_index for sample in samples} == {None}  # as in slime
    assert output.data["two"]["rewards"] == [0.0, 1.0]
    assert output.metrics == {"eval/one/failed_samples": 0, "eval/two/failed_samples": 0}


def test_lines_that_are_not_json_are_counted_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other rows are played; a warning names the lines."""
    entry = data_set(tmp_path, "one", 2)
    path = Path(entry.path)
    path.write_bytes(b'{"q": "torn\n' + path.read_bytes() + b'{"q": "a", "a": NaN}\n[\n')
    output = generate_rollout_batch(Launch().args(eval_datasets=[entry]), 0, Launch().source(), evaluation=True)
    assert [sample.prompt for sample in output.data["one"]["samples"]] == ["one 0", "one 1", "a"]
    assert output.metrics["eval/one/skipped_lines"] == 2
    assert "2 lines skipped, since they are not JSON: lines [1, 5]" in caplog.text


def test_a_failed_rollout_is_left_out_and_counted(tmp_path: Path) -> None:
    """It gets no reward; the others of its prompt stay."""

    def reward(sample: Sample) -> float:
        if sample.index == 1:
            raise RuntimeError("no judge")
        return 1.0

    launch = Launch(reward=reward)
    sets = [data_set(tmp_path, "one", 2, n_samples_per_eval_prompt=2)]
    output = generate_rollout_batch(launch.args(eval_datasets=sets), 0, launch.source(), evaluation=True)
    assert [sample.index for sample in output.data["one"]["samples"]] == [0, 2, 3]
    assert output.metrics["eval/one/failed_samples"] == 1


def test_pass_rates_need_whole_prompts(tmp_path: Path) -> None:
    """With ``--log-passrate`` slime counts rewards by position: a failed rollout takes its siblings out, too."""

    def reward(sample: Sample) -> float:
        if sample.index == 3:
            raise RuntimeError("no judge")
        return 1.0

    launch = Launch(reward=reward)
    sets = [data_set(tmp_path, "one", 3, n_samples_per_eval_prompt=2)]
    args = launch.args(eval_datasets=sets, log_passrate=True, n_samples_per_eval_prompt=2)
    output = generate_rollout_batch(args, 0, launch.source(), evaluation=True)
    assert [sample.index for sample in output.data["one"]["samples"]] == [0, 1, 4, 5]
    assert len(output.data["one"]["rewards"]) == len(output.data["one"]["truncated"]) == 4
    assert output.metrics["eval/one/failed_samples"] == 1


def test_a_data_set_where_all_fail_raises(tmp_path: Path) -> None:
    """With the reason."""

    def reward(sample: Sample) -> float:
        raise RuntimeError("no judge at all")

    launch = Launch(reward=reward)
    args = launch.args(eval_datasets=[data_set(tmp_path, "one", 2)])
    with pytest.raises(GenerateFailure, match="no judge at all"):
        generate_rollout_batch(args, 0, launch.source(), evaluation=True)


async def parts(args: Any, sample: Any, **_: Any) -> Any:
    """A dict reward."""
    return {"score": float(sample.metadata["i"]), "length": 1.0}


def test_a_data_set_has_its_own_reward(tmp_path: Path) -> None:
    """``custom_rm_path`` of the data set, and the key that the launch names."""
    launch = Launch()
    sets = [data_set(tmp_path, "one", 2, custom_rm_path=f"{__name__}.parts")]
    args = launch.args(eval_datasets=sets, reward_key="score")
    output = generate_rollout_batch(args, 0, launch.source(), evaluation=True)
    assert output.data["one"]["rewards"] == [0.0, 1.0]
    assert output.data["one"]["samples"][1].reward["score"] == 1.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model's tokenizer with a template that has an option."""
    loaded = load_tokenizer(DEMO_MODEL)
    loaded.chat_template = "{{ messages[0].content }}{{ ' calmly' if calm }}{{ tools | length if tools }}"
    folder = tmp_path_factory.mktemp("tokenizer")
    loaded.save_pretrained(folder)
    return str(folder)


def test_slices_and_chat_prompts(tmp_path: Path, tokenizer: str) -> None:
    """slime's ``path@[a:b]``, and text as a message with ``--apply-chat-template``."""
    entry = data_set(tmp_path, "one", 5, apply_chat_template=True)
    entry.path += "@[1:3]"
    settings = Settings.from_args(Launch().args(eval_datasets=[entry], hf_checkpoint=tokenizer))
    prompts, _ = load_eval_rows(settings.eval_sets[0], settings)
    assert [prompt.prompt[0]["content"] for prompt in prompts] == ["one 1", "one 2"]
    assert [prompt.label for prompt in prompts] == ["1", "2"]
    assert not isinstance(prompts[0].prompt, str)


@pytest.mark.parametrize(
    ("part", "rows"), [("[-2:]", [3, 4]), ("[:-3]", [0, 1]), ("[-4:-2]", [1, 2]), ("[3:]", [3, 4])]
)
def test_slices_count_from_the_end(tmp_path: Path, part: str, rows: list[int]) -> None:
    """``path@[-100:]`` is the last 100 rows."""
    entry = data_set(tmp_path, "one", 5)
    entry.path += f"@{part}"
    settings = Settings.from_args(Launch().args(eval_datasets=[entry]))
    prompts, _ = load_eval_rows(settings.eval_sets[0], settings)
    assert [prompt.metadata["i"] for prompt in prompts] == rows


def plain(tokenizer: str, *sets: Namespace, **flags: Any) -> Settings:
    """The settings of a launch without a recipe."""
    values = {"rollouts_recipe": None, "hf_checkpoint": tokenizer, "eval_datasets": list(sets), **flags}
    return Settings.from_args(Launch().args(**values))


def test_a_chat_prompt_is_the_text_that_slime_renders(tmp_path: Path, tokenizer: str) -> None:
    """With the options of the launch's template, or those of the data set, and its tools."""
    sets = [data_set(tmp_path, "one", 1), data_set(tmp_path, "two", 1, apply_chat_template_kwargs={"calm": False})]
    flags = {"apply_chat_template": True, "apply_chat_template_kwargs": {"calm": True}}
    settings = plain(tokenizer, *sets, **flags)
    assert [load_eval_rows(entry, settings)[0][0].prompt for entry in settings.eval_sets] == ["one 0 calmly", "two 0"]


def test_the_options_of_a_template_are_refused_with_a_recipe(tmp_path: Path) -> None:
    """Its prompts are rendered by the renderer, without them."""
    sets = [data_set(tmp_path, "one", 1, apply_chat_template=True, apply_chat_template_kwargs={"calm": True})]
    launch = Launch()
    with pytest.raises(ConfigError, match=r"one\.apply_chat_template_kwargs"):
        generate_rollout_batch(launch.args(eval_datasets=sets), 0, launch.source(), evaluation=True)


def test_long_prompts_are_left_out(tmp_path: Path, tokenizer: str) -> None:
    """``--eval-max-prompt-len`` counts tokens; a data set without a prompt is an error that names it."""
    entry = data_set(tmp_path, "one", 2)
    longer = [{"q": f"one {'more ' * i}", "a": str(i), "meta": {"i": i}} for i in range(6)]
    Path(entry.path).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in longer))
    codec = Codec(load_tokenizer(tokenizer))
    settings = plain(tokenizer, entry, eval_max_prompt_len=len(codec.encode("one more more ")))
    found = [prompt.metadata["i"] for prompt in load_eval_rows(settings.eval_sets[0], settings)[0]]
    assert found == [0, 1, 2]
    settings = plain(tokenizer, entry, eval_max_prompt_len=1)
    with pytest.raises(ConfigError, match="--eval-max-prompt-len"):
        load_eval_rows(settings.eval_sets[0], settings)


def test_a_data_set_has_its_own_sampling_parameters(tmp_path: Path, serve: Callable[..., StubServer]) -> None:
    """They reach the server; what the data set does not name is the launch's."""
    stub = serve()
    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port)}
    own = {"min_new_tokens": 2, "repetition_penalty": 1.5, "stop_token_ids": [7], "stop": ["END"], "temperature": 0.0}
    sets = [data_set(tmp_path, "one", 1, **own), data_set(tmp_path, "two", 1)]
    flags |= {"rollouts_recipe": None, "rollout_stop_token_ids": [9], "eval_min_new_tokens": 1}
    launch = Launch()
    args = launch.args(**flags, eval_datasets=sets, custom_rm_path=f"{__name__}.one")
    generate_rollout_batch(args, 0, launch.source(), evaluation=True)
    by_set = {len(request.sampling_params.get("stop", ())): request.sampling_params for request in stub.requests}
    named = {name: value for name, value in own.items() if name != "stop_token_ids"}
    assert named.items() <= by_set[1].items()
    assert (7 in by_set[1]["stop_token_ids"], 9 in by_set[1]["stop_token_ids"]) == (True, False)
    assert (by_set[0]["min_new_tokens"], by_set[0]["temperature"], 9 in by_set[0]["stop_token_ids"]) == (1, 1.0, True)


def of_one_reply(endpoint: Endpoint) -> Recipe:
    """One reply to each prompt."""
    return agent_recipe("one", endpoint, SingleTurnEnvironment, ["never used"], reward_fn=lambda sample: 1.0)


@pytest.mark.parametrize(("own", "bound"), [({"eval_max_context_len": 40}, 40), ({}, 30)])
def test_an_evaluation_has_its_own_bound_of_the_context(
    tmp_path: Path, serve: Callable[..., StubServer], own: dict[str, int], bound: int
) -> None:
    """``--eval-max-context-len`` bounds the episodes of a recipe; without it ``--rollout-max-context-len`` does."""
    stub = serve()
    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"hf_checkpoint": str(DEMO_MODEL), "sglang_router_ip": host, "sglang_router_port": int(port)}
    flags |= {"rollouts_recipe": f"{__name__}.of_one_reply", "rollouts_recipe_options": {}}
    sets = [data_set(tmp_path, "one", 1)]
    launch = Launch()
    args = launch.args(**flags, eval_datasets=sets, rollout_max_context_len=30, rollout_max_response_len=64, **own)
    generate_rollout_batch(args, 0, launch.source(), evaluation=True)
    rooms = {len(request.input_ids) + request.sampling_params["max_new_tokens"] for request in stub.requests}
    assert rooms == {bound}


def test_a_group_reward_is_refused_in_an_evaluation(tmp_path: Path) -> None:
    """Also where the launch names no interval: slime asserts the flag off."""
    launch = Launch()
    args = launch.args(eval_datasets=[data_set(tmp_path, "one", 1)], group_rm=True)
    with pytest.raises(ConfigError, match=r"args\.group_rm: got True; expected off with an evaluation"):
        generate_rollout_batch(args, 0, launch.source(), evaluation=True)


async def one(args: Any, sample: Any, **_: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"multimodal_keys": {"image": "images"}}, "multimodal_keys"), ({"no_stop_trim": False}, "no_stop_trim")],
)
def test_what_a_data_set_cannot_have_is_refused(
    tmp_path: Path, tokenizer: str, fields: dict[str, Any], named: str
) -> None:
    """With the names of the data set and the field."""
    launch = Launch()
    args = launch.args(eval_datasets=[data_set(tmp_path, "one", 1, **fields)], hf_checkpoint=tokenizer)
    with pytest.raises(ConfigError, match=rf"one\.{named}"):
        generate_rollout_batch(args, 0, launch.source(), evaluation=True)


def test_images_inside_messages_are_not_left_out(tmp_path: Path) -> None:
    """Where slime is not installed to load them, the data set is refused by name."""
    if records().is_slime:
        pytest.skip("slime is installed")
    entry = data_set(tmp_path, "one", 1)
    chat = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    Path(entry.path).write_bytes(msgspec.json.encode({"q": chat, "a": "1"}))
    launch = Launch()
    with pytest.raises(
        ConfigError, match=r"eval data set one\.path: .* expected no images inside messages without slime"
    ):
        generate_rollout_batch(launch.args(eval_datasets=[entry]), 0, launch.source(), evaluation=True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The file, or the row and the key."""
    entry = data_set(tmp_path, "one", 1, input_key="question")
    settings = Settings.from_args(Launch().args(eval_datasets=[entry]))
    with pytest.raises(ConfigError, match=r"row 0.*'question'"):
        load_eval_rows(settings.eval_sets[0], settings)


def test_a_row_without_its_label_is_named(tmp_path: Path) -> None:
    """Else every reward of a data set with a mistyped ``label_key`` would compare with nothing."""
    settings = Settings.from_args(Launch().args(eval_datasets=[data_set(tmp_path, "one", 1, label_key="answer")]))
    with pytest.raises(ConfigError, match=r"row 0.*'answer'"):
        load_eval_rows(settings.eval_sets[0], settings)
