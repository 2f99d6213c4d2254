"""The tree of calls: match, lines, branches, and the reasons why a reply is not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import Completion, Message, StopReason, Tool, ToolCall, VersionSpan, packed_tokens
from rollouts.errors import ConfigError, TokenMismatchError
from rollouts.programs.gateway.normal import path_keys, tools_key
from rollouts.programs.gateway.tree import Call, Match, Training, Tree
from rollouts.programs.gateway.types import CallReply, Usage
from rollouts.trajectory import digest

TOOLS = (Tool("look"),)


class Grower:
    """Adds calls to a tree: each message is one token, each reply three."""

    def __init__(self) -> None:
        self.tree = Tree()

    def match(self, messages: Sequence[Message], tools: Sequence[Tool] = TOOLS) -> Match:
        return self.tree.match(messages, path_keys(messages, self.tree.ours), tools_key(tools))

    def call(
        self, *messages: Message, reply: Message | str = "ok", tools: tuple[Tool, ...] = TOOLS, **fields: Any
    ) -> Call:
        """Match a request, and add it with its reply."""
        keys = path_keys(messages, self.tree.ours)
        match = self.match(messages, tools)
        new = messages[match.known :]
        line = self.tree.claim(match.call)
        start = len(line.sequence)
        line.append(packed_tokens([len(self.tree.calls)] * len(new)), new)
        answer = Message("assistant", reply) if isinstance(reply, str) else reply
        number = len(self.tree.calls)
        lineage = fields.pop("lineage", {})
        delivered = fields.pop("delivered", True)
        call = Call(
            number=number,
            parent=match.call,
            line=line,
            start=start,
            reply_start=len(line.sequence),
            new=tuple(new),
            tools=tools,
            tools_key=tools_key(tools),
            request_key=keys[-1],
            retry_key=(keys[-1], tuple(lineage.items())),
            completion=sampled(line.sequence.tokens, number, fields.pop("finish", "stop")),
            message=answer,
            reply=CallReply(f"r{number}", answer, "stop", Usage(1, 3)),
            lineage=lineage,
            by_hand=fields.pop("by_hand", False),
            began=0.0,
        )
        self.tree.add(call)
        if delivered:
            self.tree.delivered(call)
        return call


def sampled(prompt: Any, number: int, finish: Any = "stop") -> Completion:
    tokens = [100 + 3 * number + place for place in range(3)]
    return Completion(
        tokens, [-0.5] * 3, finish, [VersionSpan("1", 0, 3)], len(prompt), digest(prompt), f"call {number}"
    )


def user(text: str) -> Message:
    return Message("user", text)


def calls(name: str) -> Message:
    return Message("assistant", "", [ToolCall("look", id=name)])


def trained(branches: Sequence[Any]) -> list[list[str]]:
    return [[record.request_id for record in branch.completions] for branch in branches]


def test_a_branch_has_the_path_of_its_last_call() -> None:
    """A line of calls is one branch with the tokens of all contexts and replies."""
    grower = Grower()
    first = grower.call(user("a"), reply=calls("c0"))
    second = grower.call(user("a"), first.message, Message("tool", "b", tool_call_id="c0"))
    (branch,) = grower.tree.branches()
    assert second.parent is first
    assert branch.tokens.tolist() == [0, 100, 101, 102, 1, 103, 104, 105]
    assert branch.mask.tolist() == [False, True, True, True, False, True, True, True]
    assert [message.role for message in branch.messages] == ["user", "assistant", "tool", "assistant"]
    assert second.line is first.line


def test_a_fork_trains_the_shared_reply_once() -> None:
    """The reply before a fork is trained in the first branch, and is context in the second."""
    grower = Grower()
    first = grower.call(user("a"))
    left = grower.call(user("a"), first.message, user("b"), reply="left")
    right = grower.call(user("a"), first.message, user("c"), reply="right")
    branches = grower.tree.branches()
    assert left.line is first.line is not right.line
    assert trained(branches) == [["call 0", "call 1"], ["call 2"]]
    assert branches[1].tokens.tolist()[:4] == [0, 100, 101, 102]
    assert (branches[1].metrics["forks"], branches[1].metrics["duplicated_tokens"]) == (1, 4)
    assert [branch.stop_reason for branch in branches] == [StopReason.FORKED, StopReason.TASK_COMPLETED]


def test_the_deepest_call_and_of_equals_the_latest_is_matched() -> None:
    """A request continues the last reply that it contains; of equal paths the newest."""
    grower = Grower()
    first = grower.call(user("a"))
    second = grower.call(user("a"), first.message, user("b"))
    again = grower.call(user("a"), first.message, user("b"))
    assert (second.parent, again.parent) == (first, first)
    path = (user("a"), first.message, user("b"), again.message)
    assert grower.match([*path, user("c")]) == Match(again, 4)
    assert grower.match([*path[:2], user("c")]) == Match(first, 2)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([user("a")], Match(None)),
        ([user("b"), Message("assistant", "ok"), user("c")], Match(None)),
        ([user("a"), Message("assistant", "ok")], Match(None)),
        ([user("a"), Message("assistant", "other"), user("c")], Match(None, rewritten_at=1, rewritten="other")),
        ([user("x"), calls("c1"), user("c")], Match(None, rewritten_at=0, rewritten="x")),
        (
            [user("a"), Message("assistant", "ok"), user("B"), Message("assistant", "ok"), user("c")],
            Match(None, rewritten_at=2, rewritten="B"),
        ),
    ],
)
def test_what_goes_on_from_no_call_is_a_root(messages: list[Message], match: Match) -> None:
    """A new conversation, a prefill and an edited history are roots; the last has the place of its first difference."""
    grower = Grower()
    first = grower.call(user("a"))
    grower.call(user("a"), first.message, user("b"), reply=calls("c1"))
    assert grower.match(messages) == match


def test_a_call_with_other_tools_is_a_root() -> None:
    """The same path with other tools is found, but not gone on from."""
    grower = Grower()
    first = grower.call(user("a"))
    assert grower.match([user("a"), first.message, user("b")], ()) == Match(None, tools_changed=True)


def test_a_malformed_call_that_comes_back_as_text_is_an_echo() -> None:
    """The text of a malformed call in the content stands for the call."""
    grower = Grower()
    bad = ToolCall("look", id="c0", raw="{bad", error="no JSON")
    first = grower.call(user("a"), reply=Message("assistant", "I look.", [bad]))
    for text in ("I look.\n{bad", "I look.{bad"):
        assert grower.match([user("a"), Message("assistant", text), user("b")]) == Match(first, 2)


def test_a_line_that_is_in_use_is_copied() -> None:
    """Two children that begin at the same time do not share a line."""
    tree = Grower()
    first = tree.call(user("a"))
    one, two = tree.tree.claim(first), tree.tree.claim(first)
    assert one is first.line is not two
    assert two.sequence.tokens.tolist() == first.line.sequence.tokens.tolist()
    assert two.messages == first.line.messages


def test_every_reply_is_trained_or_has_a_reason() -> None:
    """Each reason keeps its replies out of the branches, and their tokens are counted under it."""
    grower = Grower()
    title = grower.call(user("Write a title."), tools=(), reply="A title")
    first = grower.call(user("a"))
    grower.call(user("a"), reply="another")
    grower.call(user("a"), first.message, user("cut"), finish="abort")
    grower.call(user("a"), first.message, user("b"), delivered=False)
    grower.call(user("hand"), by_hand=True)
    branches = grower.tree.branches()
    reasons = {"side_call": 3, "dropped": 3, "cut_off": 3, "undelivered": 3, "by_hand": 3}
    assert title.parent is None
    assert trained(branches) == [["call 1"]]
    assert grower.tree.untrained == reasons
    kept = grower.tree.branches(training=Training(side_calls="train", siblings="keep", by_hand="train"))
    assert trained(kept) == [["call 0"], ["call 1"], ["call 2"], ["call 5"]]
    assert grower.tree.untrained == {"cut_off": 3, "undelivered": 3}


def test_no_trained_reply_is_no_branch() -> None:
    """A tree without replies, or with undelivered ones only, has no branches."""
    grower = Grower()
    assert grower.tree.branches() == []
    grower.call(user("a"), delivered=False)
    assert grower.tree.branches() == []
    assert grower.tree.untrained == {"undelivered": 3}


def test_a_completion_of_other_ids_is_a_broken_law() -> None:
    """A reply that was sampled from other ids than its line has does not enter the tree."""
    grower = Grower()
    call = grower.call(user("a"))
    line = grower.tree.claim(call)
    line.append(packed_tokens([7]), [user("b")])
    other = sampled(np.array([1, 2, 3, 4, 5], np.int32), 9)
    with pytest.raises(TokenMismatchError, match="was sampled from 5 tokens"):
        line.sequence.add_reply(other, Message("assistant"))


@pytest.mark.parametrize("field", ["side_calls", "siblings", "discarded", "compaction", "by_hand"])
def test_a_policy_has_two_values(field: str) -> None:
    """Any other value is refused with the name of the field."""
    with pytest.raises(ConfigError, match=field):
        Training(**{field: "maybe"})
