"""Grading: from the box in which an agent has worked to a verdict, on one of four rungs.

Invariants, for the rungs ``separate`` and ``carry``: a verdict comes from files that were made after the last process
of the agent had ended, by tools that the agent could not write: those of a fresh box, in which only folders are the
agent's. On the rung ``kill`` the tools are those of the agent's box; on ``keep`` its processes live, too. On every rung
the tests come from the task, the reward files are made by them, and are read without a program of the box.

This module knows no model and no sample, and does not choose the rung.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import posixpath
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.errors import EnvironmentFailure
from rollouts.harbor.schema import ArtifactConfig, HealthcheckConfig
from rollouts.harbor.tasks import HarborTask, TaskFile
from rollouts.harbor.verdict import NoVerdict, Rung, Verdict, no_verdict, parse_rewards, reward_in
from rollouts.sandboxes import Exit, RunningSandbox, Sandbox, SandboxError, opened
from rollouts.sandboxes.archives import LATEST
from rollouts.sandboxes.base import log_close_failure
from rollouts.sandboxes.image import ImageSandbox
from rollouts.sandboxes.leftovers import Folders

__all__ = [
    "FOLDERS",
    "Box",
    "box_in",
    "fill",
    "folders_again",
    "grade",
    "healthy",
    "is_in",
    "new_folders",
    "open_box",
    "run_solution",
    "sanitize",
    "upload",
    "way_to",
]

AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS = "/logs/agent", "/logs/verifier", "/logs/artifacts"
TESTS, SOLUTION = "/tests", "/solution"
FOLDERS = Folders("harbor")
"""Temporary folders of this machine; those of a killed process are removed by the next."""
_SETUP_SECONDS = 120.0
_TAIL = 4000
_MOST_BYTES = 1 << 20
"""Of a reward file, and of the end of the output of the tests."""


@attrs.frozen
class Box:
    """An open sandbox of a task, with the folder and the users of its commands."""

    place: RunningSandbox
    workdir: str
    user: str | None = None
    """The user of commands that name none; ``None`` for that of the sandbox."""
    root: str | None = None
    """The user of set-up commands; ``None`` for that of the sandbox."""

    async def shell(
        self,
        command: str,
        *,
        seconds: float = _SETUP_SECONDS,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
    ) -> Exit:
        """Run a command line with bash, in the working folder."""
        return await self.place.exec(
            ["bash", "-c", command],
            env=env,
            seconds=seconds,
            cwd=cwd or self.workdir,
            user=self.user if user is None else str(user),
        )

    async def must(self, command: str) -> None:
        """Run a set-up command as root.

        Raises:
            SandboxError: its exit code is not 0.
        """
        end = await self.shell(command, user=self.root, cwd="/")
        if end.code != 0:
            raise SandboxError(f"{command!r} ended with {end.code}: {end.stderr.strip()[-_TAIL:]}; expected 0")


Opener = Callable[[], contextlib.AbstractAsyncContextManager[Box]]
"""Opens a fresh box; called on the rungs ``separate`` and ``carry``."""


def box_in(place: RunningSandbox, kind: Sandbox, workdir: str | None) -> Box:
    """The box in an open sandbox of a kind; its variables are those of the kind.

    Args:
        workdir: the folder of its commands; by default the workspace of the sandbox.
    """
    has_users = "users" in kind.abilities
    # Commands of set-up and scoring run as the image's user, also where the agent is another one.
    user = kind.image.user if isinstance(kind, ImageSandbox) and has_users else None
    return Box(place, workdir or place.workspace, user, "root" if has_users else None)


@contextlib.asynccontextmanager
async def open_box(kind: Sandbox, workdir: str | None, *, seconds: float) -> AsyncIterator[Box]:
    """Open a box of a kind within a deadline, and close it in any case; see :func:`box_in`.

    A box that cannot be closed is logged: it costs no verdict.
    """
    async with contextlib.AsyncExitStack() as stack:
        with anyio.fail_after(seconds):
            place = await stack.enter_async_context(opened(kind, log_close_failure))
        yield box_in(place, kind, workdir)


# -- before the agent -------------------------------------------------------------------------------------------------


async def fill(task: HarborTask, box: Box) -> None:
    """Prepare a fresh box: the folders of the logs, and the loose files of the task.

    Raises:
        SandboxError: the box refuses them.
    """
    await box.must(f"mkdir -p {AGENT_LOGS} {VERIFIER_LOGS} {ARTIFACTS} && chmod 777 /logs {AGENT_LOGS} {ARTIFACTS}")
    await box.must(f"mkdir -p {_quoted(box.workdir)}")
    await upload(box, task.loose_files(), box.workdir)


async def healthy(box: Box, check: HealthcheckConfig | None) -> None:
    """Wait until the healthcheck of a task succeeds.

    Raises:
        EnvironmentFailure: it failed as often in a row as it may.
    """
    if check is None:
        return
    began, failures = anyio.current_time(), 0
    while (end := await box.shell(check.command, seconds=check.timeout_sec)).code != 0:
        if anyio.current_time() < began + check.start_period_sec:
            await anyio.sleep(check.start_interval_sec)
            continue
        failures += 1
        if failures >= check.retries:
            raise EnvironmentFailure(f"the healthcheck {check.command!r} failed: {end.stderr.strip()[-_TAIL:]}")
        await anyio.sleep(check.interval_sec)


async def run_solution(task: HarborTask, box: Box, env: Mapping[str, str], *, seconds: float) -> Exit:
    """Run ``solve.sh`` as the task's oracle does."""
    await upload(box, task.solution(), SOLUTION)
    await box.must(f"chmod +x {SOLUTION}/solve.sh")
    variables = {**env, "DEBIAN_FRONTEND": "noninteractive"}
    command = f"({SOLUTION}/solve.sh) > {AGENT_LOGS}/oracle.txt 2>&1"
    return await box.shell(command, seconds=seconds, env=variables, user=task.config.agent.user)


