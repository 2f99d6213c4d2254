"""A trainer's calls through slime's manager: slime's rollout function and ours, in CPU time of a kept sample.

Both sides are launched alike: slime's data source with the same prompts, its dynamic filter, one reward function, the
same replies after lognormal times from the same server, and ``_get_rollout_data`` and
``_convert_samples_to_train_data`` of slime's ``RolloutManager``. Ours names our rollout function; in the job of several
turns slime's side has a custom generate function, ours a recipe with the same tools. The measured time is that of the
calls after the first one: prompts, rollouts, rewards, filter, the end of the batch (slime aborts, ours pauses), checks
and conversion.

Ours is launched twice: without a key of our own, so with slime's semantics, and with ``rollouts_carry_over``.

slime needs its source and its imports (torch, ray, httpx, transformers). SGLang is not imported: empty modules are in
its place.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import json
import logging
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.integrations.slime import close_rollouts
from rollouts.testing.canned import Canned, canned_server
from rollouts.testing.latency import Latency
from scripts.benches.peers_job import ANSWER, REPLY, Job
from scripts.benches.slime_job import EmptyEngines
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_slime", "slime_options"]

Row = dict[str, float | int | str]
N = 8
REPLIES = {"turns": REPLY, "single": 512}
"""Tokens of a reply."""
TARGETS = {"turns": 14.0, "single": 7.0}
"""slime's CPU time over ours with ``rollouts_carry_over``, at least."""
STARTED = 1.55
"""Prompts started for each kept group with ``rollouts_carry_over``, at most."""


@attrs.frozen(eq=False)
class Side:
    """A launch: the flags that differ."""

    name: str
    flags: Mapping[str, Any]


THEIRS = Side("slime", {"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"})
OURS = Side("ours", {"rollout_function_path": "rollouts.integrations.slime.generate_rollout_batch"})
CARRIES = Side("ours, rollouts_carry_over", {**OURS.flags, "rollouts_carry_over": True})
OF_TURNS = {
    THEIRS: {"custom_generate_function_path": "scripts.benches.slime_job.custom_generate"},
    OURS: {"rollouts_recipe": "scripts.benches.slime_job.recipe"},
    CARRIES: {"rollouts_recipe": "scripts.benches.slime_job.recipe"},
}


@attrs.frozen
class Cost:
    """Of one launch in one round."""

    kept: int
    """Samples."""
    started: float
    """Prompts for each kept group."""
    cpu: float
    """Seconds of this process, all threads."""
    wall: float

    @property
    def milliseconds(self) -> float:
        """Of a kept sample."""
        return 1000 * self.cpu / self.kept


