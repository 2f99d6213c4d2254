"""miles: its own class-based rollout function and ours, with the same flags, on the same server.

Skipped unless ``MILES_PATH`` names a checkout of miles (and its requirements are installed, engines apart).
"""

from __future__ import annotations

import ast
import base64
import importlib
import os
import shutil
import struct
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.audit import audit, reader_of
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.integrations.miles import CheckpointedDataSource, RolloutFn, close_rollouts, normalise_rewards
from rollouts.integrations.slime.convert import leaves, to_slime
from rollouts.integrations.slime.pipeline import PROBE
from rollouts.integrations.slime.records import FAMILIES, family, records, use_family
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.rewards.teacher_top import top_of
from rollouts.testing.server import StubServer
from scripts.benches.slime_job import EmptyEngines
from tests.audit.dumps import model_tokens, said
from tests.integrations.slime.launches import set_every_field
from tests.rewards.test_teacher_top import with_top

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # miles never closes its HTTP client
]

HERE = __name__
COMMON = "miles.rollout.inference_rollout.inference_rollout_common"


class _Dumper:
    """The part of SGLang's dumper that miles calls where it is off."""

    @staticmethod
    def _kv_pairs_to_dict(pairs: list[str]) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def miles_path() -> Iterator[Path]:
    """The checkout; miles is importable meanwhile, with empty modules in the place of sglang."""
    path = os.environ.get("MILES_PATH")
    if not path:
        pytest.skip("MILES_PATH names no checkout of miles")
    sys.path.append(path)
    engines = EmptyEngines()
    sys.meta_path.append(engines)
    importlib.import_module("sglang.srt.debug_utils.dumper").DumperConfig = _Dumper
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("miles.rollout.inference_rollout.inference_rollout_train")
        importlib.import_module("miles.rollout.inference_rollout.inference_rollout_eval")
    use_family("miles")
    yield Path(path)
    use_family("slime")
    sys.meta_path.remove(engines)
    sys.path.remove(path)


class Source:
    """A data source like miles': numbered groups."""

    def __init__(self, n: int) -> None:
        self.n, self.given = n, 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        numbers = range(self.given, self.given + num_samples)
        self.given += num_samples
        return [
            [
                records().sample(
                    group_index=number,
                    index=number * self.n + member,
                    prompt=f"prompt {number}",
                    label=str(number),
                    metadata={"row": number},
                )
                for member in range(self.n)
            ]
            for number in numbers
        ]

    def add_samples(self, samples: list[list[Any]]) -> None:
        assert all(len(group) == self.n for group in samples)


@attrs.frozen
class Bench:
    """A stub of a router and of a worker, which both rollout functions use."""

    router: StubServer
    model: Path
    rows: Path
    stops: frozenset[int]

    def args(self, **overrides: Any) -> Namespace:
        host, port = self.router.url.removeprefix("http://").split(":")
        place = {"hf_checkpoint": "model", "sglang_router_ip": host, "sglang_router_port": int(port)}
        args = Namespace(**{**DEFAULTS, **place, "seen": [], **overrides})
        args.hf_checkpoint = str(self.model.with_name(args.hf_checkpoint))
        build = importlib.import_module("miles.utils.eval_config").build_eval_dataset_configs
        sets = [{"name": "one", "path": str(self.rows), **getattr(args, "eval_fields", {})}]
        args.eval_datasets = build(args, sets, {})
        return args

    def play(self, path: str, args: Namespace, *, evaluation: bool) -> Played:
        """Load and call a rollout function as miles' manager does."""
        base = importlib.import_module("miles.rollout.base_types")
        calls = importlib.import_module("miles.rollout.inference_rollout.compatibility")
        importlib.import_module("miles.utils.http_utils").init_http_client(args)
        self.router.requests.clear()
        made = base.RolloutFnConstructorInput(args=args, data_source=Source(args.n_samples_per_prompt))
        function = calls.load_rollout_function(made, path)
        kind = base.RolloutFnEvalInput if evaluation else base.RolloutFnTrainInput
        output = calls.call_rollout_function(function, kind(rollout_id=0))
        assert isinstance(output, base.RolloutFnEvalOutput if evaluation else base.RolloutFnTrainOutput)
        extra: Any = None
        samples = output.data["one"]["samples"] if evaluation else [*leaves(output.samples)]
        if evaluation:
            extra = (output.data["one"]["rewards"], output.data["one"]["truncated"])
        requests = [each for each in self.router.requests if tuple(each.input_ids) != PROBE]
        return Played(samples, sorted(map(self.asked, requests), key=repr), extra, args.seen)

    def asked(self, request: Any) -> Any:
        """A request without what concerns only its text, and with the defaults of what it leaves out."""
        text = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}
        given = {name: value for name, value in request.sampling_params.items() if name not in text}
        params = {"min_p": 0.0, "sampling_seed": None, **given}
        params["stop"] = sorted(params.get("stop") or ())
        params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ())} - self.stops)
        routed = request.body.get("return_routed_experts", False)
        return list(request.input_ids), sorted(params.items()), request.body["return_logprob"], routed

    def both(self, *, evaluation: bool, **overrides: Any) -> tuple[Played, Played]:
        """miles' function, then ours, each with its own namespace."""
        theirs = self.play(f"{COMMON}.InferenceRolloutFn", self.args(**overrides), evaluation=evaluation)
        ours = self.play("rollouts.integrations.miles.RolloutFn", self.args(**overrides), evaluation=evaluation)
        close_rollouts()
        return theirs, ours


