"""Start a real vLLM server without a GPU, for tests: ``scripts/servers/vllm serve MODEL --port N [flag ...]``

It runs in ``.venv-vllm``, which ``scripts/servers/vllm install`` creates, and imports nothing of this package. The
server listens on 127.0.0.1 only, because its control routes (``VLLM_SERVER_DEV_MODE``) are open to all who reach it. It
has its own process group, whose number is the first line of the output. Further flags go to vLLM.

Heads need 32 dimensions or more (``widened_model.py``), and the weights float32. Chunked prefill is off, because vLLM
0.32 ends at a request with a seed whose prompt it computes in parts: "CPU Generator does not use offset".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["FLAGS", "command_of", "environment_of"]

FLAGS = {
    "--served-model-name": "demo",
    "--dtype": "float32",  # bfloat16 needs instructions that not every processor has
    "--max-num-seqs": "32",
    "--max-num-batched-tokens": "4096",
    "--logprobs-mode": "processed_logprobs",
}
SWITCHES = (
    "--enforce-eager",
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--no-enable-chunked-prefill",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # without --enable-lora it does nothing
}


def command_of(model: str, port: str, further: Sequence[str]) -> list[str]:
    """The command; a further flag replaces a default."""
    names = {flag.partition("=")[0] for flag in further}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", port]
    for flag, value in FLAGS.items():
        command += [] if flag in names else [flag, value]
    return [*command, *(flag for flag in SWITCHES if flag not in names), *further]


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: nothing of the caller's that may change what it does."""
    return {name: given[name] for name in ("PATH", "HOME", "TMPDIR") if name in given} | ENVIRONMENT


if __name__ == "__main__":
    model, port = sys.argv[1], sys.argv[sys.argv.index("--port") + 1]
    at = sys.argv.index("--port")
    further = [*sys.argv[2:at], *sys.argv[at + 2 :]]
    os.setsid()
    print(f"process group {os.getpid()}", flush=True)
    command = command_of(model, port, further)
    os.execve(command[0], command, environment_of(os.environ))
