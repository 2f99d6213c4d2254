"""The job of ``peers.py`` in one process, in loops of trainers: ``scripts/bench peers --in-process NAME …``.

:func:`in_process` runs this module with the interpreter of the trainer's environment (``scripts/servers/trainers.py``),
which has the versions that the trainer pins. There a function returns the canned replies, so no loop but ours over HTTP
pays for requests. Prompts, schemas of the tools, replies, and results of the tools are the same; the reward scores the
last message.

Each peer is the part of the trainer that turns prompts into training rows. Its docstring and ``docs/peers.md`` say
where it does less or more.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio
import attrs
import numpy as np

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, TokenColumn, Tool
from rollouts.environments.base import StepResult
from rollouts.inference.base import Policy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import load_tokenizer
from rollouts.testing.canned import canned_server
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from scripts.benches.peers_job import (
    EPISODES,
    IN_FLIGHT,
    REPLY,
    SYSTEM,
    TOOLS,
    TURNS,
    Calculator,
    Job,
    calculated,
    restart,
    reward,
)
from scripts.servers.trainers import ROOT, TRAINERS, environment

__all__ = ["PEERS", "in_process", "main"]

N = 8
"""Rollouts of a group in the second job."""


def _plain(one: Tool) -> Tool:
    """The schema as functions of the trainers have it."""
    names = ("type", "properties", "required")
    return attrs.evolve(one, parameters={name: one.parameters[name] for name in names})


SCHEMAS = tuple(map(_plain, TOOLS))


class Same(Calculator):
    """Our environment with the schemas of the peers."""

    @property
    def tools(self) -> Sequence[Tool]:
        return SCHEMAS


class Retries:
    """No tools: a user who asks again until the reply has the answer, as AReaL's workflow does."""

    tools = ()

    async def start(self, prompt: Prompt) -> list[Message]:
        return [Message("system", SYSTEM), *prompt.messages]

    async def step(self, reply: Message) -> StepResult:
        done = bool(reward(str(reply.content)))
        return StepResult(done=True) if done else StepResult(messages=[Message("user", RETRY)])

    async def close(self) -> None:
        return None


RETRY = (
    "Your answer is either wrong or not parsable to the reward function. You may misunderstand the original question. "
    "Please carefully read the original question, check the previous errors, and try to answer it again."
)
"""The text of ``MultiTurnWorkflow`` of AReaL 1.0.4."""


