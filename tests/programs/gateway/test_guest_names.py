"""Names of counts that contain text of a client."""

from __future__ import annotations

import re
from pathlib import Path

import rollouts.programs.gateway
from rollouts.programs.gateway.guest_names import GuestNames


def test_a_client_with_many_names_hides_no_count_of_ours() -> None:
    """Behind the limit, names of clients are counted together, each in its kind; the names of this package stay."""
    names = GuestNames(most=2)
    made = [names.of(f"unknown_field/{number}") for number in range(4)]
    assert made == ["unknown_field/0", "unknown_field/1", "unknown_field/other", "unknown_field/other"]
    assert names.of("not_enforced/include/new") == "not_enforced/include/other"
    assert names.of("rewritten_at/4711") == "rewritten_at/other"
    assert [names.of(name) for name in ("refused/invalid_request", "not_enforced/strict")] == [
        "refused/invalid_request",
        "not_enforced/strict",
    ]


def test_each_count_with_cut_text_is_of_a_known_kind() -> None:
    """The readers cut the text of a client in a name, ``{name[:64]}``; each such name is bounded by its kind."""
    cut = re.compile(r'f"([^"{]*)\{[a-z_]+\[:')
    found = {
        kind
        for path in Path(rollouts.programs.gateway.__path__[0]).glob("*.py")
        for kind in cut.findall("\n".join(line for line in path.read_text().splitlines() if "count" in line))
    }
    assert found == {"unknown_route/", "unknown_field/", "server_tool/", "not_enforced/include/"}
    for kind in found:
        assert GuestNames(most=0).of(f"{kind}name") == f"{kind}other"