async def upload(box: Box, files: Sequence[TaskFile], folder: str) -> None:
    """Write files below a folder of a box, as root, without a program of the box."""
    if not files:
        return

    def pack(path: str) -> None:
        with tarfile.open(path, "w") as archive:
            for file in files:
                member = tarfile.TarInfo(file.path)
                member.size, member.mode = len(file.data), file.mode
                archive.addfile(member, io.BytesIO(file.data))

    with FOLDERS.temporary() as name:
        path = f"{name}/files.tar"
        await anyio.to_thread.run_sync(pack, path)
        await box.place.unpack(path, folder)


# -- after the agent --------------------------------------------------------------------------------------------------


async def grade(
    task: HarborTask,
    box: Box,
    rung: Rung,
    fresh: Opener,
    *,
    env: Mapping[str, str] | None = None,
    reward_key: str | None = None,
) -> Verdict:
    """Grade the work in a box.

    Args:
        box: the agent's; its commands have ended.
        fresh: opens the box of the rungs ``separate`` and ``carry``: the verifier's, or one of the agent's kind.
        env: variables of the tests.
        reward_key: the key of the reward that is trained; by default the only one, or ``reward``.

    Raises:
        NoVerdict: there is no verdict; the message has the reason.
    """
    try:
        collect_failures = await _collect(task, box)
        if rung == "keep":
            return await _tested(task, box, rung, env, reward_key, collect_failures)
        await box.place.kill_all()
        if rung == "kill":
            await box.must(new_folders(box.workdir))
            return await _tested(task, box, rung, env, reward_key, collect_failures)
        with FOLDERS.temporary() as folder:
            packed = await _packed(task, box, rung, Path(folder))
            async with fresh() as other:
                await fill(task, other)
                ways = [await way_to(other.place, posixpath.dirname(source), other.root) for _, source in packed]
                for (archive, source), way in zip(packed, ways, strict=True):
                    parent, name = posixpath.split(source)
                    await way_to(other.place, parent, other.root, way)
                    if source == other.workdir:
                        await other.must(f"find {_quoted(source)} -mindepth 1 -delete")
                    elif name:
                        await other.must(f"rm -rf {_quoted(source)}")
                    await other.place.unpack(archive, parent)
                await other.must(folders_again(other.workdir))
                return await _tested(task, other, rung, env, reward_key, collect_failures)
    except NoVerdict:
        raise
    except (SandboxError, OSError) as error:  # also where the disk of this machine is full
        raise no_verdict("box", task.name, rung, str(error)) from error


def new_folders(workdir: str) -> str:
    """The command that makes new folders of the tests, after those of :func:`folders_again`."""
    return f"{folders_again(workdir)} && rm -rf {TESTS} {VERIFIER_LOGS} && mkdir -p {TESTS} {VERIFIER_LOGS}"