@attrs.frozen
class Row:
    """A row of training data, as plain lists."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    """Of the sampled tokens."""


def row(tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> Row:
    """A row from columns of one length."""
    sampled = [one for one, kept in zip(logprobs, mask, strict=True) if kept]
    return Row(list(tokens), list(map(int, mask)), sampled)


class Peer(Protocol):
    """A loop of a trainer."""

    async def play(self, prompts: Sequence[str], n: int) -> list[Any]:
        """Play ``n`` rollouts of each prompt; what is timed."""
        ...

    def rows(self, played: list[Any]) -> tuple[list[Row], float]:
        """The training rows of a round, and the sum of its rewards; not timed."""
        ...


def replies_of(job: Job) -> Callable[[list[int]], tuple[list[int], list[float]]]:
    """The reply to a prompt of ids, and its logprobs, which equal those of :class:`ScriptedPolicy`."""
    mark, replies = job.canned.mark, job.canned.replies
    assert mark is not None
    logprobs = (-1 / (1 + np.arange(REPLY))).astype(np.float32).tolist()

    def reply(ids: list[int]) -> tuple[list[int], list[float]]:
        return list(replies[min(ids.count(mark), len(replies) - 1)]), list(logprobs)

    return reply


def messages_of(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


async def side_by_side(one: Callable[[str], Awaitable[Any]], prompts: Sequence[str], at_once: int) -> list[Any]:
    """Play the prompts in order, ``at_once`` of them together."""
    done: list[Any] = [None] * len(prompts)
    numbers = iter(range(len(prompts)))

    async def work() -> None:
        for number in numbers:
            done[number] = await one(prompts[number])

    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)
    return done


@attrs.frozen
class Ours:
    """The manager, with groups and rewards; in the process, or over HTTP to a server with the same replies."""

    job: Job
    environment_cls: type[Any] = Same
    url: str | None = None

    async def play(self, prompts: Sequence[str], n: int) -> list[Sample]:
        async def scored(sample: Sample) -> float:
            return reward(sample.messages[-1]["content"])

        endpoint = Endpoint(base_url=self.url) if self.url else Endpoint()
        async with contextlib.AsyncExitStack() as stack:
            policy: Policy
            if self.url:
                vocabulary = self.job.renderer.vocab_size
                policy = await stack.enter_async_context(SGLangPolicy(endpoint, vocab_size=vocabulary))
            else:
                mark, replies = self.job.canned.mark, self.job.canned.replies

                def reply(tokens: TokenColumn) -> Sequence[int]:
                    return replies[min(int(np.count_nonzero(np.asarray(tokens) == mark)), len(replies) - 1)]

                policy = ScriptedPolicy(reply)
            config = RolloutConfig(
                batch_size=min(IN_FLIGHT // n, len(prompts)),
                n_samples_per_prompt=n,
                over_sampling_factor=1,
                reward_fn=scored,
                generate_fn=functools.partial(
                    generate_rollout_batch,
                    environment_cls=self.environment_cls,
                    endpoint=endpoint,
                    tokenizer=self.job.renderer,
                    policy=policy,
                    limits=Limits(max_turns=TURNS + 2),
                    sampling=SamplingParams(max_new_tokens=REPLY),
                ),
            )
            samples: list[Sample] = []
            async with AsyncRolloutManager(config, DataBuffer(prompts)) as manager:
                while len(samples) < n * len(prompts):
                    samples += await manager.generate_batch()
            return samples

    def rows(self, played: list[Sample]) -> tuple[list[Row], float]:
        rows = [row(sample.tokens, sample.loss_mask, sample.rollout_log_probs or ()) for sample in played]
        return rows, sum(float(sample.reward or 0) for sample in played)


def _functions(values: dict[str, Callable[[float, float], float]], *, waits: bool) -> list[Any]:
    """Python functions with the names, texts and arguments of the tools."""

    def made(one: Tool) -> Any:
        value = values[one.name]

        def calculate(a: float, b: float):  # type: ignore[no-untyped-def]
            return calculated(value(float(a), float(b)))

        async def calculate_later(a: float, b: float):  # type: ignore[no-untyped-def]
            return calculated(value(float(a), float(b)))

        function: Any = calculate_later if waits else calculate
        function.__name__ = one.name
        function.__annotations__ = {"a": float, "b": float}
        function.__doc__ = f"{one.description}\n\nArgs:\n    a: Property a\n    b: Property b\n"
        return function

    return [made(one) for one in SCHEMAS]


VALUES: dict[str, Callable[[float, float], float]] = {
    "add": float.__add__,
    "subtract": float.__sub__,
    "multiply": float.__mul__,
    "divide": float.__truediv__,
}


class Trl:
    """TRL's ``GRPOTrainer._generate`` with tools: all rollouts of a batch wait for one another in each turn.

    The trainer is whole, with a tiny model; its method that generates one turn returns the canned replies. Replies are
    parsed by TRL, and the tools run one after the other. The job scores the last message of each rollout. It
    makes lists of ids, not tensors.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        from datasets import Dataset
        from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen3_chat_template

        reply = replies_of(job)

        class Canned(GRPOTrainer):
            def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
                replies = [reply(ids) for ids in prompt_ids]
                return [ids for ids, _ in replies], [logprobs for _, logprobs in replies]

        tokenizer = AutoTokenizer.from_pretrained(job.folder)
        tokenizer.chat_template = qwen3_chat_template  # Qwen3's; TRL does not know the text of an earlier version
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=8,
            )
        )
        arguments = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=N,
            num_generations=N,
            max_completion_length=TURNS * REPLY * 2,
        )
        self._tools = _functions(VALUES, waits=False)
        self._trainer = Canned(
            model=model,
            args=arguments,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": messages_of("?")}] * N),
            tools=self._tools,
        )

    async def play(self, prompts: Sequence[str], n: int) -> list[Any]:
        trainer, tools = self._trainer, {tool.__name__: tool for tool in self._tools}
        conversations = [messages_of(prompt) for prompt in prompts for _ in range(n)]
        played = []
        for start in range(0, len(conversations), IN_FLIGHT):
            batch = conversations[start : start + IN_FLIGHT]
            trainer._sync_tool_dicts = [tools] * len(batch)  # as _generate_and_score_completions does
            trainer._async_tool_dicts = [{}] * len(batch)
            prompt_ids, ids, mask, completions, logprobs, *_ = trainer._generate(batch)
            rewards = [reward(completion[-1]["content"]) for completion in completions]
            played += list(zip(prompt_ids, ids, mask, logprobs, rewards, strict=True))
        return played

    def rows(self, played: list[Any]) -> tuple[list[Row], float]:
        rows = [
            row([*prompt, *ids], [0] * len(prompt) + list(mask), [0.0] * len(prompt) + list(logprobs))
            for prompt, ids, mask, logprobs, _ in played
        ]
        return rows, sum(scored for *_, scored in played)


