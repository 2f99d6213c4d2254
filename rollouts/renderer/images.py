"""The placeholders of images: the text and the inputs that a model's processor makes of each image.

Invariant: the ids of text with images equal the processor's ids for the whole text, and each image is
processed once while the cache holds it. The processor expands one placeholder alone; the expansion replaces the
placeholder before the text is encoded. The self-test compares that with the processor's result for the whole text.

This module does not know conversations or chat templates.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from rollouts.base.extras import install_command
from rollouts.dtypes import Image, ImageSpan, TokenColumn, frozen
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError, shortened

__all__ = ["ImageProcessor", "example_images", "joined_inputs", "load_processor"]

_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor that describe the text; trainers compute them from the ids."""
_KEPT_BYTES = 512 * 1024 * 1024
"""Bytes of inputs and expansions that are kept, oldest out first."""

Inputs: TypeAlias = "Mapping[str, npt.NDArray[Any]]"


@attrs.frozen
class _Processed:
    expansion: str
    fills: int
    """Number of ids of the expansion that stand for the image itself."""
    inputs: Inputs

    @property
    def size(self) -> int:
        return len(self.expansion) + sum(array.nbytes for array in self.inputs.values())


@functools.lru_cache(maxsize=8)
def load_processor(path_or_name: str) -> Any:
    """Load the processor of a model with transformers, from its folder or its name on the Hugging Face Hub.

    Raises:
        ConfigError: it does not load, or the model has none.
    """
    from transformers import AutoProcessor  # slow, and needed only where there are images

    expected = "a model with an image processor that transformers loads"
    try:
        processor = AutoProcessor.from_pretrained(path_or_name, trust_remote_code=False)
    except Exception as error:  # the loader may raise anything
        hint = f"{type(error).__name__}: {str(error).strip()[:200]}; {install_command('images')}"
        raise ConfigError.of("images", path_or_name, f"{expected} ({hint})") from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigError.of("images", path_or_name, f"{expected}; it gives a {type(processor).__name__}")
    return processor


