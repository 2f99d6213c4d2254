"""The images of a request: their JSON strings, and the ids that are sent with them.

SGLang 0.5.23 (its source; its functions that expand ids were run) does this with ``image_data`` and ``input_ids``:

- An entry of ``image_data`` is a ``data:`` URL, bare base64, an ``http`` URL, or a path that the server reads. There is
  no form that names an image of an earlier request: each request has all images of its prompt. A ``data:`` URL works on
  every machine. ``mm_content_hashes`` saves the server work, not the transfer.
- The server expands placeholders itself. It refuses ids whose placeholders are expanded already, because it counts each
  placeholder id as an image. So one id is sent for each image.
- For models whose placeholder expands to a run of itself (Qwen-VL, GLM-4.xV, Kimi-VL) the server keeps the other ids as
  they were sent, unless ``SGLANG_MM_AVOID_RETOKENIZE=0`` or its count of placeholders differs from the count of its
  processor; then it decodes and encodes the text again. For Gemma 3 it always does that, and InternVL refuses images
  with ids. ``meta_info.prompt_tokens`` counts the expanded ids, and ``prompt_token_ids`` are these ids: both are
  compared with the ids of the record.

Invariant: expanding the placeholders of :func:`collapsed` to their runs gives the ids of the sequence. Each image is
encoded once while the cache holds it. This module does not know requests or servers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rollouts.dtypes import Image, ImageSpan, TokenColumn, packed_tokens
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError

__all__ = ["ImageTexts", "collapsed"]

_KEPT_BYTES = 256 << 20


class ImageTexts:
    """Cache of the JSON strings of images: ``data:`` URLs in quotes.

    Args:
        max_bytes: maximum size of the cached strings; the least recently used string is evicted first.
    """

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self.encoded = 0
        """Images encoded so far; cached images are not counted."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def of(self, images: Sequence[Image]) -> list[bytes]:
        """The JSON string of each image, in order."""
        return [self._of(image) for image in images]

    def _of(self, image: Image) -> bytes:
        text = self._kept.get(image.sha256)
        if text is not None:
            self._kept.move_to_end(image.sha256)
            return text
        text = self._kept[image.sha256] = b'"%b"' % image.url.encode()
        self.encoded += 1
        self._bytes += len(text)
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return text


def collapsed(tokens: TokenColumn, images: Sequence[ImageSpan]) -> TokenColumn:
    """The ids with one placeholder in the place of each image's run.

    Raises:
        ConfigError: a span is outside the ids, overlaps another one, or is not a run of one id, to which the
            server expands a placeholder.
    """
    keep = np.ones(len(tokens), np.bool_)
    position = 0
    for span in images:
        if not position <= span.start < span.stop <= len(tokens):
            expected = f"spans that follow each other in {len(tokens)} ids"
            raise ConfigError.of("images", (span.start, span.stop), expected)
        run = tokens[span.start : span.stop]
        if (run != run[0]).any():
            raise ConfigError.of("images", span, "a placeholder that expands to a run of one id")
        keep[span.start + 1 : span.stop] = False
        position = span.stop
    return packed_tokens(tokens[keep])
