"""The contexts of the calls of one session: which call a request continues, and the ids that it adds.

Invariant: the context of a request that continues a call is the kept ids of that call and a bridge; any other request
is an opening. Tools are tested before they are rendered. This module samples nothing.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence

import attrs

from rollouts.dtypes import ImageSpan, Message, OnRewrite, TokenColumn, Tool
from rollouts.errors import ConfigError, GenerateFailure, HistoryRewritten, ReplyRefused, shortened
from rollouts.inference.base import Policy, check_takes_images
from rollouts.programs.gateway.call_ids import CallIds
from rollouts.programs.gateway.normal import (
    Conversation,
    Conversations,
    MessageRules,
    message_rules,
    with_tool_names,
)
from rollouts.programs.gateway.requests import OpenRequest
from rollouts.programs.gateway.tool_sets import ToolSets
from rollouts.programs.gateway.tree import Call, Line, Match, Tree
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.renderer import Renderer
from rollouts.renderer.in_threads import bridged, in_thread, rendered

__all__ = ["Context", "Contexts"]

_REWRITES_KEPT = 8
_RULES: weakref.WeakKeyDictionary[Renderer, MessageRules] = weakref.WeakKeyDictionary()
"""The rules of the chat templates in use: sessions share a renderer."""


@attrs.frozen(eq=False)
class Context:
    """The place of a request in the tree, and what it adds there."""

    parent: Call | None
    """The call that it continues."""
    line: Line
    """The line that it has claimed."""
    start: int
    """Number of ids of the line before the request."""
    ids: TokenColumn
    new: tuple[Message, ...]
    images: tuple[ImageSpan, ...]

    @property
    def stop(self) -> int:
        """Number of ids before the reply."""
        return self.start + len(self.ids)


@attrs.define(eq=False)
class Contexts:
    """The contexts of one session."""

    _policy: Policy
    """Says whether it takes images."""
    _renderer: Renderer
    _tree: Tree
    _ids: CallIds
    _counts: Counter[str]
    tools: ToolSets
    _max_roots: int | None
    history: OnRewrite
    rewrites: list[tuple[int, str]] = attrs.field(init=False, factory=list)
    """Of the first rewritten conversations: the number of the message that differs, and its text."""
    _latest: Conversations | None = attrs.field(init=False, default=None)

    # -- read ---------------------------------------------------------------------------------------------------------

    @property
    def no_images(self) -> str:
        """Why the model takes no images; empty if it does."""
        if self._renderer.images is None:
            return f"got an image; expected text: the renderer of chat template {self._renderer.name} has no images"
        try:
            check_takes_images(self._policy)
        except ConfigError as error:
            return str(error)
        return ""

    async def read(self, request: CallRequest) -> Conversation:
        """All messages of a request, and of the replies that it follows by reference.

        Raises:
            ApiError: the reply does not exist, or the model does not see the request's images.
        """
        conversation = self.conversations.of(self._whole(request), self._tree.ours, self._tree.ids_of)
        await self._check_images(conversation.new)
        return conversation

    async def count_tokens(self, request: CallRequest) -> int:
        """Length in ids of an opening with these messages and tools."""
        conversation = await self.read(request)
        opening, _ = await self._opening(self._to_render(conversation.messages), request.tools, request.continues)
        return len(opening)

    def _whole(self, request: CallRequest) -> tuple[Message, ...]:
        if request.previous_response_id is None:
            return request.messages
        call = self._tree.call_of(request.previous_response_id)
        if call is None:
            self._counts["refused/invalid_request"] += 1
            expected = "the id of a response of this session"
            raise ApiError(
                "invalid_request", f"previous_response_id: got {request.previous_response_id!r}; expected {expected}"
            )
        before = call.conversation()
        if request.instructions is None:
            return (*before, *request.messages)
        return (request.messages[0], *before, *request.messages[1:])

    async def _check_images(self, messages: Sequence[Message]) -> None:
        """Refuse images that the model does not see."""
        if not any(message.images for message in messages):
            return
        try:
            self._renderer.check_images(messages)
            check_takes_images(self._policy)
            if self._renderer.images is not None:
                await in_thread(self._renderer.images.check_repeats)
        except ConfigError as error:
            self._counts["refused/image"] += 1
            raise ApiError("invalid_request", f"messages: {error}") from None

    @property
    def conversations(self) -> Conversations:
        """The latest conversations."""
        if self._latest is None:
            if self._renderer not in _RULES:
                _RULES[self._renderer] = message_rules(self._renderer.render)
            self._latest = Conversations(_RULES[self._renderer])
        return self._latest

    # -- match and render ---------------------------------------------------------------------------------------------

    async def test_tools(self, request: OpenRequest) -> None:
        """Refuse tools whose calls would be lost, as in any other rollout.

        Raises:
            ApiError: these tools are refused; a program, and its model, can offer any name.
            ConfigError: the chat template or the dialect serves no tools at all.
        """
        try:
            request.tools = await self.tools.tested(request.tools_key, request.tools)
        except ConfigError as error:
            if not await self.tools.serves_any():
                raise
            self._counts["refused/tools"] += 1
            raise ApiError("invalid_request", f"tools: {error}") from error

    def match(self, request: OpenRequest) -> Match:
        """The call that a request continues.

        Raises:
            HistoryRewritten: the program changed the reply, and the session has ``history="error"``.
            GenerateFailure: it is one root too many.
        """
        messages = request.conversation.messages
        match = self._tree.match(messages, request.conversation.keys, request.tools_key)
        if match.call is not None:
            self._tree.delivered(match.call)
            path = match.call.path()
            echoes = {at: found for call in path if (found := call.changes(messages[at := call.known - 1]))}
            if echoes:
                request.changes = Counter(itertools.chain.from_iterable(echoes.values()))
            request.renamed = len({call.known - 1 for call in path}.intersection(request.conversation.renamed))
            if echoes and self.history == "error":
                at, found = next(iter(echoes.items()))
                expected = 'the reply as it was given ("append" keeps the ids, "fork" opens a new root)'
                raise HistoryRewritten(f'messages[{at}]: got {", ".join(found)}; history="error" expects {expected}')
            if echoes and self.history == "fork":
                at = next(iter(echoes))
                match = Match(None, rewritten_at=at, rewritten=messages[at].text[:80])
        most = self._max_roots
        if match.call is None and most is not None and len(self._tree.roots) >= most:
            rewrites = "; ".join(f"message {at} became {text!r}" for at, text in self.rewrites[:3])
            raise GenerateFailure(
                f"max_roots: the program begins conversation {most + 1}; expected at most {most}"
                + (f". It rewrote its history: {rewrites}" if rewrites else "")
            )
        return match

    async def render(self, request: OpenRequest, match: Match) -> Context:
        """Claim the line of a request, and render what the request adds to it.

        Raises:
            ApiError: the template cannot render these messages.
            ReplyRefused: because of a reply of the model.
        """
        parent, messages = match.call, request.conversation.messages
        if parent is not None:
            line = self._tree.claim(parent)
            new = self._to_render(messages[match.known :], messages[: match.known])
            try:
                bridge = await bridged(
                    self._renderer, line.messages, new, tools=request.tools, tail=parent.tail, memory=line.memory
                )
                images = self._renderer.image_spans(bridge, new)
            except ConfigError:
                line.claimed = False
                self._counts["bridge_refused"] += 1
            except BaseException:
                line.claimed = False
                raise
            else:
                return Context(parent, line, len(line.sequence), bridge, tuple(new), images)
        new = self._to_render(messages)
        try:
            opening, images = await self._opening(new, request.tools, request.sent.continues)
        except ApiError as error:
            known = match.known
            if parent is not None and self._renderer.refuses_reply(new[:known], new[known:], request.tools):
                raise ReplyRefused(f"{error}; it refuses the reply {shortened(parent.message)}") from error
            raise
        return Context(None, self._tree.claim(None), 0, opening, tuple(new), images)

    async def _opening(
        self, messages: list[Message], tools: Sequence[Tool], continues: bool
    ) -> tuple[TokenColumn, tuple[ImageSpan, ...]]:
        described = [Message("system", tool.description) for tool in tools]
        try:
            open_ = functools.partial(self._renderer.opening, new_turn=not continues)
            opening = await rendered([*messages, *described], open_, messages, tools)
            return opening, self._renderer.image_spans(opening, messages)
        except ConfigError as error:
            self._counts["refused/invalid_request"] += 1
            raise ApiError("invalid_request", f"the chat template cannot render these messages: {error}") from error

    def _to_render(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
        """The messages with the names of tools, and with the ids that the model itself wrote into its calls."""
        return self._ids.as_written(with_tool_names(messages, before))

    def count(self, request: OpenRequest, match: Match, parent: Call | None) -> None:
        """Count what the program changed in its history, once the request is answered."""
        for change, amount in request.changes.items():
            self._counts[f"echo/{change}"] += amount
        if request.renamed:
            self._counts["echo/other_ids"] += request.renamed
        messages, _ = request.new_messages(of_root=parent is None)
        if folded := self.conversations.rules.folded(messages, at_start=parent is None):
            self._counts["folded_system_messages"] += folded
        if request.conversation.messages[-1].role == "assistant":
            self._counts["assistant_last/continued" if request.sent.continues else "assistant_last/new_turn"] += 1
        if match.rewritten_at is not None:
            self._counts[f"rewritten_at/{match.rewritten_at}"] += 1
            if len(self.rewrites) < _REWRITES_KEPT:
                self.rewrites.append((match.rewritten_at, match.rewritten))
        if match.tools_changed:
            self._counts["tools_changed"] += 1
