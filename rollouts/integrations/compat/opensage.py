"""OpenSage's API: a client for an agent and a benchmark, and sessions that generate for a trainer.

Invariant: a session closes its sandbox when its block ends, also after an error or a cancellation. A failed rollout
becomes a sample that the trainer leaves out of the loss, with the reason, never one with an invented prompt and reward
0. Tokens are exact.

An agent is a function from the session's sandbox to an environment for one episode; an agent with its own loop is a
``functools.partial(StrandsEnvironment, …)``. Generation for verl and AReaL is not supported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread

from rollouts.concurrency.boundary import call_foreign
from rollouts.dtypes import Limits, Prompt
from rollouts.environments.base import Environment
from rollouts.errors import ConfigError, EnvironmentFailure, Failure, RewardFailure, TokenMismatchError
from rollouts.integrations.compat.registry import Registry
from rollouts.integrations.slime.convert import check_trainable, to_slime
from rollouts.integrations.slime.plugins import policy_for, removed_sample
from rollouts.integrations.slime.settings import sampling_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.types import Status

__all__ = ["AGENTS", "BENCHMARKS", "AgentFn", "BenchmarkInterface", "Client", "RLSession", "create"]

AgentFn = Callable[[Any], Environment]
"""Creates the environment of one episode from the session's sandbox."""

AGENTS = Registry("agent", "rollouts.agents")
BENCHMARKS = Registry("benchmark", "rollouts.benchmarks")

_REWARD_SECONDS = 300.0


class BenchmarkInterface:
    """The interface of a benchmark, with defaults to override."""

    limits = Limits()
    """The limits of each episode."""

    @staticmethod
    def load(name: str) -> BenchmarkInterface:
        """The benchmark with this name.

        Raises:
            ConfigError: the name is unknown, loading it failed, or it is not a benchmark.
        """
        registered = BENCHMARKS.get(name)
        benchmark = registered() if isinstance(registered, type) else registered
        if not isinstance(benchmark, BenchmarkInterface):
            raise ConfigError.of(f"benchmark {name!r}", benchmark, "a BenchmarkInterface, or a class of one")
        return benchmark

    def sandbox(self) -> Any:
        """A context manager, sync or async, that a session enters; its value is passed to the agent."""
        return contextlib.nullcontext()

    def preprocess_sample(self, sample: Any) -> Any:
        """Transform a trainer's sample before it is played."""
        return sample

    def get_prompt(self, sample: Any) -> Any:
        """The prompt of a sample: text or messages."""
        return sample.prompt

    def postprocess_response(self, response: str) -> str:
        """Transform the response text of the sample; its tokens stay unchanged."""
        return response

    @property
    def has_reward_func(self) -> bool:
        return type(self).reward_func is not BenchmarkInterface.reward_func

    def reward_func(self, args: Any, sample: Any) -> Any:
        """Score a finished sample; sync or async. If not overridden, the environment's rewards count."""
        raise NotImplementedError


def create(agent_name: str, benchmark_name: str) -> Client:
    """A client for an agent and a benchmark, by their names in the registries or as ``package.module:attribute``."""
    return Client(agent_name, benchmark_name)


class Client:
    """An agent and a benchmark.

    Raises:
        ConfigError: one of them is unknown, or loading it failed; a ``ValueError``.
    """

    def __init__(self, agent_name: str, benchmark_name: str) -> None:
        self.agent_name, self.benchmark_name = agent_name, benchmark_name
        self.agent: AgentFn = AGENTS.get(agent_name)
        if not callable(self.agent):
            raise ConfigError.of(f"agent {agent_name!r}", self.agent, "a function of the sandbox")
        self.benchmark = BenchmarkInterface.load(benchmark_name)

    def __repr__(self) -> str:
        return f"<Client of {self.agent_name} on {self.benchmark_name}>"

    def init_session(self) -> RLSession:
        """Create a session, for ``with`` or ``async with``."""
        return RLSession(self)


class RLSession:
    """A sandbox, open for generation within a ``with`` block."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sandbox: Any = None
        self._launched: Any = None
        self._open = False

    def __enter__(self) -> RLSession:
        """Enter the sandbox, a sync context manager; this blocks the thread.

        Raises:
            ConfigError: the sandbox is an async context manager.
        """
        launched = self.client.benchmark.sandbox()
        if not hasattr(launched, "__enter__"):
            raise ConfigError.of("benchmark.sandbox()", launched, "async with: this sandbox is launched asynchronously")
        self.sandbox = launched.__enter__()
        self._launched, self._open = launched, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._launched.__exit__(kind, error, trace)

    async def __aenter__(self) -> RLSession:
        launched = self.client.benchmark.sandbox()
        if hasattr(launched, "__aenter__"):
            self.sandbox = await launched.__aenter__()
        else:
            self.sandbox = await anyio.to_thread.run_sync(launched.__enter__)
        self._launched, self._open = launched, True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        with anyio.CancelScope(shield=True):
            if hasattr(self._launched, "__aexit__"):
                await self._launched.__aexit__(kind, error, trace)
            else:
                await anyio.to_thread.run_sync(self._launched.__exit__, kind, error, trace)

    async def slime_generate(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        """Play the agent for one of slime's samples.

        Args:
            args: slime's namespace: router, checkpoint and concurrency.
            sample: slime's sample; it is filled in place.
            sampling_params: in slime's format.

        Returns:
            The sample, with tokens, mask, logprobs, status, and a reward if the benchmark or the environment has one. A
            failed rollout has ``remove_sample`` set, and the reason in ``metadata["failure"]``.

        Raises:
            ConfigError: the session is not open, or a sampling parameter is unknown.
            TokenMismatchError: a law was broken.
        """
        if not self._open:
            raise ConfigError("RLSession.slime_generate: the session is not open; expected a with block around it")
        sampling = sampling_of(sampling_params)
        policy = policy_for(args)
        try:
            return await self._play(args, sample, sampling, policy)
        except TokenMismatchError:
            raise
        except Exception as error:  # noqa: BLE001 - an exception would end slime's loop and every rollout in flight
            return removed_sample(sample, Failure.of(error))

    async def _play(self, args: Any, sample: Any, sampling: Any, policy: Any) -> Any:
        benchmark = self.client.benchmark
        sample = await call_foreign(EnvironmentFailure, "preprocess_sample", benchmark.preprocess_sample, sample)
        text = await call_foreign(EnvironmentFailure, "get_prompt", benchmark.get_prompt, sample)
        prompt = Prompt(
            text,
            label=sample.label,
            metadata=sample.metadata or {},
            group_index=sample.group_index,
            index=sample.index,
        )
        played = await agent_rollout_to_sample(
            prompt,
            environment_cls=functools.partial(self.client.agent, self.sandbox),
            endpoint=policy.endpoint,
            tokenizer=args.hf_checkpoint,
            sampling=sampling,
            policy=policy,
            limits=benchmark.limits,
        )
        if played.status is Status.FAILED:
            return removed_sample(sample, played.failure)
        check_trainable(played)
        record = to_slime(played, template=sample, scored=False)
        record.response = benchmark.postprocess_response(record.response)
        if benchmark.has_reward_func:
            record.reward = await call_foreign(
                RewardFailure, "reward_func", benchmark.reward_func, args, record, seconds=_REWARD_SECONDS
            )
        sample.__dict__.update(record.__dict__)
        return sample

    async def verl_generate(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("verl_generate: planned, as in OpenSage")

    async def areal_generate(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("areal_generate: not here; generate_rollout_batch returns samples for any trainer")
