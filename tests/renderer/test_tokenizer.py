"""The codec encodes long texts without keeping the interpreter lock."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.renderer.tokenizer import Codec, load_tokenizer


def _steps_meanwhile(work: Callable[[], Any]) -> int:
    """Number of steps that this thread makes while another works."""
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
    assert free > 3 * (blocked + 1)


def test_an_endpoint_without_a_model_names_no_tokenizer() -> None:
    """The default of ``Endpoint.model`` is refused by name, and no hub is asked for a model of that name."""
    with pytest.raises(
        ConfigError, match=r"tokenizer: got 'default'; expected .*an Endpoint without model= names none"
    ):
        load_tokenizer("default")


@pytest.mark.parametrize("known", [False, True], ids=["own class", "class of transformers"])
def test_code_of_a_models_folder_is_not_run(tmp_path: Path, known: bool) -> None:
    """A tokenizer that needs it is refused with what to do; a file of transformers is read in its place."""
    ran, config = tmp_path / "ran", json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n\nclass Own: pass\n")
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast" if known else "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused = r"tokenizer: .* does not load .*; expected .*auto_map.*, which is not run\. Load .*trust_remote_code=True"
    with pytest.raises(ConfigError, match=refused):
        load_tokenizer(tmp_path)
    if known:
        shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
        assert len(load_tokenizer(tmp_path)) > 500
    assert not ran.exists()
