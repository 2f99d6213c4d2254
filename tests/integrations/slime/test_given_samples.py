"""Images through slime's door: its own function and ours on the same server, and our samples as slime's."""

from __future__ import annotations

import base64
import importlib
import io
import itertools
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import PIL.Image
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.dtypes import Endpoint, Image, ImageSpan, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.engine.images import Expander
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves, to_slime
from rollouts.integrations.slime.given_samples import check_given, check_prompt_ids, shown_prompt
from rollouts.integrations.slime.pipeline import PROBE
from rollouts.integrations.slime.records import records, use_family
from rollouts.recipe import Recipe, agent_recipe
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from tests.integrations.slime.launches import made_sample
from tests.integrations.slime.test_parity import DEFAULTS, start_slime
from tests.integrations.slime.test_with_slime import Trainer

pytest.importorskip("torch")

WITH_SLIME = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]
PLACEHOLDER = 500
"""The demo model's id of an image."""
CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "9"}}</tool_call>'
"""Of the tool of slime's example, with a wrong answer."""
EXAMPLE = "examples.geo3k_vlm_multi_turn"


def colour(red: int, size: tuple[int, int] = (40, 30)) -> Any:
    return PIL.Image.new("RGB", size, (red, 80, 160))


def in_base64(image: Any) -> str:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


ROWS = [
    {"problem": "<image>Find x.", "answer": "1", "images": [in_base64(colour(10))]},
    {"problem": "Compare <image> with <image>!", "answer": "2", "images": [in_base64(colour(n)) for n in (20, 30)]},
    {"problem": "No image at all.", "answer": "3", "images": []},
]


@attrs.frozen
class Bench:
    """A stub of a router that expands images as the processor of the demo model does."""

    router: StubServer
    model: Path
    rows: Path

    def args(self, **overrides: Any) -> Namespace:
        """The rollout flags of slime's geo3k_vlm launch."""
        host, port = self.router.url.removeprefix("http://").split(":")
        values = {
            **DEFAULTS,
            "hf_checkpoint": str(self.model),
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "prompt_data": str(self.rows),
            "input_key": "problem",
            "label_key": "answer",
            "apply_chat_template": True,
            "multimodal_keys": {"image": "images"},
            "rollout_shuffle": False,
            "rollout_max_prompt_len": None,
            "dump_details": None,
            "rollout_batch_size": 3,
            "over_sampling_batch_size": 3,
            "rollout_temperature": 0.8,
        }
        args = Namespace(**{**values, "seen": [], **overrides})
        build = importlib.import_module("slime.utils.eval_config").build_eval_dataset_configs
        args.eval_datasets = build(args, [{"name": "geo3k", "path": str(self.rows)}], {})
        return args

    def play(self, function: Callable[..., Any], args: Namespace, *, evaluation: bool) -> Played:
        """Call a rollout function once, with a data source of slime; ``zero_logprobs`` changes its samples."""
        self.router.requests.clear()
        source = importlib.import_module("slime.rollout.data_source").RolloutDataSource(args)
        if getattr(args, "zero_logprobs", False):
            source.dataset.samples = [with_zero_logprobs()(**vars(one)) for one in source.dataset.samples]
        output = function(args, 0, source, evaluation=evaluation)
        samples = output.data["geo3k"]["samples"] if evaluation else list(leaves(output.samples))
        asked = [request for request in self.router.requests if tuple(request.input_ids) != PROBE]
        return Played(samples, sorted(map(_asked, asked), key=repr))

    def theirs(self, *, evaluation: bool, **overrides: Any) -> Played:
        module = importlib.import_module("slime.rollout.sglang_rollout")
        args = self.args(**overrides)
        start_slime(args)
        return self.play(module.generate_rollout, args, evaluation=evaluation)

    def both(self, *, evaluation: bool, **overrides: Any) -> tuple[Played, Played]:
        theirs = self.theirs(evaluation=evaluation, **overrides)
        start_slime(self.args(**overrides))  # slime's HTTP client has connections of the event loop that used it first
        ours = self.play(generate_rollout_batch, self.args(**overrides), evaluation=evaluation)
        close_rollouts()
        return theirs, ours


