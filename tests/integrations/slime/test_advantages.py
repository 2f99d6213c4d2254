"""Advantages of tokens by ``--custom-advantage-function-path``, from the recipe's filter to slime's computation."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime import generate_rollout_batch, sample_advantages
from rollouts.integrations.slime.convert import leaves
from rollouts.training import Prompt, Sample
from rollouts.training.credit import assign_advantages, grpo
from tests.integrations.slime.launches import Launch, made_sample
from tests.integrations.slime.test_with_slime import DOOR, ROOT, Trainer, trainer_args

FLAG = {"custom_advantage_function_path": f"{DOOR}.sample_advantages"}
OURS = f"{DOOR}.generate_rollout_batch"

TRAINER = """
import sys
from argparse import Namespace

import _cp_dist_helpers as helpers  # slime's stand-in for Megatron
import torch
from megatron.core import mpu

mpu.is_pipeline_last_stage = lambda: True
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from slime.backends.megatron_utils.loss import compute_advantages_and_returns

ranks, function, size = torch.load(sys.argv[1], weights_only=False), sys.argv[2] or None, int(sys.argv[3])
args = Namespace(custom_advantage_function_path=function, advantage_estimator="grpo", kl_coef=0.0, use_opd=False)
args.use_rollout_logprobs, args.normalize_advantages = True, False
args.rollout_function_path = "rollouts.integrations.slime.generate_rollout_batch"
found = []
for number in range(size):
    helpers.stub_megatron_in_worker(size, number)
    for rank in ranks:
        data = {**rank, "total_lengths": [rank["total_lengths"][place] for place in rank["partition"]]}
        for name in ("rollout_log_probs", "teacher_log_probs"):  # as backends/megatron_utils/actor.py does
            if name in data:
                columns = zip(data[name], data["total_lengths"], data["response_lengths"], strict=True)
                data[name] = [slice_log_prob_with_cp(*column) for column in columns]
        compute_advantages_and_returns(args, data)
        found.append((number, rank["partition"], data["advantages"], data["returns"]))
torch.save(found, sys.argv[1])
"""
"""slime's computation of advantages on each rank of its split; with a context parallel size, on each of its parts."""


def by_token(samples: Sequence[Sample]) -> bool:
    """A filter that gives each sampled token another number."""
    for sample in samples:
        places = np.arange(len(sample), dtype=np.float32) - 7 + (sample.index or 0)
        sample.advantages = np.where(sample.mask_column, places, np.float32(0))
    return True


def of_groups(samples: Sequence[Sample]) -> bool:
    """A filter that assigns GRPO's advantages."""
    assign_advantages(samples, grpo)
    return True


def test_the_recipes_advantages_leave_in_the_batch() -> None:
    """Each record carries those of its response; a launch without the flag refuses them by name."""
    launch = Launch(batch_size=2, n=2, filter_fn=by_token)
    samples = list(leaves(generate_rollout_batch(launch.args(**FLAG), 0, launch.source()).samples))
    assert len(samples) == 4
    for sample in samples:
        expected = [(place - 7 + sample.index) * bit for place, bit in enumerate(sample.loss_mask, 3)]
        assert sample.teacher_log_probs == expected
    data = {"teacher_log_probs": [sample.teacher_log_probs for sample in samples]}
    sample_advantages(Namespace(use_opd=False, rollout_function_path=OURS), data)
    assert data["advantages"] == data["returns"] == data["teacher_log_probs"]
    with pytest.raises(ConfigError, match=r"advantages.*slime has no field for it"):
        generate_rollout_batch(launch.args(), 0, launch.source())


@pytest.mark.parametrize("fields", [{}, {"advantages": [0.0] * 13, "teacher_log_probs": [-0.25] * 13}])
def test_a_sample_without_advantages_or_with_a_teacher_is_refused(fields: dict[str, Any]) -> None:
    """Neither zeros nor logprobs of a teacher are trained as advantages."""

    async def play(prompt: Prompt) -> list[Sample]:
        return [made_sample(prompt, **fields)]

    launch = Launch(batch_size=2, n=2, play=play)
    with pytest.raises(ConfigError, match=r"advantages: got .*custom_advantage_function_path"):
        generate_rollout_batch(launch.args(**FLAG), 0, launch.source())


