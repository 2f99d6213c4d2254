"""Plain values: immutable, validated when created, and without secrets in their text."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import PIL.Image
import pytest

from rollouts.dtypes import (
    Completion,
    Endpoint,
    Extras,
    Image,
    Limits,
    Message,
    Prompt,
    SamplingParams,
    Tool,
    ToolCall,
    VersionSpan,
    as_messages,
    as_record,
    chat_text,
    hashes_in,
    images_in,
    packed_logprobs,
    packed_tokens,
    with_images,
)
from rollouts.errors import ConfigError

BAD: list[tuple[type, dict[str, Any], str]] = [
    (SamplingParams, {"temperature": -1}, "SamplingParams.temperature: got -1; expected a number >= 0"),
    (SamplingParams, {"temperature": float("nan")}, "SamplingParams.temperature: got nan"),
    (SamplingParams, {"temperature": True}, "SamplingParams.temperature: got True"),
    (SamplingParams, {"top_p": 0}, "SamplingParams.top_p: got 0; expected a number in"),
    (SamplingParams, {"top_k": 0}, "SamplingParams.top_k: got 0; expected -1 or an integer >= 1"),
    (SamplingParams, {"max_new_tokens": 0}, "SamplingParams.max_new_tokens: got 0; expected an integer >= 1"),
    (SamplingParams, {"max_new_tokens": 2.0}, "SamplingParams.max_new_tokens: got 2.0"),
    (SamplingParams, {"stop": 5}, "SamplingParams.stop: got 5; expected"),
    (SamplingParams, {"stop": [5]}, "SamplingParams.stop: got"),
    (SamplingParams, {"stop": list(map(str, range(33)))}, "at most 32"),
    (Endpoint, {"provider": "openai"}, 'Endpoint.provider: got \'openai\'; expected "sglang" or "vllm"'),
    (Endpoint, {"base_url": "localhost:30000"}, "Endpoint.base_url: got"),
    (Endpoint, {"base_url": []}, "Endpoint.base_url: got"),
    (Endpoint, {"base_url": 30000}, "Endpoint.base_url: got 30000"),
    (Endpoint, {"base_url": [None]}, "Endpoint.base_url: got"),
    (Endpoint, {"max_retries": -1}, "Endpoint.max_retries: got -1"),
    (Endpoint, {"request_seconds": 0}, "Endpoint.request_seconds: got 0"),
    (Endpoint, {"model": ""}, "Endpoint.model: got ''"),
    (Limits, {"max_turns": 0}, "Limits.max_turns: got 0; expected an integer >= 1"),
    (Limits, {"max_tokens": 1}, "Limits.max_tokens: got 1"),
    (Limits, {"on_cut": "go"}, "Limits.on_cut: got 'go'"),
    (Limits, {"step_seconds": float("inf")}, "Limits.step_seconds: got inf"),
    (Message, {"role": "robot"}, "Message.role: got 'robot'"),
    (Message, {"role": ["user"]}, "Message.role: got"),
    (
        Message,
        {"role": "user", "content": None},
        "Message.content: got None; expected a string, or a sequence of strings and Images",
    ),
    (Message, {"role": "user", "content": ["a", 3]}, "Message.content: got"),
    (Image, {"data": b"\xff\xd8\xff"}, "Image.data: got"),
    (Tool, {"name": ""}, "Tool.name: got ''"),
    (Tool, {"name": "add", "parameters": {"type": "string"}}, "Tool.parameters: got"),
    (Prompt, {"prompt": {"role": "user"}}, "Prompt.prompt: got"),
    (Prompt, {"prompt": 3}, "Prompt.prompt: got 3"),
    (Prompt, {"prompt": ["hello"]}, "prompt: got 'hello'; expected a message or a chat dict"),
]


@pytest.mark.parametrize(("cls", "fields", "words"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_value_is_refused_by_field_value_and_expectation(cls: Any, fields: dict[str, Any], words: str) -> None:
    """When it is created, so that no other module validates it again."""
    with pytest.raises(ConfigError) as caught:
        cls(**fields)
    assert words in str(caught.value)


def test_the_api_key_is_never_printed() -> None:
    """Neither by repr and str nor by an error about another field."""
    endpoint = Endpoint(api_key="sk-secret", base_url=["http://a:1/", "http://b:2"])
    assert "secret" not in f"{endpoint!r} {endpoint} {[endpoint]}"
    assert endpoint.base_url == ("http://a:1", "http://b:2")
    with pytest.raises(ConfigError) as caught:
        Endpoint(api_key="sk-secret", model="")
    assert "secret" not in str(caught.value)


def test_values_cannot_be_changed() -> None:
    """They are frozen, and lists become tuples."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Limits().max_turns = 3  # type: ignore[misc]
    message = Message("assistant", tool_calls=[ToolCall("add")])
    assert isinstance(message.tool_calls, tuple)
    assert Prompt([message]).prompt == (message,)


