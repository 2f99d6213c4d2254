"""Pages of the site that are made from other files: the README and its neighbours, the commands, the API.

MkDocs calls these functions while it builds. A link to a file of the repository that is a page leads to the page;
one to any other file of the repository becomes its text.
"""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "index.md": "README.md",
    "SLIME_vs_ROLLOUTS.md": "SLIME_vs_ROLLOUTS.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "guests/slime.md": "training/slime/README.md",
}
"""Pages that are files outside ``docs``."""
API = {
    "dtypes": [
        "rollouts.dtypes.messages",
        "rollouts.dtypes.images",
        "rollouts.dtypes.inference",
        "rollouts.dtypes.columns",
    ],
    "training": [
        "rollouts.training.config",
        "rollouts.training.manager",
        "rollouts.training.types",
        "rollouts.training.data_buffer",
        "rollouts.training.agent_integration",
        "rollouts.training.continuation",
        "rollouts.training.filters",
        "rollouts.training.failures",
        "rollouts.training.mixing",
        "rollouts.training.evaluation",
        "rollouts.training.batch",
    ],
    "recipe": ["rollouts.recipe.recipe", "rollouts.recipe.files"],
    "agent": ["rollouts.agent.loop", "rollouts.trajectory"],
    "environments": [
        "rollouts.environments.base",
        "rollouts.environments.single_turn",
        "rollouts.environments.simulated_user",
        "rollouts.environments.mixed",
        "rollouts.environments.python_tool",
        "rollouts.environments.mcp",
        "rollouts.environments.adapters.gymnasium",
        "rollouts.environments.adapters.nemo_gym",
        "rollouts.environments.adapters.openenv",
        "rollouts.environments.adapters.skyrl_gym",
        "rollouts.environments.adapters.trl",
        "rollouts.environments.adapters.verifiers",
        "rollouts.environments.ors",
    ],
    "sandboxes": [
        "rollouts.sandboxes.base",
        "rollouts.sandboxes.process",
        "rollouts.sandboxes.namespaces",
        "rollouts.sandboxes.image",
        "rollouts.sandboxes.images",
        "rollouts.sandboxes.containers",
        "rollouts.sandboxes.containment",
        "rollouts.programs.warm",
        "rollouts.programs.launchers.base",
        "rollouts.programs.launchers.repository_task",
    ],
    "rewards": [
        "rollouts.rewards.weighted",
        "rollouts.rewards.math",
        "rollouts.rewards.code",
        "rollouts.rewards.llm_judge",
        "rollouts.rewards.remote",
    ],
    "inference": [
        "rollouts.inference.base",
        "rollouts.inference.policy",
        "rollouts.inference.resumable",
        "rollouts.inference.weights",
    ],
    "renderer": ["rollouts.renderer.renderer", "rollouts.renderer.tokenizer"],
    "runs": [
        "rollouts.runs.run",
        "rollouts.runs.writer",
        "rollouts.runs.reader",
        "rollouts.runs.in_folder",
        "rollouts.runs.resume",
        "rollouts.runs.verify",
        "rollouts.runs.export",
        "rollouts.views.page.page",
        "rollouts.views.page.source",
    ],
    "observability": ["rollouts.observability.loggers", "rollouts.observability.numbers"],
    "testing": ["rollouts.testing.policy", "rollouts.testing.server", "rollouts.testing.environment_check"],
    "integrations": [
        "rollouts.integrations.slime.rollout",
        "rollouts.integrations.slime.data_source",
        "rollouts.integrations.miles",
        "rollouts.integrations.trl",
    ],
    "errors": ["rollouts.errors"],
}
"""The modules of each page of the API reference."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_OUTSIDE = {source: page for page, source in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of ``docs``."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=_commands()))
    for name, modules in API.items():
        for module in modules:
            importlib.import_module(module)  # a module that has moved fails here, by its name
        text = "\n\n".join(f"::: {module}" for module in modules)
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n{text}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages."""
    name = page.file.src_uri
    source = PAGES.get(name, f"docs/{name}")

    def led(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        found = _OUTSIDE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if found is None:
            return text if (ROOT / file).exists() else match[0]
        return f"{image}[{text}]({posixpath.relpath(found, posixpath.dirname(name) or '.')}{mark}{anchor})"

    return _LINK.sub(led, markdown)


def _commands() -> str:
    """The help of every verb, from its parser."""
    from rollouts.commands import VERBS

    os.environ["COLUMNS"] = "100"
    parts = ["# Commands\n\n`rollouts VERB --help` prints these texts; with a recipe also its options."]
    for name, verb in VERBS.items():
        verbs = argparse.ArgumentParser(prog="rollouts").add_subparsers()
        importlib.import_module(f"rollouts.commands.{verb.module}").add(verbs)
        parts.append(f"## rollouts {name}\n\n```text\n{verbs.choices[name].format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
