"""The session server of miles, for ``scripts/bench gateway``: ``python scripts/benches/gateway_miles.py UPSTREAM PORT
TOKENIZER``, in an environment with SGLang and with miles in ``PYTHONPATH``. It imports nothing of this package.

miles imports a module of its SGLang for DeepSeek-V4, which SGLang 0.5.23 does not have; it is replaced by an empty
one, and the parts of SGLang that need a GPU as in ``scripts/servers/sglang_on_cpu.py``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "servers"))

NAME = "sglang.srt.entrypoints.openai.encoding_dsv4"


def main() -> None:
    importlib.import_module("sglang_on_cpu")  # replaces parts of SGLang when it is imported
    package = importlib.import_module(NAME.rpartition(".")[0])

    sys.modules[NAME] = types.ModuleType(NAME)
    vars(package)["encoding_dsv4"] = sys.modules[NAME]

    import uvicorn
    from miles.rollout.session.server import SessionServer  # type: ignore[import-not-found]

    # uvicorn closes connections that are idle for 5 seconds, as those of sessions that wait for the others between two
    # phases of the benchmark: their next request is lost. The other servers keep idle connections.
    upstream, port, tokenizer = sys.argv[1:]
    arguments = argparse.Namespace(hf_checkpoint=tokenizer, lora_rank=0, lora_adapter_path=None)
    uvicorn.run(SessionServer(arguments, upstream).app, port=int(port), log_level="warning", timeout_keep_alive=3600)


if __name__ == "__main__":
    main()
