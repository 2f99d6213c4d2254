"""Law 8 on a foreign dump: its logprobs are those of a model folder, by the comparison of ``rollouts check-run``.

Invariant: the words are "differs from these weights": a dump does not name its weights, and the caller's may be others.
"""

from __future__ import annotations

from pathlib import Path

from rollouts.audit.rows import AuditedRow, Finding, Span
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.runs.logprobs import MEAN_SHARE, TOLERANCES, VersionReport

__all__ = ["TrainerLogprobs", "Weights"]

_LEAST = 8
"""The least trained tokens of a row whose mean is judged."""


class Weights:
    """A model folder, with which the logprobs of rows are compared.

    Args:
        folder: the model.
        dtype: of the comparison; by default that of the weights.
        temperature: of the sampling; above 0.

    Raises:
        ConfigError: the folder does not load.
    """

    def __init__(self, folder: Path, dtype: str | None, temperature: float) -> None:
        from rollouts.engine.teacher import Teacher, dtype_of  # here: it imports torch

        self.dtype = dtype or dtype_of(folder)
        if self.dtype not in TOLERANCES:
            raise ConfigError.of("--dtype", self.dtype, f"one of {', '.join(TOLERANCES)}")
        self.tolerance = TOLERANCES[self.dtype]
        self.total = VersionReport("of the dump", folder)
        self._teacher = Teacher(folder, self.dtype)
        self.vocab_size = self._teacher.vocab_size
        self._temperature = temperature

    def check(self, row: AuditedRow, spans: list[Span]) -> Finding | None:
        """Compare the trained tokens of a sound row; the finding is at its largest difference."""
        assert row.tokens is not None
        assert row.logprobs is not None
        positions = np.concatenate([np.arange(*span) for span in spans])
        stored = np.array([row.logprobs[at] for at in positions], np.float32)
        exact = self._teacher.logprobs(np.array(row.tokens, np.int32), positions, self._temperature)
        at, largest, _ = self.total.add(stored, exact, self.tolerance)
        if largest <= self.tolerance:
            return None
        return Finding.of(
            "broken",
            "weights",
            f"{row.place}, position {positions[at]}",
            f"logprob {stored[at]:.6g}, which differs from these weights",
            f"{exact[at]:.6g}, that of {self.total.folder} at temperature {self._temperature:g}",
        )

    def check_mean(self) -> Finding | None:
        """The finding of a mean difference that no row shows alone."""
        limit = MEAN_SHARE * self.tolerance
        if self.total.beyond or self.total.mean <= limit:
            return None
        place = f"{self.total.tokens} trained tokens"
        got = f"a mean difference of {self.total.mean:.2g}, which differs from these weights"
        return Finding.of("broken", "weights", place, got, f"at most {limit:g} against {self.total.folder}")


class TrainerLogprobs:
    """The logprobs of the trainer's forward pass in the dump itself; two engines differ by rounding in their dtype.

    Args:
        dtype: of the trainer.
    """

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype or "bfloat16"
        self.limit = MEAN_SHARE * TOLERANCES[self.dtype]
        self.total = VersionReport("of the dump", Path("the trainer's logprobs"))

    def check(self, row: AuditedRow, spans: list[Span]) -> Finding | None:
        """Compare the means over the trained tokens of a row with enough of them."""
        assert row.logprobs is not None
        assert row.trainer_logprobs is not None
        if len(row.trainer_logprobs) != len(row.logprobs):
            got, expected = f"{len(row.trainer_logprobs)} numbers", f"{len(row.logprobs)}, as many as tokens"
            return Finding.of("broken", "weights", f"{row.place}, trainer's logprobs", got, expected)
        positions = np.concatenate([np.arange(*span) for span in spans])
        stored = np.array([row.logprobs[at] for at in positions], np.float32)
        trainer = np.array([row.trainer_logprobs[at] for at in positions], np.float32)
        self.total.add(stored, trainer, TOLERANCES[self.dtype])
        mean = float(np.abs(stored - trainer).mean())
        if len(positions) < _LEAST or mean <= self.limit:
            return None
        got = f"a mean difference of {mean:.2g} between the logprobs of engine and trainer"
        expected = f"at most {self.limit:g} over {len(positions)} tokens in {self.dtype}"
        return Finding.of("unusual", "weights", row.place, got, expected)
