"""Start a real SGLang server with the flags that rollouts need, wait until it is ready, and end it with this process.

Control routes of SGLang pause the server and replace its weights, so it listens on this machine only, or with a key.
Keys come from ROLLOUTS_API_KEY and ROLLOUTS_ADMIN_KEY, the same variables that the client reads; the server gets them
in a file, because every user of a machine can read the arguments of a process. The server has its process group,
which ends with this process on Ctrl-C, SIGTERM or SIGHUP.

All other flags go to SGLang as they are; docs/servers.md names the flags that matter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rollouts.errors import ConfigError
from rollouts.http.access import is_loopback

__all__ = ["READY", "command_of", "main", "serve"]

READY = "scripts/servers/sglang serve: serving at "
"""Prefix of the line with the URL, which is printed when the server is ready."""

ON_CPU = Path(__file__).with_name("sglang_on_cpu.py")
CPU_FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    # Other programs that allocate while the model loads count against it (mem_cache/kv_cache_configurator.py); the size
    # of the cache is that of the next flag.
    "--mem-fraction-static": "0.5",
    "--max-total-tokens": "65536",
    "--max-running-requests": "64",
    "--dtype": "float32",  # of a model in float32, SGLang computes in float16 by default
}
CPU_SWITCHES = ("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle")
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
REFUSED = {
    "--api-key": "ROLLOUTS_API_KEY in the environment: every user of this machine can read an argument",
    "--admin-api-key": "ROLLOUTS_ADMIN_KEY in the environment: every user of this machine can read an argument",
    "--config": "flags: the file with the keys is given by this flag",
    "--allow-auto-truncate": "no such flag: the server would answer another prompt than the stored one",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 0.5
STOP_SECONDS = 10.0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="scripts/servers/sglang serve", description=__doc__, allow_abbrev=False)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    add = found.add_argument
    add("model", help="name or folder of the model")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); others need ROLLOUTS_API_KEY")
    add("--port", type=int, default=os.environ.get("PORT", "30000"), help="default: 30000, or PORT; 0 for a free one")
    add("--cpu", action="store_true", help="serve a small model without a GPU, from .venv-sglang")
    add("--start-seconds", type=float, default=1800.0, help="how long the server may take until it is ready (1800)")
    return found


def command_of(
    options: argparse.Namespace, further: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command without its keys, and the keys as SGLang's config file names them.

    Raises:
        ConfigError: a refused flag, or an address without a key.
    """
    names = {flag.partition("=")[0] for flag in further if flag.startswith("--")}
    for flag, expected in REFUSED.items():
        if flag in names:
            raise ConfigError(f"{flag}: expected {expected}")
    given = {"api-key": environment.get("ROLLOUTS_API_KEY"), "admin-api-key": environment.get("ROLLOUTS_ADMIN_KEY")}
    keys = {name: key for name, key in given.items() if key}
    if "api-key" not in keys and not is_loopback(options.host):
        expected = "127.0.0.1, or a key in ROLLOUTS_API_KEY: every machine that reaches this address could use it"
        raise ConfigError.of("--host", options.host, expected)
    start = [str(ON_CPU)] if options.cpu else ["-m", "sglang.launch_server"]
    command = [
        sys.executable,
        *start,
        "--model-path",
        options.model,
        "--host",
        options.host,
        "--port",
        str(options.port),
    ]
    defaults = {"--log-level-http": "warning", **(CPU_FLAGS if options.cpu else {})}
    for flag, value in defaults.items():
        command += [] if flag in names else [flag, value]
    if options.cpu:
        command += [flag for flag in CPU_SWITCHES if flag not in names]
    return [*command, *further], keys


@contextlib.contextmanager
def config_of(keys: Mapping[str, str]) -> Iterator[list[str]]:
    """The flags that name a file with the keys, which only this user can read; none without keys."""
    if not keys:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:  # created with mode 0600
        file.write(json.dumps(dict(keys)))  # JSON is YAML
        file.flush()
        yield ["--config", file.name]


def serve(
    command: Sequence[str], url: str, *, key: str | None = None, environment: Mapping[str, str], seconds: float
) -> int:
    """Run a server until it ends, or until a signal ends this process; returns the exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)
    process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        say(f"process group {process.pid}: {shlex.join(command)}")
        until = time.monotonic() + seconds
        while not is_ready(url, key):
            if process.poll() is not None:
                break
            if time.monotonic() > until:
                say(f"not ready within {seconds:g} s (--start-seconds)")
                return 1
            time.sleep(LOOK_SECONDS)
        else:
            print(f"{READY}{url}", flush=True)
        code = process.wait()
        say(f"the server ended with exit code {code}")
        return 1
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second one would leave a part of the group
        end(process)


def is_ready(url: str, key: str | None) -> bool:
    """Whether the server has loaded its model."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/health", headers=headers), timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end(process: subprocess.Popen[Any]) -> None:
    """End the process group: SGLang's scheduler and detokenizer are separate processes.

    Only the first process gets SIGTERM: it takes a scheduler that ends by itself for a crash.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def say(text: str) -> None:
    print(f"scripts/servers/sglang serve: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options, further = parser().parse_known_args(arguments)
    if options.port == 0:
        with socket.socket() as free:
            free.bind((options.host, 0))
            options.port = free.getsockname()[1]
    try:
        command, keys = command_of(options, further, os.environ)
    except ConfigError as refused:
        say(f"error: {refused}")
        return 2
    host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    environment = CPU_ENVIRONMENT if options.cpu else {}
    with config_of(keys) as config:
        return serve(
            [*command, *config], url, key=keys.get("api-key"), environment=environment, seconds=options.start_seconds
        )


if __name__ == "__main__":
    sys.exit(main())
