"""Keys of equal messages, and the form in which the messages of a program are rendered.

Invariant: two requests with equal keys show the model the same conversation. Images are compared by their hashes. A key
leaves out outer white space, the reasoning of a reply, and the spelling of a call whose id this session has issued:
programs change them when they send a conversation back. Pure; this module knows no token and no call.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import attrs
import msgspec

from rollouts.dtypes import Content, Image, Message, Tool, ToolCall
from rollouts.errors import ConfigError

__all__ = [
    "Conversation",
    "Conversations",
    "EchoChange",
    "FindIds",
    "MessageRules",
    "echo_changes",
    "joined",
    "message_rules",
    "ordered_results",
    "path_keys",
    "served_forms",
    "shape_key",
    "tools_key",
    "with_tool_names",
]

EchoChange: TypeAlias = Literal["reasoning_dropped", "respelled", "rewritten"]
"""A change of a reply that a program sent back: it left the reasoning out, spelled arguments in another way, or wrote
other text, names or arguments."""


# -- keys -------------------------------------------------------------------------------------------------------------


def path_keys(messages: Sequence[Message], ours: set[str], start: int = 0) -> list[int]:
    """Return for each message the key of the conversation up to and including it.

    Keys are hashes of 64 bits, of this process only. A request has its whole history, so each costs under 1 µs.

    Args:
        messages: the conversation, or its part behind the conversation with the key ``start``.
        ours: the ids of calls that this session has issued.
        start: the key of the messages before.
    """
    keys = []
    for message in messages:
        if message.role != "assistant":
            start = hash((start, message.role, _shown(message), message.tool_call_id))
        else:
            ids = tuple([call.id for call in message.tool_calls])
            if ids and ours.issuperset(ids):
                start = hash((start, ids))
            else:
                calls = tuple([_call_parts(call) for call in message.tool_calls])
                start = hash((start, "assistant", message.text.strip(), calls))
        keys.append(start)
    return keys


def _shown(message: Message) -> object:
    """The visible content of a message: its text, or its strings and images; an image is hashed by its bytes."""
    if isinstance(message.content, str):
        return message.content.strip()
    parts = [part.strip() if isinstance(part, str) else part for part in message.content]
    return tuple([part for part in parts if part])


def _call_parts(call: ToolCall) -> tuple[object, ...]:
    return call.id, call.name, _sorted_json(call.arguments), call.raw if call.error is not None else ""


def _sorted_json(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


FindIds: TypeAlias = Callable[[int, Message], "Sequence[str] | None"]
"""The ids that this session issued for the calls of an assistant message with other ids, by the key of the messages
before it; ``None`` if it has no such reply."""


def shape_key(before: int, calls: Sequence[ToolCall]) -> int:
    """The key of a reply by its place, names and arguments; ``before`` is the key of the messages before it."""
    return hash((before, "calls", tuple([_call_parts(call)[1:] for call in calls])))


def _own_ids(
    messages: Sequence[Message], ours: set[str], find: FindIds, start: int
) -> tuple[list[Message], list[int], list[int]]:
    """The messages with the ids that this session has issued, their path keys, and the places of renamed replies.

    Some programs give the calls of a reply other ids, and their results too. A reply whose ids are all unknown is found
    by its place, names and arguments.
    """
    if not any(message.tool_calls and not _issued(message, ours) for message in messages):
        return list(messages), path_keys(messages, ours, start), []
    named: list[Message] = []
    keys: list[int] = []
    places: list[int] = []
    renamed: dict[str, deque[str]] = {}
    for message in messages:
        if message.tool_calls:
            found = None if _issued(message, ours) else find(start, message)
            for call in message.tool_calls:
                renamed.pop(call.id, None)
            if found is not None:
                for call, own in zip(message.tool_calls, found, strict=True):
                    renamed.setdefault(call.id, deque()).append(own)
                pairs = zip(message.tool_calls, found, strict=True)
                message = attrs.evolve(message, tool_calls=[attrs.evolve(call, id=own) for call, own in pairs])
                places.append(len(named))
        elif message.tool_call_id is not None and message.tool_call_id in renamed:
            ids = renamed[message.tool_call_id]  # equal ids of several calls: the results are in the order of the calls
            message = attrs.evolve(message, tool_call_id=ids.popleft() if len(ids) > 1 else ids[0])
        named.append(message)
        keys += path_keys([message], ours, start)
        start = keys[-1]
    return named, keys, places


def _issued(message: Message, ours: set[str]) -> bool:
    return any(call.id in ours for call in message.tool_calls)


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Return a key of the tools as a template writes them: the order of tools and of the keys in a schema counts."""
    return hashlib.blake2b(msgspec.json.encode([tool.to_chat() for tool in tools]), digest_size=16).digest()


