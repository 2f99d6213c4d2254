"""The settings in slime's ``args``, parsed once and checked.

Invariant: every :class:`Settings` instance is supported; an unsupported flag raises an error with its name. Flags of
the launch override the recipe: sizes, sampling, filter and reward.

Our own keys come through slime's ``--custom-config-path``; :data:`OWN_KEYS` lists them.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Endpoint, SamplingParams, json_object
from rollouts.errors import ConfigError
from rollouts.integrations.slime.extras import Replay
from rollouts.integrations.slime.records import family
from rollouts.renderer.tokenizer import declared_vocab_size, load_tokenizer, vocab_size_of

__all__ = [
    "NO_GROUP_RM",
    "OWN_KEYS",
    "RECIPE_VARIABLE",
    "EvalSet",
    "Settings",
    "load_function",
    "sampling_of",
    "stop_ids_of_params",
]

RECIPE_VARIABLE = "ROLLOUTS_RECIPE"

OWN_KEYS: Mapping[str, str] = {
    "rollouts_recipe": "recipe: a file, or file.py:function, or package.module.function",
    "rollouts_recipe_options": "keyword arguments for the recipe, as a mapping",
    "rollouts_over_sampling_factor": "groups in flight while a batch fills, as a multiple of the batch; 1.0 by default",
    "rollouts_in_flight": "most rollouts that run at once, by default those of all groups in flight",
    "rollouts_carry_over": "true: groups left over by a batch serve the next one, with tokens of older weights",
    "rollouts_fully_async": "true: carry over, and continue to generate between calls, while the trainer works",
    "rollouts_max_staleness": "most policy versions that a trained token may be old, with any kind of carry-over",
    "rollouts_max_attempts": "attempts at a rollout before its group fails",
    "rollouts_request_seconds": "deadline of one request; by default time for the longest reply at 5 tokens a second,"
    " at least 3600",
    "rollouts_rollout_seconds": "deadline of an attempt at a rollout; by default the recipe's, without one 4 times that"
    " of a request",
    "rollouts_reward_seconds": "deadline of a reward; by default the recipe's, without one 3600",
    "rollouts_patience": "groups in a row that may be dropped or fail before the call raises; by default 8 batches, at"
    " least 64",
    "rollouts_teacher_url": "URL of a teacher's /generate, whose logprobs each sample gets, for --use-opd",
    "rollouts_recipe_filter": "true: the recipe's filter drops groups; without it only the launch's filter does",
    "rollouts_inner_data_source_path": "the class that reads prompts for CheckpointedDataSource; default: slime's own",
}

_SLOWEST = 5
"""Tokens a second of a reply on a busy engine.

slime has no deadline for a request (slime 0.3.1, utils/http_utils.py: init_http_client).
"""
_NOT_SAMPLING = {
    "skip_special_tokens",
    "no_stop_trim",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "custom_params",
}
"""Keys of slime's sampling parameters that ours lack: stop ids and the request for the sets of ``top_p`` go to the
policy, the others concern text."""

OPD_REWARD = "slime.rollout.on_policy_distillation.reward_func"
_TEACHER = (
    "a source of the teacher's logprobs with --use-opd: rollouts_teacher_url, or --custom-reward-post-process-path"
    f" slime.rollout.on_policy_distillation.post_process_rewards with --custom-rm-path {OPD_REWARD}"
)
NO_GROUP_RM = "off with an evaluation: its rollouts are scored one by one"
"""The expected value of ``--group-rm`` in an evaluation."""
_USING_LOGPROBS = ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics")
_REWARD_PROCESSING = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")


@attrs.frozen
class EvalSet:
    """One data set of an evaluation."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str | None
    multimodal_keys: Mapping[str, str] | None
    """The column of each kind of media: slime's own data set reads such rows."""
    n_samples: int
    params: Mapping[str, Any]
    """slime's sampling parameters, as a custom generate function gets them."""
    sampling: SamplingParams
    """The same for our policy; stop ids and the text of a reply are read from ``params``."""
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any]
    source: Any
    """slime's own entry, for its other attributes."""


