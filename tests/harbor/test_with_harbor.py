"""Our loader against Harbor itself, which needs Python 3.12: ``scripts/test --harbor`` runs this folder there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.harbor.schema import MODELS
from rollouts.harbor.tasks import load_task
from tests.harbor.folders import write_task

pytestmark = pytest.mark.harbor
pytest.importorskip("harbor")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_our_tables_have_the_fields_of_harbors_models(name: str) -> None:
    """A field that Harbor adds fails this test, and is refused by name until it is honoured."""
    from harbor.models.task import config

    theirs: Any = getattr(config, name)
    assert {field.name for field in attrs.fields(MODELS[name])} == set(theirs.model_fields)


def test_no_model_of_harbor_is_without_a_table() -> None:
    """Every model that ``TaskConfig`` reaches has a table."""
    from harbor.models.task import config
    from pydantic import BaseModel

    def reached(model: Any, found: set[str]) -> set[str]:
        if model.__name__ not in found:
            found.add(model.__name__)
            for field in model.model_fields.values():
                for part in _parts(field.annotation):
                    part = getattr(config, part, None) if isinstance(part, str) else part
                    if isinstance(part, type) and issubclass(part, BaseModel):
                        reached(part, found)
        return found

    assert reached(config.TaskConfig, set()) == set(MODELS)


def _parts(annotation: Any) -> list[Any]:
    parts = list(getattr(annotation, "__args__", ()))
    return [annotation, *(inner for part in parts for inner in _parts(part))]


def test_defaults_are_those_of_harbor(tmp_path: Path) -> None:
    """An empty ``task.toml`` means the same to both."""
    from harbor.models.task.config import TaskConfig

    ours = load_task(write_task(tmp_path, toml="")).config
    assert _plain(ours) == _plain(TaskConfig.model_validate({}).model_dump(mode="json"))


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, dict):
        # Harbor leaves the old field out of its dumps.
        return {name: _plain(each) for name, each in value.items()} | (
            {"allow_internet": None} if "cpus" in value else {}
        )
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_ignore_rules_select_the_files_that_harbor_selects(tmp_path: Path) -> None:
    """The usual rules: anchors, folders, ``**``, and a file that a later rule takes back."""
    from harbor.models.task.task import Task

    rules = "*.log\n!keep.log\n/build/\ndata/**/raw\n__pycache__/\n# a comment\n"
    paths = ("a.log", "keep.log", "build/x", "sub/build/y", "data/raw", "data/q/raw/z", "data/q/z", "s/__pycache__/c")
    folder = write_task(tmp_path, {"tests/.harborignore": rules, **{f"tests/{path}": "x" for path in paths}})
    selection = Task(folder).file_filter.select(folder / "tests")
    theirs = [path.as_posix() for path in selection.relative_paths if (folder / "tests" / path).is_file()]
    assert [file.path for file in load_task(folder).tests()] == sorted(theirs)


def test_a_task_that_we_load_is_loaded_by_harbor(tmp_path: Path) -> None:
    """Name, instruction and the choice of the verifier's place are the same."""
    from harbor.models.task.task import Task

    for number, toml in enumerate(("", '[task]\nname = "o/n"\n', '[verifier]\nenvironment_mode = "separate"\n')):
        folder = write_task(tmp_path / str(number), {"instruction.md": "# canary\n\nDo it.\n"}, toml=toml)
        ours, theirs = load_task(folder), Task(folder)
        assert (ours.name, ours.instruction) == (theirs.name, theirs.instruction)