class Cookbook:
    """tinker-cookbook's ``do_group_rollout`` and ``assemble_training_data``, with its tools and Qwen3 renderer.

    It renders the whole conversation in each turn. A rollout is a datum for each turn whose prompt does not continue
    the one before; its sampled tokens are the same.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        from types import SimpleNamespace

        from tinker_cookbook import renderers
        from tinker_cookbook.completers import TinkerTokenCompleter
        from tinker_cookbook.rl.types import EnvGroupBuilder
        from tinker_cookbook.tool_use import build_agent_tool_env, simple_tool_result, tool

        reply, renderer = replies_of(job), renderers.get_renderer("qwen3", load_tokenizer(job.folder))

        class Client:
            async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
                ids, logprobs = reply(prompt.to_ints())
                sequence = SimpleNamespace(tokens=ids, logprobs=logprobs, stop_reason="stop", sequence_id=None)
                return SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0)

        def a_tool(function: Any) -> Any:
            async def run(a, b):  # type: ignore[no-untyped-def]
                return simple_tool_result(await function(a, b))

            run.__name__, run.__doc__, run.__annotations__ = (
                function.__name__,
                function.__doc__,
                {"a": float, "b": float},
            )
            return tool(run)

        tools = [a_tool(function) for function in _functions(VALUES, waits=True)]
        specs = [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in SCHEMAS]
        opening = renderer.create_conversation_prefix_with_tools(specs, SYSTEM)

        async def scored(messages: Any) -> Any:
            return reward(renderers.get_text_content(messages[-1])), {}

        class Group(EnvGroupBuilder):
            def __init__(self, prompt: str, n: int) -> None:
                self.messages, self.n = [*opening, {"role": "user", "content": prompt}], n

            async def make_envs(self) -> Any:
                return [
                    build_agent_tool_env(renderer, tools, self.messages, scored, max_turns=TURNS + 2)
                    for _ in range(self.n)
                ]

        self._group = Group
        self._policy = TinkerTokenCompleter(Client(), max_tokens=REPLY)

    async def play(self, prompts: Sequence[str], n: int) -> list[Any]:
        from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
        from tinker_cookbook.rl.rollouts import do_group_rollout

        async def one(prompt: str) -> Any:
            return await do_group_rollout(self._group(prompt, n), self._policy)

        groups = await side_by_side(one, prompts, IN_FLIGHT // n)
        datums, places = assemble_training_data(groups, compute_advantages(groups))
        return [groups, datums, places]

    def rows(self, played: list[Any]) -> tuple[list[Row], float]:
        groups, datums, _ = played
        rows = []
        for datum in datums:  # its columns are shifted by one
            inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
            tokens = [*datum.model_input.to_ints(), int(inputs["target_tokens"][-1])]
            rows.append(row(tokens, [0, *inputs["mask"]], [0.0, *inputs["logprobs"]]))
        return rows, sum(one for group in groups for one in group.get_total_rewards())


class Verl:
    """verl's ``ToolAgentLoop.run``, a loop object for each episode, without the padding to tensors after it.

    The results of the tools are tokenised as verl does it now ("continuous token"). The loop has no reward: the job
    scores the last reply.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        from omegaconf import OmegaConf
        from transformers import AutoTokenizer
        from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
        from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
        from verl.tools.function_tool import FunctionTool
        from verl.tools.schemas import OpenAIFunctionToolSchema
        from verl.utils.dataset.rl_dataset import RLHFDataset
        from verl.workers.rollout.replica import TokenOutput

        reply, tokenizer = replies_of(job), AutoTokenizer.from_pretrained(job.folder)

        class Server:
            async def generate(self, *, prompt_ids: Any, **_: Any) -> Any:
                ids, logprobs = reply(prompt_ids)
                return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed")

        tools = [
            FunctionTool(one.name, function, OpenAIFunctionToolSchema.model_validate(one.to_chat()), is_async=True)
            for one, function in zip(SCHEMAS, _functions(VALUES, waits=True), strict=True)
        ]
        turns = {
            "max_user_turns": TURNS + 2,
            "max_assistant_turns": TURNS + 2,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
        }
        lengths = {"prompt_length": 2048, "response_length": TURNS * REPLY * 2, "full_determinism": False}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**lengths, "multi_turn": turns}}, "data": {}})

        def loop() -> Any:
            return ToolAgentLoop(
                trainer_config=DictConfigWrap(config),
                server_manager=Server(),
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(config.data),
                hf_model_type="qwen3",
                tools=ToolListWrap(tools),
            )

        self._loop, self._tokenizer = loop, tokenizer

    async def play(self, prompts: Sequence[str], n: int) -> list[Any]:
        async def one(prompt: str) -> Any:
            done = await self._loop().run({}, raw_prompt=messages_of(prompt))
            return done, reward(str(self._tokenizer.decode(done.response_ids[-REPLY:])))

        return await side_by_side(one, [prompt for prompt in prompts for _ in range(n)], IN_FLIGHT)

    def rows(self, played: list[Any]) -> tuple[list[Row], float]:
        rows = []
        for done, _ in played:
            before = len(done.prompt_ids)
            mask, logprobs = [0] * before + done.response_mask, [0.0] * before + done.response_logprobs
            rows.append(row([*done.prompt_ids, *done.response_ids], mask, logprobs))
        return rows, sum(scored for _, scored in played)


