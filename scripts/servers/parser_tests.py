"""Download vLLM's own tests of its tool parsers, for ``tests/integration/test_vllm_parsers.py``.

They come from the source distribution of a fixed version, checked by its SHA-256, and go to ``parser-tests/vllm`` in
the environment. Nothing of them is installed or committed. Run by ``scripts/test --extras``.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

VERSION = "0.33.0"
INDEX = "https://pypi.org/pypi/vllm/json"
WANTED = ("tests/__init__.py", "tests/tool_parsers/", "tests/parser/")


def main() -> int:
    folder = Path(sys.prefix) / "parser-tests" / "vllm"
    stamp = folder / VERSION
    if stamp.exists():
        return 0
    with urllib.request.urlopen(INDEX, timeout=120) as answer:
        files = json.load(answer)["releases"][VERSION]
    source = next(file for file in files if file["packagetype"] == "sdist")
    with urllib.request.urlopen(urllib.parse.urljoin(INDEX, source["url"]), timeout=600) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != source["digests"]["sha256"]:
        print(
            f"scripts/test --extras: {source['filename']} has another SHA-256 than the index gives",
            file=sys.stderr,
        )
        return 1
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(WANTED) and ".." not in path.split("/"):
                content = archive.extractfile(member)
                assert content is not None
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content.read())
    (folder / "tests" / "__init__.py").touch()
    stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
