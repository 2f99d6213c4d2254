"""Verification of a rollout of several agents against the record that its play left in ``metadata["seats"]``.

Invariant: the record names each conversation by the checksum of its first request, so that a lost conversation, a
sample under another seat's name and a sample of a frozen seat are found in the rows alone. Rollouts without such a
record, of a user's generate function, are not checked here. This module imports neither seats nor the manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollouts.training.sample_laws import Stored

__all__ = ["SEATS", "SeatRecord", "check_seats"]

SEATS = "seats"
"""The entry of a sample's metadata with the record of its rollout."""


class SeatRecord(msgspec.Struct):
    """The record that the play of a rollout leaves of one seat."""

    trained: bool
    """Whether its conversations are samples."""
    conversations: dict[int, int]
    """CRC-32 of the ids of the first request of each conversation, by its number."""
    policy: str = ""
    """Its versions begin with this name and a slash; empty where the rollout's own policy samples its replies."""


def check_seats(rows: Sequence[tuple[Stored, Any, str]], broken: Callable[[int, str, Any, str], None]) -> int:
    """Check the rows of one rollout.

    Args:
        rows: of each sample its stored fields, its metadata, and its place for messages.
        broken: called with law, place, what was found and what was expected, for each violation.

    Returns:
        The number of conversations that the record names.
    """
    given = next((metadata[SEATS] for _, metadata, _ in rows if isinstance(metadata, dict) and SEATS in metadata), None)
    if given is None:
        return 0
    place = rows[0][2]
    try:
        record = msgspec.convert(given, dict[str, SeatRecord], strict=False)  # keys of JSON are text
    except msgspec.ValidationError as error:
        broken(4, f"{place}, metadata[{SEATS!r}]", f"a record that does not read ({error})", "what the play wrote")
        return 0
    found = set()
    for stored, metadata, where in rows:
        if not isinstance(metadata, dict) or metadata.get(SEATS) != given:
            broken(4, f"{where}, metadata[{SEATS!r}]", "another record", f"that of {place}: one for the rollout")
        found.add((stored.seat, stored.conversation))
        _check_row(stored, where, record, broken)
    expected = [(seat, n) for seat, of in record.items() if of.trained for n in of.conversations]
    missing = [f"{seat} {number}" for seat, number in expected if (seat, number) not in found]
    if missing and not any(stored.outcome == "failed" for stored, _, _ in rows):
        broken(4, place, f"no sample of {', '.join(missing)}", "each conversation that the play recorded")
    return len(expected)


def _check_row(
    stored: Stored, place: str, record: dict[str, SeatRecord], broken: Callable[[int, str, Any, str], None]
) -> None:
    of = record.get(stored.seat)
    if of is None or not of.trained:
        trained = [seat for seat, one in record.items() if one.trained]
        broken(2, place, f"a sample of seat {stored.seat!r}", f"one of the seats that are trained, {trained}")
        return
    known = of.conversations.get(stored.conversation)
    if known is None:
        broken(4, place, f"conversation {stored.conversation}", f"one of {[*of.conversations]} of {stored.seat}")
        return
    if stored.completions and stored.completions[0].start < len(stored.tokens) and not _is_later_branch(stored, known):
        got = f"a first request of checksum {stored.completions[0].prompt_digest:#010x}"
        broken(5, place, got, f"{known:#010x}, that of {stored.seat} {stored.conversation} as the play recorded it")
    others = [one.policy for one in record.values() if one.policy and one.policy != of.policy]
    for version, _, _ in stored.versions:
        owned = version.startswith(f"{of.policy}/") if of.policy else True
        if not owned or any(version.startswith(f"{other}/") for other in others):
            expected = f"one of {of.policy}/…" if of.policy else "one of the rollout's policy"
            broken(2, f"{place}, versions", f"version {version!r}", f"{expected}, which samples {stored.seat}")
            return


def _is_later_branch(stored: Stored, known: int) -> bool:
    """Whether the row may begin with another request: a fork continues its conversation after a rewritten history."""
    return stored.completions[0].prompt_digest == known or stored.history == "fork"
