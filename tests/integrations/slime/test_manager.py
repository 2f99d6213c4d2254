"""slime's own ``RolloutManager``, whole: its constructor, ``generate``, ``save``, ``eval``, ``load`` and ``generate``.

The manager is created twice, as a launch and as its restart from the checkpoint, once with slime's rollout function and
once with ours. All that leaves it is compared: the requests, the train data of each rank, the file of
``--save-debug-rollout-data``, what slime logs, and the state of the data source. Ray is real and has no CPU to give, so
that the manager's lock for updates of weights is never placed; a group of engines of the kind ``placeholder`` starts no
engine, and the router is that of the launch.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime import close_rollouts
from rollouts.integrations.slime.convert import leaves
from tests.integrations.slime import test_parity as parity

ray = pytest.importorskip("ray", reason="Ray is not installed (extra: bench-slime)")

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning",  # slime never closes its HTTP client
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning",  # of Ray
    ),
]  # fmt: skip

HERE = __name__
SLIMES = "slime.rollout.sglang_rollout.generate_rollout"
OURS = "rollouts.integrations.slime.generate_rollout_batch"
BUFFERED = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
READ_ONLY = "slime.rollout.data_source.RolloutDataSource"
CHECKPOINTED = "rollouts.integrations.slime.CheckpointedDataSource"
PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
OF_THE_MANAGER: dict[str, Any] = {
    **dict.fromkeys(
        (
            "buffer_filter_path", "custom_convert_samples_to_train_data_path", "custom_reward_post_process_path",
            "dump_details", "load", "load_debug_rollout_data", "log_reward_category", "prefill_num_servers",
            "rollout_max_prompt_len",
        )
    ),
    **dict.fromkeys(
        (
            "balance_by_flops", "balance_data", "colocate", "debug_rollout_only", "debug_train_only", "offload_rollout",
            "rollout_external", "use_dynamic_batch_size", "use_fault_tolerance", "use_tensorboard", "use_wandb",
            "wandb_always_use_train_step",
        ),
        False,
    ),
    "actor_num_gpus_per_node": 1,
    "actor_num_nodes": 1,
    "advantage_estimator": "grpo",
    "custom_eval_rollout_log_function_path": f"{HERE}.logs_evaluation",
    "custom_rollout_log_function_path": f"{HERE}.logs_rollouts",
    "data_source_path": BUFFERED,
    "global_batch_size": 4,
    "grpo_std_normalization": True,
    "log_passrate": True,
    "micro_batch_size": 1,
    "n_samples_per_eval_prompt": 1,
    "num_gpus_per_node": 1,
    "rewards_normalization": True,
    "rollout_data_transport": "object-store",
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_shuffle": True,
}  # fmt: skip
"""The flags that slime's manager, data source and log read beyond those of its rollout function."""

bench = parity.bench


