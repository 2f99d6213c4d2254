"""The rules of ``.harborignore``: files of a task's tests and solutions that are not uploaded, in gitignore's syntax.

This module knows paths only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath

__all__ = ["IGNORE_FILE", "excluded"]

IGNORE_FILE = ".harborignore"


def excluded(path: PurePosixPath, rules_of: Callable[[PurePosixPath], Iterable[str]], *, folder: bool = False) -> bool:
    """Whether the rules exclude a path.

    Args:
        path: relative to the folder of the outermost rules.
        rules_of: the lines of the ignore file in a folder, which is relative, too; none without a file.
        folder: whether the path is a folder.

    A folder that is excluded hides all below it, and the last rule that matches decides, as in gitignore(5).
    """
    if path.name == IGNORE_FILE:
        return True
    for depth in range(1, len(path.parts) + 1):
        part = PurePosixPath(*path.parts[:depth])
        is_folder = folder or depth < len(path.parts)
        verdict = False
        for above in range(depth):
            base = PurePosixPath(*path.parts[:above])
            for line in rules_of(base):
                rule = _rule(line)
                if rule is not None and rule[0].fullmatch(part.relative_to(base).as_posix()):
                    negated, folders_only = rule[1], rule[2]
                    if is_folder or not folders_only:
                        verdict = not negated
        if verdict:
            return True
    return False


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """A line as a pattern of the whole relative path, whether it is negated, and whether it matches folders only."""
    text = re.sub(r"(?<!\\) +$", "", line.rstrip("\r\n"))
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text[1:] if negated else text
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    if not text:
        return None
    anchored = "/" in text
    parts = text.lstrip("/").split("/")
    return re.compile(("" if anchored else "(?:.*/)?") + _joined(parts)), negated, folders_only


def _joined(parts: Sequence[str]) -> str:
    pattern = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            pattern += ".*" if last else "(?:.*/)?"
        else:
            pattern += _glob(part) + ("" if last else "/")
    return pattern


def _glob(part: str) -> str:
    pattern, at = "", 0
    while at < len(part):
        letter = part[at]
        closing = part.find("]", at + 2) if letter == "[" else -1
        if letter == "\\" and at + 1 < len(part):
            at += 1
            pattern += re.escape(part[at])
        elif letter == "*":
            pattern += "[^/]*"
        elif letter == "?":
            pattern += "[^/]"
        elif closing > 0:
            inner = part[at + 1 : closing].replace("\\", "\\\\")
            pattern += "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
            at = closing
        else:
            pattern += re.escape(letter)
        at += 1
    return pattern