class Areal:
    """AReaL's ``MultiTurnWorkflow.arun_episode``, which parses nothing and has no tools: it asks again, in fixed ids.

    Its reward function runs in the process, not in its pool of processes, which is in its favour. Tensors are made.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        from areal.api import ModelResponse
        from areal.api.cli_args import GenerationHyperparameters
        from areal.workflow.multi_turn import MultiTurnWorkflow
        from transformers import AutoTokenizer

        reply = replies_of(job)

        class Engine:
            async def agenerate(self, request: Any) -> Any:
                ids, logprobs = reply(request.input_ids)
                return ModelResponse(list(request.input_ids), ids, logprobs, [0] * len(ids), "stop")

        async def scored(prompt: str, completion: str, *_: Any, **__: Any) -> float:
            return reward(completion)

        tokenizer = AutoTokenizer.from_pretrained(job.folder)
        settings = GenerationHyperparameters(max_new_tokens=REPLY)
        self._workflow = MultiTurnWorkflow(reward, settings, tokenizer, max_turns=TURNS + 2, turn_discount=1.0)
        self._workflow.async_reward_fn = scored
        self._engine = Engine()

    async def play(self, prompts: Sequence[str], n: int) -> list[Any]:
        async def one(prompt: str) -> Any:
            return await self._workflow.arun_episode(self._engine, {"messages": messages_of(prompt)})

        return await side_by_side(one, [prompt for prompt in prompts for _ in range(n)], IN_FLIGHT)

    def rows(self, played: list[Any]) -> tuple[list[Row], float]:
        names = ("input_ids", "loss_mask", "logprobs")
        rows = [row(*(done[name][0].tolist() for name in names)) for done in played]
        return rows, sum(float(done["rewards"][0]) for done in played)


@attrs.frozen
class InProcess:
    """A peer: its loop, its environment, and what its job must cost at least, as a multiple of ours."""

    loop: Callable[[Job, Path], Peer]
    trainer: str
    """Its name in ``scripts/servers/trainers.py``."""
    distribution: str
    target: float
    target_http: float | None = None
    """The same where ours pays for HTTP."""
    environment_cls: type[Any] = Same
    """Ours for the same work."""
    calls: bool = True
    """Whether the replies call tools."""


PEERS: dict[str, InProcess] = {
    "trl": InProcess(Trl, "trl", "trl", 2.0, 1.0),
    "tinker-cookbook": InProcess(Cookbook, "tinker", "tinker-cookbook", 4.0, 1.0),
    "verl": InProcess(Verl, "verl", "verl", 3.5, 1.0),
    "areal": InProcess(Areal, "areal", "areal", 1.4, environment_cls=Retries, calls=False),
}


def played(peer: Peer, prompts: Sequence[str], n: int) -> tuple[float, list[Any]]:
    """CPU seconds of this process, all threads, and the result."""
    gc.collect()
    with calm_collector():
        began = time.process_time()
        done = anyio.run(peer.play, prompts, n)
        return time.process_time() - began, done


def compared(own: Peer, peer: Peer, prompt: str) -> tuple[str, str]:
    """The columns that are equal in the rows of an episode, and the sizes of the peer's and of ours."""
    (our_rows, our_reward), (rows, scored) = (_one_episode(loop, prompt) for loop in (own, peer))
    trained = sum(sum(one.mask) for one in rows)
    if (trained, scored) != (TURNS * REPLY, our_reward):
        raise SystemExit(f"other work: {trained} trained tokens and reward {scored}; expected {TURNS * REPLY} and 1")
    equal = [
        name
        for name in ("tokens", "mask", "logprobs")
        if [getattr(one, name) for one in our_rows] == [getattr(one, name) for one in rows]
    ]
    sizes = [f"{len(each)} of {sum(len(one.tokens) for one in each)}" for each in (rows, our_rows)]
    return ", ".join(equal) or "number of trained tokens", f"{sizes[0]} tokens, ours {sizes[1]}"


