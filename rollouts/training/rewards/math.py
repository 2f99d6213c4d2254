"""Boxed mathematics: is the expression in the last ``\\boxed{…}`` equal to the label?

Invariant: ``math-verify`` decides, in a worker process (it is CPU-heavy, and it uses signals); what it cannot decide in
time is a :class:`RewardFailure`, and so is a label that it cannot read. A reply without a box, or with something in it
that is no mathematics, is wrong.

Needs the extra ``math``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import resource
from collections.abc import Iterator
from typing import Any

from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.training.rewards.answers import boxed, final_reply
from rollouts.training.rewards.processes import call_in_process
from rollouts.training.rewards.rules import references
from rollouts.training.types import Sample

__all__ = ["boxed_math", "same_mathematics"]

_SECONDS = 5
"""For each of reading and comparing; the worker's own alarm."""
_MEMORY = 4 << 30
"""Bytes of address space of a worker that does mathematics: 9^9^9 does not take the machine down."""
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What its reader raises on what is no mathematics."""
_LONG = 2_000
"""Characters of an answer beyond which nothing is computed: it is wrong."""


async def boxed_math(sample: Sample, *, seconds: float = 60.0) -> float:
    """1.0 if the last boxed expression of the last reply equals the label, else 0.0.

    Args:
        sample: its label is LaTeX or plain mathematics (``\\frac{14}{3}``, ``p - q``, ``9``), or several of them.
        seconds: until the worker is killed; it has an alarm of its own before.

    Raises:
        RewardFailure: the label cannot be read, or equality cannot be decided in time.
        ConfigError: the extra ``math`` is missing.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError.of("boxed_math", "no module math_verify", "pip install 'rollouts[math]'")
    wanted = references(sample)
    said = boxed(final_reply(sample))
    if said is None or not said or len(said) > _LONG:
        return 0.0
    equal = [await call_in_process("boxed_math", same_mathematics, text, said, seconds=seconds) for text in wanted]
    return float(any(equal))


def same_mathematics(wanted: str, said: str) -> bool:
    """Compare two expressions; call it in a process of its own.

    Raises:
        RewardFailure: ``wanted`` cannot be read, or it took too long.
    """
    library: Any = importlib.import_module("math_verify")
    too_late = importlib.import_module("math_verify.errors").TimeoutException

    def read(text: str) -> list[Any]:
        marked = text if "\\boxed" in text else f"\\boxed{{{text.replace('~', ' ').strip().strip('$')}}}"
        # Without a fallback to text: what cannot be read as mathematics is told apart from what was.
        return library.parse(marked, parsing_timeout=_SECONDS, fallback_mode="no_fallback", raise_on_error=True)  # type: ignore[no-any-return]

    if _letters(wanted) == _letters(said):
        return True
    try:
        with _bounded_memory():
            gold = read(wanted)
            if not gold:
                raise RewardFailure(f"label: got {shortened(wanted)}; expected mathematics that math-verify can read")
            try:
                answer = read(said)
            except _UNREADABLE:
                return False
            if not answer:
                return False
            equal: bool = library.verify(gold, answer, timeout_seconds=_SECONDS, raise_on_error=True)
            return equal
    except too_late:
        raise RewardFailure(f"{shortened(said)} against {shortened(wanted)}: not decided in {_SECONDS} s") from None


def _letters(text: str) -> str:
    return "".join(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("$", "").split())


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """The worker does other things after us: the bound is ours alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    unbounded = resource.RLIM_INFINITY
    resource.setrlimit(
        resource.RLIMIT_AS, (min([_MEMORY, *(bound for bound in (soft, hard) if bound != unbounded)]), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
