"""Rules of the architecture: which module may import which, and which words the project does not use.

The floors of the packages are data. The tests read the imports of every module and fail on an import that goes up, with
its line. Each rule is also shown to catch a planted violation.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]

FLOORS: dict[str, int] = {
    "rollouts": 0,
    "rollouts.errors": 1,
    "rollouts.base": 2,
    "rollouts.concurrency": 3,
    "rollouts.dtypes": 3,
    "rollouts.http": 4,
    "rollouts.renderer": 4,
    "rollouts.sandboxes": 4,
    "rollouts.trajectory": 4,
    "rollouts.engine": 5,
    "rollouts.environments": 5,
    "rollouts.inference": 5,
    "rollouts.agent": 6,
    "rollouts.testing": 7,
    "rollouts.training": 7,
    "rollouts.observability": 8,
    "rollouts.recipe": 8,
    "rollouts.rewards": 8,
    "rollouts.programs": 9,
    "rollouts.runs": 9,
    "rollouts.audit": 10,
    "rollouts.chat_api": 10,
    "rollouts.curation": 10,
    "rollouts.distributed": 10,
    "rollouts.harbor": 10,
    "rollouts.integrations": 10,
    "rollouts.planning": 10,
    "rollouts.seats": 10,
    "rollouts.service": 10,
    "rollouts.views": 10,
    "rollouts.commands": 11,
    "rollouts.__main__": 12,
    "rollouts.recipes": 12,
}
"""The floor of every package or module at the root. An import between them goes to a lower floor."""

WINGS = ("audit", "chat_api", "curation", "harbor", "seats", "service")
"""Packages at the root that only some runs need."""
MOST_ARROWS = 175
"""Pairs of packages and modules at the root, without ``WINGS``, of which one imports the other. It only goes down."""

ROOMS = ("trajectory", "renderer", "environments", "inference", "engine")
"""Packages that do not import each other."""

AGENT_SIDE = (
    "rollouts.training.agent_integration",
    "rollouts.agent",
    "rollouts.inference",
    "rollouts.renderer",
    "rollouts.environments",
)

STRANGERS: dict[str, tuple[str, ...]] = {
    "rollouts.training.manager": AGENT_SIDE,
    "rollouts.training.group_runner": AGENT_SIDE,
    "rollouts.environments": ("rollouts.trajectory", "rollouts.inference", "rollouts.training"),
    "rollouts.inference": ("rollouts.environments", "rollouts.training"),
}
"""Imports that are forbidden although the floors allow them."""

TORCH_ROOMS = ("rollouts.training.batch", "rollouts.integrations", "rollouts.engine")
TRANSFORMERS_AT_IMPORT = ("rollouts.engine", "rollouts.integrations")
NEVER_AT_IMPORT = ("slime", "ray", "trl", "sglang", "vllm", "mcp", "verl", "areal", "transfer_queue", "omegaconf")
NEVER_AT_IMPORT += ("prime_rl", "rllm", "skyrl", "skyrl_gym", "tinker", "tinker_cookbook", "openenv", "verifiers")
PRINTING = (
    "rollouts.base.terminal",
    "rollouts.views.terminal.console",
    "rollouts.renderer.template_sandbox",
    "rollouts.rewards.code_remote",
)
"""The modules that print; the last two run in processes of their own, which print to a pipe."""
ADAPTERS = ("verl", "areal", "nemo_rl", "openrlhf", "prime_rl", "rllm", "skyrl", "tinker")
"""Adapters for trainers in ``rollouts.integrations``; nothing else in the package imports them."""
GUESTS = ("rollouts.recipes", "tests", "scripts", "training")
"""Code written with the package as its users write it; the built-in recipes are in the wheel, found by name."""
LINKED = {"configs": "rollouts.recipes.configs", "environments": "rollouts.recipes.environments"}
"""Folders of guests at the root, and the packages that link to them."""
HOMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}
CONTEXT_VARIABLES = {
    "rollouts.errors": "labels waits and failures",
    "rollouts.concurrency.deadlines": "nests as cancel scopes do, also through user code",
    "rollouts.programs.gateway.requests": "has none: runs a call in the context of its rollout, not of its connection",
}
"""The modules that may use context variables, and what for. An argument is passed as an argument."""

LOOSE_ASYNCIO = {"gather", "create_task", "wait", "wait_for", "sleep", "ensure_future"}

LAW_BOOKS = {
    "test_architecture.py",
    "test_bad_inputs.py",
    "test_costs.py",
    "test_documents.py",
    "harbor/test_agents.py",
    "harbor/test_dumps.py",
    "harbor/test_forgeries.py",
    "harbor/test_judged_by_harbor.py",
    "harbor/test_with_harbor.py",
    "integrations/test_doors.py",
    "integrations/test_images.py",
    "integrations/slime/test_advantages.py",
    "integrations/slime/test_with_slime.py",
    "integrations/slime/test_parity.py",
    "integrations/slime/test_manager.py",
    "integrations/test_parity_list.py",
    "integrations/slime/test_on_policy.py",
    "integrations/slime/test_audited_dumps.py",
    "integrations/slime/test_examples.py",
    "test_sources.py",
    "test_founding_bugs.py",
    "test_hardening.py",
    "test_families.py",
    "test_sampled_mistakes.py",
    "test_fuzz.py",
    "manager_semantics/test_groups.py",
    "manager_semantics/test_rewards_before_filters.py",
    "manager_semantics/test_accounting.py",
    "manager_semantics/test_bad_rollouts_are_data.py",
    "manager_semantics/test_broken_laws_are_crashes.py",
    "manager_semantics/test_deadlines.py",
    "manager_semantics/test_cancellation_and_reuse.py",
    "manager_semantics/test_exhausted_data.py",
    "manager_semantics/test_no_bias_to_short_rollouts.py",
    "manager_semantics/test_call_shapes.py",
    "manager_semantics/test_random_interleavings.py",
    "manager_semantics/test_admission.py",
    "manager_semantics/test_rare_paths.py",
    "test_token_exactness.py",
    "agent/test_images.py",
    "chat_api/test_laws.py",
    "distributed/test_elastic.py",
    "service/test_lease_laws.py",
    "agent/test_raw_continuation.py",
    "environments/test_returned_values.py",
    "programs/gateway/test_images.py",
    "programs/gateway/test_laws.py",
    "programs/gateway/test_programs.py",
    "programs/gateway/test_recordings.py",
    "renderer/dialects/test_dialects.py",
    "renderer/dialects/test_outcomes.py",
    "planning/test_advice.py",
    "programs/launchers/test_launches.py",
    "renderer/test_bridge_text.py",
    "runs/test_run_journal_laws.py",
    "seats/test_laws.py",
}
"""Tests that mirror no single module."""

CHECKED = ("rollouts", "configs", "environments", "training", "scripts", "docs", "tests", "pyproject.toml")
CHECKED += ("README.md", "CONTRIBUTING.md", "SLIME_vs_ROLLOUTS.md")
"""The files and folders that ``old_words`` checks: everything but CHANGELOG.md."""
STORED_NAME = "# a stored name"
"""Ends a line with a word that stored files contain, and that therefore stays."""
TEXTS = {"", ".py", ".md", ".sh", ".toml", ".yaml"}
OLD_WORDS = ("told", "whoever", "nobody", "somebody", "anew", "beside")
"""Words that neither texts nor identifiers contain, also not as a part of a snake_case name."""
PHRASES = {
    "is no X": r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b)\w+",
    "What … as a subject": r"(?:\"\"\" ?|[.:] |# )What (?![^.]*\?)",
    "a text": r"\b[Aa] text(?=[.,;:)]| (?:that|which|of|in|with|without|is|for|by|as)\b)",
    "those that": r"\b(?:those|ones?) (?:that|which|who)\b",
    "of its own": r"\bof (?:its|their|his) own\b",
    "that is none": r"\b(?:that|which) (?:is|are) none\b",
    "goes on": r"\b(?:go|goes|going|went) on\b",
    "Who … as a subject": r"(?:\"\"\" ?|[.:] |# )Who (?![^.]*\?)",
}
"""Phrases that comments, docstrings and messages avoid, as regular expressions."""
MOST_PHRASES: dict[str, int] = {
    "environments": 2,
    "rollouts/distributed": 3,
    "rollouts/integrations": 1,
    "rollouts/sandboxes": 1,
    "rollouts/training": 2,
    "tests": 21,
    "tests/agent": 2,
    "tests/base": 1,
    "tests/distributed": 2,
    "tests/environments": 4,
    "tests/inference": 1,
    "tests/integration": 19,
    "tests/programs": 9,
    "tests/renderer": 5,
    "tests/rewards": 1,
    "tests/runs": 2,
    "tests/testing": 2,
    "tests/training": 4,
}
"""The most ``PHRASES`` of each folder; 0 without an entry. The numbers only go down."""


CLASS_LINES = 350


@attrs.frozen
class Import:
    """One name imported by one module."""

    module: str
    target: str
    line: int
    late: bool
    """Whether it is inside a function."""
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def modules_of(root: Path) -> dict[str, Path]:
    """Map the modules of the package under ``root`` to their files."""
    modules = {}
    for folder, package in {"rollouts": "rollouts", **LINKED}.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = (package, *path.relative_to(root / folder).with_suffix("").parts)
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@functools.lru_cache(maxsize=2)  # the rules read the same tree one after the other
def trees_of(root: Path) -> dict[str, ast.Module]:
    """The syntax trees of the modules."""
    return {module: ast.parse(path.read_text(), str(path)) for module, path in modules_of(root).items()}


@functools.lru_cache(maxsize=2)
def imports_of(root: Path) -> tuple[Import, ...]:
    """Every import in the package, also those in functions and under ``TYPE_CHECKING``."""
    modules, trees = modules_of(root), trees_of(root)
    return tuple(found for module, path in modules.items() for found in _imports(module, path, trees[module], modules))


def _imports(module: str, path: Path, tree: ast.Module, modules: dict[str, Path]) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, late: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, name.name, node.lineno, late, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*home, base] if base else home)
            for name in node.names:
                whole = f"{base}.{name.name}"
                yield Import(module, whole if whole in modules else base, node.lineno, late, typing_only)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late, typing_only or guard)

    yield from visit(tree, late=False, typing_only=False)


def room_of(module: str) -> str:
    """Return the package at the root that contains a module, or the module itself."""
    return ".".join(module.split(".")[:2])


# -- the rules --------------------------------------------------------------------------------------------------------


def modules_without_a_floor(root: Path) -> list[str]:
    return [f"{module} has no floor in FLOORS" for module in modules_of(root) if room_of(module) not in FLOORS]


def arrows_up(root: Path) -> list[str]:
    """Imports of another package or root module that is not on a lower floor."""
    found = []
    for entry in imports_of(root):
        here, there = room_of(entry.module), room_of(entry.target)
        if here != there and {here, there} <= FLOORS.keys() and FLOORS[here] <= FLOORS[there]:
            found.append(f"{entry}: up from floor {FLOORS[here]} to {FLOORS[there]}")
    return found


def imports_of_the_own_package(root: Path) -> list[str]:
    """Modules that import siblings through the ``__init__`` of their own package."""
    return [
        f"{entry}: its own package"
        for entry in imports_of(root)
        if entry.target != "rollouts" and entry.module.startswith(entry.target + ".")
    ]


def imports_between_rooms(root: Path) -> list[str]:
    def room(module: str) -> str | None:
        return next((name for name in ROOMS if within(module, f"rollouts.{name}")), None)

    return [
        f"{entry}: another room"
        for entry in imports_of(root)
        if room(entry.module) and room(entry.target) and room(entry.module) != room(entry.target)
    ]


def strangers(root: Path) -> list[str]:
    return [
        f"{entry}: a forbidden import"
        for entry in imports_of(root)
        for module, unknown in STRANGERS.items()
        if within(entry.module, module) and any(within(entry.target, name) for name in unknown)
    ]


def heavy_imports(root: Path) -> list[str]:
    found = []
    for entry in imports_of(root):
        top = entry.target.partition(".")[0]
        at_import = not entry.late and not entry.typing_only
        if top == "torch" and not any(within(entry.module, room) for room in TORCH_ROOMS):
            found.append(f"{entry}: torch lives in {', '.join(TORCH_ROOMS)}")
        if top == "torch" and at_import and within(entry.module, "rollouts.training"):
            found.append(f"{entry}: inside the function that needs it")
        if top == "transformers" and at_import and not any(within(entry.module, r) for r in TRANSFORMERS_AT_IMPORT):
            found.append(f"{entry}: inside the function that needs it")
        if top in NEVER_AT_IMPORT and at_import:
            found.append(f"{entry}: never at import time")
    return found


def imports_of_guests(root: Path) -> list[str]:
    """Imports of a guest by a module that is not part of that guest."""
    return [
        f"{entry}: a guest"
        for entry in imports_of(root)
        for guest in GUESTS
        if within(entry.target, guest) and not within(entry.module, guest)
    ]


def adapters_that_know_each_other(root: Path) -> list[str]:
    """Imports of an adapter for a trainer by another one, or by the rest of the package."""
    found = []
    for entry in imports_of(root):
        adapter = next((name for name in ADAPTERS if within(entry.target, f"rollouts.integrations.{name}")), None)
        if adapter is not None and not within(entry.module, f"rollouts.integrations.{adapter}"):
            found.append(f"{entry}: an adapter")
    return found


def homeless_modules(root: Path) -> list[str]:
    return [
        f"{module}: a missing noun"
        for module in modules_of(root)
        if HOMELESS & {part.strip("_").rpartition("_")[2] for part in module.split(".")}
    ]


def circles(root: Path) -> list[str]:
    """Circular imports, direct or through other modules: at the top, in a function, for types only."""
    edges: dict[str, set[str]] = {}
    entries = [entry for entry in imports_of(root) if within(entry.target, "rollouts")]
    for entry in entries:
        edges.setdefault(entry.module, set()).add(entry.target)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo.extend(edges.get(module, ()))
        return seen

    return [
        f"{entry}: a circle"
        + (" behind a function-level import" if entry.late else "")
        + (" under TYPE_CHECKING" if entry.typing_only else "")
        for entry in entries
        if entry.module in reach(entry.target)
    ]


def loose_tasks(root: Path) -> list[str]:
    """Uses of asyncio functions that anyio's task groups and scopes replace."""
    found = []
    for module, tree in trees_of(root).items():
        for node in ast.walk(tree):
            names: set[str] = set()
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncio":
                names = {node.attr}
            elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                names = {name.name for name in node.names}
            found += [f"{module}, line {node.lineno}: asyncio.{name}" for name in sorted(names & LOOSE_ASYNCIO)]
    return found


