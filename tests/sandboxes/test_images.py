"""Unpacked images: keys, the store, and what buildah builds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import Image, ImageSandbox, SandboxError, build_image, load_image, named_image, opened
from rollouts.sandboxes.images import context_key
from tests.sandboxes.engine import BASE

BASE_NAME = "localhost/rollouts-test-base:1"


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "a").write_text("other"),
        lambda folder: (folder / "a").rename(folder / "c"),
        lambda folder: (folder / "a").chmod(0o755),
        lambda folder: (folder / "sub/new").write_text(""),
        lambda folder: (folder / "sub/empty").mkdir(),
        lambda folder: (folder / "link").unlink(),
    ],
)
def test_another_content_has_another_key(tmp_path: Path, change: Any) -> None:
    """A name, a content, the right to execute, a new file, an empty folder, a link; a time changes nothing."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_text("text")
    (tmp_path / "a").chmod(0o644)
    (tmp_path / "link").symlink_to("/anywhere")
    before = context_key(tmp_path)
    os.utime(tmp_path / "a", (1, 1))
    assert context_key(tmp_path) == before
    assert len(before) == 32
    change(tmp_path)
    assert context_key(tmp_path) != before
    assert context_key(tmp_path) != context_key(tmp_path, "agent 1.0") != context_key(tmp_path, "agent", "1.0")


def test_a_folder_is_an_image(tmp_path: Path) -> None:
    """Without variables, as root, in ``/``; one of the store has its configuration."""
    assert load_image(tmp_path) == Image(str(tmp_path))
    assert load_image(tmp_path).variables["PATH"].startswith("/usr/local/sbin:")
    (tmp_path / "root").mkdir()
    (tmp_path / "image.json").write_text('{"env": {"PATH": "/x"}, "workdir": "/app", "user": "bob"}')
    assert load_image(tmp_path) == Image(str(tmp_path / "root"), {"PATH": "/x"}, "/app", "bob")
    (tmp_path / "image.json").write_text('{"env": 3}')
    with pytest.raises(ConfigError, match=r"image\.json: got .*; expected the configuration of an image"):
        load_image(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"roots": []}, r"Image.roots: got \(\); expected at least one folder"),
        ({"roots": ["usr"]}, "Image.roots: got 'usr'; expected absolute paths"),
        ({"roots": "/usr", "env": {"A": 1}}, "Image.env: got {'A': 1}; expected strings by name"),
        ({"roots": "/usr", "workdir": "app"}, "Image.workdir: got 'app'; expected an absolute path"),
        ({"roots": "/usr", "user": ""}, "Image.user: got ''; expected a user"),
    ],
)
def test_a_bad_image_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        Image(**arguments)


async def test_a_folder_without_a_dockerfile_is_refused(tmp_path: Path) -> None:
    """Before buildah is asked."""
    with pytest.raises(ConfigError, match=r"build_image\(context\): got .*; expected a folder with Dockerfile"):
        await build_image(tmp_path, tmp_path / "store")


# -- buildah ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    """An image by name, without a registry."""
    if not request.config.getoption("--containers") or not BASE.is_file():
        pytest.skip("scripts/test --containers runs it")
    dockerfile = f"FROM scratch\nADD {BASE.name} /\n"
    line = ["buildah", "build", "--isolation", "chroot", "--quiet", "--tag", BASE_NAME, "--file", "-", str(BASE.parent)]
    subprocess.run(line, input=dockerfile, text=True, check=True, capture_output=True)
    yield BASE_NAME
    subprocess.run(["buildah", "rmi", "--force", BASE_NAME], check=False, capture_output=True)


@pytest.fixture
def context(base: str, tmp_path: Path) -> Path:
    """A task's folder: two stages, an argument, variables, a folder, a user."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "data.txt").write_text("data\n")
    (folder / "Dockerfile").write_text(
        f"FROM {base} AS made\nRUN echo made > /made\n"
        f"FROM {base}\nARG GREETING=hello\nENV GREETING=$GREETING BOTH='b c'\nWORKDIR /app\n"
        "COPY --from=made /made /made\nCOPY data.txt /app/\nRUN useradd -m bob && chown bob /app/data.txt\nUSER bob\n"
    )
    return folder


@pytest.mark.containers
async def test_an_image_is_built_once_and_opened(context: Path, tmp_path: Path) -> None:
    """With what its Dockerfile says; the second time it is loaded, and started within a second."""
    store = tmp_path / "store"
    image = await build_image(context, store, arguments={"GREETING": "hi"})
    assert (image.workdir, image.user, image.env["BOTH"]) == ("/app", "bob", "b c")
    [folder] = store.iterdir()
    assert folder.name == context_key(context, "Dockerfile", "GREETING=hi")
    assert folder.stat().st_mode & 0o777 == 0o700, "another user could run its set-user programs"
    began = anyio.current_time()
    assert await build_image(context, store, arguments={"GREETING": "hi"}) == image
    async with opened(ImageSandbox(image)) as box:
        assert anyio.current_time() - began < 1.0
        script = 'id -un; pwd; echo "$GREETING|$HOME"; cat /made; stat -c %U data.txt'
        end = await box.run(["sh", "-c", script], seconds=20)
        assert end.stdout.split() == ["bob", "/app", "hi|/home/bob", "made", "bob"]
        end = await box.exec(["sh", "-c", "apt-get --version && dpkg -l | wc -l"], user="root")
        assert end.code == 0


@pytest.mark.containers
async def test_a_build_that_fails_or_is_cancelled_leaves_nothing(context: Path, tmp_path: Path) -> None:
    """The error has the end of what buildah wrote; the store has no part of an image."""
    store, dockerfile = tmp_path / "store", context / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN echo no such thing >&2; exit 7\n")
    with pytest.raises(SandboxError, match=r"(?s)buildah build: exit code \d+: .*no such thing"):
        await build_image(context, store)
    dockerfile.write_text(dockerfile.read_text().replace("exit 7", "sleep 60"))
    with pytest.raises(SandboxError, match="buildah build: not done within 3 s"):
        await build_image(context, store, seconds=3)
    dockerfile.write_text("FROM localhost/not-there:1\n")
    with pytest.raises(SandboxError, match="not-there"):
        await build_image(context, store)
    assert [*store.iterdir()] == []


@pytest.mark.containers
async def test_builds_of_one_image_at_once_are_one_image(context: Path, tmp_path: Path) -> None:
    """The first to be complete is kept."""
    found: list[Image] = []

    async def build() -> None:
        found.append(await build_image(context, tmp_path / "store"))

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(build)
    assert found[0] == found[1]
    assert len([*(tmp_path / "store").iterdir()]) == 1


@pytest.mark.containers
async def test_an_image_is_unpacked_by_name(base: str, tmp_path: Path) -> None:
    """An image that buildah has; a missing one is not pulled."""
    image = await named_image(base, tmp_path)
    assert await named_image(base, tmp_path) == image
    async with opened(ImageSandbox(image)) as box:
        assert (await box.exec(["cat", "/etc/debian_version"])).code == 0
    with pytest.raises(SandboxError, match="buildah inspect: exit code"):
        await named_image("localhost/not-there:1", tmp_path)
