"""How a real SGLang server is started: its flags, its keys, and its process group."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from scripts.servers.sglang_server import READY, command_of, config_of, parser

ROOT = Path(__file__).parents[3]

SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server with a child process, which a SIGTERM of the parent leaves behind."""

STARTER = """
import sys
from scripts.servers.sglang_server import serve
command, port = [sys.executable, "-c", *sys.argv[1:]], sys.argv[2]
sys.exit(serve(command, f"http://127.0.0.1:{port}", environment={}, seconds=60))
"""


def command(*arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    options, further = parser().parse_known_args(arguments)
    return command_of(options, further, environment)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-3"])
def test_an_open_address_needs_a_key(host: str) -> None:
    """Without a key, a server that others reach is not started: its control routes would be open to them."""
    with pytest.raises(ConfigError, match=r"--host: got .*; expected 127.0.0.1, or a key in ROLLOUTS_API_KEY"):
        command("model", "--host", host)
    assert command("model", "--host", host, ROLLOUTS_API_KEY="k")[1] == {"api-key": "k"}


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key=k", "--config", "--allow-auto-truncate"])
def test_an_unsafe_flag_is_refused(flag: str) -> None:
    """A key that every user can read, and a server that cuts prompts, are refused by name."""
    with pytest.raises(ConfigError, match=rf"{flag.partition('=')[0]}: expected "):
        command("model", flag)


def test_a_flag_of_the_user_replaces_the_default() -> None:
    """Further flags go to SGLang as they are, each once."""
    line, _ = command("model", "--cpu", "--dtype=bfloat16", "--tp", "2", "--host", "localhost")
    assert [flag for flag in line if flag.startswith("--dtype")] == ["--dtype=bfloat16"]
    assert line[line.index("--tp") + 1] == "2"
    assert line[line.index("--host") + 1] == "localhost"
    assert line[line.index("--device") + 1] == "cpu"


def test_keys_are_in_a_file_of_this_user() -> None:
    """Keys are not arguments; their file is private, and gone afterwards."""
    line, keys = command("model", ROLLOUTS_API_KEY="user", ROLLOUTS_ADMIN_KEY="admin")
    assert not {"user", "admin"} & set(line)
    with config_of(keys) as (flag, name):
        assert flag == "--config"
        assert json.loads(Path(name).read_text()) == {"api-key": "user", "admin-api-key": "admin"}
        assert Path(name).stat().st_mode & 0o077 == 0
    assert not Path(name).exists()


def test_the_process_group_ends_with_a_signal() -> None:
    """SIGTERM ends the server and its own child processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-c", STARTER, SERVER, str(port)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{READY}http://127.0.0.1:{port}\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""  # returns when no process has the pipe any more
        assert process.wait(30) == 128 + signal.SIGTERM


def test_a_server_that_ends_before_it_is_ready_is_reported() -> None:
    """Its exit code is in the message, and the exit code of the script is 1."""
    code = (
        "from scripts.servers.sglang_server import serve; import sys; sys.exit(serve([sys.executable, '-c', 'exit(3)'],"
    )
    code += " 'http://127.0.0.1:9', environment={}, seconds=60))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the server ended with exit code 3" in done.stderr
    assert READY not in done.stdout
