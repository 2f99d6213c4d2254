"""Parity with slime: its own rollout function and ours, with the same flags, on the same server.

Every field of slime's ``Sample`` and every flag that ``slime/rollout/sglang_rollout.py`` reads has to be equal, or
refused by name. Both lists are taken from slime's source: a flag that a later slime adds fails here until a table
has it.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import copy
import functools
import gc
import importlib
import itertools
import shutil
import struct
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.pipeline import PROBE
from rollouts.integrations.slime.records import records
from rollouts.renderer.tokenizer import Codec, load_tokenizer, stop_ids_of
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from tests.integrations.slime.launches import Source, set_every_field
from tests.integrations.slime.test_with_slime import Trainer

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # slime never closes its HTTP client
]

HERE = __name__
TEMPLATE = "{{ messages[0].content }}{{ ' calmly' if calm }}{{ ' with tools' if tools }} ->"


# -- one server for both ----------------------------------------------------------------------------------------------


@attrs.frozen
class Bench:
    """A stub of a router and of a worker, which both rollout functions use."""

    router: StubServer
    model: Path
    stops: frozenset[int]
    rows: Path

    def args(self, **overrides: Any) -> Namespace:
        """A launch with the default of every flag that slime reads."""
        host, port = self.router.url.removeprefix("http://").split(":")
        values = {
            **DEFAULTS,
            "hf_checkpoint": "model",
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
        }
        args = Namespace(**{**values, "seen": [], **overrides})
        args.hf_checkpoint = str(self.model.with_name(args.hf_checkpoint))
        build = importlib.import_module("slime.utils.eval_config").build_eval_dataset_configs
        sets = [{"name": "one", "path": str(self.rows), **getattr(args, "eval_fields", {})}]
        args.eval_datasets = build(args, sets, {})
        return args

    def play(self, function: Callable[..., Any], args: Namespace, *, evaluation: bool) -> Played:
        """Call a rollout function once."""
        self.router.requests.clear()
        source = getattr(args, "source", Source)(args.n_samples_per_prompt)
        output = function(args, 0, source, evaluation=evaluation)
        if evaluation:
            data = output.data["one"]
            samples, extra = data["samples"], {"rewards": data["rewards"], "truncated": data["truncated"]}
        else:
            samples, extra = list(leaves(output.samples)), {"shape": shape(output.samples)}
        requests = [request for request in self.router.requests if tuple(request.input_ids) != PROBE]
        return Played(samples, sorted(map(self.asked, requests), key=repr), extra, seen=args.seen)

    def asked(self, request: Request) -> Any:
        """A request without what concerns only its text, and with the defaults of what it leaves out."""
        text = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}
        given = {name: value for name, value in request.sampling_params.items() if name not in text}
        params = {"min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0, "sampling_seed": None, **given}
        params["stop"] = sorted(params.get("stop") or ())
        params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ())} - self.stops)
        routed = request.body.get("return_routed_experts", False)
        return list(request.input_ids), sorted(params.items()), request.body["return_logprob"], routed

    def both(self, *, evaluation: bool, **overrides: Any) -> tuple[Played, Played]:
        """slime's function, then ours, each with its own namespace."""
        module = importlib.import_module("slime.rollout.sglang_rollout")
        args = self.args(**overrides)
        start_slime(args)
        theirs = self.play(module.generate_rollout, args, evaluation=evaluation)
        start_slime(args)  # slime's HTTP client has connections of the event loop that used it first
        ours = self.play(generate_rollout_batch, self.args(**overrides), evaluation=evaluation)
        close_rollouts()
        return theirs, ours


def start_slime(args: Namespace) -> None:
    """Give slime the state of a new process: it keeps a namespace, data sets, and the client of one event loop."""
    module = importlib.import_module("slime.rollout.sglang_rollout")
    type(module.GenerateState)._instances.pop(module.GenerateState, None)
    module.EVAL_PROMPT_DATASET.clear()
    http = importlib.import_module("slime.utils.http_utils")
    http._http_client = None
    http.init_http_client(args)


@attrs.frozen
class Played:
    """Result and requests of a rollout function."""

    samples: list[Any]
    requests: list[Any]
    extra: dict[str, Any]
    seen: list[Any]

    def fields(self) -> list[dict[str, Any]]:
        """Every field of every sample; a session is a random name, and a missing ``rollout_id`` is the index."""
        found = [
            {name: getattr(sample, name) for name in records().sample.__dataclass_fields__} for sample in self.samples
        ]
        for entry in found:
            entry["session_id"] = entry["session_id"] is not None
            entry["rollout_id"] = entry["index"] if entry["rollout_id"] is None else entry["rollout_id"]
            for name, value in entry.items():
                if hasattr(value, "numpy"):  # tensors compare element by element
                    entry[name] = (str(value.dtype), value.tolist())
        return found


def check_equal(ours: Played, theirs: Played) -> None:
    """The requests, the fields that differ, and what the functions of the launch got."""
    assert ours.requests == theirs.requests
    pairs = zip(ours.fields(), theirs.fields(), strict=True)
    different = [
        {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]} for mine, other in pairs
    ]
    assert [entry for entry in different if entry] == []
    assert ours.extra == theirs.extra
    assert sorted(ours.seen, key=repr) == sorted(theirs.seen, key=repr)


def shape(node: Any) -> Any:
    return [shape(entry) for entry in node] if isinstance(node, list) else "sample"