def _manager_class(folder: Path) -> Any:
    """slime's ``RolloutManager`` without Ray around it."""
    sys.path.insert(0, str(folder))
    sys.meta_path.append(EmptyEngines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("slime.ray.rollout")
    except ImportError as error:
        raise SystemExit(f"--slime {folder}: {error}; it needs slime's source, and its imports here") from error
    logging.disable(logging.INFO)
    return module.RolloutManager.__ray_metadata__.modified_class


class Trainer:
    """The calls of slime's manager around a rollout function."""

    def __init__(self, manager_class: Any, args: Namespace) -> None:
        state = importlib.import_module("slime.rollout.sglang_rollout").GenerateState
        type(state)._instances.pop(state, None)  # as in a new process: it keeps the first launch's flags
        importlib.import_module("slime.utils.http_utils").init_http_client(args)
        self.args = args
        self.data_source = importlib.import_module("slime.rollout.data_source").RolloutDataSourceWithBuffer(args)
        self.generate_rollout = importlib.import_module("slime.utils.misc").load_function(args.rollout_function_path)
        self.custom_reward_post_process_func = None
        self.custom_convert_samples_to_train_data_func = None
        self._kind = manager_class

    def _post_process_rewards(self, samples: list[Any]) -> Any:
        return self._kind._post_process_rewards(self, samples)

    def call(self, rollout_id: int) -> tuple[int, int]:
        """One batch; returns the number of its samples, and that of the prompts that the next call begins again."""
        samples, metrics = self._kind._get_rollout_data(self, rollout_id)
        data = self._kind._convert_samples_to_train_data(self, samples)
        return len(data["tokens"]), int((metrics or {}).get("rollouts/groups_begun_again", 0))


def _round(trainer: Trainer, options: argparse.Namespace) -> Cost:
    """The cost of the calls after the first."""
    _, again = trainer.call(0)
    new, began, wall = trainer.data_source.sample_group_index, time.process_time(), time.monotonic()
    kept = started = 0
    for rollout_id in range(1, options.batches + 1):
        started += again
        count, again = trainer.call(rollout_id)
        kept += count
    cpu = time.process_time() - began
    started += trainer.data_source.sample_group_index - new
    return Cost(kept, started * N / kept, cpu, time.monotonic() - wall)


def _args(options: argparse.Namespace, url: str, **overrides: Any) -> Namespace:
    host, _, port = url.removeprefix("http://").partition(":")
    values = {
        **_ARGUMENTS,
        "rollout_batch_size": options.groups,
        "over_sampling_batch_size": round(options.groups * options.factor),
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
    }
    return Namespace(**{**values, **overrides})


def _write_prompts(file: Path, count: int, number: int) -> None:
    """The prompts of a round; no two rounds have the same."""
    with file.open("w") as rows:
        for prompt in range(count):
            text = f"Problem {number}-{prompt}: what is (2 + 2) * 2? Think first, then answer."
            rows.write(json.dumps({"prompt": text, "label": "8"}) + "\n")


_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "apply_chat_template", "apply_chat_template_kwargs", "buffer_filter_path", "ci_test",
            "custom_generate_function_path", "dump_details", "group_rm", "load_debug_rollout_data", "metadata_key",
            "mask_offpolicy_in_partial_rollout", "multimodal_keys", "partial_rollout", "reward_key", "rm_type",
            "rollout_all_samples_process_path", "rollout_max_prompt_len", "rollout_sample_filter_path",
            "rollout_shuffle", "rollout_skip_special_tokens", "rollout_stop", "rollout_stop_token_ids",
            "router_policy", "sglang_enable_deterministic_inference", "tool_key", "use_distributed_post",
            "use_rollout_routing_replay",
        )
    ),
    "advantage_estimator": "grpo",
    "custom_rm_path": "scripts.benches.slime_job.custom_reward",
    "dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "grpo_std_normalization": True,
    "input_key": "prompt",
    "label_key": "label",
    "n_samples_per_prompt": N,
    "rewards_normalization": True,
    "rollout_global_dataset": True,
    "rollout_num_engines": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_seed": 0,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_dp_size": 1,
    "sglang_server_concurrency": 512,
}  # fmt: skip
"""The arguments of slime's parser that its manager, data source and rollout function read."""


def _profile(name: str, trainer: Callable[[Side, int], Trainer], options: argparse.Namespace) -> list[Row]:
    """CPU time of ours with ``rollouts_carry_over`` by function, in the trainer's thread and in the event loop's."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: Any) -> None:
        profiles.append(cProfile.Profile(time.thread_time))
        profiles[-1].enable()

    with _quiet():
        _round(trainer(CARRIES, 0), options)  # to warm up
        close_rollouts()
        called = trainer(CARRIES, 1)
        threading.setprofile(begin)
        try:
            begin()
            cost = _round(called, options)
            close_rollouts()
        finally:
            threading.setprofile(None)
            for profile in profiles:
                profile.disable()
    stats = pstats.Stats(*profiles)
    total = sum(own for _, _, own, _, _ in stats.stats.values())  # type: ignore[attr-defined]
    found = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])  # type: ignore[attr-defined]
    samples = cost.kept * (options.batches + 1) / options.batches  # of all calls
    return [
        {
            "job": name,
            "function": f"{'/'.join(Path(file).parts[-2:])}:{line} {function}",
            "calls/sample": calls / samples,
            "µs/sample itself": 1e6 * own / samples,
            "with what it calls": 1e6 * whole / samples,
            "share": f"{own / total:.1%}",
        }
        for (file, line, function), (_, calls, own, whole, _) in found[: options.lines]
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without slime's progress bars."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def bench_slime(options: argparse.Namespace) -> list[Row]:
    """CPU time of a kept sample through slime's manager, by slime's rollout function and by ours."""
    if options.slime is None:
        raise SystemExit("scripts/bench slime: --slime DIR (or SLIME_PATH) names a checkout of slime")
    manager_class = _manager_class(options.slime)
    run = _profile if options.profile else _measure
    rows: list[Row] = []
    models = tempfile.TemporaryDirectory()
    job = Job.of(str(options.tokenizer or _text_model(Path(models.name) / "model")))
    for name in options.jobs:
        canned = attrs.evolve(_canned(name, job), latency=Latency(options.median, sigma=options.sigma))
        with canned_server(canned) as url, tempfile.TemporaryDirectory() as folder:
            rows += run(
                name, functools.partial(_trainer, manager_class, job, name, url, Path(folder), options), options
            )
    models.cleanup()
    return rows


def _text_model(folder: Path) -> Path:
    """The default tokenizer without an image processor: slime's data set takes no text prompts with one."""
    shutil.copytree(
        default_tokenizer(), folder, ignore=shutil.ignore_patterns("*.safetensors", "processor_config.json")
    )
    return folder


