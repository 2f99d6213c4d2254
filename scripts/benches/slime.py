"""slime's job with a custom generate of several turns, through slime and through ours, in CPU time a kept sample.

Batches of groups of eight; 3 turns of 256 tokens with a calculator; replies after lognormal times; a reward; the filter
on the spread of rewards, which three prompts of ten do not pass. The unit is one ``json.loads`` of one reply, measured
in a tight loop before each round: it scales with the speed of the machine. It does not contain the cold caches of a
loop that waits for replies; therefore the time of one after a pause is printed too, and ``--median 0`` runs the job
without waits.

slime runs its own ``generate_rollout`` with the generate function below, which works as slime's example for tools. It
is measured if ``--slime`` names its source and its imports are installed (torch, ray, httpx, transformers); SGLang is
not imported. The cost of both includes started groups that are in no batch: slime aborts them, ours has them in flight
at the end as at the beginning of the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint
from rollouts.inference.sglang import SGLangPolicy
from rollouts.runs.journal import Journal
from rollouts.runs.run_journal import RunJournal
from rollouts.testing.canned import canned_server
from rollouts.testing.latency import Latency
from rollouts.testing.replies import Request, reply_body
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from rollouts.training.filters import check_reward_nonzero_std
from scripts.benches.peers import agents
from scripts.benches.peers_job import REPLY, SYSTEM, TOOLS, TURNS, Job, calculated, reward
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_slime", "custom_generate", "custom_reward", "slime_options"]

Row = dict[str, float | int | str]
N = 8
AIM = 20.0
"""Target: ``json.loads`` of a reply for each kept sample of ours, at most."""


def spread(number: int, index: int, text: str) -> float:
    """The reward, with three prompts of ten without spread."""
    return reward(text) * float(number % 10 < 3 or index % 2)


@attrs.frozen
class Cost:
    """Of one round."""

    kept: int
    started: int
    cpu: float
    loads: float
    """Seconds of one ``json.loads`` of one reply, measured before the round."""

    @property
    def value(self) -> float:
        return self.cpu / self.kept / self.loads


def prompts(number: int) -> Iterator[str]:
    """Of one round."""
    return (f"Problem {number}-{group}: what is (2 + 2) * 2?" for group in itertools.count())


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(job: Job, url: str, number: int, options: argparse.Namespace, loads: float) -> Cost:
    """The manager with its journal, from the end of the first batch to the end of the last."""

    async def scored(sample: Sample) -> float:
        return spread(sample.group_index or 0, sample.index or 0, sample.messages[-1]["content"])

    async def run(folder: Path) -> Cost:
        async with SGLangPolicy(Endpoint(base_url=url), vocab_size=job.renderer.vocab_size) as policy:
            config = RolloutConfig(
                batch_size=options.groups,
                n_samples_per_prompt=N,
                over_sampling_factor=options.factor,
                reward_fn=scored,
                filter_fn=check_reward_nonzero_std,
                generate_fn=agents(job, url, policy),
            )
            buffer = DataBuffer(list(itertools.islice(prompts(number), options.groups * (options.batches + 3) * 3)))
            kept = 0
            with Journal(folder / "journal") as journal:
                async with AsyncRolloutManager(config, buffer, rollout_log=RunJournal(journal)) as manager:
                    await manager.generate_batch()
                    began, taken = time.process_time(), manager.accounting.taken
                    for _ in range(options.batches):
                        kept += len(await manager.generate_batch())
                        await journal.sync()
                    cpu, started = time.process_time() - began, manager.accounting.taken - taken
            return Cost(kept, started * N, cpu, loads)

    with tempfile.TemporaryDirectory() as folder, calm_collector():
        return anyio.run(run, Path(folder))


# -- slime ------------------------------------------------------------------------------------------------------------


class _Source:
    """A data source for slime's loop."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.groups = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        sample = importlib.import_module("slime.utils.types").Sample
        groups = []
        for text in itertools.islice(self._texts, count):
            groups.append(
                [
                    sample(group_index=self.groups, index=self.groups * N + member, prompt=text, label="8", metadata={})
                    for member in range(N)
                ]
            )
            self.groups += 1
        return groups

    def add_samples(self, groups: list[list[Any]]) -> None:
        raise SystemExit("no partial rollouts here")


async def custom_generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """``--custom-generate-function-path``: ids are appended, the new text of each turn is tokenised once."""
    state = importlib.import_module("slime.rollout.sglang_rollout").GenerateState(args)
    post = importlib.import_module("slime.utils.http_utils").post
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sample.prompt}]
    opening = state.tokenizer.apply_chat_template(
        messages, tools=[one.to_chat() for one in TOOLS], add_generation_prompt=True, tokenize=False
    )
    sample.tokens = state.tokenizer(opening, add_special_tokens=False)["input_ids"]
    sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs = "", 0, [], None
    for _ in range(TURNS + 2):
        body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, body)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = type(sample).Status.ABORTED
            return sample
        triples = output["meta_info"]["output_token_logprobs"]
        ids = [triple[1] for triple in triples]
        said = state.tokenizer.decode(ids)
        sample.append_response_tokens(
            args,
            tokens=ids,
            log_probs=[triple[0] for triple in triples],
            trainable=True,
            meta_info=output["meta_info"],
            text=said,
        )
        found = re.search(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", said, re.DOTALL)
        if found is None:
            break
        call = json.loads(found[1])
        a, b = call["arguments"]["a"], call["arguments"]["b"]
        result = calculated(a + b if call["name"] == "add" else a * b)
        shown = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        tokens = state.tokenizer(shown, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=shown)
    sample.status = type(sample).Status.COMPLETED
    return sample


async def custom_reward(args: Namespace, sample: Any, **_: Any) -> float:
    """``--custom-rm-path``."""
    return spread(sample.group_index, sample.index, sample.response)


def slime(job: Job, url: str, number: int, options: argparse.Namespace, loads: float) -> Cost:
    """slime's ``generate_rollout``, once for each batch."""
    module = importlib.import_module("slime.rollout.sglang_rollout")
    host, _, port = url.removeprefix("http://").partition(":")
    args = Namespace(**vars(_ARGUMENTS), hf_checkpoint=job.folder, sglang_router_ip=host, sglang_router_port=int(port))
    args.rollout_batch_size = args.over_sampling_batch_size = options.groups
    importlib.import_module("slime.utils.http_utils").init_http_client(args)
    source, kept = _Source(prompts(number)), 0
    with calm_collector(), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):  # its bars
        began = time.process_time()
        for batch in range(options.batches):
            output = module.generate_rollout(args, batch, source)
            kept += sum(len(group) for group in output.samples)
        return Cost(kept, source.groups * N, time.process_time() - began, loads)


