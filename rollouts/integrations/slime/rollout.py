"""``--rollout-function-path rollouts.integrations.slime.generate_rollout_batch``.

Invariant: the signature is exactly slime's. State between calls is one :class:`TrainerRollouts` per process; it is
replaced when the data source or the settings of the launch change, and closed when Python exits. Groups that the data
source does not take back then are the first of the next one.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

from rollouts.integrations.slime.session import TrainerRollouts
from rollouts.integrations.slime.settings import Settings

__all__ = ["close_rollouts", "generate_rollout_batch"]

_LOCK = threading.Lock()
_live: TrainerRollouts | None = None
_kept: tuple[Any, list[list[Any]]] = (None, [])
"""A data source, and the groups that it did not take back."""


def generate_rollout_batch(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Fill one batch for slime, or play its evaluation; the parameters are slime's.

    ``args=None`` plays the demo model on the embedded engine, for contract tests.

    Returns:
        ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups of ``n_samples_per_prompt`` rollouts, in order; or
        ``RolloutFnEvalOutput``. slime's classes where slime is installed, else classes of the same shape.

    Raises:
        ConfigError: a flag or a recipe is not supported; the message names it.
        DataExhausted: the data source has no more groups.
        FilterFailure: the filter accepts no group.
        GenerateFailure: every rollout fails.
    """
    if args is None:
        from rollouts.integrations.slime import demo  # here: only this call needs the extra "engine"

        args = demo.args(data_source)
    rollouts = _rollouts(args, data_source)
    return rollouts.evaluate(rollout_id) if evaluation else rollouts.train(rollout_id)


def close_rollouts() -> None:
    """Cancel rollouts in flight and return their groups to the data source. The next call starts with new state."""
    global _live, _kept
    with _LOCK:
        live, _live = _live, None
    if live is not None:
        _kept = (live.data_source, live.close())


def _rollouts(args: Any, data_source: Any) -> TrainerRollouts:
    global _live, _kept
    settings = Settings.from_args(args)
    live = _live
    if live is not None and live.data_source is data_source and live.settings == settings:
        return live
    close_rollouts()
    with _LOCK:
        source, groups = _kept
        size = settings.n_samples_per_prompt
        kept = [group for group in groups if source is data_source and len(group) == size]
        _live = TrainerRollouts(args, settings, data_source, kept)
        _kept = (None, [])
        return _live


atexit.register(close_rollouts)
