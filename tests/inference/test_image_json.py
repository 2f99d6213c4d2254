"""Images in requests to SGLang: one placeholder and one URL each, and the ids of the server are compared."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import Endpoint, ImageSpan, SamplingParams, packed_tokens
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.inference.base import CompletionRequest
from rollouts.inference.image_json import ImageTexts, collapsed
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.vllm import VLLMPolicy
from rollouts.testing.replies import Request, reply_body
from rollouts.testing.server import StubServer
from tests.inference.client import Client
from tests.processors import picture

FIRST, SECOND = picture(30, 20), picture(8, 8)
IDS = packed_tokens([1, 7, 7, 7, 2, 7, 7, 3])
IMAGES = (ImageSpan(FIRST, 1, 4), ImageSpan(SECOND, 5, 7))
SENT = [1, 7, 2, 7, 3]


def server(**changes: Any) -> StubServer:
    """A server that expands the first placeholder to three ids and the second to two."""

    def reply(input_ids: list[int], params: dict[str, Any]) -> Mapping[str, Any]:
        own: list[int] = []
        runs = iter((3, 2, 3))
        for one in input_ids:
            own += [one] * (next(runs) if one == 7 else 1)
        arrived = Request("", own, params, {}, {})
        body: Any = reply_body(lambda ids, params: [9, 8], arrived, "none")
        body["meta_info"]["id"] = None
        return {
            **body,
            "prompt_token_ids": own,
            **changes,
            "meta_info": {**body["meta_info"], **changes.get("meta", {})},
        }

    return StubServer(reply)


async def test_a_request_has_one_placeholder_and_one_url_for_each_image(client: Client) -> None:
    """The completion is about all ids: their number, and their checksum."""
    async with server() as stub, client.policy(stub.url) as policy:
        completion = await client.complete(policy, IDS, images=IMAGES, session="s")
        whole = np.concatenate([IDS, completion.tokens, [7, 7, 7]])
        images = [*IMAGES, ImageSpan(FIRST, 10, 13)]
        later = await client.complete(policy, whole, images=images, session="s")
        assert (policy.totals.encoded_images, policy.totals.encoded_tokens) == (2, 8)
    first, second = stub.requests
    assert first.input_ids == SENT
    assert second.input_ids == [*SENT, 9, 8, 7]
    assert first.body["return_prompt_token_ids"] is True
    urls = ["data:image/png;base64," + base64.b64encode(image.data).decode() for image in (FIRST, SECOND)]
    assert first.body["image_data"] == urls
    assert second.body["image_data"] == [*urls, urls[0]]
    assert (completion.prompt_tokens, later.prompt_tokens) == (8, 13)
    plain = Client()
    async with StubServer() as stub, plain.policy(stub.url) as policy:
        assert (await plain.complete(policy, IDS)).prompt_digest == completion.prompt_digest
        assert "image_data" not in stub.requests[0].body


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": {"prompt_tokens": 9}}, r"prompt_tokens: got 9; expected 8, the ids of the prompt with 2 images: the"),
        ({"meta": {"prompt_tokens": None}}, r"prompt_tokens: got None; expected 8"),
        ({"prompt_token_ids": [1, 7, 7, 7, 2, 7, 7, 4]}, r"prompt_token_ids: got 8 other ids; .* encodes its text"),
        ({"prompt_token_ids": [1, 7]}, r"prompt_token_ids: got 2 other ids; expected the 8 ids of the prompt"),
        ({"prompt_token_ids": "no"}, r"prompt_token_ids are not a list of ids"),
    ],
)
async def test_other_ids_of_the_server_are_refused(changes: Any, message: str, client: Client) -> None:
    """A missing number too; the error has both numbers, and the request is not repeated."""
    async with server(**changes) as stub, client.policy(stub.url) as policy:
        with pytest.raises(EndpointRefused, match=message):
            await client.complete(policy, IDS, images=IMAGES)
        assert len(stub.requests) == 1


async def test_a_server_that_does_not_send_the_ids_is_compared_by_their_number(client: Client) -> None:
    """Servers before the option exist."""
    async with server(prompt_token_ids=None) as stub, client.policy(stub.url) as policy:
        assert (await client.complete(policy, IDS, images=IMAGES)).prompt_tokens == 8


async def test_a_resumed_part_has_the_images_too(client: Client) -> None:
    """A reply that the server aborts is continued with all images of its prompt."""
    answers: list[Any] = []

    def reply(input_ids: list[int], params: dict[str, Any]) -> Mapping[str, Any]:
        answers.append(input_ids)
        length = len(IDS) + len(input_ids) - len(SENT)
        body: Any = reply_body(lambda ids, params: [9, 8], Request("", [0] * length, params, {}, {}), "none")
        if len(answers) == 1:
            body["meta_info"]["finish_reason"] = {"type": "abort"}
        return {**body, "meta_info": {**body["meta_info"], "id": None}}

    async with StubServer(reply) as stub, client.policy(stub.url) as policy:
        completion = await ResumablePolicy(policy).complete(
            CompletionRequest(IDS, SamplingParams(max_new_tokens=8), session="s", images=IMAGES)
        )
    assert answers == [SENT, [*SENT, 9, 8]]
    assert completion.tokens.tolist() == [9, 8, 9, 8]
    assert [len(request.body["image_data"]) for request in stub.requests] == [2, 2]


async def test_vllm_refuses_images_by_name() -> None:
    """Nothing is sent."""
    async with VLLMPolicy(Endpoint(provider="vllm", base_url="http://127.0.0.1:1")) as policy:
        with pytest.raises(ConfigError, match=r"images: got <VLLMPolicy .*expected none"):
            await policy.complete(CompletionRequest(IDS, SamplingParams(), images=IMAGES))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([ImageSpan(FIRST, 1, 5)], r"images: got ImageSpan\(image=<Image 30x20 .*expected a placeholder that expands"),
        ([ImageSpan(FIRST, 6, 9)], r"images: got \(6, 9\); expected spans that follow each other in 8 ids"),
        ([IMAGES[1], IMAGES[0]], r"images: got \(1, 4\); expected spans that follow"),
        ([ImageSpan(FIRST, 2, 2)], r"images: got \(2, 2\)"),
    ],
)
def test_wrong_positions_are_refused(spans: Any, message: str) -> None:
    """Positions that overlap, are outside the ids, or contain other ids."""
    with pytest.raises(ConfigError, match=message):
        collapsed(IDS, spans)


def test_texts_are_dropped_from_the_oldest() -> None:
    """The last image is always kept, however large."""
    texts = ImageTexts(max_bytes=1)
    assert texts.of([FIRST, FIRST, SECOND, FIRST])[0] == texts.of([FIRST])[0]
    assert texts.encoded == 3
