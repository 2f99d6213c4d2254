"""The blocks of the standard: text, images, and the text in place of images that are not shown."""

from __future__ import annotations

import PIL.Image

from rollouts.dtypes import Image, Message, with_images
from rollouts.environments.ors.wire import Block, blocks_of, content_of


def test_blocks_of_a_conversation_have_its_images() -> None:
    """In their places, also in results of tools; where a server takes no images, text stands for each."""
    image = Image.of(PIL.Image.new("RGB", (4, 3)))
    sample = Message("tool", ("See: ", image), tool_call_id="a").to_record()
    (chat,) = with_images([sample], {image.sha256: image}.__getitem__)
    inner = {"type": "image", "data": image.url.partition(",")[2], "mimeType": "image/png"}
    kinds = ("text", "image", "tool_result")
    ((shown,),) = [message["blocks"] for message in blocks_of([chat], kinds)]
    assert shown["blocks"] == [{"type": "text", "text": "See: "}, inner]
    ((described,),) = [message["blocks"] for message in blocks_of([sample], ("text", "tool_result"))]
    assert described["blocks"] == [{"type": "text", "text": f"See: {image.label}"}]
    plain = blocks_of([{"role": "tool", "content": "", "tool_call_id": "b"}, {"role": "user", "content": "hi"}], kinds)
    assert [message["blocks"][0].get("text") for message in plain] == [None, "hi"]
    content, hidden = content_of(
        [Block("text", "See: "), Block("image", mimeType="image/png", data=inner["data"])], images=True
    )
    assert (content, hidden) == (("See: ", image), 0)
