"""Images of programs: the parts of the three APIs are read, compared by their bytes, and refused where not seen."""

from __future__ import annotations

import base64
import io
from typing import Any

import aiohttp
import attrs
import numpy as np
import PIL.Image
import pytest

from rollouts.dtypes import Image, Message, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.normal import MessageRules, path_keys
from rollouts.programs.gateway.server import Gateway
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.gateway.types import ApiError
from rollouts.programs.gateway.wire import Wire
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from tests.programs.gateway.programs import LOOK, SAMPLING, ask, asks, calling, check_laws, replies, result, session_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def colour(red: int = 200, size: tuple[int, int] = (6, 4)) -> Image:
    return Image.of(PIL.Image.new("RGB", size, (red, 40, 90)))


def jpeg() -> str:
    """A JPEG in base64, as programs send photographs."""
    out = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (10, 200, 30)).save(out, format="JPEG")
    return base64.b64encode(out.getvalue()).decode()


RED, BLUE = colour(), colour(20)
CALL = ToolCall("view", {"path": "a.png"}, "c1")


def in_chat(image: Image, **detail: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image.url, **detail}}


def in_responses(image: Image, **detail: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": image.url, "detail": "auto", **detail}


def in_messages(image: Image) -> dict[str, Any]:
    data = image.url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


CONVERSATION = (
    Message("user", ("What is\nthis?", RED, "And this?", BLUE)),
    Message("assistant", "I look.", [CALL]),
    Message("tool", ("a.png", RED), tool_call_id="c1"),
    Message("user", ("Compare:", BLUE)),
)
BODIES: dict[str, tuple[Wire, dict[str, Any]]] = {
    "chat": (
        chat,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [text("What is"), text("this?"), in_chat(RED), text("And this?"), in_chat(BLUE)],
                },
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "view", "arguments": '{"path":"a.png"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [text("a.png"), in_chat(RED, detail="high")]},
                {"role": "user", "content": [text("Compare:"), in_chat(BLUE)]},
            ]
        },
    ),
    "responses": (
        responses,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        text("What is", "input_text"),
                        text("this?", "input_text"),
                        in_responses(RED),
                        text("And this?", "input_text"),
                        in_responses(BLUE),
                    ],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c1", "name": "view", "arguments": '{"path":"a.png"}'},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [text("a.png", "input_text"), {"type": "input_image", "image_url": RED.url}],
                },
                {"role": "user", "content": [text("Compare:", "input_text"), in_responses(BLUE)]},
            ]
        },
    ),
    "messages": (
        messages,
        {
            "max_tokens": 100,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        text("What is"),
                        text("this?"),
                        in_messages(RED),
                        text("And this?"),
                        {**in_messages(BLUE), "cache_control": {"type": "ephemeral"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        text("I look."),
                        {"type": "tool_use", "id": "c1", "name": "view", "input": {"path": "a.png"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [text("a.png"), in_messages(RED)]},
                        text("Compare:"),
                        in_messages(BLUE),
                    ],
                },
            ],
        },
    ),
}
WIRES: dict[str, Wire] = {name: wire for name, (wire, _) in BODIES.items()}


@pytest.mark.parametrize("name", BODIES)
def test_images_keep_their_places_among_the_texts(name: str) -> None:
    """Parts of the user and of results of tools are strings and images in order; neighbouring strings are lines."""
    wire, body = BODIES[name]
    request = wire.read(body)
    assert (request.messages, request.counts) == (CONVERSATION, {})


def user_body(name: str, part: dict[str, Any], role: str = "user") -> dict[str, Any]:
    """A request with one message of one part."""
    key = "input" if name == "responses" else "messages"
    return {key: [{"role": role, "content": [part]}]}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{jpeg()}"}}),
        ("responses", {"type": "input_image", "image_url": f"data:image/jpeg;base64,{jpeg()}"}),
        (
            "messages",
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": jpeg()}},
        ),
    ],
)
def test_an_image_that_is_sent_again_is_decoded_once(name: str, part: dict[str, Any]) -> None:
    """A program sends its history at each call: the image is the object of the earlier request, while that lives."""
    body = user_body(name, part)
    first, second = (WIRES[name].read(body).messages[0] for _ in range(2))
    assert first.images[0] is second.images[0]
    assert (first.images[0].width, first.images[0].height) == (8, 8)


