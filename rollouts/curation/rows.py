"""Rows of a training set from selected rollouts: token rows, chat rows, pairs, and single judged replies.

    tokens   input_ids, attention_mask, labels            one row for each branch; -100 where the policy did not sample
    chat     messages, tools                              one row for each branch whose replies it sampled itself
    pairs    prompt, chosen, rejected, tools              two replies to one exact context
    kto      prompt, completion, label, tools             the last reply of a rollout

Every row has ``source``: where it is from, which policy sampled it, and whether its ids are the sampled ones, or a
trainer encodes its text.

Laws:

C1. A label of a token row is an id exactly where the policy of ``source`` sampled that id.
C2. A sampled reply is trained in one row: a reply that an earlier branch trains is context in the later ones, a reply
    that an earlier run has is masked by its request, and one reply is chosen in one pair.

This module knows neither files nor filters.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import attrs

from rollouts.base.storable import to_json
from rollouts.curation.duplicates import HashSet, digest_of
from rollouts.curation.encoding import Student
from rollouts.curation.stored import StoredRollout, spoken_in
from rollouts.dtypes.lazy_numpy import np
from rollouts.dtypes.messages import REPLIES
from rollouts.errors import ConfigError
from rollouts.runs.columns import MESSAGE, Type, plain_message

__all__ = ["COLUMNS", "IGNORED", "TARGETS", "Target", "Unit", "chat_messages", "check_target", "units_of"]

Target: TypeAlias = Literal["tokens", "chat", "pairs", "kto"]
TARGETS: tuple[Target, ...] = get_args(Target)

IGNORED = -100
"""The label of a token that is not trained, in every trainer that takes labels."""


@attrs.frozen
class Unit:
    """The rows of one rollout, or the pair of two."""

    rows: list[dict[str, Any]]
    rollouts: tuple[StoredRollout, ...]
    text: str
    """The text that near duplicates share."""


_CHAT: Mapping[str, Type] = {name: kind for name, kind in MESSAGE.items() if name != "other"}
_SOURCE: Mapping[str, Type] = {
    "run": "string",
    "group_index": "int64",
    "index": "int64",
    "branch": "int32",
    "task": "string",
    "by": "string",
    "versions": ["string"],
    "reward": "float64",
    "encoded": "string",
}
_PAIR: Mapping[str, Type] = {**_SOURCE, "rejected_index": "int64", "rejected_reward": "float64", "credit": "string"}

COLUMNS: Mapping[Target, Mapping[str, Type]] = MappingProxyType(
    {
        "tokens": {"input_ids": ["int32"], "attention_mask": ["int8"], "labels": ["int32"], "source": _SOURCE},
        "chat": {"messages": [_CHAT], "tools": "string", "source": _SOURCE},
        "pairs": {"prompt": [_CHAT], "chosen": [_CHAT], "rejected": [_CHAT], "tools": "string", "source": _PAIR},
        "kto": {
            "prompt": [_CHAT],
            "completion": [_CHAT],
            "label": "bool_",
            "tools": "string",
            "source": {**_SOURCE, "credit": "string"},
        },
    }
)
"""The columns of each target and their types."""

NO_IDS = "has no sampled ids"
TEXT = "text of a chat API (--tokenizer STUDENT encodes it)"
EXACT = "has sampled ids, which never share a data set with ids encoded from text (curate without --tokenizer)"
CUT = "a reply was cut"
LEFT_OUT = "has the loss_multiplier 0, which leaves it out of the loss"
TRAINED = "its replies are trained in a row of an earlier run"
NO_TOOLS = "its tools are unknown: the run did not store them (--tools FILE)"
UNSAMPLED = "has replies that the policy did not sample in that branch, which only token rows can mask"
FIELDS = "has fields of messages that a chat row has no column for"
NO_PARTNER = "no rollout of its group with the other verdict"
SAME_TEXT = "differs from the rollout of the other verdict first in the ids of an equal text"
NO_CONTEXT = "differs from the rollout of the other verdict first in the environment's messages"
SAME_REPLIES = "has the replies of the rollout of the other verdict"
CHOSEN = "its reply is the chosen or rejected one of an earlier pair"
PAIRS_OVER = "beyond the limit of pairs of its task"
NEAR = "near duplicate of an earlier row"


def units_of(
    target: Target,
    rollouts: Iterable[StoredRollout],
    refused: Counter[str],
    *,
    passing: float,
    runs: int = 1,
    per_task: int | None = None,
    is_new: Callable[[str], bool] | None = None,
    student: Student | None = None,
) -> Iterator[Unit]:
    """Yield the rows of rollouts; a rollout without one is counted in ``refused`` by the reason.

    Args:
        target: the form of the rows.
        rollouts: selected rollouts; the rollouts of a group follow each other.
        refused: is counted in.
        passing: the reward from which a rollout passes.
        runs: number of runs, which may have rollouts in common.
        per_task: the most pairs of a task.
        is_new: of pairs, whether ``Unit.text`` is unlike that of earlier ones; the caller asks it of other rows.
        student: encodes text of chat APIs to token rows; then rollouts with sampled ids are refused.
    """
    if target == "tokens" and student is not None:
        return _encoded_rows(rollouts, refused, student)
    if target == "tokens":
        return _token_rows(rollouts, refused, several_runs=runs > 1)
    if target == "chat":
        return _chat_rows(rollouts, refused, several_runs=runs > 1)
    if target == "pairs":
        return _pair_rows(rollouts, refused, passing, per_task, is_new)
    return _judged_rows(rollouts, refused, passing, several_runs=runs > 1)


def _source(rollout: StoredRollout, branch: int, encoded: Literal["sampled", "text"]) -> dict[str, Any]:
    row = rollout.branches[branch]
    return {
        "run": str(rollout.run.path),
        "group_index": row.get("group_index"),
        "index": row.get("index"),
        "branch": branch,
        "task": rollout.task,
        "by": rollout.by,
        "versions": list(dict.fromkeys(str(span[0]) for span in row.get("versions") or ())),
        "reward": rollout.reward,
        "encoded": encoded,
    }


def _unit(rollout: StoredRollout, rows: list[dict[str, Any]], refused: Counter[str], reason: str) -> Iterator[Unit]:
    """The rows of one rollout; without a row, it is counted as refused for the reason."""
    if rows:
        yield Unit(rows, (rollout,), _conversation(rollout))
    else:
        refused[reason] += 1


# -- tokens -----------------------------------------------------------------------------------------------------------


def _token_rows(rollouts: Iterable[StoredRollout], refused: Counter[str], *, several_runs: bool) -> Iterator[Unit]:
    trained = HashSet()
    for rollout in rollouts:
        rows: list[dict[str, Any]] = []
        reason = TEXT if rollout.is_text else NO_IDS
        for number, branch in enumerate(rollout.branches):
            mask = rollout.masks[number]
            if _is_left_out(branch):
                reason = LEFT_OUT
                continue
            if several_runs and mask.any():
                mask = mask.copy()
                for completion in branch.get("completions") or ():
                    if not trained.add(_request(branch, completion)):
                        mask[completion["start"] : completion["stop"]] = False
                        reason = TRAINED
            if not mask.any():
                continue
            ids = rollout.ids[number]
            row = {
                "input_ids": ids.tolist(),
                "attention_mask": [1] * len(ids),
                "labels": np.where(mask, ids, IGNORED).tolist(),
                "source": _source(rollout, number, "sampled"),
            }
            rows.append(row)
        yield from _unit(rollout, rows, refused, reason)


def _encoded_rows(rollouts: Iterable[StoredRollout], refused: Counter[str], student: Student) -> Iterator[Unit]:
    """Token rows of text. They are never in one data set with rows of sampled ids."""
    for rollout in rollouts:
        branch = rollout.branches[0]
        encoded: Any = EXACT
        if rollout.is_text:
            encoded = _fault(rollout, 0) or student.encode(branch["messages"], rollout.run.tools(branch) or "")
        if isinstance(encoded, str):
            refused[encoded] += 1
            continue
        ids, mask = encoded
        row = {
            "input_ids": ids.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": np.where(mask, ids, IGNORED).tolist(),
            "source": _source(rollout, 0, "text"),
        }
        yield Unit([row], (rollout,), _conversation(rollout))


def _cut_of(branch: Mapping[str, Any]) -> str | None:
    """Why text has a reply that is not whole: a row of it would train an end where the model wrote on."""
    return CUT if (branch.get("metrics") or {}).get("cut_replies") else None


def _is_left_out(branch: Mapping[str, Any]) -> bool:
    return branch.get("loss_multiplier") == 0


def _request(branch: Mapping[str, Any], completion: Mapping[str, Any]) -> int:
    """A digest of a request's id and of the ids that it sampled."""
    ids = np.array(branch["tokens"][completion["start"] : completion["stop"]], np.int32)
    return digest_of(str(completion["request_id"]).encode(), ids.tobytes())


