"""The calls of one session as a tree: which call a request continues, and which sampled tokens are trained.

Laws of this module:

1. Tokens: the ids of a call are the kept ids of the call that it continues, and the encoded new text. A kept reply is
   never encoded again. Each line of the tree is a :class:`Trajectory`, which checks every completion.
2. Mask: as in :mod:`rollouts.trajectory`.
3. Once: the sampled ids of a call are trained in exactly one branch, the first that contains them; they are context in
   the later ones.
4. Whole: every sampled id is trained in a branch, or counted in :attr:`Tree.untrained` by the reason why not.

A request is matched by the keys of its messages, so a call costs only its new messages. Pure; this module knows no
policy and no wire format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias

import attrs

from rollouts.base.validators import check
from rollouts.dtypes import Completion, ImageSpan, Message, OnRewrite, StopReason, TokenColumn, Tool
from rollouts.dtypes.tools import tools_json
from rollouts.errors import Failure, TokenMismatchError
from rollouts.programs.gateway.normal import EchoChange, echo_changes, path_keys, served_forms, shape_key
from rollouts.programs.gateway.types import CallReply
from rollouts.renderer import BridgeMemory
from rollouts.trajectory import Trajectory

__all__ = ["Call", "Line", "Match", "Training", "Tree", "Untrained"]

Untrained: TypeAlias = Literal["undelivered", "side_call", "compaction", "cut_off", "dropped", "by_hand", "constrained"]
"""Why a reply is not trained. ``undelivered``: the program never got it. ``side_call``: a conversation of one reply and
no tools, such as a title. ``compaction``: a summary. ``cut_off``: the server aborted it. ``dropped``: one of several
replies to the same request, or a reply that the program discarded. ``by_hand``: the request came from the model's own
code, not from the program. ``constrained``: the request constrained the form of its reply."""

_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
"""The part of the reply to its request for a summary that Claude Code quotes."""
_MOST_FOREIGN_IDS = 4096
"""Ids of programs that are kept: some give the same call new ids in each request."""
_SHORTEST_QUOTE = 16
"""Characters from which a reply that a later prompt contains counts as quoted; a shorter one may be a coincidence."""


def _either(default: str, *others: str) -> Any:
    expected = " or ".join(f'"{name}"' for name in (default, *others))
    return attrs.field(default=default, validator=check(expected, lambda value: value in (default, *others)))


@attrs.frozen
class Training:
    """Which replies are trained where a session has more than one conversation."""

    side_calls: Literal["drop", "train"] = _either("drop", "train")
    """A root without tools and without a child, while another root has tools or a child. A root with an
    assistant message is not a side call: it shows a conversation, as a request for a summary or a last answer does. Nor
    is a root whose reply a later root quotes: it is a summary, too."""
    siblings: Literal["drop", "keep"] = _either("drop", "keep")
    """Several replies to the same request, of which the program continued some: the others."""
    discarded: Literal["train", "drop"] = _either("train", "drop")
    """A reply that the program left out of its next request."""
    compaction: Literal["train", "drop"] = _either("train", "drop")
    """A summary of the history, with which the program begins a new conversation: a reply without a child, quoted by a
    later root of the same agent that does not contain the request for it."""
    by_hand: Literal["drop", "train"] = _either("drop", "train")
    constrained: Literal["drop", "train", "free"] = _either("drop", "train", "free")
    """A reply whose form the request constrained, also by strict tools: its logprobs are over the ids that the form
    allowed, and a trainer computes others. ``free`` enforces no form, so that the reply is trained as any other."""
    strict_tools: Literal["free", "enforce"] = _either("free", "enforce")
    """Whether calls of strict tools are held to their schemas. Some SDKs mark every tool as strict without being asked
    to, and an enforced call is a constrained reply."""


@attrs.define(eq=False)
class Line:
    """A growing token sequence: the calls from a root to the newest call that continues its end."""

    number: int
    sequence: Trajectory = attrs.field(factory=Trajectory)
    """The ids of a path that was left are copied as context: this is a buffer, never a branch."""
    messages: list[Message] = attrs.field(factory=list)
    memory: BridgeMemory = attrs.field(factory=BridgeMemory)
    claimed: bool = False
    """Whether a call is being added."""

    def append(self, context: TokenColumn, messages: Sequence[Message], images: Sequence[ImageSpan] = ()) -> None:
        """Add the context of a request behind the last reply; ``images`` are the images of ``context``."""
        self.sequence.add_context(context, images=images)
        self.messages += messages

    def images(self, start: int, stop: int) -> list[ImageSpan]:
        """The images of the ids from ``start`` to ``stop``, with positions in these."""
        return [span.shifted(-start) for span in self.sequence.images if start <= span.start and span.stop <= stop]


@attrs.define(eq=False)
class Call:
    """One call with its reply: a node of the tree."""

    number: int
    parent: Call | None
    line: Line
    start: int
    """The first id of its context: an opening, or the bridge behind the parent's reply."""
    reply_start: int
    new: tuple[Message, ...]
    """The messages of the context, as they were rendered."""
    tools: tuple[Tool, ...]
    tools_key: bytes
    request_key: int
    """Key of all messages of the request."""
    retry_key: object
    """Equal in requests that are the same request again."""
    completion: Completion
    message: Message
    """The reply with the ids that the model wrote."""
    reply: CallReply
    """The reply as the program got it."""
    lineage: Mapping[str, str]
    by_hand: bool
    began: float
    """Seconds since 1970."""
    temperature: float | None = None
    """Of its request to the policy."""
    asked: tuple[Message, ...] = ()
    """The messages that the program sent behind the parent's reply."""
    instructions: str | None = None
    """Of a root: the instructions that are the first of the messages, which a request that follows it may replace."""
    path_key: int = 0
    """Key of the path, with the reply as the program got it; set by :meth:`Tree.add`."""
    known: int = 0
    """Number of messages of the path, which are the first of the line; set by :meth:`Tree.add`."""
    delivered: bool = False
    children: list[Call] = attrs.field(factory=list, repr=False)
    _echo: Message | None = attrs.field(default=None, repr=False)
    """The latest reply that the program sent back in place of this one, and its changes."""
    _changes: Sequence[EchoChange] = attrs.field(default=(), repr=False)

    @property
    def stop(self) -> int:
        """The number of ids up to the end of the reply."""
        return self.reply_start + len(self.completion.tokens)

    @property
    def tail(self) -> TokenColumn:
        """The sampled ids."""
        return self.completion.tokens

    def changes(self, echo: Message) -> Sequence[EchoChange]:
        """The changes of the program in the reply that it sent back; compared once for each object."""
        if echo is not self._echo:
            self._echo, self._changes = echo, echo_changes(self.reply.message, echo)
        return self._changes

    def path(self) -> list[Call]:
        """The calls from the root to this one."""
        path, call = [self], self.parent
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def root(self) -> Call:
        return self.path()[0]

    def conversation(self) -> list[Message]:
        """The path in the messages of the program and in the replies that it got, without instructions."""
        messages: list[Message] = []
        for call in self.path():
            messages += call.asked if call.instructions is None else call.asked[1:]
            messages.append(call.reply.message)
        return messages


