"""The codec encodes long texts without keeping the interpreter lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.renderer.tokenizer import Codec, load_tokenizer


def _steps_meanwhile(work: Callable[[], Any]) -> int:
    """How many steps this thread makes while another one works."""
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work()
        done.set()

    worker = threading.Thread(target=run)
    worker.start()
    begun.wait()
    steps = 0
    while not done.is_set():
        steps += 1
    worker.join()
    return steps


def test_encoding_in_a_thread_leaves_the_loop_free(tokenizer: Any) -> None:
    """``encode_batch_fast``, which encodes until fastokens is loaded, releases the interpreter lock; ``encode`` not."""
    loaded = tokenizer("qwen3")
    codec, raw = Codec(loaded), loaded.backend_tokenizer
    text = "The quick brown fox jumps over 1234567 lazy dogs. " * 4000
    encode = partial(codec.encode, text, counted=False)
    encode()
    free = max(_steps_meanwhile(encode) for _ in range(3))
    blocked = min(_steps_meanwhile(lambda: raw.encode(text, add_special_tokens=False)) for _ in range(3))
    assert free > 10 * (blocked + 1)


def test_an_endpoint_without_a_model_names_no_tokenizer() -> None:
    """The default of ``Endpoint.model`` is refused by name, and no hub is asked for a model of that name."""
    with pytest.raises(
        ConfigError, match=r"tokenizer: got 'default'; expected .*an Endpoint without model= names none"
    ):
        load_tokenizer("default")
