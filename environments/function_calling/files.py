"""A simulated disk: the leaderboard's file system as tools, with directories in memory.

Invariant: no real file is read or written. The tree is plain data, ``{name: {"type": "file", "content": …}}`` or
``{name: {"type": "directory", "contents": {…}}}``, in the form of the rows; only the tools change it. An impossible
operation raises a ``ValueError`` and changes nothing. The docstrings of the tools are their descriptions for the model.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator
from typing import Any, Literal

from rollouts.environments.base import tool

__all__ = ["FileTools"]

Node = dict[str, Any]


class FileTools:
    """The tools; call ``put`` first to set their disk."""

    def put(self, root: dict[str, Node]) -> None:
        """Use a copy of a disk; the current directory is its only top-level directory."""
        (name,) = root
        self.disk: Node = copy.deepcopy(root[name])
        self.way: list[str] = []
        self.name = name

    # -- navigation --

    @tool
    def pwd(self) -> str:
        """The path of the current directory."""
        return _to_json(current_working_directory="/" + "/".join([self.name, *self.way]))

    @tool
    def ls(self, a: bool = False) -> str:
        """The names in the current directory; hidden ones, which begin with a dot, if a is true."""
        return _to_json(current_directory_content=[name for name in self._here if a or not name.startswith(".")])

    @tool
    def cd(self, folder: str) -> str:
        """Go to a directory of the current one, or to '..', the one above."""
        if folder == "..":
            if not self.way:
                raise ValueError("there is no directory above this one")
            self.way.pop()
        elif folder != ".":
            self._directory(folder)
            self.way.append(folder)
        return _to_json(current_working_directory=self.way[-1] if self.way else self.name)

    @tool
    def find(self, path: str = ".", name: str | None = None) -> str:
        """The paths below a directory whose last name contains a text; all paths without one."""
        start = self._here if path == "." else self._directory(path)
        return _to_json(
            matches=[f"{path}/{found}" for found in _below(start) if (name or "") in found.rpartition("/")[2]]
        )

    # -- reading --

    @tool
    def cat(self, file_name: str) -> str:
        """The content of a file of the current directory."""
        return _to_json(file_content=self._text(file_name))

    @tool
    def grep(self, file_name: str, pattern: str) -> str:
        """The lines of a file that contain a text."""
        return _to_json(matching_lines=[line for line in self._text(file_name).splitlines() if pattern in line])

    @tool
    def sort(self, file_name: str) -> str:
        """The lines of a file in order; the file stays as it is."""
        return _to_json(sorted_content="\n".join(sorted(self._text(file_name).splitlines())))

    @tool
    def tail(self, file_name: str, lines: int = 10) -> str:
        """The last lines of a file."""
        if lines < 1:
            raise ValueError(f"lines is {lines}; at least 1 is possible")
        return _to_json(last_lines="\n".join(self._text(file_name).splitlines()[-lines:]))

    @tool
    def wc(self, file_name: str, mode: Literal["l", "w", "c"] = "l") -> str:
        """Count the lines (l), words (w) or characters (c) of a file."""
        text = self._text(file_name)
        counted: dict[str, tuple[str, int]] = {
            "l": ("lines", len(text.splitlines())),
            "w": ("words", len(text.split())),
            "c": ("characters", len(text)),
        }
        kind, count = counted[mode]
        return _to_json(count=count, type=kind)

    @tool
    def diff(self, file_name1: str, file_name2: str) -> str:
        """The lines in which two files differ."""
        first, second = (self._text(name).splitlines() for name in (file_name1, file_name2))
        return _to_json(diff_lines="\n".join(line for line in difflib.ndiff(first, second) if line[0] in "+-"))

    @tool
    def du(self, human_readable: bool = False) -> str:
        """How many bytes the files of the current directory have, with those below."""
        size = _size({"type": "directory", "contents": self._here})
        return _to_json(disk_usage=f"{size} bytes" if human_readable else str(size))

    # -- writing --

    @tool
    def echo(self, content: str, file_name: str | None = None) -> str:
        """Write a text to a file of the current directory, over what it holds; without a file, say it."""
        if file_name is None:
            return _to_json(terminal_output=content)
        self._write(file_name, content)
        return _to_json(terminal_output=None)

    @tool
    def touch(self, file_name: str) -> str:
        """Make an empty file in the current directory, if there is none of that name."""
        if file_name not in self._here:
            self._write(file_name, "")
        return _to_json()

    @tool
    def mkdir(self, dir_name: str) -> str:
        """Make a directory in the current one."""
        self._here[self._free(dir_name)] = {"type": "directory", "contents": {}}
        return _to_json()

    @tool
    def rm(self, file_name: str) -> str:
        """Remove a file, or a directory with all that it holds."""
        self._node(file_name)
        del self._here[file_name]
        return _to_json(result=f"{file_name} removed")

    @tool
    def rmdir(self, dir_name: str) -> str:
        """Remove an empty directory."""
        if self._directory(dir_name):
            raise ValueError(f"{dir_name} is not empty")
        del self._here[dir_name]
        return _to_json(result=f"{dir_name} removed")

    @tool
    def cp(self, source: str, destination: str) -> str:
        """Copy a file or directory of the current one: into a directory that is there, else under another name."""
        place, name = self._place(source, destination)
        place[name] = copy.deepcopy(self._here[source])
        return _to_json(result=f"{source} copied to {destination}")

    @tool
    def mv(self, source: str, destination: str) -> str:
        """Move a file or directory of the current one: into a directory that is there, else to another name."""
        place, name = self._place(source, destination)
        place[name] = self._here.pop(source)
        return _to_json(result=f"{source} moved to {destination}")

    # -- the tree --

    @property
    def _here(self) -> dict[str, Node]:
        node = self.disk
        for name in self.way:
            node = node["contents"][name]
        contents: dict[str, Node] = node["contents"]
        return contents

    def _node(self, name: str) -> Node:
        if name not in self._here:
            raise ValueError(f"there is no {name} in the current directory")
        return self._here[name]

    def _directory(self, name: str) -> dict[str, Node]:
        node = self._node(name)
        if node["type"] != "directory":
            raise ValueError(f"{name} is not a directory")
        contents: dict[str, Node] = node["contents"]
        return contents

    def _text(self, name: str) -> str:
        node = self._node(name)
        if node["type"] != "file":
            raise ValueError(f"{name} is not a file")
        return str(node["content"])

    def _free(self, name: str) -> str:
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is not the name of a file or directory; paths are not possible here")
        if name in self._here:
            raise ValueError(f"{name} is there already")
        return name

    def _write(self, name: str, content: str) -> None:
        if name in self._here:
            self._text(name)
            self._here[name]["content"] = content
        else:
            self._here[self._free(name)] = {"type": "file", "content": content}

    def _place(self, source: str, destination: str) -> tuple[dict[str, Node], str]:
        """The directory and the name that a copy gets."""
        self._node(source)
        if source == destination:
            raise ValueError(f"{source} cannot go to itself")
        if destination not in self._here or self._here[destination]["type"] != "directory":
            return self._here, self._free(destination)
        into = self._directory(destination)
        if source in into:
            raise ValueError(f"{source} is in {destination} already")
        return into, source


def _to_json(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False)


def _below(contents: dict[str, Node]) -> Iterator[str]:
    for name, node in contents.items():
        yield name
        if node["type"] == "directory":
            yield from (f"{name}/{inner}" for inner in _below(node["contents"]))


def _size(node: Node) -> int:
    if node["type"] == "file":
        return len(str(node["content"]).encode())
    return sum(_size(inner) for inner in node["contents"].values())