def test_a_launch_that_distils_is_refused() -> None:
    """slime's trainer would read advantages as logprobs of a teacher, and the reverse."""
    launch = Launch()
    with pytest.raises(ConfigError, match=r"args\.use_opd: got True; expected Sample\.advantages"):
        generate_rollout_batch(launch.args(**FLAG, use_opd=True, opd_type="megatron"), 0, launch.source())
    scores = "slime.rollout.on_policy_distillation.post_process_rewards"
    with pytest.raises(ConfigError, match=r"args\.custom_reward_post_process_path: .*teacher"):
        generate_rollout_batch(launch.args(**FLAG, custom_reward_post_process_path=scores), 0, launch.source())


@pytest.mark.parametrize(
    ("opd", "function", "data"),
    [
        (True, OURS, {"teacher_log_probs": [[-0.5]]}),
        (False, OURS, {}),
        (False, f"{__name__}.wrapped", {"teacher_log_probs": [[-0.5]]}),
    ],
)
def test_another_column_is_never_advantages(opd: bool, function: str, data: dict[str, Any]) -> None:
    """slime's trainer takes only the column of our own rollouts: another function may set a teacher's."""
    with pytest.raises(ConfigError, match=r"args\.custom_advantage_function_path: .*generate_rollout_batch.*use-opd"):
        sample_advantages(Namespace(use_opd=opd, rollout_function_path=function), dict(data))


def wrapped(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    """A rollout function around ours, which could set the column afterwards."""
    return generate_rollout_batch(args, rollout_id, source, evaluation)


@pytest.mark.extra
@pytest.mark.parametrize("parts", [1, 2])
def test_slimes_trainer_computes_them(parts: int, slime_path: Path, manager_class: Any, tmp_path: Path) -> None:
    """slime's conversion, split, parts of the context and computation give each token the number of the filter."""
    samples, found = computed(by_token, FLAG, parts, slime_path, manager_class, tmp_path)
    for position, sample in enumerate(samples):
        expected = [(place - 7 + sample.index) * bit for place, bit in enumerate(sample.loss_mask, 3)]
        assert sorted(found[position]) == sorted(expected)
        assert parts > 1 or found[position] == expected


@pytest.mark.parity("equal")
@pytest.mark.extra
def test_grpo_by_either_path_is_the_same(slime_path: Path, manager_class: Any, tmp_path: Path) -> None:
    """The estimator of :mod:`rollouts.training.credit` against slime's own normalisation and computation."""
    run = partial(computed, slime_path=slime_path, manager_class=manager_class, folder=tmp_path)
    samples, ours = run(of_groups, FLAG, 1)
    theirs = run(None, {}, 1)[1]
    masks = [np.array(sample.loss_mask, bool) for sample in samples]
    assert {len(mask) for mask in masks} == {10}
    for position, mask in enumerate(masks):
        assert np.array(ours[position])[mask] == pytest.approx(np.array(theirs[position])[mask], abs=1e-6)
        assert abs(np.array(ours[position])[mask]).min() > 0.5


def computed(
    filter_fn: Any, flags: dict[str, Any], parts: int, slime_path: Path, manager_class: Any, folder: Path
) -> tuple[list[Any], dict[int, list[float]]]:
    """slime's samples of a batch, and by position the advantages of the parts of each, in their order."""
    launch = Launch(batch_size=4, n=2, filter_fn=filter_fn)
    args = trainer_args(launch, **flags)
    samples = list(leaves(generate_rollout_batch(args, 0, launch.source()).samples))
    ray: Any = importlib.import_module("ray")
    torch: Any = importlib.import_module("torch")
    put, ray.put = ray.put, lambda value, **_: value
    try:
        trainer = Trainer(manager_class, args)
        torch.save(trainer.split(trainer.convert(samples)), folder / "data.pt")
    finally:
        ray.put = put
    path = os.pathsep.join(map(str, (slime_path, slime_path / "tests", ROOT)))
    function = flags.get("custom_advantage_function_path", "")
    subprocess.run(
        [sys.executable, "-c", TRAINER, str(folder / "data.pt"), function, str(parts)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=240,
    )
    found: dict[int, list[float]] = {}
    for _, partition, advantages, returns in torch.load(folder / "data.pt", weights_only=False):
        for position, advantage, its_return in zip(partition, advantages, returns, strict=True):
            assert torch.equal(advantage, its_return)
            found.setdefault(position, []).extend(advantage.tolist())
    return samples, found
