"""A running engine on the demo model, a client for it, and the teacher-forced reference that it must agree with."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollouts.engine import DEMO_MODEL, running_server

TINY: dict[str, Callable[[Any], Any]] = {
    "qwen3": lambda transformers: transformers.Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    ),
    "llama": lambda transformers: transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    ),
    "qwen2": lambda transformers: transformers.Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Families with random weights, each with another kind of heads."""


class Client:
    """An HTTP client of the engine; a response is (status, content)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def post(self, path: str, body: Any = None, **fields: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(fields if body is None else body)
        async with self.session.post(self.url + path, data=data) as response:
            return response.status, _content(await response.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, _content(await response.text())

    async def generate(self, **fields: Any) -> Any:
        status, answer = await self.post("/generate", **fields)
        assert status == 200, answer
        return answer

    async def stream(self, **fields: Any) -> AsyncIterator[Any]:
        """The events of a stream, the last of them the string ``[DONE]``."""
        async with self.session.post(self.url + "/generate", data=json.dumps({**fields, "stream": True})) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield _content(line[6:].decode().strip())


def _content(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.asynccontextmanager
async def engine(model: Path = DEMO_MODEL, **options: Any) -> AsyncIterator[Client]:
    pytest.importorskip("torch").set_num_threads(1)
    options.setdefault("slots", 8)
    async with running_server(model, **options) as url, aiohttp.ClientSession() as session:
        yield Client(session, url)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with engine() as client:
        yield client


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractAsyncContextManager[Client]]:
    """Starts a server with other options than ``client``."""
    return engine


def loaded(folder: Path) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[float]]:
    """Teacher-forced logprobs of a reply, by transformers alone."""
    torch = pytest.importorskip("torch")
    model_of = functools.cache(loaded)

    def logprobs(
        prompt: list[int], reply: list[int], *, temperature: float = 1.0, folder: Path = DEMO_MODEL
    ) -> list[float]:
        with torch.no_grad():
            logits = model_of(folder)(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        scores = (logits / temperature).log_softmax(-1)
        return scores.gather(1, torch.tensor(reply)[:, None])[:, 0].tolist()

    return logprobs


@pytest.fixture(scope="session", params=list(TINY))
def tiny_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of each family, and no tokenizer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = TINY[request.param](transformers)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model's weights, moved a little."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("other")
    model = loaded(DEMO_MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(DEMO_MODEL)
