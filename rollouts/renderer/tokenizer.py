"""Conversion between text and ids with the raw tokenizer.

Invariant: encoding adds no tokens (the template writes its own BOS) and does not change the tokenizer, so one codec
serves all threads. This module does not know messages or templates.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollouts.dtypes import TokenColumn
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.renderer.byte_level import ByteTable
from rollouts.renderer.fast_encoder import FastEncoder, loader
from rollouts.renderer.special_text import plain_encoder

__all__ = [
    "RESPONSE_TEMPLATE",
    "Codec",
    "declared_vocab_size",
    "load_tokenizer",
    "local_decoder",
    "response_template_of",
    "stop_ids_of",
    "vocab_size_of",
]

RESPONSE_TEMPLATE = "response_template"
"""The entry of tokenizer_config.json with the publisher's way to read replies, and the name of that dialect."""

_IMPORTING = threading.Lock()
_NO_OWN_CODE = (
    "a tokenizer without code of the model (auto_map in tokenizer_config.json), which is not run. Load it once with"
    " trust_remote_code=True, if you trust the code, and save a folder with tokenizer.json and without auto_map"
)


def load_tokenizer(path_or_name: str | Path, *, local_files_only: bool = False) -> Any:
    """Load a tokenizer from a folder, or by its name on the Hugging Face Hub; code of the model is not run.

    Args:
        path_or_name: the folder or the name.
        local_files_only: send no request to the hub; find a name in the local cache.

    Raises:
        ConfigError: the tokenizer does not load, e.g. because it needs code of the model.
    """
    with _IMPORTING:  # transformers' lazy modules break if several threads import them for the first time at once
        from transformers import AutoTokenizer  # a slow import that most callers do not need

    expected = "a folder with tokenizer.json and tokenizer_config.json, or a model name on the Hugging Face Hub"
    if path_or_name == "default":  # the hub would be asked for it, again and again where there is no network
        raise ConfigError.of("tokenizer", path_or_name, f"{expected}; an Endpoint without model= names none")
    # A name of the hub begins with neither: its error for a path is about the form of a name.
    is_path = isinstance(path_or_name, Path) or path_or_name.startswith(("/", "."))
    if is_path and not Path(path_or_name).is_dir():
        raise ConfigError.of("tokenizer", str(path_or_name), expected)
    if not local_files_only and not is_path and not Path(path_or_name).is_dir():
        from rollouts.renderer.hub import check_hub  # here: most models are folders

        check_hub(str(path_or_name), expected)
    try:
        # Without a value, transformers asks on a terminal whether to run the code of a model.
        options = {"local_files_only": local_files_only, "trust_remote_code": False}
        return AutoTokenizer.from_pretrained(str(path_or_name), **options)
    except Exception as error:  # the loader may raise anything
        if "custom code" in str(error) or _names_own_code(Path(path_or_name)):
            expected = _NO_OWN_CODE
        raise ConfigError(
            f"tokenizer: {str(path_or_name)!r} does not load ({_first_line(error)}); expected {expected}"
        ) from error


def _names_own_code(folder: Path) -> bool:
    """Whether the tokenizer of a local folder is a class in the model's code."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "auto_map" in config


def local_decoder(path_or_name: Any) -> Callable[[Any], str]:
    """The function from ids to text of the tokenizer that a stored run names; no request is sent to the hub.

    Raises:
        ConfigError: the run names none, or it does not load.
    """
    if not isinstance(path_or_name, str):
        raise ConfigError.of("tokenizer", path_or_name, "a name or a folder: pass --tokenizer")
    return Codec(load_tokenizer(path_or_name, local_files_only=True)).decode


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def stop_ids_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a turn: ``eos_token_id`` of generation_config.json, then the tokenizer's own.

    Nothing is guessed: a model with other stop ids must declare them in generation_config.json, or the user sets them.
    """
    stops: list[int] = []
    declared = _model_file(_source_of(tokenizer), "generation_config.json").get("eos_token_id")
    for value in (*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id):
        if isinstance(value, int) and value not in stops:
            stops.append(value)
    return tuple(stops)


def response_template_of(tokenizer: Any) -> Any:
    """Return the ``response_template`` of tokenizer_config.json: how the publisher reads replies; ``None`` without one.

    The tokenizers of older versions of transformers do not have it as an attribute.
    """
    own = getattr(tokenizer, RESPONSE_TEMPLATE, None) or getattr(tokenizer, "init_kwargs", {}).get(RESPONSE_TEMPLATE)
    return own or _model_file(_source_of(tokenizer), "tokenizer_config.json").get(RESPONSE_TEMPLATE)


def vocab_size_of(tokenizer: Any) -> int:
    """Return the number of ids of the model: ``vocab_size`` of config.json, or else the size of the tokenizer.

    A model may have more ids than its tokenizer (padded embeddings), and may sample them. A tokenizer with more ids
    than the model (added tokens) does not raise the number: such an id would crash the server.
    """
    declared = declared_vocab_size(_source_of(tokenizer))
    return len(tokenizer) if declared is None else declared


def declared_vocab_size(source: str) -> int | None:
    """``vocab_size`` of the config.json of a model, by its folder or name; ``None`` if it declares none."""
    config = _model_file(source, "config.json")
    text = config.get("text_config")
    declared = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return declared if isinstance(declared, int) else None


