"""Download vLLM's and SGLang's own tests of their tool parsers, for ``tests/integration/test_*_parsers.py``.

vLLM's come from the source distribution of a fixed version. SGLang's distributions hold none: these come from its
repository at a fixed commit, or from a clone of it (``--sglang CLONE``). Each is checked by its SHA-256 and goes to
``parser-tests`` in the environment. Nothing of them is installed or committed. Run by ``scripts/test --extras``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

VERSION = "0.33.0"
INDEX = "https://pypi.org/pypi/vllm/json"
WANTED = ("tests/__init__.py", "tests/tool_parsers/", "tests/parser/")

COMMIT = "0bda0b168ad5bf7311ae639904489a4698a05546"
REPOSITORY = "https://raw.githubusercontent.com/sgl-project/sglang"
_OLD = "test/registered/function_call/test_"
_UNIT = "test/registered/unit/function_call/test_"
DIGESTS = {
    f"{_OLD}kimik2_detector.py": "97a8b356edaf2e89f9a7ca625d2f580e7f206b16721d1b1d9aa9d065cce29f3f",
    f"{_OLD}kimik3_detector.py": "0ca5b7173bc7065e84002adebf71fcb569067cabd560d8c77702814c6aac1592",
    f"{_UNIT}deepseekv4_detector.py": "e1648726ccc5c7a7ebdd279d348e7d8d1c1aebb3dbee3a8dd185f50025763382",
    f"{_UNIT}function_call_parser.py": "ec1a91813cd4bbace54fd45d3416df71975b0849f5e165e9d39d3249569d0616",
    f"{_UNIT}hermes_detector.py": "0c53591f8e2dc46a810eb4394c9685ab0a46c5a5335cfb43c91ce5168cba57fd",
    f"{_UNIT}hunyuan_detector.py": "782ddd25c71dbe8a3c62c62b05a7840cfa4771e5687742ed2fec4ff3f926b529",
    f"{_UNIT}llama32_detector.py": "ad8023e02f046d6216e2edb96b17e2f07affa4094ace247cbdc56dc3bf95c4df",
    f"{_UNIT}minicpm5_detector.py": "c3b7f2961e72928e3b8886e7a44363dd7403e2eeb9738aa4fe716cda2111eb68",
    f"{_UNIT}minimax_m3_detector.py": "b71c424b6d558c3737fe675ee36c15d2a9e349457d82596099c78a66e5e076f7",
    f"{_UNIT}mistral_detector.py": "c221bef392ded955d49c89202109fa12a5411320f05a17269c62168d27f19f8e",
    f"{_UNIT}muse_glimmer_detector.py": "21e5bd568d6d029eca0db7c2e45fe4c1fec13508f205dd5bfaecf2251e13747e",
    f"{_UNIT}poolside_v1_detector.py": "fe2959ab5f34ee56eeee45fdf5aa15badaffe5023d2ae6eea5a180148dfe5eff",
}
"""SGLang's files that parse text, with their SHA-256 at the commit."""


class WrongDigestError(Exception):
    """A file has another SHA-256 than the named one."""


def checked(data: bytes, digest: str, name: str) -> bytes:
    """The data, if it has the digest.

    Raises:
        WrongDigestError: it has another.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise WrongDigestError(f"{name} has another SHA-256 than expected: {digest}")
    return data


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=600) as answer:
        data: bytes = answer.read()
        return data


def download_vllm(folder: Path) -> None:
    files = json.loads(read(INDEX))["releases"][VERSION]
    source = next(file for file in files if file["packagetype"] == "sdist")
    data = checked(read(urllib.parse.urljoin(INDEX, source["url"])), source["digests"]["sha256"], source["filename"])
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(WANTED) and ".." not in path.split("/"):
                content = archive.extractfile(member)
                assert content is not None
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content.read())
    (folder / "tests" / "__init__.py").touch()


def download_sglang(folder: Path, source: str, clone: str | None) -> None:
    files = {}
    for path, digest in DIGESTS.items():
        if clone is None:
            data = read(f"{source}/{COMMIT}/{path}")
        else:
            data = subprocess.run(
                ["git", "-C", clone, "show", f"{COMMIT}:{path}"], check=True, capture_output=True
            ).stdout
        files[path.rpartition("/")[2]] = checked(data, digest, path)
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / "tests" / name).write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.servers.parser_tests", description=__doc__)
    parser.add_argument(
        "--sglang", metavar="CLONE", help="a clone of SGLang that has the commit; else it is downloaded"
    )
    parser.add_argument("--from", dest="source", default=REPOSITORY, help="a mirror of GitHub's raw files of SGLang")
    arguments = parser.parse_args()
    folder = Path(sys.prefix) / "parser-tests"
    vllm, sglang = folder / "vllm" / VERSION, folder / "sglang" / COMMIT
    failed = False
    for name, stamp in (("vllm", vllm), ("sglang", sglang)):
        if stamp.exists():
            continue
        try:
            if name == "vllm":
                download_vllm(stamp.parent)
            else:
                download_sglang(stamp.parent, arguments.source, arguments.sglang)
            stamp.touch()
        except (OSError, WrongDigestError, subprocess.CalledProcessError) as error:
            print(f"scripts/test --extras: no tests of {name}: {error}", file=sys.stderr)
            failed |= isinstance(error, WrongDigestError)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