@pytest.fixture(scope="module", autouse=True)
def _ray(slime_path: Path) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init("local", num_cpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        yield
        ray.shutdown()


# -- functions of a launch --------------------------------------------------------------------------------------------


def logs_rollouts(rollout_id: int, args: Any, samples: list[Any], metrics: Any, seconds: float) -> bool:
    """Keep what slime logs of a batch; false, so that slime logs it too."""
    args.logged.append(("rollouts", rollout_id, [sample.index for sample in samples], slimes_own(metrics)))
    return False


def logs_evaluation(rollout_id: int, args: Any, data: dict[str, Any], metrics: Any) -> bool:
    """The same of an evaluation."""
    found = {name: (one["rewards"], one["truncated"]) for name, one in data.items()}
    args.logged.append(("evaluation", rollout_id, found, slimes_own(metrics)))
    return False


def slimes_own(metrics: Any) -> dict[str, Any]:
    """The metrics that slime's function has, too."""
    return {name: value for name, value in (metrics or {}).items() if name.startswith("rollout/")}


def changed(args: Any, change: Any) -> Any:
    """slime's data source, whose samples are changed as they are taken."""

    class Changed(importlib.import_module("slime.rollout.data_source").RolloutDataSourceWithBuffer):  # type: ignore[misc]
        def get_samples(self, num_samples: int) -> Any:
            groups = super().get_samples(num_samples)
            for sample in leaves(groups):
                change(sample)
            return groups

    return Changed(args)


def by_row(args: Any) -> Any:
    """A data source whose rows name their generate function and their reward."""

    def change(sample: Any) -> None:
        sample.generate_function_path = f"{parity.HERE}.unscored"
        sample.custom_rm_path = f"{HERE}.by_length"

    return changed(args, change)


def dated(args: Any) -> Any:
    """A data source whose metadata have dates and sets, as a Parquet column gives them."""
    return changed(args, lambda sample: sample.metadata.update(when=datetime.date(2026, 1, 1), seen={1, 2}))


class Simulator:
    """An object that a file of plain data cannot have."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Simulator)


def simulated(args: Any) -> Any:
    """A data source whose metadata have an object."""
    return changed(args, lambda sample: sample.metadata.update(task={"world": Simulator()}))


async def by_length(args: Any, sample: Any, **_: Any) -> float:
    return len(sample.tokens) + sample.index / 8


async def takes_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two requests, the second one with the first reply and a masked observation."""
    module = importlib.import_module("slime.rollout.sglang_rollout")
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    post = importlib.import_module("slime.utils.http_utils").post
    tokenizer = module.GenerateState(args).tokenizer
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs = "", 0, [], []
    for turn in range(2):
        body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, body)
        triples = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[triple[1] for triple in triples],
            log_probs=[triple[0] for triple in triples],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if turn == 0:
            ids = tokenizer.encode(" and then?", add_special_tokens=False)
            sample.append_response_tokens(args, tokens=ids, trainable=False, text=" and then?")
    sample.status = type(sample).Status.COMPLETED
    return sample


# -- one launch and its restart ---------------------------------------------------------------------------------------


class Launched:
    """The managers of a launch and of its restart, and all that left them.

    Args:
        path: the rollout function.
        folder: gets the checkpoint and the files of samples.
        flags: of the launch.
    """

    def __init__(self, bench: parity.Bench, manager_class: Any, path: str, folder: Path, **flags: Any) -> None:
        self._bench, self._kind = bench, manager_class
        (folder / "engines.yaml").parent.mkdir()
        (folder / "engines.yaml").write_text(
            "sglang: [{name: default, server_groups: [{worker_type: placeholder, num_gpus: 1}]}]"
        )
        self._flags = {
            **OF_THE_MANAGER,
            "prompt_data": str(bench.rows),
            "rollout_function_path": path,
            "eval_function_path": path,
            "save": str(folder),
            "save_debug_rollout_data": str(folder / "samples_{rollout_id}.pt"),
            "sglang_config": str(folder / "engines.yaml"),
            **flags,
        }
        self.folder = folder
        self.out: dict[str, Any] = {}

    def begin(self, **flags: Any) -> Any:
        """A new process of the trainer: its namespace and its manager."""
        args = self._bench.args(**{**self._flags, "logged": [], **flags})
        parity.start_slime(args)
        manager = self._kind(args, None)
        manager.set_train_parallel_config(dict(PARALLEL))
        self._bench.router.requests.clear()
        return manager

    def end(self, name: str, manager: Any) -> None:
        """The process ends: keep what it sent, what its functions got and what it logged."""
        close_rollouts()
        manager.dispose()
        asked = [self._bench.asked(one) for one in self._bench.router.requests if tuple(one.input_ids) != parity.PROBE]
        self.out[f"{name}: requests"] = sorted(asked, key=repr)
        self.out[f"{name}: got by functions"] = sorted(manager.args.seen, key=repr)
        self.out[f"{name}: logged"] = manager.args.logged

    def generate(self, name: str, manager: Any, rollout_id: int) -> None:
        """One batch: the train data of each rank, and the file of its samples."""
        ranks = [plain(ray.get(box.inner)) for box in manager.generate(rollout_id)]
        ids = sorted({one for rank in ranks for one in rank["rollout_ids"]})
        for rank in ranks:  # names, which slime gives from 0 on to samples without one
            rank["rollout_ids"] = [ids.index(one) for one in rank["rollout_ids"]]
        self.out[name] = ranks
        self.out[f"{name}: samples"] = self.stored(f"samples_{rollout_id}.pt")

    def stored(self, name: str) -> Any:
        """A file of ``torch.save``. A session is a random name, a trace has times, and a missing ``rollout_id`` is the
        index; ours adds the messages of the conversation."""
        torch = importlib.import_module("torch")
        found = torch.load(self.folder / name, weights_only=False)
        for sample in found.get("samples", ()):
            sample.pop("messages", None)
            sample["session_id"] = sample["session_id"] is not None
            sample["rollout_id"] = sample["index"] if sample["rollout_id"] is None else sample["rollout_id"]
            sample["trace"] = sorted({event["name"] for event in sample["trace"]["events"]})
        return plain(found)

    def play(self, *, evaluated: bool = True) -> dict[str, Any]:
        """Two batches, a checkpoint and an evaluation between them, and the second batch again after a restart."""
        first = self.begin()
        self.generate("batch 0", first, 0)
        first.save(0)
        self.out["checkpoint"] = self.stored("rollout/global_dataset_state_dict_0.pt")
        if evaluated:
            first.eval(0)
            self.out["evaluation: samples"] = self.stored("samples_eval_0.pt")
        self.generate("batch 1", first, 1)
        self.end("launch", first)
        again = self.begin(load=str(self.folder))
        again.load(0)
        self.generate("batch 1 after the restart", again, 1)
        self.end("restart", again)
        return self.out