def _conversation(rollout: StoredRollout) -> str:
    return _text(message for branch in rollout.branches for message in branch.get("messages") or ())


def _text(messages: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(text for message in messages if message.get("role") != "system" for text in spoken_in(message))


# -- messages ---------------------------------------------------------------------------------------------------------


def _chat_rows(rollouts: Iterable[StoredRollout], refused: Counter[str], *, several_runs: bool) -> Iterator[Unit]:
    trained = HashSet()
    for rollout in rollouts:
        rows: list[dict[str, Any]] = []
        reason = NO_IDS
        for number, branch in enumerate(rollout.branches):
            if not rollout.masks[number].any() and not rollout.is_text:
                continue
            fault = _fault(rollout, number)
            if fault is None and several_runs:
                new = [trained.add(_request(branch, completion)) for completion in branch.get("completions") or ()]
                fault = None if all(new) else TRAINED
            if fault is not None:
                reason = fault
                continue
            row = {
                "messages": chat_messages(branch["messages"]),
                "tools": rollout.run.tools(branch),
                "source": _source(rollout, number, "text"),
            }
            rows.append(row)
        yield from _unit(rollout, rows, refused, reason)


def _fault(rollout: StoredRollout, number: int) -> str | None:
    """Why the messages of a branch make no row; ``None`` if they do."""
    branch = rollout.branches[number]
    if _is_left_out(branch):
        return LEFT_OUT
    if rollout.run.tools(branch) is None:
        return NO_TOOLS
    if rollout.is_text and (cut := _cut_of(branch)) is not None:
        return cut
    if len(_replies(branch)) != (int(branch["metrics"].get(REPLIES, 0)) if rollout.is_text else _turns(branch)):
        return UNSAMPLED
    if any(plain_message(message)["other"] is not None for message in branch["messages"]):
        return FIELDS
    return None


def _replies(branch: Mapping[str, Any]) -> list[int]:
    """The positions of assistant messages, also of the prompt's start of a reply."""
    messages, prompt = branch.get("messages") or (), branch.get("prompt") or ""
    prefilled = not isinstance(prompt, str) and prompt and prompt[-1].get("role") == "assistant"
    found = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return [-1, *found] if prefilled else found


def _turns(branch: Mapping[str, Any]) -> int:
    return sum(not completion.get("continues") for completion in branch.get("completions") or ())


def chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Stored messages as the messages of a row: every field is there, ``None`` where a message has none."""
    rows = []
    for message in messages:
        row = {name: value for name, value in plain_message(message).items() if name != "other"}
        for call in row["tool_calls"] or ():
            call["function"]["arguments"] = _as_rendered(call["function"]["arguments"])
        rows.append(row)
    return rows


def _as_rendered(arguments: str | None) -> str | None:
    """The arguments of a call with the spaces of ``tojson``, as a template renders an object.

    A template that takes text would render the compact form of the stored message, which few models write.
    """
    try:
        value = json.loads(arguments or "")
    except (ValueError, RecursionError):
        return arguments
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else arguments


def _judged_rows(
    rollouts: Iterable[StoredRollout], refused: Counter[str], passing: float, *, several_runs: bool
) -> Iterator[Unit]:
    judged = HashSet()
    for rollout in rollouts:
        number = len(rollout.branches) - 1
        branch = rollout.branches[number]
        fault = NO_IDS if not _turns(branch) else _fault(rollout, number)
        if fault is None and several_runs and not judged.add(_request(branch, branch["completions"][-1])):
            fault = TRAINED
        if fault is not None:
            refused[fault] += 1
            continue
        place = _replies(branch)[-1]
        messages = chat_messages(branch["messages"][: place + 1])
        assert rollout.reward is not None, "a selected rollout has a verdict"
        row = {
            "prompt": messages[:-1],
            "completion": messages[-1:],
            "label": rollout.reward >= passing,
            "tools": rollout.run.tools(branch),
            "source": {**_source(rollout, number, "text"), "credit": "rollout"},
        }
        yield Unit([row], (rollout,), _conversation(rollout))


# -- pairs ------------------------------------------------------------------------------------------------------------


def _pair_rows(
    rollouts: Iterable[StoredRollout],
    refused: Counter[str],
    passing: float,
    per_task: int | None,
    is_new: Callable[[str], bool] | None,
) -> Iterator[Unit]:
    pairs: Counter[str] = Counter()
    sides = HashSet(), HashSet()
    for _, members in itertools.groupby(rollouts, lambda rollout: rollout.group):
        right: list[StoredRollout] = []
        wrong: list[StoredRollout] = []
        for rollout in members:
            fault = NO_IDS if not rollout.masks[0].any() else _fault(rollout, 0)
            if fault is not None:
                refused[fault] += 1
                continue
            assert rollout.reward is not None, "a selected rollout has a verdict"
            (right if rollout.reward >= passing else wrong).append(rollout)
        for chosen in right:
            over = per_task is not None and pairs[chosen.task] >= per_task
            partner = PAIRS_OVER if over else _partner(chosen, wrong, *sides, is_new)
            if isinstance(partner, str):
                refused[partner] += 1
                continue
            rejected, number = partner
            wrong.remove(rejected)
            pairs[chosen.task] += 1
            yield _pair(chosen, rejected, number)
        for rollout in wrong:
            over = per_task is not None and pairs[rollout.task] >= per_task
            refused[PAIRS_OVER if over else NO_PARTNER] += 1


def _partner(
    chosen: StoredRollout,
    wrong: Sequence[StoredRollout],
    accepted: HashSet,
    rejects: HashSet,
    is_new: Callable[[str], bool] | None,
) -> tuple[StoredRollout, int] | str:
    """The first wrong rollout that makes a pair, with the number of the completion that differs; else why none does.

    No reply is chosen twice, and none is chosen in one pair and rejected in another. A near duplicate uses nothing up.
    """
    reason = NO_PARTNER
    for rejected in wrong:
        number = _first_difference(chosen, rejected)
        if isinstance(number, str):
            reason = number
            continue
        if _reply(chosen, number) == _reply(rejected, number):
            reason = SAME_TEXT
            continue
        ours, theirs = _reply_digest(chosen, number), _reply_digest(rejected, number)
        if ours in accepted or ours in rejects or theirs in accepted:
            reason = CHOSEN
            continue
        if is_new is not None and not is_new(_text_of_pair(chosen, number)):
            reason = NEAR
            continue
        accepted.add(ours)
        rejects.add(theirs)
        return rejected, number
    return reason


def _first_difference(chosen: StoredRollout, rejected: StoredRollout) -> int | str:
    """The number of the first completion that differs, after an equal context; else why there is none."""
    ours, theirs = chosen.branches[0], rejected.branches[0]
    pairs = zip(ours["completions"], theirs["completions"], strict=False)
    for number, (one, two) in enumerate(pairs):
        if not np.array_equal(chosen.ids[0][: one["start"]], rejected.ids[0][: two["start"]]):
            return NO_CONTEXT
        if not np.array_equal(chosen.ids[0][: one["stop"]], rejected.ids[0][: two["stop"]]):
            return number if not one.get("continues") and not two.get("continues") else NO_CONTEXT
    return SAME_REPLIES


def _reply_digest(rollout: StoredRollout, number: int) -> int:
    """A digest of the context of a completion and of the message that it became, which a row has as text."""
    start = rollout.branches[0]["completions"][number]["start"]
    return digest_of(rollout.ids[0][:start].tobytes(), to_json(_reply(rollout, number)))


def _reply(rollout: StoredRollout, number: int) -> dict[str, Any]:
    """The message of a completion of the first branch, as a row has it."""
    branch = rollout.branches[0]
    (message,) = chat_messages([branch["messages"][_place(branch, number)]])
    return message


def _place(branch: Mapping[str, Any], number: int) -> int:
    """The position of the message of a completion."""
    turn = sum(not completion.get("continues") for completion in branch["completions"][: number + 1]) - 1
    return _replies(branch)[turn]


def _pair(chosen: StoredRollout, rejected: StoredRollout, number: int) -> Unit:
    ours, theirs = chosen.branches[0], rejected.branches[0]
    place = _place(ours, number)
    source = {
        **_source(chosen, 0, "text"),
        "rejected_index": theirs.get("index"),
        "rejected_reward": rejected.reward,
        "credit": "rollout",
    }
    row = {
        "prompt": chat_messages(ours["messages"][:place]),
        "chosen": [_reply(chosen, number)],
        "rejected": [_reply(rejected, number)],
        "tools": chosen.run.tools(ours),
        "source": source,
    }
    return Unit([row], (chosen, rejected), _text_of_pair(chosen, number))


def _text_of_pair(chosen: StoredRollout, number: int) -> str:
    branch = chosen.branches[0]
    return _text(branch["messages"][: _place(branch, number) + 1])


def check_target(target: Any) -> Target:
    """The target of a curation.

    Raises:
        ConfigError: there is no such target.
    """
    if target not in TARGETS:
        raise ConfigError.of("--to", target, f"one of {list(TARGETS)}")
    checked: Target = target
    return checked
