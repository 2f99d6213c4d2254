"""Tar archives of a folder that a program may have made.

Invariant: packing follows no link; unpacking writes nothing outside of its folder, whatever the archive and the folder
contain. Both stop at a number of bytes. It uses the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from pathlib import PurePosixPath
from typing import BinaryIO

__all__ = ["LATEST", "check_members", "limit_times", "pack", "unpack"]

_HEADER = 512
LATEST = (1 << 33) - 1
"""The last time of a member, in seconds, that every library can convert; a program sets any."""


def pack(path: str, archive: BinaryIO, max_bytes: int) -> bool:
    """Write a file or folder to an archive; return whether it exists.

    Sockets, devices, and files deeper than a path can be long are left out. Hard links become copies. Owners are
    numbers: a look-up of their names would load libraries that a program may have changed.

    Raises:
        OSError: it has more than ``max_bytes``, or a file cannot be read.
    """
    name = os.path.basename(os.path.normpath(path)) or "."
    if _status(path) is None:
        return False
    left = max_bytes
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        todo = [(path, name)]
        while todo:  # not recursive: a program can nest folders deeper than the stack
            here, shown = todo.pop()
            status = _status(here)
            member = None if status is None else _member(here, shown, status)
            if member is None:
                continue
            left -= member.size + _HEADER
            if left < 0:
                raise OSError(f"got more than {max_bytes:,} bytes")
            if member.isreg():
                with open(os.open(here, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                    tar.addfile(member, file)
                continue
            tar.addfile(member)
            if member.isdir():
                todo += [(os.path.join(here, entry), f"{shown}/{entry}") for entry in sorted(os.listdir(here))[::-1]]
    return True


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        raise


def _member(path: str, name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), min(max(status.st_mtime, 0), LATEST)
    member.uid, member.gid = status.st_uid, status.st_gid
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISFIFO(status.st_mode):
        member.type = tarfile.FIFOTYPE
    else:
        return None
    return member


def unpack(archive: BinaryIO, folder: str, max_bytes: int) -> None:
    """Extract an archive below a folder, which is made where it is missing.

    Raises:
        OSError: a member would be outside of the folder, is a device, or cannot be written; or all of them have more
            than ``max_bytes``.
    """
    os.makedirs(folder, exist_ok=True)
    root = os.path.realpath(folder)
    made = {root}
    left = max_bytes
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            tar.extraction_filter = lambda member, path: member  # the checks are here: links may be absolute
            for member in tar:
                left -= member.size + _HEADER
                if left < 0:
                    raise OSError(f"got more than {max_bytes:,} bytes")
                place = os.path.normpath(os.path.join(root, member.name))
                parent = os.path.dirname(place)
                if parent not in made:  # a look at each folder above each folder has no end where they are deep
                    parent = os.path.realpath(parent)
                links = [os.path.realpath(os.path.join(root, member.linkname))] if member.islnk() else []
                if ".." in member.name.split("/") or not all(
                    os.path.commonpath([root, inner]) == root for inner in (place, parent, *links)
                ):  # ``link/../file`` is next to the folder of the link
                    raise OSError(f"got the member {member.name!r}; expected one inside the folder")
                if member.ischr() or member.isblk():
                    raise OSError(f"got the device {member.name!r}; expected files, folders, links and pipes")
                member.mtime = min(max(member.mtime, 0), LATEST)
                _make_way(place, member)
                tar.extract(member, root, numeric_owner=True)
                if member.isdir() and parent in made:  # nothing takes the place of a folder
                    made.add(place)
    except tarfile.TarError as error:
        raise OSError(f"not a tar archive that can be read: {error}") from None


def check_members(archive: str | os.PathLike[str], max_bytes: int) -> None:
    """Refuse an archive that :func:`unpack` would refuse in any folder, before another program extracts it.

    Raises:
        OSError: a member has a path outside, is a device, or all of them have more than ``max_bytes``.
    """
    left = max_bytes
    links: set[str] = set()
    try:
        with tarfile.open(archive, mode="r:") as tar:
            for member in tar:
                left -= member.size + _HEADER
                if left < 0:
                    raise OSError(f"got more than {max_bytes:,} bytes")
                name = os.path.normpath(member.name)
                above = {str(folder) for folder in PurePosixPath(name).parents}
                if ".." in member.name.split("/") or name.startswith("/") or above & links:
                    raise OSError(f"got the member {member.name!r}; expected one inside the folder")
                if member.ischr() or member.isblk():
                    raise OSError(f"got the device {member.name!r}; expected files, folders, links and pipes")
                if member.issym():
                    links.add(name)
    except tarfile.TarError as error:
        raise OSError(f"not a tar archive that can be read: {error}") from None


def limit_times(archive: str | os.PathLike[str], limited: str | os.PathLike[str]) -> bool:
    """Copy an archive that has a member of a time that not every library can convert, with the nearest that all can.

    Returns:
        False if it has none; then no copy is written.

    Raises:
        OSError: it is not a tar archive.
    """
    try:
        with tarfile.open(archive, mode="r:") as source:
            if all(0 <= member.mtime <= LATEST for member in source):
                return False
            with tarfile.open(limited, mode="w", format=tarfile.PAX_FORMAT) as target:
                for member in source:
                    member.mtime = min(max(member.mtime, 0), LATEST)
                    member.pax_headers = {name: text for name, text in member.pax_headers.items() if name != "mtime"}
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
    except tarfile.TarError as error:
        raise OSError(f"not a tar archive that can be read: {error}") from None
    return True


def _make_way(place: str, member: tarfile.TarInfo) -> None:
    """Delete what is in a member's place, unless both are folders: it may be a link or a pipe."""
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(place)
    elif not member.isdir():
        raise OSError(f"got the member {member.name!r}, in whose place is a folder")