def served_forms(reply: Message) -> list[Message]:
    """Return the forms in which a program may send a reply back, the reply itself first.

    An API without a place for a malformed call gives the program its text instead: alone or after the content.
    """
    good = [call for call in reply.tool_calls if call.error is None]
    if len(good) == len(reply.tool_calls):
        return [reply]
    texts = [call.raw for call in reply.tool_calls if call.error is not None]
    forms = [reply]
    for separator in ("\n", ""):
        content = separator.join(text for text in (reply.text, *texts) if text)
        forms.append(attrs.evolve(reply, content=content, tool_calls=good))
    return forms


def echo_changes(reply: Message, echo: Message) -> list[EchoChange]:
    """List what a program changed in a reply that it sent back, and that has the same key."""
    changes: list[EchoChange] = []
    if reply.reasoning and not echo.reasoning:
        changes.append("reasoning_dropped")
    if len(reply.tool_calls) != len(echo.tool_calls):
        return changes  # a malformed call that was served as text
    same_text = reply.text.strip() == echo.text.strip()
    pairs = list(zip(reply.tool_calls, echo.tool_calls, strict=True))
    if not same_text or any(_is_rewritten(ours, theirs) for ours, theirs in pairs):
        changes.append("rewritten")
    elif any(msgspec.json.encode(ours.arguments) != msgspec.json.encode(theirs.arguments) for ours, theirs in pairs):
        changes.append("respelled")
    return changes


def _is_rewritten(ours: ToolCall, theirs: ToolCall) -> bool:
    if ours.error is not None:
        return theirs.error is None
    return ours.name != theirs.name or _sorted_json(ours.arguments) != _sorted_json(theirs.arguments)


# -- order and folding ------------------------------------------------------------------------------------------------


def joined(contents: Iterable[Content]) -> Content:
    """Contents as one: neighbouring strings are joined by line breaks, images keep their places."""
    parts = [part for content in contents for part in ((content,) if isinstance(content, str) else content)]
    merged: list[str | Image] = []
    for is_text, group in itertools.groupby(parts, key=lambda part: isinstance(part, str)):
        run = list(group)
        merged += ["\n".join(map(str, run))] if is_text else run
    if not merged:
        return ""
    return merged[0] if len(merged) == 1 and isinstance(merged[0], str) else tuple(merged)


def ordered_results(messages: Sequence[Message]) -> list[Message]:
    """Put the results of parallel calls in the order of the calls: some templates show them by their place."""
    ordered = list(messages)
    roles = [message.role for message in messages]
    place = 1
    while place < len(roles):
        if roles[place] != "tool" or roles[place - 1] != "tool":
            place += 1
            continue
        start, stop = place - 1, place + 1
        while stop < len(roles) and roles[stop] == "tool":
            stop += 1
        calls = next((messages[at].tool_calls for at in range(start - 1, -1, -1) if roles[at] == "assistant"), ())
        order = {call.id: number for number, call in enumerate(calls)}
        ordered[start:stop] = sorted(
            messages[start:stop], key=lambda result: order.get(result.tool_call_id or "", len(order))
        )
        place = stop
    return ordered


