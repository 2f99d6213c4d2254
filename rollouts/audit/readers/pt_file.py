"""Files of ``torch.save``, read without torch and without running code of the file.

Invariant: a pickle may call any function that it names. Here each name stands for a function of this module, which
builds a plain value, and a file with any other name is refused with that name. So no class of the file is imported.

The format is that of torch 1.6 and later: an uncompressed zip archive with one pickle and a file for each storage
(torch 2.13, torch/serialization.py: _save).
"""

from __future__ import annotations

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError

__all__ = ["load_plain"]

_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
    "BFloat16Storage": "bfloat16",
}
"""The dtype of each storage class of torch."""
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_KINDS = "biuf"
"""The kinds of dtypes of arrays that are read: numbers."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_LEAST_ENTRIES, _ENTRIES_A_BYTE = 1 << 20, 16
"""Entries of a value of any file, and for each byte of its pickle: samples may share some of their values."""
_MOST_BITS = 4096
"""Python writes integers of up to 14,000 bits as text."""


def load_plain(path: Path) -> Any:
    """The value of a file: plain containers, numbers and text. Tensors and arrays of numpy become arrays of numpy.

    Raises:
        ConfigError: the file cannot be read, is not one of torch.save, or names other code than that of tensors and
            arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if len(names) != 1 or any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ConfigError.of("FILE", str(path), "an archive of torch.save: one data.pkl, not compressed")
            with archive.open(names[0]) as file:
                value = _Unpickler(file, archive, names[0].removesuffix("data.pkl")).load()
            _check_size(value, archive.getinfo(names[0]).file_size)
            return value
    except _Unsafe as error:
        expected = "plain values, tensors and arrays: any other name in a pickle is code that runs when it is loaded"
        raise ConfigError.of("FILE", f"{path}, which names {error}", expected) from error
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle raises any type
        got = f"{path} ({type(error).__name__}: {error})"
        raise ConfigError.of("FILE", got, "a file of torch.save, in its format since torch 1.6") from error


def _check_size(value: Any, file_bytes: int) -> None:
    """Check that a value can be walked and written as text.

    A pickle may name one list any number of times, or inside itself, and may have integers of any number of digits.
    """
    left = _LEAST_ENTRIES + _ENTRIES_A_BYTE * file_bytes
    stack: list[Any] = [[value]]
    while stack:
        entries = stack.pop()
        if isinstance(entries, dict):
            entries = [*entries, *entries.values()]
        left -= len(entries)
        if left < 0:
            raise ValueError(f"more values than a file of {file_bytes} bytes has: lists that are in it many times")
        stack += [entry for entry in entries if isinstance(entry, _CONTAINERS)]
        longest = max((entry.bit_length() for entry in entries if type(entry) is int), default=0)
        if longest > _MOST_BITS:
            raise ValueError(f"an integer of {longest} bits")


class _Unsafe(Exception):
    """A name in the pickle that stands for nothing here."""


class _DType:
    """A dtype of numpy; only its byte order is taken from the file."""

    __slots__ = ("name",)

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        if np.dtype(name).kind not in _KINDS:
            raise _Unsafe(f"an array of dtype {name!r}")
        self.name = np.dtype(name).newbyteorder("<")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] == ">":
            self.name = self.name.newbyteorder(">")


class _Array:
    """An array of numpy, which a pickle first makes empty and then fills."""

    __slots__ = ("value",)
    value: npt.NDArray[Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_column, data = state
        flat = np.frombuffer(data if isinstance(data, bytes) else data.encode("latin1"), dtype.name)
        self.value = flat.reshape(shape, order="F" if by_column else "C")

    def tolist(self) -> Any:
        return self.value.tolist()


_MOST_REPEATED = 1 << 24
"""Elements of a tensor that has some of its storage more than once; a few bytes of a file could claim any number."""


class _Unpickler(pickle.Unpickler):
    """Loads the pickle of an archive; names are methods of this object, so that the file cannot change them."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive, self._folder = archive, folder
        self._storages: dict[str, npt.NDArray[Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The function here that stands for a name of the file."""
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("_codecs", "encode"): self._bytes,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): _DType,
        }
        known |= {(module, "_reconstruct"): self._array for module in _ARRAYS}
        known |= {(module, "scalar"): self._scalar for module in _ARRAYS}
        known |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
        if (module, name) not in known:
            raise _Unsafe(f"{module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """The numbers of a storage, flat."""
        _, dtype, key, _, count = pid
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            if dtype == "bfloat16":  # the upper half of a float32
                wide = np.frombuffer(data, "<u2").astype("<u4") << 16
                self._storages[key] = wide.view("<f4")
            else:
                self._storages[key] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        return self._storages[key][:count]

    def _tensor(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if min((offset, *size, *stride)) < 0 or (0 not in size and last >= len(storage)):
            raise ValueError(f"a tensor of {size} from {offset} in a storage of {len(storage)}")
        if math.prod(size) > max(len(storage), _MOST_REPEATED):
            raise ValueError(f"a tensor of {size}, which repeats a storage of {len(storage)}")
        steps = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)

    def _array(self, *_: Any) -> _Array:
        return _Array()

    def _scalar(self, dtype: _DType, data: Any) -> Any:
        return np.frombuffer(data, dtype.name)[0].item()

    def _bytes(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise _Unsafe(f"the encoding {encoding!r}")
        return text.encode("latin1")