def folders_again(workdir: str) -> str:
    """The command that restores folders which an agent removed or replaced by files: grading needs them."""
    folders = f"/logs {_quoted(workdir)}"
    way = f'for p in {folders}; do until [ -d "$p" ]; do rm -rf "$p"; p=${{p%/*}}; p=${{p:-/}}; done; done'
    return f"{way}; mkdir -p {folders}"


async def _collect(task: HarborTask, box: Box) -> tuple[str, ...]:
    """Run the hooks between agent and verifier; a failure is recorded, as in Harbor."""
    failures = []
    for hook in task.config.verifier.collect:
        end = await box.shell(hook.command, seconds=hook.timeout_sec, user=hook.user)
        if end.code != 0:
            failures.append(f"{hook.command}: exit code {end.code}: {end.stderr.strip()[-_TAIL:]}")
    return tuple(failures)


async def _packed(task: HarborTask, box: Box, rung: Rung, folder: Path) -> list[tuple[str, str]]:
    """Archives of the folders that the fresh box gets, with their paths in the box."""
    wanted = list(task.config.artifacts)
    if not any(artifact.source.rstrip("/") == ARTIFACTS for artifact in wanted):
        wanted.insert(0, ArtifactConfig(ARTIFACTS))
    if rung == "carry":
        if box.workdir == "/":
            raise no_verdict("box", task.name, rung, "the working folder is /, so that all of it is the agent's")
        wanted.insert(0, ArtifactConfig(box.workdir))
    packed: list[tuple[str, str]] = []
    whole: list[str] = []
    for number, artifact in enumerate(wanted):
        source = posixpath.normpath(posixpath.join(box.workdir, artifact.source))
        if source == "/":
            raise no_verdict("box", task.name, rung, "the artifact / is the whole box of the agent")
        if any(is_in(source, above) for above in whole):
            continue  # it is there already
        archive = str(folder / f"{number}.tar")
        if await box.place.pack(source, archive):
            clean = str(folder / f"{number}-clean.tar")
            is_work = source == box.workdir
            await anyio.to_thread.run_sync(
                sanitize, archive, clean, source, artifact.exclude, rung == "separate", is_work
            )
            packed.append((clean, source))
            if not artifact.exclude:
                whole.append(source)
    return packed


async def way_to(place: RunningSandbox, folder: str, user: str | None, before: str | None = None) -> str:
    """The path of the nearest folder that is there, and where it leads.

    Args:
        user: the user that looks; ``None`` for that of the sandbox.
        before: the answer before anything of an agent was unpacked.

    Raises:
        SandboxError: it leads somewhere else, and not as before: a link of the agent is in the way.
    """
    look = f'p={_quoted(folder)}; until cd -P "$p"; do p=${{p%/*}}; p=${{p:-/}}; done 2>/dev/null; echo "$p"; pwd -P'
    way = (await place.exec(["bash", "-c", look], seconds=_SETUP_SECONDS, cwd="/", user=user)).stdout
    if before is not None and way != before and len(set(way.splitlines())) != 1:
        raise SandboxError(f"{folder} leads through a link of the agent: {way.split()}")
    return way


def sanitize(
    archive: str, clean: str, source: str, exclude: Sequence[str], closed: bool, is_work: bool = False
) -> None:
    """Copy an archive without devices, pipes, set-user bits, excluded members, and links to the tests.

    Args:
        source: the path in the box of the archive's member at the top.
        exclude: patterns as of ``tar --exclude``: of a member, or of its last parts.
        closed: whether all links that leave the archive are left out.
        is_work: whether it is the working folder: of anything else in its place, nothing is copied.
    """
    kept: set[str] = set()
    excluded: set[str] = set()
    is_excluded = _excluding(exclude)
    above = posixpath.dirname(source)
    with tarfile.open(archive) as found, tarfile.open(clean, "w") as target:
        for member in found:
            name = posixpath.normpath(member.name)
            if is_work and not kept and not member.isdir():
                return
            if posixpath.dirname(name) in excluded or is_excluded(name):  # a folder is before its members
                excluded.add(name)
                continue
            if not (member.isreg() or member.isdir() or member.islnk() or member.issym()):
                continue
            if member.islnk() and posixpath.normpath(member.linkname) not in kept:
                continue
            if member.issym() and not _is_harmless(posixpath.join(above, name), member.linkname, source, closed):
                continue
            member.mode &= 0o777
            member.mtime = min(max(member.mtime, 0), LATEST)
            kept.add(name)
            target.addfile(member, found.extractfile(member) if member.isreg() else None)