def _canned(name: str, job: Job) -> Canned:
    """The replies: two calls and an answer, or one reply for every prompt."""
    if name == "turns":
        return job.canned
    words = job.renderer.encode("One step after the other. " * 200).tolist()
    end = [*job.renderer.encode(ANSWER).tolist(), job.renderer.stop_token_ids[0]]
    reply = [*words[: REPLIES[name] - len(end)], *end]
    return Canned([reply], texts=[job.renderer.decode(reply[:-1])])


def _trainer(
    manager_class: Any,
    job: Job,
    name: str,
    url: str,
    folder: Path,
    options: argparse.Namespace,
    side: Side,
    number: int,
) -> Trainer:
    """A new launch of a side, for one round."""
    file = folder / "prompts.jsonl"
    _write_prompts(file, 4 * options.groups * (options.batches + 2), number)
    flags = {**side.flags, **(OF_TURNS[side] if name == "turns" else {})}
    paths = {"hf_checkpoint": job.folder, "prompt_data": str(file)}
    return Trainer(manager_class, _args(options, url, rollout_max_response_len=REPLIES[name], **paths, **flags))


def _measure(name: str, trainer: Callable[[Side, int], Trainer], options: argparse.Namespace) -> list[Row]:
    costs: dict[Side, list[Cost]] = {side: [] for side in (THEIRS, CARRIES, OURS)}
    for number in range(options.rounds + 1):  # the first is to warm up
        for side in costs:
            with calm_collector(), _quiet():
                cost = _round(trainer(side, number), options)
            close_rollouts()
            costs[side] += [cost] * (number > 0)
            print(f"{name}, round {number}: {side.name} {cost.milliseconds:.2f} ms, {cost}", file=sys.stderr)
    return [_row(name, side, found, costs[THEIRS]) for side, found in costs.items()]


def _row(name: str, side: Side, costs: list[Cost], theirs: list[Cost]) -> Row:
    ratios = [other.milliseconds / cost.milliseconds for cost, other in zip(costs, theirs, strict=False)]
    ratio, started = statistics.median(ratios), statistics.median(cost.started for cost in costs)
    aimed = side is CARRIES
    met = ratio >= TARGETS[name] and started <= STARTED
    return {
        "job": name,
        "rollout function": side.name,
        "ms/kept sample": statistics.median(cost.milliseconds for cost in costs),
        "slime's over it": ratio,
        "lowest to highest (rounds)": f"{min(ratios):.1f} to {max(ratios):.1f} ({len(ratios)})",
        "started/kept": started,
        "target": f"at least {TARGETS[name]:g}, at most {STARTED:g}" if aimed else "",
        "met": "" if not aimed else "yes" if met else "NO",
    }


def slime_options(parser: argparse.ArgumentParser) -> None:
    path = os.environ.get("SLIME_PATH")
    parser.add_argument("--slime", type=Path, default=path and Path(path), help="slime's source (default: $SLIME_PATH)")
    parser.add_argument("--jobs", nargs="+", choices=TARGETS, default=list(TARGETS), help="(default: all)")
    parser.add_argument("--groups", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="of a round (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=1.5, help="--over-sampling-batch-size over the batch, of both")
    parser.add_argument("--median", type=float, default=0.1, help="seconds of a reply (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="a profile of rollouts_carry_over instead, by function")
    parser.add_argument("--lines", type=int, default=30, help="of a profile (default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
