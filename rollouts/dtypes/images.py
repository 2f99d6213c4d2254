"""Images of conversations, and their places in token sequences.

Invariant: an image is a PNG in RGB that this module has checked; nothing is downloaded. Where pixels are read or other
forms are converted, :mod:`rollouts.dtypes.image_files` does it, which is imported then.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from pathlib import Path
from typing import Any

import attrs

from rollouts.errors import ConfigError

__all__ = ["Image", "ImageSpan", "image_label"]

_PNG = b"\x89PNG\r\n\x1a\n"
_RGB_8 = b"\x08\x02"  # bit depth and colour type in the header of a PNG
_DATA_URL = "data:image/png;base64,"


@attrs.frozen(repr=False)
class Image:
    """An image of a conversation: the bytes of a PNG in RGB with 8 bits a channel.

    There is one form, without loss, so that the processor here and the server decode the same pixels. Images are equal
    if their bytes are. :meth:`of` converts other forms.

    Raises:
        ConfigError: the bytes are not such a PNG.
    """

    data: bytes = attrs.field(eq=False)
    sha256: str = attrs.field(init=False)
    """The SHA-256 of the bytes, in hexadecimal digits."""

    def __attrs_post_init__(self) -> None:
        data: Any = self.data
        if not isinstance(data, bytes) or data[:8] != _PNG or data[24:26] != _RGB_8:
            got = data[:40] if isinstance(data, bytes) else data
            raise ConfigError.of("Image.data", got, "a PNG in RGB with 8 bits a channel; use Image.of")
        object.__setattr__(self, "sha256", hashlib.sha256(data).hexdigest())

    @classmethod
    def of(cls, value: Any) -> Image:
        """Convert an image: bytes of a file, a path, a PIL image, a ``data:`` URL, or an :class:`Image`.

        A file is a BMP, GIF, JPEG, PNG, TIFF or WEBP. Bytes of an RGB PNG with 8 bits a channel stay as they are; of
        16 bits Pillow keeps the upper 8. A file with an EXIF orientation is turned upright, as transformers does when
        it loads one; the pixels of a PIL image stay where they are. Transparency is dropped.

        Raises:
            ConfigError: the value has another form, it cannot be decoded, or Pillow is not installed.
        """
        if isinstance(value, Image):
            return value
        from rollouts.dtypes.image_files import bytes_of_url, png_of  # here: most runs have no image

        if isinstance(value, str) and value.startswith("data:"):
            return cls.of(bytes_of_url(value))
        if isinstance(value, str) and "://" in value:
            raise ConfigError.of("image", value[:80], "a data: URL, a path or bytes: no image is downloaded")
        if isinstance(value, str | Path):
            try:
                return cls.of(Path(value).read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError.of("image", str(value)[:200], f"a file with an image ({error})") from error
        return cls(png_of(value, _RGB_8))

    @property
    def width(self) -> int:
        """Pixels in a row."""
        return int(struct.unpack(">I", self.data[16:20])[0])

    @property
    def height(self) -> int:
        """Pixels in a column."""
        return int(struct.unpack(">I", self.data[20:24])[0])

    @property
    def label(self) -> str:
        """The image for people: ``[image 97x61 ab12cd34]``, its size and the start of its hash."""
        return image_label(self.width, self.height, self.sha256)

    @property
    def url(self) -> str:
        """The image as a ``data:`` URL."""
        return _DATA_URL + base64.b64encode(self.data).decode()

    def to_pil(self) -> Any:
        """The image as a PIL image in RGB.

        Raises:
            ConfigError: the bytes cannot be decoded, or Pillow is not installed.
        """
        from rollouts.dtypes.image_files import decoded

        return decoded(self.data)

    def __repr__(self) -> str:
        return f"<Image {self.width}x{self.height} {self.sha256}>"


def image_label(width: Any, height: Any, sha256: str) -> str:
    """An image for people, by its size and the start of its hash."""
    return f"[image {width}x{height} {sha256[:8]}]"


@attrs.frozen
class ImageSpan:
    """An image of a token sequence: its placeholder ids are positions ``start`` to ``stop`` (half open)."""

    image: Image
    start: int
    stop: int

    def shifted(self, by: int) -> ImageSpan:
        """The span in a sequence with ``by`` more ids before it."""
        return ImageSpan(self.image, self.start + by, self.stop + by)
