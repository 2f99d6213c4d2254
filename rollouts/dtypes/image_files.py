"""Images in other forms than RGB PNGs: decoded and converted by Pillow, which is imported here only.

Invariant: an image is decoded whole, within a bound of pixels; a file that is cut off is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError

__all__ = ["bytes_of_url", "decoded", "png_of"]

_EXIF_ORIENTATION = 0x0112
_MAX_PIXELS = 1 << 26
"""A few bytes can hold an image of any size."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats that Pillow decodes itself: for PostScript it starts a program."""
_FORMAT_NAMES = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"


def bytes_of_url(url: str) -> bytes:
    """The bytes of a ``data:`` URL."""
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ConfigError.of("image", url[:80], "a data: URL of an image in base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError.of("image", url[:80], f"a data: URL of an image in base64 ({error})") from None


def _pillow() -> Any:
    try:
        import PIL.Image  # slow, and needed only where there are images
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(f"image: Pillow is not installed; {install_command('images')}") from error
    return PIL


def decoded(data: bytes) -> Any:
    """Decode all pixels; a file that is cut off is refused."""
    pillow = _pillow()
    try:
        image = pillow.Image.open(io.BytesIO(data), formats=_FORMATS)
        pixels = image.width * image.height
        if pixels <= _MAX_PIXELS:
            image.load()
    except Exception as error:  # noqa: BLE001 - a decoder of foreign bytes may raise anything
        why = str(error).partition(" <_io.")[0]  # without the address of the buffer
        raise ConfigError.of("image", data[:40], f"an image that Pillow decodes as {_FORMAT_NAMES} ({why})") from None
    if pixels > _MAX_PIXELS:
        raise ConfigError.of("image", f"{image.width}x{image.height} pixels", f"at most {_MAX_PIXELS:,} pixels")
    return image


def png_of(value: Any, kept: bytes) -> bytes:
    """The bytes of an RGB PNG with the pixels of an image file or a PIL image.

    A PNG whose header has ``kept`` as bit depth and colour type stays as it is, unless it is turned or transparent.
    """
    pillow = _pillow()
    image = value
    if isinstance(value, bytes | bytearray):
        image = decoded(bytes(value))
        upright = image.getexif().get(_EXIF_ORIENTATION, 1) == 1
        if image.format == "PNG" and value[24:26] == kept and upright and "transparency" not in image.info:
            return bytes(value)
        image = image if upright else pillow.ImageOps.exif_transpose(image)
    elif not isinstance(value, pillow.Image.Image):
        raise ConfigError.of("image", value, "bytes of an image file, a path, a PIL image or a data: URL")
    out = io.BytesIO()
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # the same colours; Pillow warns of the direct way
    (image if image.mode == "RGB" else image.convert("RGB")).save(out, format="PNG")
    return out.getvalue()