def context_variables(root: Path) -> list[str]:
    """Uses of ``contextvars`` outside of the modules that may have one."""
    return [
        f"{entry}: expected an argument"
        for entry in imports_of(root)
        if within(entry.target, "contextvars") and entry.module not in CONTEXT_VARIABLES
    ]


def raw_prints(root: Path) -> list[str]:
    """Prints and consoles that control characters pass: only two modules print, all others use them."""
    found = []
    for module, tree in trees_of(root).items():
        if module in PRINTING:
            continue
        for node in ast.walk(tree):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"):
                name = ast.unparse(node)
            if name in ("print", "Console", "sys.stdout.write", "sys.stderr.write"):
                line = getattr(node, "lineno", 0)
                found.append(f"{module}, line {line}: {name}; expected say or SafeConsole")
    return found


def long_classes(root: Path) -> list[str]:
    """Classes that cannot be held in the head: of more than ``CLASS_LINES`` lines, docstrings included."""
    return [
        f"{module}.{node.name}: {lines} lines, at most {CLASS_LINES}"
        for module, tree in trees_of(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > CLASS_LINES
    ]


def stray_tests(root: Path) -> list[str]:
    """Test files that mirror no module and are on no list. ``tests/integration`` is free."""
    tests = root / "tests"
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests)
        name = path.stem.removeprefix("test_")
        mirrored = [root / home / place.parent / name for home in ("rollouts", ".")]
        exists = any(m.with_suffix(".py").is_file() or m.is_dir() for m in mirrored)
        package = name == "init" and (root / "rollouts" / place.parent / "__init__.py").is_file()
        if not (exists or package or place.as_posix() in LAW_BOOKS or place.parts[0] in ("guests", "integration")):
            found.append(f"tests/{place.as_posix()} mirrors no module")
    return found


