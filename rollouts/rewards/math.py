"""Reward for boxed mathematics: whether the expression in the last ``\\boxed{…}`` equals the label.

Invariant: ``math-verify`` decides, in a worker process (it is CPU-heavy, and it uses signals). A timeout or an
unreadable label is a :class:`RewardFailure`. A reply without a box, or whose box is not readable, is wrong.

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

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.rewards.answers import boxed, final_reply
from rollouts.rewards.processes import call_in_process
from rollouts.rewards.rules import references
from rollouts.training.types import Sample

__all__ = ["boxed_math", "same_mathematics"]

_SECONDS = 5
"""Deadline inside the worker, for each parse and for the comparison."""
_MEMORY = 4 << 30
"""Bytes of address space while a worker compares: 9^9^9 must not exhaust the machine's memory."""
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Exceptions of math-verify for text that is not mathematics."""
_LONG = 2_000
"""Characters beyond which an answer is wrong without parsing."""


async def boxed_math(sample: Sample, *, seconds: float = 60.0) -> float:
    """1.0 if the last boxed expression of the last reply equals the label, else 0.0.

    Args:
        sample: its label is LaTeX or plain mathematics (``\\frac{14}{3}``, ``p - q``, ``9``), or a list of them.
        seconds: deadline of each comparison, after which the worker is killed; its own deadlines are shorter.

    Raises:
        RewardFailure: the label cannot be read, or equality cannot be decided in time.
        ConfigError: the extra ``math`` is missing.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError.of("boxed_math", "no module math_verify", install_command("math"))
    wanted = references(sample)
    answer = boxed(final_reply(sample))
    if not answer or len(answer) > _LONG:
        return 0.0
    equal = [await call_in_process("boxed_math", same_mathematics, text, answer, seconds=seconds) for text in wanted]
    return float(any(equal))


def same_mathematics(wanted: str, answer: str) -> bool:
    """Compare two expressions; call it in a worker process.

    Raises:
        RewardFailure: ``wanted`` cannot be read, or parsing or comparing timed out.
    """
    library: Any = importlib.import_module("math_verify")
    timeout = importlib.import_module("math_verify.errors").TimeoutException

    def read(text: str) -> list[Any]:
        marked = text if "\\boxed" in text else f"\\boxed{{{text.replace('~', ' ').strip().strip('$')}}}"
        # No fallback to text: unreadable mathematics must be distinguishable.
        return library.parse(marked, parsing_timeout=_SECONDS, fallback_mode="no_fallback", raise_on_error=True)  # type: ignore[no-any-return]

    if _letters(wanted) == _letters(answer):
        return True
    try:
        with _bounded_memory():
            gold = read(wanted)
            if not gold:
                raise RewardFailure(f"label: got {shortened(wanted)}; expected mathematics that math-verify can read")
            try:
                parsed = read(answer)
            except _UNREADABLE:
                return False
            if not parsed:
                return False
            equal: bool = library.verify(gold, parsed, timeout_seconds=_SECONDS, raise_on_error=True)
            return equal
    except timeout:
        raise RewardFailure(f"{shortened(answer)} against {shortened(wanted)}: not decided in {_SECONDS} s") from None


def _letters(text: str) -> str:
    return "".join(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("$", "").split())


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Limit the address space of the process; the limit is restored, since the worker is reused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    unbounded = resource.RLIM_INFINITY
    resource.setrlimit(
        resource.RLIMIT_AS, (min([_MEMORY, *(bound for bound in (soft, hard) if bound != unbounded)]), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
