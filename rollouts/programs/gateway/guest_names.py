"""Names of counts that contain text of a client, such as the path of an unknown route.

Invariant: all sessions of one set of names together make at most ``most`` names, each of printable ASCII; so the
metrics of a run, and what a logger makes of them, do not grow with its guests. It knows no session.
"""

from __future__ import annotations

import attrs

__all__ = ["GuestNames"]

_OF_CLIENTS = ("unknown_route/", "unknown_field/", "server_tool/", "not_enforced/include/", "rewritten_at/")
"""The kinds of counts that clients name, by a text or a number. Every other name stands in this package, and is counted
as it is."""


@attrs.define
class GuestNames:
    """The names that were made so far.

    Args:
        most: names that are kept apart; each further one is counted under ``other`` of its kind.
    """

    most: int = 256
    _known: set[str] = attrs.field(init=False, factory=set)

    def of(self, name: str) -> str:
        """The name to count under: ``name`` without control characters, or ``KIND/other``."""
        kind = next((kind for kind in _OF_CLIENTS if name.startswith(kind)), None)
        if kind is None:
            return name
        name = "".join(letter if " " <= letter <= "~" else "?" for letter in name)
        if name not in self._known and len(self._known) >= self.most:
            return f"{kind}other"
        self._known.add(name)
        return name
