"""The files that every run uses, in docs/core.md, and the picture of core and wings in README.md, from the imports.

The core is the set of packages from which the files of ``STEPS`` import, directly or through others, when they are
loaded. All other packages are wings. Edit ``STEPS`` when a file is split or renamed.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests.test_architecture import FLOORS, imports_of, modules_of, room_of

ROOT = Path(__file__).resolve().parents[2]
README, CORE = ROOT / "README.md", ROOT / "docs" / "core.md"
BEGIN, END = "<!-- scripts/docs/write core -->\n", "<!-- end -->"

STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Data buffer", ("training/data_buffer.py",)),
    ("Manager", ("training/manager.py", "training/ledger.py", "training/fail_fast.py")),
    ("Group runner", ("training/group_runner.py",)),
    ("Rollout attempt", ("training/rollout_attempt.py", "training/sample_validator.py")),
    ("Generate function", ("training/agent_integration.py",)),
    ("Episode", ("agent/loop.py", "agent/episode.py", "agent/budget.py", "agent/replies.py")),
    ("Renderer", ("renderer/renderer.py", "renderer/openings.py", "renderer/bridge_ids.py", "renderer/bridge.py")),
    (
        "Policy",
        (
            "inference/policy.py",
            "inference/call.py",
            "inference/attempts.py",
            "inference/sending.py",
            "inference/unreachable.py",
        ),
    ),
    ("Trajectory", ("trajectory.py",)),
    ("Sample", ("training/sample.py", "training/sample_columns.py", "training/samples.py")),
    ("Filters", ("training/filters.py",)),
    ("Run journal", ("runs/run_journal.py", "runs/run_history.py")),
)
"""The steps of the reading order, each with its files in the package."""


def count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def table() -> str:
    """The steps with their files and lines."""
    rows = ["| step | role | files of `rollouts/` | lines |", "|---|---|---|---|"]
    total = 0
    for number, (role, names) in enumerate(STEPS, 1):
        lines = sum(count(ROOT / "rollouts" / name) for name in names)
        total += lines
        rows.append(f"| {number} | {role} | {', '.join(f'`{name}`' for name in names)} | {lines:,} |")
    return "\n".join([*rows, f"| | together | | {total:,} |"]) + "\n"


@functools.cache
def core_modules() -> frozenset[str]:
    """The modules that are loaded with the files of the steps."""
    modules = modules_of(ROOT)
    eager: dict[str, set[str]] = {}
    for each in imports_of(ROOT):
        if not each.late and not each.typing_only and each.target in modules:
            eager.setdefault(each.module, set()).add(each.target)
    files = {ROOT / "rollouts" / name for _, names in STEPS for name in names}
    todo, seen = [module for module, path in modules.items() if path in files], set[str]()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += eager.get(module, ())
    return frozenset(seen - {"rollouts"})


def core_rooms() -> frozenset[str]:
    return frozenset(map(room_of, core_modules()))


def arrows() -> dict[str, set[str]]:
    """The packages from which each imports, of the core when it is loaded; without arrows that follow from others."""
    core, modules = core_rooms(), core_modules()
    direct: dict[str, set[str]] = {room: set() for room in FLOORS}
    for each in imports_of(ROOT):
        here, there = room_of(each.module), room_of(each.target)
        counts = each.module in modules and not each.late if here in core else True
        if counts and here != there and there in FLOORS and there != "rollouts" and not each.typing_only:
            direct[here].add(there)

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(direct[room].union(*map(reached, direct[room])))

    return {room: {one for one in to if not any(one in reached(other) for other in to)} for room, to in direct.items()}


def picture() -> str:
    """Core and wings by floor, with lines and imports; of the core only the modules that are loaded with it."""
    modules, core, to = modules_of(ROOT), core_rooms(), arrows()
    lines = dict.fromkeys(FLOORS, 0)
    for module, path in modules.items():
        if room_of(module) not in core or module in core_modules():
            lines[room_of(module)] += count(path)
    found = ["```text"]
    for title, chosen in (("wings", FLOORS.keys() - core - {"rollouts"}), ("core", core)):
        total = f"{sum(lines[room] for room in chosen):,}"
        found.append(f"{title:<20}{total:>8} lines   imports from")
        for room in sorted(chosen, key=lambda room: (-FLOORS[room], room)):
            names = " ".join(sorted(name.removeprefix("rollouts.") for name in to[room]))
            line = f"{FLOORS[room]:>3}  {room.removeprefix('rollouts.'):<15}{lines[room]:>8,}         {names}"
            found.append(line.rstrip())
        found.append("")
    return "\n".join(found[:-1]) + "\n```\n"


def replaced(path: Path, block: str) -> str:
    """A page with another block between its marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}"


def pages() -> dict[Path, str]:
    return {CORE: replaced(CORE, table()), README: replaced(README, picture())}