@attrs.frozen
class VocabSizeOf:
    """Reads the number of ids of a model: an id beyond them would crash an engine."""

    model: str

    def __call__(self) -> int:
        declared = declared_vocab_size(self.model)
        return vocab_size_of(load_tokenizer(self.model)) if declared is None else declared


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of the rollouts of one trainer."""

    batch_size: int
    n_samples_per_prompt: int
    over_sampling_factor: float
    in_flight: int | None
    """``None`` for the recipe's."""
    wave: int
    """Groups that one request to the data source asks for: slime's ``--over-sampling-batch-size``."""
    endpoint: Endpoint
    at_most: int
    """Requests in flight at once."""
    recipe: str | None
    recipe_options: Mapping[str, Any]
    custom_generate: str | None
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any]
    """``--apply-chat-template-kwargs``: variables of the chat template."""
    params: Mapping[str, Any]
    """slime's sampling parameters, as a custom generate function gets them."""
    keeps_session: bool
    """Whether samples get the routing key of their requests."""
    max_context: int | None
    """The most tokens of a rollout of one reply, prompt included."""
    replay: Replay
    """The data of each completion that the trainer needs beyond tokens and logprobs."""
    endpoints: Mapping[str, Endpoint]
    """The routers of all models of the launch, by name; for judges and other agents of a recipe."""
    teacher_url: str | None
    """Where the logprobs of a teacher are requested for each rollout."""
    seed: int | None
    """With deterministic inference, the sampling seed of the first rollout of each group; the next one has the next."""
    scored_by_slime: bool
    """Whether the launch names a reward: ``--custom-rm-path`` or ``--rm-type``."""
    custom_rm: str | None
    group_rm: bool
    reward_key: str | None
    reward_is_processed: bool
    """Whether a function of the launch turns rewards into numbers after the rollouts, so that any reward is valid."""
    needs_logprobs: bool
    """Whether the trainer uses the logprobs of the rollouts (slime 0.3.1, backends/megatron_utils/loss.py)."""
    buffer_filter: str | None
    """slime's ``--buffer-filter-path``, which its data source has, too."""
    filter_path: str | None
    recipe_filter: bool
    """Whether the recipe's filter acts where the launch names none."""
    sample_hooks: tuple[str, ...]
    sample_filter: str | None
    all_samples_process: str | None
    mask_earlier_versions: bool
    carry_over: bool
    """Whether a batch may contain tokens of older weights, from groups that the last one left over."""
    partial_rollout: bool
    """slime's flag: carry over, and call a generate function again with a sample that it returned as aborted."""
    fully_async: bool
    max_staleness: int | None
    """``None`` for no bound on the age of carried tokens."""
    max_attempts: int | None
    rollout_seconds: float | None
    """``None`` for the recipe's deadline."""
    reward_seconds: float | None
    """``None`` for the recipe's deadline."""
    patience: int | None
    eval_sets: tuple[EvalSet, ...]
    eval_max_prompt_len: int | None
    """Longer prompts of an evaluation, in tokens, are left out."""
    eval_reward_key: str | None
    whole_prompts: bool
    """Whether an evaluation leaves out all rollouts of a prompt of which one failed, for ``--log-passrate``."""

    @property
    def vocab_size(self) -> VocabSizeOf:
        """The vocabulary of the launch's model, for its policy."""
        return VocabSizeOf(self.endpoint.model)

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """Parse slime's namespace.

        Raises:
            ConfigError: a flag is missing, or its value is not supported.
        """

        def get(name: str, default: Any = None) -> Any:
            value = getattr(args, name, None)
            return default if value is None else value

        _refuse(args, get)
        batch_size = _required(args, "rollout_batch_size")
        refill = get("over_sampling_batch_size", batch_size)
        if refill < batch_size:
            raise ConfigError.of("args.over_sampling_batch_size", refill, f"at least rollout_batch_size, {batch_size}")
        fully_async = bool(get("rollouts_fully_async", False))
        partial_rollout = bool(get("partial_rollout", False))
        carry_over = fully_async or partial_rollout or bool(get("rollouts_carry_over", False))
        params = _slime_params(args)
        sampling = sampling_of(params)
        seed = get("rollout_seed", 42) if get("sglang_enable_deterministic_inference", False) else None
        recipe = get("rollouts_recipe") or os.environ.get(RECIPE_VARIABLE) or None
        eval_sets = tuple(_eval_set(args, entry) for entry in get("eval_datasets", ()))
        longest = max([sampling.max_new_tokens, *(entry.sampling.max_new_tokens for entry in eval_sets)])
        request_seconds = _seconds(get, "rollouts_request_seconds", max(3600.0, longest / _SLOWEST))
        endpoint = Endpoint(
            model=str(_required(args, "hf_checkpoint")),
            base_url=_urls(args),
            sampling=sampling,
            request_seconds=request_seconds,
        )
        return cls(
            batch_size=batch_size,
            n_samples_per_prompt=get("n_samples_per_prompt", 1),
            over_sampling_factor=get("rollouts_over_sampling_factor", refill / batch_size),
            in_flight=_in_flight(get("rollouts_in_flight")),
            wave=refill,
            endpoint=endpoint,
            at_most=get("sglang_server_concurrency", 512) * _engines(get),
            recipe=recipe,
            recipe_options=dict(get("rollouts_recipe_options", {})),
            custom_generate=get("custom_generate_function_path"),
            apply_chat_template=bool(get("apply_chat_template", False)),
            template_kwargs=_template_kwargs(get("apply_chat_template_kwargs", {})),
            params=params,
            keeps_session=_keeps_session(get),
            max_context=get("rollout_max_context_len") if family().bounds_single_turns else None,
            replay=Replay.of(args),
            endpoints=_endpoints(get("sglang_model_routers", {})),
            teacher_url=get("rollouts_teacher_url"),
            seed=seed,
            scored_by_slime=get("custom_rm_path") is not None or bool(get("rm_type")),
            custom_rm=get("custom_rm_path"),
            group_rm=bool(get("group_rm", False)),
            reward_key=get("reward_key"),
            reward_is_processed=any(get(name) is not None for name in _REWARD_PROCESSING),
            needs_logprobs=any(get(name, False) for name in _USING_LOGPROBS),
            buffer_filter=get("buffer_filter_path"),
            filter_path=get("dynamic_sampling_filter_path"),
            recipe_filter=bool(get("rollouts_recipe_filter", False)),
            sample_hooks=tuple(get("rollout_sample_hook_path", ())),
            sample_filter=get("rollout_sample_filter_path"),
            all_samples_process=get("rollout_all_samples_process_path"),
            mask_earlier_versions=bool(get("mask_offpolicy_in_partial_rollout", False)),
            carry_over=carry_over,
            partial_rollout=partial_rollout,
            fully_async=fully_async,
            max_staleness=_max_staleness(get("rollouts_max_staleness"), carry_over),
            max_attempts=get("rollouts_max_attempts"),
            rollout_seconds=_seconds(get, "rollouts_rollout_seconds", None if recipe else 4 * request_seconds),
            reward_seconds=_seconds(get, "rollouts_reward_seconds", None if recipe else 3600.0),
            patience=get("rollouts_patience"),
            eval_sets=eval_sets,
            eval_max_prompt_len=get("eval_max_prompt_len"),
            eval_reward_key=get("eval_reward_key") or get("reward_key"),
            whole_prompts=bool(get("log_passrate", False)),
        )


