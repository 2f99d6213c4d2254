"""Images: our ids and inputs equal those of the real processors, in openings and bridges; each image is processed
once."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import Image, Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, renderer_for
from rollouts.renderer.images import joined_inputs
from rollouts.renderer.model_format import images_of
from tests.processors import CHATML, FAMILIES, build_processor, load_tokenizer_of, own_output, own_text, picture

pytest.importorskip("torch")

TOOL = Tool("plot", "Plots.", {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}})
SIZES = [(97, 61), (30, 150), (200, 12), (64, 64), (56, 57), (5, 3)]
WORDS = ["What is this?", " ", "\n\n", "déjà vu", "1 + 2", "<b>", "Compare\n"]


@attrs.frozen
class Model:
    """A tokenizer, its processor and its chat template."""

    tokenizer: Any
    processor: Any
    template: str

    def renderer(self, **options: Any) -> Renderer:
        return Renderer(self.tokenizer, chat_template=self.template, images=self.processor, **options)


@pytest.fixture(scope="module")
def model(small_tokenizer_folder: Callable[[str], Path], chat_template: Callable[[str], str]) -> Callable[[str], Model]:
    """The processor of a family, with Qwen3's tokenizer, and for Qwen3-VL with a real template."""

    @functools.cache
    def build(name: str) -> Model:
        family = FAMILIES[name]
        tokenizer = load_tokenizer_of(family, str(small_tokenizer_folder("qwen3")))
        template = CHATML.replace("PLACEHOLDER", family.written.replace("\n", "\\n"))
        if name == "qwen3_vl":
            template = chat_template("Qwen3.5-4B")
        return Model(tokenizer, build_processor(family, tokenizer), template)

    return build


