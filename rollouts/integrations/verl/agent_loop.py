"""Our agent as an AgentLoop of verl 0.9, and a policy over its servers.

Invariant: no row is longer than ``rollout.prompt_length`` and ``rollout.response_length``, because verl v0 pads to them
and cuts nothing (verl 0.9.1, experimental/agent_loop/agent_loop.py: AgentLoopWorker._agent_loop_postprocess): the
policy ends the rollout before that.

verl is imported in the functions that need it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import SamplingParams, TokenColumn
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from rollouts.integrations.episodes import Episodes, prompt_of
from rollouts.integrations.replies import Reply, TrainerPolicy
from rollouts.integrations.verl.rows import to_outputs

__all__ = ["RolloutsLoop", "ServerManagerPolicy", "plain", "sampling_of"]

_OF_VERL = {"processor", "hf_model_type", "dataset_cls", "data_config", "tools"}
"""Arguments of an AgentLoop that this one does not need."""


class ServerManagerPolicy(TrainerPolicy):
    """A policy over ``server_manager.generate``, for one rollout: it keeps the rollout within verl's lengths.

    verl resumes an aborted generation itself, and reports the oldest and the newest weights of a reply
    (verl 0.9.1, workers/rollout/llm_server.py: FullyAsyncLLMServerClient); its tokens get the oldest. ``version`` is
    that of replies whose server names none.
    """

    trainer = "verl"
    unsupported = ("stop", "seed", "min_new_tokens", "min_p")

    def __init__(
        self, server_manager: Any, prompt_length: int, response_length: int, version: int | None = None
    ) -> None:
        self.server_manager, self.version = server_manager, version
        self.prompt_length, self.response_length = prompt_length, response_length
        self.max_context = prompt_length + response_length
        self._limits: dict[str, int] = {}
        """The maximum length of the row of each session."""

    def budget(self, tokens: TokenColumn, sampling: SamplingParams, session: str) -> int:
        if not self._limits:
            if len(tokens) > self.prompt_length:
                raise ContextOverflow(f"the prompt has {len(tokens)} tokens; prompt_length is {self.prompt_length}")
            self._limits[session] = len(tokens) + self.response_length
        # A later branch begins with the history of the rollout: a long prompt of a row of V1, which pads nothing.
        limit = self._limits.setdefault(session, self.prompt_length + self.response_length)
        if len(tokens) >= limit:
            raise ContextOverflow(f"{len(tokens)} tokens leave no room for a reply within {limit}")
        return min(sampling.max_new_tokens, limit - len(tokens))

    async def sample(
        self, tokens: TokenColumn, sampling: SamplingParams, stop_token_ids: tuple[int, ...], session: str
    ) -> Reply:
        params = {name: getattr(sampling, name) for name in _SAMPLED}
        output = await self.server_manager.generate(
            request_id=session,
            prompt_ids=tokens.tolist(),
            sampling_params={
                **params,
                "max_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(stop_token_ids),
                "logprobs": True,
            },
        )
        if output.stop_reason in ("abort", "aborted"):
            ids, reason = output.token_ids, output.stop_reason
            raise EndpointUnavailable(f"verl returned {len(ids)} tokens, stop reason {reason!r}")
        fields = output.extra_fields
        known = (fields.get("min_global_steps"), fields.get("global_steps"), self.version)
        version = next((number for number in known if number is not None), None)
        if version is None:
            expected = "the number of its weights; set version: in the configuration of the loop"
            raise EndpointRefused(f"verl's server: got no global_steps; expected {expected}")
        return Reply(
            tokens=output.token_ids,
            logprobs=output.log_probs,
            stopped_by=output.stop_reason,
            version=int(version),
            cached_tokens=fields.get("num_cached_tokens") or 0,
        )


class RolloutsLoop:
    """An AgentLoop of verl, made by hydra for each rollout; the YAML of ``agent_loop_config_path`` names it.

    Its keyword arguments are those of :meth:`Episodes.of`, and ``version`` (see :class:`ServerManagerPolicy`). Label
    and metadata of the prompt are ``reward_model.ground_truth`` and ``extra_info`` of verl's row.
    """

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **options: Any) -> None:
        options = {name: plain(value) for name, value in options.items() if name not in _OF_VERL | {"name"}}
        self.rollout = trainer_config.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.version: int | None = options.pop("version", None)
        self.episodes = _cached(tokenizer, options)

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """Play one rollout.

        Returns:
            verl's ``AgentLoopOutput``; a list of them, one for each branch, where the rollout forks (V1 only).

        Raises:
            GenerateFailure: the rollout failed in all attempts. verl V1 then marks its group as failed
                (verl 0.9.1, trainer/ppo/v1/agent_loop_tq.py: AgentLoopWorkerTQ._run_prompt); v0 ends the step.
            ConfigError: it forks, and verl is not V1.
        """
        version = row.get("global_steps") if self.version is None else self.version
        lengths = self.rollout.prompt_length, self.rollout.response_length
        reward_model = row.get("reward_model") or {}
        metadata = {**(row.get("extra_info") or {}), "data_source": row.get("data_source")}
        prompt = prompt_of(row["raw_prompt"], label=reward_model.get("ground_truth"), metadata=metadata)
        sampling = sampling_of(sampling_params, self.rollout.response_length)
        rows = await self.episodes.play(
            prompt,
            lambda: ServerManagerPolicy(self.server_manager, *lengths, version),
            self.tokenizer,
            sampling,
            scored=False,
        )
        outputs = to_outputs(rows, scored=False, temperature=sampling.temperature)
        if len(outputs) > 1 and "session_id" not in row:
            raise ConfigError.of("history", "fork", '"append" or "error": only verl V1 takes several rows a rollout')
        return outputs if len(outputs) > 1 else outputs[0]


def sampling_of(sampling_params: Mapping[str, Any], response_length: int) -> SamplingParams:
    """The sampling parameters of verl's configuration, which are those of a validation in a validation."""
    values = {name: sampling_params[name] for name in _SAMPLED if sampling_params.get(name) is not None}
    return SamplingParams(max_new_tokens=response_length, **values)


_SAMPLED = ("temperature", "top_p", "top_k", "repetition_penalty")


def plain(value: Any) -> Any:
    """A value of the YAML as plain data: hydra passes its own containers."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return value


_EPISODES: weakref.WeakKeyDictionary[Any, dict[str, Episodes]] = weakref.WeakKeyDictionary()


def _cached(tokenizer: Any, options: Mapping[str, Any]) -> Episodes:
    """The episodes of a configuration: verl makes a loop for each rollout, and a recipe is built once.

    (verl 0.9.1, experimental/agent_loop/agent_loop.py: AgentLoopWorker._run_agent_loop)
    """
    of_tokenizer = _EPISODES.setdefault(tokenizer, {})
    key = repr(sorted(options.items()))
    if key not in of_tokenizer:
        of_tokenizer[key] = Episodes.of(**options)
    return of_tokenizer[key]
