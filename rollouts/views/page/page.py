"""The HTML files of a view: one file, or several if the tokens of a run make it larger than a limit.

Invariant: a page loads nothing: its policy (CSP) allows its own script and style by their hashes, the images that are
in the page, and nothing else, so that no text of a model can become script or send a request. Each page of several has
the numbers of all groups, and the tokens of some.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import os
import string
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec

from rollouts.views.page.payload import Chunk, Payload

__all__ = ["LIMIT_BYTES", "html_page", "write_view"]

LIMIT_BYTES = 20_000_000
"""Size of a page; a run with more is several pages."""

_SCRIPTS = ("data.js", "dom.js", "charts.js", "groups.js", "sample.js", "overview.js", "timeline.js", "main.js")


def write_view(payloads: Sequence[Payload], out: Path, *, limit: int = LIMIT_BYTES) -> list[Path]:
    """Write the pages of one run, or of two that are compared; the first page is ``out``.

    Args:
        payloads: the first is the one whose pages are made; the second is a whole part of each.
        out: the first page; a page N > 0 is ``STEM.N.html``.
        limit: bytes of tokens on a page, as they stand in the file.
    """
    first = payloads[0]
    parts = _parts(first.chunks, limit)
    names = [out.name, *(f"{out.stem}.{number}.html" for number in range(1, len(parts)))]
    pages: list[list[str | int]] = [
        [name, part[0].first, part[-1].first + part[-1].groups] if part else [name, 0, 0]
        for name, part in zip(names, parts, strict=True)
    ]
    written = []
    for name, part in zip(names, parts, strict=True):
        on_page = [attrs.evolve(first, chunks=part), *payloads[1:]]
        path = out.with_name(name)
        temporary = path.with_name(f".{name}.writing")
        temporary.write_text(html_page(on_page, pages=pages if len(parts) > 1 else []), encoding="utf-8")
        os.replace(temporary, path)
        written.append(path)
    return written


def _parts(chunks: Sequence[Chunk], limit: int) -> list[list[Chunk]]:
    """Split chunks so that the base64 of each part is at most ``limit`` bytes; a part has at least one chunk."""
    parts: list[list[Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        length = -(-len(chunk.data) // 3) * 4
        if parts[-1] and size + length > limit:
            parts.append([])
            size = 0
        parts[-1].append(chunk)
        size += length
    return parts


def html_page(payloads: Sequence[Payload], *, pages: Sequence[Sequence[str | int]] = (), live: bool = False) -> str:
    """One page. ``pages`` are name, first group and end of each page; ``live`` lets it ask its server for changes."""
    script, style = "\n".join(map(_asset, _SCRIPTS)), _asset("view.css")
    data = []
    for number, payload in enumerate(payloads):
        data += [_data(f"head-{number}", payload.head), _data(f"times-{number}", payload.times)]
        data += [_data(f"chunk-{number}-{chunk.first}", chunk.data) for chunk in payload.chunks]
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
    policy += "form-action 'none'" + ("; connect-src 'self'" if live else "")
    policy += "; img-src data:" if live or any(payload.has_images for payload in payloads) else ""
    settings = msgspec.json.encode({"runs": len(payloads), "pages": pages, "live": live})
    return string.Template(_asset("page.html")).substitute(
        policy=html.escape(policy, quote=True),
        style=style,
        data="\n".join([_data("settings", settings), *data]),
        script=script,
    )


def _data(name: str, content: bytes) -> str:
    text = base64.b64encode(content).decode()
    return f'<script type="application/octet-stream" id="{name}">{text}</script>'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return importlib.resources.files("rollouts.views.page").joinpath("assets", name).read_text(encoding="utf-8")
