"""Text for a terminal: the only place of the package that prints text as it is, without rich.

Invariant: no control character, C1 control or bidirectional control of a model, a server, a role or a file reaches the
terminal, whichever verb prints it: here by :func:`say`, and with rich by ``rollouts.views.terminal.console``.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import types
import warnings
from typing import Any, TextIO

__all__ = ["guard_standard_error", "say", "visible"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that is safe for a terminal: control characters are replaced, except line ends and tabs.

    ASCII controls become their Unicode pictures. C1 controls (U+009B begins an escape sequence), characters that change
    the direction or the end of a line, and lone surrogates (which cannot be printed) become ``<U+XXXX>``.
    """
    return _CONTROL.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"<U+{code:04X}>"


def say(text: object, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print text that is safe for a terminal; by default to standard output."""
    print(visible(str(text)), file=file, end=end, flush=flush)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def guard_standard_error() -> None:
    """Make what the interpreter prints by itself safe: uncaught errors, warnings, and logs without a handler."""
    sys.excepthook = _uncaught
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())
    warnings.formatwarning = _warning


def _uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)), file=sys.stderr, end="")


_formatted_warning = warnings.formatwarning


def _warning(*arguments: Any, **options: Any) -> str:
    return visible(_formatted_warning(*arguments, **options))