class ImageProcessor:
    """A model's processor, called for one image at a time. Thread-safe.

    Args:
        processor: a transformers processor with an image processor and a tokenizer.
        written: the text that the chat template writes for a message with one image.
        encode: convert text to ids.
        decode: convert ids to text.

    Raises:
        ConfigError: the object is not such a processor, or the template does not write its placeholder.
    """

    def __init__(
        self,
        processor: Any,
        written: str,
        encode: Callable[[str], TokenColumn],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        names = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
        candidates = [name for name in dict.fromkeys(names) if isinstance(name, str) and name]
        if getattr(processor, "image_processor", None) is None or not candidates:
            raise ConfigError.of("images", processor, "a processor with image_processor and image_token")
        found = [name for name in candidates if written.count(name) == 1]
        if not found:
            expected = f"a chat template that writes one {' or '.join(candidates)} for an image"
            raise ConfigError.of("images", written, expected)
        self.placeholder: str = found[0]
        """The text that the template writes for an image, and the processor expands."""
        self.processed = 0
        """Number of images processed so far."""
        self._processor = processor
        self._encode = encode
        self._decode = decode
        self._processing = threading.Lock()
        """Held while the processor runs, for tens of milliseconds an image: never where the event loop waits."""
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[str, _Processed] = collections.OrderedDict()
        self._kept_bytes = 0
        self._fills: dict[str, int] = {}
        """Of every image so far, by its hash: the number of ids that stand for it."""
        self._tensors = "pt" if importlib.util.find_spec("torch") else "np"  # some processors make torch tensors only
        fill = encode(names[0] if names[0] in candidates else self.placeholder).tolist()
        if len(fill) != 1:
            raise ConfigError.of("images", names[0], f"an image token that is one id of the tokenizer; it is {fill}")
        self._fill: int = fill[0]
        """The id that stands for the image, as often as it has patches."""
        self._ids = frozenset([*encode(self.placeholder).tolist(), self._fill])

    def fingerprint(self) -> int:
        """The CRC-32 of the processor's configuration."""
        return zlib.crc32(repr(self._processor.image_processor).encode() + self.placeholder.encode())

    def expanded(self, text: str, images: Sequence[Image]) -> str:
        """Replace the placeholders of a rendered text by the expansions of its images, in order.

        Raises:
            ConfigError: the numbers of placeholders and images differ: the template leaves an image out, or a message
                contains a placeholder; or the processor refuses an image.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            expected = (
                f"{len(images)}, one for each image: the chat template leaves images out, or a message contains the"
                ' placeholder (special_text="as_text" encodes it as plain text)'
            )
            raise ConfigError.of(f"placeholders {self.placeholder}", len(pieces) - 1, expected)
        parts = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            parts += [self._of(image).expansion, piece]
        return "".join(parts)

    def check_repeats(self) -> None:
        """Refuse a processor whose expansions are more than their placeholder, repeated.

        Servers keep the other ids of a prompt only for such processors; see :mod:`rollouts.inference.image_json`.

        Raises:
            ConfigError: it writes something else.
        """
        expansion = self._of(next(example_images())).expansion
        if expansion.replace(self.placeholder, ""):
            expected = f"a run of {self.placeholder}: for other expansions, servers encode the prompt again"
            raise ConfigError.of("the processor's expansion of an image", shortened(expansion), expected)

    def spans(self, tokens: TokenColumn, images: Sequence[Image]) -> tuple[ImageSpan, ...]:
        """The positions of images in ids that were encoded for them, without waiting for the processor.

        Raises:
            ConfigError: the ids have another number of image tokens than these images.
        """
        positions = np.flatnonzero(tokens == self._fill)
        counts = [self._fills.get(image.sha256) or self._of(image).fills for image in images]
        if sum(counts) != len(positions):
            expected = f"{sum(counts)}, those of {len(counts)} images: a message contains the token of an image"
            raise ConfigError.of("image tokens of the prompt", len(positions), expected)
        ends = np.cumsum(counts).tolist()
        return tuple(
            ImageSpan(image, int(positions[end - count]), int(positions[end - 1]) + 1)
            for image, count, end in zip(images, counts, ends, strict=True)
        )

    def check_sampled(self, tokens: Sequence[int] | TokenColumn) -> None:
        """Refuse a placeholder that the model sampled: the server would count it as an image.

        Raises:
            ConfigError: there is one.
        """
        if not self._ids.isdisjoint(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens):
            raise ConfigError.of("the reply", self.placeholder, "no placeholder of an image")

    def inputs(self, images: Sequence[Image]) -> dict[str, npt.NDArray[Any]]:
        """The inputs of the model, such as ``pixel_values``: for each name the arrays of the images, joined.

        Raises:
            ConfigError: the arrays of two images cannot be joined.
        """
        return joined_inputs([self._of(image).inputs for image in images])

    def processor_ids(self, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, npt.NDArray[Any]]]:
        """The ids and the inputs that the processor itself gives for a whole text with all of its images."""
        with self._processing:
            return self._call(text, images)

    def _of(self, image: Image) -> _Processed:
        done = self._known(image)
        if done is None:
            with self._processing:
                done = self._known(image) or self._process(image)  # another thread may have processed it meanwhile
                self._keep(image, done)
        return done

    def _known(self, image: Image) -> _Processed | None:
        with self._lock:
            done = self._kept.get(image.sha256)
            if done is not None:
                self._kept.move_to_end(image.sha256)
        return done

    def _keep(self, image: Image, done: _Processed) -> None:
        with self._lock:
            self._fills[image.sha256] = done.fills
            if image.sha256 not in self._kept:
                self._kept[image.sha256] = done
                self._kept_bytes += done.size
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.size

    def _process(self, image: Image) -> _Processed:
        self.processed += 1
        ids, inputs = self._call(self.placeholder, [image])
        expansion = self._decode(ids)
        if self._encode(expansion).tolist() != ids:
            raise ConfigError.of("images", expansion, "an expansion whose text has the ids of the processor")
        if self._fill not in ids:
            raise ConfigError.of("images", expansion, f"an expansion with the image token of id {self._fill}")
        return _Processed(expansion, ids.count(self._fill), inputs)

    def _call(self, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, npt.NDArray[Any]]]:
        pictures = [image.to_pil() for image in images]
        try:
            output = self._processor(
                text=[text],
                images=pictures,
                text_kwargs={"return_tensors": None, "add_special_tokens": False},
                images_kwargs={"return_tensors": self._tensors},
            )
        except Exception as error:
            raise ConfigError.of("image", [*images], f"images that the processor reads ({shortened(error)})") from error
        ids = [int(token) for token in output["input_ids"][0]]
        return ids, {name: _array(name, value) for name, value in output.items() if name not in _OF_TEXT}


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    """An output as a read-only array."""
    array = value.numpy() if hasattr(value, "numpy") else value
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise ConfigError.of(
            f"the processor's {name}", value, "an array whose first dimension counts images or patches"
        )
    return frozen(array.copy() if array.flags.writeable and array.base is not None else array)


def joined_inputs(parts: Iterable[Inputs]) -> dict[str, npt.NDArray[Any]]:
    """Join the inputs of several images along their first dimension, name by name.

    Raises:
        ConfigError: they differ in another dimension.
    """
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for part in parts:
        for name, array in part.items():
            columns.setdefault(name, []).append(array)
    for name, arrays in columns.items():
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise ConfigError.of(f"the processor's {name}", sorted(shapes), "one shape behind the first dimension")
    return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def example_images() -> Iterator[Image]:
    """Images of different sizes and ratios, for the self-test."""
    import PIL.Image

    for number, size in enumerate([(97, 61), (40, 160), (64, 64)]):
        picture = PIL.Image.new("RGB", size, (40 * number, 90, 200 - 40 * number))
        picture.paste((250, 20 * number, 10), (5, 5, 25, 15 + number))
        yield Image.of(picture)
