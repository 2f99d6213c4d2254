"""OpenSage's shape over ours: a client for an agent and a benchmark, and sessions that generate for a trainer.

Invariant: what a session launches is closed when its block ends, however it ends; a rollout that failed comes back as a
sample that the trainer leaves out of the loss, with its reason, never as one with a made-up prompt and reward 0. Tokens
are the exact ones.

An agent is a function of the session's sandbox that makes an environment for one episode (an agent's loop of one's own
is one too: ``functools.partial(StrandsEnvironment, …)``). Generation for verl and AReaL is not here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread

from rollouts.compat.registry import Registry
from rollouts.concurrency.boundary import call_foreign
from rollouts.dtypes import Limits, Prompt
from rollouts.environments.base import Environment
from rollouts.errors import ConfigError, EnvironmentFailure, Failure, RewardFailure, TokenMismatchError
from rollouts.integrations.slime.convert import check_trainable, to_slime
from rollouts.integrations.slime.plugins import policy_for, removed_sample
from rollouts.integrations.slime.settings import sampling_of
from rollouts.training.agent_integration import agent_rollout_to_sample
from rollouts.training.types import Status

__all__ = ["AGENTS", "BENCHMARKS", "AgentFn", "BenchmarkInterface", "Client", "RLSession", "create"]

AgentFn = Callable[[Any], Environment]
"""Makes an environment for one episode, given the session's sandbox."""

AGENTS = Registry("agent", "rollouts.agents")
BENCHMARKS = Registry("benchmark", "rollouts.benchmarks")

_REWARD_SECONDS = 300.0


class BenchmarkInterface:
    """What a benchmark brings. Override what differs."""

    limits = Limits()
    """Of each episode."""

    @staticmethod
    def load(name: str) -> BenchmarkInterface:
        """The benchmark of this name.

        Raises:
            ConfigError: there is none, it is unavailable, or it is something else.
        """
        found = BENCHMARKS.get(name)
        made = found() if isinstance(found, type) else found
        if not isinstance(made, BenchmarkInterface):
            raise ConfigError.of(f"benchmark {name!r}", made, "a BenchmarkInterface, or a class of one")
        return made

    def sandbox(self) -> Any:
        """What a session launches for its agent: a context manager, sync or async; its value goes to the agent."""
        return contextlib.nullcontext()

    def preprocess_sample(self, sample: Any) -> Any:
        """A trainer's sample before it is played."""
        return sample

    def get_prompt(self, sample: Any) -> Any:
        """What the agent is asked: text or messages."""
        return sample.prompt

    def postprocess_response(self, response: str) -> str:
        """The text of the response that goes on the sample; its tokens stay as they are."""
        return response

    @property
    def has_reward_func(self) -> bool:
        return type(self).reward_func is not BenchmarkInterface.reward_func

    def reward_func(self, args: Any, sample: Any) -> Any:
        """Score a finished sample; sync or async. Without one, the environment's rewards are taken."""
        raise NotImplementedError


def create(agent_name: str, benchmark_name: str) -> Client:
    """A client for an agent and a benchmark, by their names in the registries or as ``package.module:attribute``."""
    return Client(agent_name, benchmark_name)


class Client:
    """An agent and a benchmark.

    Raises:
        ConfigError: one of them is not there, or unavailable; a ``ValueError``.
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
        """A session, for ``with`` and for ``async with``."""
        return RLSession(self)


class RLSession:
    """A sandbox, and what is generated in it while the block lasts."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sandbox: Any = None
        self._launched: Any = None
        self._open = False

    def __enter__(self) -> RLSession:
        """Launch a sandbox that is a plain context manager; this blocks as long as that does.

        Raises:
            ConfigError: the sandbox is an async one.
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
            sampling_params: as slime hands them over.

        Returns:
            The sample, with tokens, mask, logprobs, status, and a reward where the benchmark or the environment has
            one. A rollout that failed has ``remove_sample`` set, and why in ``metadata["failure"]``.

        Raises:
            ConfigError: the session is not open, or the sampling is not known.
            TokenMismatchError: a law was broken.
        """
        if not self._open:
            raise ConfigError("RLSession.slime_generate: the session is not open; expected a with block around it")
        sampling = sampling_of(sampling_params)
        policy = policy_for(args)
        try:
            return await self._played(args, sample, sampling, policy)
        except TokenMismatchError:
            raise
        except Exception as error:  # noqa: BLE001 - slime's loop would lose every rollout in flight to it
            return removed_sample(sample, Failure.of(error))

    async def _played(self, args: Any, sample: Any, sampling: Any, policy: Any) -> Any:
        benchmark = self.client.benchmark
        sample = await call_foreign(EnvironmentFailure, "preprocess_sample", benchmark.preprocess_sample, sample)
        asked = await call_foreign(EnvironmentFailure, "get_prompt", benchmark.get_prompt, sample)
        prompt = Prompt(
            asked,
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
        made = to_slime(played, template=sample, scored=False)
        made.response = benchmark.postprocess_response(made.response)
        if benchmark.has_reward_func:
            made.reward = await call_foreign(
                RewardFailure, "reward_func", benchmark.reward_func, args, made, seconds=_REWARD_SECONDS
            )
        sample.__dict__.update(made.__dict__)
        return sample

    async def verl_generate(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("verl_generate: planned, as in OpenSage")

    async def areal_generate(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("areal_generate: not here; generate_rollout_batch gives samples to any trainer")