@attrs.frozen
class Played:
    """Result and requests of a rollout function."""

    samples: list[Any]
    requests: list[Any]
    extra: Any
    seen: list[Any]

    def fields(self) -> list[dict[str, Any]]:
        """Every field; no mask is one of ones, a missing ``rollout_id`` is the index, a routing key is random."""
        found = [{name: getattr(one, name) for name in type(one).__dataclass_fields__} for one in self.samples]
        for entry in found:
            if isinstance(entry["loss_mask"], list | None):
                entry["loss_mask"] = entry["loss_mask"] or [1] * entry["response_length"]
            entry["rollout_id"] = entry["index"] if entry["rollout_id"] is None else entry["rollout_id"]
            entry["routing_key"] = entry["routing_key"] is not None
            if isinstance(entry["rollout_routed_experts"], np.ndarray):
                column = entry["rollout_routed_experts"]
                entry["rollout_routed_experts"] = (str(column.dtype), column.tolist())
        return found


def check_equal(ours: Played, theirs: Played) -> None:
    assert ours.requests == theirs.requests
    pairs = zip(ours.fields(), theirs.fields(), strict=True)
    different = [{name: (one[name], other[name]) for name in one if one[name] != other[name]} for one, other in pairs]
    assert [entry for entry in different if entry] == []
    assert ours.extra == theirs.extra
    assert sorted(ours.seen, key=repr) == sorted(theirs.seen, key=repr)