def old_words(root: Path) -> list[str]:
    """Lines with one of ``OLD_WORDS``, whole or as a part of a snake_case name."""
    word = re.compile(rf"(?<![^\W_])({'|'.join(OLD_WORDS)})(?![^\W_])", re.IGNORECASE)
    own = re.compile(r"^OLD_WORDS = .*$", re.MULTILINE)
    found = []
    for checked in CHECKED:
        files = sorted((root / checked).rglob("*")) if (root / checked).is_dir() else [root / checked]
        for path in (path for path in files if path.is_file() and path.suffix in TEXTS):
            lines = own.sub("", path.read_text(encoding="utf-8")).splitlines()
            hits = [
                (number, hit[1])
                for number, line in enumerate(lines, 1)
                if not line.endswith(STORED_NAME)
                for hit in word.finditer(line)
            ]
            found += [f"{path.relative_to(root).as_posix()}, line {number}: {text!r}" for number, text in hits]
    return found


def phrases(root: Path) -> list[str]:
    """Phrases in the Python files of folders that have more of them than ``MOST_PHRASES`` allows."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for checked in CHECKED for path in (root / checked).rglob("*.py")):
        place = path.relative_to(root)
        if place.name == "test_architecture.py":
            continue
        folder = "/".join(place.parent.parts[: 2 if place.parts[0] in ("rollouts", "tests") else 1])
        text = " ".join(path.read_text(encoding="utf-8").split())
        hits = [(name, hit[0]) for name, pattern in PHRASES.items() for hit in re.finditer(pattern, text)]
        found.setdefault(folder, []).extend(f"{place.as_posix()}: {name}: {hit!r}" for name, hit in hits)
    return [
        f"{len(hits)} phrases in {folder}, at most {MOST_PHRASES.get(folder, 0)}: {'; '.join(hits)}"
        for folder, hits in found.items()
        if len(hits) > MOST_PHRASES.get(folder, 0)
    ]


RULES: list[Callable[[Path], list[str]]] = [
    modules_without_a_floor,
    arrows_up,
    imports_of_the_own_package,
    imports_between_rooms,
    strangers,
    heavy_imports,
    imports_of_guests,
    adapters_that_know_each_other,
    homeless_modules,
    circles,
    loose_tasks,
    context_variables,
    raw_prints,
    long_classes,
    stray_tests,
    old_words,
    phrases,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_follows_the_rule(rule: Callable[[Path], list[str]]) -> None:
    """Each rule holds for the tree as it is."""
    assert rule(ROOT) == []


PLANTED: list[tuple[Callable[[Path], list[str]], dict[str, str], str]] = [
    (modules_without_a_floor, {"rollouts/attic.py": ""}, "rollouts.attic has no floor"),
    (modules_without_a_floor, {"rollouts/attic/shelf.py": ""}, "rollouts.attic.shelf has no floor"),
    (arrows_up, {"rollouts/errors.py": "from rollouts.dtypes import Prompt"}, "up from floor 1 to 3"),
    (arrows_up, {"rollouts/runs/a.py": "from rollouts.programs.generate import x"}, "up from floor 9 to 9"),
    (
        arrows_up,
        {"rollouts/renderer/a.py": "def f():\n    import rollouts.training.types"},
        "rollouts.renderer.a, line 2",
    ),
    (arrows_up, {"rollouts/agent/loop.py": "if TYPE_CHECKING:\n    from rollouts.recipe import Recipe"}, "to 8"),
    (imports_of_the_own_package, {"rollouts/engine/a.py": "from rollouts.engine import b"}, "its own package"),
    (
        imports_between_rooms,
        {"rollouts/renderer/a.py": "from ..environments.base import tool"},
        "another room",
    ),
    (imports_between_rooms, {"rollouts/engine/a.py": "from rollouts.inference.base import Policy"}, "another room"),
    (strangers, {"rollouts/training/manager.py": "from rollouts.agent import run_agent"}, "rollouts.agent"),
    (strangers, {"rollouts/environments/a.py": "import rollouts.trajectory"}, "rollouts.trajectory"),
    (strangers, {"rollouts/inference/a.py": "import rollouts.training.types"}, "rollouts.training.types"),
    (heavy_imports, {"rollouts/rewards.py": "def f():\n    import torch.nn"}, "torch lives in"),
    (heavy_imports, {"rollouts/training/batch.py": "import torch"}, "inside the function"),
    (heavy_imports, {"rollouts/renderer/a.py": "from transformers import AutoTokenizer"}, "inside the function"),
    (
        heavy_imports,
        {"rollouts/integrations/slime/a.py": "from slime.utils.types import Sample"},
        "never at import time",
    ),
    (imports_of_guests, {"rollouts/recipe.py": "from tests.worlds import world"}, "a guest"),
    (
        imports_of_guests,
        {"rollouts/commands/run.py": "from rollouts.recipes.configs import mixed", "configs/mixed.py": ""},
        "rollouts.commands.run, line 1, imports rollouts.recipes.configs.mixed: a guest",
    ),
    (imports_of_guests, {"configs/a.py": "from training.grpo import GrpoTrainer"}, "a guest"),
    (
        adapters_that_know_each_other,
        {"rollouts/integrations/areal/a.py": "def f():\n    import rollouts.integrations.verl.rows"},
        "rollouts.integrations.areal.a, line 2, imports rollouts.integrations.verl.rows: an adapter",
    ),
    (homeless_modules, {"rollouts/training/_utils.py": ""}, "a missing noun"),
    (homeless_modules, {"rollouts/token_helpers.py": ""}, "a missing noun"),
    (
        circles,
        {
            "rollouts/agent/loop.py": "import rollouts.renderer.a",
            "rollouts/renderer/a.py": "def f():\n    import rollouts.agent.loop",
        },
        "behind a function-level import",
    ),
    (
        circles,
        {
            "rollouts/agent/loop.py": "import rollouts.renderer.a",
            "rollouts/renderer/a.py": "if TYPE_CHECKING:\n    from rollouts.agent.loop import run_agent",
        },
        "rollouts.renderer.a, line 2, imports rollouts.agent.loop: a circle under TYPE_CHECKING",
    ),
    (loose_tasks, {"rollouts/agent/loop.py": "import asyncio\nasyncio.gather()"}, "line 2: asyncio.gather"),
    (loose_tasks, {"rollouts/agent/loop.py": "from asyncio import create_task"}, "asyncio.create_task"),
    (context_variables, {"rollouts/agent/loop.py": "import contextvars"}, "contextvars: expected an argument"),
    (raw_prints, {"rollouts/runs/a.py": "x = 1\nprint(x)"}, "rollouts.runs.a, line 2: print; expected say"),
    (raw_prints, {"rollouts/runs/a.py": "from rich.console import Console\nConsole()"}, "line 2: Console"),
    (raw_prints, {"rollouts/runs/a.py": "import sys\nsys.stdout.write('x')"}, "line 2: sys.stdout.write"),
    (
        long_classes,
        {"rollouts/runs/a.py": "class A:\n" + "    x = 1\n" * 350},
        "rollouts.runs.a.A: 351 lines, at most 350",
    ),
    (stray_tests, {"tests/training/test_attic.py": ""}, "mirrors no module"),
    *(
        (old_words, {"rollouts/renderer/a.py": f"x = 1\n{text}\n"}, f"rollouts/renderer/a.py, line 2: {hit!r}")
        for first in OLD_WORDS
        for text, hit in [
            (f'"""It is {first}."""', first),
            (f"def _{first}(): ...", first),
            (f"is_{first.upper()}_now = 1", first.upper()),
        ]
    ),
    *(
        (phrases, {"rollouts/attic/a.py": source}, f"rollouts/attic/a.py: {name}")
        for name, source in [
            ("is no X", '"""It is no\n    number."""'),
            ("What … as a subject", '"""What a run writes is data."""'),
            ("What … as a subject", "x = 1  # What follows is data"),
            ("a text", '"""Read a text of a model."""'),
            ("those that", '"""Return the rows, also those that failed."""'),
            ("of its own", '"""It has a thread of its own."""'),
            ("that is none", '"""Return the error, or None if that is none."""'),
            ("goes on", '"""The run goes on."""'),
            ("Who … as a subject", '"""Who waits is listed."""'),
        ]
    ),
]


@pytest.mark.parametrize(("rule", "files", "words"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_each_rule_catches_a_planted_violation(
    rule: Callable[[Path], list[str]], files: dict[str, str], words: str, tmp_path: Path
) -> None:
    """A rule that misses a planted violation would miss a real one."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = rule(tmp_path)  # reads the planted tree for the first time: what is read is kept by folder
    assert found
    assert words in "\n".join(found)