@pytest.fixture(scope="module")
def bench(slime_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("parity")
    model, rows = folder / "model", folder / "rows.jsonl"
    for path in (model, folder / "other"):  # a text model: slime's data set takes no text prompts with a processor
        shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns("*.safetensors", "processor_config.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    data = [
        {"q": f"question {row}" + " again" * row, "a": str(row), "metadata": {"row": row}, "t": []} for row in range(3)
    ]
    rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in data))
    tokenizer = load_tokenizer(model)
    codec = Codec(tokenizer)
    reply = codec.encode("The answer is 3.<|im_end|>").tolist()

    def answer(input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """A reply with logprobs that are equal in 32 and 64 bits, and its text as the server would decode it."""
        if not params["max_new_tokens"]:  # the request of a reward function for the logprobs of a teacher
            rows = [[None if at == 0 else -token / 1024, token, None] for at, token in enumerate(input_ids)]
            return {"text": "", "meta_info": {"input_token_logprobs": rows}}
        ids = reply[: params["max_new_tokens"]]
        cut = len(ids) < len(reply)
        replayed: dict[str, Any] = {}
        if stub.requests[-1].body.get("return_routed_experts"):
            rows = [(position + layer) % 5 + 1 for position in range(len(input_ids) + len(ids) - 1) for layer in (0, 1)]
            replayed["routed_experts"] = base64.b64encode(struct.pack(f"<{len(rows)}i", *rows)).decode()
        if "custom_params" in params:
            assert params["custom_params"] == {"return_top_p_token_ids": True}
            sets = [[token, *range(number % 3)] for number, token in enumerate(ids)]
            replayed["top_p_token_ids"] = [token for kept in sets for token in kept]
            replayed["top_p_token_offsets"] = [0, *itertools.accumulate(map(len, sets))]
        return {
            "text": codec.decode(ids, skip_special=params.get("skip_special_tokens", True)),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "length", "length": len(ids)}
                if cut
                else {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": len(input_ids),
                "completion_tokens": len(ids),
                "cached_tokens": 2,
                "weight_version": "7",
                "e2e_latency": 0.25,
                "queue_time": 0.125,
                "decode_throughput": 8.0,
                "spec_accept_token_num": 3,
                "spec_draft_token_num": 4,
                "spec_verify_ct": 2,
                **replayed,
                "output_token_logprobs": [[-0.25 * (1 + number % 3), token, None] for number, token in enumerate(ids)],
            },
        }

    with start_blocking_portal() as portal, ExitStack() as servers:
        worker = servers.enter_context(portal.wrap_async_context_manager(StubServer(loads=dict)))
        stub = StubServer(answer, workers=[worker.url])
        router = servers.enter_context(portal.wrap_async_context_manager(stub))
        yield Bench(router, model, frozenset(stop_ids_of(tokenizer)), rows)
        close_rollouts()


# -- functions of a launch --------------------------------------------------------------------------------------------


async def score(args: Any, given: Any, **_: Any) -> Any:
    if isinstance(given, list):
        return [float(sample.index % 2) for sample in given]
    reward = float(given.index % 2)
    return {"score": reward, "acc": 1.0 - reward, "text": "a"} if args.reward_key or args.eval_reward_key else reward


