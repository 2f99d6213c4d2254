"""``--rollout-function-path rollouts.integrations.slime.generate_rollout_batch``.

Invariant: the signature is slime's to the letter. What lives between calls lives in one :class:`TrainerRollouts` for
each process; it is made anew when the data source or what the launch asks for changes, and closed when Python exits.
"""

from __future__ import annotations

import atexit
import threading
from argparse import Namespace
from typing import Any

from rollouts.integrations.slime.session import TrainerRollouts
from rollouts.integrations.slime.settings import Settings

__all__ = ["close_rollouts", "generate_rollout_batch"]

_LOCK = threading.Lock()
_live: TrainerRollouts | None = None


def generate_rollout_batch(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Fill one batch for slime, or play its evaluation.

    Args:
        args: slime's namespace; ``None`` plays the demo model on the embedded engine, for contract tests.
        rollout_id: slime's number of the call.
        data_source: slime's data source.
        evaluation: play the configured data sets instead.

    Returns:
        ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups of ``n_samples_per_prompt`` rollouts, in order; or
        ``RolloutFnEvalOutput``. slime's classes where slime is installed, else classes of the same shape.

    Raises:
        ConfigError: a flag or a recipe that cannot be served, named.
        DataExhausted: the data source ran dry.
        FilterFailure: the filter accepts nothing.
        GenerateFailure: nothing but failures.
    """
    if args is None:
        args = _demo_args(data_source)
    rollouts = _rollouts(args, data_source)
    return rollouts.evaluate(rollout_id) if evaluation else rollouts.train(rollout_id)


def close_rollouts() -> None:
    """End what is in flight; groups go back to the data source. The next call starts anew."""
    global _live
    with _LOCK:
        live, _live = _live, None
    if live is not None:
        live.close()


def _rollouts(args: Any, data_source: Any) -> TrainerRollouts:
    global _live
    settings = Settings.from_args(args)
    live = _live
    if live is not None and live.data_source is data_source and live.settings == settings:
        return live
    close_rollouts()
    with _LOCK:
        _live = TrainerRollouts(args, settings, data_source)
        return _live


def _demo_args(data_source: Any) -> Namespace:
    from rollouts.integrations.slime import demo  # here: it needs the extra "engine", and only this call does

    return demo.args(data_source)


atexit.register(close_rollouts)
