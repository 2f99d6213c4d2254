"""Unpacked images: folders with the files of a container image, and what its configuration says.

Invariant: an image of the store is complete, and is never changed: it is made under another name and renamed. Only this
user reaches its files, which may run as their owner. The same key is the same image. buildah reads Dockerfiles and
keeps its layers; nothing here interprets them.

Images are built with ``buildah --isolation chroot``, which needs no daemon; no image is pulled.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.base.validators import as_texts, check
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import SandboxError
from rollouts.sandboxes.removal import remove_tree

__all__ = ["Image", "build_image", "context_key", "load_image", "named_image"]

_CONFIG, _ROOT = "image.json", "root"
_SHOWN = 2000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _check_roots(instance: Image, field: Any, value: Sequence[str]) -> None:
    for root in value:
        if not isinstance(root, str) or not os.path.isabs(root) or not os.path.isdir(root):
            raise ConfigError.of("Image.roots", root, "absolute paths of folders that exist")
    if not value:
        raise ConfigError.of("Image.roots", value, "at least one folder")


def _environment(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


@attrs.frozen
class Image:
    """The files of an image, and its defaults."""

    roots: Sequence[str] = attrs.field(converter=as_texts, validator=_check_roots)
    """Folders of this machine that lie over each other, the topmost first. They are read only."""
    env: Mapping[str, str] = attrs.field(
        factory=dict, converter=_environment, validator=check("strings by name", lambda value: _are_texts(value))
    )
    """Variables of every command."""
    workdir: str = attrs.field(
        default="/", validator=check("an absolute path", lambda value: isinstance(value, str) and value[:1] == "/")
    )
    """The folder in which commands start."""
    user: str = attrs.field(
        default="root", validator=check("a user", lambda value: isinstance(value, str) and bool(value))
    )
    """The user of commands."""

    @property
    def variables(self) -> dict[str, str]:
        """Its variables, with a ``PATH`` where it has none."""
        return {"PATH": _PATH, **self.env}


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def load_image(folder: str | os.PathLike[str]) -> Image:
    """Load an image of the store, or a folder that is the root of one: then without variables, as root, in ``/``.

    Raises:
        ConfigError: the folder does not exist, or its ``image.json`` is not one of ours.
    """
    path = Path(folder).resolve()
    if not (path / _CONFIG).is_file():
        return Image(str(path))
    try:
        config = msgspec.json.decode((path / _CONFIG).read_bytes())
        return Image(str(path / _ROOT), config["env"], config["workdir"], config["user"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ConfigError.of(f"{path / _CONFIG}", str(error), "the configuration of an image") from None


def context_key(folder: str | os.PathLike[str], *further: str) -> str:
    """A key of a folder's content: paths, kinds, modes, contents and link targets. 32 hexadecimal digits.

    Args:
        folder: the build context.
        further: what else decides the image, e.g. the name and version of an agent that is installed in it.
    """
    total = hashlib.sha256(msgspec.json.encode(further))
    root = Path(folder)
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode) & 0o111
        total.update(msgspec.json.encode([path.relative_to(root).as_posix(), kind, mode]))
        if stat.S_ISLNK(status.st_mode):
            total.update(os.readlink(path).encode(errors="surrogateescape"))
        elif stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:32]


async def build_image(
    context: str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    dockerfile: str = "Dockerfile",
    arguments: Mapping[str, str] | None = None,
    seconds: float = 600.0,
) -> Image:
    """Build the image of a folder with a Dockerfile, or load it from the store.

    The key is that of the folder: a base image that was built again under its name changes it only if ``arguments``
    do, such as ``{"BASE_ID": ...}``.

    Args:
        context: the folder.
        store: a folder for unpacked images; each is a subfolder named by :func:`context_key`.
        dockerfile: path of the Dockerfile in the folder.
        arguments: values of ``ARG``.
        seconds: deadline of the build.

    Raises:
        ConfigError: there is no Dockerfile, buildah is not installed, or we are not root.
        SandboxError: the build failed, with the end of its output, or reached its deadline.
    """
    if not (Path(context) / dockerfile).is_file():
        raise ConfigError.of("build_image(context)", os.fspath(context), f"a folder with {dockerfile}")
    pairs = sorted((arguments or {}).items())
    key = await anyio.to_thread.run_sync(context_key, context, dockerfile, *(f"{name}={text}" for name, text in pairs))

    async def make(identity_file: str) -> str:
        line = ["build", "--isolation", "chroot", "--pull-never", "--layers", "--force-rm"]
        line += ["--quiet", "--iidfile", identity_file]
        for name, text in pairs:
            line += ["--build-arg", f"{name}={text}"]
        await _buildah([*line, "--file", os.path.join(context, dockerfile), os.fspath(context)], seconds)
        return (await anyio.Path(identity_file).read_text()).strip()

    return await _stored(key, store, make, seconds)


async def named_image(name: str, store: str | os.PathLike[str], *, seconds: float = 600.0) -> Image:
    """Unpack an image that buildah has by name, or load it from the store.

    Raises:
        ConfigError: buildah is not installed, or we are not root.
        SandboxError: buildah does not have the image.
    """
    what = await _buildah(["inspect", "--type", "image", "--format", "{{.FromImageID}}", name], seconds)
    identity = what.strip().removeprefix("sha256:")

    async def make(identity_file: str) -> str:
        return identity

    return await _stored(identity[:32], store, make, seconds)


async def _stored(
    key: str, store: str | os.PathLike[str], make: Callable[[str], Awaitable[str]], seconds: float
) -> Image:
    """Load the image of a key; make it first where the store lacks it. ``make`` gets a file for its id."""
    place = os.path.abspath(os.path.join(store, key))  # noqa: ASYNC240 - it asks no disk
    if not await anyio.Path(place).is_dir():
        new = await anyio.to_thread.run_sync(_new_folder, place)
        try:
            await _unpack(await make(os.path.join(new, "id")), Path(new), seconds)
            await anyio.to_thread.run_sync(_move, new, place)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove, new)
    os.chmod(place, 0o700)  # an earlier version left it open
    return load_image(place)


def _new_folder(place: str) -> str:
    store, key = os.path.split(place)
    os.makedirs(store, exist_ok=True)
    return tempfile.mkdtemp(prefix=f".{key}-", dir=store)  # of this user alone: the image has set-user programs


def _move(new: str, place: str) -> None:
    try:
        os.rename(new, place)
    except OSError:
        if not os.path.isdir(place):  # else another process was first: its image is the same
            raise


def _remove(folder: str) -> None:
    if os.path.isdir(folder):
        remove_tree(folder)


async def _unpack(identity: str, folder: Path, seconds: float) -> None:
    """Copy the files of an image of buildah, and write its configuration."""
    text = await _buildah(["inspect", "--type", "image", identity], seconds)
    config = msgspec.json.decode(text)["OCIv1"].get("config") or {}
    container = (await _buildah(["from", "--pull-never", identity], seconds)).strip()
    try:
        mounted = (await _buildah(["mount", container], seconds)).strip()
        await _ran(["cp", "--archive", "--reflink=auto", f"{mounted}/.", str(folder / _ROOT)], seconds)
    finally:
        with anyio.CancelScope(shield=True):
            await _buildah(["rm", container], seconds)
    env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    plain = {"env": env, "workdir": posixpath.normpath(config.get("WorkingDir") or "/")}
    (folder / _CONFIG).write_bytes(msgspec.json.encode({**plain, "user": config.get("User") or "root"}))


async def _buildah(arguments: Sequence[str], seconds: float) -> str:
    if shutil.which("buildah") is None:
        raise ConfigError("images are built with buildah: apt-get install buildah")
    if os.geteuid() != 0:
        raise ConfigError.of("user", os.geteuid(), "root: the owners of an image's files are kept")
    return await _ran(["buildah", *arguments], seconds)


async def _ran(line: Sequence[str], seconds: float) -> str:
    with anyio.move_on_after(seconds):
        end = await anyio.run_process(list(line), stdin=subprocess.DEVNULL, check=False)
        if end.returncode:
            words = (end.stdout + end.stderr).decode(errors="replace").strip()[-_SHOWN:]
            raise SandboxError(f"{' '.join(line[:2])}: exit code {end.returncode}: {words}")
        return end.stdout.decode(errors="replace")
    raise SandboxError(f"{' '.join(line[:2])}: not done within {seconds:g} s")