def _one_episode(loop: Peer, prompt: str) -> tuple[list[Row], float]:
    restart()
    return loop.rows(anyio.run(loop.play, [prompt], 1))


def measured(name: str, job: Job, rounds: int) -> list[dict[str, float | int | str]]:
    """Rows for the table of ``scripts/bench peers``: single prompts and groups, ours in the process and over HTTP."""
    known = PEERS[name]
    version = importlib.metadata.version(known.distribution)
    rows: list[dict[str, float | int | str]] = []
    with tempfile.TemporaryDirectory() as folder, canned_server(job.canned) as url:
        peer = known.loop(job, Path(folder))
        own, over_http = Ours(job, known.environment_cls), Ours(job, known.environment_cls, url)
        equal, sizes = compared(own, peer, "What is (2 + 2) * 2?")
        loops: dict[str, Peer] = {"peer": peer, "ours": own, "ours over HTTP": over_http}
        times: dict[tuple[str, int], list[float]] = {(loop, n): [] for loop in loops for n in (1, N)}
        for number in range(rounds + 1):  # the first is to warm up
            for loop, n in times:
                prompts = job.prompts(2 * number + (n > 1))[: EPISODES // n]
                cpu, done = played(loops[loop], prompts, n)
                trained = sum(sum(one.mask) for one in loops[loop].rows(done)[0])
                if trained != EPISODES * TURNS * REPLY:
                    raise SystemExit(f"{name}: {loop} trained {trained} tokens; expected {EPISODES * TURNS * REPLY}")
                times[loop, n] += [cpu] * (number > 0)
            print(f"{name}: round {number} of {rounds}", file=sys.stderr)
    targets = {("ours", 1): known.target, ("ours over HTTP", 1): known.target_http}
    for n in (1, N):
        for loop in ("ours", "ours over HTTP"):
            ratios = [theirs / ours for theirs, ours in zip(times["peer", n], times[loop, n], strict=True)]
            least = targets.get((loop, n))
            rows.append(
                {
                    "peer": f"{name} {version}",
                    "n": n,
                    "against": loop,
                    "peer, ms/episode": 1000 * statistics.median(times["peer", n]) / EPISODES,
                    "ours, ms/episode": 1000 * statistics.median(times[loop, n]) / EPISODES,
                    "times ours": statistics.median(ratios),
                    "lowest to highest (rounds)": f"{min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)})",
                    "target": "" if least is None else f"at least {least:g}",
                    "met": "" if least is None else "yes" if statistics.median(ratios) >= least else "NO",
                    "equal": equal,
                    "rows": sizes,
                }
            )
    return rows


_START = (
    "import sys, types; package = sys.modules['scripts'] = types.ModuleType('scripts'); package.__path__ = ['scripts'];"
    " from scripts.benches.peers_in_process import main; main()"
)
"""Runs :func:`main`: a dependency of verl installs a package ``scripts``, which would hide ours."""


def in_process(names: Sequence[str], tokenizer: str, rounds: int) -> list[dict[str, float | int | str]]:
    """The rows of these peers, each measured in its own environment, which is made first.

    Raises:
        SystemExit: no peer could be measured.
    """
    rows: list[dict[str, float | int | str]] = []
    for name in names:
        trainer = PEERS[name].trainer
        try:
            python = environment(trainer, TRAINERS[trainer])
        except SystemExit as failed:  # with the answer of pip
            print(f"{name} was not measured: {failed}", file=sys.stderr)
            continue
        command = [str(python), "-c", _START, name, "--tokenizer", tokenizer, "--rounds", str(rounds)]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: its loop failed with exit code {done.returncode}")
        rows += json.loads(done.stdout.splitlines()[-1])
    if not rows:
        raise SystemExit("no peer was measured")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows of one peer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(
        json.dumps(measured(options.peer, Job.of(options.tokenizer, calls=PEERS[options.peer].calls), options.rounds))
    )