def _source_of(tokenizer: Any) -> str:
    """The folder or name that a tokenizer was loaded from; empty if it does not say."""
    return str(getattr(tokenizer, "name_or_path", "") or "")


def _model_file(source: str, name: str) -> dict[str, Any]:
    """Return a JSON file of a model, local or from the hub; empty if there is none."""
    if not source:
        return {}
    file = Path(source) / name
    if not Path(source).is_dir():
        with _IMPORTING:
            from transformers.utils.hub import cached_file

        path = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if path is None:
            return {}
        file = Path(path)
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError.of(str(file), str(error), "a JSON object") from error
    return config if isinstance(config, dict) else {}


_SHORT_TEXT = 200
"""Characters; encoding a shorter text takes some 10 µs."""
LOADED_AT = 1 << 17
"""Tokens encoded before the fast encoder is loaded: its load takes the CPU time of 2 million, which short runs save."""


class Codec:
    """Encode and decode with one tokenizer.

    Fast tokenizers are used without their Python wrapper: the wrapper sets padding and truncation on a shared object
    at each call, which is not thread-safe. Padding and truncation of tokenizer.json are cleared. A slow tokenizer is
    used directly, one thread at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._raw = getattr(tokenizer, "backend_tokenizer", None)
        self._slow = None if hasattr(self._raw, "encode_batch_fast") else tokenizer
        self._bytes = ByteTable.of(tokenizer) if self._slow is None else None
        if self._raw is not None and self._slow is None:
            if self._raw.truncation is not None:  # no call without need: it fails while another thread encodes
                self._raw.no_truncation()
            if self._raw.padding is not None:
                self._raw.no_padding()
        self._loader = loader(tokenizer) if self._slow is None else None
        self._fast: FastEncoder | None = None
        self._lock = threading.Lock()
        self.encoded_tokens = 0
        """Tokens that :meth:`encode` has returned so far, if ``counted``."""

    @property
    def encoder(self) -> str:
        """The library that encodes: ``"fastokens"``, ``"tokenizers"``, or ``"transformers"`` for a slow tokenizer.

        Loads ``fastokens`` and waits for it; until then ``tokenizers`` encodes.
        """
        if self._loader is None:
            return "transformers"
        return "tokenizers" if self._loader().result() is None else "fastokens"

    def encode(self, text: str, *, counted: bool = True) -> TokenColumn:
        """Return the ids of text; int32, read-only. Special tokens in the text become their ids; none is added.

        Args:
            text: the text.
            counted: whether the text enters a conversation, and so the counter.
        """
        fast = self._fast
        if fast is None and self._loader is not None:
            loading = self._loader.begun or (self._loader() if self.encoded_tokens >= LOADED_AT else None)
            if loading is not None and loading.done():
                fast = self._fast = loading.result()
        if fast is not None and fast.lacks_tokens(self._raw):
            fast = None
        ids = None if fast is None else fast.encode(text)
        if ids is None:
            ids = np.array(self._encode(text), np.int32)  # a tokenizer's ids need no check
            ids.flags.writeable = False
        if counted:
            with self._lock:
                self.encoded_tokens += len(ids)
        return ids

    def encode_uncounted(self, text: str) -> TokenColumn:
        """Return the ids of text that does not enter a conversation."""
        return self.encode(text, counted=False)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a short text in which special tokens are plain text.

        Raises:
            ConfigError: the tokenizer has no such ids.
        """
        if self._slow is not None:
            with self._lock:
                ids = list(self._slow.encode(text, add_special_tokens=False, split_special_tokens=True))
        else:
            ids = plain_encoder(self._raw)(text)
        if self.decode(ids) != text:
            expected = "a tokenizer that can encode it as plain text; this one gives " + repr(self.decode(ids))
            raise ConfigError.of('text (special_text="as_text")', text, expected)
        return ids

    def _encode(self, text: str) -> list[int]:
        """Encode with the tokenizer."""
        if not text:
            return []
        ids: list[int]
        if self._slow is not None:
            with self._lock:
                ids = list(self._slow.encode(text, add_special_tokens=False))
            return ids
        # encode() keeps the interpreter lock. The batch call without offsets releases it, but may wait to get it back
        # while another thread computes: slower for a short text.
        assert self._raw is not None
        if len(text) < _SHORT_TEXT:
            ids = self._raw.encode(text, add_special_tokens=False).ids
        else:
            ids = self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def fingerprint(self) -> int:
        """The CRC-32 of the tokenizer: its vocabulary and, if it is a fast one, everything else that decides ids."""
        if self._slow is not None:
            return zlib.crc32(json.dumps(sorted(self._slow.get_vocab().items())).encode())
        assert self._raw is not None
        model = json.loads(self._raw.to_str())
        model.pop("truncation", None)  # state of the last call of its wrapper
        model.pop("padding", None)
        return zlib.crc32(json.dumps(model, sort_keys=True).encode())

    def decode(self, ids: Sequence[int] | TokenColumn, *, skip_special: bool = False) -> str:
        """Return the text of ids, with or without special tokens, with spaces unchanged."""
        text = None if self._bytes is None or skip_special else self._bytes.decode(ids)
        if text is not None:
            return text
        id_list = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._slow is not None:
            with self._lock:
                return str(
                    self._slow.decode(id_list, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
                )
        assert self._raw is not None
        return str(self._raw.decode(id_list, skip_special_tokens=skip_special))