_ARGUMENTS = Namespace(
    rollout_global_dataset=True,
    n_samples_per_prompt=N,
    sglang_server_concurrency=512,
    rollout_num_engines=1,
    rollout_num_gpus=1,
    rollout_num_gpus_per_engine=1,
    use_distributed_post=False,
    rollout_temperature=1.0,
    rollout_top_p=1.0,
    rollout_top_k=-1,
    rollout_max_response_len=REPLY,
    rollout_stop=None,
    rollout_stop_token_ids=None,
    rollout_skip_special_tokens=False,
    rollout_seed=0,
    sglang_dp_size=1,
    sglang_enable_deterministic_inference=False,
    partial_rollout=False,
    mask_offpolicy_in_partial_rollout=False,
    group_rm=False,
    reward_key=None,
    ci_test=False,
    use_rollout_routing_replay=False,
    router_policy=None,
    rm_type=None,
    custom_rm_path="scripts.benches.slime.custom_reward",
    custom_generate_function_path="scripts.benches.slime.custom_generate",
    dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    rollout_sample_filter_path=None,
    rollout_all_samples_process_path=None,
)
"""The arguments of slime's parser that its loop reads."""


# -- both -------------------------------------------------------------------------------------------------------------


def _loads(reply: str) -> float:
    """Seconds of one ``json.loads``, the minimum of several."""
    times = []
    for _ in range(100):
        began = time.process_time()
        for _ in range(10):
            json.loads(reply)
        times.append((time.process_time() - began) / 10)
    return min(times)


def _paused(reply: str) -> float:
    """Median seconds of one ``json.loads`` after a pause."""
    times = []
    for _ in range(30):
        time.sleep(0.01)
        began = time.process_time()
        json.loads(reply)
        times.append(time.process_time() - began)
    return statistics.median(times)


def bench_slime(options: argparse.Namespace) -> list[Row]:
    """CPU time a kept sample of slime's job with several turns, in ``json.loads`` of one reply."""
    job = Job.of(str(options.tokenizer or default_tokenizer()))
    loops: dict[str, Any] = {"ours": ours}
    if options.slime is not None:
        sys.path.insert(0, str(options.slime))
        try:
            importlib.import_module("slime.rollout.sglang_rollout")
        except ImportError as error:
            raise SystemExit(
                f"--slime {options.slime}: {error}; it needs slime's source, and its imports here"
            ) from error
        logging.disable(logging.INFO)
        loops["slime"] = slime
    asked = Request("r", [0] * 900, {"max_new_tokens": REPLY}, {}, {})
    reply = msgspec.json.encode(reply_body(job.canned.script, asked, "none")).decode()
    costs: dict[str, list[Cost]] = {name: [] for name in loops}
    paused: list[float] = []
    slow = attrs.evolve(job.canned, latency=Latency(options.median, sigma=options.sigma))
    with canned_server(slow) as url:
        for number in range(options.rounds + 1):  # the first is to warm up
            paused.append(_paused(reply))
            for name, loop in loops.items():
                cost = loop(job, url, number, options, _loads(reply))
                costs[name] += [cost] * (number > 0)
                print(f"round {number}: {name} {cost.value:.1f}, {cost}", file=sys.stderr)
    return [_row(name, found, statistics.median(paused)) for name, found in costs.items()]


def _row(name: str, costs: list[Cost], paused: float) -> Row:
    values = [cost.value for cost in costs]
    return {
        "loop": name,
        "json.loads/kept sample": statistics.median(values),
        "lowest to highest (rounds)": f"{min(values):.1f} to {max(values):.1f} ({len(values)})",
        "ms/kept sample": 1000 * statistics.median(cost.cpu / cost.kept for cost in costs),
        "started/kept": statistics.median(cost.started / cost.kept for cost in costs),
        "µs of a json.loads": 1e6 * statistics.median(cost.loads for cost in costs),
        "after a pause": 1e6 * paused,
        "target": f"at most {AIM:g}" if name == "ours" else "",
        "met": "" if name != "ours" else "yes" if statistics.median(values) <= AIM else "NO",
    }


def slime_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slime", type=Path, help="folder of slime's source; else ours alone")
    parser.add_argument("--groups", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=3, help="of a round (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=1.5, help="ours: over_sampling_factor (default: %(default)s)")
    parser.add_argument("--median", type=float, default=0.3, help="seconds of a reply (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
