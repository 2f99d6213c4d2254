"""How a real vLLM server is started for tests: its flags and its environment."""

from __future__ import annotations

from scripts.servers.vllm_server import command_of, environment_of


def test_a_flag_of_the_user_replaces_the_default() -> None:
    """Further flags go to vLLM as they are, each once; the server listens on loopback only."""
    line = command_of("model", "8000", ["--logprobs-mode=raw_logprobs", "--api-key", "k"])
    assert [flag for flag in line if flag.startswith("--logprobs-mode")] == ["--logprobs-mode=raw_logprobs"]
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--dtype") + 1] == "float32"
    assert "--enable-scale-out" in line


def test_the_environment_is_its_own() -> None:
    """Variables of the caller that may change what the server does are not passed on."""
    found = environment_of({"PATH": "/bin", "VLLM_USE_V1": "0", "ROLLOUTS_API_KEY": "secret"})
    assert found["PATH"] == "/bin"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert not {"VLLM_USE_V1", "ROLLOUTS_API_KEY"} & found.keys()