@pytest.fixture(scope="module")
def bench(miles_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("miles")
    model, rows = folder / "model", folder / "rows.jsonl"
    for path in (model, folder / "other"):  # a text model: miles' data set takes no text prompts with a processor
        shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns("*.safetensors", "processor_config.json"))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ ' calmly' if calm }} ->")
    data = [{"q": f"question {row}" + " again" * row, "a": str(row), "metadata": {"row": row}} for row in range(3)]
    rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in data))
    tokenizer = load_tokenizer(model)
    codec = Codec(tokenizer)
    reply = codec.encode("The answer is 3.<|im_end|>").tolist()

    def answer(input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        ids = reply[: params["max_new_tokens"]]
        cut = {"type": "length", "length": len(ids)}
        meta = {
            "finish_reason": cut if len(ids) < len(reply) else {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "weight_version": "7",
            "spec_accept_token_num": 3,
            "spec_draft_token_num": 4,
            "spec_verify_ct": 2,
            "output_token_logprobs": [[-0.25 * (1 + number % 3), token, None] for number, token in enumerate(ids)],
        }
        if stub.requests[-1].body.get("return_routed_experts"):
            numbers = [position % 5 + 1 for position in range(len(input_ids) + len(ids) - 1) for _ in range(2)]
            meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
        return {"text": codec.decode(ids), "output_ids": ids, "meta_info": meta}

    with start_blocking_portal() as portal, ExitStack() as servers:
        worker = servers.enter_context(portal.wrap_async_context_manager(StubServer(loads=dict)))
        stub = StubServer(answer, workers=[worker.url])
        router = servers.enter_context(portal.wrap_async_context_manager(stub))
        yield Bench(router, model, rows, frozenset(stop_ids_of(tokenizer)))
        close_rollouts()


# -- functions of a launch --------------------------------------------------------------------------------------------


async def score(args: Any, given: Any, **_: Any) -> Any:
    if isinstance(given, list):
        return [float(sample.index % 2) for sample in given]
    reward = float(given.index % 2)
    return {"score": reward, "acc": 1.0 - reward} if args.reward_key or args.eval_reward_key else reward


def filled(args: Any, sample: Any, params: dict[str, Any], evaluation: bool) -> Any:
    """Set every field, also fields that this package does not know."""
    args.seen.append((sample.index, sample.prompt, sorted(params.items(), key=repr), evaluation))
    left = {"index", "group_index", "rollout_id", "routing_key", "generate_function_path", "reward_spec"}
    set_every_field(sample, kept=left)
    sample.non_generation_time = 1.5
    return sample


async def legacy(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    return filled(args, sample, sampling_params, evaluation)


async def newer(input: Any) -> Any:
    base = importlib.import_module("miles.rollout.base_types")
    return base.GenerateFnOutput(filled(input.args, input.sample, input.sampling_params, input.evaluation))


class Made:
    """The class form of the newer one."""

    async def __call__(self, input: Any) -> Any:
        return await newer(input)


def keeps_all(args: Any, group: list[Any], **_: Any) -> Any:
    args.seen.append(("dynamic filter", [(sample.index, sample.reward) for sample in group]))
    return True


def removes_first(args: Any, groups: list[Any]) -> None:
    groups[0][0].remove_sample = True


def sees_all(args: Any, groups: list[Any], get_samples: Any) -> None:
    args.seen.append(("all samples", [[sample.index for sample in group] for group in groups]))


# -- parity -----------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "chat_template_path": None,
    "custom_generate_function_path": None,
    "custom_rm_path": f"{HERE}.score",
    "dumper_enable": False,
    "dumper_inference": [],
    "eval_num_gpus": 0,
    "dynamic_sampling_filter_path": None,
    "eval_max_prompt_len": None,
    "eval_reward_key": None,
    "group_rm": False,
    "input_key": "q",
    "label_key": "a",
    "lora_adapter_path": None,
    "lora_rank": 0,
    "mask_offpolicy_in_partial_rollout": False,
    "metadata_key": "metadata",
    "multimodal_keys": None,
    "n_samples_per_prompt": 2,
    "over_sampling_batch_size": 2,
    "partial_rollout": False,
    "reward_key": None,
    "rollout_all_samples_process_path": None,
    "rollout_batch_size": 2,
    "rollout_global_dataset": True,
    "rollout_max_context_len": None,
    "rollout_max_response_len": 32,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_sample_filter_path": None,
    "rollout_seed": 42,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_submission_granularity": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_enable_deterministic_inference": False,
    "sglang_router_policy": None,
    "sglang_server_concurrency": 512,
    "sglang_speculative_algorithm": None,
    "tool_key": None,
    "use_distributed_post": False,
    "use_miles_router": False,
    "use_rollout_indexer_replay": False,
    "use_rollout_routing_replay": False,
}

CHANGED: dict[str, dict[str, Any]] = {
    "apply_chat_template": {"apply_chat_template": True},
    "apply_chat_template_kwargs": {"apply_chat_template": True, "apply_chat_template_kwargs": {"calm": True}},
    "custom_generate_function_path": {"custom_generate_function_path": f"{HERE}.legacy"},
    "dynamic_sampling_filter_path": {"dynamic_sampling_filter_path": f"{HERE}.keeps_all"},
    "eval_datasets": {"eval_fields": {"n_samples_per_eval_prompt": 3, "temperature": 0.5}},
    "eval_max_prompt_len": {"eval_max_prompt_len": 9},
    "eval_reward_key": {"reward_key": "score", "eval_reward_key": "acc"},
    "group_rm": {"group_rm": True},
    "hf_checkpoint": {"hf_checkpoint": "other"},
    "mask_offpolicy_in_partial_rollout": {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
    "n_samples_per_prompt": {"n_samples_per_prompt": 3},
    "num_layers": {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 1},
    "over_sampling_batch_size": {"rollout_batch_size": 3, "over_sampling_batch_size": 3},
    "partial_rollout": {"partial_rollout": True},
    "reward_key": {"reward_key": "score"},
    "rollout_all_samples_process_path": {"rollout_all_samples_process_path": f"{HERE}.sees_all"},
    "rollout_batch_size": {"rollout_batch_size": 1, "over_sampling_batch_size": 1},
    "rollout_max_context_len": {"rollout_max_context_len": 20},
    "rollout_max_response_len": {"rollout_max_response_len": 3},
    "rollout_num_gpus": {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
    "rollout_num_gpus_per_engine": {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
    "rollout_sample_filter_path": {"rollout_sample_filter_path": f"{HERE}.removes_first"},
    "rollout_seed": {"rollout_seed": 7, "sglang_enable_deterministic_inference": True},
    "rollout_skip_special_tokens": {"rollout_max_response_len": 3, "rollout_skip_special_tokens": True},
    "rollout_stop": {"rollout_stop": ["END", "FIN"]},
    "rollout_stop_token_ids": {"rollout_stop_token_ids": [7, 8]},
    "rollout_submission_granularity": {"rollout_submission_granularity": "sample"},
    "rollout_temperature": {"rollout_temperature": 0.5},
    "rollout_top_k": {"rollout_top_k": 20},
    "rollout_top_p": {"rollout_top_p": 0.9},
    "sglang_enable_deterministic_inference": {"sglang_enable_deterministic_inference": True},
    "sglang_router_policy": {"sglang_router_policy": "consistent_hashing"},
    "sglang_server_concurrency": {"sglang_server_concurrency": 2},
    "use_rollout_routing_replay": {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 1},
}
"""Each flag with another value than the default; equal requests and equal samples."""

REFUSED: dict[str, Any] = {
    "chat_template_path": "file.jinja",
    "dumper_enable": True,
    "multimodal_keys": {"image": "images"},
    "rollout_global_dataset": False,
    "use_miles_router": True,
    "use_rollout_indexer_replay": True,
}
READ_ELSEWHERE: dict[str, Any] = {
    "lora_rank": 8,
    "lora_adapter_path": "/adapter",
    "recompute_logprobs_via_prefill": True,
    "custom_agent_function_path": "agents.run",
}
"""Flags with the value that is refused by its name; the latter are read by other modules of miles."""

BY_CONSTRUCTION = {"sglang_router_ip", "sglang_router_port"}
READ_BY = (
    "inference_rollout/inference_rollout_common.py",
    "inference_rollout/inference_rollout_train.py",
    "inference_rollout/inference_rollout_eval.py",
    "generate_hub/single_turn.py",
    "generate_utils/generate_endpoint_utils.py",
    "submission_scheduler.py",
)


def read_by_miles(miles_path: Path) -> set[str]:
    """The flags that miles' rollout function and its evaluation read."""
    found = set()
    for file in READ_BY:
        for node in ast.walk(ast.parse((miles_path / "miles/rollout" / file).read_text())):
            value, name = None, None
            if isinstance(node, ast.Attribute):
                value, name = node.value, node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                value, name = node.args[0], getattr(node.args[1], "value", None)
            if getattr(value, "id", None) == "args" and isinstance(name, str):
                found.add(name)
    return found


def test_every_flag_that_miles_reads_is_in_the_tables(miles_path: Path) -> None:
    """A flag that a later miles reads has to be compared, or refused."""
    flags = read_by_miles(miles_path)
    assert len(flags) > 30
    assert flags - CHANGED.keys() - REFUSED.keys() - BY_CONSTRUCTION == set()


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("function", [None, "legacy", "newer", "Made"])
def test_every_field_is_that_of_miles_own_function(bench: Bench, function: str | None, evaluation: bool) -> None:
    """All fields of miles' ``Sample``; generate functions of slime's form, of the newer one, and classes."""
    path = function and f"{HERE}.{function}"
    theirs, ours = bench.both(evaluation=evaluation, custom_generate_function_path=path)
    check_equal(ours, theirs)


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("flag", CHANGED)
def test_a_flag_does_what_it_does_in_miles(bench: Bench, flag: str, evaluation: bool) -> None:
    """Equal requests, equal samples, equal calls of the launch's functions."""
    if flag == "group_rm" and evaluation:
        pytest.skip("miles has no evaluation with --group-rm")
    theirs, ours = bench.both(evaluation=evaluation, **CHANGED[flag])
    check_equal(ours, theirs)


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
def test_dumps_of_miles_raise_no_alarm(bench: Bench, evaluation: bool, tmp_path: Path) -> None:
    """Of its own rollout function, written by its own ``save_debug_rollout_data``."""
    template = str(tmp_path / "{rollout_id}.pt")
    args = bench.args(save_debug_rollout_data=template, save_debug_trajectory_data=None)
    samples = bench.play(f"{COMMON}.InferenceRolloutFn", args, evaluation=evaluation).samples
    save = importlib.import_module("miles.ray.rollout.debug_data").save_debug_rollout_data
    save(args, {"one": {"samples": samples}} if evaluation else samples, 0, evaluation)
    report = audit(tmp_path, reader_of("slime-pt"), model_tokens=model_tokens())
    assert said(f"miles, single turn, {'evaluation' if evaluation else 'training'}", report) == []
    assert report.judged["text"] == report.rows >= 4


@pytest.mark.parity("refused by name")
@pytest.mark.parametrize("flag", [*REFUSED, *READ_ELSEWHERE])
def test_a_flag_that_is_not_served_is_refused(bench: Bench, flag: str) -> None:
    """By its name, before the first request."""
    args = bench.args(**{flag: {**REFUSED, **READ_ELSEWHERE}[flag]})
    bench.router.requests.clear()
    with pytest.raises(ConfigError, match=rf"args\.{flag}"):
        RolloutFn(Namespace(args=args, data_source=Source(2)))(Namespace(rollout_id=0, evaluation=False))
    assert bench.router.requests == []


@pytest.mark.parity("equal")
def test_the_counters_of_speculative_decoding_are_kept(bench: Bench) -> None:
    """As in miles."""
    theirs, ours = bench.both(evaluation=False, sglang_speculative_algorithm="EAGLE")
    check_equal(ours, theirs)
    assert ours.samples[0].spec_info.spec_accept_token_num == 3


@pytest.mark.parity("refused by name")
@pytest.mark.parametrize("field", ["generate_state", "hf_dir"])
def test_an_evaluation_on_other_servers_is_refused(bench: Bench, field: str) -> None:
    """miles evaluates a checkpoint on separate servers."""
    made = RolloutFn(Namespace(args=bench.args(), data_source=Source(2)))
    with pytest.raises(ConfigError, match=rf"RolloutFnEvalInput\.{field}"):
        made(Namespace(rollout_id=0, evaluation=True, **{field: "x"}))


def test_miles_has_its_own_record_classes(bench: Bench) -> None:
    """The batch consists of miles' samples, and the advantages are those of groups."""
    ours = bench.play("rollouts.integrations.miles.RolloutFn", bench.args(), evaluation=False)
    close_rollouts()
    assert {type(sample).__module__ for sample in ours.samples} == {"miles.utils.types"}
    assert family() is FAMILIES["miles"]
    args = bench.args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)
    assert sum(normalise_rewards(args, ours.samples)[1]) == pytest.approx(0.0, abs=1e-5)
    for sample in ours.samples:
        sample.validate()


def test_the_data_source_reads_miles_own(miles_path: Path) -> None:
    """Around the class that miles uses, by its path."""
    inner: Callable[..., Any] = importlib.import_module("miles.rollout.data_source").RolloutDataSource
    args = Namespace(rollout_global_dataset=False, n_samples_per_prompt=2)
    source = CheckpointedDataSource(args)
    assert isinstance(source.inner, type(inner(args)))


# -- a teacher's most probable ids ------------------------------------------------------------------------------------


@pytest.mark.parity("equal")
@pytest.mark.parametrize("weights", ["student_p", "teacher_p", "none"])
def test_the_divergence_to_a_teacher_is_miles_own(weights: str, miles_path: Path) -> None:
    """Its reward function, fed with the same logprobs, computes our ``opd_reverse_kl``; its loss takes either alike."""
    import torch

    opd = importlib.import_module("miles.rollout.on_policy_distillation")
    loss = importlib.import_module("miles.backends.training_utils.loss_hub.opd")
    args = Namespace(
        opd_log_prob_top_k=5, opd_top_k_strategy="only-teacher", opd_reward_weight_mode=weights, opd_kl_coef=0.5
    )
    for sample in with_top(4):
        record, top = to_slime(sample, kl_weights=weights), top_of(sample)
        assert top is not None
        assert top.student is not None
        record.validate()
        mask, width = sample.mask_column, sample.response_length
        of_teacher: list[Any] = [[[0.0, 0, None]] for _ in sample.tokens]
        of_student: list[Any] = [[[0.0, 0, None]] for _ in sample.tokens]
        for row, position in enumerate(np.flatnonzero(mask)):
            ids = top.ids[row].tolist()
            for entries, column in ((of_teacher, top.logprobs), (of_student, top.student)):
                entries[position] = [[value, one, None] for value, one in zip(column[row].tolist(), ids, strict=True)]
        replies = {
            "teacher": {"meta_info": {"input_top_logprobs": [None, *of_teacher[1:]]}},
            "student_on_teacher": {"meta_info": {"input_token_ids_logprobs": [None, *of_student[1:]]}},
        }
        theirs = opd._compute_topk_reverse_kl(args, record, replies)
        assert record.opd_reverse_kl.shape == theirs.shape == (width,)
        assert record.opd_reverse_kl.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)
        assert "top_ids" not in record.metadata["scored_by"]
        taken = []
        for column in (theirs, record.opd_reverse_kl):
            advantages = [torch.ones(width)]
            loss.apply_opd_kl_to_advantages(args, {"opd_reverse_kl": [column]}, advantages, [torch.zeros(width)])
            taken.append(advantages[0])
        assert torch.equal(taken[1], 1 - 0.5 * record.opd_reverse_kl)
        assert taken[0].tolist() == pytest.approx(taken[1].tolist(), abs=1e-6)