def plain(value: Any) -> Any:
    """Nested data without tensors and arrays, so that ``==`` compares it."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return (str(value.dtype), value.tolist()) if hasattr(value, "tolist") else value


MISSING = "nothing"


def different(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """The places in which nested data differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {**ours, **theirs}
        pairs = [(name, ours.get(name, MISSING), theirs.get(name, MISSING)) for name in names]
        return [line for name, *pair in pairs for line in different(*pair, f"{place}[{name!r}]")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for at, pair in pairs for line in different(*pair, f"{place}[{at}]")]
    return [] if ours == theirs else [f"{place}: got {ours!r}; expected {theirs!r}"]


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "chat template": {"apply_chat_template": True, "rollout_max_response_len": 3},
    "in the order of the rows": {"rollout_shuffle": False},
    "reward of a group": {"group_rm": True, "evaluated": False},
    "rewards by key": {"reward_key": "score", "eval_reward_key": "acc"},
    "turns": {"custom_generate_function_path": f"{HERE}.takes_turns"},
    "forks": {
        "custom_generate_function_path": f"{parity.HERE}.unscored_branches",
        "custom_rm_path": f"{parity.HERE}.ranks",
        "kind": "array",
        "evaluated": False,
    },
    "a filter that writes": {"dynamic_sampling_filter_path": f"{HERE}.penalises"},
    "a sample filter": {"rollout_sample_filter_path": f"{parity.HERE}.removes_first"},
    "functions of a row": {"data_source_path": f"{HERE}.by_row"},
    "a read-only source": {"data_source_path": READ_ONLY},
    "metadata with dates": {"data_source_path": f"{HERE}.dated"},
    "metadata with an object": {"data_source_path": f"{HERE}.simulated"},
    "our checkpoints": {"ours": {"data_source_path": CHECKPOINTED}},
    "our checkpoints, metadata with dates": {
        "data_source_path": f"{HERE}.dated",
        "ours": {"data_source_path": CHECKPOINTED, "rollouts_inner_data_source_path": f"{HERE}.dated"},
    },
    "partial rollouts": {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
}
"""Flags of a launch. ``ours``: flags of our launch alone; ``evaluated``: whether slime evaluates with these."""


def penalises(args: Any, group: list[Any], **_: Any) -> Any:
    """An overlong penalty, which the trainer gets."""
    for sample in group:
        sample.reward -= 0.25 * sample.index
        sample.metadata["penalty"] = 0.25 * sample.index
    return importlib.import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput(keep=True)


