"""A Harbor environment over our sandboxes: ``harbor run -e rollouts.harbor.environment:RolloutsEnvironment``.

Invariant: the processes of one command live on in the next, as in a container, until the environment stops; then
nothing is left. A setting of a task that the kind of sandbox does not honour is refused before it starts.

Written for Harbor 0.25.0 (harbor/environments/base.py: BaseEnvironment). It needs Harbor, and therefore Python 3.12; it
is imported by Harbor, or by :mod:`rollouts.harbor.trial`.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import posixpath
import tarfile
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import harbor
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions, Wanted, sandbox_of
from rollouts.harbor.grading import FOLDERS, folders_again, is_in, new_folders, sanitize, way_to
from rollouts.harbor.verdict import Rung
from rollouts.sandboxes import RunningSandbox, Sandbox, SandboxError

__all__ = ["RolloutsEnvironment"]

_MOST_BYTES = 1 << 26  # of one file that is copied through memory
_LONGEST_SECONDS = 1e6
_DEEPEST, _LONGEST_PATH = 64, 4096
_CLOSE_SECONDS = 30.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_CLOCK_SECONDS = 1.0
"""Of which the times of files may differ from the clock."""
_HARBOR = Path(harbor.__file__).resolve().parent
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


_LIVE: weakref.WeakSet[RolloutsEnvironment] = weakref.WeakSet()
"""The environments of this process."""


class RolloutsEnvironment(BaseEnvironment):  # type: ignore[misc]  # Harbor's types are not read
    """One box of ours as Harbor's environment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take Harbor's arguments, and the fields of :class:`~rollouts.harbor.boxes.BoxOptions` (``--ek root=…``).

        Raises:
            ConfigError: an option is wrong.
        """
        names = BoxOptions.names()
        self._options = BoxOptions.of({name: options.pop(name) for name in names & options.keys()})
        self._kind: Sandbox | None = None
        self._place: RunningSandbox | None = None
        self.on_open: Callable[[RunningSandbox], Awaitable[None]] | None = None
        """Awaited with each sandbox that is opened, before the first command."""
        self.carried: tuple[str, ...] = ()
        """Paths that the rung ``carry`` takes to the fresh box, in addition to the working folder."""
        self.secrets: dict[str, str] = {}
        """Values that no command and no file of the box may contain, with the names of their variables."""
        self.sources: tuple[Path, ...] | None = None
        """Files and folders of this machine that the box may get, besides those of Harbor and temporary files newer
        than this environment; ``None`` for all. An agent may ask for files with a login of the user."""
        self._began = time.time() - _CLOCK_SECONDS
        super().__init__(*args, **options)
        if self._is_of_verifier():
            self._options = self._options.of_verifier()
        self._aborted: bool = any(each._aborted for each in self._of_trial())
        _LIVE.add(self)

    def _of_trial(self) -> list[RolloutsEnvironment]:
        """The environments of the same Trial: the agent's, and those of separate verifiers."""
        folder = self.trial_paths.trial_dir
        return [each for each in _LIVE if each.trial_paths.trial_dir == folder]

    def _is_of_verifier(self) -> bool:
        """Whether it is the box of a separate verifier, whose sessions Harbor names in another way than the agent's.

        A long name is cut and ends in a digest (harbor/trial/trial.py: _separate_verifier_session_id).
        """
        session: str = self.session_id
        after_trial = session[len(self.trial_paths.trial_dir.name) :]
        return not session.endswith("__env") or after_trial.startswith("__verifier__")

    @staticmethod
    def type() -> str:
        """The name in Harbor's records."""
        return "rollouts"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """It closes the network; it has no GPU, no compose file and no list of allowed hosts."""
        return EnvironmentCapabilities(disable_internet=True)

    def validate_network_policy_support(self, network_policy: Any = None) -> None:
        """Refuse a list of allowed hosts, unless it is the box itself, where our listener is the model's server.

        Harbor adds the model's host to the policy of a closed task (harbor/trial/trial.py: _network_plan).

        Raises:
            ValueError: the policy cannot be enforced.
        """
        policy = network_policy or self._network_policy
        if policy.network_mode != NetworkMode.ALLOWLIST or not set(policy.allowed_hosts) <= _LOOPBACK:
            super().validate_network_policy_support(policy)

    @property
    def place(self) -> RunningSandbox:
        """The open sandbox.

        Raises:
            SandboxError: it is not open.
        """
        if self._aborted or self._place is None:
            raise SandboxError("the box is closed" if self._aborted else "the box was not started")
        return self._place

    def _validate_definition(self) -> None:
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (self.environment_dir / name).is_file():
                raise ConfigError.of(f"environment/{name}", "a compose file", "a Dockerfile: one box has one service")
        if self._host_mounts:
            raise ConfigError.of("mounts", self._host_mounts, "none: a box has no folder of this machine")

    def _wanted(self) -> Wanted:
        settings = self.task_env_config
        return Wanted(
            folder=Path(self.environment_dir),
            docker_image=settings.docker_image,
            workdir=settings.workdir,
            env=self._startup_env(),
            cpus=settings.cpus,
            memory_mb=settings.memory_mb,
            storage_mb=settings.storage_mb,
            public=self.network_policy.network_mode == NetworkMode.PUBLIC,
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Open the box, with the folders of the logs and the loose files of the task."""
        self._kind = await sandbox_of(self._wanted(), self._options, force_build=force_build)
        await self._open()
        await self._upload_environment_dir_after_start()

    async def _open(self) -> None:
        assert self._kind is not None, "start chose it"
        self._place = await self._kind.open()
        if self._aborted:
            await self._close()
        if self.on_open is not None:
            await self.on_open(self.place)
        folders = " ".join(_LOGS)
        await self._must(f"mkdir -p {folders} '{self._workdir}' && chmod 777 /logs {folders}")

    async def _must(self, command: str) -> None:
        done = await self.exec(command, cwd="/", user=self._root)
        if done.return_code != 0:
            raise SandboxError(f"{command} ended with {done.return_code}: {done.stderr}; expected 0")

    async def stop(self, delete: bool) -> None:
        """Close the box: nothing of it is kept, also without ``delete``."""
        await self._close()

    async def abort(self) -> None:
        """End the Trial from outside: close its boxes, so that each command of them fails at once."""
        for each in self._of_trial():
            each._aborted = True
            await each._close()

    async def _close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True) as scope:
                await place.close()
            if scope.cancelled_caught:
                raise SandboxError(f"the box was not closed within {_CLOSE_SECONDS:g} s")

    async def enter_rung(self, rung: Rung) -> None:
        """Make the box ready for the tests of a shared verifier, as :mod:`rollouts.harbor.grading` says of a rung."""
        if rung == "keep":
            return
        await self.place.kill_all()
        if rung == "kill":
            await self._must(f"{new_folders(self._workdir)} && chmod 777 /logs/verifier")
            return
        with FOLDERS.temporary() as folder:
            packed: list[tuple[str, str]] = []
            for number, source in enumerate((self._workdir, "/logs/artifacts", *map(self._inside, self.carried))):
                archive, clean = f"{folder}/{number}.tar", f"{folder}/{number}-clean.tar"
                if source == "/":
                    raise SandboxError("/ is the whole box of the agent: it cannot be carried to another one")
                if any(is_in(source, above) for _, above in packed):
                    continue  # it is there already
                if await self.place.pack(source, archive):
                    await anyio.to_thread.run_sync(sanitize, archive, clean, source, (), False, number == 0)
                    packed.append((clean, source))
            await self._close()
            await self._open()
            ways = [await way_to(self.place, posixpath.dirname(source), self._root) for _, source in packed]
            for (archive, source), way in zip(packed, ways, strict=True):
                await way_to(self.place, posixpath.dirname(source), self._root, way)
                await self._must(f"if [ -d '{source}' ]; then find '{source}' -mindepth 1 -delete; fi")
                await self.place.unpack(archive, posixpath.dirname(source))
            await self._must(folders_again(self._workdir))

    # -- commands ------------------------------------------------------------------------------------------------------

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self.place.workspace

    @property
    def _root(self) -> str | None:
        return "root" if self._kind is not None and "users" in self._kind.abilities else None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command line with bash.

        Raises:
            RuntimeError: it did not end within ``timeout_sec``, in the words of Harbor's own environments.
        """
        variables = self._merge_env(env) or {}
        self._check_secrets(lambda secret: secret in command or any(secret in value for value in variables.values()))
        who = self._resolve_user(user)
        if who in ("root", 0) and self._root is None:
            who = None  # a kind without users runs all commands as its one user
        end = await self.place.exec(
            ["bash", "-c", command],
            env=variables,
            seconds=float(timeout_sec) if timeout_sec else _LONGEST_SECONDS,
            cwd=cwd or self._workdir,
            user=None if who is None else str(who),
        )
        if end.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=end.stdout, stderr=end.stderr, return_code=end.code)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _check_secrets(self, holds: Callable[[str], bool]) -> None:
        for secret, name in self.secrets.items():
            if holds(secret):
                raise ConfigError.of(name, "a variable of this process", "no such value in a box: unset it, or name it")

    def _check_source(self, path: Path) -> None:
        """Refuse a file or folder of this machine that the box must not get.

        Raises:
            ConfigError: it is not of the task, the agent or Harbor, or contains a secret of this process.
        """
        place = path.resolve()
        if not self._is_source(place):
            expected = "a file of the task or of Harbor: unset the variable that names a login, or name it in options"
            raise ConfigError.of("upload", str(path), expected)
        if place.is_dir():
            for inner in place.iterdir():  # a link there to a file is followed
                if inner.is_symlink() and inner.is_file() and not self._is_source(inner.resolve()):
                    raise ConfigError.of("upload", str(inner), "no link to a file that the box must not get")
        for file in (place, *place.rglob("*")) if self.secrets else ():
            shown = f"{file.name}\n{file.readlink() if file.is_symlink() else ''}"
            self._check_secrets(shown.__contains__)
            if file.is_file() and file.stat().st_size:
                with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    self._check_secrets(functools.partial(_is_in_content, content))

    def _is_source(self, place: Path) -> bool:
        if self.sources is None or any(place.is_relative_to(each.resolve()) for each in (*self.sources, _HARBOR)):
            return True
        is_temporary = place.is_relative_to(Path(tempfile.gettempdir()).resolve())
        return is_temporary and place.stat().st_ctime >= self._began

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write one file of this machine, with its mode.

        Raises:
            ConfigError: the box must not get it.
        """
        parent, name = posixpath.split(self._inside(target_path))
        await self._upload(Path(source_path), functools.partial(_pack, {name: Path(source_path)}), parent)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Write the content of a folder of this machine over a folder of the box.

        Raises:
            ConfigError: the box must not get it.
        """
        pack = functools.partial(_pack_content, Path(source_dir))
        await self._upload(Path(source_dir), pack, self._inside(target_dir))

    async def _upload(self, source: Path, pack: Callable[[str], None], to: str) -> None:
        """Unpack in a folder of the box what ``pack`` writes to an archive, if ``source`` may be read."""
        await anyio.to_thread.run_sync(self._check_source, source)
        with FOLDERS.temporary() as folder:
            archive = f"{folder}/files.tar"
            await anyio.to_thread.run_sync(pack, archive)
            await self.place.unpack(archive, to)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy one file of the box.

        Raises:
            FileNotFoundError: it is missing, or not a regular file.
            SandboxError: it is too large.
        """
        inside = self._inside(source_path)
        with FOLDERS.temporary() as folder:
            archive = f"{folder}/file.tar"
            found = await self.place.pack(inside, archive)
            data = await anyio.to_thread.run_sync(_only_file, archive) if found else None
        if data is None:
            raise FileNotFoundError(f"{source_path} is not a file of the box")
        await anyio.to_thread.run_sync(_write, Path(target_path), data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of a folder of the box; devices, pipes and links that leave it are left out.

        So is what is 64 folders deep, or has a path that is too long here: it would take minutes, or fail.

        Raises:
            FileNotFoundError: it is missing.
        """
        inside = self._inside(source_dir)
        with FOLDERS.temporary() as folder:
            archive = f"{folder}/files.tar"
            if not await self.place.pack(inside, archive):
                raise FileNotFoundError(f"{source_dir} is not a folder of the box")
            await anyio.to_thread.run_sync(_extract, archive, str(target_dir))

    def _inside(self, path: str | os.PathLike[str]) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, str(path)))


