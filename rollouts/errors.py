"""The error tree, and :class:`Failure`, the record of an error that is stored with the rollout that it ended."""

from __future__ import annotations

import contextvars
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs

__all__ = [
    "CAUSES",
    "ConfigError",
    "ContextOverflow",
    "DataExhausted",
    "EndpointAway",
    "EndpointError",
    "EndpointRefused",
    "EndpointUnavailable",
    "EnvironmentFailure",
    "Failure",
    "FilterFailure",
    "ForeignFailure",
    "GenerateFailure",
    "HistoryRewritten",
    "JournalError",
    "Kind",
    "NoReply",
    "ReplayDiverged",
    "ReplyRefused",
    "RewardFailure",
    "RolloutsError",
    "TokenMismatchError",
    "at",
    "current_place",
    "is_of_users",
    "shortened",
    "source_line",
    "text_of",
    "without_password",
]

CAUSES = ("endpoint", "environment_start", "environment_step", "verifier", "reward", "filter", "generate", "deadline")
"""Why rollouts fail, by the boundary in which the error was raised. The model is never the cause: a malformed tool call
is answered with an error message, and a limit is a stop reason."""

_OfUsers = Literal["environment_start", "environment_step", "verifier", "reward", "filter"]
Kind: TypeAlias = (
    _OfUsers | Literal["rollout", "generation", "server", "recording", "a_free_thread", "a_pause", "other"]
)
"""The subject of a wait or a failure: a call of user code (``environment_start`` includes creation and tools,
``environment_step`` snapshots and close, ``verifier`` tests), a whole ``rollout``, a ``generation`` request or
another request to a ``server``, a ``recording``, or a wait for ``a_free_thread`` or the end of ``a_pause``."""


class RolloutsError(Exception):
    """Root of all errors that this package raises on purpose."""

    late = False
    """Whether the code of a :func:`boundary` overran its deadline."""
    kind: Kind = "other"
    """The kind of that code; by default, of the class."""


class ConfigError(RolloutsError, ValueError):
    """A value from the user is invalid. The message names the field, the value and what was expected."""

    @classmethod
    def of(cls, field: str, value: Any, expected: str) -> ConfigError:
        """Build the error from the three parts of its message."""
        return cls(f"{field}: got {shortened(value)}; expected {expected}")


class EndpointError(RolloutsError):
    """The inference endpoint did not return a completion."""

    kind: Kind = "server"


class EndpointUnavailable(EndpointError):
    """The endpoint is unreachable, overloaded or broken: the request may be retried, later or on another server."""


class EndpointAway(EndpointUnavailable):
    """No server answered for ``outage_seconds``. It fails no rollout: the run ends, and its prompts are returned."""


class EndpointRefused(EndpointError):
    """The server rejects the request; it is not retried."""

    of_content = False
    """Whether the server rejects the content of this request: not a key, a route, or an answer that we reject."""


class ContextOverflow(EndpointError):
    """The request does not fit the model's context. The agent loop turns that of its requests into a stop reason."""


class ForeignFailure(RolloutsError):
    """User code raised or overran its deadline. ``__cause__`` is the exception that it raised."""


class EnvironmentFailure(ForeignFailure):
    """An environment failed to start, step or close."""

    kind: Kind = "environment_start"


class GenerateFailure(ForeignFailure):
    """A generate function raised, or returned something that is not a rollout."""

    kind: Kind = "rollout"


class NoReply(GenerateFailure):
    """A program or agent function ended without a reply of the model that is trained."""


class ReplyRefused(GenerateFailure):
    """The chat template refuses a reply in the history: a mistake of the policy, and not a failure of the rollout."""


class RewardFailure(ForeignFailure):
    """A reward function raised, overran its deadline, or returned no finite number."""

    kind: Kind = "reward"


class FilterFailure(ForeignFailure):
    """A filter raised, did not return a bool, or accepts no group."""

    kind: Kind = "filter"


class HistoryRewritten(RolloutsError):
    """The chat template rewrites the history, and the rollout has ``history="error"``."""


class DataExhausted(RolloutsError):
    """The data buffer ran out of prompts before a batch was full. Finished groups stay with the manager."""


class JournalError(RolloutsError):
    """The journal of a run cannot be written (e.g. a full disk), or is damaged. The message names file and offset."""


class ReplayDiverged(RolloutsError):
    """A replayed rollout differs from its recording. The message names the first difference."""


class TokenMismatchError(RolloutsError):
    """A law of this package is broken: a bug, always a crash, never data."""


@attrs.frozen
class Failure:
    """The record of one failure, stored with the rollout that it ended."""

    kind: str
    """The error class, e.g. ``"EnvironmentFailure"``."""
    message: str
    place: str
    """The rollout that failed, e.g. ``"group 12 · sample 3"``."""
    traceback: str
    cause: str = ""
    """One of ``CAUSES``."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Record an error with its whole chain of causes."""
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, text_of(error), current_place(), text, _cause(error))


def _cause(error: BaseException) -> str:
    if isinstance(error, RolloutsError) and error.late:
        return "deadline"
    if isinstance(error, EnvironmentFailure):
        return error.kind if error.kind in ("environment_step", "verifier") else "environment_start"
    kinds = ((EndpointError, "endpoint"), (RewardFailure, "reward"), (FilterFailure, "filter"))
    return next((cause for kind, cause in kinds if isinstance(error, kind)), "generate")


_PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("rollouts_place", default="here")

current_place: Callable[[], str] = _PLACE.get
"""Returns the place set by the enclosing :func:`at`, ``"here"`` outside of any."""


class at:  # noqa: N801 - used as `with at(...)`
    """Set the place that waits and failures inside are attributed to."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._token = _PLACE.set(self._place)

    def __exit__(self, *_: object) -> None:
        _PLACE.reset(self._token)


def shortened(value: Any) -> str:
    """The repr of a value for a message, at most 120 characters."""
    value = value[:60] if type(value) in (list, tuple) else value  # the repr of 60 entries is longer
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - user code raised; a value that cannot be printed may still be named
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def text_of(error: BaseException) -> str:
    """The text of an error, also where ``__str__`` of a user's exception raises."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - user code raised
        return "(an error that cannot be printed)"


def source_line(error: BaseException) -> str:
    """The innermost line of user code that raised an error, as ``file:line in function``; empty if there is none.

    Lines of this package, of the standard library and of installed packages do not count.
    """
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_of_users(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def is_of_users(filename: str) -> bool:
    """Whether code is of a user: neither of this package, nor of the standard library or an installed package.

    The built-in recipes and their environments count as a user's.
    """
    return filename.startswith(_RECIPES) or not (filename.startswith(_NOT_OF_USERS) or "site-packages" in filename)


_RECIPES = str(Path(__file__).parent / "recipes")
_NOT_OF_USERS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")


def without_password(text: str) -> str:
    """Text for printing, without the user names and passwords of its URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)
