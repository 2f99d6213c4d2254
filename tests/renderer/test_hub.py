"""A name of a model is looked up at the hub before transformers asks for its files."""

from __future__ import annotations

import time
from functools import partial

import anyio.to_thread
import pytest
from aiohttp import web

from rollouts.errors import ConfigError
from rollouts.renderer.hub import check_hub
from rollouts.testing.loopback import on_loopback, url_of


def test_a_hub_that_does_not_answer_is_asked_once() -> None:
    """A name that is not a folder, without a network, is refused at once: transformers would ask for over a minute."""
    message = (
        r"tokenizer: got 'no-such-model', which is not a folder here, and the hub does not give it \(.*\); expected x"
    )
    began = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        check_hub("no-such-model", "x", endpoint="http://127.0.0.1:9")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("status", "code", "refused"), [(200, "", False), (429, "", False), (404, "", False), (404, "RepoNotFound", True)]
)
async def test_only_a_model_that_the_hub_does_not_have_is_refused(status: int, code: str, refused: bool) -> None:
    """A mirror that serves files only, or a limit of requests, does not say whether there is such a model."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"id": "own/model"}, status=status, headers={"X-Error-Code": code} if code else {})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with on_loopback(app) as runner:
        check = partial(check_hub, "own/model", "x", endpoint=url_of(runner))
        if refused:
            with pytest.raises(ConfigError, match="the hub does not give it"):
                await anyio.to_thread.run_sync(check)
        else:
            await anyio.to_thread.run_sync(check)
    assert asked == ["/api/models/own/model"]
