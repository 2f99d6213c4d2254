"""The settings in slime's ``args``, parsed once and checked.

Invariant: every :class:`Settings` instance is supported; an unsupported flag raises an error with its name. Flags of
the launch override the recipe: sizes, sampling, filter and reward.

Our own keys come through slime's ``--custom-config-path``; :data:`OWN_KEYS` lists them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Endpoint, SamplingParams, json_object
from rollouts.errors import ConfigError
from rollouts.http.address import url_of
from rollouts.integrations.slime.extras import Replay
from rollouts.integrations.slime.records import family
from rollouts.renderer.tokenizer import declared_vocab_size, load_tokenizer, vocab_size_of

__all__ = [
    "ADVANTAGES",
    "NEEDS_ADVANTAGES",
    "NO_GROUP_RM",
    "OWN_KEYS",
    "RECIPE_VARIABLE",
    "EvalSet",
    "Settings",
    "VocabSizeOf",
    "sampling_of",
    "stop_ids_of_params",
]

RECIPE_VARIABLE = "ROLLOUTS_RECIPE"
ADVANTAGES = "rollouts.integrations.slime.sample_advantages"
NEEDS_ADVANTAGES = (
    "Sample.advantages, with --rollout-function-path rollouts.integrations.slime.generate_rollout_batch and without"
    " --use-opd: the column of a teacher carries them"
)

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
_NOT_SAMPLING = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}
_NOT_SAMPLING |= {"stop_token_ids", "custom_params"}
"""Keys of slime's sampling parameters that ours lack: stop ids and the request for the sets of ``top_p`` go to the
policy, the others concern text."""

OPD_REWARD = "slime.rollout.on_policy_distillation.reward_func"
_OPD_SCORES = "slime.rollout.on_policy_distillation.post_process_rewards"
_TEACHER = (
    "a source of the teacher's logprobs with --use-opd: rollouts_teacher_url, rollouts_recipe_filter with a filter of"
    f" rewards.scored_by_teachers, or --custom-reward-post-process-path {_OPD_SCORES} with --custom-rm-path"
    f" {OPD_REWARD}"
)
NO_GROUP_RM = "off with an evaluation: its rollouts are scored one by one"
"""The expected value of ``--group-rm`` in an evaluation."""
_USING_LOGPROBS = ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics")
_REWARD_PROCESSING = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
_TEACHERS = (
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "rollouts_teacher_url",
    "rollouts_recipe_filter",
    *_REWARD_PROCESSING,
)
"""Flags of functions that can set the logprobs of a teacher."""


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
    sampling: SamplingParams
    """The same for our policy; stop ids and the text of a reply are read from ``params``."""
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any]
    source: Any
    """slime's own entry, for its other attributes."""

    def function(self, field: str) -> str | None:
        """The path of a function that it names, by the field of slime's sample."""
        name = "custom_generate_function_path" if field == "generate_function_path" else field
        path: str | None = getattr(self.source, name, None)
        return path

    def check(self, *, recipe: bool, custom_generate: str | None) -> None:
        """Refuse what this package's own rollouts would ignore; a custom generate function gets it.

        Raises:
            ConfigError: it names the field.
        """
        function = self.function("generate_function_path")
        given: tuple[str, Any, str] | None = None
        if recipe and function is not None:
            given = "custom_generate_function_path", function, "none with a recipe, which plays every prompt"
        elif recipe and self.apply_chat_template and self.chat_template_kwargs:
            expected = "nothing with a recipe: its prompts are messages"
            given = "apply_chat_template_kwargs", self.chat_template_kwargs, expected
        elif not (function or custom_generate or self.params["no_stop_trim"]):
            given = "no_stop_trim", False, "true: the response keeps the text that ends it, as its tokens do"
        if given is not None:
            raise ConfigError.of(f"eval data set {self.name}.{given[0]}", *given[1:])


@attrs.frozen
class VocabSizeOf:
    """Reads the number of ids of a model: an id beyond them would crash an engine."""

    model: str

    def __call__(self) -> int:
        declared = declared_vocab_size(self.model)
        return vocab_size_of(load_tokenizer(self.model)) if declared is None else declared


@attrs.frozen
class _Flag:
    """The flag of a field; ``None`` counts as not given."""

    name: str
    default: Any = None
    expected: str = ""
    good: Callable[[Any], bool] = lambda value: True

    def read(self, args: Any) -> Any:
        value = getattr(args, self.name, None)
        value = self.default if value is None else value
        if not self.good(value):
            raise ConfigError.of(f"args.{self.name}", value, self.expected)
        return value