def with_tool_names(messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
    """Give each result the name of the tool that its call names; some templates write it.

    Args:
        messages: the messages to render.
        before: the conversation before them; of equal ids the call next before the result counts.
    """
    wanted = {message.tool_call_id for message in messages if message.role == "tool" and message.name is None}
    names: dict[str | None, str] = {}
    for message in reversed(before):
        if wanted <= names.keys():
            break
        for call in message.tool_calls:
            if call.id in wanted:
                names.setdefault(call.id, call.name)
    named = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        name = names.get(message.tool_call_id)
        if message.role == "tool" and message.name is None and name is not None:
            message = attrs.evolve(message, name=name)
        named.append(message)
    return named


@attrs.frozen
class MessageRules:
    """Which messages a chat template takes, and what replaces the messages that it refuses."""

    system: Literal["anywhere", "first", "never"] = "anywhere"
    """Where a system message may stand. ``first``: one, at the start."""
    neighbours: bool = True
    """Whether two user messages may follow each other."""

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them; each reply stays as it is.

        System messages at the start become one. One that the template refuses in its place becomes a user message in
        the tags ``<system-reminder>``. Neighbouring user messages are joined if the template refuses them.
        """
        if self.system == "anywhere" and self.neighbours:
            return list(messages)
        folded: list[Message] = []
        if self.system == "first":
            leading = [m.text for m in itertools.takewhile(lambda m: m.role == "system", messages)]
            if leading:
                folded.append(Message("system", "\n\n".join(leading)))
            messages = messages[len(leading) :]
        for message in messages:
            if message.role == "system" and self.system != "anywhere":
                message = Message("user", f"<system-reminder>\n{message.text}\n</system-reminder>")
            if not self.neighbours and message.role == "user" and folded and folded[-1].role == "user":
                message = Message("user", joined([folded.pop().content, message.content]))
            folded.append(message)
        return folded

    def folded(self, messages: Sequence[Message], *, at_start: bool) -> int:
        """The number of system messages that become user messages; ``at_start``: nothing stands before them."""
        if self.system == "anywhere":
            return 0
        kept = self.system == "first" and at_start
        behind = itertools.dropwhile(lambda m: m.role == "system", messages) if kept else messages
        return sum(message.role == "system" for message in behind)


def message_rules(render: Callable[[Sequence[Message]], str]) -> MessageRules:
    """Find the rules of a chat template by rendering short conversations with ``render`` of its renderer."""

    def keeps(*roles: Literal["system", "user", "assistant"]) -> bool:
        marks = [f"qz7{number}qz7" for number in range(len(roles))]
        try:
            text = render([Message(role, mark) for role, mark in zip(roles, marks, strict=True)])
        except ConfigError:
            return False
        places = [text.find(mark) for mark in marks]
        return min(places) >= 0 and places == sorted(places)

    neighbours = keeps("user", "user")
    if keeps("system", "user", "system") and keeps("system", "system", "user", "assistant", "user", "system"):
        return MessageRules("anywhere", neighbours)
    return MessageRules("first" if keeps("system", "user") else "never", neighbours)


# -- earlier conversations ---------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Conversation:
    """The messages of a request, in the forms that a session needs."""

    whole: tuple[Message, ...]
    """As the program sent them."""
    messages: list[Message]
    """As the chat template gets them, with the ids of calls that the session has issued."""
    keys: list[int]
    """The path keys of ``messages``."""
    replies: list[tuple[int, int]]
    """The places of each assistant message: in ``whole``, and in ``messages``."""
    renamed: list[int] = attrs.field(factory=list)
    """The places in ``messages`` of replies that came with other ids than the session has issued."""
    known: int = 0
    """Number of messages of ``whole`` that an earlier conversation also has."""
    line: object = attrs.field(factory=object, repr=False)
    """The line of the earlier conversation, or a new one."""

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages of ``whole`` from the last reply that an earlier conversation has."""
        return self.whole[self.known :]


class Conversations:
    """The latest conversations of a session, so that a request costs what is new in it.

    A request is taken from an earlier conversation up to the last reply before which, and with which, it has the same
    objects. Neither order nor folding crosses a reply, so that both stay as they are up to there.

    Args:
        rules: of the chat template.
        most: the number of conversations that are kept: agents that work at the same time have one each.
    """

    def __init__(self, rules: MessageRules, most: int = 8) -> None:
        self.rules = rules
        self._most = most
        self._kept: dict[object, Conversation] = {}

    def of(self, whole: tuple[Message, ...], ours: set[str], find: FindIds = lambda *_: None) -> Conversation:
        """Order, fold and key the messages of a request.

        Args:
            whole: the messages.
            ours: as in :func:`path_keys`.
            find: the ids of a reply whose calls have other ids.
        """
        earlier, found = None, 0
        for one in self._kept.values():
            if (shared := _shared_replies(one, whole)) > found:
                earlier, found = one, shared
        if earlier is None:
            messages, keys, renamed = _own_ids(self.rules.applied(ordered_results(whole)), ours, find, 0)
            return Conversation(whole, messages, keys, _replies(whole, messages), renamed)
        *before, (known, place) = earlier.replies[:found]
        ordered = self.rules.applied(ordered_results(whole[known:]))
        messages, keys, renamed = _own_ids(ordered, ours, find, earlier.keys[place - 1])
        replies = [(known + at, place + its) for at, its in _replies(whole[known:], messages)]
        messages, keys = earlier.messages[:place] + messages, earlier.keys[:place] + keys
        renamed = [at for at in earlier.renamed if at < place] + [place + at for at in renamed]
        return Conversation(whole, messages, keys, before + replies, renamed, known, earlier.line)

    def keep(self, conversation: Conversation) -> None:
        """Keep a conversation for later requests in place of the conversation that it extends."""
        self._kept.pop(conversation.line, None)
        self._kept[conversation.line] = conversation
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]


def _replies(whole: Sequence[Message], messages: Sequence[Message]) -> list[tuple[int, int]]:
    places = [[at for at, one in enumerate(part) if one.role == "assistant"] for part in (whole, messages)]
    return list(zip(*places, strict=True))


def _shared_replies(one: Conversation, whole: Sequence[Message]) -> int:
    """The number of replies up to which a request has the objects of a conversation, without one at its start."""
    try:
        same = operator.indexOf(map(operator.is_, one.whole, whole), False)
    except ValueError:
        same = min(len(one.whole), len(whole))
    found = bisect.bisect_left(one.replies, (same,))
    return found if found and one.replies[found - 1][0] else 0
