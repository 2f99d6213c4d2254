"""Independent references for the renderer: ``renderers`` of Prime Intellect, hand-written for each family, and OpenAI's
``openai-harmony``. Each builds the same bridge, or parses the same reply; the test explains each difference.

Their renderers keep thoughts here (``thinking_retention="all"``), as ``history="append"`` does.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Message
from rollouts.renderer import Renderer, speak
from tests.families import FAMILIES, TOOLS
from tests.test_families import World

ORACLES = {
    "Qwen3": "Qwen3Renderer",
    "Qwen3.5": "Qwen35Renderer",
    "GLM-4.6": "GLM45Renderer",
    "DeepSeek-V3": "DeepSeekV3Renderer",
    "DeepSeek-R1 distill": "DeepSeekR1Renderer",
    "gpt-oss": "GptOssRenderer",
}
HISTORY = [Message("system", "Be brief."), Message("user", "Well?")]


@pytest.fixture(scope="module")
def harmony_files(tokenizer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary of harmony in the form of its library, built from the local tokenizer without a download."""
    model = json.loads((tokenizer_folder("gptoss") / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    lines = [
        base64.b64encode(bytes(letters[letter] for letter in piece)).decode() + f" {rank}\n"
        for piece, rank in sorted(model["vocab"].items(), key=lambda entry: entry[1])
    ]
    folder = tmp_path_factory.mktemp("harmony")
    (folder / "o200k_base.tiktoken").write_text("".join(lines), encoding="ascii")
    return folder


@pytest.fixture
def harmony(harmony_files: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with its vocabulary in the expected folder."""
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(harmony_files))
    return pytest.importorskip("openai_harmony")


@functools.cache
def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import warnings of other packages
        return pytest.importorskip("renderers")


def oracle(name: str, tokenizer: Any) -> Any:
    library = _library()
    kind = ORACLES[name]
    return getattr(library, kind)(tokenizer, getattr(library, f"{kind}Config")(thinking_retention="all"))


class _Loaded:
    """``request`` for :mod:`tests.families`: whole tokenizers, as a reference has its ids; records the last one."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request, self.tokenizer = request, None

    def getfixturevalue(self, name: str) -> Any:
        if name != "small_tokenizer":
            return self.request.getfixturevalue(name)

        def load(*names: str) -> Any:
            self.tokenizer = self.request.getfixturevalue("tokenizer")(*names)
            return self.tokenizer

        return load


def both(name: str, request: pytest.FixtureRequest) -> tuple[Renderer, Any]:
    loaded = _Loaded(request)
    ours = FAMILIES[name].make(loaded)
    return ours, oracle(name, loaded.tokenizer)


def explained(name: str, ours: str, theirs: str, new: list[Message], *, cut: bool) -> tuple[str, str]:
    """Both bridges without their known differences; ours follows the given template."""
    if name == "GLM-4.6" and cut:
        # The template has no closing mark: after a cut reply it writes the next role's.
        # ``renderers`` writes an end of text.
        theirs = theirs.removeprefix("<|endoftext|>")
    if name in ("DeepSeek-V3", "DeepSeek-R1 distill"):
        # These templates write a newline between two outputs.
        ours = ours.replace("<｜tool▁output▁end｜>\n", "<｜tool▁output▁end｜>")
    if name == "DeepSeek-R1 distill":
        # This copy of the template closes the thought that its prompt opens, and opens none after tools, where the
        # reply continues without a header. ``renderers`` opens a thought at every turn.
        theirs = theirs.removesuffix("<think>\n")
        ours = ours.removesuffix("<think>\n</think>")
    if name == "gpt-oss":
        # The template writes results as JSON strings and leaves the channel of the reply to the model; ``renderers``
        # writes plain text and opens the analysis. The template closes a cut call with <|call|>, it with <|end|>.
        theirs = theirs.removesuffix("<|channel|>analysis<|message|>")
        for message in new:
            if message.role == "tool":
                ours = ours.replace(json.dumps(message.content, ensure_ascii=False), message.content)
        if cut:
            ours = ours.replace("<|call|>", "<|end|>", 1).replace("<|return|>", "<|end|>", 1)
    return ours, theirs


@pytest.mark.parametrize("name", ORACLES)
def test_their_bridge_is_ours(name: str, request: pytest.FixtureRequest, harmony: Any) -> None:
    """Bridges are equal id by id, after whole and cut replies, for results and users; explained cases as text."""
    ours, theirs = both(name, request)
    family = FAMILIES[name]
    tools = TOOLS if family.calls else ()
    schemas = [tool.to_chat()["function"] for tool in tools] or None
    same = 0
    for seed in range(90):
        world = World(family, ours, tools, seed, cuts=False)
        reply, new = world.next_reply()
        new = [attrs.evolve(message, content=world.text()) for message in new]
        prompt = ours.opening(HISTORY, tools).tolist()
        ids = speak(ours, HISTORY, reply, new, tools).tolist()
        cut = seed % 3 == 0
        ids = ids[:-1] if cut else ids
        bridge = ours.bridge([*HISTORY, reply], new, tools=tools, tail=ids).tolist()
        whole = theirs.bridge_to_next_turn(prompt, ids, [message.to_chat() for message in new], tools=schemas)
        assert whole is not None
        assert whole.token_ids[: len(prompt) + len(ids)] == prompt + ids
        other = whole.token_ids[len(prompt) + len(ids) :]
        same += bridge == other
        one, two = explained(name, ours.decode(bridge), ours.decode(other), new, cut=cut)
        assert one == two
    assert same == 90 or name in ("GLM-4.6", "DeepSeek-V3", "DeepSeek-R1 distill", "gpt-oss")


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "gpt-oss"])
def test_their_reading_is_ours(name: str, request: pytest.FixtureRequest, harmony: Any) -> None:
    """Calls, arguments, thoughts and content are equal."""
    ours, theirs = both(name, request)
    family = FAMILIES[name]
    tools = TOOLS if family.calls else ()
    schemas = [tool.to_chat()["function"] for tool in tools] or None
    prompt = ours.opening(HISTORY, tools).tolist()
    for seed in range(90):
        world = World(family, ours, tools, seed, cuts=False)
        reply, new = world.next_reply()
        ids = speak(ours, HISTORY, reply, new, tools).tolist()  # encoded by the tokenizer, since they find marks by id
        read, other = (
            ours.parse(ids, tools=tools, prompt=prompt),
            theirs.parse_response(ids, tools=schemas, prompt_ids=prompt),
        )
        assert [(call.name, dict(call.arguments)) for call in read.tool_calls] == [
            (call.name, call.arguments) for call in other.tool_calls if call.status == "ok"
        ]
        assert read.content.strip() == other.content.strip()
        assert (read.reasoning or "").strip() == (other.reasoning_content or "").strip()


def test_harmony_reads_what_our_dialect_reads(request: pytest.FixtureRequest, harmony: Any) -> None:
    """gpt-oss compared with its own library: channels, recipients and arguments, from the sampled ids."""
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    family = FAMILIES["gpt-oss"]
    ours = family.make(_Loaded(request))
    for seed in range(90):
        world = World(family, ours, TOOLS, seed, cuts=False)
        reply, new = world.next_reply()
        ids = speak(ours, HISTORY, reply, new, TOOLS).tolist()
        read = ours.parse(ids, tools=TOOLS)
        messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        texts = [(message, "".join(part.text for part in message.content)) for message in messages]
        calls = [(m.recipient.removeprefix("functions."), json.loads(text)) for m, text in texts if m.recipient]
        assert [(call.name, dict(call.arguments)) for call in read.tool_calls] == calls
        thoughts = [text for m, text in texts if m.channel == "analysis" and not m.recipient]
        assert (read.reasoning or "") == "\n".join(thoughts)
        assert read.content == "\n".join(text for m, text in texts if m.channel == "final")


PIECES = (
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
    *(" to=functions.look<|channel|>commentary json<|message|>",) * 2,
    "<|start|>assistant",
    "<|end|>",
    "<|end|><|start|>assistant",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>json",
    " to=look",
    *('{"at": "x"}',) * 4,
    '{"at": ',
    '"x"',
    "words",
    " ",
    "\n",
)
"""Valid and invalid parts of gpt-oss replies."""


def test_harmony_reads_broken_replies_as_our_dialect_does(request: pytest.FixtureRequest, harmony: Any) -> None:
    """We parse the same calls as the library; calls that it rejects never run.

    The library rejects a whole reply for text after its last message, where we run a valid call before that text. It
    takes any word in the header as a recipient; here a recipient needs ``to=``.
    """
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    parse = FAMILIES["gpt-oss"].make(request).dialect.parse

    def theirs(text: str) -> list[tuple[str, str, str]] | None:
        ids = encoding.encode(text, allowed_special="all")
        try:
            messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        except harmony.HarmonyError:
            return None
        return [(m.recipient or "", m.channel or "", "".join(part.text for part in m.content)) for m in messages]

    rng = random.Random(0)
    compared = refused = ran = 0
    for _ in range(3000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8)))
        read, judged = parse(text), theirs(text)
        for call in read.tool_calls:
            if call.error is None:
                ran += 1
                ((recipient, _, words),) = theirs(call.raw) or [("", "", "")]
                assert (recipient.removeprefix("functions."), json.loads(words)) == (call.name, call.arguments)
        if judged is None:
            refused += 1
        elif all(recipient in ("", "functions.look", "look") for recipient, _, _ in judged):
            compared += 1
            calls = [words for recipient, _, words in judged if recipient]
            assert [call.error is None for call in read.tool_calls] == [
                words.strip() == '{"at": "x"}' for words in calls
            ]
            thoughts = [
                words.strip() for recipient, channel, words in judged if (recipient, channel) == ("", "analysis")
            ]
            assert (read.reasoning or "") == "\n".join(thoughts)
    assert min(compared, refused) > 300
    assert ran > 20