_REQUIRED = ("the value of slime's argument", lambda value: value is not None)
_SECONDS = ("a number > 0", lambda value: value is None or (is_number(value) and value > 0))


def _flag(
    name: str, default: Any = None, expected: tuple[str, Callable[[Any], bool]] | None = None, **more: Any
) -> Any:
    return attrs.field(metadata={"flag": _Flag(name, default, *(expected or ()))}, **more)


def _integer(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer >= {least}", lambda value: value is None or is_int(value, least)


def _template_kwargs(value: Any) -> Mapping[str, Any]:
    """slime parses the flag; a value of the YAML may be JSON text."""
    mapping = json_object(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise ConfigError.of("args.apply_chat_template_kwargs", value, "a mapping of variables of the chat template")
    return mapping


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of the rollouts of one trainer; ``None`` leaves a number to the recipe."""

    batch_size: int = _flag("rollout_batch_size", None, _REQUIRED)
    n_samples_per_prompt: int = _flag("n_samples_per_prompt", 1)
    over_sampling_factor: float
    in_flight: int | None = _flag("rollouts_in_flight", None, _integer(1))
    wave: int
    """Groups that one request to the data source asks for: slime's ``--over-sampling-batch-size``."""
    endpoint: Endpoint
    at_most: int
    """Requests in flight at once."""
    recipe: str | None
    recipe_options: Mapping[str, Any] = _flag("rollouts_recipe_options", {}, converter=dict)
    custom_generate: str | None = _flag("custom_generate_function_path")
    apply_chat_template: bool = _flag("apply_chat_template", False)
    template_kwargs: Mapping[str, Any] = _flag("apply_chat_template_kwargs", {}, converter=_template_kwargs)
    """``--apply-chat-template-kwargs``: variables of the chat template."""
    params: Mapping[str, Any]
    """slime's sampling parameters, as a custom generate function gets them."""
    keeps_session: bool
    """Whether samples get the routing key of their requests."""
    max_context: int | None
    """The most tokens of a rollout of one reply, prompt included."""
    replay: Replay
    endpoints: Mapping[str, Endpoint]
    """The routers of all models of the launch, by name; for judges and other agents of a recipe."""
    teacher_url: str | None = _flag("rollouts_teacher_url")
    kl_weights: str = _flag("opd_reward_weight_mode", "student_p")
    seed: int | None
    """With deterministic inference, the sampling seed of the first rollout of each group; the next one has the next."""
    scored_by_slime: bool
    """Whether the launch names a reward: ``--custom-rm-path`` or ``--rm-type``."""
    custom_rm: str | None = _flag("custom_rm_path")
    group_rm: bool = _flag("group_rm", False)
    reward_key: str | None = _flag("reward_key")
    reward_is_processed: bool
    """Whether a function of the launch turns rewards into numbers after the rollouts, so that any reward is valid."""
    needs_logprobs: bool
    """Whether the trainer uses the logprobs of the rollouts (slime 0.3.1, backends/megatron_utils/loss.py)."""
    buffer_filter: str | None = _flag("buffer_filter_path")
    filter_path: str | None = _flag("dynamic_sampling_filter_path")
    recipe_filter: bool = _flag("rollouts_recipe_filter", False)
    sample_hooks: tuple[str, ...] = _flag("rollout_sample_hook_path", (), converter=tuple)
    sample_filter: str | None = _flag("rollout_sample_filter_path")
    all_samples_process: str | None = _flag("rollout_all_samples_process_path")
    mask_earlier_versions: bool = _flag("mask_offpolicy_in_partial_rollout", False)
    carry_over: bool
    """Whether a batch may contain tokens of older weights, from groups that the last one left over."""
    partial_rollout: bool = _flag("partial_rollout", False)
    """Carry over, and call a generate function again with a sample that it returned as aborted."""
    fully_async: bool = _flag("rollouts_fully_async", False)
    max_staleness: int | None = _flag("rollouts_max_staleness", None, _integer(0))
    """``None`` for no bound on the age of carried tokens."""
    max_attempts: int | None = _flag("rollouts_max_attempts")
    rollout_seconds: float | None = _flag("rollouts_rollout_seconds", None, _SECONDS)
    reward_seconds: float | None = _flag("rollouts_reward_seconds", None, _SECONDS)
    patience: int | None = _flag("rollouts_patience")
    custom_advantage: str | None = _flag("custom_advantage_function_path")
    eval_sets: tuple[EvalSet, ...]
    eval_max_prompt_len: int | None = _flag("eval_max_prompt_len")
    """Longer prompts of an evaluation, in tokens, are left out."""
    eval_reward_key: str | None
    whole_prompts: bool = _flag("log_passrate", False)
    """Whether an evaluation leaves out all rollouts of a prompt of which one failed."""

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """Parse slime's namespace.

        Raises:
            ConfigError: a flag is missing, or its value is not supported.
        """

        def get(name: str, default: Any = None) -> Any:
            return _Flag(name, default).read(args)

        _refuse(args, get)
        flags = {field.name: field.metadata["flag"] for field in attrs.fields(cls) if field.metadata}
        values = {name: flag.read(args) for name, flag in flags.items()}
        batch_size, wave = values["batch_size"], get("over_sampling_batch_size", values["batch_size"])
        if wave < batch_size:
            raise ConfigError.of("args.over_sampling_batch_size", wave, f"at least rollout_batch_size, {batch_size}")
        carrying = ("rollouts_fully_async", "partial_rollout", "rollouts_carry_over")
        carry_over = any(get(name, False) for name in carrying)
        if not carry_over and values["max_staleness"]:
            expected = "0, or rollouts_carry_over, rollouts_fully_async or --partial-rollout: else no token is older"
            raise ConfigError.of("args.rollouts_max_staleness", values["max_staleness"], expected)
        params = _slime_params(args)
        sampling = sampling_of(params)
        recipe = get("rollouts_recipe") or os.environ.get(RECIPE_VARIABLE) or None
        eval_sets = tuple(_eval_set(args, entry) for entry in get("eval_datasets", ()))
        longest = max([sampling.max_new_tokens, *(entry.sampling.max_new_tokens for entry in eval_sets)])
        request_seconds = _Flag("rollouts_request_seconds", max(3600.0, longest / _SLOWEST), *_SECONDS).read(args)
        endpoint = Endpoint(
            model=str(_Flag("hf_checkpoint", None, *_REQUIRED).read(args)),
            base_url=url_of(*(_Flag(f"sglang_router_{part}", None, *_REQUIRED).read(args) for part in ("ip", "port"))),
            sampling=sampling,
            request_seconds=request_seconds,
        )
        if recipe is None:
            values["rollout_seconds"] = values["rollout_seconds"] or 4 * request_seconds
            values["reward_seconds"] = values["reward_seconds"] or 3600.0
        return cls(
            **values | {"max_staleness": values["max_staleness"] if carry_over else 0},
            over_sampling_factor=get("rollouts_over_sampling_factor", wave / batch_size),
            wave=wave,
            endpoint=endpoint,
            at_most=get("sglang_server_concurrency", 512) * _engines(get),
            recipe=recipe,
            params=params,
            keeps_session=(flag := family().router_policy) is None or get(flag) in ("consistent_hashing", "manual"),
            max_context=get("rollout_max_context_len") if family().bounds_single_turns else None,
            replay=Replay.of(args),
            endpoints=_endpoints(get("sglang_model_routers", {})),
            seed=get("rollout_seed", 42) if get("sglang_enable_deterministic_inference", False) else None,
            scored_by_slime=get("custom_rm_path") is not None or bool(get("rm_type")),
            reward_is_processed=any(get(name) is not None for name in _REWARD_PROCESSING),
            needs_logprobs=any(get(name, False) for name in _USING_LOGPROBS),
            carry_over=carry_over,
            eval_sets=eval_sets,
            eval_reward_key=get("eval_reward_key") or get("reward_key"),
        )


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
    fully_async = get("rollouts_fully_async", False)
    distils, scores = get("use_opd", False) and get("opd_type") == "sglang", get("custom_reward_post_process_path")
    by_token = get("custom_advantage_function_path") == ADVANTAGES
    refusals = {
        "opd_type": (distils and not any(map(get, _TEACHERS)), _TEACHER),
        "dynamic_sampling_filter_path": (
            get("custom_rm_path") == OPD_REWARD and get("dynamic_sampling_filter_path") is not None,
            f"none with {OPD_REWARD}: the reward is a reply of the teacher, and all rewards become 0",
        ),
        "group_rm": (
            get("group_rm", False) and get("eval_datasets") and get("eval_interval") is not None,
            NO_GROUP_RM,
        ),
        "buffer_filter_path": (
            fully_async and get("buffer_filter_path"),
            "none with rollouts_fully_async: its groups never wait between calls",
        ),
        "use_opd": (by_token and get("use_opd"), NEEDS_ADVANTAGES),
        "custom_reward_post_process_path": (by_token and scores == _OPD_SCORES, NEEDS_ADVANTAGES),
        "rollout_temperature": (
            (temperature := get("rollout_temperature", 1.0)) <= 0 or (get("rollouts_teacher_url") and temperature != 1),
            "a number > 0; 1 with rollouts_teacher_url: servers report logprobs of prompts before the temperature",
        ),
        "rollout_global_dataset": (get("rollout_global_dataset", True) is False, "on"),
        "colocate": (
            fully_async and get("colocate", False),
            "off with rollouts_fully_async: engines that generate between calls cannot release their memory",
        ),
        **{name: (get(name), expected) for name, expected in family().refused.items()},
    }
    for name, (refused, expected) in refusals.items():
        if refused:
            raise ConfigError.of(f"args.{name}", getattr(args, name), expected)


def _endpoints(routers: Any) -> Mapping[str, Endpoint]:
    """An endpoint for each router that the launch names."""
    try:
        return {str(name): Endpoint(model=str(name), base_url=url_of(*place)) for name, place in routers.items()}
    except (AttributeError, TypeError) as error:
        raise ConfigError.of("args.sglang_model_routers", routers, f"host and port of each name ({error})") from error


def _engines(get: Any) -> int:
    """The number of inference engines, at least one (slime 0.3.1, utils/http_utils.py: get_rollout_num_engines)."""
    counted = get("rollout_num_engines") or get("rollout_num_gpus", 1) // max(1, get("rollout_num_gpus_per_engine", 1))
    return max(1, int(counted))


def _first(default: Any, *places: tuple[Any, str]) -> Any:
    """The first value of these attributes that is not ``None``."""
    found = (getattr(owner, name, None) for owner, name in places)
    return next((value for value in found if value is not None), default)


def _slime_params(args: Any, entry: Any = None) -> dict[str, Any]:
    """slime's sampling parameters; the values of a data set of an evaluation come first.

    (slime 0.3.1, rollout/sglang_rollout.py: GenerateState, eval_rollout_single_dataset)
    """

    def get(name: str, default: Any = None, flag: str | None = None) -> Any:
        return _first(default, (entry, name), (args, flag or f"rollout_{name}"))

    params = {
        "temperature": get("temperature", 1.0),
        "top_p": get("top_p", 1.0),
        "top_k": get("top_k", -1),
        "max_new_tokens": get("max_response_len", 1024),
        "stop": get("stop"),
        "stop_token_ids": get("stop_token_ids"),
        "skip_special_tokens": get("skip_special_tokens", False),
        "no_stop_trim": entry is None or get("no_stop_trim", True),
        "spaces_between_special_tokens": False,
    }
    if entry is None:
        replays = params["top_p"] != 1.0 and family().replays_top_p
        return params | ({"custom_params": {"return_top_p_token_ids": True}} if replays else {})
    further = {
        "repetition_penalty": get("repetition_penalty"),
        "min_new_tokens": get("min_new_tokens", None, "eval_min_new_tokens"),
    }
    return params | {name: value for name, value in further.items() if value is not None}


def _eval_set(args: Any, entry: Any) -> EvalSet:
    def get(name: str, default: Any = None) -> Any:
        return _first(default, (entry, name), (args, name))

    multimodal_keys = get("multimodal_keys")
    if multimodal_keys and (expected := family().refused.get("multimodal_keys")):
        raise ConfigError.of(f"eval data set {entry.name}.multimodal_keys", multimodal_keys, expected)
    params = _slime_params(args, entry)
    return EvalSet(
        name=entry.name,
        path=entry.path,
        input_key=get("input_key", "input"),
        label_key=get("label_key"),
        metadata_key=get("metadata_key", "metadata"),
        tool_key=getattr(entry, "tool_key", None),
        multimodal_keys=multimodal_keys,
        n_samples=getattr(entry, "n_samples_per_eval_prompt", None) or 1,
        params=params,
        sampling=sampling_of(params),
        apply_chat_template=get("apply_chat_template", False),
        chat_template_kwargs=dict(get("apply_chat_template_kwargs", {})),
        source=entry,
    )