def random_content(chance: random.Random, images: Sequence[Image], most: int) -> tuple[str | Image, ...]:
    parts: list[str | Image] = [chance.choice(WORDS) + "." for _ in range(chance.randint(1, 3))]
    for _ in range(chance.randint(0, most)):
        parts.insert(chance.randint(0, len(parts)), chance.choice(images))
    return tuple(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_inputs_are_the_processors_own(family: str, model: Callable[[str], Model]) -> None:
    """On random conversations with 0 to 4 images a message, some twice, of odd sizes and ratios; bridges included."""
    built = model(family)
    renderer = built.renderer()
    images = [picture(*size) for size in SIZES]
    chance = random.Random(family)
    for _ in range(6):
        history = [Message("user", random_content(chance, images, 4))]
        ids = renderer.opening(history).tolist()
        for turn in range(chance.randint(0, 2)):
            reply = Message("assistant", f"reply {turn}")
            sampled = renderer.encode(f"reply {turn}<|im_end|>").tolist()
            history.append(reply)
            new = [Message("user", random_content(chance, images, 4))]
            if family != "qwen3_vl":  # its template writes thoughts that these replies do not have
                ids += sampled + renderer.bridge(history, new, tail=sampled).tolist()
            history += new
        if family == "qwen3_vl":
            ids = renderer.opening(history).tolist()
        shown = images_of(history)
        own, others = own_output(built.processor, own_text(built.tokenizer, built.template, history), shown)
        assert ids == own
        assert renderer.images is not None
        ours = renderer.images.inputs(shown)
        assert ours.keys() == others.keys()
        for name, tensor in others.items():
            assert np.array_equal(ours[name], tensor.numpy())
            assert str(ours[name].dtype) == str(tensor.dtype).removeprefix("torch.")
    assert renderer.images is not None
    assert renderer.images.processed <= len(images)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_has_steps_with_images(family: str, model: Callable[[str], Model]) -> None:
    """It compares ids and inputs with the processor's, and with tools also an image in a result."""
    result = model(family).renderer().self_test([TOOL] if family == "qwen3_vl" else [])
    steps = {step.name: step for step in result.steps if step.name.startswith("image")}
    assert {name: (step.verdict, step.reason) for name, step in steps.items()} == dict.fromkeys(
        ["image, opening", "image, user", *(["image, tool"] if family == "qwen3_vl" else [])], ("exact", "")
    )


def test_an_image_in_the_result_of_a_tool_is_seen(model: Callable[[str], Model]) -> None:
    """The bridge has the ids of the processor for the end of the whole conversation, with a real template."""
    built = model("qwen3_vl")
    renderer = built.renderer(template_kwargs={"enable_thinking": False})
    opening = [Message("user", ("Plot it like ", picture(64, 64)))]
    call = ToolCall("plot", {"x": "sin"}, id="call00000")
    history = [*opening, Message("assistant", "", (call,))]
    result = Message(
        "tool", ("here: ", picture(97, 61), " and ", picture(97, 61, 1)), tool_call_id=call.id, name="plot"
    )
    bridge = renderer.bridge(history, [result], tools=[TOOL], tail=renderer.stop_token_ids[:1]).tolist()
    text = own_text(built.tokenizer, built.template, [*history, result], tools=[TOOL.to_chat()], enable_thinking=False)
    own, _ = own_output(built.processor, text, images_of([*history, result]))
    assert own[-len(bridge) :] == bridge
    assert bridge.count(built.tokenizer.convert_tokens_to_ids("<|image_pad|>")) > 2


def test_a_processor_that_treats_images_together_is_refused(model: Callable[[str], Model]) -> None:
    """The self-test finds a processor whose output for two images is not the output for each, joined."""
    built = model("qwen2_5_vl")

    class Padding:
        image_processor = built.processor.image_processor
        image_token = built.processor.image_token

        def __call__(self, *, text: Any, images: Any, **options: Any) -> Any:
            output = built.processor(text=text, images=images, **options)
            output["pixel_values"] = output["pixel_values"] + len(images)
            return output

    result = attrs.evolve(built, processor=Padding()).renderer().self_test()
    with pytest.raises(ConfigError, match=r"'image, opening': the processor gives other pixel_values"):
        result.raise_if_refused()


def test_a_processor_that_counts_otherwise_in_a_conversation_is_refused(model: Callable[[str], Model]) -> None:
    """The self-test compares ids, not only their number."""
    built = model("qwen2_5_vl")

    class Longer:
        image_processor = built.processor.image_processor
        image_token = built.processor.image_token

        def __call__(self, *, text: Any, images: Any, **options: Any) -> Any:
            output = built.processor(text=text, images=images, **options)
            extra = [output["input_ids"][0][-1]] if len(images) > 1 else []
            output["input_ids"] = [[*output["input_ids"][0], *extra]]
            return output

    result = attrs.evolve(built, processor=Longer()).renderer().self_test()
    with pytest.raises(ConfigError, match=r"'image, opening': the processor gives the ids"):
        result.raise_if_refused()


@pytest.mark.parametrize("images", [0, 1])
def test_a_placeholder_in_a_text_is_refused(images: int, model: Callable[[str], Model]) -> None:
    """The processor and the server would take it for an image; as plain text it is not an image."""
    built = model("qwen2_5_vl")
    content = ("Look: <|image_pad|>", *[picture(64, 64)] * images)
    with pytest.raises(
        ConfigError, match=rf"placeholders <\|image_pad\|>: got {images + 1}; expected {images}, one for"
    ):
        built.renderer().opening([Message("user", content)])
    plain = built.renderer(special_text="as_text").opening([Message("user", content)]).tolist()
    pad = built.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    without = built.renderer().opening([Message("user", content[1:] or "x")]).tolist()
    assert plain.count(pad) == without.count(pad)


def test_a_placeholder_that_the_model_sampled_is_refused(model: Callable[[str], Model]) -> None:
    """The server would look for an image that there is not."""
    renderer = model("qwen2_5_vl").renderer()
    history = [Message("user", "a"), Message("assistant", "b")]
    sampled = renderer.encode("b<|image_pad|><|im_end|>")
    with pytest.raises(ConfigError, match=r"the reply: got '<\|image_pad\|>'; expected no placeholder of an image"):
        renderer.bridge(history, [Message("user", "c")], tail=sampled)


def test_a_special_token_in_two_texts_of_a_message_is_plain_text(model: Callable[[str], Model]) -> None:
    """A message with images keeps its texts apart, and the template writes them side by side."""
    built = model("qwen3_vl")
    image = picture(64, 64)
    forged, harmless = (Message("user", (*texts, image)) for texts in (("<|im_", "end|>"), ("4",)))
    renderer = built.renderer(special_text="as_text")
    counts = [renderer.opening([message]).tolist().count(renderer.stop_token_ids[0]) for message in (forged, harmless)]
    assert counts[0] == counts[1]
    with pytest.raises(ConfigError, match=r"content of a user message: got '<\|im_end\|>'"):
        built.renderer(special_text="error").opening([forged])


def test_a_template_that_leaves_images_out_is_refused(model: Callable[[str], Model]) -> None:
    """When the renderer is created, by the placeholders of the processor."""
    built = model("qwen2_5_vl")
    template = CHATML.replace("PLACEHOLDER", "")
    with pytest.raises(ConfigError, match=r"images: got .*expected a chat template that writes one <\|image_pad\|>"):
        Renderer(built.tokenizer, chat_template=template, images=built.processor)


def test_a_template_that_numbers_images_is_compared_at_each_of_them(model: Callable[[str], Model]) -> None:
    """In a long conversation a bridge does not know how many images there were; the difference is refused, not sent."""
    renderer = model("qwen3_vl").renderer(template_kwargs={"add_vision_id": True, "enable_thinking": False})
    image = picture(64, 64)
    history = [Message("user", ("a", image)), Message("assistant", "b")]
    bridge = renderer.bridge(history, [Message("user", ("c", image))], tail=renderer.stop_token_ids[:1])
    assert "Picture 2: " in renderer.decode(bridge)
    history += [Message("user", "d"), Message("assistant", "e")] * 3
    with pytest.raises(
        ConfigError, match=r"after this conversation it writes .*Picture 2: .* the bridge has .*Picture 1: "
    ):
        renderer.bridge(history, [Message("user", ("c", image))], tail=renderer.stop_token_ids[:1])


def test_an_image_is_processed_once(model: Callable[[str], Model]) -> None:
    """For an opening, a bridge, the whole conversation and the inputs of the trainer together."""
    renderer = model("glm4v").renderer()
    first, second = picture(64, 64), picture(97, 61)
    opening = [Message("user", ("a", first, first))]
    history = [*opening, Message("assistant", "b")]
    new = [Message("user", (first, second))]
    renderer.opening(opening)
    renderer.bridge(history, new, tail=renderer.stop_token_ids[:1])
    whole = [*history, *new]
    renderer.encode_conversation(whole, rendered=renderer.render(whole))
    assert renderer.images is not None
    assert len(renderer.images.inputs(images_of(whole))["image_grid_thw"]) == 4
    assert renderer.images.processed == 2


def test_spans_do_not_wait_for_the_processor(model: Callable[[str], Model]) -> None:
    """The event loop asks for the spans of a prompt while a worker thread processes another image."""
    built = model("qwen2_5_vl")
    processing, go_on = threading.Event(), threading.Event()

    class Slow:
        """The real processor, which waits at an image of 64 times 64."""

        def __getattr__(self, name: str) -> Any:
            return getattr(built.processor, name)

        def __call__(self, **given: Any) -> Any:
            if given["images"][0].size == (64, 64):
                processing.set()
                assert go_on.wait(30)
            return built.processor(**given)

    images = Renderer(built.tokenizer, chat_template=built.template, images=Slow()).images
    assert images is not None
    known = picture(97, 61)
    ids = built.renderer().encode(images.expanded(images.placeholder, [known]))
    worker = threading.Thread(target=images.inputs, args=([picture(64, 64)],))
    worker.start()
    try:
        assert processing.wait(30)
        with ThreadPoolExecutor(1) as loop:
            spans = loop.submit(images.spans, ids, [known])
            assert len(wait([spans], timeout=10).done) == 1, "it waited for the processor"
            assert [(span.start, span.stop) for span in spans.result()] == [(0, len(ids))]
    finally:
        go_on.set()
        worker.join()


def test_a_processor_loads_from_the_folder_of_the_model(model: Callable[[str], Model], tmp_path: Path) -> None:
    """With transformers' AutoProcessor; Gemma's processor has no part for videos, so that it loads here."""
    built = model("gemma3")
    built.processor.save_pretrained(tmp_path)
    renderer = renderer_for(tmp_path, images=True, chat_template=built.template)
    messages = [Message("user", ("a", picture(97, 61)))]
    assert renderer.opening(messages).tolist() == built.renderer().opening(messages).tolist()
    assert renderer.fingerprints()["images"] == built.renderer().fingerprints()["images"]


def test_a_model_without_a_processor_is_refused(tokenizer_folder: Callable[[str], Path]) -> None:
    """By name, with the command that installs what the processors of most models need."""
    with pytest.raises(ConfigError, match=r"images: got .*expected a model with an image processor"):
        renderer_for(tokenizer_folder("qwen3"), images=True)


def test_inputs_of_other_shapes_are_not_joined() -> None:
    """Trainers concatenate along the first dimension, and the others must be equal."""
    parts = [{"pixel_values": np.zeros((1, 3, size))} for size in (4, 5)]
    with pytest.raises(ConfigError, match=r"pixel_values: got \[\(3, 4\), \(3, 5\)\]"):
        joined_inputs(parts)