def test_a_stop_string_is_one_string() -> None:
    """It is not split into characters."""
    assert SamplingParams(stop="</answer>").stop == ("</answer>",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, id="c1"),), reasoning="hm"),
        Message("tool", "8", tool_call_id="c1", name="add"),
    ],
)
def test_a_message_survives_its_chat_dict(message: Message) -> None:
    """``from_chat`` inverts ``to_chat``."""
    assert Message.from_chat(message.to_chat()) == message


def test_messages_in_any_shape() -> None:
    """Text, chat dicts and text parts are accepted, and nothing else."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert as_messages("ab") == as_messages(parts) == as_messages([Message("user", "ab")])
    with pytest.raises(ConfigError, match=r"message\.content: got"):
        as_messages([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_conversation_of_the_openai_api_is_read_as_it_is() -> None:
    """Role developer, arguments as JSON text and fields that a table fills with None need no conversion."""
    empty = {"name": None, "tool_calls": None, "tool_call_id": None}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
    rows = [
        {"role": "developer", "content": "Be brief.", **empty},
        {"role": "user", "content": "1+1?", **empty},
        {"role": "assistant", "content": None, "thinking": "hm", **empty, "tool_calls": [call]},
        {"role": "tool", "content": "2", **empty, "tool_call_id": "c1"},
    ]
    assert as_messages(rows) == (
        Message("system", "Be brief."),
        Message("user", "1+1?"),
        Message("assistant", tool_calls=(ToolCall("add", {"a": 1, "b": "x"}, id="c1"),), reasoning="hm"),
        Message("tool", "2", tool_call_id="c1"),
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "null", '{"a": NaN}', ["x"], 3])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    """The message names the field and shows the value; nothing is repaired."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ConfigError, match=r"message.tool_calls.arguments: got .*; expected an object, or an object as"):
        as_messages([{"role": "assistant", "tool_calls": [call]}])


def test_a_call_in_the_old_field_of_the_api_is_refused() -> None:
    """A call in function_call would be lost without a message."""
    with pytest.raises(ConfigError, match=r"message.function_call: got .*; expected none: tool_calls replaces"):
        as_messages([{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}])