@pytest.mark.parity("equal")
@pytest.mark.parametrize("case", CASES)
def test_a_launch_and_its_restart_are_slimes(
    bench: parity.Bench, manager_class: Any, case: str, tmp_path: Path
) -> None:
    """With either rollout function the trainer gets the same data, and the second batch is that of the restart."""
    flags = copy.copy(CASES[case])
    own, evaluated = flags.pop("ours", {}), flags.pop("evaluated", True)
    theirs = Launched(bench, manager_class, SLIMES, tmp_path / "slime", **flags).play(evaluated=evaluated)
    ours = Launched(bench, manager_class, OURS, tmp_path / "ours", **{**flags, **own}).play(evaluated=evaluated)
    assert ours.keys() == theirs.keys()
    assert different(ours, theirs) == []
    assert different(ours["batch 1 after the restart"], ours["batch 1"]) == []
    assert len(ours["batch 0"]) == PARALLEL["dp_size"]
    assert ours["launch: logged"][0][1] == 0


@pytest.mark.parity("refused by name")
def test_metadata_that_no_checkpoint_can_have_are_refused(
    bench: parity.Bench, manager_class: Any, tmp_path: Path
) -> None:
    """By our data source alone, when it takes the row: the sample, the field and the value, before any request."""
    flags = {"data_source_path": CHECKPOINTED, "rollouts_inner_data_source_path": f"{HERE}.simulated"}
    launched = Launched(bench, manager_class, OURS, tmp_path / "ours", **flags)
    manager = launched.begin()
    with pytest.raises(ConfigError, match=r"slime sample 0\.metadata\['task'\]\['world'\]: got .*plain data only"):
        manager.generate(0)
    launched.end("launch", manager)
    assert launched.out["launch: requests"] == []


# -- where slime raises -----------------------------------------------------------------------------------------------


async def raises_once(args: Any, sample: Any, **_: Any) -> float:
    """A judge that is away for a moment."""
    if not args.seen:
        args.seen.append("raised")
        raise OSError("the judge is away")
    return float(sample.index % 2)


async def aborted_once(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function whose server aborts one reply."""
    parity.replied(sample)
    if not args.seen:
        args.seen.append("aborted")
        sample.status = type(sample).Status.ABORTED
    return sample


CRASHES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a reward that raises once": ({"custom_rm_path": f"{HERE}.raises_once"}, OSError, "the judge is away"),
    "a rollout that is aborted once": (
        {"custom_generate_function_path": f"{HERE}.aborted_once"},
        TypeError,
        "NoneType",
    ),
}
"""Flags with which slime's manager raises, and the error."""


@pytest.mark.parity("slime crashes")
@pytest.mark.parametrize("case", CRASHES)
def test_what_ends_slimes_call_costs_ours_an_attempt(
    bench: parity.Bench, manager_class: Any, case: str, tmp_path: Path
) -> None:
    """slime's manager raises, and the training with it; ours plays the rollout again and fills the batch."""
    flags, error, message = CRASHES[case]
    theirs = Launched(bench, manager_class, SLIMES, tmp_path / "slime", **flags)
    manager = theirs.begin()
    with pytest.raises(error, match=message):
        manager.generate(0)
    theirs.end("launch", manager)
    ours = Launched(bench, manager_class, OURS, tmp_path / "ours", **flags)
    manager = ours.begin()
    ours.generate("batch 0", manager, 0)
    ours.end("launch", manager)
    rewards = ours.out["batch 0: samples"]["samples"]
    assert [sample["reward"] for sample in rewards] == [0.0, 1.0] * 2


@pytest.mark.parity("slime crashes")
def test_an_evaluation_with_the_reward_of_a_group_is_refused(
    bench: parity.Bench, manager_class: Any, tmp_path: Path
) -> None:
    """slime has an assertion there; ours names the flag."""
    for path, error in ((SLIMES, AssertionError), (OURS, ConfigError)):
        launched = Launched(bench, manager_class, path, tmp_path / path.partition(".")[0], group_rm=True)
        manager = launched.begin()
        with pytest.raises(error, match=r"Group RM is not supported|args\.group_rm: got True"):
            manager.eval(0)
        launched.end("launch", manager)
        assert launched.out["launch: requests"] == []
