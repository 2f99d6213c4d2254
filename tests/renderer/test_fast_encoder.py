"""The fast encoder gives the ids of the tokenizer, or the tokenizer encodes."""

from __future__ import annotations

import datetime
import inspect
import json.decoder
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Message, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.renderer import load_tokenizer
from rollouts.renderer.fast_encoder import FastEncoder, hard_texts
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.tokenizer import LOADED_AT, Codec

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

PIECES = [
    *hard_texts([])[:12],
    "don't",
    "  ",
    "\n\n",
    "\t",
    "1234",
    "CamelCASE",
    "😀",
    "é",
    "你好",
    "<|im_",
    "|>",
    "x" * 40,
]


TASKS = ["gsm8k_test", "math500", "mbpp_sanitized"]
TEMPLATES = ["Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.1", "openai-gpt-oss-120b", "GLM-4.6"]
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}})


def any_texts(marks: list[str], count: int, seed: int = 0) -> list[str]:
    """Texts of hard pieces, added tokens and random characters of all planes."""
    rng = random.Random(seed)

    def piece() -> str:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(PIECES)
        if kind < 0.6 and marks:
            return rng.choice(marks)
        first, stop = rng.choice([(0, 0x80), (0, 0x250), (0, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000)])
        return "".join(chr(rng.randrange(first, stop)) for _ in range(rng.randint(1, 12)))

    return ["".join(piece() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def of_bytes(vocabulary: dict[str, int] | None = None) -> Any:
    """A byte-level tokenizer without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary or {one: at for at, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def codec_of(raw: Any) -> Codec:
    return Codec(transformers.PreTrainedTokenizerFast(tokenizer_object=raw))


def parts_of(sources: Sequence[str], count: int, seed: int = 1) -> list[str]:
    """Parts of up to 400 characters, from any place of the texts."""
    rng = random.Random(seed)
    parts = []
    for _ in range(count):
        source = rng.choice(sources)
        first = rng.randrange(len(source))
        parts.append(source[first : first + rng.randint(1, 400)])
    return parts


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    """Number of encoded texts of each kind."""
    return 50_000 if request.config.getoption("--long") else 1_000


@pytest.fixture(scope="module")
def sources(asset: Callable[[str], Path], chat_template: Callable[[str], str]) -> list[str]:
    """Code, tasks, and openings that templates write for tasks."""
    paths = [asset(f"datasets/{name}.jsonl") for name in TASKS]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [Message("user", line) for line in random.Random(2).sample(lines, 20)]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    openings = []
    for name in TEMPLATES:
        template = ChatTemplate(
            chat_template(name), name=name, variables=variables, moment=datetime.datetime(2026, 1, 1)
        )
        openings.append("".join(template.render([prompt], [TOOL]) for prompt in prompts))
    code = [inspect.getsource(module) for module in (random, json.decoder, datetime)]
    return [*code, "\n".join(lines), *openings]


@pytest.mark.parametrize("name", ["demo", "qwen3", "qwen2_5", "deepseek_v3", "gptoss"])
def test_it_gives_the_ids_of_the_tokenizer(
    name: str, tokenizer: Callable[..., Any], sources: list[str], count: int
) -> None:
    """Texts of all planes of Unicode, with added tokens; code, tasks and openings; 100,000 texts with ``--long``."""
    raw = (load_tokenizer(DEMO_MODEL) if name == "demo" else tokenizer(name)).backend_tokenizer
    fast = FastEncoder.of(raw)
    assert fast is not None
    marks = [token.content for token in raw.get_added_tokens_decoder().values()]
    texts = any_texts(marks, count) + parts_of(sources, count)
    for text, expected in zip(texts, raw.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        found = fast.encode(text)
        assert found is not None
        assert found.tolist() == expected.ids, repr(text)


def test_a_tokenizer_that_is_read_differently_is_found() -> None:
    """A vocabulary that lacks a byte: both drop it, or one gives another id; then ``tokenizers`` encodes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw = of_bytes({one: 3 * at for at, one in enumerate(alphabet) if one != "Q"})
    raw.add_tokens([tokenizers.AddedToken("<new>", normalized=False)])
    codec = codec_of(raw)
    assert codec.encoder == "tokenizers"
    assert codec.encode("a <new> b").tolist() == raw.encode("a <new> b", add_special_tokens=False).ids


def test_a_tokenizer_of_another_kind_is_not_loaded() -> None:
    """Such as a tokenizer with a vocabulary of whole words."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"plum": 0, "?": 1}, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    codec = codec_of(raw)
    assert codec.encode("plum tree").tolist() == [0, 1]
    assert codec.encoder == "tokenizers"


def test_tokens_that_are_added_later_are_encoded() -> None:
    """The tokenizer encodes from then on."""
    raw = of_bytes()
    codec = codec_of(raw)
    assert codec.encoder == "fastokens"
    before = codec.encode("a<new>")
    codec._raw.add_tokens([tokenizers.AddedToken("<new>", normalized=False)])
    assert codec.encode("a<new>").tolist() == [before[0], codec._raw.get_vocab_size() - 1]


class Counting:
    """A tokenizer that counts the calls of its methods."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._of, name)


def test_an_encode_does_not_read_the_vocabulary() -> None:
    """Reading it takes 27 to 170 ms with tokenizers 0.22, of the event loop; one id is looked up instead."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes())
    tokenizer._tokenizer = counting = Counting(tokenizer._tokenizer)
    codec = Codec(tokenizer)
    assert codec.encoder == "fastokens"
    counting.calls.clear()
    for number in range(20):
        codec.encode(f"plum {number}")
    assert counting.calls == {"id_to_token": 20}


def test_a_second_codec_does_not_change_the_tokenizer() -> None:
    """With tokenizers 0.22 a change fails ("Already borrowed") while the thread that loads the encoder encodes."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes())
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer._tokenizer = counting = Counting(tokenizer._tokenizer)
    Codec(tokenizer)
    assert counting.calls["no_truncation"] == 1
    Codec(tokenizer)
    assert (counting.calls["no_truncation"], counting.calls["no_padding"]) == (1, 0)


def test_an_encoder_is_loaded_once_for_a_tokenizer() -> None:
    """Two codecs of one tokenizer share it; truncation of the tokenizer does not concern it."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes())
    tokenizer.backend_tokenizer.enable_truncation(2)
    one, other = Codec(tokenizer), Codec(tokenizer)
    assert one.encoder == other.encoder == "fastokens"
    assert len(one.encode("plums")) == len(other.encode("plums")) == 5


def test_an_encoder_is_loaded_once_it_pays() -> None:
    """Its load takes the CPU time of a million tokens and more. Another codec of the tokenizer uses it at once."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes())
    one, other = Codec(tokenizer), Codec(tokenizer)

    def loads(codec: Codec) -> bool:
        return codec._loader is not None and codec._loader.begun is not None

    one.encode("a" * (LOADED_AT - 1))
    one.encode("a")
    assert not loads(one)
    one.encode("a")
    assert loads(one)
    assert one.encoder == "fastokens"
    assert other._fast is None
    other.encode("a")
    assert other._fast is not None


class Unreferable:
    """A tokenizer as before version 0.23 of its library: no weak reference to it."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def test_a_tokenizer_without_weak_references_is_loaded() -> None:
    """Those of the library before version 0.23, which transformers 5.9 needs."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes())
    tokenizer._tokenizer = Unreferable(tokenizer._tokenizer)
    codec = Codec(tokenizer)
    assert len(codec.encode("plums")) == 5
    assert codec.encoder == "fastokens"


def test_a_text_that_cannot_be_encoded_has_the_tokenizers_error() -> None:
    """A lone surrogate is refused."""
    codec = codec_of(of_bytes())
    assert codec.encoder == "fastokens"
    with pytest.raises(TypeError, match="must be str"):
        codec.encode("\ud800")
    assert len(codec.encode("plums")) == 5


# -- encoders that differ ---------------------------------------------------------------------------------------------

_SPLIT = r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Mutant:
    """A tokenizer whose description, which the fast encoder loads, differs from it."""

    def __init__(self, raw: Any, change: Callable[[dict[str, Any]], None]) -> None:
        self._raw, self._change = raw, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def to_str(self) -> str:
        description = json.loads(self._raw.to_str())
        self._change(description)
        return json.dumps(description)


_WITH_SIGNS = _SPLIT.replace(r"\p{L}\p{N}", r"\p{L}\p{M}\p{N}").replace(r"|\p{L}+|", r"|[\p{L}\p{M}]+|")


def split_by(pattern: str) -> Any:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    of_text = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, of_text])


