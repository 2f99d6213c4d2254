"""slime itself: its classes, its own contract tests with our paths, and its real conversion of our batches.

Skipped unless ``SLIME_PATH`` names a checkout, e.g. ``SLIME_PATH=~/slime pytest tests/integrations/slime``.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import Image, Message
from rollouts.integrations.slime import generate_rollout_batch, normalise_rewards, write_debug_data
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import OWN_KEYS
from rollouts.renderer import Renderer
from rollouts.training import Prompt, Sample
from tests.integrations.slime.launches import Launch, made_sample
from tests.processors import CHATML, FAMILIES, build_processor, load_tokenizer_of, own_text, picture

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[3]
DOOR = "rollouts.integrations.slime"


class Trainer:
    """slime's conversion and split, on a batch of ours."""

    def __init__(self, manager_class: Any, args: Namespace, post_process: Any = None) -> None:
        self.args = args
        self.custom_reward_post_process_func = post_process
        self.custom_convert_samples_to_train_data_func = None
        self.train_parallel_config = {
            "dp_size": 2,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        self._kind = manager_class

    def _post_process_rewards(self, samples: list[Any]) -> Any:
        return self._kind._post_process_rewards(self, samples)

    def convert(self, samples: list[Any]) -> dict[str, Any]:
        data: dict[str, Any] = self._kind._convert_samples_to_train_data(self, samples)
        return data

    def split(self, data: dict[str, Any]) -> list[Any]:
        return [box.inner for box in self._kind._split_train_data_by_dp(self, data)]


def trainer_args(launch: Launch, **overrides: Any) -> Namespace:
    sizes = {"global_batch_size": launch.batch_size * launch.n, "use_dynamic_batch_size": False, "micro_batch_size": 1}
    return launch.args(
        **{
            **sizes,
            "balance_data": False,
            "balance_by_flops": False,
            "rollout_data_transport": "object-store",
            **overrides,
        }
    )


def test_the_records_in_use_are_slimes(slime_path: Path) -> None:
    """The rollout function returns objects of slime's own classes."""
    assert records().is_slime
    output = generate_rollout_batch((launch := Launch()).args(), 0, launch.source())
    assert type(output).__module__ == "slime.rollout.base_types"
    assert {type(sample).__module__ for sample in leaves(output.samples)} == {"slime.utils.types"}


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("plugin_contracts/test_plugin_rollout_contracts.py", {"rollout-function-path": "generate_rollout_batch"}),
        ("plugin_contracts/test_plugin_generate_contracts.py", {"custom-generate-function-path": "generate"}),
        (
            "plugin_contracts/test_plugin_path_loading_contracts.py",
            {
                "eval-function-path": "generate_rollout_batch",
                "custom-rm-path": "reward",
                "dynamic-sampling-filter-path": "filters.check_reward_nonzero_std",
                "buffer-filter-path": "filters.pop_stalest",
                "data-source-path": "CheckpointedDataSource",
            },
        ),
        ("plugin_contracts/test_plugin_path_loading_contracts.py", {"buffer-filter-path": "filters.pop_hardest"}),
        (
            "plugin_contracts/test_plugin_runtime_hook_contracts.py",
            {"custom-reward-post-process-path": "normalise_rewards"},
        ),
        ("test_sample.py", {}),
        ("test_rollout_data_utils.py", {}),
        ("test_rollout_metrics.py", {}),
        ("test_rollout_sample_hooks.py", {}),
        ("test_dp_schedule.py", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "own",
)
def test_slimes_own_tests_pass_with_our_paths(slime_path: Path, file: str, flags: dict[str, str]) -> None:
    """Each in its own process, as slime runs them."""
    options = [part for flag, name in flags.items() for part in (f"--{flag}", f"{DOOR}.{name}")]
    command = [sys.executable, str(slime_path / "tests" / file)] if flags else [sys.executable, "-m", "pytest", file]
    found = subprocess.run(
        [*command, *options, "-q", "-p", "no:cacheprovider"],
        cwd=slime_path if flags else slime_path / "tests",
        env={**os.environ, "PYTHONPATH": f"{slime_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.parity("equal")
def test_slime_converts_our_batches(manager_class: Any) -> None:
    """Conversion and split run through; rewards, masks and ids are what the contract says."""
    launch = Launch(batch_size=4, n=2)
    args = trainer_args(launch)
    output = generate_rollout_batch(args, 0, launch.source())
    utils = importlib.import_module("slime.observability.rollout_data_utils")
    utils.validate_rollout_id_annotated(output.samples)
    samples = list(leaves(output.samples))
    trainer = Trainer(manager_class, args)
    data = trainer.convert(samples)
    assert np.abs(data["rewards"]) == pytest.approx(np.full(8, 0.7071), abs=1e-4)
    assert data["rewards"] == pytest.approx(normalise_rewards(args, samples)[1], abs=1e-6)
    assert data["rollout_mask_sums"] == [8] * 8
    assert data["rollout_ids"] == [sample.index for sample in samples]
    assert all(len(row) == 10 for row in data["rollout_log_probs"])
    ray = importlib.import_module("ray")
    put, ray.put = ray.put, lambda value, **_: value
    try:
        ranks = trainer.split(data)
    finally:
        ray.put = put
    assert sorted(position for rank in ranks for position in rank["partition"]) == list(range(8))
    assert {str(tensor.dtype) for rank in ranks for tensor in rank["rollout_log_probs"]} == {"torch.float32"}


def test_slime_converts_forks_with_our_normaliser(manager_class: Any) -> None:
    """Fan-out passes slime's check of rollout ids, and each rollout has one advantage and one denominator."""

    async def play(prompt: Prompt) -> list[Sample]:
        return [made_sample(prompt, branch=branch) for branch in range(1 + (prompt.index or 0) % 2)]

    launch = Launch(batch_size=3, n=2, play=play)
    args = trainer_args(launch)
    output = generate_rollout_batch(args, 0, launch.source())
    importlib.import_module("slime.observability.rollout_data_utils").validate_rollout_id_annotated(output.samples)
    samples = list(leaves(output.samples))
    assert len(samples) == 9
    data = Trainer(manager_class, args, normalise_rewards).convert(samples)
    for sample, reward, mask_sum in zip(samples, data["rewards"], data["rollout_mask_sums"], strict=True):
        odd = sample.index % 2
        assert reward == pytest.approx(0.7071 if odd else -0.7071, abs=1e-4)
        assert mask_sum == (16 if odd else 8)


def test_slime_reads_our_debug_file(slime_path: Path, tmp_path: Path) -> None:
    """``--load-debug-rollout-data`` reads the files of ``rollouts export --to slime``."""
    samples = [
        made_sample(Prompt("p", group_index=0, index=i), reward=float(i), group_index=0, index=i, rollout_id=i)
        for i in range(2)
    ]
    write_debug_data(samples, tmp_path / "0.pt")
    utils = importlib.import_module("slime.observability.rollout_data_utils")
    loaded = utils.load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=0)
    assert [sample.tokens for sample in loaded] == [sample.tokens for sample in samples]
    assert [sample.reward for sample in loaded] == [0.0, 1.0]


def test_slimes_dashboards_light_up(slime_path: Path) -> None:
    """The metrics that slime derives from samples find their fields."""
    launch = Launch(batch_size=3, n=2)
    args = trainer_args(launch, rollout_num_gpus=1, log_reward_category=None)
    samples = list(leaves(generate_rollout_batch(args, 0, launch.source()).samples))
    metrics = importlib.import_module("slime.observability.rollout_metrics")
    numbers = metrics.compute_metrics_from_samples(args, samples)
    speed = metrics.compute_perf_metrics_from_samples(args, samples, 2.0)
    assert numbers["response_len/mean"] == 8
    assert numbers["prefix_cache_hit_rate"] == pytest.approx(3 / 12)
    assert speed["non_generation_time/mean"] == 0.25


@pytest.mark.parametrize("file", ["training/slime/run_qwen3.sh", "docs/slime.md"])
def test_the_launch_script_names_flags_that_slime_has(slime_path: Path, file: str) -> None:
    """Every flag of the script is in slime's arguments, or in one of slime's launch scripts (those of Megatron)."""
    script = (ROOT / file).read_text()
    flags = sorted(set(re.findall(r"^  (--[a-z0-9-]+)", script, re.MULTILINE)))
    theirs = [slime_path / "slime/utils/arguments.py", *(slime_path / "scripts").glob("*.sh")]
    known = "\n".join(path.read_text() for path in theirs)
    assert len(flags) > 30
    assert [flag for flag in flags if not re.search(re.escape(flag) + r"\b", known)] == []


@pytest.mark.parametrize("task", ["calculator", "gsm8k"])
def test_the_launch_yaml_names_keys_that_are_read(slime_path: Path, task: str) -> None:
    """Each key is one of ours; the recipe is there."""
    yaml = importlib.import_module("yaml")
    text = (ROOT / f"training/slime/{task}.yaml").read_text()
    keys = yaml.safe_load(text)
    assert keys.keys() <= OWN_KEYS.keys()
    module, _, function = keys["rollouts_recipe"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parity("equal")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_ids_and_inputs_of_images_are_those_of_slimes_own_function(
    name: str, slime_path: Path, small_tokenizer_folder: Callable[[str], Path]
) -> None:
    """For rows of 0 to 3 images, one of them twice: ids, ``multimodal_train_inputs``, and the bytes for the server."""
    family = FAMILIES[name]
    tokenizer = load_tokenizer_of(family, str(small_tokenizer_folder("qwen3")))
    processor, template = build_processor(family, tokenizer), CHATML.replace("PLACEHOLDER", family.written)
    renderer = Renderer(tokenizer, chat_template=template, images=processor)
    torch = pytest.importorskip("torch")
    module = importlib.import_module("slime.rollout.sglang_rollout")
    kind = importlib.import_module("slime.utils.types").Sample
    encode = importlib.import_module("slime.utils.processing_utils").encode_image_for_rollout_engine
    first, second = picture(97, 61), picture(30, 150)
    for images in ([], [first], [first, second, first]):
        messages = [Message("user", ("Compare: ", *images, "."))]
        pictures = [image.to_pil() for image in images]
        text = own_text(tokenizer, template, messages)
        sample = kind(prompt=text, multimodal_inputs={"images": pictures or None, "videos": None})
        ids = module._prepare_prompt_ids(sample, tokenizer, processor)
        assert renderer.opening(messages).tolist() == list(ids)
        assert renderer.images is not None
        ours, theirs = renderer.images.inputs(images), sample.multimodal_train_inputs or {}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.from_numpy(ours[key].copy()), theirs[key]) for key in theirs)
        assert [Image.of(each).url for each in pictures] == [encode(each) for each in pictures]
