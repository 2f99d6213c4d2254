"""Which values of slime's samples a checkpoint can have: data whose loading runs no code.

Invariant: the result of :func:`only_plain` can be saved and loaded, and the values that it left out are named. Only
images are converted, to PNG and back. It writes no file.
"""

from __future__ import annotations

import datetime
import decimal
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollouts.dtypes import Image
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, shortened

__all__ = ["SAFE", "check_plain", "only_plain", "restored", "stored"]

_TIMES = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)
SAFE: tuple[type, ...] = (*_TIMES, decimal.Decimal)
"""Types of values that Parquet columns have and torch does not load by itself."""
_PNG = "png"
_LONG = 2**2031  # torch loads integers of up to 255 bytes
_SCALARS = (type(None), bool, int, float, complex, str, bytes, *SAFE)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)


def check_plain(record: Any) -> None:
    """Check that a checkpoint can have every field of slime's sample.

    Raises:
        ConfigError: it names the sample, the first field with another value, and the value.
    """
    entries: dict[str, Any] = record.to_dict()  # its images are saved as PNG, its status and counters as plain data
    media = entries.get("multimodal_inputs")
    if isinstance(media, Mapping):
        entries["multimodal_inputs"] = {name: value for name, value in media.items() if name != "images"}
    for place, value in _others(entries):
        expected = "tensors, arrays and plain data only: a checkpoint cannot have this value"
        raise ConfigError.of(f"slime sample {record.index}.{place}", shortened(value), expected)


def only_plain(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The dict of slime's sample without the values that a checkpoint cannot have, and the places of these."""
    lost = [f"{place} ({type(value).__name__})" for place, value in _others(data)]
    return (_without_others(data) if lost else dict(data)), lost


def _others(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values within ``value`` that are not plain, with their places."""
    if type(value) in _MAPPINGS:
        for name, entry in value.items():
            inside = f"{place}[{name!r}]" if place else str(name)
            yield from _others(name, inside)
            yield from _others(entry, inside)
    elif type(value) in _SEQUENCES:
        for number, entry in enumerate(value):  # most are columns of numbers
            if type(entry) not in _SCALARS or (type(entry) is int and abs(entry) >= _LONG):
                yield from _others(entry, f"{place}[{number}]")
    elif not _is_plain(value):
        yield place, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):  # torch loads no subclass, such as a masked array
        kind = value.dtype.type
        return type(value) in (np.ndarray, kind) and kind is not np.record and not value.dtype.hasobject
    torch = sys.modules.get("torch")  # a sample can have a tensor only where torch is loaded
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.Size):
        return not getattr(value, "__dict__", None)
    if isinstance(value, datetime.datetime | datetime.time):
        return type(value) in SAFE and (value.tzinfo is None or type(value.tzinfo) in SAFE)
    return type(value) in _SCALARS and not (type(value) is int and abs(value) >= _LONG)


def _without_others(value: Any) -> Any:
    """A copy of a mapping without the entries that contain other values."""
    kept: dict[Any, Any] = {}
    for name, entry in value.items():
        if type(entry) in _MAPPINGS:
            kept[name] = _without_others(entry)
        elif not any(_others({name: entry})):
            kept[name] = entry
    return kept


def stored(record: Mapping[str, Any], kept: dict[str, bytes]) -> dict[str, Any]:
    """The dict of slime's sample with PNG bytes in the place of its PIL images, for a file that holds only data.

    ``kept`` are the bytes so far, by their hash: samples with the same image share one object, which a file has once.
    """

    def data(image: Any) -> Any:
        if type(image).__module__.partition(".")[0] != "PIL":
            return image
        png = Image.of(image)
        return {_PNG: kept.setdefault(png.sha256, png.data)}

    return _with_images(record, data)


def restored(record: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`stored`."""

    def picture(data: Any) -> Any:
        return Image(data[_PNG]).to_pil() if isinstance(data, Mapping) and data.keys() == {_PNG} else data

    return _with_images(record, picture)


def _with_images(record: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    media = record.get("multimodal_inputs")
    if not isinstance(media, Mapping) or not isinstance(media.get("images"), list):
        return dict(record)
    return {**record, "multimodal_inputs": {**media, "images": [change(image) for image in media["images"]]}}
