"""Lines of JSON as typed rows: a line that is not one is a finding, and a file without any is refused.

``json`` of the standard library decodes, because other systems write NaN as a literal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollouts.audit.rows import AuditedRow, Finding
from rollouts.errors import ConfigError, shortened

__all__ = ["converted", "read_lines"]


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each line; the value is the error for a line that is not JSON.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    value = error
                yield f"{path.name}:{number}", value
    except OSError as error:
        raise ConfigError.of("FILE", str(path), f"a readable file ({error.strerror})") from error


def converted(
    rows: Iterable[tuple[str, Any]], kind: Any, form: str, make: Callable[[str, Any], Iterable[AuditedRow]]
) -> Iterator[AuditedRow]:
    """The rows of values of one type.

    Args:
        rows: place and value.
        kind: the type of a value.
        form: the form in words, for errors.
        make: rows of the audit from a place and a value.

    Raises:
        ConfigError: the first value is not of the type.
    """
    for number, (place, value) in enumerate(rows):
        try:
            if isinstance(value, Exception):
                raise msgspec.ValidationError(str(value))
            found = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            if not number:
                raise ConfigError.of("--format", f"{place}: {error}", form) from error
            finding = Finding.of("broken", "rows", place, shortened(error), form)
            yield AuditedRow(place, findings=[finding], trained=False)
            continue
        yield from make(place, found)