REMOTE = "https://example.org/cat.png"


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        (
            "chat",
            {"type": "image_url", "image_url": {"url": REMOTE}},
            f"messages[0].content[0].image_url.url: got '{REMOTE}'; expected a data: URL of an image in base64; this"
            " server fetches no image",
        ),
        ("chat", {"type": "image_url"}, "messages[0].content[0].image_url: got None; expected an object with a url"),
        ("chat", {"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url: got None; expected a"),
        ("chat", {"type": "image_url", "image_url": REMOTE}, "messages[0].content[0].image_url: got 'https:"),
        (
            "chat",
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "messages[0].content[0].image_url.url: image: got b'\\x00\\x00\\x00'; expected an image that Pillow",
        ),
        (
            "chat",
            {"type": "image_url", "image_url": {"url": "data:text/html,<p>"}},
            "messages[0].content[0].image_url.url: image: got 'data:text/html,<p>'; expected a data: URL of an image",
        ),
        (
            "responses",
            {"type": "input_image", "image_url": REMOTE},
            f"input[0].content[0].image_url: got '{REMOTE}'; expected a data: URL",
        ),
        (
            "responses",
            {"type": "input_image", "file_id": "file-1"},
            "input[0].content[0].file_id: got 'file-1'; expected an image_url; this server keeps no files",
        ),
        ("responses", {"type": "input_image"}, "input[0].content[0].image_url: got None; expected a string"),
        (
            "messages",
            {"type": "image", "source": {"type": "url", "url": REMOTE}},
            "messages[0].content[0].source.type: got 'url'; expected base64; this server fetches no image",
        ),
        (
            "messages",
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "messages[0].content[0].source.type: got 'file'; expected base64",
        ),
        ("messages", {"type": "image"}, "messages[0].content[0].source: got None; expected an object with type"),
        (
            "messages",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}},
            "messages[0].content[0].source.data: image: got 'data:image/png;base64,?'; expected a data: URL",
        ),
        (
            "messages",
            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
            "messages[0].content[0].source.media_type: got None; expected a string",
        ),
    ],
)
def test_an_image_that_is_not_in_the_request_is_refused(name: str, part: dict[str, Any], message: str) -> None:
    """A URL to fetch, a file of the API, and bytes that are not an image are refused by the path of the field."""
    with pytest.raises(ApiError) as caught:
        WIRES[name].read(user_body(name, part))
    assert caught.value.error_kind == "invalid_request"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("role", ["system", "assistant"])
@pytest.mark.parametrize(
    ("name", "part"), [("chat", in_chat(RED)), ("responses", in_responses(RED)), ("messages", in_messages(RED))]
)
def test_only_users_and_tools_show_images(name: str, part: dict[str, Any], role: str) -> None:
    """An image of another role would have no place in the template, and is refused by the path of the part."""
    with pytest.raises(ApiError, match=rf"\[0\].content\[0\].type: got '{part['type']}'; expected text; images belong"):
        WIRES[name].read(user_body(name, part, role))


@pytest.mark.parametrize(
    ("name", "part"), [("chat", in_chat(RED, detail="low")), ("responses", in_responses(RED, detail="low"))]
)
def test_a_low_resolution_is_counted_as_not_enforced(name: str, part: dict[str, Any]) -> None:
    """The model sees the image as it is."""
    request = WIRES[name].read(user_body(name, part))
    assert request.messages == (Message("user", (RED,)),)
    assert request.counts == {"not_enforced/image_detail": 1}


def key(*parts: str | Image) -> int:
    return path_keys([Message("user", parts)], set())[0]


def test_messages_with_images_are_compared_by_their_bytes() -> None:
    """Equal bytes are the same message; another image, order or text, or the hash as text, are not."""
    assert key("a", RED) == key(" a\n", Image(RED.data), "") == key("a", RED, " ")
    others = [key("a", BLUE), key(RED, "a"), key("a", RED, RED), key("a"), key("b", RED), key("a", RED.sha256)]
    assert len({key("a", RED), *others}) == 7


def test_folded_messages_keep_their_images() -> None:
    """A template that takes no two user messages gets one with all strings and images in order."""
    rules = MessageRules("first", neighbours=False)
    given = [Message("user", ("a", RED)), Message("user", "b"), Message("user", (BLUE, "c")), Message("user", "d")]
    assert rules.applied(given) == [Message("user", ("a", RED, "b", BLUE, "c\nd"))]


async def test_a_model_of_texts_refuses_an_image() -> None:
    """The request is invalid, by the role of the message; nothing is sampled, and the session continues."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy) as session:
        with pytest.raises(ApiError, match=r"messages: content of a user message: got <Image 6x4 .*text: the renderer"):
            await ask(session, CONVERSATION[0])
        with pytest.raises(ApiError, match="messages: content of a tool message"):
            await session.count_tokens(attrs.evolve(chat.read(BODIES["chat"][1]), messages=CONVERSATION[2:3]))
        await ask(session, "Look!")
    assert session.counts["refused/image"] == 2
    assert len(policy.requests) == 1


# -- a model that sees ------------------------------------------------------------------------------------------------

PAD = 500
"""The demo model's placeholder of an image, nine for each."""
SHOW = Message("user", ("Look: ", RED, "?"))


