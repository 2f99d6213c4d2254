"""scripts/install where PyTorch's index of CPU builds cannot be reached: the wheel that it chooses."""

from __future__ import annotations

from typing import Any

import pytest
from pip._vendor.packaging.tags import Tag

from scripts.servers.torch_wheel import chosen

TAGS = frozenset({Tag("cp311", "cp311", "manylinux_2_28_x86_64")})


def a_file(version: str, size: int | None, python: str = "cp311", **fields: Any) -> dict[str, Any]:
    name = f"torch-{version}-{python}-{python}-manylinux_2_28_x86_64.whl"
    return {"filename": name, "size": size, "yanked": False, **fields}


CUDA = a_file("2.13.0", 530_000_000)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([CUDA], ("2.13.0", 530_000_000)),
        ([CUDA, a_file("2.6.0+cpu", 178_000_000), a_file("2.9.1+cpu", 185_000_000)], ("2.9.1+cpu", 185_000_000)),
        ([CUDA, a_file("2.5.0+cpu", 170_000_000)], ("2.13.0", 530_000_000)),
        ([CUDA, a_file("2.9.1+cpu", 185_000_000, python="cp314")], ("2.13.0", 530_000_000)),
        ([CUDA, a_file("2.9.1+cpu", 185_000_000, yanked="broken")], ("2.13.0", 530_000_000)),
        ([{"filename": "torch-2.13.0.tar.gz", "size": 1}], None),
        ([a_file("2.13.0", None)], None),
    ],
    ids=["cuda only", "the newest cpu build", "too old", "another python", "yanked", "a source", "no size"],
)
def test_a_cpu_build_is_chosen_where_the_index_has_one(files: list[dict[str, Any]], expected: Any) -> None:
    """From 2.6 on, for this interpreter, not yanked; otherwise the tested version, with its size."""
    assert chosen(files, "2.13.0", TAGS) == expected
