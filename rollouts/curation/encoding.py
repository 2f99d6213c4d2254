"""Text of a chat API as token rows of a student, which tokenizes it.

Invariant: the ids are as the agent loop of the student would have them, had it sampled these replies: the opening,
each reply as its template writes it, up to its stop token, and a bridge after each. A label is an id exactly in a
reply. A conversation that the template cannot write in this way is refused; nothing is repaired.

This module does not know runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rollouts.base.storable import to_json
from rollouts.dtypes import Message, Tool
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer, renderer_for

__all__ = ["REFUSED", "SPECIAL", "Student"]

REFUSED = "the student's chat template cannot write it"
SPECIAL = "a reply has a special token of the student in its text"


class Student:
    """The tokenizer and the chat template of the model that is trained.

    Args:
        tokenizer: the name or folder of a tokenizer, or a :class:`Renderer`.

    Raises:
        ConfigError: it does not load.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = tokenizer.name if isinstance(tokenizer, Renderer) else str(tokenizer)
        self._renderer = renderer_for(tokenizer)
        self._special = _special_texts(load_tokenizer(self.name))

    def __repr__(self) -> str:
        return f"<Student {self.name}>"

    def encode(
        self, messages: Sequence[dict[str, Any]], tools: str
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]] | str:
        """The ids up to the last reply, and where they are of a reply; or why there are none.

        Args:
            messages: of the whole conversation, in chat format.
            tools: the tools that the model was shown, as JSON.
        """
        try:
            conversation = [*map(Message.from_chat, messages)]
            shown = [*map(Tool.from_chat, msgspec.json.decode(tools))]
            return self._encoded(conversation, shown)
        except ConfigError:
            return REFUSED

    def _encoded(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]] | str:
        renderer = self._renderer
        replies = [place for place, message in enumerate(messages) if message.role == "assistant"]
        if not replies or replies[0] == 0:
            return REFUSED
        parts = [renderer.opening(messages[: replies[0]], tools)]
        end = replies[0]
        for place in replies:
            if place > end:
                bridge = renderer.bridge(messages[:end], messages[end:place], tools=tools, tail=parts[-1])
                parts.append(bridge)
            reply = self._reply(messages[:place], messages[place], tools)
            if isinstance(reply, str):
                return reply
            parts.append(reply)
            end = place + 1
        if len(parts) != 2 * len(replies):  # two replies follow each other
            return REFUSED
        mask = [np.full(len(part), number % 2 == 1) for number, part in enumerate(parts)]
        return np.concatenate(parts), np.concatenate(mask)

    def _reply(self, history: Sequence[Message], reply: Message, tools: Sequence[Tool]) -> npt.NDArray[np.int32] | str:
        """The ids that the model would have sampled, with the stop token."""
        renderer = self._renderer
        if self._special.search(to_json(reply.to_chat()).decode()):  # else its text would be trained as a control id
            return SPECIAL
        before = renderer.render(history, tools)
        whole = renderer.render([*history, reply], tools, generation_prompt=False)
        if not whole.startswith(before):
            return REFUSED
        ids = renderer.encode(whole.removeprefix(before))
        stops = np.flatnonzero(np.isin(ids, renderer.stop_token_ids))
        if not len(stops):
            return REFUSED
        if renderer.decode(ids[stops[0] + 1 :]).strip():
            return SPECIAL
        return ids[: stops[0] + 1]


def _special_texts(tokenizer: Any) -> re.Pattern[str]:
    """The texts of special tokens, which a tokenizer finds in any text."""
    texts = sorted({str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}, key=len)
    return re.compile("|".join(map(re.escape, reversed(texts))) or r"(?!)")