@attrs.frozen
class Match:
    """The place of a request in the tree."""

    call: Call | None
    """The deepest call whose path is the beginning of the request; ``None``: the request is a root."""
    known: int = 0
    """Number of messages of the request that belong to the path of the call."""
    rewritten_at: int | None = None
    """Of a root: the first message that differs from an earlier conversation, if they share a beginning."""
    rewritten: str = ""
    """Of a root: the text of that message."""
    tools_changed: bool = False
    """Of a root: whether it is an earlier conversation with other tools."""


class Tree:
    """The calls of one session.

    Attributes:
        calls: all calls that have a reply, in the order of their replies.
        ours: the ids of the tool calls that programs got.
        untrained: sampled ids that are in no branch as trained ids, by reason; set by :meth:`branches`.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.roots: list[Call] = []
        self.ours: set[str] = set()
        self.lines = 0
        self.sampled = 0
        """Sampled ids of all calls."""
        self.untrained: Counter[Untrained] = Counter()
        self._by_path: dict[tuple[bytes, int], Call] = {}
        """The latest call of each path, by the keys of the tools and of the path."""
        self._seen: dict[int, Call] = {}
        """The latest call of each path and of each request, by key, whatever the tools."""
        self._retries: dict[object, list[Call]] = {}
        """Replies that their program did not get, by the key of the request."""
        self._by_reply: dict[str, Call] = {}
        self._by_shape: dict[int, list[Call]] = {}
        """The calls with equal tool calls in one place."""
        self._by_foreign_ids: dict[tuple[int, tuple[str, ...]], Call] = {}
        """The reply that a program means by other ids than it got, by its shape, its text and these ids."""

    def __repr__(self) -> str:
        return f"<Tree {len(self.calls)} calls, {len(self.roots)} roots, {self.sampled} sampled tokens>"

    def call_of(self, reply_id: str) -> Call | None:
        """The call with a reply of this id."""
        return self._by_reply.get(reply_id)

    def ids_of(self, before: int, reply: Message) -> list[str] | None:
        """The ids that were issued for the calls of a reply that came back with others; see :data:`FindIds`.

        Of several replies with these calls in this place, a reply with the same text goes before the others, and then
        a reply that no other ids have named.
        """
        shape = shape_key(before, reply.tool_calls)
        text = reply.text.strip()
        names = shape, (text, *[call.id for call in reply.tool_calls])
        if names not in self._by_foreign_ids:
            calls = self._by_shape.get(shape, ())
            named = set(self._by_foreign_ids.values()) if len(calls) > 1 else set()
            found = max(
                calls, key=lambda one: (one.message.text.strip() == text, one not in named, one.number), default=None
            )
            if found is None:
                return None
            if len(self._by_foreign_ids) >= _MOST_FOREIGN_IDS:
                del self._by_foreign_ids[next(iter(self._by_foreign_ids))]
            self._by_foreign_ids[names] = found
        return _ids(self._by_foreign_ids[names])

    # -- match --------------------------------------------------------------------------------------------------------

    def match(self, messages: Sequence[Message], keys: Sequence[int], tools_key: bytes) -> Match:
        """Find the call that a request continues.

        Args:
            messages: all messages of the request.
            keys: their path keys.
            tools_key: the key of the request's tools.
        """
        replies = (place for place in range(len(messages) - 1, -1, -1) if messages[place].role == "assistant")
        last = next(replies, None)
        if last is None or last == len(messages) - 1:  # after a prefill, the reply continues that message
            return Match(None)
        call = self._by_path.get((tools_key, keys[last]))
        if call is not None and call.known == last + 1:
            return Match(call, last + 1)
        if keys[last] in self._seen:
            return Match(None, tools_changed=True)
        return self._rewritten(messages, keys, last)

    def _rewritten(self, messages: Sequence[Message], keys: Sequence[int], last: int) -> Match:
        """A root: the message from which on it differs from the conversation with which it shares most messages."""
        known = next((at + 1 for at in range(len(keys) - 1, -1, -1) if keys[at] in self._seen), 0)
        earlier = self._seen.get(keys[known - 1]) if known else self._quoted(messages)
        if earlier is None or known > last:  # the earlier request has all of its replies
            return Match(None)
        if known and earlier.path_key == keys[known - 1]:
            later: Sequence[Message] = earlier.children[-1].new if earlier.children else ()
        elif known:
            later = (earlier.message,)
        else:
            later = earlier.root().new
        at = known
        for mine, theirs in zip(messages[known:], later, strict=False):
            if path_keys([mine], self.ours) != path_keys([theirs], self.ours):
                break
            at += 1
        return Match(None, rewritten_at=at, rewritten=messages[at].text[:80] if at < len(messages) else "")

    def _quoted(self, messages: Sequence[Message]) -> Call | None:
        """A call whose tool calls are in these messages."""
        for message in messages:
            for call in message.tool_calls:
                if call.id in self.ours:
                    return next((one for one in reversed(self.calls) if call.id in _ids(one)), None)
        return None

    # -- grow ---------------------------------------------------------------------------------------------------------

    def claim(self, parent: Call | None) -> Line:
        """Return the line that a new child of ``parent`` extends, or the line of a new root.

        It is the parent's own line if the parent's reply is its end, and else a copy up to that reply.
        """
        if parent is None:
            line = self._new_line()
        elif parent.line.claimed or len(parent.line.sequence) != parent.stop:
            line = self.copy(parent.line, parent.stop, parent.known)
        else:
            line = parent.line
        line.claimed = True
        return line

    def copy(self, line: Line, stop: int, known: int) -> Line:
        """Return a new line with the first ``stop`` ids and the first ``known`` messages of another one."""
        copied = self._new_line()
        copied.sequence.add_context(line.sequence.tokens[:stop], images=line.images(0, stop))
        copied.messages = line.messages[:known]
        copied.memory.bridges = max(sum(message.role == "assistant" for message in copied.messages) - 1, 0)
        copied.claimed = True
        return copied

    def _new_line(self) -> Line:
        self.lines += 1
        return Line(self.lines)

    def add(self, call: Call) -> None:
        """Add a call with its reply; the line of the call contains its context already.

        Raises:
            TokenMismatchError: the completion was sampled from other ids than the line has.
        """
        call.line.sequence.add_reply(call.completion, call.message)
        call.line.messages.append(call.message)
        call.line.claimed = False
        call.known = len(call.line.messages)
        self.sampled += len(call.completion.tokens)
        self.calls.append(call)
        (self.roots if call.parent is None else call.parent.children).append(call)
        self._by_reply[call.reply.id] = call
        self.ours.update(_ids(call))
        forms = served_forms(call.reply.message)
        keys = [path_keys([form], self.ours, call.request_key)[0] for form in forms]
        call.path_key = keys[0]
        for key in keys:
            self._by_path[call.tools_key, key] = call
            self._seen[key] = call
        self._seen[call.request_key] = call
        if call.reply.message.tool_calls:
            shape = shape_key(call.request_key, call.reply.message.tool_calls)
            self._by_shape.setdefault(shape, []).append(call)

    def delivered(self, call: Call) -> None:
        """Note that the program got the reply."""
        call.delivered = True
        kept = self._retries.get(call.retry_key, [])
        if call in kept:
            kept.remove(call)

    def not_delivered(self, call: Call) -> None:
        """Keep a reply that its program did not get for a retry."""
        if not call.delivered and call not in self._retries.setdefault(call.retry_key, []):
            self._retries[call.retry_key].append(call)

    def take_kept(self, retry_key: object, n: int) -> list[Call]:
        """Take ``n`` replies to the same request that their program did not get, oldest first; none if fewer are kept.

        Each is for one retry.
        """
        kept = self._retries.get(retry_key, [])
        taken = kept[:n] if len(kept) >= n else []
        del kept[: len(taken)]
        return taken

    # -- branches -----------------------------------------------------------------------------------------------------

    def branches(
        self,
        stop_reason: StopReason | None = None,
        failure: Failure | None = None,
        *,
        training: Training | None = None,
        history: OnRewrite = "append",
    ) -> list[Trajectory]:
        """Return the branches to train on, in the order of their last calls; each is sealed.

        Args:
            stop_reason: of the last branch; by default, whether its last reply was cut. The others are ``FORKED``.
            failure: the failure of the session, for the last branch.
            training: the policies.
            history: recorded with each branch.

        Returns:
            No branch if no reply is trained.

        Raises:
            TokenMismatchError: a law of this module is broken.
        """
        reasons = self._reasons(training or Training())
        self.untrained = Counter()
        for call, reason in reasons.items():
            self.untrained[reason] += len(call.completion.tokens)
        kept = [call for call in self.calls if call not in reasons]
        inner = {ancestor for call in kept for ancestor in call.path()[:-1]}
        trained: set[Call] = set()
        branches = []
        for end in kept:
            if end not in inner:
                branches.append(_branch(end.path(), trained, reasons.keys(), history))
                trained.update(call for call in end.path() if call not in reasons)
                cut = end.completion.finish_reason == "length"
                last = StopReason.MAX_TOKENS if cut else StopReason.TASK_COMPLETED
        for branch in branches[:-1]:
            branch.seal(StopReason.FORKED)
        if branches:
            branches[-1].seal(stop_reason or last, failure)
        found = sum(int(branch.mask.sum()) for branch in branches) + self.untrained.total()
        if found != self.sampled:
            raise TokenMismatchError(f"{self!r}: {found} tokens are trained or counted; expected all of them")
        return branches

    def _reasons(self, training: Training) -> dict[Call, Untrained]:
        """The calls whose replies are not trained, and why."""
        reasons: dict[Call, Untrained] = {}
        groups: dict[object, list[Call]] = {}
        for call in self.calls:
            groups.setdefault(_request_of(call), []).append(call)
        calling = any(root.tools or root.children for root in self.roots)
        for call in self.calls:
            if call.completion.finish_reason == "abort":
                reasons[call] = "cut_off"
            elif call.by_hand and training.by_hand == "drop":
                reasons[call] = "by_hand"
            elif call.completion.logprobs_of == "constrained" and training.constrained == "drop":
                reasons[call] = "constrained"
            elif call.children:
                continue
            elif not call.delivered:
                reasons[call] = "undelivered"
            elif self._is_dropped(call, groups[_request_of(call)], training):
                reasons[call] = "dropped"
            elif training.compaction == "drop" and self._is_compaction(call):
                reasons[call] = "compaction"
            elif training.side_calls == "drop" and calling and self._is_side_call(call):
                reasons[call] = "side_call"
        return reasons

    def _is_dropped(self, call: Call, siblings: Sequence[Call], training: Training) -> bool:
        if training.siblings == "drop" and any(one.children for one in siblings):
            return True
        return training.discarded == "drop" and self._is_discarded(call)

    def _is_discarded(self, call: Call) -> bool:
        """Whether a later request has other messages in the place of this reply, behind the messages of this call."""
        later = self.roots if call.parent is None else call.parent.children
        mine = path_keys(call.new, self.ours)
        return any(
            one.number > call.number and path_keys(one.new[: len(mine)], self.ours) == mine and len(one.new) > len(mine)
            for one in later
        )

    def _is_compaction(self, call: Call) -> bool:
        text = call.message.text
        tagged = _SUMMARY.search(text)
        text = (text if tagged is None else tagged[1]).strip()
        if call.message.tool_calls or len(text) < _SHORTEST_QUOTE:
            return False
        return any(
            root.number > call.number
            and _agent(root) == _agent(call)
            and any(text in message.text for message in root.new)
            and all(message.text != call.new[-1].text for message in root.new)
            for root in self.roots
        )

    def _is_side_call(self, call: Call) -> bool:
        if call.parent is not None or call.tools or any(message.role == "assistant" for message in call.new):
            return False
        text = call.message.text.strip()
        later = (root for root in self.roots if root.number > call.number)
        quoted = len(text) >= _SHORTEST_QUOTE and any(text in message.text for root in later for message in root.new)
        return not quoted


def _request_of(call: Call) -> object:
    return tuple(sorted(call.lineage.items())), call.tools_key, call.request_key


def _agent(call: Call) -> dict[str, str]:
    """The lineage without the name of the conversation, which Codex changes when it compacts."""
    return {name: value for name, value in call.lineage.items() if name != "x-codex-window-id"}


def _ids(call: Call) -> list[str]:
    return [one.id for one in call.reply.message.tool_calls]


def _branch(path: Sequence[Call], before: Set[Call], not_trained: Set[Call], history: OnRewrite) -> Trajectory:
    """The tokens of a path as a trajectory; replies that are trained in a branch before, or never, are context."""
    branch = Trajectory(history)
    branch.tools = tools_json(path[-1].tools)
    shared = max((call.stop for call in path if call in before), default=0)
    for call in path:
        shown = call.line.images(call.start, call.reply_start)
        branch.add_context(call.line.sequence.tokens[call.start : call.reply_start], call.new, shown)
        if call in before or call in not_trained:
            branch.add_context(call.completion.tokens, [call.message])
            continue
        branch.add_reply(call.completion, call.message, temperature=call.temperature)
        sent = call.began + call.completion.waited
        branch.times.add("generating", call.completion.server, sent, call.completion.seconds - call.completion.waited)
        branch.count("generation_seconds", call.completion.seconds)
        branch.count("tool_calls", len(call.message.tool_calls))
    if shared:
        branch.count("forks")
        branch.count("duplicated_tokens", shared)
    return branch