def _asked(request: Request) -> Any:
    """The input and the options of a request."""
    body = request.body
    params = request.sampling_params
    sampling = sorted((name, params.get(name)) for name in ("temperature", "top_p", "top_k", "max_new_tokens"))
    return body.get("text"), body.get("image_data"), list(request.input_ids), sampling, body["return_logprob"]


def with_zero_logprobs() -> type[Any]:
    """slime's sample, which takes the zero logprobs that the example passes for the ids of an observation."""

    class WithZeroLogprobs(records().sample):  # type: ignore[misc]  # slime's own class, known at run time
        def append_response_tokens(self, args: Any = None, **fields: Any) -> None:
            if not fields["trainable"] and not any(fields["log_probs"]):
                fields["log_probs"] = None
            super().append_response_tokens(args, **fields)

    return WithZeroLogprobs


def build_env(sample: Any, args: Any) -> Any:
    """The environment of slime's example; an observation of its second turn has an image."""
    module = importlib.import_module(f"{EXAMPLE}.env_geo3k")

    class WithImage(module.Geo3kEnv):  # type: ignore[misc, name-defined]  # slime's own class, known at run time
        def step(self, response_text: str) -> Any:
            observation, done, info = super().step(response_text)
            if self.turn == 2:
                observation["multi_modal_data"] = {"image": [colour(200 + int(sample.label))]}
            return observation, done, info

    return WithImage(ground_truth=sample.label, max_turns=args.max_turns)


@attrs.frozen
class Played:
    """Result and requests of a rollout function."""

    samples: list[Any]
    requests: list[Any]

    def fields(self) -> list[dict[str, Any]]:
        found = []
        for sample in sorted(self.samples, key=lambda sample: sample.index):
            entry = {name: _plain(getattr(sample, name)) for name in records().sample.__dataclass_fields__}
            entry["session_id"] = entry["session_id"] is not None
            entry["rollout_id"] = entry["index"] if entry["rollout_id"] is None else entry["rollout_id"]
            found.append(entry)
        return found


def _plain(value: Any) -> Any:
    """Images and tensors by their values."""
    if isinstance(value, PIL.Image.Image):
        return value.size, value.convert("RGB").tobytes()
    if hasattr(value, "numpy"):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def bench(slime_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("images")
    model, rows = folder / "model", folder / "rows.jsonl"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
    codec, expander = Codec(load_tokenizer(model)), Expander(model)
    replies = [codec.encode(f"{text}<|im_end|>").tolist() for text in ("The answer is 3.", CALL)]

    def answer(input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        body = stub.requests[-1].body
        ids = codec.encode(body["text"]).tolist() if body.get("text") else input_ids
        images = body.get("image_data") or []
        if ids.count(PLACEHOLDER) == len(images):  # the example of several turns sends expanded ids
            ids = expander.expanded(ids, images)
        reply = replies[codec.decode(ids).count("calc_score result") < stub.calls]
        return {
            "text": codec.decode(reply),
            "output_ids": reply,
            "prompt_token_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": reply[-1]},
                "prompt_tokens": len(ids) + (stub.miscounts if images else 0),
                "completion_tokens": len(reply),
                "cached_tokens": 0,
                "weight_version": "7",
                "output_token_logprobs": [[-0.25 * (1 + at % 3), token, None] for at, token in enumerate(reply)],
            },
        }

    with start_blocking_portal() as portal, ExitStack() as servers:
        worker = servers.enter_context(portal.wrap_async_context_manager(StubServer(loads=dict)))
        stub: Any = StubServer(answer, workers=[worker.url])
        stub.miscounts = stub.calls = 0
        router = servers.enter_context(portal.wrap_async_context_manager(stub))
        yield Bench(router, model, rows)
        close_rollouts()


FLAGS = {
    "custom_generate_function_path": f"{EXAMPLE}.rollout.generate",
    "rollout_interaction_env_path": f"{EXAMPLE}.env_geo3k",
    "max_turns": 3,
    "rollout_max_context_len": 1024,
}
"""The launch of slime's example of several turns."""


@contextmanager
def calls(bench: Bench, count: int) -> Iterator[None]:
    """The model calls the example's tool in its first turns."""
    bench.router.calls = count  # type: ignore[attr-defined]
    try:
        yield
    finally:
        bench.router.calls = 0  # type: ignore[attr-defined]