async def custom(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """A generate function that sets every field, also unknown fields."""
    given = {"index": sample.index, "prompt": sample.prompt, "session": sample.session_id is not None}
    args.seen.append({**given, "evaluation": evaluation, "params": copy.deepcopy(sampling_params)})
    set_every_field(sample, kept={"index", "group_index", "rollout_id", "session_id"})
    sample.generate_function_path = sample.custom_rm_path = None
    sample.another_attribute = "kept"
    return sample


def keeps_all(args: Any, group: list[Any], **_: Any) -> Any:
    args.seen.append(("dynamic filter", [(sample.index, sample.reward) for sample in group]))
    return records().filter_output(keep=True)


def removes_first(args: Any, groups: list[Any]) -> None:
    args.seen.append(("sample filter", [[sample.index for sample in group] for group in groups]))
    groups[0][0].remove_sample = True


def sees_all(args: Any, groups: list[Any], get_samples: Any) -> None:
    args.seen.append(("all samples", [[(sample.index, sample.remove_sample) for sample in group] for group in groups]))


# -- every field ------------------------------------------------------------------------------------------------------


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("function", [None, f"{HERE}.custom"], ids=["default", "custom generate"])
def test_every_field_is_that_of_slimes_own_function(bench: Bench, function: str | None, evaluation: bool) -> None:
    """All fields of slime's ``Sample``, of later versions too, and what the function was called with."""
    theirs, ours = bench.both(evaluation=evaluation, custom_generate_function_path=function)
    check_equal(ours, theirs)
    if function is not None:
        assert {sample.another_attribute for sample in ours.samples} == {"kept"}


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
def test_slimes_dashboards_have_the_same_keys(bench: Bench, evaluation: bool) -> None:
    """Every metric that slime computes from samples exists, and metrics that measure no time are equal."""
    flags = {
        "sglang_speculative_algorithm": "EAGLE",
        "rollout_top_p": 0.9,
        "log_reward_category": None,
        "advantage_estimator": "grpo",
        "rollout_num_gpus": 1,
    }
    both = bench.both(evaluation=evaluation, **flags)
    metrics = importlib.import_module("slime.observability.rollout_metrics")
    theirs, ours = (metrics.compute_metrics_from_samples(bench.args(**flags), played.samples) for played in both)
    assert ours == theirs
    assert (ours["spec_accept_rate"], "top_p_kept_vocab_per_token" in ours) == (0.75, not evaluation)
    theirs, ours = (metrics.compute_perf_metrics_from_samples(bench.args(**flags), one.samples, 2.0) for one in both)
    assert ours.keys() == theirs.keys()
    assert ours["request/e2e_latency/mean"] == 0.25


@pytest.mark.parity("equal")
def test_slimes_own_distillation_gets_its_teacher(bench: Bench) -> None:
    """Its reward function returns the teacher's reply; its post-processing puts the logprobs on the samples."""
    module = "slime.rollout.on_policy_distillation"
    theirs, ours = bench.both(
        evaluation=False,
        use_opd=True,
        opd_type="sglang",
        custom_rm_path=f"{module}.reward_func",
        custom_reward_post_process_path=f"{module}.post_process_rewards",
        rm_url=f"{bench.router.url}/generate",
    )
    check_equal(ours, theirs)
    for played in (ours, theirs):
        rewards = importlib.import_module(module).post_process_rewards(bench.args(), played.samples)
        assert rewards == ([0.0] * 4, [0.0] * 4)
        for sample in played.samples:
            expected = [-token / 1024 for token in sample.tokens[-sample.response_length :]]
            assert sample.teacher_log_probs.tolist() == expected


# -- data sources of slime --------------------------------------------------------------------------------------------

OF_DATA: dict[str, Any] = {"dump_details": None, "rollout_max_prompt_len": None, "rollout_shuffle": False}


@pytest.mark.parity("equal")
@pytest.mark.parametrize("slimes", [True, False], ids=["slime", "ours"])
def test_a_read_only_source_is_asked_for_waves(bench: Bench, slimes: bool) -> None:
    """With over-sampling, in calls with other flags each: whole batches, requests of one size, and a silent end."""
    kind = importlib.import_module("slime.rollout.data_source").RolloutDataSource
    module = importlib.import_module("slime.rollout.sglang_rollout")
    args = bench.args(**OF_DATA, prompt_data=str(bench.rows), over_sampling_batch_size=3)
    start_slime(args)
    source, waves = kind(args), []
    get_samples = source.get_samples
    source.get_samples = lambda count: waves.append(count) or get_samples(count)
    indices = []
    for number in range(3):
        args.rollout_max_response_len -= 1
        output = (module.generate_rollout if slimes else generate_rollout_batch)(args, number, source)
        indices.append([sample.index for sample in leaves(output.samples)])
    close_rollouts()
    assert [len(batch) for batch in indices] == [4, 4, 4]
    assert set(waves) == {3}
    assert slimes or len({*leaves(indices)}) == 12  # no prompt is lost or played twice


def falls_back(args: Any, group: list[Any], **_: Any) -> Any:
    args.seen.append(group[0].group_index)
    return records().filter_output(keep=False, reason="no spread", keep_when_insufficient=True)


@pytest.mark.parity("equal")
@pytest.mark.parametrize("slimes", [True, False], ids=["slime", "ours"])
def test_a_filter_that_falls_back_starts_no_further_wave(bench: Bench, slimes: bool) -> None:
    """``keep_when_insufficient``: of five groups for a batch of three, two are dropped and three kept, in each call."""
    module = importlib.import_module("slime.rollout.sglang_rollout")
    flags = {"dynamic_sampling_filter_path": f"{HERE}.falls_back", "over_sampling_batch_size": 5}
    args = bench.args(**flags, rollout_batch_size=3)
    start_slime(args)
    source = Source(args.n_samples_per_prompt)
    for number in range(2):
        output = (module.generate_rollout if slimes else generate_rollout_batch)(args, number, source)
        assert len(output.samples) == 3
        assert output.metrics["rollout/dynamic_filter/drop_no spread"] == 2
    assert sorted(args.seen) == list(range(10))
    close_rollouts()
    assert len(source.given) == 10


def replied(sample: Any, **fields: Any) -> Any:
    """A reply of two tokens."""
    values = {"status": type(sample).Status.COMPLETED, "metadata": {"row": sample.index}, **BEGUN, **fields}
    for name, value in copy.deepcopy(values).items():
        setattr(sample, name, value)
    return sample


async def without_logprobs(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return replied(sample, rollout_log_probs=None)


async def marked_failed(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return replied(sample, status=type(sample).Status.FAILED)


async def unscored(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return replied(sample)


async def unscored_branches(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return [replied(copy.deepcopy(sample), rollout_id=sample.index) for _ in range(2)]


async def ranks(args: Any, given: Any, **_: Any) -> Any:
    kinds = {"array": np.asarray, "generator": iter, "tensor": importlib.import_module("torch").tensor}
    return kinds[args.kind]([float(sample.index % 2) for sample in given])


@pytest.mark.parity("equal")
@pytest.mark.parametrize("function", ["without_logprobs", "marked_failed"])
def test_what_slime_trains_of_a_custom_function_is_trained(bench: Bench, manager_class: Any, function: str) -> None:
    """Samples without logprobs, and samples with the status FAILED: equal samples and equal train data."""
    flags = {"custom_generate_function_path": f"{HERE}.{function}"}
    theirs, ours = bench.both(evaluation=False, **flags)
    check_equal(ours, theirs)
    check_train_data(manager_class, bench, ours, theirs, **flags)


@pytest.mark.parity("equal")
@pytest.mark.parametrize("group_rm", [False, True], ids=["fan-out", "group"])
@pytest.mark.parametrize("kind", ["array", "generator", "tensor"])
def test_rewards_of_a_list_have_slimes_effect(bench: Bench, manager_class: Any, kind: str, group_rm: bool) -> None:
    """Of a group with ``--group-rm``, and of a rollout that fans out."""
    function = "unscored" if group_rm else "unscored_branches"
    flags = {"custom_generate_function_path": f"{HERE}.{function}", "custom_rm_path": f"{HERE}.ranks"}
    theirs, ours = bench.both(evaluation=False, group_rm=group_rm, kind=kind, **flags)
    check_equal(ours, theirs)
    check_train_data(manager_class, bench, ours, theirs, group_rm=group_rm, **flags)


def spans(sample: Any) -> list[tuple[Any, ...]]:
    """The names of a sample's spans, each with that of its parent, in order of their start; every span ends."""
    events = sample.trace["events"]
    begun = {event["span_id"]: event for event in events if event["type"] == "span_start"}
    assert sorted(begun) == sorted(event["span_id"] for event in events if event["type"] == "span_end")
    ends = {event["span_id"]: event["ts"] for event in events if event["type"] == "span_end"}
    for name, event in begun.items():
        parent = event.get("parent_span_id")
        assert parent is None or begun[parent]["ts"] <= event["ts"] <= ends[name] <= ends[parent] + 1e-6
    return [(event["name"], begun.get(event.get("parent_span_id"), {}).get("name")) for event in begun.values()]


@pytest.mark.parity("equal")
@pytest.mark.parametrize("flags", [{}, {"group_rm": True}], ids=["reward", "group reward"])
def test_the_trace_has_slimes_spans(bench: Bench, flags: dict[str, Any]) -> None:
    """Of the group, the rollout, its requests and the reward, one in the other as in slime."""
    theirs, ours = bench.both(evaluation=False, **flags)
    assert [spans(sample) for sample in ours.samples] == [spans(sample) for sample in theirs.samples]
    assert ("generate_and_rm", "generate_and_rm_group") in spans(ours.samples[0])


@pytest.mark.parity("equal")
def test_the_trace_of_an_evaluation_has_slimes_spans(bench: Bench) -> None:
    """Of the rollout, its requests and the reward; none of a group."""
    theirs, ours = bench.both(evaluation=True)
    assert [spans(sample) for sample in ours.samples] == [spans(sample) for sample in theirs.samples]
    assert spans(ours.samples[0])[0] == ("generate_and_rm", None)


# -- one event loop ---------------------------------------------------------------------------------------------------


async def in_which_loop(args: Any, sample: Any, **_: Any) -> float:
    LOOPS.add(asyncio.get_running_loop())
    return float(sample.index % 2)


LOOPS: set[asyncio.AbstractEventLoop] = set()


@pytest.mark.parity("equal")
def test_one_event_loop_serves_every_function(bench: Bench) -> None:
    """slime's functions and ours, in training and in evaluation, before and after a change of flags."""
    slimes = importlib.import_module("slime.rollout.sglang_rollout").generate_rollout
    args = bench.args(custom_rm_path=f"{HERE}.in_which_loop")
    start_slime(args)
    LOOPS.clear()
    for function, evaluation in ((generate_rollout_batch, False), (slimes, True), (generate_rollout_batch, True)):
        args.rollout_max_response_len -= 1
        bench.play(function, args, evaluation=evaluation)
    assert {importlib.import_module("slime.utils.async_utils").get_async_loop().loop} == LOOPS


@pytest.mark.parity("equal")
def test_a_remote_reward_survives_changed_flags(bench: Bench) -> None:
    """slime keeps one HTTP session for it: no request is sent twice, also with slime's evaluation in the launch."""
    asked: list[str] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"0.5")

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    args = bench.args(custom_rm_path=None, rm_type="remote_rm", rm_url=url)
    start_slime(args)
    slimes = importlib.import_module("slime.rollout.sglang_rollout").generate_rollout
    rewards = []
    for number, function in enumerate((generate_rollout_batch, slimes, generate_rollout_batch)):
        args.rollout_max_response_len -= 1
        rewards += [sample.reward for sample in bench.play(function, args, evaluation=number == 1).samples]
    server.shutdown()
    server.server_close()
    assert rewards == [0.5] * (4 + 6 + 4)
    assert len(asked) == 4 + 6 + 4


# -- rewards and the samples of a data source -------------------------------------------------------------------------


class Varied(Source):
    """Groups whose samples differ, as those of a data source that gives each rollout its own task."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.prompt += f", variant {sample.index}"
            sample.label = f"label {sample.index}"
            sample.metadata = {"variant": sample.index}
        return groups


@pytest.mark.parity("equal")
def test_each_sample_of_a_group_has_its_own_prompt(bench: Bench) -> None:
    """Prompt, label and metadata of a rollout are its own sample's, also where siblings have others."""
    theirs, ours = bench.both(evaluation=False, source=Varied)
    check_equal(ours, theirs)
    assert [sample.label for sample in ours.samples] == [f"label {number}" for number in range(4)]


class Begun(Source):
    """Samples that bring ids: their own prompt, and aborted ones of a saved buffer with a response so far."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.tokens = [5, 6, 7 + sample.index]
            if sample.index == 0:
                continue  # the prompt's ids alone
            length = 32 if sample.index == 1 else 2  # with 32 the reply is complete
            sample.tokens += range(20, 20 + length)
            sample.response, sample.response_length = "so far", length
            sample.rollout_log_probs = [-0.5] * length
            sample.loss_mask, sample.weight_versions = [1] * length, ["6"]
            sample.status = type(sample).Status.ABORTED if sample.index == 2 else type(sample).Status.PENDING
        return groups


@pytest.mark.parity("equal")
@pytest.mark.parametrize("flags", [(), ("partial_rollout",), ("partial_rollout", "mask_offpolicy_in_partial_rollout")])
def test_a_sample_with_ids_is_continued_from_them(bench: Bench, flags: tuple[str, ...]) -> None:
    """The text of the prompt is not encoded: requests have exactly the ids that the data source gave."""
    theirs, ours = bench.both(evaluation=False, source=Begun, **dict.fromkeys(flags, True))
    check_equal(ours, theirs)
    assert sorted(ids for ids, *_ in ours.requests) == [[5, 6, 7], [5, 6, 9, 20, 21], [5, 6, 10, 20, 21]]


class Typed(Source):
    """Rows that name their reward in their metadata, as slime's multi-task data do."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.metadata["rm_type"] = "f1"
        return groups


class Scored(Source):
    """Samples that name their own reward function."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            sample.custom_rm_path = f"{HERE}.score"
        return groups


@pytest.mark.parity("equal")
@pytest.mark.parametrize("source", [Typed, Scored])
def test_a_sample_may_name_its_own_reward(bench: Bench, source: type[Source]) -> None:
    """By ``rm_type`` of its metadata or by its field; the launch then needs no flag of a reward."""
    theirs, ours = bench.both(evaluation=False, source=source, custom_rm_path=None)
    check_equal(ours, theirs)


async def whole(args: Any, sample: Any, **_: Any) -> Any:
    """A reward that is an integer, as that of ``--rm-type math``."""
    return sample.group_index or 0


@pytest.mark.parity("equal")
def test_a_reward_keeps_its_type(bench: Bench) -> None:
    """slime's metrics of groups without spread have the reward in their names: ``count_1``, not ``count_1.0``."""
    both = bench.both(evaluation=False, custom_rm_path=f"{HERE}.whole")
    metrics = importlib.import_module("slime.observability.rollout_metrics")
    args = bench.args(log_reward_category=None, advantage_estimator="grpo")
    theirs, ours = (metrics.compute_metrics_from_samples(args, played.samples) for played in both)
    assert ours == theirs
    assert ours["zero_std/count_1"] == 1


async def branches(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A rollout of two samples, which the generate function does not score."""
    pair = [copy.deepcopy(sample) for _ in range(2)]
    for branch in pair:
        set_every_field(branch, kept={"index", "group_index", "rollout_id", "session_id", "custom_rm_path", "reward"})
        branch.generate_function_path = None
    return pair


@pytest.mark.parity("equal")
def test_a_data_sets_own_reward_gets_one_sample(bench: Bench) -> None:
    """A rollout that fans out is scored as a list by ``--custom-rm-path`` only."""
    fields = {"custom_generate_function_path": f"{HERE}.branches", "custom_rm_path": f"{HERE}.of_one"}
    theirs, ours = bench.both(evaluation=True, custom_rm_path=None, eval_fields=fields)
    check_equal(ours, theirs)
    assert ours.extra["rewards"] == [float(number // 2) for number in range(12)]


async def of_one(args: Any, sample: Any, **_: Any) -> float:
    return float(sample.index)


# -- every field, set by others than our rollout function ------------------------------------------------------------


BEGUN: dict[str, Any] = {
    "tokens": [5, 6, 7, 20, 21],
    "response": "so far",
    "response_length": 2,
    "loss_mask": [1, 0],
    "rollout_log_probs": [-0.5, -0.25],
}
"""The columns of a response so far, which slime continues."""

GIVEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "group_index": lambda sample: {"group_index": sample.group_index + 40},
    "index": lambda sample: {"index": sample.index + 40},
    "rollout_id": lambda sample: {"rollout_id": sample.index + 70},
    "prompt": lambda sample: {"prompt": f"another prompt {sample.index}"},
    "tokens": lambda sample: {"tokens": [5, 6, 7]},
    "multimodal_inputs": lambda sample: {"multimodal_inputs": {"images": None, "videos": None}},
    "multimodal_train_inputs": lambda sample: {"multimodal_train_inputs": {"rows": sample.index}},
    "multimodal_train_input_id": lambda sample: {"multimodal_train_input_id": "id"},
    "apply_chat_template_kwargs": lambda sample: {"apply_chat_template_kwargs": {"calm": True}},
    "response": lambda sample: {"response": "so far"},
    "response_length": lambda sample: BEGUN,
    "label": lambda sample: {"label": {"answer": sample.index}},
    "reward": lambda sample: {"reward": 0.25 * sample.index},
    "loss_mask": lambda sample: BEGUN | {"loss_mask": [0, 0]},
    "weight_versions": lambda sample: {"weight_versions": ["6"]},
    "rollout_log_probs": lambda sample: BEGUN | {"rollout_log_probs": [-4.0, -8.0]},
    "rollout_top_p_token_ids": lambda sample: BEGUN | TOP_P_SETS,
    "rollout_top_p_token_offsets": lambda sample: BEGUN | TOP_P_SETS,
    "rollout_routed_experts": lambda sample: BEGUN | {"rollout_routed_experts": [[[1], [2]]] * 4},
    "remove_sample": lambda sample: {"remove_sample": sample.index == 1},
    "teacher_log_probs": lambda sample: {"teacher_log_probs": [-0.5]},
    "status": lambda sample: {"status": type(sample).Status.ABORTED},
    "metadata": lambda sample: {"metadata": {"raw_reward": 3.0, "round_number": 2, "source_name": "maths"}},
    "generate_function_path": lambda sample: {"generate_function_path": f"{HERE}.of_a_row"},
    "custom_rm_path": lambda sample: {"custom_rm_path": f"{HERE}.other_score"},
    "train_metadata": lambda sample: {"train_metadata": {"loss": "another"}},
    "session_id": lambda sample: {"session_id": "a session"},
    "non_generation_time": lambda sample: {"non_generation_time": 1.5},
    "spec_info": lambda sample: {"spec_info": type(sample).SpecInfo(spec_verify_ct=5)},
    "prefix_cache_info": lambda sample: {"prefix_cache_info": type(sample).PrefixCacheInfo(cached_tokens=7)},
}
"""A value for each field of slime's sample, with the other fields that give it a meaning."""

TOP_P_SETS: dict[str, Any] = {"rollout_top_p_token_ids": [20, 21, 3], "rollout_top_p_token_offsets": [0, 1, 3]}

GIVEN_FLAGS: dict[str, dict[str, Any]] = {
    "rollout_top_p_token_ids": {"rollout_top_p": 0.9},
    "rollout_top_p_token_offsets": {"rollout_top_p": 0.9},
    "rollout_routed_experts": {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 1},
    "session_id": {"router_policy": "consistent_hashing"},
    "spec_info": {"sglang_speculative_algorithm": "EAGLE"},
}


async def of_a_row(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function that a sample names: it sends its own request, and sets every field."""
    generate = importlib.import_module("slime.rollout.sglang_rollout").generate
    await generate(args, copy.deepcopy(sample), dict(sampling_params))
    await custom(args, sample, sampling_params)
    sample.rollout_routed_experts = [[[1], [2]]] * 3
    return sample


class Giving(Source):
    """A data source whose samples have one field set."""

    def __init__(self, n_samples_per_prompt: int, field: str) -> None:
        super().__init__(n_samples_per_prompt)
        self.field = field

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in leaves(groups):
            for name, value in copy.deepcopy(GIVEN[self.field](sample)).items():
                setattr(sample, name, value)
        return groups


def test_every_field_of_a_given_sample_is_in_the_table(slime_path: Path) -> None:
    """A field that a later slime adds has to be compared."""
    assert GIVEN.keys() == records().sample.__dataclass_fields__.keys()


@pytest.mark.parity("equal")
@pytest.mark.parametrize("field", GIVEN)
def test_a_field_of_a_given_sample_has_slimes_effect(bench: Bench, manager_class: Any, field: str) -> None:
    """Equal requests, equal samples, equal train data, for a data source that sets the field."""
    flags = {**GIVEN_FLAGS.get(field, {}), "source": functools.partial(Giving, field=field)}
    theirs, ours = bench.both(evaluation=False, **flags)
    check_equal(ours, theirs)
    check_train_data(manager_class, bench, ours, theirs, **flags)


def writes(args: Any, sample: Any) -> None:
    """Write every field, other values to each sample."""
    kept = {"prompt", "session_id", "index", "group_index", "rollout_id", "generate_function_path", "custom_rm_path"}
    args.seen.append((sample.index, sample.reward, sample.response))
    set_every_field(sample, kept=kept)
    sample.prompt, sample.session_id = "another prompt", "another session"
    sample.rollout_routed_experts = [[[1], [2]]] * 3
    sample.generate_function_path, sample.custom_rm_path = "another.function", "another.reward"
    sample.index, sample.group_index, sample.rollout_id = 40 + sample.index, 50, 60 + sample.index
    sample.reward = {"score": 0.25 * sample.index, "acc": 1.0} if args.reward_key else 0.25 * sample.index
    sample.another_attribute = "kept"


async def hook_writes(args: Any, sample: Any, **_: Any) -> None:
    writes(args, sample)
    sample.custom_rm_path = None


async def reward_writes(args: Any, sample: Any, **_: Any) -> Any:
    writes(args, sample)
    return sample.reward


def filter_writes(args: Any, group: list[Any], **_: Any) -> Any:
    for sample in group:
        writes(args, sample)
    return records().filter_output(keep=True)


def sample_filter_writes(args: Any, groups: list[Any]) -> None:
    for sample in leaves(groups):
        writes(args, sample)


def all_samples_write(args: Any, groups: list[Any], get_samples: Any) -> None:
    sample_filter_writes(args, groups)


WRITERS: dict[str, Any] = {
    "rollout_sample_hook_path": [f"{HERE}.hook_writes"],
    "custom_rm_path": f"{HERE}.reward_writes",
    "dynamic_sampling_filter_path": f"{HERE}.filter_writes",
    "rollout_sample_filter_path": f"{HERE}.sample_filter_writes",
    "rollout_all_samples_process_path": f"{HERE}.all_samples_write",
}
"""The functions of a launch that get samples, each writing every field of them."""


@pytest.mark.parity("equal")
@pytest.mark.parametrize("reward_key", [None, "score"], ids=["number", "dict"])
@pytest.mark.parametrize("flag", WRITERS)
def test_what_a_function_writes_is_what_is_trained(
    bench: Bench, manager_class: Any, flag: str, reward_key: str | None
) -> None:
    """Every field, the reward too, reaches the samples and slime's train data as the function left it."""
    flags = {"reward_key": reward_key, flag: WRITERS[flag]}
    theirs, ours = bench.both(evaluation=False, **flags)
    check_equal(ours, theirs)
    check_train_data(manager_class, bench, ours, theirs, **flags)
    assert {sample.another_attribute for sample in ours.samples} == {"kept"}


def test_the_metrics_have_the_reward_that_a_filter_wrote(bench: Bench) -> None:
    """A penalty of the filter is in the mean of the batch, as it is in slime's train data."""
    args = bench.args(dynamic_sampling_filter_path=f"{HERE}.penalises")
    output = generate_rollout_batch(args, 0, Source(args.n_samples_per_prompt))
    assert [sample.reward for sample in leaves(output.samples)] == [-0.25, 0.75] * 2
    assert output.metrics["rollouts/reward/mean"] == 0.25


def penalises(args: Any, group: list[Any], **_: Any) -> bool:
    for sample in group:
        sample.reward -= 0.25
    return True


def check_train_data(manager_class: Any, bench: Bench, ours: Played, theirs: Played, **flags: Any) -> None:
    """slime's own conversion gives the same data of both."""
    normalised = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True}
    trainer = Trainer(manager_class, bench.args(**normalised, **flags))
    mine, other = (trainer.convert(copy.deepcopy(played.samples)) for played in (ours, theirs))
    assert mine.keys() == other.keys()
    for data in (mine, other):  # names of rollouts, of which slime numbers those without one
        data["rollout_ids"] = [data["rollout_ids"].index(name) for name in data["rollout_ids"]]
    for name, column in mine.items():
        assert list(map(plain, column)) == list(map(plain, other[name])), name


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


# -- every flag -------------------------------------------------------------------------------------------------------


DEFAULTS: dict[str, Any] = {
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "ci_test": False,
    "custom_generate_function_path": None,
    "dynamic_sampling_filter_path": None,
    "eval_max_prompt_len": None,
    "eval_min_new_tokens": None,
    "eval_reward_key": None,
    "group_rm": False,
    "mask_offpolicy_in_partial_rollout": False,
    "multimodal_keys": None,
    "n_samples_per_prompt": 2,
    "over_sampling_batch_size": 2,
    "partial_rollout": False,
    "reward_key": None,
    "rollout_all_samples_process_path": None,
    "rollout_batch_size": 2,
    "rollout_global_dataset": True,
    "rollout_max_response_len": 32,
    "rollout_sample_filter_path": None,
    "rollout_seed": 42,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "router_policy": None,
    "sglang_dp_size": 1,
    "sglang_enable_deterministic_inference": False,
    "sglang_model_routers": None,
    "sglang_server_concurrency": 512,
    "use_rollout_routing_replay": False,
    # what other modules of slime read
    "custom_rm_path": f"{HERE}.score",
    "rollout_sample_hook_path": None,
    "rollout_num_engines": 1,
    "use_distributed_post": False,
    "input_key": "q",
    "label_key": "a",
    "metadata_key": "metadata",
    "tool_key": None,
}

CHANGED: dict[str, dict[str, Any]] = {
    "apply_chat_template": {"apply_chat_template": True},
    "apply_chat_template_kwargs": {"apply_chat_template": True, "apply_chat_template_kwargs": {"calm": True}},
    "ci_test": {"ci_test": True},
    "custom_generate_function_path": {"custom_generate_function_path": f"{HERE}.custom"},
    "dynamic_sampling_filter_path": {"dynamic_sampling_filter_path": f"{HERE}.keeps_all"},
    "eval_datasets": {"eval_fields": {"n_samples_per_eval_prompt": 3}},
    "eval_max_prompt_len": {"eval_max_prompt_len": 9},
    "eval_min_new_tokens": {"eval_min_new_tokens": 2},
    "eval_reward_key": {"reward_key": "score", "eval_reward_key": "acc"},
    "group_rm": {"group_rm": True},
    "hf_checkpoint": {"hf_checkpoint": "other"},
    "mask_offpolicy_in_partial_rollout": {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
    "n_samples_per_prompt": {"n_samples_per_prompt": 3},
    "over_sampling_batch_size": {"rollout_batch_size": 3, "over_sampling_batch_size": 3},
    "partial_rollout": {"partial_rollout": True},
    "reward_key": {"reward_key": "score"},
    "rollout_all_samples_process_path": {
        "rollout_all_samples_process_path": f"{HERE}.sees_all",
        "rollout_sample_filter_path": f"{HERE}.removes_first",
    },
    "rollout_batch_size": {"rollout_batch_size": 1, "over_sampling_batch_size": 1},
    "rollout_max_response_len": {"rollout_max_response_len": 3},
    "rollout_sample_filter_path": {"rollout_sample_filter_path": f"{HERE}.removes_first"},
    "rollout_seed": {"rollout_seed": 7, "sglang_enable_deterministic_inference": True},
    "rollout_skip_special_tokens": {"rollout_skip_special_tokens": True},
    "rollout_stop": {"rollout_stop": ["END", "FIN"]},
    "rollout_stop_token_ids": {"rollout_stop_token_ids": [7, 8]},
    "rollout_temperature": {"rollout_temperature": 0.5},
    "rollout_top_k": {"rollout_top_k": 20},
    "rollout_top_p": {"rollout_top_p": 0.9},
    "router_policy": {"router_policy": "consistent_hashing"},
    "sglang_dp_size": {"sglang_dp_size": 2},
    "sglang_enable_deterministic_inference": {"sglang_enable_deterministic_inference": True},
    "sglang_model_routers": {"sglang_model_routers": {"other": ("127.0.0.1", 9)}},
    "sglang_server_concurrency": {"sglang_server_concurrency": 1},
    "sglang_speculative_algorithm": {"sglang_speculative_algorithm": "EAGLE"},
    "use_rollout_routing_replay": {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 1},
}
"""Each flag with another value than the default; equal requests and equal samples."""

REFUSED: dict[str, dict[str, Any]] = {
    "rollout_global_dataset": {"rollout_global_dataset": False},
}
"""Each flag with the value that is refused by its name."""

READ_BY_THE_SAMPLE = {"sglang_speculative_algorithm"}
"""Flags that slime's ``Sample`` reads when tokens are appended."""

BY_CONSTRUCTION = {"sglang_router_ip", "sglang_router_port", "multimodal_keys"}
"""The address of the server, without which nothing here is equal; ``test_images.py`` compares rows with images."""

FIELDS: dict[str, Any] = {
    "apply_chat_template": True,
    "apply_chat_template_kwargs": {"calm": True},
    "custom_generate_function_path": f"{HERE}.custom",
    "custom_rm_path": f"{HERE}.other_score",
    "label_key": "q",
    "input_key": "a",
    "max_response_len": 3,
    "metadata_key": "nothing",
    "min_new_tokens": 2,
    "n_samples_per_eval_prompt": 3,
    "repetition_penalty": 1.5,
    "skip_special_tokens": True,
    "stop": ["END"],
    "stop_token_ids": [7],
    "temperature": 0.0,
    "tool_key": "t",
    "top_k": 5,
    "top_p": 0.5,
}
"""Each field of an evaluation's data set, with another value than the default."""

REFUSED_FIELDS = {"no_stop_trim": False}

METHODS = {"name", "path", "cache_key", "inject_metadata", "multimodal_keys"}


async def other_score(args: Any, sample: Any, **_: Any) -> float:
    return 9.0


def read_by_slime(slime_path: Path, owner: str) -> set[str]:
    """The attributes of ``owner`` that slime's rollout function and its evaluation read."""
    gc.disable()  # until Python 3.11.8, ast.parse fails if the collector runs other code in the middle of it
    try:
        tree = ast.parse((slime_path / "slime/rollout/sglang_rollout.py").read_text())
    finally:
        gc.enable()
    found = set()
    for node in ast.walk(tree):
        value, name = None, None
        if isinstance(node, ast.Attribute):
            value, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            value, name = node.args[0], ast.literal_eval(node.args[1])
        if getattr(value, "id", None) == owner or (isinstance(value, ast.Attribute) and value.attr == owner):
            found.add(str(name))
    return found


def test_every_flag_that_slime_reads_is_in_the_tables(slime_path: Path) -> None:
    """A flag or a field of a data set that a later slime reads has to be compared, or refused."""
    flags = read_by_slime(slime_path, "args")
    assert len(flags) > 30
    assert flags | READ_BY_THE_SAMPLE == CHANGED.keys() | REFUSED.keys() | BY_CONSTRUCTION
    assert read_by_slime(slime_path, "dataset_cfg") == FIELDS.keys() | REFUSED_FIELDS.keys() | METHODS


@pytest.mark.parity("equal")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("flag", CHANGED)
def test_a_flag_does_what_it_does_in_slime(bench: Bench, flag: str, evaluation: bool) -> None:
    """Equal requests, equal samples, equal calls of the launch's functions."""
    if flag == "group_rm" and evaluation:
        pytest.skip("slime has no evaluation with --group-rm")
    theirs, ours = bench.both(evaluation=evaluation, **CHANGED[flag])
    check_equal(ours, theirs)
    if flag == "router_policy":
        assert all("X-SMG-Routing-Key" in request.headers for request in bench.router.requests)


@pytest.mark.parity("refused by name")
@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_is_not_served_is_refused(bench: Bench, flag: str) -> None:
    """By its name, before the first request."""
    with pytest.raises(ConfigError, match=rf"args\.{flag}"):
        bench.play(generate_rollout_batch, bench.args(**REFUSED[flag]), evaluation=False)
    assert bench.router.requests == []


@pytest.mark.parity("equal")
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_data_set_does_what_it_does_in_slime(bench: Bench, field: str) -> None:
    """Equal requests, equal samples, equal rewards."""
    fields = {field: FIELDS[field], **({"apply_chat_template": True} if "template" in field or "tool" in field else {})}
    theirs, ours = bench.both(evaluation=True, eval_fields=fields)
    check_equal(ours, theirs)


@pytest.mark.parity("refused by name")
@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_a_field_of_a_data_set_that_is_not_served_is_refused(bench: Bench, field: str) -> None:
    """With the name of the data set."""
    with pytest.raises(ConfigError, match=rf"one\.{field}"):
        bench.play(generate_rollout_batch, bench.args(eval_fields={field: REFUSED_FIELDS[field]}), evaluation=True)