@pytest.mark.parametrize(
    "function",
    [
        {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}, "strict": True},
        {"strict": False, "description": "Adds.", "name": "add"},
        {"name": "add", "description": None, "parameters": None},
        {"name": "add", "parameters": {}},
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_template_sees_the_tool_of_a_data_set_as_it_is(function: dict[str, Any], wrapped: bool) -> None:
    """Unknown keys, the order of keys, absent descriptions and absent types stay, and the tool is still readable."""
    chat = {"type": "function", "function": function}
    tool = Tool.from_chat(chat if wrapped else function)
    assert tool.name == "add"
    assert tool.description == (function.get("description") or "")
    assert json.dumps(tool.to_chat()) == json.dumps(chat)
    assert tool.parameters.get("properties", {}) == (function.get("parameters") or {}).get("properties", {})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"type": "function"}, r"Tool.name: got ''"),
        ({"type": "function", "function": "add"}, r"tool: got .*; expected an object with a function that has a name"),
        ("add", r"tool: got 'add'; expected an object"),
        ({"name": "add", "parameters": {"type": "array"}}, r"Tool.parameters: got .*; expected a JSON schema of an"),
        ({"name": "add", "parameters": {"properties": None}}, r"Tool.parameters: got"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(chat: Any, message: str) -> None:
    """A tool needs a name, and an object schema for its arguments."""
    with pytest.raises(ConfigError, match=message):
        Tool.from_chat(chat)


@pytest.mark.parametrize("values", [[1.5], [2**31], [-(2**31) - 1], np.array([2**40]), np.array([0.5]), ["1"], [[1]]])
def test_a_token_id_is_never_changed_in_packing(values: Any) -> None:
    """A value that does not fit int32 exactly is refused, neither wrapped nor rounded."""
    with pytest.raises((ValueError, OverflowError)):
        packed_tokens(values)


def test_a_column_over_bytes_is_not_copied() -> None:
    """Bytes are immutable; a view of a writeable buffer is copied."""
    column = np.frombuffer(np.arange(3, dtype=np.int32).tobytes(), np.int32)
    assert packed_tokens(column) is column
    for buffer in (bytearray(column.tobytes()), memoryview(bytearray(column.tobytes())), np.arange(3, dtype=np.int32)):
        view = np.frombuffer(buffer, np.int32)
        view.flags.writeable = False
        packed = packed_tokens(view)
        np.frombuffer(buffer, np.int32)[0] = 9
        assert packed.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "values", [[], [1, 2], (1, 2), range(3), np.arange(3), np.arange(3, dtype=np.uint8), iter([4])]
)
def test_packed_columns_are_read_only_copies(values: Any) -> None:
    """int32 and float32, one dimension."""
    for pack, dtype in ((packed_tokens, np.int32), (packed_logprobs, np.float32)):
        column = pack(values)
        assert column.dtype == dtype
        assert not column.flags.writeable
        assert column.base is None


def completion(**fields: Any) -> Completion:
    valid: dict[str, Any] = {
        "tokens": [5, 6],
        "logprobs": [-0.1, -0.2],
        "finish_reason": "stop",
        "versions": [VersionSpan("v1", 0, 2)],
        "prompt_tokens": 3,
        "prompt_digest": 0,
        "request_id": "r",
    }
    return Completion(**{**valid, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [-0.1]},
        {"logprobs": [-0.1, None]},
        {"logprobs": [-0.1, float("nan")]},
        {"logprobs": [-0.1, float("-inf")]},
        {"logprobs": [-0.1, 0.5]},
        {"versions": []},
        {"versions": [VersionSpan("v1", 0, 1)]},
        {"versions": [VersionSpan("v1", 0, 3)]},
        {"versions": [VersionSpan("v1", 0, 2), VersionSpan("v2", 1, 2)]},
        {"versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", 0, 1)]},
        {"versions": [VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 2)]},
        {"finish_reason": "tool_calls"},
    ],
)
def test_a_completion_needs_a_logprob_and_a_version_for_each_token(fields: dict[str, Any]) -> None:
    """Law 2 is checked where tokens enter the package."""
    with pytest.raises(ValueError, match=r"\S"):
        completion(**fields)


def test_completions_compare_and_pickle() -> None:
    """The columns are arrays, and equality still returns a bool."""
    assert completion() == completion()
    assert completion() != completion(tokens=[5, 7])
    assert pickle.loads(pickle.dumps(completion())) == completion()
    assert len(completion(tokens=[], logprobs=[], versions=[]).tokens) == 0


def test_joined_extras_keep_the_first_row_of_each_position() -> None:
    """A later part may repeat rows, but a gap is an error."""

    def part(start: int, rows: list[int]) -> Extras:
        return Extras(({"seconds": 1.0},), np.array([[row] for row in rows], np.int32), start)

    joined = Extras.joined([part(2, [20, 21]), Extras(), part(3, [31, 32, 33]), part(0, [40] * 8)])
    assert joined.experts is not None
    assert joined.experts[:, 0].tolist() == [20, 21, 32, 33, 40, 40]
    assert (joined.experts_start, len(joined.requests), joined.top_p_ids) == (2, 3, None)
    with pytest.raises(ValueError, match="from position 5 on; expected 4 or less"):
        Extras.joined([part(2, [20, 21]), part(5, [1])])