def _is_harmless(path: str, link: str, source: str, closed: bool) -> bool:
    """Whether a link cannot show the tests, their results or the solution under the name of the agent's work.

    Links are judged one by one and by their text: a link to a folder above, or out of a folder and into
    another, would make the text of the next one meaningless.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    if ".." in parts[next((number for number, part in enumerate(parts) if part != ".."), len(parts)) :]:
        return False
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if closed:
        return target == source or target.startswith(f"{source}/")
    hidden = (TESTS, SOLUTION, "/logs", "/proc")
    return not any(is_in(target, folder) or is_in(folder, target) for folder in hidden)


def is_in(path: str, folder: str) -> bool:
    return path == folder or folder == "/" or path.startswith(f"{folder}/")


def _excluding(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name, or its last parts, have a pattern."""
    if not patterns:
        return lambda name: False
    texts = [pattern.rstrip("/") for pattern in patterns]
    # ``*`` has slashes, too: a pattern that begins with it has the last parts of a name only if it has the whole.
    found = re.compile("|".join(("" if text[:1] == "*" else "(?s:.*/)?") + fnmatch.translate(text) for text in texts))
    return lambda name: found.match(name) is not None


async def _tested(
    task: HarborTask,
    box: Box,
    rung: Rung,
    env: Mapping[str, str] | None,
    reward_key: str | None,
    collect_failures: tuple[str, ...],
) -> Verdict:
    """Run the tests in a box, and read their verdict."""
    verifier, separate = task.config.verifier, task.verifier_place()
    files = [f"{VERIFIER_LOGS}/{name}" for name in ("reward.json", "reward.txt", "test-stdout.txt")]
    await box.must(f"mkdir -p {VERIFIER_LOGS} && rm -rf {' '.join(files)} && chmod 777 {VERIFIER_LOGS}")
    for path in files[:2]:  # a tool of the box may have done nothing
        if await _regular(task, box, rung, path) is not None:
            raise no_verdict("box", task.name, rung, f"{path} cannot be removed")
    if not (rung == "separate" and separate is not None and separate.bundled_tests):
        await upload(box, task.tests(), TESTS)
    await box.must(f"chmod +x {TESTS}/test.sh")
    command = f"({TESTS}/test.sh) > {files[2]} 2>&1"
    end = await box.shell(command, seconds=verifier.timeout_sec, env=env, user=verifier.user)
    if rung != "keep":
        await box.place.kill_all()
    output = ""
    with contextlib.suppress(SandboxError):  # it fills the disk, or a process changes it
        output = await _end_of(box, files[2])
    if end.timed_out:
        raise no_verdict("timeout", task.name, rung, f"{verifier.timeout_sec:g} s; {output}")
    found = [await _regular(task, box, rung, path) for path in files[:2]]
    rewards = parse_rewards(*found)
    if isinstance(rewards, str):
        raise no_verdict(rewards, task.name, rung, output)
    reward = reward_in(rewards, reward_key)
    if reward is None:
        raise no_verdict("no_reward", task.name, rung, f"{sorted(rewards)}")
    return Verdict(rewards, reward, rung, output, collect_failures)


async def _regular(task: HarborTask, box: Box, rung: Rung, path: str) -> bytes | None:
    """The content of a file, ``None`` if nothing is there.

    Raises:
        NoVerdict: something else is there, or a file that is too large.
    """
    with FOLDERS.temporary() as folder:
        archive = f"{folder}/file.tar"
        if not await box.place.pack(path, archive):
            return None
        with tarfile.open(archive) as packed:
            member = packed.next()
            content = None if member is None or not member.isreg() else packed.extractfile(member)
            if content is None:
                raise no_verdict("not_a_file", task.name, rung, path)
            data = content.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise no_verdict("unreadable", task.name, rung, f"{path} has more than {_MOST_BYTES:,} bytes")
            return data


async def _end_of(box: Box, path: str) -> str:
    """The end of a file; nothing where it is missing or no regular file."""
    with FOLDERS.temporary() as folder:
        archive = f"{folder}/file.tar"
        if not await box.place.pack(path, archive):
            return ""
        with tarfile.open(archive) as packed:
            member = packed.next()
            content = None if member is None or not member.isreg() else packed.extractfile(member)
            if member is None or content is None:
                return ""
            content.seek(max(0, member.size - _MOST_BYTES))
            return content.read().decode(errors="replace")[-_TAIL:]


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"
