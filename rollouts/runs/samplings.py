"""The distribution of each stored logprob: its temperature, and the ids that could not be sampled.

Invariant: a distribution that the record does not give is refused by name: a truncated or constrained one, a penalised
one, or one without a temperature. This module loads no weights.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attrs

from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import ConfigError
from rollouts.runs.folder import Row
from rollouts.runs.info import read_info
from rollouts.runs.layout import JOURNAL
from rollouts.runs.run_history import RunHistory
from rollouts.runs.settings import recorded_settings
from rollouts.training.types import Sample

__all__ = ["Distribution", "Samplings"]


@attrs.frozen(eq=False)
class Distribution:
    """How the tokens of one sample were sampled, a column each."""

    divisors: npt.NDArray[np.float64]
    """The divisor of the logits: the temperature, 1 for a greedy or raw logprob, ``[n]``."""
    without_stops: npt.NDArray[np.bool_]
    """Whether stop ids were masked, because of ``min_new_tokens``, ``[n]``."""


_UNKNOWN = {
    "processed": "top-k, top-p and min-p of a completion are not recorded",
    "constrained": "the ids that a grammar allowed are not recorded",
}
"""Distributions that are not checked, and why."""


@attrs.define(eq=False)
class Samplings:
    """How the completions of a run were sampled."""

    run: Path
    temperatures: set[float] = attrs.field(factory=set, init=False)
    """Those of the completions so far; 0 for greedy ones."""

    def of(self, sample: Sample, row: Row) -> Distribution:
        """The distribution of each sampled token.

        Raises:
            ConfigError: neither the completion nor the run names its temperature; or it is of a truncated or penalised
                distribution.
        """
        column, masked = np.zeros(len(sample)), np.zeros(len(sample), bool)
        before = 0
        for number, one in enumerate(sample.completions):
            if one.logprobs_of in _UNKNOWN:
                name = f"{row}, completions[{number}].logprobs_of"
                raise ConfigError.of(name, one.logprobs_of, f"raw or tempered: {_UNKNOWN[one.logprobs_of]}")
            if one.logprobs_of is None:
                self._check_provider()
            if one.logprobs_of != "raw":
                self._check_unpenalised()
                before = before if one.continues else 0
                masked[one.start : min(one.stop, one.start + max(0, self._minimum - before))] = True
                before += one.stop - one.start
            temperature = self._of_run if one.temperature is None else 0.0 if self._greedy else one.temperature
            self.temperatures.add(temperature)
            column[one.start : one.stop] = 1.0 if one.logprobs_of == "raw" else temperature or 1.0
        rest = sample.mask_column & (column == 0)
        if rest.any():
            self._check_provider()
            self.temperatures.add(self._of_run)
            column[rest] = self._of_run or 1.0
        return Distribution(column, masked)

    @functools.cached_property
    def stop_ids(self) -> list[int]:
        """The stop ids of the requests, in addition to those of the model.

        Raises:
            ConfigError: the run does not name them.
        """
        found = {tuple((start.get("tokenizer") or {}).get("stop_token_ids") or ()) for start in self._settings}
        if len(found) != 1:
            name = f"{self.run / 'run.json'}, settings.tokenizer.stop_token_ids"
            raise ConfigError.of(name, sorted(found), "one list for the whole run")
        return list(found.pop())

    @functools.cached_property
    def _minimum(self) -> int:
        found = {int(sampling.get("min_new_tokens") or 0) for sampling in self._recorded}
        if len(found) > 1:
            name = f"{self.run / 'run.json'}, settings.sampling.min_new_tokens"
            raise ConfigError.of(name, sorted(found), "one number for the whole run")
        return found.pop() if found else 0

    def _check_unpenalised(self) -> None:
        """Check that no penalty shaped the logprobs: it depends on the tokens before, and is not modelled."""
        for sampling in self._recorded:
            penalty = sampling.get("repetition_penalty") or 1.0
            if penalty != 1.0:
                name = f"{self.run / 'run.json'}, settings.sampling.repetition_penalty"
                raise ConfigError.of(name, penalty, "1: logprobs of a penalised distribution are not checked")

    @functools.cached_property
    def _settings(self) -> list[dict[str, Any]]:
        """The settings of each start of the run."""
        starts = [start.get("settings") or {} for start in _starts(self.run)]
        return starts or [read_info(self.run).get("settings") or {}]

    @functools.cached_property
    def _recorded(self) -> list[dict[str, Any]]:
        """The sampling parameters of each start of the run."""
        of_info = recorded_settings(read_info(self.run)).get("sampling") or {}
        return [start.get("sampling") or of_info for start in self._settings]

    @functools.cached_property
    def _greedy(self) -> bool:
        """Whether each start sampled with ``top_k=1``, at which servers ignore the temperature."""
        return all(sampling.get("top_k") == 1 for sampling in self._recorded)

    @functools.cached_property
    def _of_run(self) -> float:
        """The temperature of completions without one, as in runs of earlier versions.

        Raises:
            ConfigError: the run does not name it, or was resumed with another one.
        """
        found = {0.0 if sampling.get("top_k") == 1 else sampling.get("temperature") for sampling in self._recorded}
        value = found.pop() if len(found) == 1 else sorted(map(str, found))
        if not isinstance(value, int | float):
            name = f"{self.run / 'run.json'}, settings.sampling.temperature"
            raise ConfigError.of(name, value, "one number for the whole run")
        return float(value)

    def _check_provider(self) -> None:
        """Check that logprobs whose distribution is not recorded are of a server whose distribution is known."""
        if self._provider not in ("sglang", "vllm"):
            expected = "sglang or vllm, whose logprobs are known"
            raise ConfigError.of(f"{self.run / 'run.json'}, endpoint.provider", self._provider, expected)

    @functools.cached_property
    def _provider(self) -> Any:
        return (read_info(self.run).get("endpoint") or {}).get("provider", "sglang")


def _starts(run: Path) -> list[dict[str, Any]]:
    """The journal's record of each start of the run."""
    return list(RunHistory.read(run / JOURNAL).runs) if (run / JOURNAL).is_dir() else []