def test_a_tidy_tree_passes(tmp_path: Path) -> None:
    """Imports to lower floors, relative imports and late imports of heavy packages are allowed."""
    files = {
        "rollouts/__init__.py": "",
        "rollouts/errors.py": "import asyncio\nasyncio.current_task()",
        "rollouts/renderer/__init__.py": "from rollouts.renderer.tokens import load  # untold, besides",
        "rollouts/renderer/tokens.py": "from ..errors import E\ndef load():\n    import transformers",
        "rollouts/training/batch.py": "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
        "rollouts/training/manager.py": "from .batch import f",
        "configs/a.py": "from rollouts.recipes.environments.b import E\nimport rollouts.renderer",
        "environments/b.py": "from rollouts.errors import E",
        "rollouts/commands/a.py": "from rollouts import __version__\ndef f():\n    import rollouts.renderer.tokens",
        "tests/renderer/test_tokens.py": "",
        "tests/test_renderer.py": "",
        "tests/integration/test_all.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert [found for rule in RULES for found in rule(tmp_path)] == []


def test_the_packages_without_wings_have_few_arrows() -> None:
    """The picture of the core stays one that can be drawn: a new arrow between two packages replaces another."""
    pairs = {(room_of(entry.module), room_of(entry.target)) for entry in imports_of(ROOT)}
    drawn = FLOORS.keys() - {"rollouts", *(f"rollouts.{name}" for name in WINGS)}
    assert len([pair for pair in pairs if len({*pair} & drawn) == 2]) == MOST_ARROWS


CLOSURES: dict[str, tuple[int, tuple[str, ...]]] = {
    "rollouts.training": (173, ("base",)),
    "rollouts.training.filters": (699, ("base", "errors")),
    "rollouts.training.manager": (
        6_984,
        ("base", "concurrency", "dtypes", "errors", "training", "trajectory"),
    ),
    "rollouts.commands.run": (
        23_592,
        (
            "agent",
            "base",
            "concurrency",
            "dtypes",
            "engine",
            "environments",
            "errors",
            "http",
            "inference",
            "recipe",
            "renderer",
            "runs",
            "training",
            "trajectory",
            "views",
        ),
    ),
}
"""For each core module, and the command of a run: the most lines that its import may load, and the packages.

The lines only go down."""


@pytest.mark.parametrize("module", CLOSURES)
def test_the_import_of_a_core_module_loads_only_its_packages(module: str) -> None:
    """A wing that the core imports, also through another module, is found here; so is a core that grows."""
    code = (
        f"import sys, {module}\n"
        "for name, found in sorted(sys.modules.items()):\n"
        "    if name.partition('.')[0] == 'rollouts':\n"
        "        print(name, sum(1 for _ in open(found.__file__, encoding='utf-8')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    most, packages = CLOSURES[module]
    assert {name.split(".")[1] for name in lines if "." in name} == {module.split(".")[1], *packages}
    assert sum(lines.values()) <= most


def faces() -> list[str]:
    """The packages whose names are imported at their first use."""
    return [name for name, path in modules_of(ROOT).items() if "__dir__ = lazy_face(" in path.read_text()]


@pytest.mark.parametrize("package", faces())
def test_a_lazy_face_has_the_names_that_it_lists(package: str) -> None:
    """``__all__``, the names for type checkers and the names that are imported on use are the same."""
    module = importlib.import_module(package)
    tree = ast.parse(modules_of(ROOT)[package].read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported += [node.target.id for node in typed.body if isinstance(node, ast.AnnAssign)]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted([*imported, *defined]) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'attic'"):
        module.attic  # noqa: B018


@pytest.mark.parametrize("module", ["rollouts", "rollouts.environments", "rollouts.training.batch", *CLOSURES])
def test_importing_the_package_loads_no_heavy_library(module: str) -> None:
    """Neither a script that imports the manager nor ``rollouts run --help`` waits for torch, transformers or NumPy."""
    heavy = {"numpy", "torch", "transformers", "slime", "ray"}
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_table_of_the_floors_is_that_of_the_page() -> None:
    """``CONTRIBUTING.md`` names each package and module at the root, on its floor."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", page, flags=re.MULTILINE)
    named = {f"rollouts.{name}": int(floor) for floor, names in rows for name in re.findall(r"`(\w+)/?`", names)}
    assert named == {name: floor for name, floor in FLOORS.items() if name != "rollouts"}
