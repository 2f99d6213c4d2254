"""The log of the HTTP servers: their errors, without the requests of clients that do not speak HTTP.

Invariant: a request that is not HTTP is answered with 400 and leaves no line on standard error, however often it is
sent; an error of a handler is logged with its traceback.
"""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["server_log"]


class _Errors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def server_log() -> logging.Logger:
    """The logger for ``aiohttp.web.AppRunner(logger=...)``."""
    logger = logging.getLogger("rollouts.http.server")
    if not any(isinstance(present, _Errors) for present in logger.filters):
        logger.addFilter(_Errors())
    return logger