@pytest.fixture
def vision_utils(tmp_path: Path) -> Iterator[None]:
    """``qwen_vl_utils``, which the example imports; without it, a module with slime's own way to find images."""
    (tmp_path / "qwen_vl_utils.py").write_text(
        "from slime.utils.processing_utils import _extract_images_from_messages\n\n"
        "def process_vision_info(messages, **options):\n"
        "    return _extract_images_from_messages(messages) or None, None\n"
    )
    sys.path.append(str(tmp_path))
    importlib.invalidate_caches()
    module = importlib.import_module("qwen_vl_utils")
    yield
    sys.path.remove(str(tmp_path))
    if module.__file__ == str(tmp_path / "qwen_vl_utils.py"):
        del sys.modules["qwen_vl_utils"]


class TestParity:
    """slime's own function and ours, with the same flags, on the same server."""

    pytestmark = WITH_SLIME

    @pytest.mark.parity("equal")
    @pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
    def test_geo3k_has_the_requests_and_samples_of_slime(self, bench: Bench, evaluation: bool) -> None:
        """Text and images are sent; samples have slime's ids, images and tensors, equal in every field."""
        theirs, ours = bench.both(evaluation=evaluation)
        assert ours.requests == theirs.requests
        assert ours.fields() == theirs.fields()
        assert sum(bool(images) for _, images, *_ in ours.requests) == 4
        for number, sample in enumerate(sorted(ours.samples, key=lambda one: one.index)):
            inputs = sample.multimodal_train_inputs
            assert (None if inputs is None else len(inputs["pixel_values"])) == [1, 2, None][number // 2]

    @pytest.mark.parity("equal")
    @pytest.mark.parametrize("recipe", [False, True], ids=["single turn", "recipe"])
    @pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
    def test_images_inside_messages_are_loaded_as_in_slime(
        self, bench: Bench, tmp_path: Path, evaluation: bool, recipe: bool
    ) -> None:
        """Without ``--multimodal-keys``: the same requests and samples; a recipe's samples have the same tokens."""
        rows = tmp_path / "rows.jsonl"
        shown = [{"type": "image", "image": in_base64(colour(10))}, {"type": "text", "text": "Find x."}]
        chats = [shown, "No image at all.", [*shown, shown[0]]]
        data = [{"problem": [{"role": "user", "content": chat}], "answer": str(at)} for at, chat in enumerate(chats)]
        rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in data))
        bench = attrs.evolve(bench, rows=rows)
        theirs, ours = bench.both(evaluation=evaluation, multimodal_keys=None)
        assert ours.requests == theirs.requests
        assert ours.fields() == theirs.fields()
        assert sorted(len(images or ()) for _, images, *_ in ours.requests) == [0, 0, 1, 1, 2, 2]
        if recipe:
            flags = {"rollouts_recipe": f"{__name__}.recipe", "rollouts_recipe_options": {}}
            args = bench.args(multimodal_keys=None, apply_chat_template=False, **flags)
            played = bench.play(generate_rollout_batch, args, evaluation=evaluation)
            assert [sample.tokens for sample in played.samples] == [sample.tokens for sample in theirs.samples]

    @pytest.mark.parity("equal")
    def test_the_multi_turn_example_is_played_as_in_slime(self, bench: Bench) -> None:
        """Its generate function gets slime's sample with its images, and what it returns is the sample of the batch."""
        theirs, ours = bench.both(evaluation=False, **FLAGS)
        assert ours.requests == theirs.requests
        assert sorted(len(images or ()) for _, images, *_ in ours.requests) == [0, 0, 1, 1, 2, 2]
        assert ours.fields() == theirs.fields()

    @pytest.mark.parity("equal")
    @pytest.mark.usefixtures("vision_utils")
    def test_several_turns_of_the_example_are_played_as_in_slime(self, bench: Bench) -> None:
        """Observations of text and with an image: equal requests, and samples equal in every field."""
        flags = {**FLAGS, "rollout_interaction_env_path": __name__, "zero_logprobs": True}
        with calls(bench, 2):
            theirs, ours = bench.both(evaluation=False, **flags)
        assert ours.requests == theirs.requests
        assert ours.fields() == theirs.fields()
        images = [len(images or ()) for _, images, *_ in ours.requests]
        assert sorted(images) == sorted(2 * [0, 0, 1, 1, 1, 2, 2, 2, 3])
        for sample in ours.samples:
            assert sum(left > right for left, right in itertools.pairwise([*sample.loss_mask, 0])) == 3
        shown = [len(sample.multimodal_train_inputs.get("pixel_values", ())) for sample in ours.samples]
        assert sorted(shown) == [0, 0, 0, 0, 1, 1]  # the example drops those of a prompt, which are not tensors there

    @pytest.mark.parity("slime crashes")
    @pytest.mark.usefixtures("vision_utils")
    def test_an_observation_that_slime_refuses_is_refused(self, bench: Bench) -> None:
        """slime's sample takes no logprobs of the example's observations: both functions name that, at the same id."""
        flags = {**FLAGS, "rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}
        refusal = "non-trainable response tokens should not pass rollout log probabilities"
        with calls(bench, 1):
            with pytest.raises(ValueError, match=refusal):
                bench.theirs(evaluation=False, **flags)
            (sent,) = [_asked(request) for request in bench.router.requests]
            start_slime(bench.args(**flags))
            with pytest.raises(Exception, match=refusal):
                bench.play(generate_rollout_batch, bench.args(**flags), evaluation=False)
        asked = [request for request in bench.router.requests if tuple(request.input_ids) != PROBE]
        assert [_asked(request) for request in asked] == [sent, sent]  # the second is our second attempt

    def test_a_reply_whose_prompt_the_server_counts_otherwise_is_refused(self, bench: Bench) -> None:
        """slime's ids would differ from the ids that the model saw: its rollouts fail, rollouts of text succeed."""
        bench.router.miscounts = 1  # type: ignore[attr-defined]
        try:
            start_slime(bench.args())
            played = bench.play(generate_rollout_batch, bench.args(), evaluation=True)
        finally:
            bench.router.miscounts = 0  # type: ignore[attr-defined]
        assert [sample.label for sample in played.samples] == ["3", "3"]

    @pytest.mark.parity("equal")
    @pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
    def test_a_recipe_plays_the_images_of_slimes_rows(self, bench: Bench, evaluation: bool) -> None:
        """Its samples have the ids, images and tensors of slime's own function; requests have ids and images."""
        theirs, _ = bench.both(evaluation=evaluation)
        args = bench.args(apply_chat_template=False, rollouts_recipe=f"{__name__}.recipe", rollouts_recipe_options={})
        ours = bench.play(generate_rollout_batch, args, evaluation=evaluation)
        assert [len(images or ()) for _, images, *_ in ours.requests].count(0) == 2
        assert all(ids for _, _, ids, *_ in ours.requests)
        names = ("tokens", "loss_mask", "response_length", "multimodal_inputs", "multimodal_train_inputs", "reward")
        for mine, other in zip(ours.fields(), theirs.fields(), strict=True):
            assert {name: mine[name] for name in names} == {name: other[name] for name in names}

    def test_slimes_conversion_ships_the_tensors(self, bench: Bench, manager_class: Any) -> None:
        """The train data have the tensors of each sample, and nothing for a sample of text."""
        flags = {"rollouts_recipe": f"{__name__}.recipe", "rollouts_recipe_options": {}, "apply_chat_template": False}
        trainer = {"global_batch_size": 6, "advantage_estimator": "grpo", "rewards_normalization": False}
        args = bench.args(**flags, **trainer, use_dynamic_batch_size=False, micro_batch_size=1, balance_data=False)
        start_slime(args)
        samples = bench.play(generate_rollout_batch, args, evaluation=False).samples
        data = Trainer(manager_class, args).convert(samples)["multimodal_train_inputs"]
        shapes = [None if one is None else tuple(one["pixel_values"].shape) for one in data]
        assert shapes == [(1, 3, 48, 48)] * 2 + [(2, 3, 48, 48)] * 2 + [None] * 2


def recipe(endpoint: Endpoint) -> Recipe:
    """One reply with images, without a system prompt, as slime plays it."""
    return agent_recipe("images", endpoint, SingleTurnEnvironment, ["never used"], images=True, max_turns=1)


# -- samples with media, without slime --------------------------------------------------------------------------------


def a_record(prompt: Any, **media: Any) -> Any:
    return records().sample(prompt=prompt, index=4, multimodal_inputs=media or None)


@pytest.mark.parametrize(
    ("record", "recipe", "message"),
    [
        (
            a_record("a", videos=["v"]),
            False,
            r"sample 4.multimodal_inputs: got \['videos'\]; expected images only",
        ),
        (a_record([], images=["i"], audio=["a"]), True, r"got \['audio', 'images'\]; expected images only"),
        (
            a_record("<image>", images=["i"]),
            True,
            r"slime sample 4.prompt: got '<image>'; expected messages with",
        ),
        (
            a_record([], images=["i"]),
            False,
            r"slime sample 4.prompt: got 'list'; expected text, of --apply",
        ),
    ],
)
def test_media_that_cannot_be_shown_are_refused(record: Any, recipe: bool, message: str) -> None:
    """By the sample and its field; nothing is left out of a prompt in silence."""
    with pytest.raises(ConfigError, match=message):
        check_given(record, recipe=recipe)


@pytest.mark.parametrize("recipe", [False, True])
def test_images_of_samples_are_refused_with_miles(recipe: bool) -> None:
    """Also where the launch has no ``--multimodal-keys``: the sample brings them."""
    record = a_record([], images=["i"])
    use_family("miles")
    try:
        with pytest.raises(ConfigError, match=r"sample 4.multimodal_inputs: got \['images'\]; expected none: rollouts"):
            check_given(record, recipe=recipe)
    finally:
        use_family("slime")


@pytest.mark.parametrize("recipe", [False, True])
def test_a_text_sample_of_a_vision_model_is_a_text_sample(recipe: bool) -> None:
    """slime's data set sets ``{"images": None}`` on each sample where the model has a processor."""
    for record in (a_record("a"), a_record("a", images=None, videos=None)):
        check_given(record, recipe=recipe)
        assert shown_prompt(record) == "a"


def test_messages_show_the_images_that_slimes_data_set_loaded() -> None:
    """In the places of the image parts, whose own values, e.g. paths, are not read."""
    first, second = colour(1), colour(2)
    parts = [{"type": "image", "image": "/a/path.png"}, {"type": "text", "text": "and"}, {"type": "image", "image": 3}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    shown = Prompt(shown_prompt(a_record(messages, images=[first, second])))
    assert shown.messages == (
        Message("system", "s"),
        Message("user", (Image.of(first), "and", Image.of(second))),
    )
    with pytest.raises(ConfigError, match=r"image parts of the prompt of slime sample 4: got 2; expected 1, one for"):
        shown_prompt(a_record(messages, images=[first]))


def test_the_ids_of_a_prompt_are_counted_by_the_server_too() -> None:
    """A difference is refused; a server that reports no count, and a sample without a reply, cannot be compared."""
    record = a_record("a")
    record.tokens, record.response_length = [1, 2, 3, 4], 1
    check_prompt_ids(record)
    record.prefix_cache_info.total_prompt_tokens = 3
    check_prompt_ids(record)
    record.prefix_cache_info.total_prompt_tokens = 5
    with pytest.raises(EndpointRefused, match=r"meta_info.prompt_tokens: got 5; expected 3, the ids of the"):
        check_prompt_ids(record)


def test_our_samples_have_images_and_tensors() -> None:
    """Images of its tokens as PIL images, and the arrays of its processor as tensors; a stored sample has none."""
    image = Image.of(colour(5))
    sample = made_sample(Prompt("?", index=0), images=[ImageSpan(image, 1, 2)])
    with pytest.raises(ConfigError, match=r"Sample.image_inputs: got None; expected ImageProcessor.inputs"):
        to_slime(sample, scored=False)
    sample.image_inputs = lambda images: {"pixel_values": np.full((len(images), 2), 0.5, np.float32)}
    record = to_slime(sample, scored=False)
    assert [_plain(one) for one in record.multimodal_inputs["images"]] == [_plain(image.to_pil())]
    assert _plain(record.multimodal_train_inputs) == {"pixel_values": ("torch.float32", [[0.5, 0.5]])}
    assert to_slime(made_sample(Prompt("?", index=0)), scored=False).multimodal_train_inputs is None
