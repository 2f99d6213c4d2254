"""LoRA adapters of the served model: each row of a forward pass is computed with one of them, or with none.

Invariant: a module's output for a row is that of the base model plus ``scale * B(A(x))`` of the row's adapter. An
adapter's tensors never change, and a request keeps its adapter object, so that its name may be reused while it runs.
Only the engine thread calls :meth:`Adapters.rows` and the hooks.

This module does not know requests or names.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from rollouts.base.peft import PeftAdapter, read_adapter
from rollouts.errors import ConfigError

__all__ = ["Adapter", "Adapters", "load_adapter"]


@attrs.frozen(eq=False)
class Adapter:
    """An adapter in memory."""

    folder: Path
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """For each module: A, ``(rank, in)``, and B times the scale, ``(out, rank)``."""
    key: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    """Of its prefix cache: another one each time that a folder is loaded."""

    def change(self, module: str, inputs: torch.Tensor) -> torch.Tensor:
        """The change of a module's output, for inputs ``(…, in)``."""
        right, left = self.factors[module]
        return (inputs @ right.T) @ left.T


def load_adapter(folder: Path, model: Any) -> Adapter:
    """Load an adapter for a model, in the model's dtype and on its device.

    Raises:
        ConfigError: the folder is not plain LoRA, or a module of it is not a linear layer of the model of these shapes.
    """
    read = read_adapter(folder)
    tensors = load_file(read.tensors, device=str(model.device))
    modules = dict(model.named_modules())
    return Adapter(folder, {name: _factors(read, name, tensors, modules.get(name)) for name in read.modules})


def _factors(
    read: PeftAdapter, name: str, tensors: Mapping[str, torch.Tensor], module: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    right, left = (tensors[tensor] for tensor in read.names_of(name))
    if not isinstance(module, torch.nn.Linear):
        got = "no module" if module is None else type(module).__name__
        raise ConfigError.of(f"lora, {read.folder}, {name}", got, "a linear layer of the served model")
    if (left.shape[0], right.shape[1]) != tuple(module.weight.shape):
        got = f"A and B of ({left.shape[0]}, {right.shape[1]})"
        raise ConfigError.of(f"lora, {read.folder}, {name}", got, f"{tuple(module.weight.shape)}, as the served model")
    dtype = module.weight.dtype
    return right.to(dtype), (left.float() * read.scale).to(dtype)


class Adapters:
    """Adds the changes of adapters to the linear layers of one model."""

    def __init__(self) -> None:
        self._hooked: dict[str, Any] = {}
        """The modules with a hook, by name."""
        self._rows: Sequence[tuple[Adapter, torch.Tensor | None]] = ()
        """The adapters of the current pass with the indices of their rows; ``None`` for all rows."""

    def __repr__(self) -> str:
        return f"<Adapters of {len(self._hooked)} modules>"

    @contextlib.contextmanager
    def rows(self, model: Any, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Compute the rows of the passes inside with these adapters."""
        used = {adapter for adapter in adapters if adapter is not None}
        self._hook(model, used)
        if len(used) == 1 and None not in adapters:
            self._rows = [(used.pop(), None)]
        else:
            self._rows = [
                (adapter, torch.tensor([at for at, one in enumerate(adapters) if one is adapter], device=model.device))
                for adapter in used
            ]
        try:
            yield
        finally:
            self._rows = ()

    def _hook(self, model: Any, adapters: set[Adapter]) -> None:
        """Hook the modules that these adapters change; a replaced model has other modules."""
        for adapter in adapters:
            for name in adapter.factors:
                module = model.get_submodule(name)
                if self._hooked.get(name) is not module:
                    module.register_forward_hook(functools.partial(self._add, name))
                    self._hooked[name] = module

    def _add(self, name: str, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        for adapter, rows in self._rows:
            if name not in adapter.factors:
                continue
            if rows is None:
                output = output + adapter.change(name, inputs[0])
            else:
                output = output.index_add(0, rows, adapter.change(name, inputs[0][rows]))
        return output