def test_sets_of_top_p_add_up() -> None:
    """The sizes equal those of the ids."""
    with pytest.raises(ValueError, match="have 3 ids; expected 4"):
        Extras(top_p_ids=packed_tokens([1, 2, 3]), top_p_counts=packed_tokens([2, 2]))


def _pixels(width: int, height: int, mode: str = "RGB") -> PIL.Image.Image:
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 4), np.uint8)
    return PIL.Image.fromarray(noise, "RGBA").convert(mode)


def _file(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format=kind, **options)
    return out.getvalue()


FORMS: dict[str, Callable[[bytes, Path], Any]] = {
    "bytes": lambda data, path: data,
    "a path": lambda data, path: path,
    "the text of a path": lambda data, path: str(path),
    "a PIL image": lambda data, path: PIL.Image.open(path),
    "a data URL": lambda data, path: f"data:image/png;base64,{base64.b64encode(data).decode()}",
    "an Image": lambda data, path: Image(data),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_has_one_form_whatever_it_was_made_from(form: str, tmp_path: Path) -> None:
    """Its bytes are a PNG in RGB with the pixels of the source, and its hash is the hash of the bytes."""
    data = _file(_pixels(7, 5))
    (tmp_path / "image.png").write_bytes(data)
    image = Image.of(FORMS[form](data, tmp_path / "image.png"))
    assert (image.width, image.height, image.data[:4]) == (7, 5, b"\x89PNG")
    assert image.to_pil().tobytes() == _pixels(7, 5).tobytes()
    assert Image.of(image.url) == image
    assert hash(Image.of(image.data)) == hash(image)
    assert image.sha256 in repr(image)
    assert len(repr(image)) < 100
    if form != "a PIL image":
        assert image.data == data


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_an_image_of_another_mode_becomes_rgb(mode: str) -> None:
    """The conversion is Pillow's, as in the processors of transformers."""
    given = _pixels(6, 4, mode if mode == "RGBA" else "RGB").convert(mode)
    assert Image.of(_file(given)).to_pil().tobytes() == given.convert("RGB").tobytes()


def test_a_png_of_16_bits_becomes_one_of_8() -> None:
    """With the upper byte of each channel, as Pillow and the processors of transformers read it."""
    rows = b"".join(b"\0" + bytes([high, 7] * 3 * 2) for high in (1, 200))  # filter 0, two pixels
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    image = Image.of(b"\x89PNG\r\n\x1a\n" + body)
    assert image.to_pil().tobytes() == bytes([1] * 6 + [200] * 6)


def test_a_photograph_is_turned_upright() -> None:
    """A file with an EXIF orientation is read as transformers reads it."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    image = Image.of(_file(_pixels(8, 4), "JPEG", exif=exif))
    assert (image.width, image.height) == (4, 8)


def _with_size(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header has this size."""
    header = struct.pack(">4sIIBBBBB", b"IHDR", width, height, 8, 2, 0, 0, 0)
    whole = _file(_pixels(1, 1))
    return whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]


