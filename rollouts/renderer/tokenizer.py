"""Text to ids and back, through the raw tokenizer.

Invariant: encoding adds nothing (the template writes its own BOS) and mutates nothing, so one codec serves all threads;
every token that was encoded is counted. This module knows no messages and no template.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.dtypes import TokenColumn
from rollouts.errors import ConfigError
from rollouts.renderer.byte_level import ByteTable
from rollouts.renderer.word_cache import Words

__all__ = ["Codec", "load_tokenizer", "stop_ids_of", "vocab_size_of"]

_IMPORTING = threading.Lock()


def load_tokenizer(path_or_name: str | Path, *, local_files_only: bool = False) -> Any:
    """Load a tokenizer from a folder, or by its name on the Hugging Face Hub.

    Args:
        path_or_name: where from.
        local_files_only: ask no hub; a name is looked for among what was loaded before.

    Raises:
        ConfigError: there is no tokenizer there that can be loaded.
    """
    with _IMPORTING:  # its lazy modules break when several threads import them for the first time at once
        from transformers import AutoTokenizer  # here, because it takes seconds and most callers have a tokenizer

    expected = "a folder with tokenizer.json and tokenizer_config.json, or a model name on the Hugging Face Hub"
    if isinstance(path_or_name, Path) and not path_or_name.is_dir():
        raise ConfigError.of("tokenizer", str(path_or_name), expected)
    try:
        return AutoTokenizer.from_pretrained(str(path_or_name), local_files_only=local_files_only)
    except Exception as error:  # the loader raises whatever the files make it raise
        raise ConfigError(
            f"tokenizer: {str(path_or_name)!r} does not load ({_first_line(error)}); expected {expected}"
        ) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def stop_ids_of(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a turn: ``eos_token_id`` of the tokenizer's generation_config.json, and the tokenizer's own.

    Nothing is guessed: a model that stops at other ids as well needs them in its generation_config.json, or given.
    """
    stops: list[int] = []
    declared = _model_file(tokenizer, "generation_config.json").get("eos_token_id")
    for value in (*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id):
        if isinstance(value, int) and value not in stops:
            stops.append(value)
    return tuple(stops)


def vocab_size_of(tokenizer: Any) -> int:
    """How many ids the model has: what its config.json declares, and at least those of the tokenizer.

    A model may have more than its tokenizer, to round its tables up, and may sample one of them.
    """
    config = _model_file(tokenizer, "config.json")
    text = config.get("text_config")
    declared = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return max(len(tokenizer), declared if isinstance(declared, int) else 0)


def _model_file(tokenizer: Any, name: str) -> dict[str, Any]:
    """A JSON file of the model that the tokenizer came with, local or from the hub; empty where there is none."""
    source = str(getattr(tokenizer, "name_or_path", "") or "")
    if not source:
        return {}
    file = Path(source) / name
    if not Path(source).is_dir():
        with _IMPORTING:
            from transformers.utils.hub import cached_file

        found = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is None:
            return {}
        file = Path(found)
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError.of(str(file), str(error), "a JSON object") from error
    return config if isinstance(config, dict) else {}


_SHORT_TEXT = 200
"""Characters; encoding fewer takes some hundredths of a millisecond."""


class Codec:
    """Encode and decode with one tokenizer.

    Fast tokenizers are used raw, without their Python wrapper: the wrapper sets padding and truncation on a shared
    object at each call, which is not safe in threads. One that has no raw tokenizer is used as it is,
    one thread at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._raw = getattr(tokenizer, "backend_tokenizer", None)
        self._slow = None if hasattr(self._raw, "encode_batch_fast") else tokenizer
        self._bytes = ByteTable.of(tokenizer) if self._slow is None else None
        self._words = Words.of(self._raw) if self._slow is None else None
        self._lock = threading.Lock()
        self.encoded_tokens = 0
        """Tokens that came out of :meth:`encode` so far."""
        self.encoded_characters = 0
        """Characters that went into :meth:`encode` so far."""

    def encode(self, text: str, *, counted: bool = True, opening: bool = False) -> TokenColumn:
        """Ids of a text, read-only. Special tokens written in it become their ids; none is added.

        Args:
            text: anything.
            counted: whether it enters the conversation.
            opening: whether other conversations will begin as it does.
        """
        ids = self._words.encode(text, opening=opening) if self._words is not None else None
        if ids is None:
            ids = np.array(self._encoded(text), np.int32)  # a tokenizer's ids need no check
            ids.flags.writeable = False
        if counted:
            with self._lock:
                self.encoded_tokens += len(ids)
                self.encoded_characters += len(text)
        return ids

    def _encoded(self, text: str) -> list[int]:
        """As the tokenizer does it."""
        if not text:
            return []
        ids: list[int]
        if self._slow is not None:
            with self._lock:
                ids = list(self._slow.encode(text, add_special_tokens=False))
            return ids
        # encode() holds the interpreter lock for as long as it runs; the batch call without offsets does not, but
        # may wait for it afterwards, while another thread computes: a bad bargain for a short text.
        assert self._raw is not None
        if len(text) < _SHORT_TEXT:
            ids = self._raw.encode(text, add_special_tokens=False).ids
        else:
            ids = self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def forget(self) -> None:
        """Know no word any more, as before the first text."""
        if self._words is not None:
            self._words.forget()

    def decode(self, ids: Sequence[int] | TokenColumn) -> str:
        """Text of ids, special tokens written out, spaces left as they are."""
        text = None if self._bytes is None else self._bytes.decode(ids)
        if text is not None:
            return text
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._slow is not None:
            with self._lock:
                return str(self._slow.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        assert self._raw is not None
        return str(self._raw.decode(listed, skip_special_tokens=False))
