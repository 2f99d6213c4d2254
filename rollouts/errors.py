"""The error tree, and the record of a failure that is kept with the rollout that it ended."""

from __future__ import annotations

import contextlib
import contextvars
import traceback
from collections.abc import Iterator
from typing import Any

import attrs

__all__ = [
    "CAUSES",
    "ConfigError",
    "ContextOverflow",
    "DataExhausted",
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
    "ReplayDiverged",
    "RewardFailure",
    "RolloutsError",
    "TokenMismatchError",
    "at",
    "current_place",
    "shortened",
]


CAUSES = ("endpoint", "environment_start", "environment_step", "reward", "filter", "generate", "deadline")
"""Why rollouts fail, by the boundary that the failure came through. What a model does is none of them: a call that does
not parse goes back to it, and a limit that cuts an episode is a stop reason."""


class RolloutsError(Exception):
    """Root of everything that this package raises on purpose."""

    what = ""
    """What ran, where the error came out of a :func:`boundary`."""
    late = False
    """Whether it overran its deadline there."""


class ConfigError(RolloutsError, ValueError):
    """Something the user gave is wrong: the message names the field, the value, and what was expected."""

    @classmethod
    def of(cls, field: str, value: Any, expected: str) -> ConfigError:
        """Make the error from its three parts."""
        return cls(f"{field}: got {shortened(value)}; expected {expected}")


class EndpointError(RolloutsError):
    """The inference endpoint did not give a completion."""


class EndpointUnavailable(EndpointError):
    """Not reachable, overloaded or broken: worth another attempt, later or elsewhere."""


class EndpointRefused(EndpointError):
    """The server understood the request and will not serve it: the same request is never sent again."""


class ContextOverflow(EndpointError):
    """The request does not fit the model's context; the agent loop turns it into a stop reason."""


class ForeignFailure(RolloutsError):
    """Code that is not ours raised, or overran its deadline. ``__cause__`` is what it raised."""


class EnvironmentFailure(ForeignFailure):
    """An environment failed to start, step or close."""


class GenerateFailure(ForeignFailure):
    """A generate function raised, or gave back something that is not a rollout."""


class RewardFailure(ForeignFailure):
    """A reward raised, overran its deadline, or was not a finite number."""


class FilterFailure(ForeignFailure):
    """A filter raised, did not answer with a bool, or accepts nothing."""


class HistoryRewritten(RolloutsError):
    """The chat template rewrites what the model has seen, and the rollout was told to fail there."""


class DataExhausted(RolloutsError):
    """The data buffer ran dry before a batch was full. What is finished stays with the manager."""


class JournalError(RolloutsError):
    """The journal of a run cannot be written (a full disk, say), or is damaged: file and offset are in the message."""


class ReplayDiverged(RolloutsError):
    """A rollout that is played again from its record came to something else: the message says where first."""


class TokenMismatchError(RolloutsError):
    """A law of the house is broken: a bug of this package, always a crash, never data."""


@attrs.frozen
class Failure:
    """The record of one failure, kept beside the rollout that it ended."""

    kind: str
    """The error class, e.g. ``"EnvironmentFailure"``."""
    message: str
    place: str
    """Which rollout it was, e.g. ``"group 12 · sample 3"``."""
    traceback: str
    cause: str = ""
    """One of ``CAUSES``."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Record an error with its whole chain of causes."""
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), current_place(), text, _cause(error))


def _cause(error: BaseException) -> str:
    if isinstance(error, RolloutsError) and error.late:
        return "deadline"
    if isinstance(error, EnvironmentFailure):
        return "environment_step" if error.what.endswith((".step", ".snapshot", ".close")) else "environment_start"
    kinds = ((EndpointError, "endpoint"), (RewardFailure, "reward"), (FilterFailure, "filter"))
    return next((cause for kind, cause in kinds if isinstance(error, kind)), "generate")


_PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("rollouts_place", default="here")


def current_place() -> str:
    """The place that :func:`at` names, ``"here"`` outside of it."""
    return _PLACE.get()


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """Name the place that waits and failures inside are attributed to."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def shortened(value: Any) -> str:
    """A value for a message: its repr, cut at 120 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot be printed may still be named
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= 120 else f"{text[:117]}..."