def load_function(path: str) -> Any:
    """Import the object at a dotted path, as slime names its plug-ins.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of("path of a function", path, f"package.module.function ({error})") from error


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """Convert SGLang's sampling parameters to ours.

    Raises:
        ConfigError: an unknown parameter.
    """
    names = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "sampling_seed"}
    names |= {"min_new_tokens", "repetition_penalty"}
    unknown = params.keys() - names - _NOT_SAMPLING
    if unknown:
        raise ConfigError.of("sampling_params", sorted(unknown), f"some of {', '.join(sorted(names))}")
    values = {name: params[name] for name in names & params.keys() if params[name] is not None}
    if "sampling_seed" in values:
        values["seed"] = values.pop("sampling_seed")
    return SamplingParams(**values)


def stop_ids_of_params(params: Mapping[str, Any]) -> tuple[int, ...]:
    """The stop ids in slime's sampling parameters: one, several or none."""
    ids = params.get("stop_token_ids")
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _refuse(args: Any, get: Any) -> None:
    """Raise for flags whose effect would be wrong later, and for keys that have none."""
    for name, value in vars(args).items():
        if name.startswith("rollouts_") and name not in OWN_KEYS:
            (closest,) = difflib.get_close_matches(name, OWN_KEYS, 1, 0.0)
            raise ConfigError.of(f"args.{name}", value, f"no such key; the closest is {closest}")
    refusals = {
        "opd_type": (_lacks_teacher(get), _TEACHER),
        "dynamic_sampling_filter_path": (
            get("custom_rm_path") == OPD_REWARD and get("dynamic_sampling_filter_path") is not None,
            f"none with {OPD_REWARD}: the reward is a reply of the teacher, and all rewards become 0",
        ),
        "group_rm": (
            bool(get("group_rm", False) and get("eval_datasets") and get("eval_interval") is not None),
            NO_GROUP_RM,
        ),
        "buffer_filter_path": (
            bool(get("buffer_filter_path") and get("rollouts_fully_async", False)),
            "none with rollouts_fully_async: its groups never wait between calls",
        ),
        "rollout_temperature": (get("rollout_temperature", 1.0) <= 0, "a number > 0"),
        "rollout_global_dataset": (get("rollout_global_dataset", True) is False, "on"),
        "colocate": (
            bool(get("colocate", False) and get("rollouts_fully_async", False)),
            "off with rollouts_fully_async: engines that generate between calls cannot release their memory",
        ),
    }
    refusals |= {name: (bool(get(name)), expected) for name, expected in family().refused.items()}
    for name, (refused, expected) in refusals.items():
        if refused:
            raise ConfigError.of(f"args.{name}", getattr(args, name), expected)


