"""The kind ``process``: separate folders; it says that it contains nothing."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import ProcessSandbox, SandboxError, opened

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the tests run sh")


def test_it_says_that_it_contains_nothing() -> None:
    """A recipe that requires a contained network is refused."""
    containment = ProcessSandbox().containment()
    assert sorted(containment.enforced) == ["descriptors", "environment", "output", "seconds"]
    with pytest.raises(ConfigError, match=r"does not enforce network \(a process with all rights"):
        containment.check(("network",))


async def test_the_server_is_reached_on_loopback() -> None:
    """At the server's port: the sandbox has no other network."""
    async with opened(ProcessSandbox()) as sandbox:
        assert (sandbox.listener, sandbox.url_inside(81)) == (None, "http://127.0.0.1:81")
        with pytest.raises(ConfigError, match="port: got None; expected the server's port"):
            sandbox.url_inside()


async def test_a_path_outside_is_refused(tmp_path: Path) -> None:
    """Also behind a link that the program planted."""
    (tmp_path / "secret").write_text("canary")
    async with opened(ProcessSandbox()) as sandbox:
        with pytest.raises(ConfigError, match=r"path: got '/etc/passwd'; expected a path in "):
            await sandbox.read("/etc/passwd")
        await sandbox.exec(["ln", "-s", str(tmp_path), "link"])
        await sandbox.exec(["ln", "-s", str(tmp_path / "secret"), "file"])
        assert [await sandbox.read(path) for path in ("link/secret", "file")] == [None, None]
        with pytest.raises(SandboxError, match="path: got 'link/new', below a link to a folder outside"):
            await sandbox.write("link/new", b"")
        await sandbox.write("file", b"replaced")
        assert await sandbox.read("file") == b"replaced"
    assert (tmp_path / "secret").read_text() == "canary"
    assert not _exists(tmp_path / "new")


async def test_what_cannot_be_written_is_named() -> None:
    """A folder where the file should be."""
    async with opened(ProcessSandbox()) as sandbox:
        await sandbox.exec(["mkdir", "a"])
        with pytest.raises(SandboxError, match="path: got 'a', which cannot be written: Is a directory"):
            await sandbox.write("a", b"")


async def test_read_only_folders_are_deleted() -> None:
    """Whatever rights a program took from its files."""
    async with opened(ProcessSandbox()) as sandbox:
        await sandbox.exec(["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 500 a/b a"])
    assert not _exists(Path(sandbox.workspace))


@pytest.mark.parametrize("levels", [1500, 4000])
async def test_deeply_nested_folders_are_deleted(levels: int) -> None:
    """Deeper than the interpreter's stack, and than the longest path."""
    code = f"import os\nfor _ in range({levels}): os.mkdir('d'); os.chdir('d')"
    async with opened(ProcessSandbox()) as sandbox:
        assert (await sandbox.exec([sys.executable, "-I", "-S", "-c", code])).code == 0
    assert not _exists(Path(sandbox.workspace))


async def test_close_changes_nothing_outside() -> None:
    """Neither the rights of the folder above, nor what a planted link leads to."""
    above = Path(tempfile.gettempdir())
    before = _mode(above)
    async with opened(ProcessSandbox()) as sandbox:
        await sandbox.exec(["ln", "-s", str(above), "link"])
        await sandbox.close()
    assert _mode(above) == before


async def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    """A program can replace the folder of its sandbox: what the link leads to is not deleted, and the error says so."""
    (tmp_path / "outside").mkdir(mode=0o755)
    (tmp_path / "outside" / "canary").write_text("x")
    sandbox = await ProcessSandbox().open()
    folder = Path(sandbox.workspace).parent
    script = 'mv "$1" "$2/moved"; ln -s "$2/outside" "$1"'
    assert (await sandbox.exec(["sh", "-c", script, "sh", str(folder), str(tmp_path)])).code == 0
    with pytest.raises(SandboxError, match="cannot be deleted: it is a link"):
        await sandbox.close()
    assert (_mode(tmp_path / "outside") & 0o777, _exists(tmp_path / "outside" / "canary")) == (0o755, True)
    _unlink(folder)


def _exists(path: Path) -> bool:
    return path.exists()


def _mode(path: Path) -> int:
    return path.stat().st_mode


def _unlink(path: Path) -> None:
    path.unlink()
