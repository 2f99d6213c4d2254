"""Runs SGLang's server without a GPU: ``python scripts/servers/sglang_on_cpu.py --model-path DIR ...``

SGLang imports ``sgl_kernel`` and torchvision at its start, and calls neither for a text model on the CPU. The wheel of
``sgl_kernel`` needs CUDA, and PyPI's torchvision registers its operators only with a torch that has CUDA. So this
module replaces the one by functions that raise, and declares two operators of the other. SGLang's child processes
import their main module, which is this one, so that both hold there too. With adapters, SGLang pins host memory for
copies to a GPU (0.5.23, lora/layers.py), which torch refuses without one: here no memory is pinned.

It runs in the environment of SGLang, and imports nothing of this package.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

KERNEL_VERSION = "0.4.10"
"""The version that SGLang 0.5.23 expects."""
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # its operators last as long as this object


class _Kernels(types.ModuleType):
    """``sgl_kernel`` without a kernel."""

    __version__ = KERNEL_VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> Any:
            raise RuntimeError(f"sgl_kernel.{name} was called; the CPU path of SGLang needs no kernel")

        return missing


def _unpinned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def created(*values: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return create(*values, **options)

    return created


def _as_it_is(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def install() -> None:
    """Replace what this machine cannot load."""
    kernels = _Kernels("sgl_kernel")
    kernels.__path__ = []
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    sys.modules["sgl_kernel"] = kernels
    for schema in _SCHEMAS:
        _LIBRARY.define(schema)
    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]


install()

if __name__ == "__main__":
    # Imported, and not run as the main module: the child processes import the main module, which must be this one.
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