def _keeps_session(get: Any) -> bool:
    flag = family().router_policy
    return flag is None or get(flag) in ("consistent_hashing", "manual")


def _lacks_teacher(get: Any) -> bool:
    """Whether the trainer expects logprobs of a teacher that no part of the launch sets."""
    sources = ("custom_generate_function_path", "rollout_sample_hook_path", "rollouts_teacher_url", *_REWARD_PROCESSING)
    return bool(get("use_opd", False)) and get("opd_type") == "sglang" and not any(get(name) for name in sources)


def _template_kwargs(value: Any) -> Mapping[str, Any]:
    """slime parses the flag; a value of the YAML may be JSON text."""
    mapping = json_object(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise ConfigError.of("args.apply_chat_template_kwargs", value, "a mapping of variables of the chat template")
    return mapping


def _in_flight(count: Any) -> int | None:
    if count is not None and not is_int(count, 1):
        raise ConfigError.of("args.rollouts_in_flight", count, "an integer >= 1")
    return count


def _max_staleness(bound: Any, carry_over: bool) -> int | None:
    """The effective bound: 0 without carry-over."""
    if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
        raise ConfigError.of("args.rollouts_max_staleness", bound, "an integer >= 0")
    if not carry_over and bound:
        raise ConfigError.of(
            "args.rollouts_max_staleness",
            bound,
            "0, or rollouts_carry_over, rollouts_fully_async or --partial-rollout with it: else no older tokens exist",
        )
    return bound if carry_over else 0


def _seconds(get: Any, name: str, default: Any) -> Any:
    """A deadline: of the launch, or else the default."""
    value = get(name, default)
    if value is not None and (not is_number(value) or value <= 0):
        raise ConfigError.of(f"args.{name}", value, "a number > 0")
    return value


def _required(args: Any, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        raise ConfigError.of(f"args.{name}", None, "the value of slime's argument")
    return value


def _urls(args: Any) -> str:
    return _url(_required(args, "sglang_router_ip"), _required(args, "sglang_router_port"))


def _url(host: Any, port: Any) -> str:
    name = str(host)
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{name}:{port}"


def _endpoints(routers: Any) -> Mapping[str, Endpoint]:
    """An endpoint for each router that the launch names.

    Raises:
        ConfigError: not a mapping of names to host and port.
    """
    try:
        return {str(name): Endpoint(model=str(name), base_url=_url(*place)) for name, place in routers.items()}
    except (AttributeError, TypeError) as error:
        raise ConfigError.of("args.sglang_model_routers", routers, f"host and port of each name ({error})") from error


def _engines(get: Any) -> int:
    """The number of inference engines, at least one (slime 0.3.1, utils/http_utils.py: get_rollout_num_engines)."""
    counted = get("rollout_num_engines") or get("rollout_num_gpus", 1) // max(1, get("rollout_num_gpus_per_engine", 1))
    return max(1, int(counted))


def _slime_params(args: Any, entry: Any = None) -> dict[str, Any]:
    """slime's sampling parameters (slime 0.3.1, rollout/sglang_rollout.py: GenerateState).

    Args:
        args: slime's namespace.
        entry: a data set of an evaluation; its values come first.
    """

    def get(name: str, default: Any = None, *, flag: str | None = None) -> Any:
        value = getattr(entry, name, None)
        if value is None:
            value = getattr(args, flag or f"rollout_{name}", None)
        return default if value is None else value

    params = {
        "temperature": get("temperature", 1.0),
        "top_p": get("top_p", 1.0),
        "top_k": get("top_k", -1),
        "max_new_tokens": get("max_response_len", 1024),
        "stop": get("stop"),
        "stop_token_ids": get("stop_token_ids"),
        "skip_special_tokens": get("skip_special_tokens", False),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if entry is None and params["top_p"] != 1.0 and family().replays_top_p:
        params["custom_params"] = {"return_top_p_token_ids": True}
    if entry is not None:
        params["no_stop_trim"] = get("no_stop_trim", True, flag="")
        for name in ("repetition_penalty", "min_new_tokens"):
            value = get(name, flag=f"eval_{name}" if name == "min_new_tokens" else "")
            if value is not None:
                params[name] = value
    return params


def _eval_set(args: Any, entry: Any) -> EvalSet:
    def get(name: str, default: Any) -> Any:
        value = getattr(entry, name, None)
        value = getattr(args, name, None) if value is None else value
        return default if value is None else value

    multimodal_keys = get("multimodal_keys", None)
    if multimodal_keys and (expected := family().refused.get("multimodal_keys")):
        raise ConfigError.of(f"eval data set {entry.name}.multimodal_keys", multimodal_keys, expected)
    params = _slime_params(args, entry)
    return EvalSet(
        name=entry.name,
        path=entry.path,
        input_key=get("input_key", "input"),
        label_key=get("label_key", None),
        metadata_key=get("metadata_key", "metadata"),
        tool_key=getattr(entry, "tool_key", None),
        multimodal_keys=multimodal_keys,
        n_samples=getattr(entry, "n_samples_per_eval_prompt", None) or 1,
        params=params,
        sampling=sampling_of(params),
        apply_chat_template=bool(get("apply_chat_template", False)),
        chat_template_kwargs=dict(get("apply_chat_template_kwargs", {})),
        source=entry,
    )