BAD_IMAGES: dict[str, tuple[Any, str]] = {
    "a huge one": (_with_size(8_192, 8_193), "image: got '8192x8193 pixels'; expected at most 67,108,864 pixels"),
    "no image": (b"GIF89a not really", "image: got b'GIF89a not really'; expected an image that Pillow decodes"),
    "PostScript, for which Pillow starts a program": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "decodes as BMP, GIF, JPEG",
    ),
    "an uncommon format": (b"P6 1 1 255\n\0\0\0", "decodes as BMP, GIF, JPEG, PNG, TIFF or WEBP"),
    "cut off": (_file(_pixels(30, 30))[:-400], "expected an image that Pillow decodes"),
    "a URL": ("https://example.org/cat.png", "expected a data: URL, a path or bytes: no image is downloaded"),
    "no file": ("/none/cat.png", "image: got '/none/cat.png'; expected a file with an image"),
    "another data URL": ("data:text/plain;base64,aGk=", "expected a data: URL of an image in base64"),
    "no base64": ("data:image/png;base64,?", "expected a data: URL of an image in base64"),
    "a number": (3, "image: got 3; expected bytes of an image file, a path, a PIL image or a data: URL"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_what_is_no_image_is_refused(name: str) -> None:
    """When it is converted, long before a server would read it."""
    value, words = BAD_IMAGES[name]
    with pytest.raises(ConfigError) as caught:
        Image.of(value)
    assert words in str(caught.value)


def _part(form: str, image: Image) -> Any:
    return {
        "image_url": {"type": "image_url", "image_url": {"url": image.url, "detail": "auto"}},
        "image_url as text": {"type": "image_url", "image_url": image.url},
        "input_image": {"type": "input_image", "image_url": image.url},
        "image": {"type": "image", "image": image.to_pil()},
        "an Image": image,
    }[form]


@pytest.mark.parametrize("form", ["image_url", "image_url as text", "input_image", "image", "an Image"])
def test_image_parts_of_chat_dicts_load(form: str) -> None:
    """In the forms of the OpenAI API and of transformers, in their order among the texts."""
    image = Image.of(_file(_pixels(4, 4)))
    chat = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, _part(form, image), {"type": "text", "text": "b"}],
    }
    message = Message.from_chat(chat)
    assert [part if isinstance(part, str) else part.to_pil().tobytes() for part in message.content] == [
        "a",
        image.to_pil().tobytes(),
        "b",
    ]
    assert (message.text, len(message.images), chat_text(chat["content"])) == ("ab", 1, "a[image]b")
    assert Message.from_chat(json.loads(json.dumps(message.to_chat()))) == message
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
        {"type": "image", "image": b"", "max_pixels": 50176},
        {"type": "video", "video": "a.mp4"},
        {"type": "image"},
        None,
    ],
)
def test_a_part_that_cannot_be_shown_is_refused(part: Any) -> None:
    """A path or an address in a chat dict reads no file, and an option of a part is not dropped."""
    with pytest.raises(ConfigError, match=r"message\.content: got"):
        Message.from_chat({"role": "user", "content": [part]})


def test_a_record_names_an_image_by_its_hash() -> None:
    """Without its bytes; what loads images by hash restores the message, and people read size and hash."""
    image = Image.of(PIL.Image.new("RGB", (3, 2)))
    message = Message("tool", ("a", image), tool_call_id="c", name="plot")
    part = {"type": "image", "sha256": image.sha256, "width": 3, "height": 2}
    record = {"role": "tool", "content": [{"type": "text", "text": "a"}, part], "tool_call_id": "c", "name": "plot"}
    assert message.to_record() == record
    for form in (message, message.to_chat(), {**record, "content": ["a", image]}, record):
        assert as_record(form)["content"][-1] == part
        assert list(images_in(form)) == ([] if form is record else [image])
    assert hashes_in([record, {"role": "user", "content": "text"}]) == [image.sha256]
    assert as_messages(with_images([record], {image.sha256: image}.__getitem__)) == (message,)
    assert chat_text(record["content"]) == f"a[image 3x2 {image.sha256[:8]}]" == f"a{image.label}"
    with pytest.raises(ConfigError, match=r"message.content: got .*expected an image part with type and image alone"):
        Message.from_chat(record)


def test_content_without_images_is_text() -> None:
    """A sequence of texts is joined, so that readers of text meet one form."""
    assert Message("user", ("a", "", "b")) == Message("user", "ab")
    assert Message("user", ()).content == ""


def test_a_reader_of_text_refuses_images_by_name() -> None:
    """The error names the reader and the image."""
    image = Image.of(_file(_pixels(4, 4)))
    with pytest.raises(ConfigError) as caught:
        Message("tool", ["plot: ", image]).only_text("the model X")
    assert str(caught.value) == f"content of a tool message: got {image!r}; expected text: the model X has no images"
    assert Message("tool", "plot").only_text("the model X") == "plot"


def test_content_is_plain_text() -> None:
    """Also where a data set has a subclass of ``str``, such as NumPy's."""
    message = Message("user", np.str_("One?"))
    assert type(message.content) is str
    assert message == Message("user", "One?")
    assert message.to_chat() == {"role": "user", "content": "One?"}