def seeing(policy: ScriptedPolicy) -> ProgramSession:
    return ProgramSession(policy, renderer_for(DEMO_MODEL, images=True), SAMPLING)


async def test_a_call_has_the_images_of_its_path() -> None:
    """Images of the opening, of results and of new messages, in order; the history keeps its images."""
    policy = ScriptedPolicy(replies(calling("sun"), "It is hot.", "Both."))
    async with seeing(policy) as session:
        first = await ask(session, SHOW)
        shown = attrs.evolve(result(first, ""), content=("Seen:", BLUE))
        second = await ask(session, SHOW, first.message, shown)
        await ask(session, SHOW, first.message, shown, second.message, Message("user", (RED, "and", BLUE)))
    assert [[span.image for span in images] for images in policy.images] == [
        [RED],
        [RED, BLUE],
        [RED, BLUE, RED, BLUE],
    ]
    for tokens, images in zip(policy.requests, policy.images, strict=True):
        inside = np.concatenate([tokens[span.start : span.stop] for span in images])
        assert (inside == PAD).all()
        assert len(inside) == np.count_nonzero(tokens == PAD) == 9 * len(images)
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    assert branch.images == list(policy.images[-1])


async def test_branches_have_the_images_of_their_own_tokens() -> None:
    """A reply that was given twice, and a conversation that continues an earlier call, have separate images."""
    policy = ScriptedPolicy(replies())
    async with seeing(policy) as session:
        (first, second) = await session.call(asks(SHOW, n=2), lineage={})
        session.delivered([first, second])
        await ask(session, SHOW, first.message, Message("user", (BLUE,)))
        await ask(session, SHOW, first.message, Message("user", "No image."))
        await ask(session, Message("user", (BLUE, "?")))
    branches = session.branches()
    check_laws(session, branches, policy)
    shown = sorted("".join("R" if span.image == RED else "B" for span in branch.images) for branch in branches)
    assert shown == ["B", "R", "RB"]
    for branch in branches:
        assert all((branch.tokens[span.start : span.stop] == PAD).all() for span in branch.images)


async def test_another_image_is_another_conversation() -> None:
    """A history whose image was replaced, e.g. compressed again, does not continue the kept ids."""
    policy = ScriptedPolicy(replies())
    async with seeing(policy) as session:
        first = await ask(session, SHOW)
        await ask(session, Message("user", ("Look: ", BLUE, "?")), first.message, "And?")
        await ask(session, SHOW, first.message, "And?")
    assert session.metrics()["roots"] == 2
    assert [[span.image for span in images] for images in policy.images] == [[RED], [BLUE], [RED]]


async def test_a_text_with_the_token_of_an_image_is_refused() -> None:
    """The server would take it for an image: the request is invalid, and nothing is sampled."""
    policy = ScriptedPolicy(replies())
    async with seeing(policy) as session:
        with pytest.raises(ApiError, match=r"placeholders .*: got 2; expected 1") as caught:
            await ask(session, Message("user", (RED, "<|endoftext|>")))
        assert await session.count_tokens(asks(SHOW)) == len(
            renderer_for(DEMO_MODEL, images=True).opening([SHOW], (LOOK,))
        )
    assert (caught.value.error_kind, policy.requests) == ("invalid_request", [])


class TextPolicy(ScriptedPolicy):
    takes_images = False


async def test_a_policy_without_images_refuses_them() -> None:
    """By the name of the policy; text is served."""
    async with seeing(TextPolicy(replies())) as session:
        with pytest.raises(ApiError, match=r"messages: images: got <ScriptedPolicy.*requests of this policy have no"):
            await ask(session, SHOW)
        await ask(session, "Hi")


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        ("/v1/chat/completions", BODIES["chat"][1], {"error": {"type": "invalid_request_error"}}),
        ("/v1/responses", BODIES["responses"][1], {"error": {"type": "invalid_request_error"}}),
        ("/v1/messages", BODIES["messages"][1], {"type": "error", "error": {"type": "invalid_request_error"}}),
    ],
)
async def test_a_server_of_a_text_model_answers_in_the_form_of_the_api(
    path: str, body: dict[str, Any], form: dict[str, Any]
) -> None:
    """Status 400, which no client retries, with the type that the SDK of the API raises an error for."""
    async with session_of(ScriptedPolicy(replies())) as session, Gateway() as gateway:
        url = gateway.open(session)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
            async with http.post(f"{url}{path}", json={"model": "m", **body}) as response:
                answer = await response.json()
    assert (response.status, response.headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["type"] == form["error"]["type"]
    assert answer.get("type") == form.get("type")
    assert "text: the renderer of chat template" in answer["error"]["message"]