def _is_in_content(content: mmap.mmap, secret: str) -> bool:
    return content.find(secret.encode()) >= 0


def _pack(paths: dict[str, Path], archive: str) -> None:
    """Files and folders of this machine by their names in the archive, all of user 0."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(archive, "w") as target:
        for name, path in paths.items():
            target.add(path.resolve() if path.is_symlink() and path.is_file() else path, arcname=name, filter=owned)


def _pack_content(folder: Path, archive: str) -> None:
    _pack({path.name: path for path in sorted(folder.iterdir())}, archive)


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def _only_file(archive: str) -> bytes | None:
    with tarfile.open(archive) as source:
        member = source.next()
        content = None if member is None or not member.isreg() else source.extractfile(member)
        if member is None or content is None:
            return None
        if member.size > _MOST_BYTES:
            raise SandboxError(f"{member.name} has {member.size:,} bytes; expected at most {_MOST_BYTES:,}")
        return content.read()


def _extract(archive: str, target: str) -> None:
    """Extract below the archive's only member at the top."""
    with tarfile.open(archive) as source:
        for member in source:
            _, _, name = member.name.removeprefix("./").partition("/")
            deep = name.count("/") >= _DEEPEST or len(os.fsencode(f"{target}/{name}")) >= _LONGEST_PATH
            if not name or deep:
                continue
            member.name = name
            if member.islnk():
                member.linkname = member.linkname.removeprefix("./").partition("/")[2]
            with contextlib.suppress(tarfile.FilterError, KeyError):
                source.extract(member, target, filter="data")