def tiny(pattern: str, *more: str) -> Any:
    """A byte-level tokenizer of 900 tokens, trained on source code, hard texts and more."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = split_by(pattern)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    sources = [inspect.getsource(random), inspect.getsource(datetime)]
    made.train_from_iterator([*hard_texts([]), *sources, *more], trainer)
    return made


def test_a_rule_for_letters_that_takes_combining_signs_is_noticed() -> None:
    """``\\p{L}`` and ``[\\p{L}\\p{M}]`` differ only where a sign follows a letter, in a vocabulary that has both."""
    signed = [f"{chr(letter)}{chr(sign)} " for letter in range(0x61, 0x7B) for sign in range(0x300, 0x320)]
    raw = tiny(_WITH_SIGNS, *signed * 3)
    raw.pre_tokenizer = split_by(_SPLIT)
    assert FastEncoder.of(raw) is not None

    def change(description: dict[str, Any]) -> None:
        description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = _WITH_SIGNS

    assert FastEncoder.of(Mutant(raw, change)) is None


def test_every_lost_merge_of_a_small_vocabulary_is_noticed() -> None:
    """60 of 60 merges, each removed alone."""
    raw = tiny(_SPLIT)
    assert FastEncoder.of(raw) is not None
    merges = json.loads(raw.to_str())["model"]["merges"]
    unnoticed = []
    for number in random.Random(0).sample(range(len(merges)), 60):

        def change(description: dict[str, Any], number: int = number) -> None:
            del description["model"]["merges"][number]

        if FastEncoder.of(Mutant(raw, change)) is not None:
            unnoticed.append(merges[number])
    assert unnoticed == []
